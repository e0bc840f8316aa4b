"""Fused operators as exporters wrote them before these were operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

__all__ = ["written_out"]


def written_out(model: ir.Model) -> ir.Model:
    """The same model without LayerNormalization and Gelu."""
    model = model.clone()
    for number, node in enumerate(list(model.graph)):
        if node.op_type in ("LayerNormalization", "Gelu"):
            parts = _Parts(f"part.{number}")
            if node.op_type == "Gelu":
                _gelu(parts, node)
            else:
                _layer_normalization(parts, node)
            model.graph.insert_before(node, parts.nodes)
            ir.convenience.replace_all_uses_with(node.outputs[:1], parts.nodes[-1].outputs)
            model.graph.remove(node, safe=True)
            for value in parts.constants:
                model.graph.register_initializer(value)
    return model


class _Parts:
    """Nodes in order, and the constants they read."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[ir.Node] = []
        self.constants: list[ir.Value] = []

    def op(self, op_type: str, *inputs: ir.Value | None) -> ir.Value:
        self.nodes.append(ir.node(op_type, inputs))
        (output,) = self.nodes[-1].outputs
        output.name = f"{self.prefix}.{len(self.nodes)}"
        return output

    def constant(self, value: float | Sequence[int]) -> ir.Value:
        name = f"{self.prefix}.constant.{len(self.constants)}"
        array = np.array(value, np.float32 if isinstance(value, float) else np.int64)
        constant = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        self.constants.append(constant)
        return constant


def _layer_normalization(parts: _Parts, node: ir.Node) -> None:
    x, scale, bias = node.inputs
    last = parts.constant([-1])
    centred = parts.op("Sub", x, parts.op("ReduceMean", x, last))
    variance = parts.op("ReduceMean", parts.op("Pow", centred, parts.constant(2.0)), last)
    epsilon = parts.constant(node.attributes["epsilon"].as_float())
    deviation = parts.op("Sqrt", parts.op("Add", variance, epsilon))
    normal = parts.op("Div", centred, deviation)
    parts.op("Add", parts.op("Mul", normal, scale), bias)


def _gelu(parts: _Parts, node: ir.Node) -> None:
    (x,) = node.inputs
    erf = parts.op("Erf", parts.op("Div", x, parts.constant(math.sqrt(2))))
    gate = parts.op("Mul", parts.op("Add", erf, parts.constant(1.0)), parts.constant(0.5))
    parts.op("Mul", x, gate)
