"""Arithmetic on integers, of models that round what they compute with steps measured as they run.

onnxruntime's `quantize_dynamic` writes them. The integers become floats of the same values. Sums of
their products are whole numbers, which float32 holds up to 2^24 to the last digit: what the model
computes stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.normal.rewrite import MICROSOFT, Rewrite, rewrites
from onnxplain.graphs.values.uses import is_measured

__all__: list[str] = []

Outputs = Sequence[ir.Value | None]


@rewrites("DynamicQuantizeLinear", "")
def dynamic_quantize_linear(r: Rewrite) -> Outputs:
    """Rounds x / step, with step and zero point measured as before."""
    x = r.input(0)
    _, step, zero = r.several("DynamicQuantizeLinear", 3, x)
    steps = r.op("Div", x, step)
    return (r.op("QuantizeLinear", steps, r.scalar(1, x), zero), step, zero)


@rewrites("MatMulInteger", "")
def matmul_integer(r: Rewrite) -> Outputs:
    """(a - zero) (b - zero); b may have a zero point for each column."""
    return (_as_float(r, r.op("MatMul", _whole(r, 0, 0), _whole(r, 1, len(r.sizes(1)) - 1))),)


@rewrites("ConvInteger", "")
def conv_integer(r: Rewrite) -> Outputs:
    """The same for a convolution, of which each channel may have a zero point."""
    attributes = {name: attribute.value for name, attribute in r.node.attributes.items()}
    return (_as_float(r, r.op("Conv", _whole(r, 0, 0), _whole(r, 1, 0), **attributes)),)


@rewrites("MatMulIntegerToFloat", MICROSOFT)
def matmul_integer_to_float(r: Rewrite) -> Outputs:
    """The product, its scale and a bias, of operands rounded before."""
    y = r.op("MatMulInteger", r.input(0), r.input(1), r.optional(4), r.optional(5))
    return (_scaled(r, y, r.input(2), r.input(3), r.optional(6)),)


@rewrites("DynamicQuantizeMatMul", MICROSOFT)
def dynamic_quantize_matmul(r: Rewrite) -> Outputs:
    """The same, which rounds the left operand itself."""
    rounded, step, zero = r.several("DynamicQuantizeLinear", 3, r.input(0))
    y = r.op("MatMulInteger", rounded, r.input(1), zero, r.optional(3))
    return (_scaled(r, y, step, r.input(2), r.optional(4)),)


def _scaled(
    r: Rewrite, y: ir.Value, one: ir.Value, other: ir.Value, bias: ir.Value | None
) -> ir.Value:
    whole = r.op("Cast", y, to=int(ir.DataType.FLOAT))
    scaled = r.op("Mul", whole, r.op("Mul", one, other))
    return scaled if bias is None else r.op("Add", scaled, bias)


def _whole(r: Rewrite, index: int, axis: int) -> ir.Value:
    """Operand `index` less its zero point, in whole numbers."""
    value = r.input(index)
    node = value.producer()
    measured = node is not None and len(node.inputs) == 3 and is_measured(node.inputs[2])
    if node is not None and not (node.op_type == "QuantizeLinear" and measured):
        raise r.refuse(f"it takes {value.name} of {node.op_type}; expected DynamicQuantizeLinear")
    zero = r.optional(index + 2)
    shape = [] if zero is None else r.sizes(index + 2)
    if len(shape) > 1 or (shape and shape != [1] and index == 0):
        raise r.refuse(f"the zero point of {value.name} has shape {shape}; expected one number")
    one = r.constant(np.ones(shape, np.float32))
    return r.op("DequantizeLinear", value, one, zero, axis=axis if shape else None)


def _as_float(r: Rewrite, y: ir.Value) -> ir.Value:
    """The result, where nothing takes it but what makes floats of it."""
    (before,) = r.node.outputs
    if before.is_graph_output():
        raise r.refuse(f"its integers {before.name} are an output of the model")
    for node in before.consumers():
        if node.op_type != "Cast" or node.attributes["to"].as_int() != ir.DataType.FLOAT:
            raise r.refuse(f"its integers go to {node.op_type}; expected a Cast to float32")
    before.type = ir.TensorType(ir.DataType.FLOAT)  # a file may state it; the result inherits it
    return y
