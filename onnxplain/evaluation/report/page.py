"""The page: `page.html` filled with what the other modules make of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.evaluation.report.charts import chart, looks
from onnxplain.evaluation.report.copies import copies
from onnxplain.evaluation.report.examples import examples
from onnxplain.evaluation.report.reading import Reading, read
from onnxplain.evaluation.report.tables import FEW, definition_id, measure_table, ranking
from onnxplain.evaluation.report.verdict import RULE, verdict

__all__ = ["page"]

# Group of measures: its heading, what it asks, and whether papers print it.
_GROUPS = {
    "perturbation": (
        "Perturbation",
        "Pixels are removed in the order of the map, and the model is asked again. If the map is "
        "right, removing the most relevant pixels first (positive) makes accuracy fall fast, and "
        "removing the least relevant first (negative) leaves it high.",
        True,
    ),
    "insertion_deletion": (
        "Insertion and deletion",
        "The probability of the class while patches are put in or taken out, most relevant first.",
        False,
    ),
    "localisation": (
        "Localisation",
        "How well the map covers the object's mask. A model may rightly look beside the object; "
        "this table cannot tell that from a bad map.",
        True,
    ),
    "sanity": (
        "Sanity",
        "A map that explains the model must change when the model's weights or the class asked "
        "change. A map that stays the same shows the picture, not the model.",
        False,
    ),
}
_STYLES = ("page.css", "tables.css", "figures.css", "media.css")  # the last overrides
_MANY_FAILURES = 10  # more are folded away


def page(results: Mapping[str, Any], pictures: Sequence[NDArray[np.uint8]]) -> str:
    """The whole of `index.html`.

    Args:
        results: Free of NaN.
        pictures: uint8 [H, W, 3] RGB each.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    reading = read(results)
    here = files(__package__)
    sections = {
        "summary": ("Summary", _summary(reading)),
        **{group: (_GROUPS[group][0], _group(reading, group)) for group in _GROUPS},
        "curves": ("Curves", _curves(reading)),
        "examples": ("Examples", examples(reading, pictures)),
        "failures": ("Failures", _failures(results["failures"])),
        "definitions": ("Definitions", _definitions(reading)),
        "settings": ("Settings and versions", _settings(results)),
    }
    present = {name: both for name, both in sections.items() if both[1]}
    links = [f'<a href="#{name}">{heading}</a>' for name, (heading, _) in present.items()]
    return Template(here.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        style="\n".join(
            here.joinpath("style", name).read_text(encoding="utf-8") for name in _STYLES
        ),
        model=escape(results["model"]["name"]),
        dataset=escape(results["dataset"]["name"]),
        facts=_facts(results),
        verdict=verdict(reading),
        ranking=ranking(reading),
        rule=escape(RULE),
        confidence=f"{results['settings']['confidence']:.0%}",
        resamples=results["settings"]["resamples"],
        few=FEW,
        links="\n".join([*links, '<a href="#reading">How to read this</a>']),
        sections="\n\n".join(
            f'<section id="{name}">\n<h2>{heading}</h2>\n{content}\n</section>'
            for name, (heading, content) in present.items()
        ),
    )


def _facts(results: Mapping[str, Any]) -> str:
    """The line below the title."""
    model, dataset = results["model"], results["dataset"]
    height, width = model["image_size"]
    pictures = f"{dataset['evaluated']} of {dataset['pictures']} pictures"
    if dataset["evaluated"] == dataset["pictures"]:
        pictures = f"{dataset['pictures']} pictures"
    facts = [pictures]
    if dataset["objects"] != dataset["pictures"]:
        facts.append(f"{dataset['objects']} objects")
    facts.append(f"{dataset['with_masks'] or 'none'} with masks")
    if dataset["accuracy"] is not None:
        facts.append(f"{dataset['accuracy']:.1%} classified rightly")
    facts += [f"{model['classes']} classes", f"{height} &times; {width} pixels"]
    if failed := len(results["failures"]):
        facts.append(f'<a href="#failures">{failed} failed</a>')
    return " · ".join(facts)


def _summary(reading: Reading) -> str:
    if not reading.headlines:
        return ""
    return measure_table(reading, reading.headlines, "Headline measures")


def _group(reading: Reading, group: str) -> str:
    measures = reading.in_group(group)
    if not measures:
        return ""
    heading, question, printed = _GROUPS[group]
    parts = [f"<p>{escape(question)}</p>", measure_table(reading, measures, heading)]
    if printed:
        parts.append(copies(reading, measures))
    return "\n".join(parts)


def _curves(reading: Reading) -> str:
    curves = sorted(
        reading.results["curves"], key=lambda one: list(reading.measures).index(one["measure"])
    )
    look = looks(reading)
    charts = [
        chart(reading, list(found), look, f"chart-{index}")
        for index, (_, found) in enumerate(groupby(curves, lambda one: one["measure"]), 1)
    ]
    return '<div class="charts">\n' + "\n".join(charts) + "\n</div>" if charts else ""


def _failures(failures: Sequence[Mapping[str, str]]) -> str:
    if not failures:
        return ""
    items = "\n".join(
        f"<li><b><bdi>{escape(one['name'])}</bdi></b> {escape(one['error'])}</li>"
        for one in failures
    )
    state = "" if len(failures) > _MANY_FAILURES else " open"
    return (
        f"<details{state}><summary>Left out of every number: {len(failures)}</summary>\n"
        f'<ul class="failures">\n{items}\n</ul></details>'
    )


def _definitions(reading: Reading) -> str:
    return (
        '<dl class="definitions">\n'
        + "\n".join(
            f'<div><dt id="{definition_id(reading, name)}">'
            f"{escape(', '.join(filter(None, (one['title'], one['detail']))))}"
            f" <code>{escape(name)}</code></dt>\n"
            f"<dd>{escape(one['definition'])} {_scale(one)}</dd></div>"
            for name, one in reading.measures.items()
        )
        + "\n</dl>"
    )


def _scale(measure: Mapping[str, Any]) -> str:
    low, high = measure["range"]
    aims = {"lower": "; lower is better", "higher": "; higher is better"}
    return f'<span class="quiet">From {low} to {high}{aims.get(measure["better"], "")}.</span>'


def _settings(results: Mapping[str, Any]) -> str:
    parts = {
        "Model": results["model"],
        "Pictures": results["dataset"],
        "Settings": results["settings"],
        "Versions": results["versions"],
    }
    return '<div class="settings">\n' + "\n".join(map(_listing, parts, parts.values())) + "\n</div>"


def _listing(heading: str, entries: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(str(name).replace("_", " "))}</th>'
        f"<td>{escape(_text(value))}</td></tr>"
        for name, value in entries.items()
    )
    return f"<table>\n<caption>{heading}</caption>\n<tbody>\n{rows}\n</tbody></table>"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(inner)}" for name, inner in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list) else str(value)
