"""Every number that an evaluation reports: its name, what it means exactly, which way is better.

A number is a sum over questions divided by another one, each kept per picture, so that pictures can
be resampled. A question is a picture and a class that is asked for. Means are sums over counts; the
mean IoU is the mean of two such ratios.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onnxplain.errors import InputError

__all__ = [
    "BASELINES",
    "CENTER_GAUSSIAN",
    "FILLS",
    "GROUPS",
    "RANDOM",
    "TENTHS",
    "Measure",
    "measures_of",
]

RANDOM = "random"
CENTER_GAUSSIAN = "center_gaussian"
BASELINES = (RANDOM, CENTER_GAUSSIAN)

GROUPS = ("perturbation", "insertion_deletion", "localisation", "sanity")
TENTHS = tuple(range(10))
"""Tenths of the pixels that are removed, from none to 90 %."""

FILLS = {
    "zero": "set to 0 before normalisation (black)",
    "mean": "set to the picture's own mean of each channel",
    "blur": "taken from a blurred picture (Gaussian, standard deviation a sixteenth of the shorter "
    "side; OpenCV's GaussianBlur of the normalised pixels in float32, its own size of kernel and "
    "border)",
    "road": "imputed (ROAD, Rong et al., ICML 2022: each is the mean of its eight neighbours, "
    "direct ones with weight 1/6, diagonal ones 1/12, all at once by linear equations; then "
    "Gaussian noise of standard deviation 0.01 in pixels of 0..1)",
}
"""What becomes of pixels that are removed."""

_ASKED = {
    "predicted": (
        "The map is of the predicted class; the prediction counts as right where it is one of the "
        "picture's labels (without labels: what was predicted for the whole picture). Mean over "
        "the pictures."
    ),
    "target": "The map is of the label, and the prediction counts as right where it is the label. "
    "Mean over the labels of all pictures.",
}
_CLASS = {"predicted": "the predicted class", "target": "the label"}
_MEAN = {
    "predicted": "The map is of that class. Mean over the pictures.",
    "target": "The map is of that label. Mean over the labels of all pictures.",
}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of the report.

    Attributes:
        name: Unique, with dots.
        group: One of `GROUPS`.
        title: What it is called in tables.
        detail: What tells it from others of this title.
        better: "higher", "lower", or "none" where neither is.
        range: Lowest and highest value possible.
        headline: Whether it counts for the ranking of methods.
        definition: Exactly what is computed, in words.
        ratios: The sums whose ratios it is the mean of; its own name where there is one.
        points: Of its curve; 0 where it has none.
        x_title, y_title: Of the curve.
    """

    name: str
    group: str
    title: str
    detail: str = ""
    better: str
    range: tuple[float, float]
    headline: bool = False
    definition: str
    ratios: tuple[str, ...] = ()
    points: int = 0
    x_title: str = ""
    y_title: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        return self.ratios or (self.name,)


def measures_of(
    groups: Collection[str], fills: Collection[str], steps: int, levels: Sequence[str]
) -> tuple[Measure, ...]:
    """The measures of an evaluation, in the order of the report.

    Args:
        groups: Of `GROUPS`.
        fills: Of `FILLS`; the first one's measures count for the ranking.
        steps: Of insertion and deletion.
        levels: Names of the levels of the randomisation of weights, the output first.

    Raises:
        InputError: An unknown group or fill.
    """
    for given, known, what in ((groups, GROUPS, "measures"), (fills, FILLS, "fill")):
        for name in given:
            if name not in known:
                raise InputError(f"{what} {name!r}; expected some of {', '.join(known)}")
    found: list[Measure] = []
    if "perturbation" in groups:
        for i, fill in enumerate(fills):
            for asked in ("predicted", "target"):
                found += _perturbation(fill, asked, headline=i == 0 or fill == "road")
    if "insertion_deletion" in groups:
        for asked in ("predicted", "target"):
            found += _insertion_deletion(asked, steps)
    if "localisation" in groups:
        found += _LOCALISATION
    if "sanity" in groups:
        found += [_CLASS_SENSITIVITY, *_randomisation(levels)]
    return tuple(found)


def _perturbation(fill: str, asked: str, *, headline: bool) -> list[Measure]:
    how = (
        f"The floor(k HW / 10) pixels with the highest values of the heatmap, k = 0..9, are "
        f"{FILLS[fill]}. "
    )
    ties = (
        " Pixels of equal value go in the order of the random map's heatmap, highest first, then "
        "in reading order."
    )
    measure = functools.partial(
        Measure,
        group="perturbation",
        detail=f"{fill}, {asked} class",
        headline=headline and asked == "predicted",
        points=len(TENTHS),
        x_title="share of pixels removed",
    )
    return [
        measure(
            name=f"perturbation.{fill}.positive.{asked}",
            title="positive perturbation",
            better="lower",
            range=(0, 0.9),
            definition=f"{how}Area under top-1 over the share of pixels, 0 to 0.9, by the "
            f"trapezoid rule. {_ASKED[asked]}{ties} (Chefer et al., CVPR 2021.)",
            y_title="top-1",
        ),
        measure(
            name=f"perturbation.{fill}.negative.{asked}",
            title="negative perturbation",
            better="higher",
            range=(0, 0.9),
            definition="The same with the pixels of the lowest values: the order of the positive "
            "perturbation, read backwards.",
            y_title="top-1",
        ),
        measure(
            name=f"perturbation.{fill}.difference.{asked}",
            title="LeRF - MoRF",
            better="higher",
            range=(-0.9, 0.9),
            definition=f"Area under the probability (softmax) of {_CLASS[asked]} over the share of "
            "pixels removed, 0 to 0.9, by the trapezoid rule: least relevant first (negative "
            f"perturbation) minus most relevant first (positive). {_MEAN[asked]}",
            y_title="difference of the probability",
        ),
    ]


