"""How far two arrays of one output are apart, and whether that is tolerated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.errors import InputError
from onnxplain.outputs import METHODS
from onnxplain.runtime.explanation import is_degenerate

__all__ = [
    "RELEVANCE_L2",
    "RELEVANCE_SPEARMAN",
    "TOLERANCE",
    "Difference",
    "is_relevance",
    "measure",
    "rank_correlation",
]

TOLERANCE = 1e-4
# Relevance is divided by sums that may nearly cancel, so single values of it are not reproducible.
RELEVANCE_L2 = 1e-2
RELEVANCE_SPEARMAN = 0.999


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far an output is apart, the worst of all runs.

    Attributes:
        output: Its name; `map.{method}` may be what the runtime makes of the file's taps.
        shape: In the first run.
        largest: Largest magnitude on the side that it is compared with.
        absolute: Largest absolute difference; infinite where the shapes differ, or a value is NaN
            or infinite on one side alone.
        relative: That by the largest magnitude of the run, or by 1 where all values are 0.
        relative_l2: Euclidean norm of the difference by that of the other side.
        spearman: Of maps, the lowest rank correlation of a picture; of others None.
        bounds: What is tolerated, by the name of the measure: `relative`, or `relative_l2` and, of
            maps, `spearman`. The latter is a least value, the others are largest ones.
        within: Whether it is within them.
    """

    output: str
    shape: tuple[int, ...]
    largest: float
    absolute: float
    relative: float
    relative_l2: float
    spearman: float | None
    bounds: dict[str, float]
    within: bool

    def worse(self, other: Difference) -> Difference:
        """That of this run and another one."""
        ranks = [value.spearman for value in (self, other) if value.spearman is not None]
        return Difference(
            output=self.output,
            shape=self.shape,
            largest=max(self.largest, other.largest),
            absolute=max(self.absolute, other.absolute),
            relative=max(self.relative, other.relative),
            relative_l2=max(self.relative_l2, other.relative_l2),
            spearman=min(ranks, default=None),
            bounds=(other if self.within and not other.within else self).bounds,
            within=self.within and other.within,
        )


def measure(
    output: str, found: NDArray[Any], expected: NDArray[Any], tolerance: float
) -> Difference:
    """How far an output of one run is apart.

    Args:
        output: Its name, by which maps and relevance are known.
        found, expected: Its values on both sides, first axis the pictures.
        tolerance: What the largest difference by the largest value may be.
    """
    finite = np.isfinite(expected)
    same = found.shape == expected.shape and np.array_equal(
        np.where(np.isfinite(found), 0, found), np.where(finite, 0, expected), equal_nan=True
    )
    largest = float(np.abs(expected[finite]).max(initial=0))
    bounds = {"relative": tolerance}
    if is_relevance(output):
        bounds = {"relative_l2": RELEVANCE_L2}
        if _method_of(output):
            bounds["spearman"] = RELEVANCE_SPEARMAN
    if not same:
        return Difference(
            output=output,
            shape=found.shape,
            largest=largest,
            absolute=math.inf,
            relative=math.inf,
            relative_l2=math.inf,
            spearman=None,
            bounds=bounds,
            within=False,
        )
    a, b = (np.where(finite, values, 0).astype(np.float64) for values in (found, expected))
    absolute = float(np.abs(a - b).max(initial=0))
    relative = absolute / (largest or 1.0)
    relative_l2 = float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))
    spearman = None
    if _method_of(output):
        maps = (values.reshape(-1, math.prod(values.shape[-2:])) for values in (a, b))
        spearman = min(map(rank_correlation, *maps))
    return Difference(
        output=output,
        shape=found.shape,
        largest=largest,
        absolute=absolute,
        relative=relative,
        relative_l2=relative_l2,
        spearman=spearman,
        bounds=bounds,
        within=relative <= bounds.get("relative", math.inf)
        and relative_l2 <= bounds.get("relative_l2", math.inf)
        and (spearman is None or spearman >= bounds.get("spearman", -1)),
    )


def _method_of(output: str) -> str | None:
    """The method whose map or heatmap the output is, if it is one."""
    _, _, method = output.partition(".")
    return method if method in METHODS else None


def is_relevance(output: str) -> bool:
    """Whether an output of this name is relevance, or a map that is made of it."""
    method = _method_of(output)
    made_of = [output] if method is None else METHODS[method].outputs(1)
    return any("relevance" in name for name in made_of)


def rank_correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Spearman's rank correlation of two raw maps; equal values share their mean rank.

    A map is degenerate where it is not finite, or constant up to rounding (its span at most 1e-5 of
    its largest magnitude). Two degenerate maps agree, one with another map does not.

    Args:
        a, b: Of the same shape, such as [h, w].

    Returns:
        -1..1; 1 if both are degenerate, 0 if one is.

    Raises:
        InputError: The shapes differ.
    """
    if a.shape != b.shape:
        raise InputError(f"maps of shapes {list(a.shape)} and {list(b.shape)}; expected the same")
    degenerate = [is_degenerate(a), is_degenerate(b)]
    if any(degenerate):
        return float(all(degenerate))
    first, second = _ranks(a), _ranks(b)
    if np.array_equal(first, second):
        return 1.0  # where rounding gives a little less
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    """The rank of each value; equal ones, such as those that a relu cut off, share their mean."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: NDArray[np.float64] = np.cumsum(counts) - (counts - 1) / 2
    return means[place.reshape(-1)]
