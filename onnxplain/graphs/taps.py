"""Finds the attention taps and the Grad-CAM layer by the structure of the graph, not by names."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxplain.graphs.shapes import Batch, Dim, Facts

__all__ = ["Tap", "attention_input", "dependents", "find_taps", "is_linear"]

# What may stand between the softmax and the product with the values: dropout, casts, masks,
# renormalisation, and the head mixing of talking heads.
PASSED = frozenset(
    {"Add", "Cast", "Conv", "Div", "Dropout", "Einsum", "Identity", "MatMul", "Mul", "Reshape"}
    | {"Sub", "Transpose", "Where"}
)
LINEAR = frozenset({"Conv", "Einsum", "Gemm", "MatMul"})


@dataclass(frozen=True)
class Tap:
    """One attention layer.

    Attributes:
        value: The attention, [batch, heads, queries, keys] or [batch * heads, queries, keys].
        product: The MatMul of the attention with the value vectors.
        heads: Number of heads.
        queries: Number of query tokens.
        keys: Number of key tokens.
    """

    value: ir.Value
    product: ir.Node
    heads: int
    queries: int
    keys: int


def dependents(graph: ir.Graph, value: ir.Value) -> set[ir.Value]:
    """Every value that is computed from `value`, and itself; what is not in it is a constant."""
    found = {value}
    for node in graph:
        if any(v in found for v in node.inputs):
            found.update(node.outputs)
    return found


def find_taps(graph: ir.Graph, facts: dict[ir.Value, Facts], live: set[ir.Value]) -> list[Tap]:
    """The attention layers in the order in which they run.

    A tap is the left side of a MatMul that is a Softmax over its last axis, possibly through the
    operators of `PASSED`, and whose right side is computed from the image too.

    Args:
        graph: The graph.
        facts: Facts of its values.
        live: The values computed from the image.
    """
    taps = []
    for node in graph:
        if node.op_type != "MatMul" or node.domain != "":
            continue
        left, right = node.inputs
        if left is None or right is None or right not in live or left not in live:
            continue
        heads = _heads(facts[left].shape)
        queries, keys = facts[left].shape[-2:] if heads else (0, 0)
        if heads and isinstance(queries, int) and isinstance(keys, int) and _is_softmax(left, live):
            taps.append(Tap(left, node, heads, queries, keys))
    return taps


def _heads(shape: tuple[Dim, ...]) -> int | None:
    """Heads of [batch, heads, n, m] or [batch * heads, n, m]; None for any other shape."""
    if len(shape) == 4 and isinstance(shape[1], int) and shape[0] in (1, Batch(1)):
        return shape[1]
    if len(shape) == 3:
        return shape[0].factor if isinstance(shape[0], Batch) else shape[0]
    return None


def _is_softmax(value: ir.Value, live: set[ir.Value]) -> bool:
    node = value.producer()
    if node is None or node.domain != "":
        return False
    if node.op_type == "Softmax":
        axis = node.attributes.get("axis")
        rank = len(value.shape) if value.shape is not None else 0
        return axis is None or axis.as_int() in (-1, rank - 1)
    sources = [v for v in node.inputs if v in live]
    return (
        node.op_type in PASSED
        and len(sources) == 1
        and sources[0] is not None
        and _is_softmax(sources[0], live)
    )


def is_linear(node: ir.Node, live: set[ir.Value]) -> bool:
    """Whether the node multiplies an activation with a weight that does not depend on the image."""
    sources = [v for v in node.inputs if v in live]
    return node.op_type in LINEAR and len(sources) == 1


def attention_input(tap: Tap, facts: dict[ir.Value, Facts], live: set[ir.Value]) -> ir.Value | None:
    """The tokens [batch, keys, dim] that enter an attention layer, before its projections.

    Follows the value vectors back through the value projection, then through reshapes up to the
    layout [batch, keys, dim]. None where the graph has no such value.
    """
    value = tap.product.inputs[1]
    projected = False
    while value is not None:
        if projected and _is_tokens(facts[value].shape, tap.keys):
            return value
        node = value.producer()
        if node is None:
            return None
        if projected and node.op_type not in ("Reshape", "Transpose", "Squeeze", "Flatten"):
            return None
        projected = projected or is_linear(node, live)
        value = next((v for v in node.inputs if v in live), None)
    return None


def _is_tokens(shape: tuple[Dim, ...], count: int) -> bool:
    return len(shape) == 3 and shape[0] in (1, Batch(1)) and shape[1] == count
