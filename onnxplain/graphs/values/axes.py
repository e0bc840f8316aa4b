"""How an axis travels through a node: which input axes an output axis comes from.

An output axis is *carried* from input axes when slice r of the output needs only slice r of those
inputs: rows of a linear map, batch axes, everything elementwise. Two users: the walk keeps a
gradient that is zero outside a few tokens small, and the layout follows the batch and the tokens,
also where a Reshape has merged them with other axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxplain.graphs.values.facts import Batch, Dim, Facts, Shape

__all__ = [
    "BATCH",
    "ELEMENTWISE",
    "QUANTISERS",
    "Place",
    "carried",
    "follow",
    "origin",
    "reduced_axes",
    "size_of",
    "trace",
    "volume",
]

# fmt: off
ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "BitShift", "Cast", "Celu", "Clip", "Div", "Dropout", "Elu", "Equal",
    "Erf", "Exp", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity",
    "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mul", "Neg", "Not",
    "Or", "Pow", "PRelu", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softplus", "Softsign", "Sqrt",
    "Sub", "Sum", "Tanh", "Where",
})
QUANTISERS = frozenset({"DequantizeLinear", "QuantizeLinear"})
SHAPE_ONLY = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
# Each image for itself, whatever they do to the other axes.
PER_IMAGE = frozenset({
    "AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace",
    "GlobalAveragePool", "GlobalMaxPool", "GroupNormalization", "InstanceNormalization", "MaxPool",
    "Resize", "SpaceToDepth",
})
# fmt: on

# Stands for the batch size where sizes are multiplied: a prime that no stated size is a multiple
# of, so that products are equal, or divide each other, for every batch or for none.
BATCH = 2**61 - 1

Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Place:
    """Where `count` positions lie: axis `axis` runs over `before` x `count` x `inside` of them.

    A whole axis has nothing before and inside. All numbers are as `volume` counts them.
    """

    axis: int
    count: int
    before: int = 1

    def whole(self, shape: Shape) -> bool:
        return volume(shape[self.axis : self.axis + 1]) == self.count

    def inside(self, shape: Shape) -> int:
        return volume(shape[self.axis : self.axis + 1]) // (self.before * self.count)


def volume(dims: Iterable[Dim]) -> int:
    """Product of sizes, in which `BATCH` stands for the batch size."""
    return math.prod(d.factor * BATCH if isinstance(d, Batch) else d for d in dims)


def size_of(number: int) -> Dim:
    """The size whose volume is `number`."""
    return Batch(number // BATCH) if number % BATCH == 0 else number


def carried(node: ir.Node, axis: int, facts: dict[ir.Value, Facts]) -> Axes | None:
    """Input axes that axis `axis` of the node's first output is carried from.

    Returns:
        One entry per input, None for an input that every slice of the output reads whole; or None
        when the axis is mixed, made or resized by the node.
    """
    out = facts[node.outputs[0]].shape
    shapes = [() if v is None else facts[v].shape for v in node.inputs]
    op = node.op_type
    if node.domain != "" or not shapes:
        return None
    if op in ELEMENTWISE:
        return tuple(_aligned(shape, out, axis) for shape in shapes)
    if op in QUANTISERS:
        return (axis, *(None for _ in shapes[1:]))
    if op == "Expand":
        return _aligned(shapes[0], out, axis), None
    if op == "MatMul":
        return _matmul(shapes[0], shapes[1], out, axis)
    if op == "Gemm":
        return _gemm(node, shapes, out, axis)
    if op == "Einsum":
        return _einsum(node, axis)
    if op in PER_IMAGE and (axis == 0 or _is_pointwise(node, shapes)):
        kept = shapes[0][axis] == out[axis] and axis != 1
        return (axis, *(None for _ in shapes[1:])) if kept else None
    if op == "Transpose":
        perm = node.attributes.get("perm")
        return (perm.as_ints()[axis] if perm else len(out) - 1 - axis,)
    source = _same_axis(node, shapes[0], out, axis, facts)
    if source is None:
        return None
    if op == "Concat":
        return (source,) * len(shapes)
    return (source, *(None for _ in shapes[1:]))


def follow(
    node: ir.Node, value: ir.Value, place: Place, facts: dict[ir.Value, Facts]
) -> Place | None:
    """Where the positions at `place` of the input `value` lie in the node's outputs.

    None where the node mixes, selects or scatters them.
    """
    out = facts[node.outputs[0]].shape
    if node.domain == "" and node.op_type in SHAPE_ONLY and value is node.inputs[0]:
        return _regrouped(place, facts[value].shape, out)
    inputs = [i for i, v in enumerate(node.inputs) if v is value]
    for axis in range(len(out)):
        axes = carried(node, axis, facts)
        if axes is not None and any(axes[i] == place.axis for i in inputs):
            return replace(place, axis=axis)
    return None


def origin(node: ir.Node, index: int, place: Place, facts: dict[ir.Value, Facts]) -> Place | None:
    """Where the positions at `place` of the node's output lie in input `index`."""
    source = node.inputs[index]
    assert source is not None
    if node.domain == "" and node.op_type in SHAPE_ONLY:
        return _regrouped(place, facts[node.outputs[0]].shape, facts[source].shape)
    axes = carried(node, place.axis, facts)
    axis = None if axes is None else axes[index]
    return None if axis is None else replace(place, axis=axis)


