"""How well a map lies on its object, with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, average_precision_score, jaccard_score

from onnxplain.evaluation.localisation import (
    Segmentation,
    average_precision,
    energy_inside,
    other_objects,
    pointing_game,
    segmentation,
)

Heatmap = NDArray[np.float32]
Mask = NDArray[np.int8]

SAME = 1e-12  # sums of a few hundred float64

HEATMAP = np.array([[1.0, 0.75, 0.0], [0.5, 0.25, 0.5]], np.float32)
MASK = np.array([[1, 0, 0], [1, 1, -1]], np.int8)

heatmaps = arrays(np.float32, (6, 7), elements=st.floats(0, 1, width=32))
masks = arrays(np.int8, (6, 7), elements=st.sampled_from([-1, 0, 1]))


def test_segmentation_by_hand() -> None:
    # Counted: 1, 0.75, 0, 0.5, 0.25, with the mean 0.5, so that 1 and 0.75 alone are above it.
    # Object is 1, 0.5, 0.25: one of them found; background 0.75, 0: one of them found.
    assert segmentation(HEATMAP, MASK) == Segmentation(
        correct=2,
        counted=5,
        intersection_object=1,
        union_object=4,
        intersection_background=1,
        union_background=4,
    )


def test_average_precision_by_hand() -> None:
    # As object 1+ 0.75- 0- 0.5+ 0.25+, as background 0- 0.25+ 1+ 0.5- 0.75-; both in one ranking:
    # 1: two of two right; 0.75: two of four; 0.5: three of six; 0.25: five of eight; 0: five of
    # ten. Recall grows by 2/5 at 1, by 1/5 at 0.5 and by 2/5 at 0.25.
    expected = 2 / 5 * 1 + 1 / 5 * 3 / 6 + 2 / 5 * 5 / 8
    assert average_precision(HEATMAP, MASK) == pytest.approx(expected, abs=SAME)


def test_energy_by_hand() -> None:
    assert energy_inside(HEATMAP, MASK) == (1 + 0.5 + 0.25) / (1 + 0.75 + 0.5 + 0.25)


def test_pointing_by_hand() -> None:
    assert pointing_game(HEATMAP, MASK)
    assert not pointing_game(1 - HEATMAP, MASK)
    # Where 1 is not counted, 0.75 is the largest.
    assert not pointing_game(HEATMAP, np.array([[-1, 0, 0], [1, 1, -1]], np.int8))
    assert pointing_game(HEATMAP, np.array([[-1, 1, 0], [0, 0, -1]], np.int8))


def test_of_equal_values_the_first_counted_one_is_pointed_at() -> None:
    heatmap = np.array([[0, 1], [1, 1]], np.float32)
    assert not pointing_game(heatmap, np.array([[1, 0], [1, 1]], np.int8))
    assert pointing_game(heatmap, np.array([[1, -1], [1, 0]], np.int8))


@settings(deadline=None)
@given(masks.filter(lambda mask: {0, 1} <= set(mask.ravel())))
def test_a_perfect_map_is_the_best_and_its_inverse_the_worst(mask: Mask) -> None:
    perfect = (mask == 1).astype(np.float32)
    best, worst = segmentation(perfect, mask), segmentation(1 - perfect, mask)
    assert best.correct == best.counted
    assert best.intersection_object == best.union_object > 0
    assert best.intersection_background == best.union_background > 0
    assert worst.correct == worst.intersection_object == worst.intersection_background == 0
    assert average_precision(perfect, mask) == energy_inside(perfect, mask) == 1
    # What is right comes last, and as it is half of all, the precision is a half at the end.
    assert average_precision(1 - perfect, mask) == 0.5
    assert energy_inside(1 - perfect, mask) == 0
    assert pointing_game(perfect, mask)
    assert not pointing_game(1 - perfect, mask)


@settings(deadline=None)
@given(masks, st.floats(0, 1, width=32))
def test_a_constant_map(mask: Mask, value: float) -> None:
    heatmap = np.full(mask.shape, value, np.float32)
    counted, inside = int((mask >= 0).sum()), int((mask == 1).sum())
    assert segmentation(heatmap, mask) == Segmentation(
        correct=counted - inside,  # nothing is above its mean
        counted=counted,
        intersection_object=0,
        union_object=inside,
        intersection_background=counted - inside,
        union_background=counted,
    )
    share = inside / counted if counted and value else 0
    assert energy_inside(heatmap, mask) == pytest.approx(share, abs=SAME)
    first = mask[mask >= 0][:1]
    assert pointing_game(heatmap, mask) == (value > 0 and first.tolist() == [1])


@settings(deadline=None)
@given(heatmaps, masks)
def test_ranges_and_the_measures_of_scikit_learn(heatmap: Heatmap, mask: Mask) -> None:
    found = segmentation(heatmap, mask)
    counted = mask >= 0
    assert 0 <= energy_inside(heatmap, mask) <= 1
    assert 0 <= average_precision(heatmap, mask) <= 1
    if not counted.any():
        assert found == Segmentation(0, 0, 0, 0, 0, 0)
        return
    values = heatmap[counted].astype(np.float64)
    labels, above = mask[counted], (values > values.mean()).astype(np.int8)
    assert found.correct / found.counted == accuracy_score(labels, above)
    for label, intersection, union in (
        (1, found.intersection_object, found.union_object),
        (0, found.intersection_background, found.union_background),
    ):
        iou = jaccard_score(labels, above, pos_label=label, zero_division=0)
        assert (intersection / union if union else 0) == pytest.approx(iou, abs=SAME)


@settings(deadline=None)
@given(heatmaps, masks)
def test_what_is_not_counted_makes_no_difference(heatmap: Heatmap, mask: Mask) -> None:
    other = np.where(mask >= 0, heatmap, 1 - heatmap)
    for measure in (segmentation, average_precision, energy_inside, pointing_game):
        assert measure(heatmap, mask) == measure(other, mask)


def test_average_precision_takes_both_channels_as_one_ranking() -> None:
    rng = np.random.default_rng(0)
    heatmap = rng.random((8, 8), np.float32)
    mask = (rng.random((8, 8)) < 0.3).astype(np.int8)
    labels, scores = np.stack([1 - mask, mask]), np.stack([1 - heatmap, heatmap])
    expected = average_precision_score(labels.ravel(), scores.ravel())
    assert average_precision(heatmap, mask) == expected
    assert average_precision(heatmap, mask) != average_precision_score(
        mask.ravel(), heatmap.ravel()
    )


def test_other_objects_are_the_objects_that_were_not_asked_for() -> None:
    mask = np.array([[1, 1, 0, 0, -1]], np.int8)
    others = [np.array([[0, 1, 1, 0, 1]], np.int8), np.array([[0, 0, -1, 0, 0]], np.int8)]
    found = other_objects(mask, others)
    assert found.dtype == np.int8
    np.testing.assert_array_equal(found, [[0, 0, 1, 0, -1]])
    np.testing.assert_array_equal(other_objects(mask, []), [[0, 0, 0, 0, -1]])
    heatmap = np.array([[0.2, 0.4, 0.8, 0.4, 1.0]], np.float32)
    assert pointing_game(heatmap, found)
    assert not pointing_game(heatmap, mask)
