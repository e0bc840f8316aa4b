"""Opening pictures: whatever Pillow reads, upright and RGB, or an error that names the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onnxplain.errors import ImageError

__all__ = ["load_picture"]

_ORIENTATION_TAG = 0x0112
_ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def load_picture(source: Any) -> tuple[Image.Image, Path | None]:
    """Opens a picture and makes it upright RGB.

    EXIF orientation is applied. Transparent pixels are laid on white, since what their colour
    channels hold is not defined. 16-bit grey is scaled to 8 bit. Of an animation the first frame
    is taken.

    Args:
        source: A path, a PIL image, or a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4].

    Returns:
        The RGB image and the path it came from, if any.

    Raises:
        ImageError: The file is missing, empty, truncated, too large, or not a picture; the array
            is not one of the above.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        return _open(path), path
    if isinstance(source, Image.Image):
        name = str(getattr(source, "filename", "") or "")
        return _upright_rgb(source, name or "the picture"), Path(name) if name else None
    if isinstance(source, np.ndarray):
        return _from_array(source), None
    raise ImageError(
        f"cannot explain a {type(source).__name__}; give a path, a PIL image or a uint8 array"
    )


def _open(path: Path) -> Image.Image:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ImageError(f"{path}: the file is empty")
            with _identify(file, path) as image:
                return _upright_rgb(image, str(path))
    except ImageError:
        raise
    except IsADirectoryError:
        raise ImageError(f"{path}: a folder, not a picture") from None
    except FileNotFoundError:
        raise ImageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ImageError(f"{path}: cannot be read ({_first_line(error)})") from None


def _identify(file: BinaryIO, path: Path) -> Image.Image:
    try:
        return Image.open(file)
    except Image.DecompressionBombError as error:
        raise ImageError(f"{path}: too large ({_first_line(error)})") from None
    except Exception:  # plugins raise whatever a damaged header leads them to
        raise ImageError(f"{path}: not a picture, or of a kind that Pillow cannot read") from None


def _upright_rgb(image: Image.Image, name: str) -> Image.Image:
    try:
        image.load()
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name}: too large ({_first_line(error)})") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise ImageError(f"{name}: damaged or truncated ({_first_line(error)})") from None
    if 0 in image.size:
        raise ImageError(f"{name}: the picture has no pixels")
    rgb = _rgb(image, name)
    try:
        turn = _ORIENTATIONS.get(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # damaged EXIF says nothing about the pixels; show them as they are stored
        turn = None
    return rgb if turn is None else rgb.transpose(turn)


def _rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode.startswith("I"):  # Pillow's 16-bit greys; it scales wide PGM files to the same
        wide = np.asarray(image).astype(np.int64)
        if wide.min() < 0 or wide.max() > 65535:
            raise ImageError(f"{name}: 32-bit pixels have no known range; convert to 8 bit")
        return Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ImageError(f"{name}: 32-bit float pixels have no known range; convert to 8 bit")
    try:
        if image.mode == "RGB" and not image.has_transparency_data:
            return image
        if image.has_transparency_data or image.mode in ("La", "RGBa"):
            if image.mode == "La":
                image = image.convert("LA")
            clear = image.convert("RGBA")
            white = Image.new("RGBA", clear.size, "white")
            return Image.alpha_composite(white, clear).convert("RGB")
        return image.convert("RGB")
    except (ValueError, OSError) as error:
        raise ImageError(f"{name}: cannot be made RGB ({_first_line(error)})") from None


def _from_array(array: NDArray[Any]) -> Image.Image:
    if array.dtype != np.uint8:
        raise ImageError(
            f"a picture array of {array.dtype}, expected uint8 [H, W, 3]; normalised pixel values "
            "are float32 [B, 3, H, W]"
        )
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim != 2 and not (array.ndim == 3 and array.shape[2] in (3, 4)):
        raise ImageError(f"a picture array of shape {array.shape}, expected [H, W, 3]")
    if 0 in array.shape:
        raise ImageError(f"a picture array of shape {array.shape} has no pixels")
    return _upright_rgb(Image.fromarray(np.ascontiguousarray(array)), "the picture")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
