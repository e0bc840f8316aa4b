"""Writing an explained graph, one file or a bundle, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from onnxplain.contract import BUNDLE_FILE, Contract
from onnxplain.errors import InputError, ModelError
from onnxplain.graphs.explained import SINGLE, Explained
from onnxplain.graphs.files.reading import first_line, is_text
from onnxplain.outputs import GRAPH_KINDS

__all__ = [
    "Report",
    "check_destination",
    "drafted",
    "refuse_itself",
    "save",
]

WEIGHTS_FILE = "weights.bin"
EXTERNAL_ABOVE = 1_000_000_000  # bytes of weights; in a file beside the graph they can be mapped
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
        kept_float32: Names of the weights that were to be float16 and are not.
    """

    path: Path
    files: dict[str, int]
    source_bytes: int
    opset: int
    methods: tuple[str, ...]
    contract: Contract
    verification: dict[str, Any] | None
    kept_float32: tuple[str, ...]


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
    check_destination(path, bundle=bundle)
    with _refusals(path), _beside(path) as scratch:
        if bundle:
            _write_bundle(explained, scratch)
        else:
            _write_file(explained.models[SINGLE], scratch / path.name)
        files = {f.name: f.stat().st_size for f in sorted(scratch.iterdir())}
        for name in _graph_files(explained, path):
            _check_written(scratch / name)
        if bundle:
            _put_folder(scratch, path)
        else:
            _put_files(scratch, path, files)
    first = next(iter(explained.models.values()))
    return Report(
        path=path,
        files=files,
        source_bytes=explained.source_bytes,
        opset=first.opset_imports[""],
        methods=tuple(explained.contract.methods),
        contract=explained.contract,
        verification=explained.contract.verification,
        kept_float32=explained.kept_float32,
    )


@contextlib.contextmanager
def drafted(
    explained: Explained, path: str | os.PathLike[str]
) -> Iterator[tuple[list[Path], Explained]]:
    """The graphs as files beside `path` for a trial, with one file of weights; gone afterwards.

    Yields the files, and the same graphs with their weights memory-mapped from there, so that
    whoever holds the weights themselves can let them go.

    Raises:
        ModelError: They, or what the trial writes beside them, cannot be written.
    """
    path = Path(path)
    with _refusals(path), _beside(path) as folder:
        names = {kind: f"{kind}.onnx" for kind in explained.models}
        files = {names[kind]: model for kind, model in explained.models.items()}
        written = _write_graphs(files, folder, WEIGHTS_FILE)
        explained = dataclasses.replace(explained, models=dict(zip(names, written, strict=True)))
        del files
        yield [folder / name for name in names.values()], explained


def _graph_files(explained: Explained, path: Path) -> list[str]:
    return [path.name if kind == SINGLE else f"{kind}.onnx" for kind in explained.models]


def _check_written(path: Path) -> None:
    try:
        onnx.checker.check_model(path, full_check=True)
    except ValueError as error:  # of an element type that is none
        raise onnx.checker.ValidationError(str(error)) from None


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """What can fail in writing, as our own error."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from None
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"{path}: would not be valid ONNX: {first_line(error)}") from None
    except ir.serde.SerdeError as error:
        raise ModelError(f"{path}: cannot be written: {first_line(error)}") from None


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """An empty folder on the same disk, gone afterwards unless it was renamed."""
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        scratch.chmod(0o755)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_itself(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Raises:
    InputError: The result would replace the model that it is made from.
    """
    if Path(source).exists() and Path(path).exists() and Path(path).samefile(source):
        raise InputError(
            f"{os.fspath(path)} is the model itself and would be overwritten; choose another name"
        )


def check_destination(path: Path, *, bundle: bool) -> None:
    """What can be seen before the work: a file goes beside other files; only an empty folder, or
    one with a bundle and nothing else, is replaced.

    Raises:
        InputError: `path` cannot be written, with the reason.
    """
    if not is_text(path):
        raise InputError(f"{path}: a name that is not UTF-8; choose another")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such folder; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"{path.parent}: a folder without permission to write; choose another")
    if not bundle:
        if path.is_dir():
            raise InputError(f"{path}: a folder; expected a file name such as {path / 'vit.onnx'}")
        return
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: a file; expected a folder, or a name that ends in .onnx")
    ours = {BUNDLE_FILE, WEIGHTS_FILE, *(f"{kind}.onnx" for kind in GRAPH_KINDS)}
    found = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    if found and (BUNDLE_FILE not in found or not found <= ours):
        other = min(found - ours, default=min(found))
        raise InputError(
            f"{path}: holds {other}, so it is not a bundle alone; choose another folder"
        )


