"""Model files: reading any ONNX file, and writing an explained one whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError
from onnx_ir.passes.common import InlinePass

from onnxplain.contract import Contract
from onnxplain.errors import InputError, ModelError
from onnxplain.graphs.explained import SINGLE, Explained

__all__ = ["Report", "load", "save"]

CONTRACT_FILE = "contract.json"
WEIGHTS_FILE = "weights.bin"
EXTERNAL_ABOVE = 2_000_000_000  # protobuf ends at 2 GiB
SHARED_ABOVE = 256  # bytes; a smaller tensor stays in the graph, where it is easier to read


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written.

    Attributes:
        path: The file, or the folder of a bundle.
        files: Size in bytes of every file by name.
        source_bytes: Size of the weights that were there before.
        opset: Version of the operator set.
        methods: The methods that the result serves.
        contract: The contract of the whole.
        verification: Measured differences to the source framework, None if not measured.
    """

    path: Path
    files: dict[str, int]
    source_bytes: int
    opset: int
    methods: tuple[str, ...]
    contract: Contract
    verification: dict[str, Any] | None


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
    try:
        if path.stat().st_size == 0:
            raise ModelError(f"{path}: empty; expected an ONNX model")
        model = ir.load(path)
        for value in model.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value.numpy()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error} ({error.filename or path})") from None
    except (DecodeError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path}: not an ONNX model, or truncated ({reason})") from None
    if not len(model.graph):
        raise ModelError(f"{path}: not an ONNX model, or one without nodes")
    return _inlined(model)


def _inlined(model: ir.Model) -> ir.Model:
    if model.functions:
        model = model.clone()
        InlinePass()(model)
    return model


def save(explained: Explained, path: str | os.PathLike[str]) -> Report:
    """Writes a file, or the folder of a bundle; an older one is replaced.

    Everything is written and checked beside its place and then renamed, so an error, a full disk or
    Ctrl-C leaves what was there before.

    Raises:
        InputError: A bundle's folder holds other things.
        ModelError: The result cannot be written, or is not valid ONNX.
    """
    path = Path(path)
    bundle = SINGLE not in explained.models
    if bundle and path.exists() and not _replaceable(path):
        raise InputError(f"{path}: not empty and not a bundle; choose another folder")
    if not bundle and path.is_dir():
        raise InputError(f"{path}: a folder; expected a file name such as {path / 'model.onnx'}")
    try:
        with _beside(path) as scratch:
            if bundle:
                _write_bundle(explained, scratch)
            else:
                _write_file(explained.models[SINGLE], scratch / path.name)
            files = {f.name: f.stat().st_size for f in sorted(scratch.iterdir())}
            for name in files:
                if name.endswith(".onnx") or not bundle:
                    _check(scratch / name, name == path.name or bundle)
            if bundle:
                _put_folder(scratch, path)
            else:
                for name in sorted(files, reverse=True):  # weights before the file that needs them
                    os.replace(scratch / name, path.parent / name)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from None
    first = next(iter(explained.models.values()))
    weights = [v.const_value for v in first.graph.initializers.values()]
    return Report(
        path=path,
        files=files,
        source_bytes=sum(t.nbytes for t in weights if t is not None),
        opset=first.opset_imports[""],
        methods=tuple(explained.contract.methods),
        contract=explained.contract,
        verification=explained.contract.verification,
    )


def _check(path: Path, wanted: bool) -> None:
    if not wanted:
        return
    try:
        onnx.checker.check_model(path, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"{path.name} is not valid ONNX: {str(error).splitlines()[0]}") from None


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """An empty folder on the same disk, gone afterwards unless it was renamed."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _replaceable(path: Path) -> bool:
    return path.is_dir() and ((path / CONTRACT_FILE).exists() or not any(path.iterdir()))


def _put_folder(scratch: Path, path: Path) -> None:
    """Renames a finished folder into place; the bundle that was there goes last."""
    if not path.exists():
        os.replace(scratch, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    os.replace(path, old)
    try:
        os.replace(scratch, path)
    except OSError:
        os.replace(old, path)
        raise
    shutil.rmtree(old)


def _write_file(model: ir.Model, path: Path) -> None:
    weights = [v.const_value for v in model.graph.initializers.values()]
    large = sum(t.nbytes for t in weights if t is not None) > EXTERNAL_ABOVE
    ir.save(model, path, external_data=f"{path.name}.data" if large else None)


def _write_bundle(explained: Explained, folder: Path) -> None:
    """Every graph of the bundle, with one file of weights for all."""
    shared: dict[str, ir.TensorProtocol] = {}
    for model in explained.models.values():
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes > SHARED_ABOVE:
                shared.setdefault(name, tensor)
    tensors = ir.external_data.convert_tensors_to_external(
        list(shared.values()), folder, WEIGHTS_FILE
    )
    external = dict(zip(shared, tensors, strict=True))
    for kind, model in explained.models.items():
        model = model.clone()
        for name, value in model.graph.initializers.items():
            if value.const_value is not None and value.const_value.nbytes > SHARED_ABOVE:
                value.const_value = external[name]
        ir.save(model, folder / f"{kind}.onnx")
    (folder / CONTRACT_FILE).write_text(explained.contract.to_json(), "utf-8")
