"""What was measured, as one JSON-able document: numbers, curves, the order of the methods."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

import onnxplain
from onnxplain.contract import Contract
from onnxplain.evaluation.measures import BASELINES, RANDOM, TENTHS, Measure
from onnxplain.evaluation.progress import Progress
from onnxplain.evaluation.statistics import Interval, Statistics
from onnxplain.evaluation.study import Layout
from onnxplain.outputs import METHODS

__all__ = ["CLASS_SENSITIVE", "FORMAT", "WEIGHT_SENSITIVE", "Measured", "summarise", "versions"]

FORMAT = 1
CLASS_SENSITIVE = 0.9
"""A method tells classes apart if the maps of two classes surely correlate less than this."""
WEIGHT_SENSITIVE = 0.5
"""A method depends on the weights if the maps of random weights surely correlate less than this."""

_PACKAGES = {
    "numpy": "numpy",
    "scipy": "scipy",
    "scikit-learn": "scikit-learn",
    "opencv": "opencv-python-headless",
    "pillow": "Pillow",
}


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    import onnxruntime

    found = {"onnxplain": onnxplain.__version__, "onnxruntime": onnxruntime.__version__}
    found |= {name: _version(package) for name, package in _PACKAGES.items()}
    return {**found, "python": ".".join(map(str, sys.version_info[:3]))}


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return version("opencv-python") if package.startswith("opencv") else "unknown"


class Measured:
    """The records of all pictures, added up where that is enough.

    Attributes:
        sums: float64 [pictures, methods, parts, 2], numerators and denominators.
        totals: float64 [methods, columns], the sum of all records.
        names, facts, numbers: Of the pictures, in order.
        levels: For each finished level of the randomisation the rank correlations,
            [methods, chosen pictures].
    """

    def __init__(self, progress: Progress, layout: Layout, chosen: Sequence[int]) -> None:
        self.layout = layout
        self.names: list[str] = []
        self.facts: list[dict[str, Any]] = []
        self.numbers: list[int] = []
        self.totals = layout.empty()
        sums = []
        for number, name, facts, record in progress.pictures():
            self.numbers.append(number)
            self.names.append(name)
            self.facts.append(facts)
            self.totals += record
            sums.append(layout.sums(record).copy())
        shape = (0, len(layout.methods), len(layout.parts), 2)
        self.sums = np.stack(sums) if sums else np.empty(shape)
        self.levels = progress.levels()
        self._add_last_level(chosen)

    def _add_last_level(self, chosen: Sequence[int]) -> None:
        """The randomisation was measured apart, of the chosen pictures."""
        if not self.levels:
            return
        last = max(self.levels)
        part = self.layout.parts.index(f"randomisation.{last}")
        row = {number: i for i, number in enumerate(self.numbers)}
        for number, values in zip(chosen, self.levels[last].T, strict=True):
            if number in row:
                self.sums[row[number], :, part, 0] = values[: len(self.layout.methods)]
                self.sums[row[number], :, part, 1] = 1


def summarise(
    measured: Measured,
    *,
    model: Mapping[str, Any],
    dataset: Mapping[str, Any],
    contract: Contract,
    settings: Mapping[str, Any],
    level_names: Sequence[str],
    failures: Sequence[tuple[str, str]],
) -> tuple[dict[str, Any], Statistics]:
    """The document, without examples; and the statistics, for differences that it does not hold."""
    layout = measured.layout
    statistics = Statistics(
        layout.parts,
        measured.sums,
        layout.methods,
        resamples=settings["resamples"],
        seed=settings["seed"],
    )
    measures = [
        measure
        for measure in layout.measures
        if any(statistics.value(method, measure).value is not None for method in layout.methods)
    ]
    patches = contract.tokens.grid[0] * contract.tokens.grid[1]
    right = [facts["right"] for facts in measured.facts if facts["right"] is not None]
    document = {
        "format": FORMAT,
        "model": {
            **model,
            "classes": contract.classes,
            "image_size": list(contract.input.size),
        },
        "dataset": {
            **dataset,
            "evaluated": len(measured.names),
            "with_masks": sum(facts["masks"] > 0 for facts in measured.facts),
            "objects": sum(facts["objects"] for facts in measured.facts),
            "accuracy": float(np.mean(right)) if right else None,
        },
        "failures": [{"name": name, "error": error} for name, error in failures],
        "settings": dict(settings),
        "versions": versions(),
        "methods": [
            {
                "name": name,
                "baseline": name in BASELINES,
                "class_specific": name not in BASELINES
                and METHODS[name].takes_target(contract.readout),
            }
            for name in layout.methods
        ],
        "measures": [_described(measure) for measure in measures],
        "values": [
            _value(statistics, method, measure) for measure in measures for method in layout.methods
        ],
        "curves": [*_curves(measured, measures, patches), *_cascade(measured, level_names)],
        "verdicts": _verdicts(statistics, layout.methods, measures),
        "examples": [],
    }
    return document, statistics


def _described(measure: Measure) -> dict[str, Any]:
    shown = ("name", "group", "title", "detail", "better", "range", "headline", "definition")
    fields = asdict(measure) | {"range": list(measure.range)}
    return {name: fields[name] for name in shown}


def _value(statistics: Statistics, method: str, measure: Measure) -> dict[str, Any]:
    own = statistics.value(method, measure)
    found: dict[str, Any] = {"method": method, "measure": measure.name, **asdict(own)}
    if method not in BASELINES:
        found["versus"] = {
            baseline: {
                "difference": difference.value,
                "low": difference.low,
                "high": difference.high,
            }
            for baseline in BASELINES
            if (difference := statistics.difference(method, baseline, measure)).value is not None
        }
    return found


def _curves(measured: Measured, measures: Sequence[Measure], patches: int) -> list[dict[str, Any]]:
    return [
        _curve(measure, method, _positions(measure, patches), curve)
        for measure, method, curve in measured.layout.curves(measured.totals)
        if measure in measures
    ]


def _positions(measure: Measure, patches: int) -> list[float]:
    if measure.group == "perturbation":
        return [tenths / 10 for tenths in TENTHS]
    steps = measure.points - 1
    return [i * patches // steps / patches for i in range(measure.points)]


def _curve(
    measure: Measure, method: str, x: Sequence[float], y: NDArray[np.float64], **more: Any
) -> dict[str, Any]:
    titles = {"x_title": measure.x_title, "y_title": measure.y_title, "x_names": None}
    return {
        "measure": measure.name,
        "method": method,
        "x": list(x),
        "y": y.tolist(),
        "low": None,
        "high": None,
        **titles,
        **more,
    }


def _cascade(measured: Measured, level_names: Sequence[str]) -> list[dict[str, Any]]:
    """The curve of the rank correlation over the levels of random weights."""
    measure = next((m for m in measured.layout.measures if m.name == "randomisation"), None)
    if measure is None or not measured.levels:
        return []
    means = np.stack([np.nanmean(record, axis=1) for record in measured.levels.values()], axis=1)
    names = ["trained", *level_names]
    return [
        _curve(measure, method, range(len(names)), np.array([1, *row]), x_names=names)
        for method, row in zip(measured.layout.methods, means, strict=False)
    ]


def _verdicts(
    statistics: Statistics, methods: Sequence[str], measures: Sequence[Measure]
) -> list[dict[str, Any]]:
    """The methods by the mean of their ranks in the headline measures, the best first."""
    headline = [measure for measure in measures if measure.headline]
    real = [name for name in methods if name not in BASELINES]
    ranks: dict[str, list[float]] = {name: [] for name in real}
    for measure in headline:
        sign = -1 if measure.better == "higher" else 1
        values = {name: statistics.value(name, measure).value for name in real}
        known = {name: sign * value for name, value in values.items() if value is not None}
        for name, value in known.items():
            others = list(known.values())
            ahead, equal = sum(v < value for v in others), sum(v == value for v in others)
            ranks[name].append(ahead + (equal + 1) / 2)
    by_name = {measure.name: measure for measure in measures}
    verdicts = []
    for name in real:
        differences = [(m, statistics.difference(name, RANDOM, m)) for m in headline]
        signs = [_beats(d, m.better) for m, d in differences if d.low is not None]
        verdicts.append(
            {
                "method": name,
                "mean_rank": float(np.mean(ranks[name])) if ranks[name] else None,
                "better_than_random": signs.count(1),
                "worse_than_random": signs.count(-1),
                "compared": len(signs),
                "class_sensitive": _surely_below(
                    statistics, name, by_name.get("class_sensitivity"), CLASS_SENSITIVE
                ),
                "weight_sensitive": _surely_below(
                    statistics, name, by_name.get("randomisation"), WEIGHT_SENSITIVE
                ),
            }
        )
    return sorted(verdicts, key=lambda v: (v["mean_rank"] is None, v["mean_rank"] or 0))


def _beats(difference: Interval, better: str) -> int:
    if not difference.excludes_zero or difference.value is None:
        return 0
    return 1 if (difference.value > 0) == (better == "higher") else -1


def _surely_below(
    statistics: Statistics, method: str, measure: Measure | None, limit: float
) -> bool | None:
    if measure is None:
        return None
    high = statistics.value(method, measure).high
    return None if high is None else high < limit
