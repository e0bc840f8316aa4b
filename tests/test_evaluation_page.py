"""docs/evaluation.md says what the measures are."""

from __future__ import annotations

from benchmarks.evaluation_page import DEFINITIONS, PAGE, definitions


def test_definitions_are_those_of_the_code() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition(DEFINITIONS[0])
    text, end, _ = rest.partition(DEFINITIONS[1])
    assert end
    assert text == definitions()
