"""Reading any ONNX file."""

from __future__ import annotations

import os
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx.external_data_helper import uses_external_data
from onnx_ir.passes.common import InlinePass

from onnxplain.errors import ModelError, UnsupportedModelError
from onnxplain.graphs.files.sound import check_sound
from onnxplain.graphs.normal.opset import NORMALISATIONS
from onnxplain.graphs.normal.rewrite import MICROSOFT

__all__ = ["first_line", "is_text", "load", "weight_files"]

PROTOBUF_END = 2**31


def load(source: str | os.PathLike[str] | ir.Model) -> ir.Model:
    """Reads an ONNX file, with its functions inlined.

    Raises:
        ModelError: Missing, empty, truncated, or not ONNX; external weights missing.
    """
    if isinstance(source, ir.Model):
        return _inlined(source)
    path = Path(source)
    if path.is_dir():
        raise ModelError(f"{path}: a folder; expected an .onnx file")
    if not path.exists():
        raise ModelError(f"{path}: no such file")
    if not is_text(path):
        raise ModelError(f"{path}: its name is not UTF-8, which onnx cannot open; rename it")
    try:
        size = path.stat().st_size
        if size == 0:
            raise ModelError("empty; expected an ONNX model")
        if size >= PROTOBUF_END:
            raise ModelError(
                f"{size} bytes; an ONNX file ends at 2 GiB, a larger model keeps its "
                "weights in a file beside it"
            )
        _check(path)
        proto = onnx.load(path, load_external_data=False)
        check_sound(proto, path.parent)
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, path.parent)
        for value in model.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value.numpy()  # maps the file
        return _inlined(model)
    except OSError as error:
        missing = error.filename if isinstance(error.filename, str | os.PathLike) else path
        raise ModelError(f"{path}: {error.strerror or error} ({missing})") from None
    except ModelError as error:
        raise type(error)(f"{path}: {error}") from None
    except (onnx.checker.ValidationError, DecodeError, ValueError, RuntimeError) as error:
        reason = first_line(error)
        _, external, place = reason.partition("should be stored in ")
        if external:
            raise ModelError(
                f"{path}: the file of its weights is missing: {place.partition(', but')[0]}"
            ) from None
        raise ModelError(f"{path}: not an ONNX model, or a damaged one ({reason})") from None


def _check(path: Path) -> None:
    """onnx's checker, which does not know what onnxruntime adds to the standard domain."""
    try:
        return onnx.checker.check_model(path)
    except onnx.checker.ValidationError as error:
        if not any(f"No Op registered for {name} " in str(error) for name in NORMALISATIONS):
            raise
    proto = onnx.load(path, load_external_data=False)
    for node in proto.graph.node:
        if node.domain == "" and node.op_type in NORMALISATIONS:
            node.domain = MICROSOFT
    for tensor in filter(uses_external_data, list(proto.graph.initializer)):
        # The checker looks for the files of weights beside the file that it is given.
        kind = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        proto.graph.input.append(onnx.helper.make_value_info(tensor.name, kind))
        proto.graph.initializer.remove(tensor)
    onnx.checker.check_model(proto)


def weight_files(source: str | os.PathLike[str]) -> list[Path]:
    """The files beside an ONNX file that hold weights of it, by name.

    Raises:
        ModelError: As in `load`.
    """
    tensors = (value.const_value for value in load(source).graph.initializers.values())
    return sorted({Path(t.path) for t in tensors if isinstance(t, ir.ExternalTensor)})


def _inlined(model: ir.Model) -> ir.Model:
    if model.functions:
        model = model.clone()
        try:
            InlinePass()(model)
        except (ValueError, ir.passes.PassError) as error:
            raise UnsupportedModelError(
                f"its functions cannot be put in where they are called: {first_line(error)}"
            ) from None
    return model


def is_text(path: Path) -> bool:
    """Whether a file's name is UTF-8, as onnx's checker wants it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def first_line(error: Exception) -> str:
    """What a library says is wrong, without what it adds."""
    return next(iter(str(error).splitlines()), type(error).__name__).strip()
