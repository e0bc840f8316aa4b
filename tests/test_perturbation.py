"""What is removed of a picture, in which order; areas; that no order does better than the ideal."""

from __future__ import annotations

import itertools

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxplain.contract import ImageInput
from onnxplain.evaluation.baselines import center_gaussian, random_map, seed_of
from onnxplain.evaluation.measures import FILLS
from onnxplain.evaluation.perturbation import (
    area,
    blurred,
    deleted,
    inserted,
    patch_of_pixel,
    patch_values,
    perturbed,
    ranks_from_highest,
)

SPEC = ImageInput(size=(8, 12), mean=(0.25, 0.5, 0.75), std=(0.5, 0.25, 0.125))
SEED = [0, 1]


@pytest.fixture
def pixels() -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(3, 8, 12)).astype(np.float32)


def ranks_of(*order: int) -> NDArray[np.intp]:
    """Ranks of pixels that go in this order."""
    return np.argsort(order)


class TestRanks:
    def test_by_hand(self) -> None:
        values, ties = np.array([[0.5, 0.1], [0.9, 0.5]]), np.array([[1, 9], [9, 2]])
        # 0.9 first; of both 0.5 the second has the higher tie breaker.
        np.testing.assert_array_equal(ranks_from_highest(values, ties), [[2, 3], [0, 1]])

    def test_equal_in_both_go_in_reading_order(self) -> None:
        ranks = ranks_from_highest(np.zeros((2, 2)), np.ones((2, 2)))
        np.testing.assert_array_equal(ranks, [[0, 1], [2, 3]])

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
    def test_each_number_once_in_the_order_of_pairs(self, pairs: list[tuple[int, int]]) -> None:
        values, ties = np.array(pairs, np.float32).T
        ranks = ranks_from_highest(values, ties)
        expected = sorted(range(len(pairs)), key=lambda i: (-pairs[i][0], -pairs[i][1], i))
        np.testing.assert_array_equal(np.argsort(ranks), expected)


