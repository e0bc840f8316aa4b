"""Weights stored in fewer bits than they are computed with: an initializer and a Cast behind it.

onnxruntime folds the Cast when it loads the file, so a run costs what it did; a runtime that does
not fold runs the Cast.
"""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["SMALL", "cast_behind", "is_large", "names_in", "tensor_of"]

SMALL = 256  # bytes; halving fewer is not worth a node


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether it is worth a Cast: vectors (biases, norms, scales) are a hundredth of a model."""
    return len(tensor.shape) >= 2 and tensor.nbytes > SMALL


def names_in(graph: ir.Graph) -> set[str]:
    """Names of values that are taken."""
    inner = (value for node in graph for value in node.outputs)
    return {str(v.name) for v in (*graph.inputs, *graph.initializers.values(), *inner)}


def cast_behind(value: ir.Value, taken: set[str]) -> ir.Node:
    """A Cast of an initializer to float32, which all that read the initializer now read instead.

    Args:
        value: The initializer.
        taken: Names of values in the graph; the new one is added.
    """
    name = f"{value.name}/float32"
    while name in taken:
        name += "_"
    taken.add(name)
    whole = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
    value.replace_all_uses_with(whole)
    to = {"to": int(ir.DataType.FLOAT)}
    return ir.node("Cast", [value], to, outputs=[whole], name=f"n_{name}")


def tensor_of(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor that a value is, or is cast from; None where it is computed otherwise."""
    node = value.producer()
    source = value if node is None or node.op_type != "Cast" else node.inputs[0]
    return None if source is None else source.const_value
