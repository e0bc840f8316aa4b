"""Files of strangers: every one is served or refused in one line, in little time and memory.

Nothing in an ONNX file is run as code: operators are looked up by name, and there is no library of
operators to load. What is left are files that name other files, claim sizes, or never end.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from hand_written import HandWritten, to_file
from onnx import TensorProto, helper, numpy_helper
from untrusted_worker import Worker

from onnxplain import graphs
from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.values import shapes

Change = Callable[[onnx.ModelProto], None]
Damage = Callable[[Path], None]

LARGEST_PEAK = 400e6  # bytes; with all libraries loaded 170e6
WEIGHT = "conv.bias"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_file(HandWritten(), tmp_path_factory.mktemp("source") / "source.onnx")


@pytest.fixture
def plain(source: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return Path(shutil.copy(source, tmp_path / "model" / "plain.onnx"))


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def refused(worker: Worker, path: Path, *found: str) -> None:
    outcome = worker(path)
    assert outcome.kind in ("typed ModelError", "typed UnsupportedModelError"), outcome
    assert outcome.text.startswith(f"{path}: ")
    for part in found:
        assert part in outcome.text
    assert "\n" not in outcome.text
    assert outcome.peak < LARGEST_PEAK
    assert not path.with_name("explained.onnx").exists()


def weight(model: onnx.ModelProto) -> TensorProto:
    return next(tensor for tensor in model.graph.initializer if tensor.name == WEIGHT)


def changed(path: Path, change: Change) -> None:
    model = onnx.load(path, load_external_data=False)
    change(model)
    onnx.save(model, path)


# What is no model


def written(path: Path) -> None:
    path.write_text("hello\n" * 99)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def grown(path: Path) -> None:
    """Three gigabytes of zeros, which take no room on the disk."""
    emptied(path)
    os.truncate(path, 3 * 2**30)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


NO_MODELS: dict[str, tuple[Damage, str]] = {
    "empty": (emptied, "empty; expected an ONNX model"),
    "text": (written, "not an ONNX model"),
    "cut off": (cut, "not an ONNX model, or a damaged one"),
    "huge": (grown, "3221225472 bytes; an ONNX file ends at 2 GiB"),
    "a folder": (folder, "a folder; expected an .onnx file"),
    "missing": (Path.unlink, "no such file"),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model(case: str, plain: Path, worker: Worker) -> None:
    damage, found = NO_MODELS[case]
    damage(plain)
    refused(worker, plain, found)


# Weights in other files


def external(path: Path) -> Path:
    """Moves the weights of a file into a second one."""
    onnx.save(
        onnx.load(path), path, save_as_external_data=True, location="w.data", size_threshold=64
    )
    return path.with_name("w.data")


def said(key: str, value: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        entries = weight(model).external_data
        (entry,) = [entry for entry in entries if entry.key == key] or [entries.add(key=key)]
        entry.value = value

    return change


def linked(to: str) -> Damage:
    def damage(path: Path) -> None:
        path.with_name("link.data").symlink_to(to)
        changed(path, said("location", "link.data"))

    return damage


def outside(path: Path) -> None:
    shutil.move(path.with_name("w.data"), path.parent.parent / "w.data")


def moved_behind_a_link(path: Path) -> None:
    outside(path)
    path.with_name("w.data").symlink_to("../w.data")


def moved_up(path: Path) -> None:
    outside(path)
    changed(path, lambda model: every_location(model, "../w.data"))


def every_location(model: onnx.ModelProto, location: str) -> None:
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value


def lost(path: Path) -> None:
    path.with_name("w.data").unlink()


def cut_weights(path: Path) -> None:
    cut(path.with_name("w.data"))


ELSEWHERE: dict[str, tuple[Damage, str]] = {
    "an absolute path": (lambda path: changed(path, said("location", "/etc/passwd")), "/etc/passw"),
    "above the model": (moved_up, "../w.data"),
    "a link that leads out": (moved_behind_a_link, "w.data"),
    "a link to a device": (linked("/dev/zero"), "link.data"),
    "a folder": (lambda path: changed(path, said("location", ".")), "weights is missing"),
    "no name": (lambda path: changed(path, said("location", "")), WEIGHT),
    "missing": (lost, "the file of its weights is missing: "),
    "cut off": (cut_weights, "a damaged file or another one"),
    "an offset outside": (
        lambda path: changed(path, said("offset", str(2**50))),
        f"weight {WEIGHT} is in bytes {2**50} to ",
    ),
    "an offset before": (lambda path: changed(path, said("offset", "-4096")), "-4096"),
    "no number": (lambda path: changed(path, said("offset", "abc")), "abc"),
    "a length of its own": (
        lambda path: changed(path, said("length", str(2**40))),
        f"weight {WEIGHT} of shape [16] has {2**40} bytes; expected 64",
    ),
}


@pytest.mark.parametrize("case", ELSEWHERE)
def test_weights_elsewhere(case: str, plain: Path, worker: Worker) -> None:
    damage, found = ELSEWHERE[case]
    external(plain)
    damage(plain)
    refused(worker, plain, found)


def test_three_gigabytes_beside_the_model(plain: Path, worker: Worker) -> None:
    """Of which it uses as much as before, from below its folder."""
    weights = external(plain)
    os.truncate(weights, 3 * 2**30)
    (plain.parent / "below").mkdir()
    weights.rename(plain.parent / "below" / "w.data")
    changed(plain, lambda model: every_location(model, "below/w.data"))
    outcome = worker(plain)
    assert outcome.kind == "served", outcome
    assert outcome.peak < LARGEST_PEAK
    assert plain.with_name("explained.onnx").stat().st_size < 1e6


# What a graph claims


def with_shape(*shape: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        weight(model).dims[:] = shape

    return change


def with_type(element: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        weight(model).data_type = element

    return change


def with_constant(*shape: int) -> Change:
    """A Constant that claims a shape, and no more bytes than ten."""

    def change(model: onnx.ModelProto) -> None:
        claimed = TensorProto(data_type=TensorProto.INT8, dims=shape, raw_data=b"0123456789")
        model.graph.node.insert(0, helper.make_node("Constant", [], ["k"], "claim", value=claimed))

    return change


def twice(which: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        values = getattr(model.graph, which)
        values.append(values[0])

    return change


def with_node(op_type: str, inputs: list[str], outputs: list[str], *numbers: int) -> Change:
    """A node at the start; `size` is a weight of these numbers."""

    def change(model: onnx.ModelProto) -> None:
        size = numpy_helper.from_array(np.array(numbers, np.int64), "size")
        model.graph.initializer.append(size)
        one = numpy_helper.from_array(np.ones(1, np.float32), "one")
        model.graph.initializer.append(one)
        model.graph.node.insert(0, helper.make_node(op_type, inputs, outputs, "added"))

    return change


def with_cycle(model: onnx.ModelProto) -> None:
    first, last = model.graph.node[0], model.graph.node[-1]
    first.input[0] = last.output[0]


def with_itself(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "Erf")
    node.input[0] = node.output[0]


def sparse(model: onnx.ModelProto) -> None:
    one = numpy_helper.from_array(np.ones(1, np.float32), "some")
    at = numpy_helper.from_array(np.zeros(1, np.int64), "at")
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(one, at, [2**40]))


CLAIMS: dict[str, tuple[Change, str]] = {
    "a large weight": (
        with_shape(2**40),
        f"{WEIGHT}) raw_data size (64 bytes) is too small for the declared shape",
    ),
    "a weight larger than memory has addresses": (
        with_shape(2**62, 2**62, 2**62, 0),
        f"product overflow (tensor name: {WEIGHT})",
    ),
    "a negative size": (with_shape(-16), f"Negative dimension value (tensor name: {WEIGHT})"),
    "a wide type": (with_type(TensorProto.DOUBLE), "(64 bytes) is too small for the declared"),
    "a narrow type": (
        with_type(TensorProto.INT8),
        f"weight {WEIGHT} of shape [16] has 64 bytes; expected 16",
    ),
    "no type": (with_type(99), f"weight {WEIGHT} is of element type 99"),
    "a large Constant": (
        with_constant(2**40),
        f"(10 bytes) is too small for the declared shape and type ({2**40} bytes required)",
    ),
    "a sparse weight": (sparse, "weight some is sparse; expected a dense one"),
    "two inputs of a name": (twice("input"), "'image'"),
    "two outputs of a name": (twice("output"), "two outputs are named 'output'"),
    "two weights of a name": (twice("initializer"), "tokens initializer name is not unique"),
    "a value made twice": (with_node("Identity", ["one"], ["output"]), "output"),
    "a value that is a weight": (with_node("Identity", ["one"], ["size"]), "size"),
    "a cycle": (with_cycle, "sorted, however input 'output' of node"),
    "a node that reads itself": (with_itself, "Erf_output_0' of node"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_what_a_graph_claims(case: str, plain: Path, worker: Worker) -> None:
    change, found = CLAIMS[case]
    changed(plain, change)
    refused(worker, plain, found)


# What never ends


def functions(*bodies: list[str]) -> Change:
    """Functions f0, f1, ... of one input each, with the operators that each calls in turn."""

    def change(model: onnx.ModelProto) -> None:
        for i, calls in enumerate(bodies):
            names = ["x", *(f"v{k}" for k in range(len(calls) - 1)), "y"]
            nodes = [
                helper.make_node(c, [a], [b], domain="own" if c.startswith("f") else "")
                for c, a, b in zip(calls, names, names[1:], strict=False)
            ]
            opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
            made = helper.make_function("own", f"f{i}", ["x"], ["y"], nodes, opsets)
            model.functions.append(made)
        model.opset_import.add(domain="own", version=1)
        node = next(node for node in model.graph.node if node.op_type == "Erf")
        node.op_type, node.domain = "f0", "own"

    return change


ENDLESS: dict[str, tuple[Change, str]] = {
    "a function that calls itself": (functions(["f0"]), "own::f0 -> own::f0"),
    "functions that call each other": (functions(["f1"], ["f0"]), "own::f1 -> own::f0"),
    "functions that unfold to 2^40 nodes": (
        functions(*([f"f{i + 1}"] * 2 for i in range(40)), ["Erf"]),
        "with its functions put in, the graph has ",
    ),
    "functions a thousand deep": (
        functions(*([f"f{i + 1}"] for i in range(1000)), ["Erf"]),
        "Function call chain depth exceeds limit",
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_what_never_ends(case: str, plain: Path, worker: Worker) -> None:
    change, found = ENDLESS[case]
    changed(plain, change)
    refused(worker, plain, found)


def test_graphs_a_thousand_deep(plain: Path, worker: Worker) -> None:
    """They are written by hand, since protobuf does not go so deep either."""

    def field(number: int, content: bytes) -> bytes:
        length, size = len(content), bytearray()
        while length > 127:
            size.append(length & 127 | 128)
            length >>= 7
        return bytes([number << 3 | 2, *size, length]) + content

    graph = b""
    for _ in range(1000):
        attribute = field(1, b"body") + field(6, graph)
        graph = field(1, field(4, b"Loop") + field(5, attribute))
    plain.write_bytes(field(7, graph))
    refused(worker, plain, "not an ONNX model, or a damaged one")


# What it takes to compute a constant


COMPUTED: dict[str, Change] = {
    "ConstantOfShape": with_node("ConstantOfShape", ["size"], ["large"], 2**40),
    "ConstantOfShape that is empty": with_node("ConstantOfShape", ["size"], ["large"], 2**62, 0),
    "Expand": with_node("Expand", ["one", "size"], ["large"], 2**20, 2**20),
    "Tile": with_node("Tile", ["one", "size"], ["large"], 2**40),
    "Pad": with_node("Pad", ["one", "size"], ["large"], 0, 2**40),
    "Pad that takes away what it adds": with_node("Pad", ["one", "size"], ["l"], 2**40, -(2**40)),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_a_constant_is_not_computed_where_it_is_large(
    case: str, plain: Path, worker: Worker
) -> None:
    """Nothing reads it, so the model is served as if it were not there, or the node refused."""
    changed(plain, COMPUTED[case])
    outcome = worker(plain)
    assert outcome.kind == "served" or "node added" in outcome.text, outcome
    assert outcome.typed
    assert outcome.peak < LARGEST_PEAK


def test_constants_are_not_computed_where_they_are_large_together(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = graphs.load(plain)
    monkeypatch.setattr(shapes, "COMPUTED_BYTES", 64)
    with pytest.raises(
        UnsupportedModelError, match=r"constants that are computed up to node .* 64 "
    ):
        graphs.explain(model)


def test_a_picture_of_any_size_that_a_file_claims(plain: Path, worker: Worker) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**40

    changed(plain, change)
    refused(worker, plain, f"input image takes {2**40} pictures of 24x32; expected from 1 to")