def trace(
    graph: ir.Graph, facts: dict[ir.Value, Facts], value: ir.Value, place: Place
) -> dict[ir.Value, Place]:
    """Where the positions at `place` of `value` lie in every value that keeps them in one place."""
    places = {value: place}
    for node in graph:
        for source in dict.fromkeys(node.inputs):
            if source is not None and source in places:
                found = follow(node, source, places[source], facts)
                if found is not None:
                    places.update((v, found) for v in node.outputs if v not in places)
    return places


def _aligned(shape: Shape, out: Shape, axis: int) -> int | None:
    own = axis - (len(out) - len(shape))
    return own if own >= 0 and shape[own] == out[axis] else None


def _matmul(a: Shape, b: Shape, out: Shape, axis: int) -> Axes | None:
    if len(a) < 2 or len(b) < 2:
        return None
    if axis == len(out) - 2:
        return len(a) - 2, None
    if axis == len(out) - 1:
        return None, len(b) - 1
    return _aligned(a, out, axis), _aligned(b, out, axis)


def _gemm(node: ir.Node, shapes: Sequence[Shape], out: Shape, axis: int) -> Axes:
    flags = [node.attributes.get(name) for name in ("transA", "transB")]
    a, b = (flag.as_int() if flag else 0 for flag in flags)
    rest = tuple(_aligned(shape, out, axis) for shape in shapes[2:])
    return (a, None, *rest) if axis == 0 else (None, 1 - b, *rest)


def _einsum(node: ir.Node, axis: int) -> Axes | None:
    equation = node.attributes["equation"].as_string().replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in operands):
        return None
    places = [term.find(result[axis]) for term in operands]
    return tuple(None if place < 0 else place for place in places)


def _is_pointwise(node: ir.Node, shapes: Sequence[Shape]) -> bool:
    """Whether the node mixes channels only: a normalisation by constants, a 1x1 convolution."""
    if node.op_type == "BatchNormalization":
        return True
    plain = all(
        all(v == default for v in attribute.as_ints())
        for name, default in (("pads", 0), ("strides", 1))
        if (attribute := node.attributes.get(name)) is not None
    )
    return node.op_type == "Conv" and plain and volume(shapes[1][2:]) == 1


