"""Ratios of sums over pictures, their bootstrap intervals, differences of methods."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxplain.evaluation.measures import Measure
from onnxplain.evaluation.statistics import LEAST_PICTURES, Statistics

A = Measure(name="a", group="sanity", title="a", better="higher", range=(0, 1), definition="")
MEAN = Measure(
    name="mean",
    group="sanity",
    title="mean of two ratios",
    better="higher",
    range=(0, 1),
    definition="",
    ratios=("a", "b"),
)


def statistics(sums: NDArray[np.float64], resamples: int = 400) -> Statistics:
    methods = [f"m{i}" for i in range(sums.shape[1])]
    parts = ["a", "b"][: sums.shape[2]]
    return Statistics(parts, sums, methods, resamples=resamples, seed=0)


def means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[pictures, methods] as numerators over 1."""
    return np.stack([values, np.ones_like(values)], axis=-1)[:, :, None]


def test_a_ratio_is_of_sums() -> None:
    # 1 of 2 in one picture, 3 of 6 and 0 of 2 in others: 4 of 10.
    sums = np.array([[[[1.0, 2]]], [[[3, 6]]], [[[0, 2]]]])
    found = statistics(sums).value("m0", A)
    assert (found.value, found.count) == (0.4, 10)


def test_mean_of_two_ratios() -> None:
    sums = np.array([[[[1.0, 2], [3, 4]]], [[[1, 2], [0, 4]]]])
    assert statistics(sums).value("m0", MEAN).value == pytest.approx((2 / 4 + 3 / 8) / 2)


def test_what_was_not_measured_is_none() -> None:
    found = statistics(np.zeros((3, 1, 1, 2))).value("m0", A)
    assert (found.value, found.low, found.high, found.count) == (None, None, None, 0)


@pytest.mark.parametrize(("pictures", "measured"), [(1, 1), (5, 5), (9, 5)])
def test_of_few_pictures_there_is_no_interval(pictures: int, measured: int) -> None:
    sums = np.zeros((pictures, 1, 1, 2))
    sums[:measured] = 1, 2
    found = statistics(sums).value("m0", A)
    assert (found.value, found.low, found.high) == (0.5, None, None)
    assert not found.excludes_zero


def test_draws_without_a_measured_picture_are_left_out() -> None:
    sums = np.zeros((30, 1, 1, 2))
    sums[:LEAST_PICTURES] = 3, 4
    found = statistics(sums, resamples=2000).value("m0", A)  # 3 in 1000 draws have none of the six
    assert (found.value, found.low, found.high) == (0.75, 0.75, 0.75)


def test_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(0).normal(size=(400, 1))
    found = statistics(means(values), resamples=4000).value("m0", A)
    assert found.value is not None and found.low is not None and found.high is not None
    error = values.std() / 20
    assert found.low == pytest.approx(found.value - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(found.value + 1.96 * error, abs=0.15 * error)


def test_differences_are_paired() -> None:
    # Pictures differ much, the two methods on each of them hardly: only pairs can tell.
    rng = np.random.default_rng(1)
    first = rng.normal(size=200)
    values = np.stack([first, first + 0.01 + 0.01 * rng.normal(size=200)], axis=1)
    found = statistics(means(values))
    difference = found.difference("m1", "m0", A)
    assert difference.value == pytest.approx(float((values[:, 1] - values[:, 0]).mean()))
    assert difference.excludes_zero
    one, other = found.value("m0", A), found.value("m1", A)
    assert one.high is not None and other.low is not None
    assert one.high > other.low  # by themselves their intervals overlap


def test_equal_methods_do_not_differ() -> None:
    values = np.random.default_rng(2).normal(size=(50, 1)).repeat(2, axis=1)
    difference = statistics(means(values)).difference("m1", "m0", A)
    assert (difference.value, difference.low, difference.high) == (0, 0, 0)
    assert not difference.excludes_zero


def test_pictures_are_drawn_not_questions() -> None:
    """Ten questions of each picture that all have one answer tell no more than one of them."""
    answers = np.random.default_rng(3).integers(0, 2, size=(60, 1)).astype(float)
    one = statistics(means(answers)).value("m0", A)
    ten = statistics(10 * means(answers)).value("m0", A)
    assert (one.low, one.high) == (ten.low, ten.high)


def test_the_same_seed_gives_the_same_intervals() -> None:
    sums = means(np.random.default_rng(4).normal(size=(30, 2)))
    assert statistics(sums).value("m0", A) == statistics(sums).value("m0", A)
