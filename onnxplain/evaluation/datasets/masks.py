"""Masks of objects, brought from the picture to the model's input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from onnxplain.errors import ImageError
from onnxplain.evaluation.datasets.samples import MaskFile, Sample
from onnxplain.runtime.preprocessing import Geometry, Picture

__all__ = ["VOID", "mask_values", "read_masks"]

VOID = 255
"""Pixels of this value count neither as an object nor as background, unless they are the object."""

_NOT_COUNTED = 2  # in the 8-bit picture of a mask, which has no -1
_SHOWN = 8  # values that a message lists


def read_masks(sample: Sample, picture: Picture) -> list[NDArray[np.int8] | None]:
    """The masks of a sample's objects in the model's input frame.

    A mask is resized and cropped as the picture was, each pixel taking the value of the nearest.

    Args:
        sample: The sample.
        picture: The sample's picture as it was prepared.

    Returns:
        For each object int8 [H, W] at the model's input size, or None where it has no mask:
        1 the object, 0 not the object, -1 not counted (void pixels, and what is outside the
        picture). The crop may have left no pixel of the object.

    Raises:
        ImageError: A mask cannot be read, has another size than the upright picture, does not tell
            which of its values is the object, or has no background where that is not said.
    """
    read: dict[Path, NDArray[Any]] = {}
    masks: list[NDArray[np.int8] | None] = []
    for thing in sample.objects:
        if thing.mask is None:
            masks.append(None)
            continue
        if isinstance(thing.mask, MaskFile):
            path = thing.mask.path
            if path not in read:
                read[path] = mask_values(path)
            _check_size(read[path].shape, picture, str(path))
            states = _states(read[path], thing.mask)
        else:
            _check_size(thing.mask.shape, picture, f"a mask of {sample.name}")
            states = thing.mask.astype(np.uint8)
        masks.append(_project(states, picture.geometry))
    return masks


def mask_values(path: Path) -> NDArray[Any]:
    """The pixel values of a mask as they are stored; of a palette the indices, not the colours.

    Args:
        path: A picture of one channel, 1 to 16 bits deep, or of equal channels.

    Returns:
        Unsigned integers [height, width].

    Raises:
        ImageError: The file is missing, damaged, or a picture of another kind.
    """
    try:
        with Image.open(path) as image:
            return _values(ImageOps.exif_transpose(image), path)
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{path}: no such mask file") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ImageError(f"{path}: the mask cannot be read ({reason})") from None


def _values(image: Image.Image, path: Path) -> NDArray[Any]:
    values = np.asarray(image)
    if image.mode.startswith("I"):  # Pillow's 16-bit greys
        if values.min() < 0 or values.max() > 65535:
            raise ImageError(f"{path}: mask values beyond 0..65535; save it with 8 or 16 bits")
        return values.astype(np.uint16)
    if image.mode not in ("1", "L", "P", "LA", "PA", "RGB", "RGBA"):
        raise ImageError(f"{path}: a mask of mode {image.mode}; expected grey or palette values")
    values = values.astype(np.uint8)
    if image.mode.endswith("A"):
        if (values[..., -1] != 255).any():
            raise ImageError(f"{path}: a mask with transparent pixels; save it without alpha")
        values = values[..., :-1]
    if values.ndim == 2:
        return values
    if (values != values[..., :1]).any():
        raise ImageError(
            f"{path}: a mask in colours, whose classes are not known; save it with one channel, "
            "grey or palette values"
        )
    return values[..., 0]


def _check_size(shape: tuple[int, ...], picture: Picture, name: str) -> None:
    height, width = shape
    if (width, height) == picture.image.size:
        return
    turned = ""
    if picture.path is not None:
        with Image.open(picture.path) as stored:
            if stored.size == (width, height):
                turned = " once it is turned as its EXIF orientation says; turn the mask too"
    raise ImageError(
        f"{name}: {width}x{height} pixels, but the picture has "
        f"{picture.image.width}x{picture.image.height}{turned}"
    )


def _states(values: NDArray[Any], mask: MaskFile) -> NDArray[np.uint8]:
    """uint8 [height, width]: 1 the object, 0 not, `_NOT_COUNTED`."""
    value = _only_value(values, mask.path) if mask.value is None else mask.value
    states = np.zeros(values.shape, np.uint8)
    states[values == VOID] = _NOT_COUNTED
    states[values == value] = 1
    return states


def _only_value(values: NDArray[Any], path: Path) -> int:
    """The one value that is neither 0 nor void; `VOID` itself if there is no other."""
    found = np.unique(values).tolist()
    kept = [value for value in found if value not in (0, VOID)] or [VOID]
    if len(kept) == 1:
        if 0 not in found:
            raise ImageError(
                f"{path}: a mask without background, of value {kept[0]} alone, says nothing of "
                "where the object is; expected 0 beside it; mend the mask or leave it out"
            )
        return kept[0]
    more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
    raise ImageError(
        f"{path}: a mask of values {', '.join(map(str, kept[:_SHOWN]))}{more}, and which is the "
        "object is not said; name it in the CSV's mask_value column or name all values in a file "
        "(--mask-labels)"
    )


def _project(states: NDArray[np.uint8], geometry: Geometry) -> NDArray[np.int8]:
    image = Image.fromarray(states)
    if geometry.resized != geometry.original:
        height, width = geometry.resized
        image = image.resize((width, height), Image.Resampling.NEAREST)
    canvas = Image.new("L", geometry.size[::-1], _NOT_COUNTED)
    canvas.paste(image, (-geometry.offset[1], -geometry.offset[0]))
    projected = np.array(canvas, np.int8)
    projected[projected == _NOT_COUNTED] = -1
    return projected
