"""How the command line talks and ends: exit statuses, one-line errors, summaries, a bar."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from onnxplain.errors import OnnxplainError

if TYPE_CHECKING:
    from onnxplain.graphs import Report
    from onnxplain.verification import Verification

__all__ = [
    "SOME_FAILED",
    "Commands",
    "complain",
    "print_json",
    "print_report",
    "print_verification",
    "progress",
]

SOME_FAILED = 1
UNUSABLE = 2
_PIPE_WIDTH = 160  # characters, where there is no terminal to tell
INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended


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
            status = INTERRUPTED if _interrupted(error) else UNUSABLE
            if debug:
                traceback.print_exc()
            if status == UNUSABLE:
                complain(_one_line(error))
        if status == INTERRUPTED:
            complain("interrupted")
        sys.exit(status or 0)


_stopped = threading.Event()


@contextlib.contextmanager
def _heeding_interrupts() -> Iterator[None]:
    """Keeps in mind that Ctrl-C came: where it strikes an import that may fail, it is swallowed."""

    def stop(*_: object) -> None:
        _stopped.set()
        raise KeyboardInterrupt

    _stopped.clear()
    main = threading.current_thread() is threading.main_thread()  # no other may set a handler
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # as in the background, where a shell has it ignored
        return
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def print_report(report: Report, as_json: bool) -> None:
    from onnxplain.inspection import describe_verification

    size = sum(report.files.values())
    if kept := report.kept_float32:
        complain(f"kept in float32: {', '.join(kept[:3])}{' ...' if len(kept) > 3 else ''}")
    if as_json:
        print_json(
            path=str(report.path),
            files=dict(report.files),
            source_bytes=report.source_bytes,
            opset=report.opset,
            methods=list(report.methods),
            precision=report.contract.precision,
            kept_float32=list(report.kept_float32),
            verification=report.verification,
        )
        return
    print(f"{report.path}: {size / 1e6:.1f} MB, opset {report.opset}")
    print(f"methods: {', '.join(report.methods)}")
    print(f"verified: {describe_verification(report.verification)}")


def print_verification(report: Verification, as_json: bool) -> None:
    if as_json:
        print_json(
            model=str(report.path),
            device=report.device,
            against=report.against,
            tolerance=report.tolerance,
            within=report.within,
            outputs=[_in_json(dataclasses.asdict(one)) for one in report.differences],
            notes=list(report.notes),
        )
        return
    from rich.console import Console
    from rich.table import Table

    title = f"{report.path} on {report.device} against {report.against}"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("output", overflow="fold")
    for name in ("shape", "largest", "difference", "relative", "relative L2", "Spearman", "within"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.differences:
        numbers = (one.largest, one.absolute, one.relative, one.relative_l2)
        spearman = "" if one.spearman is None else f"{one.spearman:.5f}"
        shape = "x".join(map(str, one.shape))
        within = "yes" if one.within else "no"
        table.add_row(one.output, shape, *(f"{n:.1e}" for n in numbers), spearman, within)
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
    for note in report.notes:
        print(note)


def _in_json(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinite numbers."""
    return {k: None if v in (math.inf, -math.inf) else v for k, v in values.items()}


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr while work goes on, if that is a terminal; gives what each step calls.

    A step raises `KeyboardInterrupt` where Ctrl-C came before and got lost.
    """

    def heed() -> None:
        if _stopped.is_set():
            raise KeyboardInterrupt

    if not sys.stderr.isatty():
        yield heed
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance() -> None:
            heed()
            bar.advance(task)

        yield advance
