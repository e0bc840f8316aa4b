"""Removed pixels filled in from their neighbours, so that a removal draws no shape of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solveh_banded
from scipy.ndimage import correlate
from threadpoolctl import ThreadpoolController

__all__ = ["impute"]

_DIRECT, _DIAGONAL = 1 / 6, 1 / 12
_NEIGHBOURS = np.array(
    [
        [_DIAGONAL, _DIRECT, _DIAGONAL],
        [_DIRECT, 0, _DIRECT],
        [_DIAGONAL, _DIRECT, _DIAGONAL],
    ]
)
# The neighbours that come later in reading order: (rows down, columns right, weight).
_LATER = ((0, 1, _DIRECT), (1, -1, _DIAGONAL), (1, 0, _DIRECT), (1, 1, _DIAGONAL))

# More threads gain nothing on blocks this small, and where cores are shared they took 20 to 30
# times as long.
_BLAS = ThreadpoolController()


def impute(
    pixels: NDArray[np.float32],
    removed: NDArray[np.bool_],
    rng: np.random.Generator,
    *,
    noise: float | NDArray[np.float64] = 0.01,
) -> NDArray[np.float32]:
    """Noisy linear imputation: every removed pixel becomes the mean of its eight neighbours.

    The mean weighs direct neighbours with 1/6 and diagonal ones with 1/12; at the border the
    weights of the neighbours that exist are scaled to the sum 1. Neighbours that are removed as
    well are unknowns too: the pixels of a hole are the solution of a system of linear equations,
    one per channel. Gaussian noise is then added to the removed pixels and to no other; nothing is
    clipped.

    The memory that it takes grows with the removed pixels times the shorter side of the picture,
    the time with the square of that side: made for the inputs of models, not for photographs.

    Source: Rong et al., *A Consistent and Efficient Evaluation Strategy for Attribution Methods*
    (ROAD), ICML 2022. Its published experiments impute pixels in 0..1, before the normalisation of
    the model's input.

    Args:
        pixels: [3, H, W], in whatever unit.
        removed: [H, W], True where a pixel is to be replaced. Where all are, no neighbour is known,
            and each becomes the mean of its channel.
        rng: draws the noise: channel by channel, the removed pixels in reading order.
        noise: standard deviation in the unit of `pixels`, one or [3, 1] for the channels. The
            paper's 0.01 is for pixels in 0..1.

    Returns:
        [3, H, W], a copy.
    """
    filled = pixels.copy()
    if removed.all():
        solution = np.broadcast_to(pixels.mean((1, 2), np.float64, keepdims=True), pixels.shape)
    elif removed.any():
        solution = _linear(pixels, removed)
    else:
        return filled
    draws = rng.standard_normal((len(pixels), int(removed.sum())))
    filled[:, removed] = solution[:, removed] + noise * draws
    return filled


@_BLAS.wrap(limits=1, user_api="blas")
def _linear(pixels: NDArray[np.float32], removed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The picture with the removed pixels solved for, [3, H, W]."""
    rows, columns = removed.shape
    if columns > rows:  # the band is as wide as a row
        return _linear(pixels.transpose(0, 2, 1), removed.T).transpose(0, 2, 1)
    number = np.where(removed, np.cumsum(removed).reshape(removed.shape) - 1, -1)
    pairs = []
    for down, right, weight in _LATER:
        left = max(0, -right)
        one = number[: rows - down, left : columns - max(0, right)]
        other = number[down:, left + right : columns + min(0, right)]
        both = (one >= 0) & (other >= 0)
        pairs.append((one[both], other[both] - one[both], weight))
    width = max(distance.max(initial=0) for _, distance, _ in pairs)
    # Symmetric, and positive definite because every hole has a known neighbour. Its banded Cholesky
    # decomposition takes about half the time of a general sparse one.
    band = np.zeros((width + 1, int(removed.sum())), order="F")
    band[0] = correlate(np.ones(removed.shape), _NEIGHBOURS, mode="constant")[removed]
    for one, distance, weight in pairs:
        band[distance, one] = -weight
    solution = np.where(removed, 0, pixels.astype(np.float64))
    known = correlate(solution, _NEIGHBOURS[None], mode="constant")[:, removed]
    solution[:, removed] = solveh_banded(
        band, known.T, overwrite_ab=True, lower=True, check_finite=False
    ).T
    return solution
