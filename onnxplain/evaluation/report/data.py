"""The results for programs: JSON as they are, and CSV with a row per value."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["as_csv", "as_json", "without_nan"]


def without_nan(value: Any) -> Any:
    """The same with None for every number that is not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def as_json(results: Mapping[str, Any]) -> str:
    """The results as they are, indented. Pure ASCII, so that any file name survives."""
    return json.dumps(results, indent=1, allow_nan=False) + "\n"


def as_csv(results: Mapping[str, Any]) -> str:
    """A row per value, with the paired difference to each baseline; empty where not measured."""
    measures = {measure["name"]: measure for measure in results["measures"]}
    baselines = [method["name"] for method in results["methods"] if method["baseline"]]
    columns = ["method", "measure", "group", "value", "low", "high", "count", "better"]
    for baseline in baselines:
        columns += [f"versus_{baseline}{part}" for part in ("", "_low", "_high")]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for value in results["values"]:
        measure = measures[value["measure"]]
        row = {name: value[name] for name in ("method", "measure", "value", "low", "high", "count")}
        row |= {"group": measure["group"], "better": measure["better"]}
        for baseline, versus in value.get("versus", {}).items():
            row[f"versus_{baseline}"] = versus["difference"]
            row |= {f"versus_{baseline}_{end}": versus[end] for end in ("low", "high")}
        writer.writerow(row)
    return text.getvalue()
