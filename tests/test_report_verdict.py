"""Which method the report says to trust, and that it says so where none is to be trusted."""

from __future__ import annotations

import re
from typing import Any

from evaluation_results import full, minimal

from onnxplain.evaluation.report.reading import read
from onnxplain.evaluation.report.verdict import trusted, verdict


def words(results: dict[str, Any]) -> str:
    return re.sub(r"<[^>]+>", "", verdict(read(results)))


def test_verdict_names_the_best_method_that_passes() -> None:
    results, _ = full()
    assert words(results).startswith(
        "Trust transformer_attribution first: better than random maps in 8 of 8 measures, worse in "
        "none."
    )
    results["verdicts"][0]["weight_sensitive"] = False
    assert words(results).startswith(
        "Trust generic_attention first: better than random maps in 8 of 8 measures, worse in none. "
        "transformer_attribution ranks higher, but hardly changes when the model's weights"
    )
    results["verdicts"][1]["class_sensitive"] = False
    assert "It does not tell one class of a picture from another. attnlrp is" in words(results)


def test_verdict_is_honest_where_nothing_beats_random() -> None:
    results, _ = full()
    for one in results["verdicts"]:
        one |= {"better_than_random": 0, "worse_than_random": 1}
    assert words(results) == (
        "No method is better than random maps in any measure: trust none for this model and these "
        "pictures."
    )
    results["verdicts"][1] |= {"better_than_random": 6, "worse_than_random": 2}
    assert words(results).startswith(
        "No method can be trusted. generic_attention comes closest: it is worse than random maps "
        "in 2 of 8 measures."
    )


def test_verdict_does_not_trust_what_a_blob_in_the_centre_beats() -> None:
    results, _ = full()
    for value in results["values"]:
        for versus in value.get("versus", {}).values():
            versus |= {"low": -0.2, "high": 0.2}  # of neither
        if value["method"] == "transformer_attribution":
            better = {m["name"]: m["better"] for m in results["measures"]}[value["measure"]]
            sign = 1 if better == "lower" else -1
            value["versus"]["center_gaussian"] |= {"low": sign * 0.1, "high": sign * 0.1}
    text = words(results)
    assert text.startswith("Trust generic_attention first")
    assert "transformer_attribution ranks higher, but loses to a blob in the centre" in text


def test_verdict_of_few_pictures_and_of_nothing() -> None:
    results, _ = minimal()
    assert words(results) == "No measure was taken that tells which method to trust."
    results["verdicts"] = [
        {
            "method": "rollout",
            "mean_rank": 1.0,
            "better_than_random": 1,
            "worse_than_random": 0,
            "compared": 1,
            "class_sensitive": None,
            "weight_sensitive": None,
        }
    ]
    results["verdicts"][0]["better_than_random"] = 0
    assert words(results).startswith(
        "Do not trust rollout here: it is better than random maps in no measure."
    )
    results["verdicts"][0]["better_than_random"] = 1
    assert words(results) == (
        "rollout does best: better than random maps in 1 of 1 measures, worse in none. "
        "It is not tested whether its map changes when the model's weights are replaced: that was "
        "not measured, or on fewer than 6 pictures.\n"
        "With 12 pictures, only large differences show."
    )
    assert trusted(read(results), "rollout") is None
    results["verdicts"][0]["weight_sensitive"] = False
    assert trusted(read(results), "rollout") is False
    results["verdicts"][0]["weight_sensitive"] = True
    assert trusted(read(results), "rollout") is True
    assert words(results) == (
        "Trust rollout: better than random maps in 1 of 1 measures, worse in none.\n"
        "With 12 pictures, only large differences show."
    )


def test_verdict_says_where_pictures_are_too_few() -> None:
    results, _ = full()
    results["dataset"]["evaluated"] = 5
    for one in results["verdicts"]:
        one |= {"better_than_random": 0, "worse_than_random": 0, "compared": 0}
    assert words(results).startswith("Too few pictures to tell: 5. From 6 on")


def test_verdict_warns_of_a_model_that_is_often_wrong() -> None:
    results, _ = full()
    assert "look at its labels" not in words(results)
    results["dataset"]["accuracy"] = 0.0
    assert "The model is right about 0.0% of the pictures alone: look at its labels" in words(
        results
    )
