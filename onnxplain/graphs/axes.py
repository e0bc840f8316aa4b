"""How an axis travels through a node: which input axes an output axis comes from.

An output axis is *carried* from input axes when slice r of the output needs only slice r of those
inputs: rows of a linear map, batch axes, everything elementwise. Two users: the walk keeps a
gradient that is zero outside a few tokens small, and the layout follows the token axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxplain.graphs.shapes import Batch, Facts, Shape

__all__ = ["ELEMENTWISE", "carried", "follow", "reduced_axes"]

# fmt: off
ELEMENTWISE = frozenset({
    "Abs", "Add", "And", "BitShift", "Cast", "Clip", "Div", "Dropout", "Equal", "Erf", "Exp",
    "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "Less",
    "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mul", "Neg", "Not", "Or", "Pow",
    "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Sum", "Tanh", "Where",
})
# fmt: on
SHAPE_ONLY = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})

Axes = tuple[int | None, ...]


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
    if op == "Expand":
        return _aligned(shapes[0], out, axis), None
    if op == "MatMul":
        return _matmul(shapes[0], shapes[1], out, axis)
    if op == "Gemm":
        return _gemm(node, shapes, out, axis)
    if op == "Transpose":
        perm = node.attributes.get("perm")
        return (perm.as_ints()[axis] if perm else len(out) - 1 - axis,)
    source = _same_axis(node, shapes[0], out, axis, facts)
    if source is None:
        return None
    if op == "Concat":
        return (source,) * len(shapes)
    return (source, *(None for _ in shapes[1:]))


def follow(node: ir.Node, value: ir.Value, axis: int, facts: dict[ir.Value, Facts]) -> int | None:
    """Output axis which axis `axis` of the input `value` becomes, None when the node ends it."""
    places = [i for i, v in enumerate(node.inputs) if v is value]
    for out in range(len(facts[node.outputs[0]].shape)):
        axes = carried(node, out, facts)
        if axes is not None and any(axes[i] == axis for i in places):
            return out
    return None


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


def _same_axis(
    node: ir.Node, shape: Shape, out: Shape, axis: int, facts: dict[ir.Value, Facts]
) -> int | None:
    """Source axis for operators which leave all axes but their own alone."""
    op = node.op_type
    if op in SHAPE_ONLY:
        return _regrouped(shape, out, axis)
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
    if op == "Slice":
        steps = node.inputs[4] if len(node.inputs) > 4 else None
        known = None if steps is None else facts[steps].constant
        forward = steps is None or (known is not None and bool((known == 1).all()))
        return axis if forward and shape[axis] == out[axis] else None
    if op.startswith("Reduce"):
        if len(shape) == len(out):
            return axis if shape[axis] == out[axis] and shape[axis] != 1 else None
        return _kept(shape, out, axis, node, facts)
    return None


def _regrouped(shape: Shape, out: Shape, axis: int) -> int | None:
    """Axis of the same size at the same place in memory, for Reshape and its relatives."""
    before = _volume(out[:axis])
    for own, size in enumerate(shape):
        if size == out[axis] and _volume(shape[:own]) == before:
            return own
    return None


def _volume(dims: Shape) -> tuple[int, int]:
    """Product of sizes, as a number and a power of the batch size."""
    number, power = 1, 0
    for dim in dims:
        number *= dim.factor if isinstance(dim, Batch) else dim
        power += isinstance(dim, Batch)
    return number, power


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