def _put_files(scratch: Path, path: Path, names: Iterable[str]) -> None:
    """Renames a finished file into place, after its weights; or leaves both as they were."""
    weights = [name for name in names if name != path.name]
    kept: list[tuple[Path, Path]] = []
    try:
        for name in weights:
            target, old = path.parent / name, scratch / f"{name}.old"
            if target.exists():
                os.replace(target, old)
            kept.append((target, old))
            os.replace(scratch / name, target)
        os.replace(scratch / path.name, path)
    except BaseException:
        for target, old in kept:
            target.unlink(missing_ok=True)
            if old.exists():
                os.replace(old, target)
        raise


def _put_folder(scratch: Path, path: Path) -> None:
    """Renames a finished folder into place; the bundle that was there goes last."""
    with _beside(path) as aside:
        old = aside / path.name
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(scratch, path)
        except BaseException:
            if old.exists() and not path.exists():
                os.replace(old, path)
            raise


def _write_file(model: ir.Model, path: Path) -> None:
    weights = [v.const_value for v in model.graph.initializers.values()]
    if sum(t.nbytes for t in weights if t is not None) > EXTERNAL_ABOVE:
        _write_graphs({path.name: model}, path.parent, f"{path.name}.data")
    else:
        _write_whole(model, path)


def _write_whole(model: ir.Model, path: Path) -> None:
    """One file with the weights in it, written a tensor at a time.

    protobuf would have the whole file in memory twice before the first byte is written. A message
    is its fields one after another, each with its number, so the weights can follow the rest.
    """
    model = model.clone()
    weights = [
        value
        for value in model.graph.initializers.values()
        if (tensor := value.const_value) is not None
        and tensor.nbytes > SHARED_ABOVE
        and tensor.dtype != ir.DataType.STRING  # the only one without raw data
    ]
    for value in weights:
        del model.graph.initializers[str(value.name)]
    ir.external_data.load_to_model(model)
    rest = ir.serde.serialize_model(model)
    graph = rest.graph.SerializeToString(deterministic=True)
    rest.ClearField("graph")
    heads = [_tensor_head(value) for value in weights]
    sizes = [len(head) + nbytes for head, nbytes in heads]
    length = len(graph) + sum(len(_field(_INITIALIZER, size)) + size for size in sizes)
    with path.open("wb") as file:
        file.write(rest.SerializeToString(deterministic=True))
        file.write(_field(_GRAPH, length))
        file.write(graph)
        for value, (head, _), size in zip(weights, heads, sizes, strict=True):
            assert value.const_value is not None
            file.write(_field(_INITIALIZER, size))
            file.write(head)
            file.write(value.const_value.tobytes())


_GRAPH = onnx.ModelProto.GRAPH_FIELD_NUMBER
_INITIALIZER = onnx.GraphProto.INITIALIZER_FIELD_NUMBER
_RAW_DATA = onnx.TensorProto.RAW_DATA_FIELD_NUMBER


def _tensor_head(value: ir.Value) -> tuple[bytes, int]:
    """A TensorProto up to its data, and the size of the data in bytes."""
    tensor = value.const_value
    assert tensor is not None
    head = onnx.TensorProto(
        name=value.name, dims=tensor.shape.numpy(), data_type=int(tensor.dtype)
    ).SerializeToString(deterministic=True)
    return head + _field(_RAW_DATA, tensor.nbytes), tensor.nbytes


def _field(number: int, length: int) -> bytes:
    """How protobuf announces a field of so many bytes: its number and wire type 2, the length."""
    out = bytearray([number << 3 | 2])
    while length > 127:
        out.append(length & 127 | 128)
        length >>= 7
    return bytes([*out, length])


def _write_bundle(explained: Explained, folder: Path) -> None:
    files = {f"{kind}.onnx": model for kind, model in explained.models.items()}
    _write_graphs(files, folder, WEIGHTS_FILE)
    (folder / BUNDLE_FILE).write_text(explained.contract.to_json(), "utf-8")


def _write_graphs(models: Mapping[str, ir.Model], folder: Path, weights: str) -> list[ir.Model]:
    """Every graph under its file name, with one file of weights for all; the graphs as written."""
    shared: dict[int, ir.TensorProtocol] = {}  # by identity: graphs have own constants of one name
    for model in models.values():
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes > SHARED_ABOVE:
                shared[id(tensor)] = tensor
    tensors = ir.external_data.convert_tensors_to_external(list(shared.values()), folder, weights)
    external = dict(zip(shared, tensors, strict=True))
    written = []
    for name, model in models.items():
        model = model.clone()
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if id(tensor) in external:
                value.const_value = external[id(tensor)]
            elif isinstance(tensor, ir.ExternalTensor):
                (value.const_value,) = ir.external_data.convert_tensors_from_external([tensor])
        ir.save(model, folder / name)
        written.append(model)
    return written
