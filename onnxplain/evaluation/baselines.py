"""Maps that know nothing of the model: what a method must beat."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["center_gaussian", "random_map", "seed_of"]

_WIDTH = 0.25  # standard deviation of the Gaussian by the side of the picture


def seed_of(seed: int, sample: str) -> list[int]:
    """What a picture's random values are drawn from: the evaluation's seed and the picture's name.

    So a picture has the same random map and noise whichever others are evaluated with it.
    """
    digest = hashlib.sha256(sample.encode("utf-8", "surrogatepass")).digest()
    return [seed, int.from_bytes(digest[:8], "big")]


def random_map(seed: list[int], grid: tuple[int, int]) -> NDArray[np.float32]:
    """Independent uniform values in 0..1, float32 [h, w] on the patch grid."""
    return np.random.default_rng(seed).random(grid, dtype=np.float32)


def center_gaussian(grid: tuple[int, int]) -> NDArray[np.float32]:
    """A Gaussian in the middle of the picture, float32 [h, w] in 0..1 on the patch grid.

    Its standard deviations are a quarter of the height and of the width; its values are those at
    the centres of the patches. Photographers put things in the middle, so it is hard to beat.
    """
    rows, columns = (
        np.exp(-0.5 * (((np.arange(count) + 0.5) / count - 0.5) / _WIDTH) ** 2) for count in grid
    )
    return np.outer(rows, columns).astype(np.float32)
