"""What is removed from a picture, in which order, and what is put in its place.

Pure functions of arrays. Pixels are normalised, float32 [3, H, W], as the model takes them; an
order is a rank for each pixel or patch, 0 for what goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy.integrate import trapezoid

from onnxplain.contract import ImageInput
from onnxplain.evaluation.imputation import impute
from onnxplain.evaluation.measures import TENTHS

__all__ = [
    "area",
    "blurred",
    "deleted",
    "inserted",
    "patch_of_pixel",
    "patch_values",
    "perturbed",
    "ranks_from_highest",
]

Floats = NDArray[np.float32]
Ranks = NDArray[np.intp]

_BLUR = 16  # the shorter side by the blur's standard deviation
_ROAD_NOISE = 0.01


def ranks_from_highest(values: NDArray[Any], tie_breaker: NDArray[Any]) -> Ranks:
    """The rank of each value, 0 for the highest.

    Args:
        values: Of any shape.
        tie_breaker: Of the same shape; of equal values the one where this is higher comes first,
            and where that is equal too, the one that stands first.

    Returns:
        Each number from 0 to the size less 1 once, in the shape of `values`.
    """
    first = np.argsort(-tie_breaker.reshape(-1), kind="stable")
    order = first[np.argsort(-values.reshape(-1)[first], kind="stable")]
    ranks = np.empty_like(order)
    ranks[order] = np.arange(len(order))
    return ranks.reshape(values.shape)


def perturbed(
    pixels: Floats, ranks: Ranks, fill: str, spec: ImageInput, noise_seed: list[int]
) -> Iterator[Floats]:
    """The picture without its first 10, 20, ..., 90 % of pixels, then without its last.

    Args:
        pixels: [3, H, W].
        ranks: [H, W], 0 for the pixel that is the most relevant.
        fill: What is put in their place, one of `measures.FILLS`.
        spec: The model's input.
        noise_seed: Of the noise of "road", which is the same for every map.

    Yields:
        18 pictures: most relevant first (MoRF), then least relevant first (LeRF). Each may be in
        the memory of the one before.
    """
    count = ranks.size
    ranks = ranks.astype(np.int32)  # half as long to compare
    if fill == "road":
        # The paper's noise is that of pixels in 0..1.
        noise = _ROAD_NOISE / np.array(spec.std)[:, None]

        def imputed(removed: NDArray[np.bool_]) -> Floats:
            return impute(pixels, removed, np.random.default_rng(noise_seed), noise=noise)

        without: Callable[[NDArray[np.bool_]], Floats] = imputed
    else:
        substitute = np.broadcast_to(_substitute(pixels, fill, spec), pixels.shape)
        without = _Replacement(pixels, np.ascontiguousarray(substitute))

    for tenths in TENTHS[1:]:
        yield without(ranks < tenths * count // 10)
    for tenths in TENTHS[1:]:
        yield without(ranks >= count - tenths * count // 10)


class _Replacement:
    """Pictures with some pixels from another one, all in one piece of memory: to get it anew for
    each takes longer than to fill it."""

    def __init__(self, pixels: Floats, substitute: Floats) -> None:
        self._pixels, self._substitute = pixels, substitute
        self._picture = np.empty(pixels.shape, np.float32)

    def __call__(self, replaced: NDArray[np.bool_]) -> Floats:
        self._picture[...] = self._pixels
        mask = replaced.view(np.uint8)
        for substitute, channel in zip(self._substitute, self._picture, strict=True):
            cv2.copyTo(substitute, mask, channel)
        return self._picture


def _substitute(pixels: Floats, fill: str, spec: ImageInput) -> Floats:
    if fill == "blur":
        return blurred(pixels)
    if fill == "mean":
        return pixels.mean(axis=(1, 2), keepdims=True, dtype=np.float64).astype(np.float32)
    black = np.negative(spec.mean) / np.asarray(spec.std)
    return black.astype(np.float32)[:, None, None]


def blurred(pixels: Floats) -> Floats:
    """The picture after a Gaussian filter, its standard deviation a sixteenth of the shorter side.

    OpenCV's GaussianBlur in float32 with its own choice of the kernel's size, reflecting at the
    border without repeating the last pixel (BORDER_REFLECT_101).
    """
    sigma = min(pixels.shape[1:]) / _BLUR
    return np.stack([cv2.GaussianBlur(channel, (0, 0), sigma) for channel in pixels])


def patch_of_pixel(size: tuple[int, int], grid: tuple[int, int], covered: tuple[int, int]) -> Ranks:
    """The patch of each pixel, [H, W] of numbers in reading order of the grid.

    Args:
        size: H and W of the picture.
        grid: Rows and columns of patches.
        covered: Rows and columns of pixels that the grid covers, from the upper left; a strip
            beyond goes with the patches beside it.
    """
    rows, columns = (
        np.minimum(np.arange(side) * count // whole, count - 1)
        for side, count, whole in zip(size, grid, covered, strict=True)
    )
    return rows[:, None] * grid[1] + columns


def patch_values(heatmap: Floats, patches: Ranks) -> NDArray[np.float64]:
    """The mean of a heatmap in each patch, [patches]."""
    flat = patches.reshape(-1)
    sums = np.bincount(flat, heatmap.reshape(-1).astype(np.float64))
    return sums / np.bincount(flat)


def deleted(pixels: Floats, ranks: Ranks, patches: Ranks, steps: int) -> Iterator[Floats]:
    """The picture as its patches become 0 (the mean colour), the first after the first step.

    Args:
        pixels: [3, H, W].
        ranks: [patches], 0 for the patch that goes first.
        patches: [H, W], from `patch_of_pixel`.
        steps: After step k, floor(k patches / steps) are gone.

    Yields:
        `steps` pictures, the last all 0, each in the memory of the one before.
    """
    yield from _replaced(pixels, np.zeros_like(pixels), ranks, patches, steps)


def inserted(pixels: Floats, ranks: Ranks, patches: Ranks, steps: int) -> Iterator[Floats]:
    """The blurred picture as its patches become sharp; arguments as in `deleted`."""
    yield from _replaced(blurred(pixels), pixels, ranks, patches, steps)


def _replaced(
    pixels: Floats, substitute: Floats, ranks: Ranks, patches: Ranks, steps: int
) -> Iterator[Floats]:
    at = ranks[patches].astype(np.int32)
    replacement = _Replacement(pixels, substitute)
    for step in range(1, steps + 1):
        yield replacement(at < step * len(ranks) // steps)


def area(y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Area under curves by the trapezoid rule, over the last axis."""
    return np.asarray(trapezoid(y, x, axis=-1))
