"""Random shapes, attributes and numbers for one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from differences import Array, Case, Fixed
from hypothesis import strategies as st

__all__ = ["Inputs", "Source", "ints"]

Inputs = list[Array | Fixed | None]
T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[T]], T]

SINCE = {"Gelu": 20, "Mish": 18}  # first opset, where it is later than 17
LARGEST = 16  # elements of one operand: finite differences cost four runs for each


class Source:
    """Random shapes, attributes and numbers of one example."""

    def __init__(self, draw: Draw[Any], op: str) -> None:
        self.draw = draw
        self.op = op
        opsets = [v for v in (17, 18, 20, 22) if v >= SINCE.get(op, 17)]
        self.opset: int = draw(st.sampled_from(opsets))
        self.random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def integer(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def flag(self) -> bool:
        return bool(self.draw(st.booleans()))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def shape(self, low: int = 1, high: int = 5) -> tuple[int, ...]:
        """Sizes 1 to 4, ranks `low` to `high`, few elements."""
        rank = self.integer(low, high)
        while True:
            sizes = self.random.choice(4, size=rank, p=[0.2, 0.4, 0.25, 0.15]) + 1
            if sizes.prod() <= LARGEST:
                return tuple(int(size) for size in sizes)

    def broadcast(self, count: int, low: int = 0) -> list[tuple[int, ...]]:
        """Shapes that broadcast against each other."""
        full = self.shape(low)
        shapes = []
        for _ in range(count):
            own = full[self.integer(0, len(full) - low) if self.flag() else 0 :]
            shapes.append(tuple(1 if self.random.random() < 0.3 else d for d in own))
        return shapes

    def axis(self, rank: int) -> int:
        """One axis, counted from either end."""
        return self.integer(-rank, rank - 1)

    def axes(self, rank: int, low: int = 0) -> list[int]:
        """Distinct axes in any order, each counted from either end."""
        chosen = self.permutation(rank)[: self.integer(low, rank)]
        return [axis - rank * self.flag() for axis in chosen]

    def permutation(self, count: int) -> list[int]:
        return [int(i) for i in self.random.permutation(count)]

    def normal(self, shape: Sequence[int], kinks: Sequence[float] = (), scale: float = 1) -> Array:
        """Numbers of both signs, at least 0.05 from every kink."""
        x = np.asarray(scale * np.clip(self.random.normal(size=shape), -2.5, 2.5))
        for kink in kinks:
            x = np.where(abs(x - kink) < 0.05, kink + np.where(x < kink, -0.07, 0.07), x)
        return x

    def positive(self, shape: Sequence[int]) -> Array:
        return np.asarray(self.random.uniform(0.6, 2.5, size=shape))

    def nonzero(self, shape: Sequence[int]) -> Array:
        return np.asarray(self.positive(shape) * self.random.choice([-1, 1], size=shape))

    def apart(self, *shapes: Sequence[int]) -> list[Array]:
        """Arrays of which no two elements are closer than 0.1."""
        sizes = [int(np.prod(shape)) for shape in shapes]
        order = 0.1 * self.random.permutation(sum(sizes)) - 1
        parts = np.split(order, np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def case(self, inputs: Sequence[Array | Fixed | None], **attributes: Any) -> Case:
        """The node, with attributes that are None left to their defaults."""
        given = {k: v for k, v in attributes.items() if v is not None}
        return Case(self.op, inputs, given, self.opset)


def ints(values: Sequence[int]) -> Fixed:
    return Fixed(np.array(values, np.int64))
