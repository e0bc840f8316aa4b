"""What a file of a stranger must keep, beyond onnx's own checker, before anything is made of it.

The checker looks at operators, names and their order. It believes what a tensor says of its size,
and what a function takes: files of some hundred bytes that unfold to terabytes pass it.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxplain.errors import ModelError, OnnxplainError

__all__ = ["blaming", "check_sound"]

LONGEST = 2**48  # elements along all axes, one of size 0 left out: what shapes can be computed with
NESTED = 64  # functions within functions
UNFOLDED = 2**18  # nodes, with the functions put in

# The field that holds the elements where they are no raw bytes.
_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")

Function = tuple[str, str, str]


def check_sound(model: onnx.ModelProto, folder: Path) -> None:
    """Refuses what would take memory, time or other files than those of the model.

    Args:
        model: The model as it stands in the file, external data not loaded.
        folder: The folder of the file.

    Raises:
        ModelError: A tensor has not the bytes that its shape takes, or has them outside of the
            folder; two values, outputs or weights have one name; a function calls itself; an
            attribute refers to one of a function outside of any.
    """
    _check_names(model.graph)
    for graph in _graphs(model.graph):
        for tensor in graph.sparse_initializer:
            raise ModelError(f"weight {tensor.values.name} is sparse; expected a dense one")
        for tensor in graph.initializer:
            _check_tensor(tensor, f"weight {tensor.name}", folder)
        for node in graph.node:
            _check_attributes(node, folder)
            for attribute in node.attribute:
                if attribute.ref_attr_name:
                    raise ModelError(
                        f"{_name(node)}: attribute {attribute.name} is that of a function, "
                        f"{attribute.ref_attr_name}, and the node is in none"
                    )
    for function in model.functions:
        for node in _nodes(function.node):
            _check_attributes(node, folder)
    _check_functions(model)


@contextlib.contextmanager
def blaming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Takes an unexpected error within for the file's fault where onnx's full check finds one.

    Inferring all shapes takes a second for a large file, and some that are fine fail it, since
    their exporter recorded a wrong shape; so it is not asked before. An error on a file that passes
    is one of ours and stays what it is.
    """
    try:
        yield
    except OnnxplainError:
        raise
    except Exception as error:
        try:
            onnx.checker.check_model(path, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as found:
            reason, *more = " ".join(str(found).split()).split("(op_type")
            reason += "(op_type".join(["", *more[:1]])  # of many errors the first
            raise ModelError(f"not what ONNX allows: {reason}") from error
        raise


def _check_names(graph: onnx.GraphProto) -> None:
    kinds = {
        "inputs": [value.name for value in graph.input],
        "outputs": [value.name for value in graph.output],
        "weights": [tensor.name for tensor in graph.initializer],
    }
    for kind, names in kinds.items():
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise ModelError(f"two {kind} are named {name!r}; expected a name for each")
            if not name:
                raise ModelError(f"one of the {kind} has no name; expected a name for each")
            seen.add(name)
    taken = {name: f"the {kind}" for kind in ("inputs", "weights") for name in kinds[kind]}
    for node in graph.node:
        for name in node.output:
            if name in taken:
                raise ModelError(
                    f"{_name(node)} makes {name!r}, which {taken[name]} have too; expected a name "
                    "for each value"
                )
            if name:
                taken[name] = "other nodes"


def _check_attributes(node: onnx.NodeProto, folder: Path) -> None:
    names = [attribute.name for attribute in node.attribute]
    for name in names:
        if names.count(name) > 1:
            raise ModelError(f"{_name(node)} has two attributes {name}; expected one")
    for attribute in node.attribute:
        for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
            _check_tensor(tensor, f"{_name(node)}: attribute {attribute.name}", folder)


def _check_tensor(tensor: onnx.TensorProto, what: str, folder: Path) -> None:
    shape = list(tensor.dims)
    if any(size < 0 for size in shape) or math.prod(max(size, 1) for size in shape) > LONGEST:
        raise ModelError(f"{what} has shape {shape}; expected sizes that a tensor can have")
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        raise ModelError(f"{what} is of element type {tensor.data_type}, which is none") from None
    count, expected = math.prod(shape), 0
    if dtype == ir.DataType.UNDEFINED:
        raise ModelError(f"{what} has no element type")
    if dtype != ir.DataType.STRING:
        expected = math.ceil(count * dtype.bitwidth / 8)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external(tensor, what, folder, expected)
    elif tensor.HasField("raw_data"):
        if len(tensor.raw_data) != expected:
            raise ModelError(
                f"{what} of shape {shape} has {len(tensor.raw_data)} bytes; expected {expected}"
            )
    else:
        found = sum(len(getattr(tensor, field)) for field in _FIELDS)
        each = 2 if dtype in (ir.DataType.COMPLEX64, ir.DataType.COMPLEX128) else 1
        packed = dtype != ir.DataType.STRING and dtype.bitwidth < 8
        if found not in (count * each, expected if packed else -1):
            raise ModelError(f"{what} of shape {shape} has {found} elements; expected {count}")


def _check_external(tensor: onnx.TensorProto, what: str, folder: Path, expected: int) -> None:
    said = {entry.key: entry.value for entry in tensor.external_data}
    location = said.get("location", "")
    parts = Path(location).parts
    path = Path(os.path.realpath(folder / location))
    if Path(location).is_absolute() or ".." in parts or not parts or "\0" in location:
        raise ModelError(f"{what} is in {location!r}; expected a file below that of the model")
    if not path.is_relative_to(os.path.realpath(folder)):
        raise ModelError(f"{what} is in {location!r}, a link that leads out of the model's folder")
    try:
        offset = int(said.get("offset") or 0)
        length = int(said.get("length") or expected)
    except ValueError:
        raise ModelError(
            f"{what}: offset {said.get('offset')!r}, length {said.get('length')!r}; expected bytes"
        ) from None
    if length != expected:
        raise ModelError(
            f"{what} of shape {list(tensor.dims)} has {length} bytes; expected {expected}"
        )
    size = path.stat().st_size
    if not 0 <= offset <= size - expected:
        raise ModelError(
            f"{what} is in bytes {offset} to {offset + expected} of {location}, a damaged file "
            f"or another one: it has {size}"
        )


def _check_functions(model: onnx.ModelProto) -> None:
    functions = {_key(f): f for f in model.functions}
    if len(functions) < len(model.functions):
        raise ModelError("two functions have one name; expected a name for each")
    sizes: dict[Function, int] = {}

    def unfolded(nodes: Iterator[onnx.NodeProto], within: tuple[Function, ...]) -> int:
        count = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key in within:
                raise ModelError(f"function {node.op_type} calls itself; expected none that does")
            if key in functions and key not in sizes:
                if len(within) == NESTED:
                    raise ModelError(
                        f"function {node.op_type} is the {NESTED + 1}th within another; expected "
                        f"at most {NESTED}"
                    )
                sizes[key] = unfolded(_nodes(functions[key].node), (*within, key))
            count += sizes.get(key, 1)
        if sizes and count > UNFOLDED:
            raise ModelError(
                f"with its functions put in, the graph has {count} nodes; expected at most "
                f"{UNFOLDED}"
            )
        return count

    if functions:
        unfolded(_nodes(model.graph.node), ())


def _key(function: onnx.FunctionProto) -> Function:
    return function.domain, function.name, function.overload


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph and those within it; protobuf reads about thirty within each other, no more."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _graphs(inner)


def _nodes(nodes: object) -> Iterator[onnx.NodeProto]:
    """The nodes and those in graphs within them."""
    for node in nodes:  # type: ignore[attr-defined]
        yield node
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _nodes(inner.node)


def _name(node: onnx.NodeProto) -> str:
    return f"node {node.name or '/'.join(node.output)} ({node.op_type})"
