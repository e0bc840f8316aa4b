"""What is known of every value of a graph before it runs: element type, shape, constant value.

Files come from many exporters: some record no shapes, some freeze them, some compute the targets of
Reshape and Expand with chains of Shape, Gather and Concat. So nothing recorded is believed. The
image input is bound to two batch sizes in turn, every node's output shapes are inferred from
concrete input shapes, and integer chains are computed. A size that differs between the two is a
multiple of the batch; everything else is static.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir

from onnxplain.errors import ModelError, UnsupportedModelError

__all__ = [
    "COMPUTED_BYTES",
    "PROBES",
    "Batch",
    "Dim",
    "Facts",
    "Shape",
    "bound",
    "frozen_batches",
    "infer",
    "merge",
    "of_stored",
    "room_behind",
    "show",
    "visit",
    "visit_all",
]

PROBES = (7, 11)  # two batch sizes; neither is 1, which would look like a broadcast
NUMBERS = {
    ir.AttributeType.FLOAT: np.float32,
    ir.AttributeType.FLOATS: np.float32,
    ir.AttributeType.INT: np.int64,
    ir.AttributeType.INTS: np.int64,
}
FOLDED = 4096  # values up to this many elements are computed; weights are not
FOLDED_INTEGERS = 2**18  # an index for every channel of every image of a probe
FROZEN = 16  # batch sizes that are tried
COMPUTED_BYTES = 2**30  # all together, for one batch size
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


@dataclass(frozen=True)
class Batch:
    """A size that is `factor` times the batch size."""

    factor: int = 1

    def __str__(self) -> str:
        return "batch" if self.factor == 1 else f"{self.factor}*batch"


Dim = int | Batch
Shape = tuple[Dim, ...]


def show(shape: Shape) -> str:
    """The shape as messages give it: [batch, 3, 224, 224]."""
    return f"[{', '.join(str(size) for size in shape)}]"


@dataclass(frozen=True)
class Facts:
    """Shape, element type and, where it does not depend on the input, value of one value.

    `counts` says that the elements are 0, 1, 2, ... in order, for every batch.
    """

    shape: Shape
    dtype: ir.DataType
    constant: np.ndarray | None = None
    counts: bool = False

    @property
    def is_half(self) -> bool:
        """Whether it is float16."""
        return self.dtype == ir.DataType.FLOAT16


def infer(
    model: ir.Model, image: ir.Value, size: tuple[int, int] | None = None
) -> dict[ir.Value, Facts]:
    """Facts of every value of the main graph.

    Args:
        model: Model with plain operators and no subgraphs.
        image: The image input. A batch size frozen in the file stays static, also where the input
            promises any batch and the nodes behind it work for one of `frozen_batches` only.
        size: Height and width that the image is bound to; None: those that it states.

    Raises:
        ModelError: A node contradicts its operator's definition, for whatever batch.
        UnsupportedModelError: A shape depends on more than the batch size.
    """
    batch = image.shape[0] if image.shape is not None else None
    if isinstance(batch, int):
        return _propagate(model, image, batch, size)
    try:
        runs = [_propagate(model, image, probe, size) for probe in PROBES]
    except UnsupportedModelError:
        raise
    except ModelError as error:
        tried = frozen_batches(model)
        for frozen in tried:
            with contextlib.suppress(ModelError):
                facts = _propagate(model, image, frozen, size)
                # Else one image is broadcast to what the exporter computed for several.
                if any(facts[v].shape[:1] in ((), (frozen,)) for v in model.graph.outputs):
                    return facts
        if tried == [1]:  # nothing says that it is about the batch
            raise error
        raise ModelError(
            f"{error} (in a batch of {PROBES[0]}, and none of {', '.join(map(str, tried))} fits; "
            "export it with a batch of any size, or with its size as the input's first axis)"
        ) from None
    return {value: merge(value, *(run[value] for run in runs)) for value in runs[0]}


def frozen_batches(model: ir.Model) -> list[int]:
    """Batch sizes that an exporter may have frozen behind an input of any batch: 1, and with what
    the targets of Reshape and Expand, and constants in a Concat, begin."""
    found = {1}
    for node in model.graph:
        targets = node.op_type in ("Reshape", "Expand")
        for value in node.inputs[1:2] if targets else node.inputs:
            stored = None if value is None else of_stored(value)
            if stored is None:
                continue
            if targets and stored.constant is not None and stored.constant.size:
                found.add(int(stored.constant.reshape(-1)[0]))
            elif (
                node.op_type == "Concat"
                and len(stored.shape) > 1
                and isinstance(stored.shape[0], int)
            ):
                found.add(stored.shape[0])
    return sorted(size for size in found if size > 0)[:FROZEN]


def merge(value: ir.Value, first: Facts, second: Facts) -> Facts:
    """What both batch sizes of `PROBES` agree on."""
    if len(first.shape) != len(second.shape):
        raise UnsupportedModelError(f"the rank of {value.name} changes with the batch size")
    shape: list[Dim] = []
    for one, other in zip(first.shape, second.shape, strict=True):
        assert isinstance(one, int) and isinstance(other, int)
        if one == other:
            shape.append(one)
            continue
        factor = one // PROBES[0]
        if (factor * PROBES[0], factor * PROBES[1]) != (one, other):
            raise UnsupportedModelError(
                f"{value.name} has size {one} for batch {PROBES[0]} and {other} for batch "
                f"{PROBES[1]}; expected a multiple of the batch"
            )
        shape.append(Batch(factor))
    same = (
        first.constant is not None
        and second.constant is not None
        and np.array_equal(first.constant, second.constant)
    )
    counts = _counts(first.constant) and _counts(second.constant)
    return Facts(tuple(shape), first.dtype, first.constant if same else None, counts)


def _counts(array: np.ndarray | None) -> bool:
    return (
        array is not None
        and array.dtype == np.int64
        and np.array_equal(array.reshape(-1), np.arange(array.size))
    )


def _propagate(
    model: ir.Model, image: ir.Value, batch: int, size: tuple[int, int] | None
) -> dict[ir.Value, Facts]:
    """Facts of every value with batch and picture bound to sizes, so that all are numbers."""
    facts = bound(model, image, batch, size)
    visit_all(model.graph, facts, model.opset_imports)
    return facts


def visit_all(
    nodes: Iterable[ir.Node], facts: dict[ir.Value, Facts], versions: dict[str, int]
) -> None:
    """Adds the facts of the outputs of nodes in order, in bounded memory."""
    room = COMPUTED_BYTES
    for node in nodes:
        visit(node, facts, versions)
        room = room_behind(node, facts, room)


def room_behind(node: ir.Node, facts: Mapping[ir.Value, Facts], room: int) -> int:
    """How many bytes of constants may be computed behind a node, of those before it."""
    made = (facts[value].constant for value in node.outputs)
    room -= sum(array.nbytes for array in made if array is not None)
    if room < 0:
        raise UnsupportedModelError(
            f"the constants that are computed up to node {node.name} take more than "
            f"{COMPUTED_BYTES} bytes; expected a graph that computes on the image"
        )
    return room


def bound(
    model: ir.Model, image: ir.Value, batch: int, size: tuple[int, int] | None
) -> dict[ir.Value, Facts]:
    """Facts of inputs and weights, with batch and picture bound to sizes."""
    facts: dict[ir.Value, Facts] = {}
    for value in model.graph.inputs:
        dims = list(value.shape or ())
        if value is image or (dims and not isinstance(dims[0], int)):
            dims[0] = batch
        if value is image and size is not None:
            dims[2:] = size
        if value.dtype is None or not all(isinstance(d, int) for d in dims):
            raise UnsupportedModelError(
                f"input {value.name} has shape {value.shape}; expected fixed sizes after the batch"
            )
        facts[value] = Facts(tuple(d for d in dims if isinstance(d, int)), value.dtype)
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            facts[value] = _of_tensor(value.const_value)
    return facts


def of_stored(value: ir.Value) -> Facts | None:
    """Facts of a weight or of what a Constant holds; None of any other value."""
    if value.const_value is not None:
        return _of_tensor(value.const_value)
    node = value.producer()
    if node is None or (node.domain, node.op_type) != ("", "Constant"):
        return None
    with contextlib.suppress(ModelError):
        return _of_constant(node)
    return None


def _of_tensor(tensor: ir.TensorProtocol) -> Facts:
    shape = tuple(tensor.shape.numpy())
    small = int(np.prod(shape, dtype=np.int64)) <= FOLDED
    return Facts(shape, tensor.dtype, tensor.numpy() if small else None)


def _of_constant(node: ir.Node) -> Facts:
    if len(node.attributes) != 1:
        raise ModelError(f"node {node.name}: a Constant of {len(node.attributes)} values")
    (attribute,) = node.attributes.values()
    if attribute.type == ir.AttributeType.TENSOR:
        return _of_tensor(attribute.as_tensor())
    if attribute.type not in NUMBERS:
        raise UnsupportedModelError(f"node {node.name}: a Constant that is not a tensor")
    array = np.array(attribute.value, NUMBERS[attribute.type])
    return Facts(array.shape, ir.DataType.from_numpy(array.dtype), array)


def visit(node: ir.Node, facts: dict[ir.Value, Facts], versions: dict[str, int]) -> None:
    """Adds the facts of the outputs of a node whose inputs all have numbers for sizes."""
    if node.op_type == "Constant" and node.domain == "":
        facts[node.outputs[0]] = _of_constant(node)
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
