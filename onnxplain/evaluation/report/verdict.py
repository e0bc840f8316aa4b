"""Which method to trust, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from onnxplain.evaluation.report.reading import CENTER, Reading

__all__ = ["RULE", "doubt", "verdict"]

RULE = (
    "A method is trusted here if it is better than random maps in more than half of the measures "
    "it was compared in, worse in none, and if its map does not survive the loss of the model's "
    "weights. Of those, the one with the best mean rank comes first."
)
_FEW = 100  # pictures; with fewer, only large differences can be told from chance


def doubt(verdict: Mapping[str, Any]) -> str | None:
    """Why a method is not trusted, to follow its name; None where it is."""
    better, worse, compared = _counts(verdict)
    if better == 0:
        return "is in no measure better than a random map"
    if worse:
        return f"is worse than a random map in {worse} of {compared} measures"
    if better * 2 <= compared:
        return f"is better than a random map in only {better} of {compared} measures"
    if verdict["weight_sensitive"] is False:
        return "hardly changes when the model's weights are replaced by noise"
    return None


def verdict(reading: Reading) -> str:
    """One or more paragraphs of HTML."""
    verdicts = {name: one for name, one in reading.verdicts.items() if one["compared"]}
    if not verdicts:
        return "<p>No measure was taken that tells which method to trust.</p>"
    trusted = [name for name, one in verdicts.items() if doubt(one) is None]
    useless = [name for name, one in verdicts.items() if one["better_than_random"] == 0]
    first, *quiet = _first(verdicts, trusted, useless)
    if len(useless) < len(verdicts):
        quiet += _center(reading, trusted[0] if trusted else next(iter(verdicts)))
    if 0 < len(useless) < len(verdicts):
        quiet.append(f"Not better than random in any measure: {_names(useless)}.")
    evaluated = reading.results["dataset"]["evaluated"]
    if evaluated < _FEW:
        pictures = "picture" if evaluated == 1 else "pictures"
        quiet.append(f"With {evaluated} {pictures}, only large differences show.")
    rest = f'\n<p class="quiet">{" ".join(quiet)}</p>' if quiet else ""
    return f'<p class="lead">{first}</p>{rest}'


def _first(
    verdicts: dict[str, Mapping[str, Any]], trusted: list[str], useless: list[str]
) -> list[str]:
    top = next(iter(verdicts))
    if not trusted and len(useless) == len(verdicts):
        whom = f"{_name(top)} is" if len(verdicts) == 1 else "No method is"
        neither = "" if len(verdicts) == 1 else " any of them"
        return [
            f"{whom} better than a random map in any measure: do not trust{neither or ' it'} "
            "for this model and these pictures."
        ]
    if not trusted:
        better, _, compared = _counts(verdicts[top])
        if len(verdicts) == 1:
            return [f"Do not rely on {_name(top)} here: it {doubt(verdicts[top])}."]
        return [
            f"No method can be trusted throughout. {_name(top)} comes closest, better than a "
            f"random map in {better} of {compared} measures, but it {doubt(verdicts[top])}."
        ]
    chosen = trusted[0]
    better, _, compared = _counts(verdicts[chosen])
    only = " (the only method evaluated)" if len(verdicts) == 1 else " first"
    sentences = [
        f"Trust {_name(chosen)}{only}: better than a random map in {better} of {compared} "
        "measures, worse in none."
    ]
    sentences += [
        f"{_name(name)} ranks higher, but {doubt(one)}."
        for name, one in list(verdicts.items())[: list(verdicts).index(chosen)]
    ]
    if verdicts[chosen]["class_sensitive"] is False:
        telling = [name for name in trusted if verdicts[name]["class_sensitive"]]
        other = f" {_name(telling[0])} is the best that does." if telling else ""
        sentences.append(f"It does not tell one class of a picture from another.{other}")
    return sentences


def _center(reading: Reading, method: str) -> list[str]:
    standings = reading.standings(method, CENTER)
    if not standings:
        return []
    better, worse = standings.count("better"), standings.count("worse")
    against = "Against a fixed blob in the middle of the picture"
    if better == 0:
        return [
            f"{against}, which knows nothing of the model, {_name(method)} is better in no measure."
        ]
    return [
        f"{against}, {_name(method)} is better in {better} of {len(standings)} measures and worse "
        f"in {worse or 'none'}."
    ]


def _counts(verdict: Mapping[str, Any]) -> tuple[int, int, int]:
    return verdict["better_than_random"], verdict["worse_than_random"], verdict["compared"]


def _name(method: str) -> str:
    return f"<code>{escape(method)}</code>"


def _names(methods: Iterable[str]) -> str:
    return ", ".join(map(_name, methods))
