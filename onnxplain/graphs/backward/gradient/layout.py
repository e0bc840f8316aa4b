"""Operators that only move elements.

The cotangent takes the way back. One that selects leaves zeros behind, which stay unwritten as long
as a `Range` can say where they are.
"""

from __future__ import annotations

import numpy as np

from onnxplain.graphs.backward.gradient.table import Grads, Results, first, rule
from onnxplain.graphs.backward.walk import Cotangent, Range, Step
from onnxplain.graphs.builder import Tensor

__all__: list[str] = []  # imported for its entries


@rule("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _(s: Step, g: Grads) -> Results:
    return (s.b.reshape(first(g), s.input(0).shape),)


@rule("Transpose")
def _(s: Step, g: Grads) -> Results:
    rank = s.y.rank
    perm = s.integers("perm") or list(reversed(range(rank)))
    return (s.b.transpose(first(g), [perm.index(axis) for axis in range(rank)]),)


@rule("Expand")
def _(s: Step, g: Grads) -> Results:
    return (s.b.unbroadcast(first(g), s.input(0).shape),)


@rule("Slice")
def _(s: Step, g: Grads) -> Results:
    starts, stops = s.constant(1), s.constant(2)
    assert starts is not None and stops is not None
    axes = s.constant(3) or range(len(starts))
    steps = s.constant(4) or [1] * len(starts)
    result = Cotangent(first(g))
    for axis, *bounds in zip(axes, starts, stops, steps, strict=True):
        axis %= s.y.rank
        size = s.input(0).shape[axis]
        if s.y.shape[axis] == size and bounds[2] == 1:
            continue
        picked = np.arange(length(s, axis))[slice(*(limit(v) for v in bounds))]
        result = scatter(s, s.dense(result), axis, picked)
    return (result,)


def limit(bound: int) -> int | None:
    """A bound of Slice as one of Python, where INT_MAX and INT_MIN mean the end."""
    return None if bound <= -(2**31) + 1 else bound


@rule("Gather")
def _(s: Step, g: Grads) -> Results:
    axis = s.integer("axis", 0) % s.input(0).rank
    index = s.node.inputs[1]
    if s.input(0).rank == 1 and index is not None and s.b.facts[index].counts:
        return (s.b.reshape(first(g), s.input(0).shape),)  # torch's way to write a reshape
    indices = s.constant(1)
    assert indices is not None
    back, rank = first(g), s.input(1).rank
    if rank == 0:
        back = s.b.unsqueeze(back, axis)
    elif rank > 1:
        shape = s.y.shape
        back = s.b.reshape(back, (*shape[:axis], len(indices), *shape[axis + rank :]))
    return (scatter(s, back, axis, np.asarray(indices) % length(s, axis)),)


@rule("Split")
def _(s: Step, g: Grads) -> Results:
    axis = s.integer("axis", 0) % s.input(0).rank
    pieces: list[Cotangent] = []
    start = 0
    for value, arrived in zip(s.node.outputs, g, strict=True):
        size = s.b.of(value).shape[axis]
        if not isinstance(size, int):
            raise s.refuse("it splits the batch axis")
        if arrived is not None:
            place = Range(axis, start, start + size, length(s, axis))
            pieces.append(Cotangent(arrived, place))
        start += size
    return (s.total(pieces),)


@rule("Concat")
def _(s: Step, g: Grads) -> Results:
    axis = s.integer("axis", 0) % s.y.rank
    results: list[Tensor | None] = []
    start = 0
    for i, wanted in enumerate(s.wants):
        size = s.input(i).shape[axis]
        if not isinstance(size, int):
            raise s.refuse("it joins along the batch axis")
        results.append(s.b.slice(first(g), axis, start, start + size) if wanted else None)
        start += size
    return results


@rule("Pad")
def _(s: Step, g: Grads) -> Results:
    if s.text("mode", "constant") != "constant":
        raise s.refuse("its mode repeats elements; expected constant")
    pads, x = s.constant(1), s.input(0)
    assert pads is not None
    axes = s.constant(3) or range(x.rank)
    result = first(g)
    for axis, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        axis %= x.rank
        if before == after == 0:
            continue
        stop = length(s, axis) + before
        result = s.b.slice(result, axis, max(before, 0), min(stop, stop + after))
        result = s.b.pad(result, axis, max(-before, 0), max(-after, 0))
    return (result,)


@rule("DepthToSpace")
def _(s: Step, g: Grads) -> Results:
    b, (batch, _, rows, columns), block = s.b, s.input(0).shape, s.integer("blocksize", 1)
    if s.text("mode", "DCR") == "DCR":
        return (b.op("SpaceToDepth", [first(g)], s.input(0).shape, blocksize=block),)
    apart = b.reshape(first(g), (batch, s.y.shape[1], rows, block, columns, block))
    return (b.reshape(b.transpose(apart, [0, 1, 3, 5, 2, 4]), s.input(0).shape),)


@rule("SpaceToDepth")
def _(s: Step, g: Grads) -> Results:
    block = s.integer("blocksize", 1)
    return (s.b.op("DepthToSpace", [first(g)], s.input(0).shape, blocksize=block),)


def length(s: Step, axis: int) -> int:
    size = s.input(0).shape[axis]
    if not isinstance(size, int):
        raise s.refuse("it works along the batch axis")
    return size


def scatter(s: Step, g: Tensor, axis: int, positions: np.ndarray) -> Cotangent:
    """The cotangent of an input from which the output took `positions` along `axis`."""
    b, total = s.b, length(s, axis)
    count = len(positions)
    if count and np.array_equal(positions, np.arange(positions[0], positions[0] + count)):
        return Cotangent(g, Range(axis, int(positions[0]), int(positions[0]) + count, total))
    if len(np.unique(positions)) == count:  # each input position gets its output, or the zero
        source = np.full(total, count, np.int64)
        source[positions] = np.arange(count)
        shape = (*g.shape[:axis], total, *g.shape[axis + 1 :])
        padded = b.pad(g, axis, 0, 1)
        return Cotangent(b.op("Gather", [padded, b.constant(source)], shape, axis=axis))
    one_hot = np.eye(total, dtype=g.dtype.numpy())[positions]
    if g.rank == 1:
        return Cotangent(b.squeeze(b.matmul(b.unsqueeze(g, 0), b.constant(one_hot)), 0))
    perm = [*(i for i in range(g.rank) if i != axis), axis]
    product = b.matmul(b.transpose(g, perm), b.constant(one_hot))
    return Cotangent(b.transpose(product, [perm.index(i) for i in range(g.rank)]))
