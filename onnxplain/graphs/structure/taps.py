"""Finds the attention taps and the Grad-CAM layer by the structure of the graph, not by names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.values.axes import BATCH, QUANTISERS, Place, origin, size_of, volume
from onnxplain.graphs.values.facts import Batch, Dim, Facts, Shape, show
from onnxplain.graphs.values.positions import COLUMN, ROW, Axes, Axis, count
from onnxplain.graphs.values.uses import is_measured

__all__ = [
    "Features",
    "Layout",
    "Tap",
    "Windows",
    "check_windows",
    "find_features",
    "find_taps",
    "token_features",
]

# What may stand between the softmax and the product with the values: dropout, casts, masks,
# renormalisation, the head mixing of talking heads, the difference of two heads, rounding to the
# values of a quantised model.
PASSED = frozenset(
    {"Add", "BatchNormalization", "Cast", "Conv", "DequantizeLinear", "Div", "Dropout", "Einsum"}
    | {"Expand", "Gather", "Identity", "MatMul", "Mul", "QuantizeLinear", "Reshape", "Slice"}
    | {"Split", "Squeeze", "Sub", "Transpose"}
    | {"Unsqueeze", "Where"}
)
LINEAR = frozenset({"Conv", "Einsum", "Gemm", "MatMul"})
# What may stand between the tokens and their projection without changing them, but where a Clip of
# each projection cuts them off.
KEPT = QUANTISERS | frozenset(
    {"Cast", "Clip", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose"}
)


@dataclass(frozen=True)
class Layout:
    """How a value is brought to the axes that the contract promises.

    It is reshaped to `split`, its axes are permuted by `perm`, and it is reshaped to `shape`. Where
    the value has these axes already, none of the three is a node.
    """

    split: Shape
    perm: tuple[int, ...]
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class Tap:
    """One attention. Several that run side by side on the same tokens make up one layer.

    Attributes:
        value: The attention, as it multiplies the value vectors.
        layout: Brings it to [batch, heads, queries, keys].
        heads: Number of heads.
        queries: Number of query tokens.
        keys: Number of key tokens.
        product: The node that multiplies it with the value vectors.
        values: The value vectors.
        contracted: The axis of `values` that runs over the keys.
        rows: The axis of the product that runs over the queries.
    """

    value: ir.Value
    layout: Layout
    heads: int
    queries: int
    keys: int
    product: ir.Node
    values: ir.Value
    contracted: int
    rows: int


@dataclass(frozen=True)
class Windows:
    """Attention `value` within windows or groups, with its axes of queries and keys."""

    value: ir.Value
    queries: int
    keys: int


@dataclass(frozen=True)
class Features:
    """The tokens that enter an attention, along the axis `tokens` (None: rows and columns have one
    each); `layout` brings them to [batch, tokens, dim]."""

    value: ir.Value
    layout: Layout
    tokens: int | None = None


def find_taps(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    live: set[ir.Value],
    images: Mapping[ir.Value, Place],
) -> tuple[list[Tap], list[Windows]]:
    """The attention layers in the order in which they run, and attention within windows.

    A tap is an operand of a MatMul or Einsum that is a Softmax over the axis which is summed over,
    possibly through the operators of `PASSED`; the other operand is computed from the image too.

    Args:
        graph: The graph.
        facts: Facts of its values.
        live: The values computed from the image that the logits are computed from.
        images: Where the batch axis lies, as `trace` found it.
    """
    taps, windows = [], []
    for node in graph:
        for operand in _operands(node, facts, live):
            value, keys = operand.attention, operand.keys
            place = Place(keys, volume([facts[value].shape[keys]]))
            if _is_softmax(value, place, facts, live):
                tap = _tap(node, operand, facts, images)
                if tap is None:
                    windows.append(Windows(value, operand.queries, keys))
                else:
                    taps.append(tap)
                break
    return taps, windows


@dataclass(frozen=True)
class _Operands:
    """The two operands of a product in their roles, and the axes by which they meet."""

    attention: ir.Value
    values: ir.Value
    queries: int
    keys: int
    contracted: int
    rows: int


def _operands(
    node: ir.Node, facts: dict[ir.Value, Facts], live: set[ir.Value]
) -> Iterator[_Operands]:
    """Both ways to read a product of two values that are computed from the image."""
    if node.domain != "" or len(node.inputs) != 2:
        return
    left, right = node.inputs
    if left is None or right is None or left not in live or right not in live:
        return
    if node.op_type == "MatMul":
        a, b = len(facts[left].shape), len(facts[right].shape)
        out = len(facts[node.outputs[0]].shape)
        if a > 1 and b > 1:
            yield _Operands(left, right, a - 2, a - 1, b - 2, out - 2)
            yield _Operands(right, left, b - 1, b - 2, a - 1, out - 1)
    elif node.op_type == "Einsum":
        equation = node.attributes["equation"].as_string().replace(" ", "")
        terms, _, result = equation.partition("->")
        one, other = terms.split(",")
        for attention, values, own, its in ((left, right, one, other), (right, left, other, one)):
            keys = [k for k in own if k in its and k not in result]
            queries = [k for k in own if k in result and k not in its]
            if len(keys) == len(queries) == 1 and "." not in equation:
                (k,), (q,) = keys, queries
                yield _Operands(
                    attention, values, own.index(q), own.index(k), its.index(k), result.index(q)
                )


def _is_softmax(
    value: ir.Value, place: Place, facts: dict[ir.Value, Facts], live: set[ir.Value]
) -> bool:
    """Whether a Softmax normalised the axis at `place`, and only `PASSED` changed it since."""
    node = value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type == "Softmax":
        attribute = node.attributes.get("axis")
        axis = attribute.as_int() if attribute else -1
        return axis % len(facts[value].shape) == place.axis and place.whole(facts[value].shape)
    if node.op_type not in PASSED:
        return False
    carried = [
        (source, own)
        for i, source in enumerate(node.inputs)
        if source in live and source is not None
        if facts[source].dtype.is_floating_point() or node.op_type == "DequantizeLinear"
        if (own := origin(node, i, place, facts)) is not None
    ]
    return bool(carried) and all(_is_softmax(v, own, facts, live) for v, own in carried)


def _tap(
    node: ir.Node,
    operands: _Operands,
    facts: dict[ir.Value, Facts],
    images: Mapping[ir.Value, Place],
) -> Tap | None:
    """The tap; None where the attention is not one of [batch, heads, queries, keys]."""
    value = _before_its_steps(operands.attention)
    shape = facts[value].shape
    turned = _turned(shape, _batch_in(value, facts, images), (operands.queries, operands.keys))
    queries, keys = shape[operands.queries], shape[operands.keys]
    if turned is None or isinstance(queries, Batch) or isinstance(keys, Batch):
        return None
    split, perm, batch, heads = turned
    return Tap(
        value=value,
        layout=Layout(split, perm, (batch, heads, queries, keys)),
        heads=heads,
        queries=queries,
        keys=keys,
        product=node,
        values=operands.values,
        contracted=operands.contracted,
        rows=operands.rows,
    )


def _before_its_steps(value: ir.Value) -> ir.Value:
    """The value itself, where a product takes how many measured steps it was rounded to."""
    found: ir.Value | None = value
    for operator in ("DequantizeLinear", "QuantizeLinear", "Div"):
        node = None if found is None else found.producer()
        if node is None or node.op_type != operator:
            return value
        found = node.inputs[0]
    assert node is not None and found is not None
    return found if is_measured(node.inputs[1]) else value


def check_windows(
    windows: Sequence[Windows],
    facts: dict[ir.Value, Facts],
    places: Mapping[ir.Value, Axes],
    grid: tuple[int, int] | None,
) -> None:
    """Refuses attention within windows, unless each window is one patch of the grid.

    What is mixed within a patch stays within its token, as in a transformer in a transformer.
    """
    for each in windows:
        shape = facts[each.value].shape
        others = [
            axis
            for i, axis in enumerate(places.get(each.value, ()))
            if i not in (each.queries, each.keys)
        ]
        if grid is not None and _whole(others) == grid:
            continue
        outside = [axis for i, axis in enumerate(places.get(each.value, ())) if i != each.keys]
        spread = count(outside, ROW, COLUMN)
        if spread > volume([shape[each.keys]]):
            raise UnsupportedModelError(
                f"attention {each.value.name} is over windows of {shape[each.keys]} of the "
                f"{spread} positions; expected attention of every token to every token"
            )
        between = isinstance(shape[each.keys], Batch)
        kind = "between the images of a batch" if between else "within windows or groups"
        raise UnsupportedModelError(
            f"attention {each.value.name} has shape {show(shape)}: {kind}; expected global "
            "attention, [batch, heads, tokens, tokens]"
        )


def _whole(axes: Sequence[Axis]) -> tuple[int, ...]:
    """How many rows and columns the axes count, from one end of the picture to the other."""
    digits = [digit for kind in (ROW, COLUMN) for a in axes for digit in a if digit.kind == kind]
    return tuple(digit.count for digit in digits if digit.whole)


def _batch_in(
    value: ir.Value, facts: dict[ir.Value, Facts], images: Mapping[ir.Value, Place]
) -> Place | None:
    """Where the batch axis lies in a value, also behind an operator that `trace` does not know."""
    if value in images:
        return images[value]
    axes = [axis for axis, size in enumerate(facts[value].shape) if size == Batch()]
    return Place(axes[0], BATCH) if axes else None


def _turned(
    shape: Shape, batch: Place | None, last: Sequence[int]
) -> tuple[Shape, tuple[int, ...], Dim, int] | None:
    """Split and permutation that put the batch first and the axes `last` last.

    Returns:
        Both, the batch size, and the size of the one axis that is left between; a batch of 1 may
        lie anywhere. None where the batch is lost or merged with one of `last`, or more than one
        other axis is left.
    """
    if batch is None:
        return None
    digits: list[tuple[int, Dim]] = []  # position in the new order, size
    for axis, size in enumerate(shape):
        if axis != batch.axis or batch.count == 1:
            digits.append((2 + last.index(axis) if axis in last else 1, size))
        elif axis in last:
            return None
        else:
            merged = zip((1, 0, 1), (batch.before, batch.count, batch.inside(shape)), strict=True)
            digits += [(order, size_of(n)) for order, n in merged if order == 0 or n > 1]
    others = [size for order, size in digits if order == 1 and size != 1]
    if len(others) > 1 or any(isinstance(size, Batch) for size in others):
        return None
    perm = sorted(range(len(digits)), key=lambda i: digits[i][0])
    other = volume(others)
    return tuple(size for _, size in digits), tuple(perm), size_of(batch.count), other


def find_features(
    tap: Tap,
    facts: dict[ir.Value, Facts],
    live: set[ir.Value],
    images: Mapping[ir.Value, Place],
) -> Features | None:
    """The tokens that enter an attention, before its projections.

    Follows the value vectors back through the value projection and then through reshapes, as far
    as the tokens remain an axis of their own. None where the graph has no such value.
    """
    value: ir.Value | None = tap.values
    place: Place | None = Place(tap.contracted, tap.keys)
    found, projected = None, False
    while value is not None and place is not None:
        shape = facts[value].shape
        if projected and place.whole(shape):
            found = token_features(value, place.axis, facts, images) or found
        node = value.producer()
        if node is None or (projected and not _keeps_tokens(node)):
            break
        inputs = [i for i, v in enumerate(node.inputs) if v in live]
        projected = projected or (node.op_type in LINEAR and len(inputs) == 1)
        place = origin(node, inputs[0], place, facts)
        value = node.inputs[inputs[0]]
    return found


def _keeps_tokens(node: ir.Node) -> bool:
    counted = node.op_type == "Div" and is_measured(node.inputs[1])  # in steps, to be rounded
    return counted or node.op_type in KEPT


def token_features(
    value: ir.Value, tokens: int, facts: dict[ir.Value, Facts], images: Mapping[ir.Value, Place]
) -> Features | None:
    """The value in the layout [batch, tokens, dim], if it has these axes and no others."""
    shape = facts[value].shape
    batch = _batch_in(value, facts, images)
    if batch is None:
        return None
    width = [
        axis
        for axis, size in enumerate(shape)
        if axis != tokens and size != 1 and (axis != batch.axis or batch.count == 1)
    ]
    turned = _turned(shape, batch, (tokens, *width))
    if turned is None or len(width) != 1 or turned[-1] != 1:
        return None
    split, perm, count, _ = turned
    layout = Layout(split, perm, (count, shape[tokens], shape[width[0]]))
    return Features(value, layout, tokens)
