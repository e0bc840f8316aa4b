"""Which rows and columns of the picture the positions of every value stand for.

Convolutional and windowed networks take a picture apart and put it together again: patches are
merged, windows are cut out and joined, rows and columns become one axis of tokens. An axis is
therefore written as digits, like a number in mixed radix: 56 rows cut into windows of 7 are the
digits `8 rows of 1/8 of the picture` and `7 rows of 1/56`, wherever they go from there. Reshape
regroups digits, Transpose moves them, a product or a sum over an axis ends them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.values.axes import PER_IMAGE, SHAPE_ONLY, carried, volume
from onnxplain.graphs.values.facts import Facts

__all__ = ["COLUMN", "IMAGE", "OTHER", "ROW", "Axes", "Axis", "Digit", "count", "positions"]

NORMALISATIONS = frozenset(
    {"GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization"}
    | {"LogSoftmax", "Softmax"}
)

IMAGE, ROW, COLUMN, OTHER = "image", "row", "column", "other"


@dataclass(frozen=True)
class Digit:
    """`count` neighbours of a `kind`, each `step` of the whole of them; OTHER is anything else."""

    kind: str
    count: int
    step: Fraction = Fraction(0)

    @property
    def whole(self) -> bool:
        """Whether it alone spans the whole batch or picture, from one end to the other."""
        return self.step * self.count == 1

    def split(self, outer: int) -> tuple[Digit, Digit]:
        inner = self.count // outer
        return Digit(self.kind, outer, self.step * inner), Digit(self.kind, inner, self.step)


Axis = tuple[Digit, ...]  # outermost first; empty for size 1
Axes = tuple[Axis, ...]


def positions(
    graph: ir.Graph, facts: dict[ir.Value, Facts], image: ir.Value
) -> dict[ir.Value, Axes]:
    """The digits of every axis of the image and of every value computed from it.

    Operators that shift, flip or shuffle positions make them OTHER: what is said of rows and
    columns is right, but may say nothing. After a residual sum the stream that kept its positions
    counts.
    """
    batch, channels, rows, columns = (volume([size]) for size in facts[image].shape)
    found: dict[ir.Value, Axes] = {
        image: (_whole(IMAGE, batch), _other(channels), _whole(ROW, rows), _whole(COLUMN, columns))
    }
    for node in graph:
        if node.op_type in ("Shape", "Size") or not any(v in found for v in node.inputs):
            continue
        for output in node.outputs:
            found[output] = _through(node, output, facts, found)
    return found


def count(axes: Iterable[Axis], *kinds: str) -> int:
    """How many positions the digits of these kinds count."""
    return math.prod(digit.count for axis in axes for digit in axis if digit.kind in kinds)


def _whole(kind: str, count: int) -> Axis:
    return (Digit(kind, count, Fraction(1, count)),) if count > 1 else ()


def _other(count: int) -> Axis:
    return (Digit(OTHER, count),) if count > 1 else ()


def _through(
    node: ir.Node, output: ir.Value, facts: dict[ir.Value, Facts], found: dict[ir.Value, Axes]
) -> Axes:
    """The digits of an output of a node."""
    sizes = [volume([size]) for size in facts[output].shape]
    source = node.inputs[0]
    own = found.get(source) if source is not None else None
    if node.domain == "" and node.op_type in SHAPE_ONLY and own is not None:
        return _regrouped([digit for axis in own for digit in axis], sizes)
    if own is not None and (cut := _cut(node, own, facts)) is not None:
        return cut
    axes = []
    for i, size in enumerate(sizes):
        inputs = carried(node, i, facts) or ()
        candidates = [
            found[value][axis]
            for value, axis in zip(node.inputs, inputs, strict=False)
            if value in found and value is not None and axis is not None
        ]
        if not candidates and own is not None and len(own) == len(sizes):
            candidates = _resampled(node, own[i], size, i, facts)
        axes.append(_agreed(candidates, size))
    return tuple(axes)


def _cut(node: ir.Node, own: Axes, facts: dict[ir.Value, Facts]) -> Axes | None:
    """The digits after a Gather that cuts an axis into pieces side by side: (within, of pieces).

    So torch unfolds a picture into patches, rows first and then columns.
    """
    if node.domain != "" or node.op_type != "Gather" or node.inputs[1] is None:
        return None
    index, attribute = facts[node.inputs[1]].constant, node.attributes.get("axis")
    axis = (attribute.as_int() if attribute else 0) % len(own)
    total = math.prod(digit.count for digit in own[axis])
    if index is None or index.ndim != 2 or not np.array_equal(index.T.ravel(), np.arange(total)):
        return None
    pieces, within = _regrouped(own[axis], index.shape[::-1])
    return (*own[:axis], within, pieces, *own[axis + 1 :])


def _agreed(candidates: Iterable[Axis], size: int) -> Axis:
    """What the operands that know the axis say of it; OTHER where they differ."""
    known = {
        axis
        for axis in candidates
        if any(digit.kind != OTHER for digit in axis) and math.prod(d.count for d in axis) == size
    }
    return known.pop() if len(known) == 1 else _other(size)


def _resampled(
    node: ir.Node, axis: Axis, size: int, number: int, facts: dict[ir.Value, Facts]
) -> list[Axis]:
    """An axis after a node that mixes its positions and leaves them in order: normalisation,
    convolution, pooling, padding, or taking every n-th of them."""
    source = node.inputs[0]
    assert source is not None
    if node.domain == "" and node.op_type in NORMALISATIONS:
        return [axis]
    spatial = node.op_type in PER_IMAGE and len(facts[source].shape) == 4 and number >= 2
    if node.domain != "" or not axis:
        return []
    if spatial and math.prod(digit.count for digit in axis) == size:
        return [axis]
    step = _step(node, number, facts)
    if step == 0:
        return [axis]
    if len(axis) > 1 or not axis[0].whole or axis[0].kind == IMAGE:
        return []
    every_nth = step > 1 and size == -(-axis[0].count // step)
    return [_whole(axis[0].kind, size)] if spatial or node.op_type == "Pad" or every_nth else []


def _step(node: ir.Node, number: int, facts: dict[ir.Value, Facts]) -> int:
    """With which step a Slice goes along an axis: 0 where it leaves it alone, -1 if not known."""
    bounds = [None if v is None else facts[v].constant for v in node.inputs[1:5]]
    if node.op_type != "Slice" or len(bounds) < 4 or bounds[2] is None or bounds[3] is None:
        return -1
    rank = len(facts[node.outputs[0]].shape)
    steps = {int(a) % rank: int(step) for a, step in zip(bounds[2], bounds[3], strict=True)}
    return steps.get(number, 0)


def _regrouped(digits: Sequence[Digit], sizes: Sequence[int]) -> Axes:
    """The digits distributed over axes of other sizes; all OTHER where sizes cut across digits."""
    rest, axes = list(reversed(digits)), []
    for size in sizes:
        axis: list[Digit] = []
        while size > 1:
            digit = rest.pop()
            if size % digit.count and digit.count % size:
                return tuple(map(_other, sizes))
            if size % digit.count:
                digit, inner = digit.split(size)
                rest.append(inner)
            size //= digit.count
            axis.append(digit)
        axes.append(_joined(axis))
    return tuple(axes)


def _joined(axis: Iterable[Digit]) -> Axis:
    """The axis with neighbours joined that count on where the other ends.

    Rows within rows that are not their parts, as of one window laid over all others, say nothing.
    """
    joined: list[Digit] = []
    for digit in axis:
        if joined and joined[-1].kind == digit.kind and joined[-1].step == digit.step * digit.count:
            digit = Digit(digit.kind, joined.pop().count * digit.count, digit.step)
        joined.append(digit)
    for kind in (IMAGE, ROW, COLUMN):
        nested = sorted((d for d in joined if d.kind == kind), key=lambda d: -d.step)
        if any(inner.step * inner.count > outer.step for outer, inner in pairwise(nested)):
            return _other(math.prod(digit.count for digit in joined))
    return tuple(joined)
