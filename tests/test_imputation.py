"""Noisy linear imputation: removed pixels are the weighted means of their neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxplain.evaluation.imputation import impute

ROUNDED = 2.0**-23  # pixels in 0..1 as float32, and sums of eight of them

WEIGHT = {(i, j): 1 / 6 if 0 in (i, j) else 1 / 12 for i in (-1, 0, 1) for j in (-1, 0, 1)}
del WEIGHT[0, 0]


def linear(pixels: NDArray[np.float32], removed: NDArray[np.bool_]) -> NDArray[np.float32]:
    return impute(pixels, removed, np.random.default_rng(0), noise=0)


def picture(rows: int, columns: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((3, rows, columns), np.float32)


def residual(filled: NDArray[np.float32], removed: NDArray[np.bool_]) -> float:
    """How far a removed pixel is at most from the mean of the neighbours that exist."""
    rows, columns = removed.shape
    worst = 0.0
    for row, column in np.argwhere(removed):
        total, weights = np.zeros(3), 0.0
        for (down, right), weight in WEIGHT.items():
            if 0 <= row + down < rows and 0 <= column + right < columns:
                total += weight * filled[:, row + down, column + right].astype(np.float64)
                weights += weight
        if weights:  # of a picture of one pixel there are none
            worst = max(worst, np.abs(filled[:, row, column] - total / weights).max())
    return worst


def test_one_pixel_is_the_weighted_mean_of_its_neighbours() -> None:
    pixels = np.zeros((3, 3, 3), np.float32)
    pixels[0] = [[12, 6, 0], [24, 99, 0], [36, 18, 48]]
    removed = np.zeros((3, 3), bool)
    removed[1, 1] = True
    # (6 + 24 + 0 + 18) / 6 + (12 + 0 + 36 + 48) / 12
    assert linear(pixels, removed)[:, 1, 1] == pytest.approx([16, 0, 0], rel=ROUNDED)


def test_at_the_border_the_weights_of_what_exists_are_scaled_to_one() -> None:
    pixels = np.zeros((3, 2, 3), np.float32)
    pixels[0] = [[99, 3, 7], [6, 9, 7]]
    removed = np.zeros((2, 3), bool)
    removed[0, 0] = True
    # 1/6, 1/6 and 1/12 over their sum 5/12
    assert linear(pixels, removed)[0, 0, 0] == pytest.approx(
        3 * 0.4 + 6 * 0.4 + 9 * 0.2, rel=ROUNDED
    )


def test_two_removed_neighbours_are_solved_together() -> None:
    # In a row only the two direct neighbours exist, each with the weight 1/2:
    # a = (0 + b) / 2 and b = (a + 3) / 2.
    pixels = np.tile(np.array([[0, 9, 9, 3]], np.float32), (3, 1, 1))
    removed = np.array([[False, True, True, False]])
    for shape in ((1, 4), (4, 1)):
        filled = linear(pixels.reshape(3, *shape), removed.reshape(shape))
        assert filled[0].ravel() == pytest.approx([0, 1, 2, 3], rel=ROUNDED)


def test_a_constant_picture_is_restored_exactly() -> None:
    pixels = np.full((3, 40, 30), 0.3, np.float32)
    removed = np.random.default_rng(0).random((40, 30)) < 0.9
    np.testing.assert_array_equal(linear(pixels, removed), pixels)


def test_a_ramp_is_restored_in_a_hole_away_from_the_border() -> None:
    row, column = np.mgrid[:32, :48]
    pixels = np.stack([row / 40, column / 50, (row + 2 * column) / 130]).astype(np.float32)
    removed = np.zeros((32, 48), bool)
    removed[1:20, 1:47] = True
    removed[25:31, 5:9] = True
    holed = np.where(removed, np.float32(9), pixels)
    np.testing.assert_allclose(linear(holed, removed), pixels, rtol=0, atol=ROUNDED)


@settings(deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_removed_pixel_obeys_its_equation_and_no_other_changes(
    rows: int, columns: int, share: float, seed: int
) -> None:
    pixels = picture(rows, columns, seed)
    removed = np.random.default_rng(seed + 1).random((rows, columns)) < share
    before = pixels.copy()
    filled = linear(pixels, removed)
    assert filled.dtype == np.float32
    np.testing.assert_array_equal(pixels, before)
    np.testing.assert_array_equal(filled[:, ~removed], pixels[:, ~removed])
    assert residual(filled, removed) <= ROUNDED


def test_holes_as_large_as_maps_make_them() -> None:
    pixels = picture(64, 96)
    removed = np.ones((64, 96), bool)
    removed[20:28, 50:60] = False
    filled = linear(pixels, removed)
    assert residual(filled, removed) <= ROUNDED
    known = pixels[:, ~removed]
    assert np.all(filled >= known.min(1)[:, None, None])  # a mean of means lies within
    assert np.all(filled <= known.max(1)[:, None, None])


def test_what_was_removed_leaves_no_trace() -> None:
    removed = np.random.default_rng(0).random((20, 30)) < 0.7
    pixels = picture(20, 30)
    other = np.where(removed, picture(20, 30, seed=1), pixels)
    np.testing.assert_array_equal(linear(pixels, removed), linear(other, removed))


def test_where_all_is_removed_each_channel_becomes_its_mean() -> None:
    pixels = picture(6, 5)
    filled = linear(pixels, np.ones((6, 5), bool))
    expected = np.broadcast_to(pixels.mean((1, 2), keepdims=True), pixels.shape)
    np.testing.assert_allclose(filled, expected, rtol=0, atol=ROUNDED)


def test_noise_is_added_to_the_removed_pixels_alone() -> None:
    pixels = picture(80, 60)
    removed = np.random.default_rng(0).random((80, 60)) < 0.8
    for all_or_some in (removed, np.ones_like(removed)):
        noisy = impute(pixels, all_or_some, np.random.default_rng(7))
        added = noisy - linear(pixels, all_or_some)
        np.testing.assert_array_equal(added[:, ~all_or_some], 0)
        draws = np.random.default_rng(7).standard_normal((3, int(all_or_some.sum())))
        np.testing.assert_allclose(added[:, all_or_some], 0.01 * draws, rtol=0, atol=ROUNDED)


def test_the_same_generator_gives_the_same_bits() -> None:
    pixels = picture(64, 64)
    removed = np.random.default_rng(0).random((64, 64)) < 0.9
    first, *others = (impute(pixels, removed, np.random.default_rng(3)) for _ in range(5))
    for other in others:
        assert first.tobytes() == other.tobytes()
