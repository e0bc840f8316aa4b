"""The pictures on which a method did best and worst, drawn with its maps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onnxplain.evaluation.datasets import Dataset
from onnxplain.evaluation.measures import Measure
from onnxplain.evaluation.results import Measured
from onnxplain.runtime.explainer import Explainer

__all__ = ["draw_examples"]

_EACH = 3  # best, and worst, of each method
_SIDE = 320  # pixels of the longer side


def draw_examples(
    explainer: Explainer,
    data: Dataset,
    measured: Measured,
    methods: Sequence[str],
    tell: Callable[[str, int, int], None],
) -> tuple[list[dict[str, Any]], list[NDArray[np.uint8]]]:
    """The best and the worst pictures of each method by one measure, for the predicted class.

    Args:
        explainer: Draws them anew: maps are not kept.
        data: Where they come from.
        measured: What was measured of them.
        methods: Names.
        tell: Told what is going on, how much of it is done, and of how much.

    Returns:
        Which they are, and the maps over the pictures, uint8 RGB; no examples where no measure of
        the predicted class was taken.
    """
    measure = _measure(measured)
    if measure is None:
        return [], []
    wanted: dict[int, list[tuple[str, str, float]]] = defaultdict(list)
    for method in methods:
        for number, rank, value in _extremes(measured, method, measure):
            wanted[number].append((method, rank, value))
    examples: list[dict[str, Any]] = []
    pictures: list[NDArray[np.uint8]] = []
    done = 0
    for number, sample in data.numbered():
        if number not in wanted:
            continue
        asked = wanted[number]
        tell("drawing examples", done, len(wanted))
        done += 1
        names = list(dict.fromkeys(method for method, _, _ in asked))
        for one in explainer.explain_each(sample.image, methods=names):
            drawn = Image.fromarray(one.overlay()[0])
            drawn.thumbnail((_SIDE, _SIDE))
            for method, rank, value in asked:
                if method == one.method:
                    examples.append(
                        {
                            "method": method,
                            "measure": measure.name,
                            "rank": rank,
                            "sample": sample.name,
                            "label": one.labels[0],
                            "value": value,
                            "picture": len(pictures),
                        }
                    )
            pictures.append(np.asarray(drawn))
    places = {name: i for i, name in enumerate(methods)}
    examples.sort(key=lambda e: (places[e["method"]], e["rank"], _order(e)))
    return examples, pictures


def _order(example: dict[str, Any]) -> float:
    return -float(example["value"]) if example["rank"] == "best" else float(example["value"])


def _measure(measured: Measured) -> Measure | None:
    """The one that examples are chosen by: a difference, so that both orders count."""
    by_name = {measure.name: measure for measure in measured.layout.measures}
    names = [n for n in by_name if n.endswith(".difference.predicted")]
    name = next(iter([*names, *(n for n in by_name if n == "insertion.predicted")]), None)
    return None if name is None else by_name[name]


def _extremes(
    measured: Measured, method: str, measure: Measure
) -> Iterator[tuple[int, str, float]]:
    """Number, rank and value of a method's best and worst pictures, none of them both."""
    place = measured.layout.methods.index(method), measured.layout.parts.index(measure.name)
    sums, counts = measured.sums[:, place[0], place[1]].T
    values = sums / counts
    order = np.argsort(-values, kind="stable")
    each = min(_EACH, len(order) // 2)
    for rank, chosen in (("best", order[:each]), ("worst", order[::-1][:each])):
        for i in chosen.tolist():
            yield measured.numbers[i], rank, float(values[i])
