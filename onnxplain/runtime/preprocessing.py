"""From a picture to normalised pixel values as timm's evaluation transform makes them, and back.

`preprocess` gives the model's input and a `Geometry` that knows where each of its pixels lies on
the original picture.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onnxplain.contract import ImageInput
from onnxplain.errors import ContractError, ImageError, InputError
from onnxplain.runtime.pictures import load_picture

__all__ = ["Geometry", "Picture", "denormalise", "prepare", "prepare_picture", "preprocess"]

Floats = NDArray[np.floating[Any]]

_RESAMPLING = {mode.name.lower(): mode for mode in Image.Resampling}
_CROP_MODES = ("center", "squash", "border")

# The shorter side is resized to a fixed length, so a long thin picture grows without bound.
_LARGEST_RESIZED = 2**26


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How a picture became a model input: resized, then cropped (or padded).

    All pairs are (height, width) or (top, left) in pixels. `offset` is the crop's corner on the
    resized picture and negative where the picture was padded.
    """

    original: tuple[int, int]
    resized: tuple[int, int]
    offset: tuple[int, int]
    size: tuple[int, int]

    @classmethod
    def identity(cls, size: tuple[int, int]) -> Geometry:
        """That of a picture which already has the model's size."""
        return cls(original=size, resized=size, offset=(0, 0), size=size)

    def project(self, heatmap: Floats) -> tuple[slice, slice, Floats]:
        """Carries a map at model input size back onto the original picture.

        Args:
            heatmap: [H, W] at the model's input size.

        Returns:
            Rows and columns of the original whose pixels' centres lie in what the model saw, and
            the map there, bilinear between the centres of the model's pixels.
        """
        rows, y = self._seen(0)
        columns, x = self._seen(1)
        return rows, columns, _sample(np.ascontiguousarray(_sample(heatmap.T, x).T), y)

    def _seen(self, axis: int) -> tuple[slice, Floats]:
        """The part of the original's axis that the model saw, and where on the input it lies."""
        scale = self.resized[axis] / self.original[axis]
        at: Floats = (np.arange(self.original[axis]) + 0.5) * scale - self.offset[axis]
        inside = np.flatnonzero((at >= 0) & (at <= self.size[axis]))
        if not len(inside):  # fewer original pixels than the crop: the one in the middle covers it
            inside = np.array([np.abs(at - self.size[axis] / 2).argmin()])
        part = slice(int(inside[0]), int(inside[-1]) + 1)
        return part, np.asarray(at[part] - 0.5)


