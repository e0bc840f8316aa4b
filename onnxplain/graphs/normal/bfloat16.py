"""Models in bfloat16, wholly or between casts, as models in float32 that compute the same.

onnxruntime's CPU computes nothing in bfloat16: it casts and moves it. float32 has the same range
and 16 more bits, so the float32 model is the same function with less rounding, and no operator of
the opsets read here means another thing for the type. Weights stay bfloat16, each cast once; so do
float32 ones that the model rounds to bfloat16 before it computes with them, as autocast does.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.values.stored import cast_behind, is_large, names_in

__all__ = ["has_bfloat16", "widened"]

NARROW, WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT
FLOATS = frozenset({ir.DataType.DOUBLE, WIDE, ir.DataType.FLOAT16})
# Attributes that name an element type, of whichever operator.
TYPES = frozenset(
    {"dtype", "output_datatype", "output_dtype", "precision", "softmax_precision"}
    | {"stash_type", "to"}
)


def has_bfloat16(model: ir.Model) -> bool:
    """Whether an input, an output, a weight or a node of the main graph is in bfloat16."""
    graph = model.graph
    tensors = (value.const_value for value in graph.initializers.values())
    types = {value.dtype for value in (*graph.inputs, *graph.outputs)}
    types |= {tensor.dtype for tensor in tensors if tensor is not None}
    return NARROW in types or any(
        _names_it(attribute) or _holds_it(attribute)
        for node in graph
        for attribute in node.attributes.values()
    )


def widened(model: ir.Model) -> ir.Model:
    """The model in float32, inputs and outputs too; itself where it has no bfloat16.

    Args:
        model: The model, its functions inlined. It is left as it is.
    """
    if not has_bfloat16(model):
        return model
    model = model.clone()
    graph = model.graph
    _round_weights(graph)
    names, casts = names_in(graph), []
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype != NARROW:
            continue
        at_an_end = value.is_graph_input() or value.is_graph_output()
        if at_an_end or not (is_large(tensor) or _is_cast(value)):
            value.const_value = _wide(tensor)
            value.type = ir.TensorType(WIDE)
        elif not _is_cast(value):
            casts.append(cast_behind(value, names))
    for node in graph:
        for name, attribute in node.attributes.items():
            if _names_it(attribute):
                node.attributes[name] = ir.AttrInt64(name, int(WIDE))
            elif _holds_it(attribute):
                node.attributes[name] = ir.AttrTensor(name, _wide(attribute.as_tensor()))
    made = [value for node in graph for value in node.outputs]
    for value in (*graph.inputs, *graph.outputs, *made):
        if value.type == ir.TensorType(NARROW):
            value.type = ir.TensorType(WIDE)
    if casts:
        graph.insert_before(graph[0], casts)
    return model


def _round_weights(graph: ir.Graph) -> None:
    """Puts a bfloat16 weight in place of each Cast of a weight to bfloat16."""
    for node in graph:
        if not _casts_to(node, NARROW):
            continue
        weight, rounded = node.inputs[0], node.outputs[0]
        tensor = None if weight is None or weight.is_graph_input() else weight.const_value
        if weight is None or tensor is None or rounded.is_graph_output():
            continue
        if tensor.dtype not in FLOATS:
            continue
        array = tensor.numpy().astype(NARROW.numpy())
        value = ir.Value(
            name=rounded.name,
            type=ir.TensorType(NARROW),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=rounded.name),
        )
        rounded.replace_all_uses_with(value)
        graph.remove(node, safe=True)
        graph.register_initializer(value)
        if not weight.uses() and not weight.is_graph_output():
            del graph.initializers[str(weight.name)]


def _is_cast(value: ir.Value) -> bool:
    """Whether all that is done with it is what `cast_behind` does."""
    users = [node for node, _ in value.uses()]
    return bool(users) and all(_casts_to(node, WIDE) for node in users)


def _casts_to(node: ir.Node, dtype: ir.DataType) -> bool:
    to = node.attributes.get("to")
    return node.op_type == "Cast" and node.domain == "" and to is not None and to.value == dtype


def _names_it(attribute: ir.Attr) -> bool:
    return (
        attribute.name in TYPES
        and attribute.type == ir.AttributeType.INT
        and attribute.value == NARROW
    )


def _holds_it(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == NARROW


def _wide(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)
