"""Raises models of older operator sets to the oldest one that the rules are written for."""

from __future__ import annotations

import onnx
import onnx.version_converter
import onnx_ir as ir

from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.normal.rewrite import MICROSOFT

__all__ = ["CONVERTED", "NORMALISATIONS", "OPSETS", "raised"]

OPSETS = range(17, 26)
CONVERTED = range(11, 17)  # raised to the first of `OPSETS`
LARGE = 256  # elements; axes, shapes and pads, whose values the converter reads, have fewer
# What onnxruntime fuses into operators of the standard domain that no opset below 17 knows.
NORMALISATIONS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization"})


def raised(model: ir.Model) -> ir.Model:
    """The model at one of `OPSETS`: itself, or a copy by onnx's version converter.

    Raises:
        UnsupportedModelError: The opset is older or newer than can be read, or an operator of it
            cannot be converted.
    """
    opset = model.opset_imports.get("")
    if opset in OPSETS:
        return model
    if opset not in CONVERTED:
        raise UnsupportedModelError(
            f"opset {opset}; expected {CONVERTED[0]} to {OPSETS[-1]} (export the model again, for "
            "instance with opset_version=20)"
        )
    model = model.clone()
    for node in model.graph:
        if node.domain == "" and node.op_type in NORMALISATIONS:
            node.domain = MICROSOFT
            model.opset_imports.setdefault(MICROSOFT, 1)
    weights = _without_weights(model)
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), OPSETS[0])
    except (RuntimeError, onnx.version_converter.ConvertError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UnsupportedModelError(
            f"opset {opset}: onnx's version converter cannot raise it to {OPSETS[0]} ({reason}); "
            "export the model again, for instance with opset_version=20"
        ) from None
    converted = ir.from_proto(proto)
    _with_weights(converted, weights)
    return converted


def _without_weights(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Makes inputs of the weights, which the converter would copy and need not see."""
    graph, weights = model.graph, {}
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None:
            continue
        if tensor.size <= LARGE:  # the converter looks for no files
            if isinstance(tensor, ir.ExternalTensor):
                (value.const_value,) = ir.external_data.convert_tensors_from_external([tensor])
            continue
        weights[name] = tensor
        del graph.initializers[name]
        if not value.is_graph_input():
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
            graph.inputs.append(value)
    return weights


def _with_weights(model: ir.Model, weights: dict[str, ir.TensorProtocol]) -> None:
    """Puts them back."""
    graph = model.graph
    for value in list(graph.inputs):
        if value.name in weights:
            graph.inputs.remove(value)
            value.const_value = weights[value.name]
            graph.register_initializer(value)
