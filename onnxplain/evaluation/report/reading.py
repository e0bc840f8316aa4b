"""How results are read: methods best first, values by method and measure, and where they stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CENTER", "RANDOM", "SIGNS", "Reading", "Standing", "read"]

RANDOM, CENTER = "random", "center_gaussian"

Standing = Literal["better", "same", "worse"]
SIGNS: dict[Standing, str] = {"better": "▲", "same": "=", "worse": "▼"}

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """Results in the order and by the names that the page needs.

    Attributes:
        results: All of them, as they came.
        methods: By name, best first; baselines come last.
        measures: By name.
        values: By method and measure; only what was measured.
        verdicts: By method, of methods that are no baselines, best first.
    """

    results: Entry
    methods: dict[str, Entry]
    measures: dict[str, Entry]
    values: dict[tuple[str, str], Entry]
    verdicts: dict[str, Entry]

    @property
    def headlines(self) -> list[Entry]:
        return [measure for measure in self.measures.values() if measure["headline"]]

    def in_group(self, group: str) -> list[Entry]:
        """The measures of a group, those of one title beside each other."""
        found = [measure for measure in self.measures.values() if measure["group"] == group]
        titles = list(dict.fromkeys(measure["title"] for measure in found))
        return sorted(found, key=lambda measure: titles.index(measure["title"]))

    def standing(self, method: str, measure: str, baseline: str) -> Standing | None:
        """Whether the interval of the paired difference excludes 0, and on which side.

        None where the measure has no better side, or nothing was compared.
        """
        better = self.measures[measure]["better"]
        versus = self.values.get((method, measure), {}).get("versus", {}).get(baseline)
        if better == "none" or versus is None or versus["low"] is None or versus["high"] is None:
            return None
        if versus["low"] <= 0 <= versus["high"]:
            return "same"
        return "better" if (versus["low"] > 0) == (better == "higher") else "worse"

    def standings(self, method: str, baseline: str) -> list[Standing]:
        """Those of a method in all headline measures in which it was compared."""
        found = (self.standing(method, one["name"], baseline) for one in self.headlines)
        return [standing for standing in found if standing is not None]

    def best(self, measure: Entry, methods: Iterable[str]) -> list[str]:
        """The methods with the best value, several if they tie. Baselines are none, and a sanity
        check is passed or not: a map is no better for changing more."""
        if measure["better"] == "none" or measure["group"] == "sanity":
            return []
        measured = {
            method: self.values[method, measure["name"]]["value"]
            for method in methods
            if (method, measure["name"]) in self.values and method in self.verdicts
        }
        best = (max if measure["better"] == "higher" else min)(measured.values(), default=None)
        return [method for method, value in measured.items() if value == best]


def read(results: Entry) -> Reading:
    """Puts results in order; they are free of NaN."""
    given = {method["name"]: method for method in results["methods"]}
    verdicts = {
        verdict["method"]: verdict
        for verdict in results["verdicts"]
        if not given[verdict["method"]]["baseline"]
    }
    ranked = [*verdicts, *(name for name in given if name not in verdicts)]
    return Reading(
        results=results,
        methods={name: given[name] for name in sorted(ranked, key=lambda n: given[n]["baseline"])},
        measures={measure["name"]: measure for measure in results["measures"]},
        values={
            (value["method"], value["measure"]): value
            for value in results["values"]
            if value["value"] is not None
        },
        verdicts=verdicts,
    )
