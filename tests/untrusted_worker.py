"""Instruments and runs files in a process of its own, which may crash, hang or want much memory."""

from __future__ import annotations

import json
import os
import resource
import select
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Outcome", "Worker", "peak"]

LONGEST_WAIT = 120  # seconds
MEMORY = 3 * 2**30  # bytes that it may allocate; files that are mapped do not count


@dataclass(frozen=True)
class Outcome:
    """What came of a file: `served`, or the kind of error and what it says.

    `seconds` are those of the processor, `peak` is the most memory that the process had so far.
    """

    kind: str
    text: str
    seconds: float
    peak: int

    @property
    def typed(self) -> bool:
        return self.kind == "served" or self.kind.startswith("typed ")


class Worker:
    """A process that does one file after another; a new one where it did not outlive the last."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self, path: Path, action: str = "instrument") -> Outcome:
        """Instruments the file and runs the result, or runs all methods of an "explained" one."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{action} {path}\n".encode())
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], LONGEST_WAIT)
        line = process.stdout.readline() if ready else b""
        if line:
            return Outcome(**json.loads(line))
        process.kill()
        return Outcome("ended" if ready else "late", f"exit status {process.wait()}", 0, 0)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        process.stdout.readline()  # it is there
        return process

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _try(action: str, path: Path) -> dict[str, Any]:
    import numpy as np

    import onnxplain
    from onnxplain.errors import OnnxplainError

    made = path
    if action == "instrument":
        made = path.with_name("explained.onnx")
        made.unlink(missing_ok=True)
    text, start = "", time.process_time()
    try:
        if action == "instrument":
            onnxplain.instrument(path, made)
        explainer = onnxplain.Explainer(made, device="cpu", threads=1)
        height, width = explainer.contract.input.size
        if action == "instrument":
            explainer.taps(np.zeros((1, 3, height, width), np.float32))
        else:
            for result in explainer.explain_each(np.zeros((height, width, 3), np.uint8)):
                result.overlay()
        kind = "served"
    except OnnxplainError as error:
        kind, text = f"typed {type(error).__name__}", str(error)
    except Exception as error:
        kind, text = type(error).__name__, "".join(traceback.format_exception(error)[-12:])
    seconds = time.process_time() - start
    return {"kind": kind, "text": text, "seconds": seconds, "peak": peak()}


def peak() -> int:
    """Bytes of this process alone: `getrusage` counts the memory of what it was forked from too."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _main() -> None:
    import onnxruntime

    import onnxplain.graphs
    import onnxplain.runtime  # noqa: F401

    onnxruntime.set_default_logger_severity(4)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    print("ready", file=answers)
    for line in sys.stdin:
        action, _, path = line.rstrip("\n").partition(" ")
        print(json.dumps(_try(action, Path(path))), file=answers)


if __name__ == "__main__":
    _main()