def _insertion_deletion(asked: str, steps: int) -> list[Measure]:
    order = (
        "in the order of their values in the map (of a map of pixels, the mean of its positive "
        f"part), floor(k P / {steps}) of the P patches by step k; patches of equal value, and all "
        "of a blank map, go in the order of the random map, highest first, then in reading order"
    )
    area = (
        f"Area under the probability (softmax) of {_CLASS[asked]} over the share of patches, "
        f"0 to 1, by the trapezoid rule. {_MEAN[asked]} (Petsiuk et al., RISE, BMVC 2018.)"
    )
    measure = functools.partial(
        Measure,
        group="insertion_deletion",
        detail=f"{asked} class",
        range=(0, 1),
        headline=asked == "predicted",
        points=steps + 1,
        y_title="probability",
    )
    return [
        measure(
            name=f"insertion.{asked}",
            title="insertion",
            better="higher",
            definition="Patches of the picture are put into a blurred one (as in the fill blur), "
            f"the most relevant first, {order}. {area}",
            x_title="share of patches inserted",
        ),
        measure(
            name=f"deletion.{asked}",
            title="deletion",
            better="lower",
            definition="Patches are replaced by 0 after normalisation (the mean colour), the most "
            f"relevant first, {order}. {area}",
            x_title="share of patches deleted",
        ),
    ]


_AT_MEAN = (
    "What lies strictly above the mean of the heatmap of the label (without one: of the predicted "
    "class) is taken for the object, the rest for background. Pixels that the mask does not count "
    "are left out, also of the mean. "
)
_on_masks = functools.partial(Measure, group="localisation", range=(0, 1))
_LOCALISATION = [
    _on_masks(
        name="pixel_accuracy",
        title="pixel accuracy",
        better="higher",
        definition=_AT_MEAN + "Share of the pixels of all pictures that are right. Chefer's "
        "segmentation protocol.",
    ),
    _on_masks(
        name="miou",
        title="mIoU",
        better="higher",
        headline=True,
        ratios=("iou_object", "iou_background"),
        definition=_AT_MEAN + "Intersection over union, each summed over all masks; the mean "
        "of that of the object and that of the background. Chefer's segmentation protocol.",
    ),
    _on_masks(
        name="map",
        title="mAP",
        better="higher",
        definition="Mean over the maps of the average precision of the scores h (object) and "
        "1 - h (background) of all pixels, h the heatmap, as one ranking. Chefer's segmentation "
        "protocol.",
    ),
    _on_masks(
        name="energy",
        title="energy inside",
        better="higher",
        headline=True,
        definition="Sum of the heatmap inside the object's mask by its sum, mean over the maps; "
        "0 of a blank map. Pixels that the mask does not count are left out. "
        "(Wang et al., Score-CAM, 2020.)",
    ),
    _on_masks(
        name="pointing_game",
        title="pointing game",
        better="higher",
        headline=True,
        definition="Share of the maps whose largest value (of equal ones the first in reading "
        "order) lies on the object, without tolerance; a blank map misses. "
        "(Zhang et al., ECCV 2016.)",
    ),
    _on_masks(
        name="pointing_other",
        title="points at another object",
        better="lower",
        definition="Share of the maps whose largest value lies on another object of the picture "
        "than the one asked for, and not on that too; of pictures with several objects.",
    ),
]
_CLASS_SENSITIVITY = Measure(
    name="class_sensitivity",
    group="sanity",
    title="same map for another class",
    better="lower",
    range=(-1, 1),
    definition="Rank correlation (Spearman) of the maps of the two likeliest classes, mean over "
    "the pictures. 1: the map does not depend on the class. Two blank maps count as 1, one as 0.",
)


def _randomisation(levels: Sequence[str]) -> list[Measure]:
    if not levels:
        return []
    return [
        Measure(
            name="randomisation",
            group="sanity",
            title="same map from random weights",
            better="lower",
            range=(-1, 1),
            definition="Weights are replaced from the output to the input (each tensor's values "
            "permuted at random). Rank correlation (Spearman) of the map with that of the trained "
            "model for the same class, mean over the pictures; the number is that of all weights "
            "replaced. (Adebayo et al., Sanity Checks for Saliency Maps, NeurIPS 2018.)",
            ratios=(f"randomisation.{len(levels)}",),
            points=len(levels) + 1,
            x_title="replaced from the output down to",
            y_title="rank correlation",
        )
    ]
