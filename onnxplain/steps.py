"""How long work tells what it is at."""

from __future__ import annotations

import itertools
from collections.abc import Callable

__all__ = ["Step", "counted", "silent"]

Step = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done, and of how much."""


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


def counted(step: Step, what: str, total: int) -> Callable[[], None]:
    """Tells that work begins; gives what each of its parts calls when it is done."""
    done = itertools.count()

    def one_more() -> None:
        step(what, next(done), total)

    one_more()
    return one_more
