"""How well a map lies on the object it explains: segmentation, energy, and the pointing game.

All are pure functions of a heatmap and a mask of the same size. Pixels that the mask does not count
take no part in any of them: not in a mean, not in a sum, and the largest value is that of the
counted pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

__all__ = [
    "Segmentation",
    "average_precision",
    "energy_inside",
    "other_objects",
    "pointing_game",
    "segmentation",
]


@dataclass(frozen=True)
class Segmentation:
    """The counted pixels of one picture, or of several: they are added up over a dataset.

    Attributes:
        counted: pixels that are object or background in the mask.
        correct: pixels that the thresholded map takes for what they are.
        intersection_object, union_object: pixels that are object in both, in at least one of the
            mask and the thresholded map.
        intersection_background, union_background: the same for the background.
    """

    correct: int
    counted: int
    intersection_object: int
    union_object: int
    intersection_background: int
    union_background: int


def segmentation(heatmap: NDArray[np.float32], mask: NDArray[np.int8]) -> Segmentation:
    """The map cut at its mean as a segmentation of the object.

    Pixels strictly above the mean of the counted pixels are taken for object. Over a dataset,
    pixel accuracy is the sum of `correct` over the sum of `counted`; the IoU of object and of
    background are the sums of the intersections over the sums of the unions, and mIoU is the mean
    of the two.

    Source: Chefer, Gur and Wolf, *Transformer Interpretability Beyond Attention Visualization*,
    CVPR 2021, and its published evaluation.

    Args:
        heatmap: [H, W], in 0..1.
        mask: [H, W], 1 the object, 0 the background, -1 not counted.
    """
    counted = mask >= 0
    values = heatmap[counted].astype(np.float64)
    inside = mask[counted] == 1
    # Not in float32: the mean of a constant map could differ from its values.
    above = values > (values.mean() if values.size else 0)
    both, either = int((above & inside).sum()), int((above | inside).sum())
    differ = either - both
    return Segmentation(
        correct=inside.size - differ,
        counted=inside.size,
        intersection_object=both,
        union_object=either,
        intersection_background=inside.size - either,
        union_background=inside.size - both,
    )


def average_precision(heatmap: NDArray[np.float32], mask: NDArray[np.int8]) -> float:
    """Average precision of one ranking of all counted pixels, each as background and as object.

    A pixel of value h is ranked twice: as background with the score 1 - h and as object with h; one
    of the two is right. mAP is the mean over pictures.

    Source: as `segmentation`. The average precision is scikit-learn's: the precision at every
    distinct score, weighted with the recall that is gained there, without interpolation.

    Args:
        heatmap: [H, W], in 0..1.
        mask: [H, W], 1 the object, 0 the background, -1 not counted.

    Returns:
        0..1; 0.5 for a constant map of 0.5; 0 where no pixel is counted.
    """
    counted = mask >= 0
    if not counted.any():
        return 0.0
    values, inside = heatmap[counted], mask[counted] == 1
    labels = np.concatenate([~inside, inside])
    return float(average_precision_score(labels, np.concatenate([1 - values, values])))


def energy_inside(heatmap: NDArray[np.float32], mask: NDArray[np.int8]) -> float:
    """The share of the map's sum that lies on the object.

    Source: Wang et al., *Score-CAM*, CVPR Workshops 2020 (energy-based pointing game).

    Args:
        heatmap: [H, W], in 0..1.
        mask: [H, W], 1 the object, 0 the background, -1 not counted.

    Returns:
        0..1; 0 where the map is zero on all counted pixels.
    """
    total = heatmap[mask >= 0].sum(dtype=np.float64)
    return float(heatmap[mask == 1].sum(dtype=np.float64) / total) if total else 0.0


def pointing_game(heatmap: NDArray[np.float32], mask: NDArray[np.int8]) -> bool:
    """Whether the map is largest on the object.

    Of several equal values the first in reading order counts: one place for each map, whatever the
    mask, for a map that is flat where it is largest must not be granted the best of its places.
    There is no tolerance around the object.

    Source: Zhang et al., *Top-Down Neural Attention by Excitation Backprop*, ECCV 2016.

    Args:
        heatmap: [H, W], in 0..1.
        mask: [H, W], 1 the object, 0 the background, -1 not counted.

    Returns:
        False also where the map is zero on all counted pixels: it points nowhere.
    """
    seen = np.where(mask >= 0, heatmap, 0)
    place = seen.argmax()
    return bool(seen.flat[place] > 0 and mask.flat[place] == 1)


def other_objects(mask: NDArray[np.int8], others: Iterable[NDArray[np.int8]]) -> NDArray[np.int8]:
    """A mask of the other objects of a picture, to ask whether a map lies on one of those instead.

    Args:
        mask: [H, W], of the object that is explained: where objects overlap the pixel is its, and
            what it does not count stays uncounted, so that both masks are asked about one set of
            pixels and one largest value.
        others: masks of the other objects, of the same size.

    Returns:
        [H, W], 1 another object, 0 not, -1 not counted.
    """
    elsewhere = np.zeros(mask.shape, np.int8)
    for other in others:
        elsewhere[other == 1] = 1
    return np.where(mask == 0, elsewhere, np.minimum(mask, 0)).astype(np.int8)
