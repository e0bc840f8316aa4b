"""How much of an evaluation is spent inside onnxruntime: python benchmarks/evaluation.py

Perturbation of one method and both baselines on bundled scenes: drawing the scenes, explaining,
sorting, perturbing and storing; without loading packages and graphs and drawing the report.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.resources import as_file, files
from typing import Any

import onnxruntime as ort

import onnxplain as ox


class Clock:
    """Adds up the time between the calls of a function and their ends."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - start
                self.calls += 1

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="generic_attention")
    parser.add_argument("--scenes", type=int, default=200)
    parser.add_argument("--fill", default="zero")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    clock = Clock()
    ort.InferenceSession.run = clock.timed(ort.InferenceSession.run)
    marks: list[tuple[float, float]] = []

    def step(what: str, done: int, total: int) -> None:
        if what == "evaluating" and done in (1, total):  # graphs are loaded with the first
            marks.append((time.perf_counter(), clock.seconds))

    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as model:
        ox.evaluate(
            model,
            "garments",
            methods=[arguments.method],
            measures=["perturbation"],
            fills=[arguments.fill],
            limit=arguments.scenes,
            device="cpu",
            threads=arguments.threads,
            step=step,
        )
    (start, before), (end, after) = marks[0], marks[-1]
    wall, inside = end - start, after - before
    print(f"{arguments.scenes - 1} scenes, {arguments.method}, fill {arguments.fill}")
    print(f"{wall:.1f} s, {inside:.1f} s or {inside / wall:.1%} of it inside onnxruntime")


if __name__ == "__main__":
    main()
