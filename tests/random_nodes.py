"""Random shapes, attributes and numbers for one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hypothesis.extra.numpy as npst
import numpy as np
from differences import Array, Case, Fixed
from hypothesis import strategies as st

__all__ = ["Inputs", "Source", "ints"]

Inputs = list[Array | Fixed | None]
T = TypeVar("T")
Draw = Callable[[st.SearchStrategy[T]], T]

SINCE = {"Gelu": 20}  # first opset, where it is later than 17
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
        sides = st.lists(st.integers(1, 4), min_size=low, max_size=high)
        return tuple(self.draw(sides.filter(lambda s: np.prod(s) <= LARGEST)))

    def broadcast(self, count: int, low: int = 0) -> tuple[tuple[int, ...], ...]:
        """Shapes that broadcast against each other."""
        shapes = npst.mutually_broadcastable_shapes(
            num_shapes=count, min_dims=low, max_dims=5, max_side=3
        )
        found = self.draw(shapes.filter(lambda s: np.prod(s.result_shape) <= 3 * LARGEST))
        return tuple(found.input_shapes)

    def axis(self, rank: int) -> int:
        """One axis, counted from either end."""
        return self.integer(-rank, rank - 1)

    def axes(self, rank: int, low: int = 0) -> list[int]:
        """Distinct axes in any order, each counted from either end."""
        axes = self.draw(st.lists(st.integers(0, rank - 1), unique=True, min_size=low))
        return [a - rank * self.flag() for a in axes]

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
