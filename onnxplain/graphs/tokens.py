"""Finds the token layout: the patch grid, the prefix tokens, and the tokens that the head reads."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnxplain.contract import Readout
from onnxplain.graphs.axes import follow, reduced_axes
from onnxplain.graphs.shapes import Facts
from onnxplain.graphs.taps import Tap

__all__ = ["find_readout", "find_tokens", "prefix_names"]


def find_tokens(
    graph: ir.Graph, facts: dict[ir.Value, Facts], tap: Tap, live: set[ir.Value]
) -> tuple[int, tuple[int, int]] | None:
    """Number of prefix tokens and patch grid (rows, columns).

    The grid is where two spatial axes of one picture-shaped value are merged into a token axis
    which can be followed to the first attention; a Concat on the way counts the prefix tokens.
    None where there is no such place.
    """
    for node in graph:
        for value, axis, grid in _merges(node, facts, live):
            before = _prefix(value, axis, tap, facts, grid[0] * grid[1])
            if before is not None:
                return before, grid
        if node is tap.product:
            return None
    return None


def _merges(
    node: ir.Node, facts: dict[ir.Value, Facts], live: set[ir.Value]
) -> Iterator[tuple[ir.Value, int, tuple[int, int]]]:
    """Output axes that join the two spatial axes of a [b, c, h, w] or [b, h, w, c]."""
    if node.op_type not in ("Reshape", "Flatten") or node.inputs[0] not in live:
        return
    source = node.inputs[0]
    assert source is not None
    shape, out = facts[source].shape, facts[node.outputs[0]].shape
    if len(shape) != 4:
        return
    for axis in (1, 2):
        h, w = shape[axis : axis + 2]
        if not isinstance(h, int) or not isinstance(w, int):
            continue
        if out == (*shape[:axis], h * w, *shape[axis + 2 :]):
            yield node.outputs[0], axis, (h, w)


def _prefix(
    value: ir.Value, axis: int, tap: Tap, facts: dict[ir.Value, Facts], patches: int
) -> int | None:
    """How many tokens stand before the patches where the token axis reaches the attention."""
    reached = {value: (axis, 0)}
    waiting = [value]
    while waiting:
        value = waiting.pop()
        axis, offset = reached[value]
        for node in dict.fromkeys(value.consumers()):
            if node is tap.product:
                return offset if offset + patches <= tap.keys else None
            if not node.outputs or node.outputs[0] in reached or node.outputs[0] not in facts:
                continue
            out, shift = follow(node, value, axis, facts), 0
            if node.op_type == "Concat" and _axis(node, facts) == axis:
                out, shift = axis, _before(node, value, axis, facts)
            if out is not None:
                reached[node.outputs[0]] = (out, offset + shift)
                waiting.append(node.outputs[0])
    return None


def _axis(node: ir.Node, facts: dict[ir.Value, Facts]) -> int:
    attribute = node.attributes.get("axis")
    assert node.inputs[0] is not None
    return (attribute.as_int() if attribute else 0) % len(facts[node.inputs[0]].shape)


def _before(node: ir.Node, value: ir.Value, axis: int, facts: dict[ir.Value, Facts]) -> int:
    """Size of what a Concat puts before `value`."""
    sizes = 0
    for other in node.inputs:
        if other is value:
            return sizes
        assert other is not None
        size = facts[other].shape[axis]
        assert isinstance(size, int)
        sizes += size
    return sizes


def find_readout(tap: Tap, facts: dict[ir.Value, Facts], logits: ir.Value) -> Readout | None:
    """How the head reads the tokens which the last attention writes.

    The token axis is followed from the attention to where nodes pick tokens or average over them.
    None where the head does neither, or both.
    """
    leading = _ancestors(logits)
    start = tap.product.outputs[0]
    reads: set[tuple[str, int, int]] = set()
    reached = {start: (len(facts[start].shape) - 2, 0, tap.queries)}
    waiting = [start]
    while waiting:
        value = waiting.pop()
        axis, first, last = reached[value]
        if last - first == 1:
            reads.add(("token", first, last))
            continue
        for node in dict.fromkeys(value.consumers()):
            out = node.outputs[0] if node.outputs else None
            if out not in leading or out is None or out in reached or node.op_type == "Shape":
                continue
            axis_out = follow(node, value, axis, facts)
            if axis_out is not None:
                reached[out] = (axis_out, first, last)
                waiting.append(out)
                continue
            read = _read(node, value, axis, facts)
            if read is None:
                return None
            what, lower, upper = read
            if what == "slice":
                reached[out] = (axis, first + lower, first + upper)
                waiting.append(out)
            else:
                reads.add((what, first + lower, first + upper))
    kind = {("token",): "cls", ("token", "token"): "cls+dist", ("mean",): "mean"}.get(
        tuple(kind for kind, _, _ in sorted(reads))
    )
    if kind is None:
        return None
    return Readout(kind=kind, ranges=tuple(sorted((first, last) for _, first, last in reads)))


def _ancestors(value: ir.Value) -> set[ir.Value]:
    found, waiting = {value}, [value]
    while waiting:
        node = waiting.pop().producer()
        for source in node.inputs if node is not None else ():
            if source is not None and source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _read(
    node: ir.Node, value: ir.Value, axis: int, facts: dict[ir.Value, Facts]
) -> tuple[str, int, int] | None:
    """What a node that ends or narrows the token axis takes of it."""
    size = facts[value].shape[axis]
    assert isinstance(size, int)
    if node.op_type == "Gather" and _axis(node, facts) == axis and node.inputs[1] is not None:
        index = facts[node.inputs[1]].constant
        if index is not None and index.size == 1:
            place = int(index.reshape(-1)[0]) % size
            return "token", place, place + 1
    if node.op_type == "Slice":
        bounds = [None if v is None else facts[v].constant for v in node.inputs[1:]]
        steps = bounds[3] if len(bounds) > 3 else None
        if bounds[0] is None or bounds[1] is None or (steps is not None and (steps != 1).any()):
            return None
        axes = (
            [int(a) % len(facts[value].shape) for a in bounds[2]] if bounds[2] is not None else []
        )
        if axis in axes:
            i = axes.index(axis)
            lower, upper, _ = slice(int(bounds[0][i]), int(bounds[1][i])).indices(size)
            return "slice", lower, upper
    averaged = node.op_type == "ReduceMean" and axis in reduced_axes(
        node, len(facts[value].shape), facts
    )
    return ("mean", 0, size) if averaged else None


def prefix_names(count: int, readout: Readout | None) -> tuple[str, ...]:
    """Names of the prefix tokens as far as the head tells: those it reads, then the others."""
    names = [f"prefix{i}" for i in range(count)]
    if readout is not None and readout.kind in ("cls", "cls+dist"):
        read = [start for start, _ in readout.ranges]
        registers = iter(range(count))
        names = [f"reg{next(registers)}" if i not in read else "" for i in range(count)]
        for name, position in zip(("cls", "dist"), read, strict=False):
            names[position] = name
    return tuple(names)
