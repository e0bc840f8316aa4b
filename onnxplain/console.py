"""How the command line talks and ends: exit statuses, one-line errors, summaries, progress."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from onnxplain.errors import OnnxplainError

__all__ = ["SOME_FAILED", "Commands", "complain", "print_json", "progress", "resumable", "stages"]

SOME_FAILED = 1
UNUSABLE = 2
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended
_BY_SIGNAL = 128  # the same for any signal, plus its number
_LEAST_QUIET, _MOST_QUIET = 10, 300  # seconds between lines of progress in a log


class Commands(TyperGroup):
    """The commands, with one way out: an error is one line on stderr and an exit status."""

    def main(self, args: Any = None, *positional: Any, **options: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):  # a name that they cannot show is no failure
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        warnings.filterwarnings("ignore", module="PIL")  # of large pictures, which are fine
        debug = "--debug" in (sys.argv[1:] if args is None else args)
        options["standalone_mode"] = False
        try:
            with _heeding_interrupts():
                status = super().main(args, *positional, **options)
        except Exception as error:
            status = INTERRUPTED if _interrupted(error) or _struck else UNUSABLE
            if debug:
                traceback.print_exc()
            if status == UNUSABLE or isinstance(error, _Interrupted):
                complain(_one_line(error))
                sys.exit(_ended(status))
        if status == INTERRUPTED:
            complain("interrupted")
        sys.exit(_ended(status or 0))


_struck: list[int] = []  # the signals that came


@contextlib.contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Keeps in mind that Ctrl-C came: where it strikes an import that may fail, it is swallowed.

    SIGTERM, of `timeout` and of CI, ends the work in the same way, so that nothing is left behind.
    """

    def stop(number: int, _: object) -> None:
        _struck.append(number)
        raise KeyboardInterrupt

    _struck.clear()
    usual: dict[signal.Signals, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    main = threading.current_thread() is threading.main_thread()  # no other may set a handler
    # Another handler stays, as in the background, where a shell has Ctrl-C ignored.
    ours = [number for number, how in usual.items() if main and signal.getsignal(number) is how]
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, usual[number])


def _ended(status: int) -> int:
    return _BY_SIGNAL + _struck[0] if status == INTERRUPTED and _struck else status


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: extension modules make an ImportError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _one_line(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "onnxplain"
        return f"{error.format_message()} ({command} --help tells more)"
    if isinstance(error, OnnxplainError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"


def complain(message: str) -> None:
    print("onnxplain:", " ".join(message.split()), file=sys.stderr)


def print_json(**summary: Any) -> None:
    print(json.dumps(summary, indent=2))


class _Interrupted(OnnxplainError):
    """Ctrl-C in work that can be taken up again."""


@contextlib.contextmanager
def resumable(how: str) -> Iterator[None]:
    """Adds to the message after Ctrl-C how the work goes on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise _Interrupted(f"interrupted; {how}") from interrupt


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Tells on stderr how work goes on; gives what each step calls.

    A step raises `KeyboardInterrupt` where Ctrl-C came before and got lost.
    """
    with stages() as tell:
        steps = itertools.count(1)
        tell(what, 0, total)
        yield lambda: tell(what, next(steps), total)


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """The same for work in stages: is told what is going on, how much is done, and of how much.

    On a terminal a bar, elsewhere (a log) few lines.
    """
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, total: int) -> None:
            _heed()
            if what not in tasks:
                for task in bar.tasks:  # the stages before are over
                    bar.update(task.id, completed=task.total)
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done)

        yield tell


def _heed() -> None:
    if _struck:
        raise KeyboardInterrupt


class _Lines:
    """A line at each stage and each tenth of one, and at least every some minutes, but none soon
    after another, so that short work says nothing."""

    def __init__(self) -> None:
        self._told_at = time.monotonic()
        self._what = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        _heed()
        now = time.monotonic()
        if what != self._what:
            self._what, self._tenth = what, -1
            self._start, self._before = now, done  # an earlier run may have done some
        quiet, tenth = now - self._told_at, 10 * done // max(total, 1)
        if quiet < _LEAST_QUIET or (tenth == self._tenth and quiet < _MOST_QUIET):
            return
        self._told_at, self._tenth = now, tenth
        line = what if total == 1 else f"{what}: {done} of {total}"
        if self._before < done < total:
            left = (now - self._start) / (done - self._before) * (total - done)
            line += f", about {_duration(left)} left"
        complain(line)


def _duration(seconds: float) -> str:
    """In the largest unit of which it has two."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