class TestPerturbed:
    ranks = np.random.default_rng(2).permutation(96).reshape(8, 12)

    @pytest.mark.parametrize("fill", FILLS)
    def test_so_many_pixels_change_and_no_others(
        self, pixels: NDArray[np.float32], fill: str
    ) -> None:
        pictures = [p.copy() for p in perturbed(pixels, self.ranks, fill, SPEC, SEED)]
        assert len(pictures) == 18
        for i, picture in enumerate(pictures):
            assert picture.dtype == np.float32
            tenths = i % 9 + 1
            changed = (picture != pixels).any(axis=0)
            assert changed.sum() == tenths * 96 // 10
            first = self.ranks < tenths * 96 // 10
            last = self.ranks >= 96 - tenths * 96 // 10
            np.testing.assert_array_equal(changed, first if i < 9 else last)

    def test_zero_is_black(self, pixels: NDArray[np.float32]) -> None:
        picture = next(perturbed(pixels, self.ranks, "zero", SPEC, SEED))
        black = picture[:, self.ranks < 9]
        expected = np.array([[-0.5], [-2], [-6]])  # (0 - mean) / std
        np.testing.assert_array_equal(black, np.broadcast_to(expected, black.shape))

    def test_mean_is_that_of_each_channel(self, pixels: NDArray[np.float32]) -> None:
        picture = next(perturbed(pixels, self.ranks, "mean", SPEC, SEED))
        found = picture[:, self.ranks < 9]
        expected = pixels.reshape(3, -1).astype(np.float64).mean(axis=1, keepdims=True)
        np.testing.assert_allclose(found, np.broadcast_to(expected, found.shape), rtol=1e-6)

    def test_blur_is_of_the_whole_picture(self, pixels: NDArray[np.float32]) -> None:
        picture = next(perturbed(pixels, self.ranks, "blur", SPEC, SEED))
        # A standard deviation of 8 / 16 of a pixel.
        kernel = cv2.getGaussianKernel(5, 0.5, cv2.CV_32F)
        expected = cv2.sepFilter2D(pixels[1], -1, kernel, kernel)
        first = self.ranks < 9
        np.testing.assert_allclose(picture[1][first], expected[first], atol=1e-5)

    def test_noise_of_road_is_that_of_pixels_in_0_to_1(self) -> None:
        size = 120
        flat = np.zeros((3, size, size), np.float32)
        ranks = np.arange(size * size).reshape(size, size)
        spec = ImageInput(size=(size, size), std=(1.0, 0.5, 0.1))
        *_, picture = itertools.islice(perturbed(flat, ranks, "road", spec, SEED), 9)
        noise = picture[:, ranks < 9 * size * size // 10].std(axis=1)
        np.testing.assert_allclose(noise, [0.01, 0.02, 0.1], rtol=0.03)  # of 13000 draws

    def test_noise_of_road_is_the_same_for_every_map(self, pixels: NDArray[np.float32]) -> None:
        one, two = (next(perturbed(pixels, self.ranks, "road", SPEC, SEED)) for _ in range(2))
        np.testing.assert_array_equal(one, two)


class TestPatches:
    def test_of_each_pixel(self) -> None:
        # 2 x 2 patches of 2 x 3 pixels, and a strip of one pixel on the right and below.
        found = patch_of_pixel((5, 7), (2, 2), (4, 6))
        np.testing.assert_array_equal(found[0], [0, 0, 0, 1, 1, 1, 1])
        np.testing.assert_array_equal(found[:, 0], [0, 0, 2, 2, 2])

    def test_of_a_grid_that_does_not_divide_the_picture(self) -> None:
        np.testing.assert_array_equal(patch_of_pixel((5, 1), (2, 1), (5, 1))[:, 0], [0, 0, 0, 1, 1])

    def test_values_are_means(self) -> None:
        heatmap = np.array([[0, 1, 0.5, 0.5], [0.5, 0.5, 1, 1]], np.float32)
        patches = patch_of_pixel((2, 4), (1, 2), (2, 4))
        np.testing.assert_array_equal(patch_values(heatmap, patches), [0.5, 0.75])

    def test_deleted_one_after_the_other(self) -> None:
        pixels = np.ones((3, 2, 4), np.float32)
        patches = patch_of_pixel((2, 4), (1, 4), (2, 4))
        first, second = (p.copy() for p in deleted(pixels, ranks_of(2, 0, 3, 1), patches, 2))
        np.testing.assert_array_equal(first[:, 0], np.tile([0.0, 1, 0, 1], (3, 1)))
        assert not second.any()

    def test_inserted_into_the_blurred_picture(self, pixels: NDArray[np.float32]) -> None:
        patches = patch_of_pixel((8, 12), (2, 3), (8, 12))
        pictures = [p.copy() for p in inserted(pixels, ranks_of(4, 0, 1, 2, 3, 5), patches, 6)]
        np.testing.assert_array_equal(pictures[-1], pixels)
        inside = patches == 4
        np.testing.assert_array_equal(pictures[0][:, inside], pixels[:, inside])
        np.testing.assert_array_equal(pictures[0][:, ~inside], blurred(pixels)[:, ~inside])

    def test_steps_of_unequal_number(self) -> None:
        pixels = np.ones((3, 1, 5), np.float32)
        patches = patch_of_pixel((1, 5), (1, 5), (1, 5))
        gone = [int((p[0] == 0).sum()) for p in deleted(pixels, np.arange(5), patches, 3)]
        assert gone == [1, 3, 5]  # floor(5 k / 3)


def test_area_by_hand() -> None:
    # A step from 1 to 0 between 0.1 and 0.2 of widths 0.1: 0.1 + 0.05.
    assert area(np.array([1.0, 1, 0, 0]), np.array([0, 0.1, 0.2, 0.3])) == pytest.approx(0.15)
    # Unequal widths.
    assert area(np.array([0.0, 1, 1]), np.array([0, 0.2, 1])) == pytest.approx(0.9)


class TestLinearModel:
    """The score is a sum over patches of weight times value, so the ideal order is known."""

    WEIGHTS = np.array([0.3, -0.2, 0.9, 0.1, 0.6])

    def picture(self) -> tuple[NDArray[np.float32], NDArray[np.intp]]:
        """Large enough for the blur to change something, and its patches."""
        pixels = np.random.default_rng(5).uniform(0.2, 1, (3, 32, 80)).astype(np.float32)
        return pixels, patch_of_pixel((32, 80), (1, 5), (32, 80))

    def curve(self, order: tuple[int, ...], kind: str) -> float:
        pixels, patches = self.picture()
        function = deleted if kind == "deletion" else inserted
        start = pixels if kind == "deletion" else blurred(pixels)
        pictures = (start, *(p.copy() for p in function(pixels, ranks_of(*order), patches, 5)))
        scores = [float((p * self.WEIGHTS[patches]).sum(dtype=np.float64)) for p in pictures]
        return float(area(np.array(scores), np.arange(6) / 5))

    def contributions(self, kind: str) -> NDArray[np.float64]:
        """What each patch changes of the score when it is deleted or inserted."""
        pixels, patches = self.picture()
        change = pixels if kind == "deletion" else pixels - blurred(pixels)
        sums = np.bincount(patches.reshape(-1), change.sum(axis=0, dtype=np.float64).reshape(-1))
        return np.asarray(self.WEIGHTS * sums)

    @pytest.mark.parametrize("kind", ["deletion", "insertion"])
    def test_the_ideal_order_is_the_optimum_and_its_opposite_the_pessimum(self, kind: str) -> None:
        areas = {order: self.curve(order, kind) for order in itertools.permutations(range(5))}
        ideal = tuple(np.argsort(-self.contributions(kind)).tolist())
        best, worst = (min, max) if kind == "deletion" else (max, min)
        assert best(areas, key=areas.__getitem__) == ideal
        assert worst(areas, key=areas.__getitem__) == ideal[::-1]

    def test_area_is_that_of_the_closed_form(self) -> None:
        # The patch at place k of the order is there for k steps and half of the next: its share of
        # the area is (k + 1/2) / 5 of what it adds.
        added = self.contributions("deletion")
        for order in itertools.permutations(range(5)):
            expected = sum(added[patch] * (k + 0.5) / 5 for k, patch in enumerate(order))
            assert self.curve(order, "deletion") == pytest.approx(expected, abs=1e-9)


class TestBaselines:
    def test_random_map_depends_on_seed_and_name_alone(self) -> None:
        one, same = (random_map(seed_of(0, "a.png"), (4, 5)) for _ in range(2))
        np.testing.assert_array_equal(one, same)
        assert one.shape == (4, 5)
        for other in (seed_of(1, "a.png"), seed_of(0, "b.png")):
            assert (random_map(other, (4, 5)) != one).any()

    def test_a_name_that_is_not_unicode(self) -> None:
        random_map(seed_of(0, "caf\udce9.png"), (2, 2))

    def test_gaussian_by_hand(self) -> None:
        # Centres of the patches at 1/6, 1/2 and 5/6 of the side, 4/3 standard deviations apart.
        side = np.exp(-0.5 * (4 / 3) ** 2)
        expected = [[side**2, side, side**2], [side, 1, side], [side**2, side, side**2]]
        np.testing.assert_allclose(center_gaussian((3, 3)), expected, rtol=1e-6)
