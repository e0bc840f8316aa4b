"""Which method to trust, in words."""

from __future__ import annotations

from html import escape

from onnxplain.evaluation.report.reading import CENTER, Reading
from onnxplain.evaluation.statistics import LEAST_PICTURES

__all__ = ["RULE", "doubt", "trusted", "verdict"]

RULE = (
    "A method is trusted here if, of the measures in the summary below, it is better than random "
    "maps in more than half and worse in none, if it is not more often worse than a blob in the "
    "centre than better, and if its map changes when the model's weights are replaced; where that "
    "alone was not measured, it is not tested. Of those, the one with the best mean rank comes "
    "first. That a method does not tell classes apart matters where a picture holds several things."
)
_OFTEN_WRONG = 0.5  # share of pictures that are classified rightly
_FEW = 100  # pictures; with fewer, only large differences can be told from chance


def doubt(reading: Reading, method: str) -> str | None:
    """Why a method is not trusted, to follow its name; None where it is."""
    better, worse, compared = _counts(reading, method)
    center = reading.standings(method, CENTER)
    lost = center.count("worse")
    if compared == 0:
        if any((method, one["name"]) in reading.values for one in reading.headlines):
            return f"was measured on fewer than {LEAST_PICTURES} pictures, too few to compare"
        return "was not compared to random maps"
    if better == 0:
        return "is better than random maps in no measure"
    if worse:
        return f"is worse than random maps in {worse} of {compared} measures"
    if better * 2 <= compared:
        return f"is better than random maps in only {better} of {compared} measures"
    if lost > center.count("better"):
        return f"loses to a blob in the centre in {lost} of {len(center)} measures"
    if reading.verdicts[method]["weight_sensitive"] is False:
        return "hardly changes when the model's weights are replaced by noise"
    return None


def trusted(reading: Reading, method: str) -> bool | None:
    """None where nothing speaks against it, but its dependence on weights was not measured."""
    if doubt(reading, method) is not None:
        return False
    sensitive: bool | None = reading.verdicts[method]["weight_sensitive"]
    return sensitive


def verdict(reading: Reading) -> str:
    """One or two paragraphs of HTML."""
    compared = [name for name in reading.verdicts if _counts(reading, name)[2]]
    if not compared:
        evaluated = reading.results["dataset"]["evaluated"]
        if evaluated < LEAST_PICTURES:
            return (
                f"<p>Too few pictures to tell: {evaluated}. From {LEAST_PICTURES} on numbers have "
                "an interval, and a method can be told from chance.</p>"
            )
        return "<p>No measure was taken that tells which method to trust.</p>"
    passing = [name for name in compared if doubt(reading, name) is None]
    useless = [name for name in compared if _counts(reading, name)[0] == 0]
    best = next((name for name in (*passing, *compared) if name not in useless), compared[0])
    if passing:
        lead = _praise(reading, compared, passing)
    elif len(compared) == 1:
        lead = f"Do not trust {_name(best)} here: it {doubt(reading, best)}."
    elif len(useless) == len(compared):
        lead = (
            "No method is better than random maps in any measure: trust none for this model and "
            "these pictures."
        )
    else:
        lead = f"No method can be trusted. {_name(best)} comes closest: it {doubt(reading, best)}."
    quiet = []
    if len(useless) < len(compared):
        quiet += _center(reading, best)
        if useless:
            quiet.append(
                f"Better than random maps in no measure: {', '.join(map(_name, useless))}."
            )
    accuracy = reading.results["dataset"]["accuracy"]
    if accuracy is not None and accuracy < _OFTEN_WRONG:
        quiet.insert(
            0,
            f"The model is right about {accuracy:.1%} of the pictures alone: look at its labels, "
            "and at mean and std in its contract, before trusting any map.",
        )
    evaluated = reading.results["dataset"]["evaluated"]
    if evaluated < _FEW:
        pictures = "picture" if evaluated == 1 else "pictures"
        quiet.append(f"With {evaluated} {pictures}, only large differences show.")
    rest = f'\n<p class="quiet">{" ".join(quiet)}</p>' if quiet else ""
    return f'<p class="lead">{lead}</p>{rest}'


def _praise(reading: Reading, compared: list[str], passing: list[str]) -> str:
    chosen = passing[0]
    better, _, of = _counts(reading, chosen)
    first = " first" if len(compared) > 1 else ""
    tested = trusted(reading, chosen) is not None
    lead = f"Trust {_name(chosen)}{first}" if tested else f"{_name(chosen)} does best"
    sentences = [f"{lead}: better than random maps in {better} of {of} measures, worse in none."]
    if not tested:
        sentences.append(
            "It is not tested whether its map changes when the model's weights are replaced: that "
            f"was not measured, or on fewer than {LEAST_PICTURES} pictures."
        )
    sentences += [
        f"{_name(name)} ranks higher, but {doubt(reading, name)}."
        for name in compared[: compared.index(chosen)]
    ]
    if reading.verdicts[chosen]["class_sensitive"] is False:
        sentences.append("It does not tell one class of a picture from another.")
        telling = [name for name in passing if reading.verdicts[name]["class_sensitive"]]
        sentences += [f"{_name(name)} is the best that does." for name in telling[:1]]
    return " ".join(sentences)


def _center(reading: Reading, method: str) -> list[str]:
    standings = reading.standings(method, CENTER)
    if not standings:
        return []
    better, worse = standings.count("better"), standings.count("worse")
    return [
        f"Against a fixed blob in the middle of the picture, {_name(method)} is better in "
        f"{better or 'none'} of {len(standings)} measures and worse in {worse or 'none'}."
    ]


def _counts(reading: Reading, method: str) -> tuple[int, int, int]:
    """Measures in which it is better and worse than random maps, and of how many."""
    verdict = reading.verdicts[method]
    return verdict["better_than_random"], verdict["worse_than_random"], verdict["compared"]


def _name(method: str) -> str:
    return f"<code>{escape(method)}</code>"
