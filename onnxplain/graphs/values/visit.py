"""One node: shapes, element types and constants of what it gives, from those of its operands."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir

from onnxplain.errors import ModelError, UnsupportedModelError
from onnxplain.graphs.values.facts import FOLDED, Facts, Shape, of_constant, show

__all__ = ["visit"]

FOLDED_INTEGERS = 2**18  # an index for every channel of every image of a probe
COMPUTED = frozenset(
    {ir.DataType.BFLOAT16, ir.DataType.BOOL, ir.DataType.DOUBLE, ir.DataType.FLOAT}
    | {ir.DataType.FLOAT16}
)
# Results of a size that depends on the values, and is bounded by that of the operand.
SELECTS = frozenset({"Compress", "NonZero", "Unique"})
NORMALISATIONS = frozenset({"LayerNormalization", "RMSNormalization"})
# What takes far more memory or time than its operands and results have elements, or is random.
NOT_COMPUTED = frozenset(
    {"AveragePool", "Bernoulli", "Col2Im", "Conv", "ConvInteger", "ConvTranspose", "DeformConv"}
    | {"Einsum", "LpPool", "MaxPool", "MaxUnpool", "Multinomial", "NonMaxSuppression"}
    | {"QLinearConv", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)


def visit(node: ir.Node, facts: dict[ir.Value, Facts], versions: dict[str, int]) -> None:
    """Adds the facts of the outputs of a node whose inputs all have numbers for sizes."""
    if node.op_type == "Constant" and node.domain == "":
        facts[node.outputs[0]] = of_constant(node)
        return
    inputs = {v.name or "": facts[v] for v in node.inputs if v is not None and v in facts}
    if node.op_type == "Shape" and node.domain == "":
        assert node.inputs[0] is not None
        rank = len(facts[node.inputs[0]].shape)
        start, end = (node.attributes.get(name) for name in ("start", "end"))
        dims = facts[node.inputs[0]].shape[
            slice(start.as_int() if start else 0, end.as_int() if end else rank)
        ]
        array = np.array(dims, np.int64)
        facts[node.outputs[0]] = Facts(array.shape, ir.DataType.INT64, array)
        return
    try:
        proto = ir.serde.serialize_node(node)
    except ir.serde.SerdeError as error:
        raise ModelError(
            f"node {node.name} ({node.op_type}) cannot be written again: {error.__cause__}"
        ) from error
    types = _infer_types(node, proto, inputs, versions)
    _check_axes(node, facts)
    if _is_computed(node, inputs.values(), types):
        for value, array in zip(
            node.outputs, _computed(node, proto, inputs, versions), strict=True
        ):
            facts[value] = Facts(array.shape, ir.DataType.from_numpy(array.dtype), array)
        return
    for value in node.outputs:
        if not value.name:  # left out
            facts[value] = Facts((), ir.DataType.UNDEFINED)
            continue
        kind = types.get(value.name)
        dims = kind.tensor_type.shape.dim if kind is not None else ()
        if (
            kind is None
            or not kind.tensor_type.HasField("shape")
            or not all(d.HasField("dim_value") for d in dims)
        ):
            raise UnsupportedModelError(
                f"the shape of {value.name} ({node.op_type}) depends on more than the batch size"
            )
        dtype = ir.DataType(kind.tensor_type.elem_type)
        facts[value] = Facts(tuple(d.dim_value for d in dims), dtype)
    if node.op_type == "Reshape" and node.domain == "":  # onnx does not compare
        source = node.inputs[0]
        assert source is not None
        before, after = (math.prod(_sizes(facts[v].shape)) for v in (source, node.outputs[0]))
        if before != after:
            raise ModelError(f"node {node.name} (Reshape) makes {after} elements of {before}")


def _check_axes(node: ir.Node, facts: Mapping[ir.Value, Facts]) -> None:
    """The attributes that onnx infers a shape from without a look at whether they fit; at a wrong
    axis of a normalisation onnxruntime crashes."""
    source = node.inputs[0] if node.inputs else None
    shape = () if source is None else facts[source].shape
    axis, perm = node.attributes.get("axis"), node.attributes.get("perm")
    rank, what = len(shape), f"node {node.name} ({node.op_type})"
    if node.op_type in NORMALISATIONS and axis is not None and not -rank <= axis.as_int() < rank:
        raise ModelError(
            f"{what} has axis {axis.as_int()}; expected one of the {rank} of {show(shape)}"
        )
    if node.op_type == "Transpose" and perm is not None:
        order = list(perm.as_ints())
        if sorted(order) != list(range(rank)):
            raise ModelError(f"{what} has perm {order}; expected each axis of {show(shape)} once")


def _sizes(shape: Shape) -> list[int]:
    return [d for d in shape if isinstance(d, int)]


def _is_computed(
    node: ir.Node, inputs: Collection[Facts], types: Mapping[str, onnx.TypeProto]
) -> bool:
    """Whether a node is computed here: all is constant, and neither the result nor what it takes
    to compute it is large, whatever the file says."""
    if node.op_type in NOT_COMPUTED or any(fact.constant is None for fact in inputs):
        return False
    if not all(fact.dtype.is_integer() or fact.dtype in COMPUTED for fact in inputs):
        return False
    for kind in types.values():
        dims = kind.tensor_type.shape.dim
        count = math.prod(d.dim_value for d in dims)
        most = FOLDED_INTEGERS if kind.tensor_type.elem_type == onnx.TensorProto.INT64 else FOLDED
        known = kind.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims)
        if not (known and 0 <= count <= most) and node.op_type not in SELECTS:
            return False
    return True


def _computed(
    node: ir.Node, proto: onnx.NodeProto, inputs: Mapping[str, Facts], versions: dict[str, int]
) -> list[np.ndarray]:
    arrays = {name: fact.constant for name, fact in inputs.items()}
    try:
        evaluator = onnx.reference.ReferenceEvaluator(proto, opsets=dict(versions))
        return [np.asarray(array) for array in evaluator.run(None, arrays)]
    except Exception as error:  # whatever numpy says to wrong operands
        raise ModelError(
            f"node {node.name} ({node.op_type}) cannot be computed from its constants: "
            f"{next(iter(str(error).splitlines()), type(error).__name__)}"
        ) from error


def _infer_types(
    node: ir.Node,
    proto: onnx.NodeProto,
    inputs: dict[str, Facts],
    versions: dict[str, int],
) -> dict[str, onnx.TypeProto]:
    types = {
        name: onnx.helper.make_tensor_type_proto(int(fact.dtype), _sizes(fact.shape))
        for name, fact in inputs.items()
    }
    data = {
        name: onnx.numpy_helper.from_array(fact.constant, name)
        for name, fact in inputs.items()
        if fact.constant is not None
    }
    opsets = [onnx.helper.make_opsetid(d, v) for d, v in versions.items()]
    try:
        schema = onnx.defs.get_schema(node.op_type, versions.get(node.domain, 1), node.domain)
        return onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=opsets
        )
    except onnx.defs.SchemaError:
        raise UnsupportedModelError(
            f"node {node.name} is {node.domain or 'ai.onnx'}.{node.op_type}, not a standard "
            "operator; expected a model as its exporter wrote it, before any runtime optimised it"
        ) from None
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, KeyError) as error:
        raise ModelError(
            f"node {node.name} ({node.op_type}) is not valid ONNX: {str(error).splitlines()[0]}"
        ) from None
