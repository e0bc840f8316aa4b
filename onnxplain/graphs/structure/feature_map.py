"""Finds the Grad-CAM layer of a network that has no global attention: its last feature map."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from onnxplain.graphs.structure.taps import LINEAR, Features, Layout
from onnxplain.graphs.values.axes import size_of, volume
from onnxplain.graphs.values.facts import Facts
from onnxplain.graphs.values.positions import COLUMN, IMAGE, OTHER, ROW, Axes, Digit, count
from onnxplain.graphs.values.uses import dependents, sources

__all__ = ["as_feature_map", "find_feature_map", "narrows"]


def find_feature_map(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    live: set[ir.Value],
    places: Mapping[ir.Value, Axes],
    image: ir.Value,
) -> tuple[Features, tuple[int, int]] | None:
    """The last value with rows and columns that all the logits know of the picture passes through.

    That is what the pooling of the head reads: the output of the last stage, after its last
    activation or normalisation. It is the layer for which Grad-CAM was defined. Behind a mean over
    all positions the gradient is the same at each of them, which makes the map the class activation
    map (Zhou et al. 2016). Only a value that nothing bypasses sees all that the head sees.

    Returns:
        The value, with the layout that brings it to [batch, channels, rows, columns], and rows and
        columns. None where the graph has no such value, or one that a head of pooling does not
        follow: it is followed by more of the network than precedes it, or by one that picks
        positions, whose gradient says nothing of the others.
    """
    for value in reversed(list(narrows(graph, live))):
        found = as_feature_map(value, places.get(value, ()), count(places[image], IMAGE))
        if found is not None and value is not image:
            later, earlier = dependents(graph, value) & live, sources(value)
            return found if _is_head(graph, facts, later, earlier, places) else None
    return None


def narrows(graph: ir.Graph, live: set[ir.Value]) -> Iterator[ir.Value]:
    """Values that every way from the image to the logits passes through, in graph order."""
    uses = {v: len({n for n, _ in v.uses() if not live.isdisjoint(n.outputs)}) for v in live}
    waiting = {v for v in live if v.producer() is None}
    for node in graph:
        if live.isdisjoint(node.outputs):
            continue
        for value in {v for v in node.inputs if v is not None and v in live}:
            uses[value] -= 1
            if not uses[value]:
                waiting.discard(value)
        waiting.update(v for v in node.outputs if v in live)
        if len(waiting) == 1:
            yield from waiting


def as_feature_map(
    value: ir.Value, axes: Axes, images: int
) -> tuple[Features, tuple[int, int]] | None:
    """The value with the layout that brings it to [batch, channels, rows, columns], and rows and
    columns; None where it has not all of them."""
    digits = [digit for axis in axes for digit in axis]
    kinds: dict[str, list[int]] = {IMAGE: [], OTHER: [], ROW: [], COLUMN: []}
    for i, digit in enumerate(digits):
        kinds[digit.kind].append(i)
    for kind in (IMAGE, ROW, COLUMN):
        kinds[kind].sort(key=lambda i: -digits[i].step)
    rows, columns = (_span(digits[i] for i in kinds[kind]) for kind in (ROW, COLUMN))
    if rows is None or columns is None or 1 in (rows, columns) or count(axes, IMAGE) != images:
        return None
    channels = volume(digits[i].count for i in kinds[OTHER])
    split = tuple(size_of(digit.count) for digit in digits)
    perm = tuple(i for kind in kinds.values() for i in kind)
    return Features(value, Layout(split, perm, (size_of(images), channels, rows, columns))), (
        rows,
        columns,
    )


def _span(digits: Iterator[Digit]) -> int | None:
    """How many positions the digits, outermost first, count from one end of the picture to the
    other; None where some are missing. Of a single position there are none."""
    number = 1
    for digit in digits:
        number *= digit.count
        if digit.step * number != 1:
            return None
    return number


def _is_head(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    later: set[ir.Value],
    earlier: set[ir.Value],
    places: Mapping[ir.Value, Axes],
) -> bool:
    """Whether what follows is small and reads all positions alike."""
    before = after = 0
    for node in graph:
        behind = any(v in later for v in node.inputs) and not later.isdisjoint(node.outputs)
        if behind and _picks(node, facts, places):
            return False
        if node.op_type in LINEAR:
            after += behind
            before += not behind and not earlier.isdisjoint(node.outputs)
    return after <= before


def _picks(node: ir.Node, facts: dict[ir.Value, Facts], places: Mapping[ir.Value, Axes]) -> bool:
    """Whether a node takes some positions of the picture and leaves others."""
    if node.op_type not in ("Gather", "Slice", "Split") or node.inputs[0] is None:
        return False
    before, after = (volume(facts[v].shape) for v in (node.inputs[0], node.outputs[0]))
    axes, out = places.get(node.inputs[0], ()), facts[node.outputs[0]].shape
    if node.op_type == "Gather":
        attribute = node.attributes.get("axis")
        own = (attribute.as_int() if attribute else 0) % max(len(axes), 1)
        return after < before and count(axes[own : own + 1], ROW, COLUMN) > 1
    return any(
        count([axis], ROW, COLUMN) > 1 and volume([size]) < volume(digit.count for digit in axis)
        for axis, size in zip(axes, out, strict=False)
    )
