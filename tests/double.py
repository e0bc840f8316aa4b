"""Models run in float64, where relevance, ill-conditioned in float32, can be proven."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import onnx_ir as ir
from differences import EXACT
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from onnxplain.graphs.backward.walk import Cotangent, Rule, dense, walk
from onnxplain.graphs.builder import Builder
from onnxplain.graphs.structure.analysis import analyse
from onnxplain.graphs.values.uses import dependents

__all__ = ["carried", "doubled", "run"]

Array = NDArray[Any]
FLOAT, DOUBLE = ir.DataType.FLOAT, ir.DataType.DOUBLE


def run(model: ir.Model, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every output by name, computed in float64 by onnx's reference evaluator.

    Args:
        model: A float32 model. Constants that its exporter rounded, such as 1 / sqrt(12), stay
            rounded.
        feeds: Inputs by name; those that the model has not are left out.
    """
    session = ReferenceEvaluator(ir.to_proto(doubled(model)), new_ops=EXACT)
    given = {
        name: array.astype(np.float64) if array.dtype == np.float32 else array
        for name, array in feeds.items()
        if name in session.input_names
    }
    return dict(zip(session.output_names, session.run(None, given), strict=True))


def doubled(model: ir.Model) -> ir.Model:
    """The same graph with every float32 weight, input, value and cast as float64."""
    model = model.clone()
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype == FLOAT:
            wide = value.const_value.numpy().astype(np.float64)
            value.const_value = ir.tensor(wide, name=value.name)
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph:
        values += node.outputs
        for name, attribute in node.attributes.items():
            if name == "to" and attribute.value == FLOAT:
                node.attributes[name] = ir.AttrInt64(name, DOUBLE)
            elif attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype == FLOAT:
                wide = attribute.value.numpy().astype(np.float64)
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(wide))
    for value in values:
        if value.dtype == FLOAT:
            value.type = ir.TensorType(DOUBLE)  # the clone shares the old one
    return model


def carried(model: ir.Model, rules: Mapping[str, Rule], *, coefficients: bool = False) -> ir.Model:
    """A model whose outputs are what one walk brings to every place worth looking at.

    Args:
        model: A plain classifier.
        rules: The table.
        coefficients: The table carries relevance over value, so what arrives is multiplied by it.

    Returns:
        A model with the further input `seed` [batch, classes] and the outputs `attention.{i}` for
        each attention, `stream.{i}` (the tokens that enter layer i) and `pixels`.
    """
    model = model.clone()
    found = analyse(model)
    b = Builder(model.graph, dict(found.facts))
    live = dependents(model.graph, found.image)
    places = {"pixels": found.image}
    for i, tap in enumerate(chain.from_iterable(found.layers)):
        places[f"attention.{i}"] = tap.value
    for i, layer in enumerate(found.layers):
        places[f"stream.{i}"] = _stream(layer[0].values, live)
    logits = b.of(found.logits)
    seed = ir.Value()
    b.describe(seed, "seed", logits.shape, logits.dtype)
    model.graph.inputs.append(seed)
    arrived = walk(b, {found.logits: Cotangent(b.of(seed))}, places.values(), rules)
    for name, value in places.items():
        result = dense(b, arrived[value])
        if coefficients:
            result = b.mul(result, b.of(value))
        output = b.op("Identity", [result], result.shape)
        b.rename(output, name)
        model.graph.outputs.append(output.value)
    return model


def _stream(value: ir.Value | None, live: set[ir.Value]) -> ir.Value:
    """Back from the value vectors to the tokens that a residual sum adds to."""
    while value is not None and not any(
        node.op_type == "Add" and all(v in live for v in node.inputs) for node in value.consumers()
    ):
        node = value.producer()
        value = None if node is None else next((v for v in node.inputs if v in live), None)
    assert value is not None
    return value