def _sample(values: Floats, at: Floats) -> Floats:
    """The rows of `values` at fractional positions, linear in between, the edge rows beyond."""
    at = at.clip(0, len(values) - 1)
    low = np.floor(at).astype(np.intp)
    high = np.minimum(low + 1, len(values) - 1)
    share = (at - low).astype(values.dtype)[:, None]
    return np.asarray(values[low] * (1 - share) + values[high] * share)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture as the user knows it, upright and RGB, and the name of its file."""

    image: Image.Image
    geometry: Geometry
    path: Path | None = None

    @property
    def rgb(self) -> NDArray[np.uint8]:
        """A new uint8 array [H, W, 3]; made on demand, since only overlays need it."""
        return np.array(self.image)


def preprocess(
    image: Image.Image, spec: ImageInput, *, name: str = "the picture"
) -> tuple[NDArray[np.float32], Geometry]:
    """timm's evaluation transform: resize, crop, scale to 0..1, normalise.

    Pixel for pixel what `timm.data.create_transform(is_training=False)` gives for the same
    settings: Pillow's antialiased resize, torchvision's rounding of sizes and offsets.

    Args:
        image: An RGB picture.
        spec: The model's input.
        name: The picture's name, for messages.

    Returns:
        float32 [3, H, W] and the geometry of the way there.

    Raises:
        ContractError: An interpolation, crop mode or layout that this version does not know.
        ImageError: The picture is so elongated that its resized form would not fit in memory.
    """
    if spec.interpolation not in _RESAMPLING:
        raise ContractError(
            f"unknown interpolation {spec.interpolation!r}; one of {', '.join(_RESAMPLING)}"
        )
    geometry = _geometry(image, spec)
    resized = geometry.resized
    if resized[0] * resized[1] > _LARGEST_RESIZED:
        raise ImageError(
            f"{name}: {image.width}x{image.height} pixels is too elongated; resizing would make it "
            f"{resized[1]}x{resized[0]}"
        )
    if resized != geometry.original:
        image = image.resize((resized[1], resized[0]), _RESAMPLING[spec.interpolation])
    top, left = geometry.offset
    fill = tuple(round(255 * v) for v in spec.mean) if spec.crop_mode == "border" else (0, 0, 0)
    canvas = Image.new("RGB", (spec.size[1], spec.size[0]), fill)
    canvas.paste(image, (-left, -top))
    pixels = np.asarray(canvas).transpose(2, 0, 1).astype(np.float32)
    if spec.color_order == "BGR":
        pixels = pixels[::-1]
    pixels = pixels / np.float32(255)
    pixels -= _per_channel(spec.mean)
    pixels /= _per_channel(spec.std)
    return pixels, geometry


def _geometry(image: Image.Image, spec: ImageInput) -> Geometry:
    original = (image.height, image.width)
    resized = _resized(original, spec)
    top, left = (
        _offset(have, want, spec.crop_rounding)
        for have, want in zip(resized, spec.size, strict=True)
    )
    return Geometry(original=original, resized=resized, offset=(top, left), size=spec.size)


def _resized(original: tuple[int, int], spec: ImageInput) -> tuple[int, int]:
    height, width = original
    target = tuple(math.floor(side / spec.crop_pct) for side in spec.size)
    if spec.crop_mode not in _CROP_MODES:
        raise ContractError(
            f"unknown crop mode {spec.crop_mode!r}; one of {', '.join(_CROP_MODES)}"
        )
    if spec.crop_mode == "squash":
        return target[0], target[1]
    if spec.crop_mode == "center" and target[0] == target[1]:
        # torchvision's Resize(int) truncates the longer side where timm's own resize rounds it.
        short = min(height, width)
        return int(target[0] * height / short), int(target[0] * width / short)
    pick = max if spec.crop_mode == "border" else min
    ratio = pick(height / target[0], width / target[1])
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def _offset(have: int, want: int, rounding: str) -> int:
    """Where a centred crop of `want` pixels starts; negative where `have` is padded to `want`."""
    if want > have:
        return -((want - have) // 2)
    return (have - want) // 2 if rounding == "down" else round((have - want) / 2)


def _per_channel(values: tuple[float, float, float]) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)[:, None, None]


def denormalise(pixels: NDArray[np.float32], spec: ImageInput) -> NDArray[np.uint8]:
    """Normalised pixel values [3, H, W] as a uint8 RGB picture [H, W, 3], clipped to 0..255."""
    values = pixels * _per_channel(spec.std) + _per_channel(spec.mean)
    if spec.color_order == "BGR":
        values = values[::-1]
    return np.rint(values.clip(0, 1) * 255).astype(np.uint8).transpose(1, 2, 0)


Prepared = tuple[NDArray[Any], Picture]


def prepare(images: Any, spec: ImageInput) -> list[Prepared]:
    """Pictures as model inputs, along with the originals.

    Each is float32 [3, H, W], or uint8 [H, W, 3] where the graph itself does the preprocessing.

    Args:
        images: One picture as `load_picture` takes it, a list of these, a uint8 array
            [B, H, W, 3], or a float array [B, 3, H, W] of normalised pixel values.
        spec: The model's input.

    Raises:
        InputError: Nothing is given, or an array of a wrong shape, type or with NaN.
        ImageError: A picture cannot be read.
    """
    if isinstance(images, np.ndarray):
        if np.issubdtype(images.dtype, np.floating):
            if spec.layout == "HWC":
                raise InputError(
                    "normalised pixel values; this file takes pictures as they are, uint8 [H, W, 3]"
                )
            return [_prepared_pixels(pixels, spec) for pixels in _checked(images, spec)]
        images = list(images) if images.ndim == 4 else [images]
    elif isinstance(images, str | os.PathLike | Image.Image):
        images = [images]
    elif not isinstance(images, Iterable) or isinstance(images, Mapping | bytes):
        raise InputError(
            f"cannot explain a {type(images).__name__}; give a path, a PIL image, a uint8 array, "
            "a list of these, or float32 [B, 3, H, W] pixel values"
        )
    given = list(images)
    if not given:
        raise InputError("no pictures given")
    # One that is given several times, for several classes, is decoded and resized once.
    prepared = {
        key: prepare_picture(image, spec) for key, image in {id(i): i for i in given}.items()
    }
    return [prepared[id(image)] for image in given]


def prepare_picture(image: Any, spec: ImageInput) -> Prepared:
    """One picture as `prepare` does it."""
    rgb, path = load_picture(image)
    if spec.layout == "HWC":
        picture = Picture(image=rgb, geometry=_geometry(rgb, spec), path=path)
        return picture.rgb, picture
    pixels, geometry = preprocess(rgb, spec, name=str(path or "the picture"))
    return pixels, Picture(image=rgb, geometry=geometry, path=path)


def _prepared_pixels(pixels: NDArray[np.float32], spec: ImageInput) -> Prepared:
    background = Image.fromarray(denormalise(pixels, spec))
    geometry = Geometry.identity((background.height, background.width))
    return pixels, Picture(image=background, geometry=geometry)


def _checked(pixels: NDArray[Any], spec: ImageInput) -> NDArray[np.float32]:
    height, width = spec.size
    if pixels.ndim == 4 and pixels.shape[1] == 3 and pixels.size and spec.multiple is not None:
        height, width = spec.at(pixels.shape[2:]).size
    if pixels.ndim != 4 or pixels.shape[1:] != (3, height, width) or not len(pixels):
        last = " (which are given to the file channels last)" if spec.layout == "NHWC" else ""
        raise InputError(
            f"pixel values of shape {list(pixels.shape)}, expected [B, 3, {height}, {width}] "
            f"normalised{last}; pictures are uint8 [H, W, 3]"
        )
    with np.errstate(over="ignore"):  # said below
        pixels = pixels.astype(np.float32, copy=False)
    if not np.isfinite(pixels).all():
        raise InputError("the pixel values hold NaN or infinite values")
    return pixels