def _same_axis(
    node: ir.Node, shape: Shape, out: Shape, axis: int, facts: dict[ir.Value, Facts]
) -> int | None:
    """Source axis for operators which leave all axes but their own alone."""
    op = node.op_type
    if op in SHAPE_ONLY:
        return _moved(shape, out, axis)
    attribute = node.attributes.get("axis")
    own = (attribute.as_int() if attribute else 0) % max(len(shape), 1)
    if op == "LayerNormalization":
        own = (attribute.as_int() if attribute else -1) % len(shape)
        return axis if axis < own else None
    if op in ("Softmax", "LogSoftmax"):
        own = (attribute.as_int() if attribute else -1) % len(shape)
        return axis if axis != own else None
    if op in ("Concat", "Split"):
        return axis if axis != own else None
    if op == "Gather":
        rank = len(facts[node.inputs[1]].shape) if node.inputs[1] is not None else 0
        if axis < own:
            return axis
        return None if axis < own + rank else axis - rank + 1
    if op == "GatherND":  # whole slices of data, laid out as the indices are
        batch = node.attributes.get("batch_dims")
        if node.inputs[1] is None or (batch is not None and batch.as_int()):
            return None
        *found, picked = facts[node.inputs[1]].shape
        kept = axis - len(found)
        return kept + picked if kept >= 0 and isinstance(picked, int) else None
    if op == "Slice":
        steps = node.inputs[4] if len(node.inputs) > 4 else None
        known = None if steps is None else facts[steps].constant
        forward = steps is None or (known is not None and bool((known == 1).all()))
        return axis if forward and shape[axis] == out[axis] else None
    if op == "Pad":
        return axis if axis not in _padded(node, len(shape), facts) else None
    if op.startswith("Reduce"):
        if len(shape) == len(out):
            return axis if shape[axis] == out[axis] and shape[axis] != 1 else None
        return _kept(shape, out, axis, node, facts)
    return None


def _padded(node: ir.Node, rank: int, facts: dict[ir.Value, Facts]) -> set[int]:
    """Axes at whose ends a Pad adds or removes something; all of them where that is not known."""
    pads, _, axes = (
        *(None if v is None else facts[v].constant for v in node.inputs[1:]),
        None,
        None,
    )[:3]
    if pads is None:
        return set(range(rank))
    own = range(rank) if axes is None else [int(axis) % rank for axis in axes]
    before, after = pads.reshape(2, -1)
    return {axis for axis, *ends in zip(own, before, after, strict=True) if any(ends)}


def _moved(shape: Shape, out: Shape, axis: int) -> int | None:
    """Axis of the same size at the same place in memory, for Reshape and its relatives."""
    before = volume(out[:axis])
    for own, size in enumerate(shape):
        if size == out[axis] and volume(shape[:own]) == before:
            return own
    return None


def _regrouped(place: Place, shape: Shape, out: Shape) -> Place | None:
    """The same positions after a Reshape, unless it spreads them over several axes."""
    before = volume(shape[: place.axis]) * place.before
    for axis, size in enumerate(out):
        outer = volume(out[:axis])
        if before % outer == 0 and volume([size]) % (before // outer * place.count) == 0:
            return Place(axis, place.count, before // outer)
    return None


def _kept(
    shape: Shape, out: Shape, axis: int, node: ir.Node, facts: dict[ir.Value, Facts]
) -> int | None:
    reduced = reduced_axes(node, len(shape), facts)
    kept = [i for i in range(len(shape)) if i not in reduced]
    return kept[axis] if len(kept) == len(out) else None


def reduced_axes(node: ir.Node, rank: int, facts: dict[ir.Value, Facts]) -> list[int]:
    """Axes that a Reduce operator sums, averages or maximises over (attribute or input)."""
    attribute = node.attributes.get("axes")
    axes: Sequence[int] = () if attribute is None else attribute.as_ints()
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = facts[node.inputs[1]].constant
        axes = () if constant is None else [int(a) for a in constant]
    if not axes:  # none given, or an empty list
        skip = node.attributes.get("noop_with_empty_axes")
        axes = () if skip is not None and skip.as_int() else range(rank)
    return sorted(axis % rank for axis in axes)
