"""Writes the definitions and the results of the bundled model into docs/evaluation.md.

    python -m benchmarks.evaluation_page work/       # some hours on two cores; goes on where it was

Each bundled set is evaluated in a folder of its own below `work/`, which then has its report.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from pathlib import Path

import onnxplain as ox
from onnxplain.evaluation.datasets import BUNDLED
from onnxplain.evaluation.measures import FILLS, GROUPS, Measure, measures_of
from onnxplain.evaluation.report.copies import as_markdown
from onnxplain.evaluation.report.reading import read
from onnxplain.evaluation.statistics import Interval

__all__ = ["DEFINITIONS", "PAGE", "definitions", "main"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "evaluation.md"
DEFINITIONS = "<!-- definitions -->\n", "<!-- end of the definitions -->\n"
MEASURED = "<!-- measured -->\n", "<!-- end of what was measured -->\n"
FILLED = ("zero", "road")

# What the papers say is better, and than what.
BETTER = ("transformer_attribution", "generic_attention")
THAN = ("rollout", "raw_attention", "random")
ORDERED = (
    "perturbation.zero.positive.predicted",
    "perturbation.zero.negative.predicted",
    "perturbation.zero.difference.target",
    "perturbation.road.difference.target",
    "pixel_accuracy",
    "miou",
    "map",
    "pointing_game",
)


def definitions() -> str:
    """Every measure, one after the other; those of other fills and of the target class once."""
    lines = []
    for measure in measures_of(GROUPS, ["zero"], 16, ["all"]):
        if measure.name.endswith(".target"):
            continue
        name = ", ".join(filter(None, (measure.title, measure.detail)))
        low, high = (f"{bound:g}" for bound in measure.range)
        lines.append(
            f"- **{name}** (`{measure.name}`, {low} to {high}, {measure.better} is better). "
            f"{measure.definition}"
        )
    lines.append(
        "- `*.target` instead of `*.predicted`: the map and the probability are of the label, and "
        "the prediction counts as right where it is the label."
    )
    lines += [f"- fill `{fill}`: removed pixels are {done}." for fill, done in FILLS.items()]
    return "\n".join(lines) + "\n"


def tables(found: ox.Evaluation) -> Iterator[str]:
    data = found.results["dataset"]
    yield f"### `{data['name']}`"
    yield (
        f"{data['evaluated']} pictures, {data['objects']} objects, "
        f"{data['accuracy']:.1%} classified rightly."
    )
    reading = read(found.results)
    measures = {measure["name"]: measure for measure in found.results["measures"]}
    for names in (
        [name for name in measures if name.startswith("perturbation.zero")],
        [name for name in measures if name.startswith("perturbation.road")],
        [name for name in measures if measures[name]["group"] == "insertion_deletion"],
        [name for name in measures if measures[name]["group"] == "localisation"],
        [name for name in measures if measures[name]["group"] == "sanity"],
    ):
        yield as_markdown(reading, [measures[name] for name in names])
    yield "The order of the papers' tables, as differences with their 95 % intervals:"
    yield order(found, [name for name in ORDERED if name in measures])


def order(found: ox.Evaluation, names: Sequence[str]) -> str:
    """What is said to be better less what it is said to be better than."""
    by_name = {measure.name: measure for measure in measures_of(GROUPS, FILLS, 16, ["all"])}
    pairs = [(better, than) for better in BETTER for than in THAN]
    head = ["measure", *(f"{better} - {than}" for better, than in pairs)]
    rows = [
        [
            f"`{name}` ({by_name[name].better})",
            *(_told(found.difference(*pair, name), by_name[name]) for pair in pairs),
        ]
        for name in names
    ]
    lines = [head, ["---", *("---:" for _ in pairs)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _told(difference: Interval, measure: Measure) -> str:
    assert difference.value is not None and difference.low is not None
    text = f"{difference.value:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"
    if not difference.excludes_zero:
        return f"{text} ="
    better = (difference.value > 0) == (measure.better == "higher")
    return f"{text} {'yes' if better else '**no**'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", type=Path, help="Folder of the reports.")
    work = parser.parse_args().work
    page = _replaced(PAGE.read_text(encoding="utf-8"), DEFINITIONS, definitions())
    parts: list[str] = []
    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as model:
        for name in BUNDLED:
            folder = work / f"out-{name}"
            found = ox.evaluate(model, name, folder, fills=FILLED, device="cpu", threads=1)
            parts += tables(found)
    page = _replaced(page, MEASURED, "\n\n".join(parts) + "\n")
    PAGE.write_text(page, encoding="utf-8")


def _replaced(page: str, marks: tuple[str, str], text: str) -> str:
    start, end = marks
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE}: no {start.strip()} or {end.strip()}")
    return before + start + text + end + after


if __name__ == "__main__":
    main()
