"""Tables of HTML: the ranking, and methods by measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

from onnxplain.evaluation.report.reading import CENTER, RANDOM, SIGNS, Reading, Standing
from onnxplain.evaluation.report.verdict import doubt, trusted
from onnxplain.evaluation.statistics import LEAST_PICTURES

__all__ = [
    "ARROWS",
    "FEW",
    "definition_id",
    "measure_table",
    "method_name",
    "number",
    "ranking",
]

FEW = f"fewer than {LEAST_PICTURES} pictures"
"""Why a number that was measured has no interval, and what is told by intervals no answer."""

ARROWS = {"lower": "↓", "higher": "↑", "none": ""}
_AIMS = {"lower": "lower is better", "higher": "higher is better"}
_SAYS: dict[Standing, str] = {
    "better": "better than random",
    "same": "not distinguishable from random",
    "worse": "worse than random",
}


def number(value: float | None) -> str:
    """Three decimals with a true minus, and no minus before what rounds to 0; None is a dash."""
    if value is None:
        return "\N{EN DASH}"
    text = f"{value:.3f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def definition_id(reading: Reading, measure: str) -> str:
    return f"definition-{list(reading.measures).index(measure) + 1}"


def method_name(method: str) -> str:
    """As code that may be broken after each word."""
    return f"<code>{escape(method).replace('_', '_<wbr>')}</code>"


def _scrolling(label: str, table: str) -> str:
    """A table that scrolls by itself where the page is too narrow; with the keyboard too."""
    name = escape(label)
    return f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">\n{table}\n</div>'


def ranking(reading: Reading) -> str:
    """Methods best first, and what speaks for and against each."""
    if not reading.verdicts:
        return ""
    rows = "\n".join(
        _ranked(reading, place, method, verdict)
        for place, (method, verdict) in enumerate(reading.verdicts.items(), 1)
    )
    table = f"""<table class="ranking">
<caption>Methods by mean rank over the headline measures</caption>
<thead><tr><th scope="col">Method</th><th scope="col">Trusted</th>
<th scope="col" class="number">Mean rank</th>
<th scope="col">Against random maps</th><th scope="col">Against a centre blob</th>
<th scope="col">Tells classes apart</th><th scope="col">Depends on weights</th>
<th scope="col">Why not trusted</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>"""
    return _scrolling("Ranking of methods", table)


def _ranked(reading: Reading, place: int, method: str, verdict: Mapping[str, Any]) -> str:
    better, worse = verdict["better_than_random"], verdict["worse_than_random"]
    reason = doubt(reading, method)
    center = reading.standings(method, CENTER)
    rank = number(None) if verdict["mean_rank"] is None else f"{verdict['mean_rank']:.1f}"
    compared = verdict["compared"]
    few = any((method, one["name"]) in reading.values for one in reading.headlines)
    cells = [
        _trusted(trusted(reading, method)),
        f'<td class="number">{rank}</td>',
        _tally(better, compared - better - worse, worse) if compared else _absent(few),
        _tally(*(center.count(standing) for standing in SIGNS)) if center else _absent(few),
        _yes_or_no(verdict["class_sensitive"], (method, "class_sensitivity") in reading.values),
        _yes_or_no(verdict["weight_sensitive"], (method, "randomisation") in reading.values),
        f'<td class="reason">{escape(reason or "")}</td>',
    ]
    head = f'<th scope="row"><span class="place">{place}</span>{method_name(method)}</th>'
    return f"<tr>{head}{''.join(cells)}</tr>"


def _trusted(value: bool | None) -> str:
    return '<td class="absent">not tested</td>' if value is None else _yes_or_no(value)


def _absent(few: bool) -> str:
    why = FEW if few else "not measured"
    return f'<td class="absent" title="{why}">&ndash;<span class="unseen"> {why}</span></td>'


def _yes_or_no(value: bool | None, measured: bool = True) -> str:
    """`measured`: there is a number, be it of too few pictures for an answer."""
    if value is None:
        return _absent(measured)
    return '<td class="yes">✓ yes</td>' if value else '<td class="no">✗ no</td>'


def _tally(better: int, same: int, worse: int) -> str:
    """How often each standing; a sign per measure would not fit a narrow page."""
    counts = zip(SIGNS.items(), (better, same, worse), strict=True)
    parts = (
        f'<span class="{standing if count else "nil"}">'
        f'<span aria-hidden="true">{sign}</span> {count}'
        f'<span class="unseen"> {standing}</span></span>'
        for (standing, sign), count in counts
    )
    return f'<td class="tally">{" ".join(parts)}</td>'


def measure_table(reading: Reading, measures: Sequence[Mapping[str, Any]], caption: str) -> str:
    """Every method's value and interval in each measure.

    A sign says how it compares to random maps; the best of a column is bold; the head of a column
    links to the measure's definition.
    """
    groups = [(title, list(found)) for title, found in groupby(measures, lambda one: one["title"])]
    titles = "".join(
        f'<th scope="colgroup" colspan="{len(found)}">{escape(title)}</th>'
        for title, found in groups
    )
    details = "".join(
        _detail(reading, measure, first=index == 0)
        for _, found in groups
        for index, measure in enumerate(found)
    )
    best = {one["name"]: reading.best(one, reading.methods) for one in measures}
    rows = []
    for method, about in reading.methods.items():
        cells = "".join(_cell(reading, method, one["name"], best[one["name"]]) for one in measures)
        kind = ' class="baseline"' if about["baseline"] else ""
        rows.append(f'<tr{kind}><th scope="row">{method_name(method)}</th>{cells}</tr>')
    body = "\n".join(rows)
    table = f"""<table class="measures">
<caption>{escape(caption)}</caption>
<thead><tr><th rowspan="2" scope="col">Method</th>{titles}</tr>
<tr>{details}</tr></thead>
<tbody>
{body}
</tbody>
</table>"""
    return _scrolling(caption, table)


def _detail(reading: Reading, measure: Mapping[str, Any], *, first: bool) -> str:
    """The lower half of a column's head; `first` of the columns below one title."""
    link = f"#{definition_id(reading, measure['name'])}"
    text = escape(measure["detail"] or "definition")
    aim = ""
    if measure["better"] in _AIMS:
        sign, words = ARROWS[measure["better"]], _AIMS[measure["better"]]
        aim = (
            f'&nbsp;<span class="aim" title="{words}" role="img" aria-label="{words}">{sign}</span>'
        )
    kind = ' class="first"' if first else ""
    return f'<th scope="col"{kind}><a href="{link}">{text}</a>{aim}</th>'


def _cell(reading: Reading, method: str, measure: str, best: Sequence[str]) -> str:
    value = reading.values.get((method, measure))
    if value is None:
        return '<td class="absent">&ndash;<small>not measured</small></td>'
    standing = reading.standing(method, measure, RANDOM)
    sign = ""
    if standing is not None:
        says, versus = _SAYS[standing], value["versus"][RANDOM]
        difference, low, high = (number(versus[name]) for name in ("difference", "low", "high"))
        sign = (
            f'<span class="sign" role="img" aria-label="{says}" '
            f'title="{says}: {difference} ({low} to {high})">{SIGNS[standing]}</span> '
        )
    shown = number(value["value"])
    if method in best:
        shown = f"<strong>{shown}</strong>"
    interval = f'<small title="{FEW}">no interval</small>'
    if value["low"] is not None and value["high"] is not None:
        interval = f"<small>{number(value['low'])} to {number(value['high'])}</small>"
    kind = f' class="{standing}"' if standing else ""
    return f"<td{kind}>{sign}{shown}{interval}</td>"
