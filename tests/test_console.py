"""What commands say on stderr while they work, where it is no terminal."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from onnxplain import console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time as it is set by hand, in seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(console, "_LEAST_QUIET", 10)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_log_has_a_line_at_each_tenth(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress("explaining", 200) as step:
        for _ in range(200):
            clock.now += 1.5
            step()
    assert capsys.readouterr() == (
        "",
        "onnxplain: explaining: 7 of 200, about 5 min left\n"
        + "".join(
            f"onnxplain: explaining: {done} of 200, about {left} left\n"
            for done, left in (
                *((20, "4 min"), (40, "4 min"), (60, "4 min"), (80, "3 min"), (100, "2 min")),
                *((120, "2 min"), (140, "90 s"), (160, "60 s"), (180, "30 s")),
            )
        )
        + "onnxplain: explaining: 200 of 200\n",
    )


def test_a_log_has_no_line_soon_after_another(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress("explaining", 10) as step:
        for _ in range(9):
            clock.now += 1
            step()
        assert capsys.readouterr().err == ""
        clock.now += 1
        step()
    assert capsys.readouterr().err == "onnxplain: explaining: 10 of 10\n"


def test_long_work_says_every_five_minutes_that_it_lives(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.stages() as tell:
        tell("evaluating", 500, 10_000)  # 500 are of an earlier run
        for done in range(501, 561):
            clock.now += 10
            tell("evaluating", done, 10_000)
        clock.now += 10
        tell("summing up", 0, 1)
    assert capsys.readouterr().err.splitlines() == [
        "onnxplain: evaluating: 501 of 10000, about 26 h left",
        "onnxplain: evaluating: 531 of 10000, about 26 h left",
        "onnxplain: summing up",
    ]
