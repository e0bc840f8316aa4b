"""What `instrument` reads and writes: bad files, bundles, large weights, all or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hand_written import SIZE, HandWritten, to_file
from onnx import TensorProto, helper
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain import console, graphs
from onnxplain.cli import app
from onnxplain.contract import Contract
from onnxplain.errors import InputError, ModelError, UnsupportedModelError
from onnxplain.graphs.files import writing
from onnxplain.outputs import GRAPH_KINDS, METHODS

NAMES_OF_ANY_GRAPH = (
    *("main_graph", "torch_jit", "torch-jit-export", "tf2onnx", "jax2onnx_model", "jax_model"),
    *("main", "model", "graph", "g", " "),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_file(HandWritten(), tmp_path_factory.mktemp("source") / "source.onnx")


@pytest.fixture
def plain(source: Path, tmp_path: Path) -> Path:
    """A file of its own in an otherwise empty folder."""
    return Path(shutil.copy(source, tmp_path / "plain.onnx"))


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def outputs(path: Path, batch: int = 2) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    images = np.random.default_rng(0).normal(size=(batch, 3, *SIZE)).astype(np.float32)
    feeds: dict[str, np.ndarray] = {"image": images}
    if any(value.name == "target" for value in session.get_overridable_initializers()):
        feeds["target"] = np.arange(batch)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, array in found.items():
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-5 * scale)


# What cannot be read or explained

Change = Callable[[onnx.ModelProto], None]


def with_type(element: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.elem_type = element

    return change


def with_dim(axis: int, size: int | str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        dim = model.graph.input[0].type.tensor_type.shape.dim[axis]
        if isinstance(size, str):
            dim.dim_param = size
        else:
            dim.dim_value = size

    return change


def with_opset(version: int) -> Change:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return change


def with_another_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1]))


def renamed(name: str, to: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            node.input[:] = [to if value == name else value for value in node.input]
            node.output[:] = [to if value == name else value for value in node.output]
        for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
            value.name = to if value.name == name else value.name

    return change


def before_the_end(*nodes: onnx.NodeProto) -> Change:
    """Puts nodes from `inner` to `output` behind what was the output."""

    def change(model: onnx.ModelProto) -> None:
        renamed("output", "inner")(model)
        model.graph.node.extend(nodes)
        model.graph.output[0].name = "output"

    return change


def branches() -> onnx.NodeProto:
    value = helper.make_tensor_value_info("taken", TensorProto.FLOAT, ["n", 5])
    graph = helper.make_graph(
        [helper.make_node("Identity", ["inner"], ["taken"])], "g", [], [value]
    )
    return helper.make_node("If", ["yes"], ["output"], then_branch=graph, else_branch=graph)


def with_a_branch(model: onnx.ModelProto) -> None:
    before_the_end(branches())(model)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "yes"))


def in_float8(model: onnx.ModelProto) -> None:
    with_opset(19)(model)
    before_the_end(
        helper.make_node("Cast", ["inner"], ["eighth"], to=TensorProto.FLOAT8E4M3FN),
        helper.make_node("Cast", ["eighth"], ["output"], to=TensorProto.FLOAT),
    )(model)


def through(op_type: str, **attributes: Any) -> Change:
    return before_the_end(helper.make_node(op_type, ["inner"], ["output"], **attributes))


def dangling(model: onnx.ModelProto) -> None:
    del model.graph.node[3]


UNSUPPORTED: dict[str, tuple[Change, str]] = {
    "a new opset": (with_opset(26), "opset 26; expected 11 to 25 (export the model again"),
    "integers": (with_type(TensorProto.UINT8), "image is UINT8; expected float32"),
    "float8 inside": (in_float8, "eighth is FLOAT8E4M3FN, which onnxruntime has no CPU kernels"),
    "grey pictures": (with_dim(1, 1), "expected [batch, 3, height, width]"),
    "any height": (with_dim(2, "height"), "expected height and width that are both fixed or both"),
    "two inputs": (with_another_input, "inputs: image [n,3,24,32], scale [1]; expected one"),
    "a branch": (with_a_branch, "(If) holds a subgraph; expected a graph without control flow"),
    "one number per image": (
        through("ReduceMax", axes=[1], keepdims=0),
        "output [batch]; expected",
    ),
    "an output named as ours": (renamed("output", "features"), "named features"),
    "an input named as ours": (renamed("image", "target"), "named target"),
    "a weight named as ours": (renamed("conv.bias", "attention.0"), "named attention.0"),
    "an operator without a rule": (
        through("Celu"),
        "Celu lies between the attention and the logits",
    ),
}


def test_an_old_opset(tmp_path: Path) -> None:
    path = to_file(HandWritten(), tmp_path / "plain.onnx", opset=10)
    refused(path, UnsupportedModelError, "opset 10; expected 11 to 25 (export the model again")


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_model_that_cannot_be_explained(case: str, plain: Path) -> None:
    change, found = UNSUPPORTED[case]
    model = onnx.load(plain)
    change(model)
    onnx.save(model, plain)
    refused(plain, UnsupportedModelError, found)


def refused(path: Path, error: type[ModelError], found: str) -> None:
    before = contents(path.parent)
    with pytest.raises(error) as raised:
        ox.instrument(path, path.parent / "explained.onnx")
    assert str(raised.value).startswith(f"{path}: ")
    assert found in str(raised.value)
    assert "\n" not in str(raised.value)
    assert contents(path.parent) == before


def test_an_operator_without_a_rule_leaves_attention(plain: Path) -> None:
    model = onnx.load(plain)
    through("Celu")(model)
    onnx.save(model, plain)
    with pytest.raises(UnsupportedModelError, match="there are the methods raw_attention, rollout"):
        ox.instrument(plain, plain.with_name("explained.onnx"))
    report = ox.instrument(plain, plain.with_name("explained.onnx"), methods=["rollout"])
    assert report.methods == ("rollout",)


def test_a_model_that_is_explained_already(plain: Path) -> None:
    made = plain.with_name("made.onnx")
    ox.instrument(plain, made, methods=["rollout"])
    refused(made, UnsupportedModelError, "expected the model that it was made from")


def test_a_model_is_not_overwritten(plain: Path, tmp_path: Path) -> None:
    before = contents(tmp_path)
    (tmp_path / "link.onnx").symlink_to(plain)
    for place in (plain, tmp_path / "link.onnx"):
        with pytest.raises(InputError, match="is the model itself and would be overwritten"):
            ox.instrument(plain, place)
    (tmp_path / "link.onnx").unlink()
    assert contents(tmp_path) == before


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewired(path: Path) -> None:
    model = onnx.load(path)
    dangling(model)
    onnx.save(model, path)


def test_an_input_that_nothing_makes(plain: Path) -> None:
    rewired(plain)
    refused(plain, ModelError, "not an ONNX model, or a damaged one")


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_weights_beside_the_file_that_are_damaged(
    damage: Callable[[Path], None], plain: Path
) -> None:
    weights = external(plain)
    damage(weights)
    found = f"missing: {weights}" if damage is Path.unlink else "a damaged file or another one"
    refused(plain, ModelError, found)


def external(plain: Path) -> Path:
    """Moves the weights of a file into a second one."""
    onnx.save(
        onnx.load(plain), plain, save_as_external_data=True, location="w.data", size_threshold=64
    )
    return plain.with_name("w.data")


# What is written


def test_weights_beside_the_file_are_taken_in(source: Path, plain: Path, tmp_path: Path) -> None:
    external(plain)
    (tmp_path / "elsewhere").mkdir()
    ox.instrument(plain, tmp_path / "elsewhere" / "explained.onnx")
    ox.instrument(plain, tmp_path / "elsewhere" / "bundle")
    ox.instrument(source, tmp_path / "expected.onnx")
    expected = outputs(tmp_path / "expected.onnx")
    assert_same(outputs(tmp_path / "elsewhere" / "explained.onnx"), expected)
    assert_same(outputs(tmp_path / "elsewhere" / "bundle" / "gradient.onnx"), expected)


def test_an_older_explanation_of_a_large_file_is_replaced(
    source: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    external(plain).rename(tmp_path / "plain.onnx.data")
    model = onnx.load(plain, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = "plain.onnx.data" if entry.key == "location" else entry.value
    onnx.save(model, plain)
    monkeypatch.setattr(writing, "EXTERNAL_ABOVE", 1000)
    for methods in (["rollout"], None):
        ox.instrument(plain, tmp_path / "made.onnx", methods=methods)
    names = {"plain.onnx", "plain.onnx.data", "made.onnx", "made.onnx.data"}
    assert contents(tmp_path).keys() == names
    monkeypatch.undo()
    (tmp_path / "expected").mkdir()
    ox.instrument(source, tmp_path / "expected" / "explained.onnx")
    assert_same(outputs(tmp_path / "made.onnx"), outputs(tmp_path / "expected" / "explained.onnx"))


def test_a_large_file_moves_together_with_its_weights(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ox.instrument(plain, tmp_path / "whole.onnx")
    monkeypatch.setattr(writing, "EXTERNAL_ABOVE", 1000)
    (tmp_path / "a").mkdir()
    report = ox.instrument(plain, tmp_path / "a" / "x.onnx")
    assert report.files.keys() == {"x.onnx", "x.onnx.data"}
    assert contents(tmp_path / "a").keys() == {"x.onnx", "x.onnx.data"}
    (tmp_path / "a").rename(tmp_path / "b")
    onnx.checker.check_model(tmp_path / "b" / "x.onnx", full_check=True)
    assert_same(outputs(tmp_path / "b" / "x.onnx"), outputs(tmp_path / "whole.onnx"))
    assert sum(report.files.values()) < 1.2 * (tmp_path / "whole.onnx").stat().st_size


def test_a_bundle_holds_the_weights_once(plain: Path, tmp_path: Path) -> None:
    report = ox.instrument(plain, tmp_path / "bundle")
    ox.instrument(plain, tmp_path / "whole.onnx")
    files = {"contract.json", "weights.bin", *(f"{kind}.onnx" for kind in GRAPH_KINDS)}
    assert report.files.keys() == files == contents(tmp_path / "bundle").keys()
    contract = Contract.from_json((tmp_path / "bundle" / "contract.json").read_text())
    assert contract == report.contract
    assert contract.graphs == {kind: f"{kind}.onnx" for kind in GRAPH_KINDS}
    assert tuple(contract.methods) == tuple(METHODS)
    expected = outputs(tmp_path / "whole.onnx")
    names = {kind: outputs(tmp_path / "bundle" / f"{kind}.onnx") for kind in GRAPH_KINDS}
    for found in names.values():
        assert_same(found, expected)
    assert set().union(*names.values()) == expected.keys()
    assert names["plain"].keys() == {"output"}
    taps = {"output", "attention.0", "attention.1"}
    assert names["attention"].keys() == taps | {"map.raw_attention", "map.rollout"}
    large = sum(
        array.nbytes
        for tensor in onnx.load(plain).graph.initializer
        if (array := onnx.numpy_helper.to_array(tensor)).nbytes > writing.SHARED_ABOVE
    )
    assert report.files["weights.bin"] == large


def test_a_bundle_of_few_methods_has_few_graphs(plain: Path, tmp_path: Path) -> None:
    report = ox.instrument(plain, tmp_path / "bundle", methods=["rollout"])
    assert report.contract.graphs == {"plain": "plain.onnx", "attention": "attention.onnx"}


@pytest.mark.parametrize("name", ["explained.onnx", "bundle"])
def test_two_runs_give_the_same_bytes(name: str, plain: Path, tmp_path: Path) -> None:
    ox.instrument(plain, tmp_path / name)
    first = contents(tmp_path)
    ox.instrument(plain, tmp_path / name)
    assert contents(tmp_path) == first


@pytest.mark.parametrize(
    ("graph", "file", "name"),
    [
        # What torch, tf2onnx, jax2onnx and others call every graph.
        *((graph, "deit.v2.onnx", "deit.v2") for graph in NAMES_OF_ANY_GRAPH),
        ("vit_tiny", "deit.onnx", "vit_tiny"),
        ("vit_tiny", "model.onnx", "vit_tiny"),
        ("main_graph", "vit-base/model.onnx", "vit-base"),
        ("main_graph", "vit-base/onnx/model.onnx", "vit-base"),
        (
            "main_graph",
            f"models--google--vit-base/snapshots/{'0f' * 20}/onnx/model.onnx",
            "vit-base",
        ),
        ("main_graph", "vit-base/onnx/model_fp16.onnx", "model_fp16"),
    ],
)
def test_a_graph_with_the_name_of_any_is_called_as_its_file(
    graph: str, file: str, name: str, source: Path, tmp_path: Path
) -> None:
    model = onnx.load(source)
    model.graph.name = graph
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    report = ox.instrument(path, tmp_path / "explained.onnx", methods=["rollout"], verify=False)
    assert report.contract.source.name == name
    assert report.contract.source.weights_sha256
    assert onnx.load(tmp_path / "explained.onnx").graph.name == graph


def test_a_model_in_memory_is_called_as_its_graph(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "explained.onnx"
    report = ox.instrument(ir.load(source), path, methods=["rollout"], verify=False)
    assert report.contract.source.name == "main_graph"


def test_the_plain_graph_of_a_bundle_keeps_the_name(plain: Path, tmp_path: Path) -> None:
    model = plain.rename(tmp_path / "vit.onnx")
    ox.instrument(model, tmp_path / "bundle", methods=["rollout"], verify=False)
    again = tmp_path / "again.onnx"
    report = ox.instrument(tmp_path / "bundle" / "plain.onnx", again, verify=False)
    assert report.contract.source.name == "vit"


@pytest.mark.parametrize(("name", "graphs", "kinds"), [("one.onnx", 1, 1), ("bundle", 8, 2)])
def test_it_tells_what_is_going_on(
    name: str, graphs: int, kinds: int, plain: Path, tmp_path: Path
) -> None:
    told: list[tuple[str, int, int]] = []
    ox.instrument(plain, tmp_path / name, step=lambda *what: told.append(what))
    assert told == [
        ("reading the model", 0, 1),
        ("finding the attention", 0, 1),
        *(("making the graphs", done, graphs) for done in range(graphs)),
        # For each graph that has gradients, its outputs and its gradients.
        *(("verifying", done, 2 * kinds) for done in range(2 * kinds + 1)),
        ("writing", 0, 1),
    ]


def test_a_log_says_what_is_going_on(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of long work: here every stage is told, none too soon after another."""
    monkeypatch.setattr(console, "_LEAST_QUIET", 0)
    arguments = ["instrument", str(plain), "-o", str(tmp_path / "explained.onnx"), "--json"]
    ran = CliRunner().invoke(app, arguments)
    assert json.loads(ran.stdout)["path"] == str(tmp_path / "explained.onnx")
    told = [line.partition("onnxplain: ")[2] for line in ran.stderr.splitlines()]
    stages = ["reading the model", "finding the attention", "making the graphs"]
    assert told[:3] == stages
    assert told[3] == "verifying: 0 of 2"
    assert told[-2] == "writing"
    assert told[-1].startswith("assumed mean")


def test_another_file_is_replaced(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "explained.onnx").write_text("something older")
    ox.instrument(plain, tmp_path / "explained.onnx", methods=["rollout"])
    assert outputs(tmp_path / "explained.onnx").keys() >= {"attention.0"}
    assert contents(tmp_path).keys() == {"plain.onnx", "explained.onnx"}


def test_only_a_folder_with_a_bundle_alone_is_replaced(plain: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    ox.instrument(plain, bundle)
    ox.instrument(plain, bundle, methods=["rollout"])
    assert contents(bundle).keys() == {
        "contract.json",
        "weights.bin",
        "plain.onnx",
        "attention.onnx",
    }
    (bundle / "notes.txt").write_text("mine")
    kept = contents(tmp_path)
    with pytest.raises(InputError, match=r"holds notes\.txt, so it is not a bundle alone"):
        ox.instrument(plain, bundle)
    with pytest.raises(InputError, match="a folder; expected a file name"):
        graphs.save(graphs.explain(graphs.load(plain)), bundle)
    with pytest.raises(InputError, match="a file; expected a folder"):
        ox.instrument(plain, bundle / "notes.txt")
    with pytest.raises(InputError, match="nowhere: no such folder; make it first"):
        ox.instrument(plain, tmp_path / "nowhere" / "explained.onnx")
    assert contents(tmp_path) == kept


@pytest.mark.parametrize("name", ["explained.onnx", "bundle"])
def test_a_folder_without_permission_is_refused_before_the_work(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def permitted(path: Path, mode: int) -> bool:  # root may write anywhere
        return Path(path) != tmp_path or not mode & os.W_OK

    monkeypatch.setattr("os.access", permitted)
    monkeypatch.setattr("onnxplain.graphs.load", pytest.fail)
    with pytest.raises(InputError, match="a folder without permission to write; choose another"):
        ox.instrument(plain, tmp_path / name)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize(("kind", "steps"), [("file", 3), ("pair", 5), ("bundle", 10)])
def test_a_failure_leaves_what_was_there(
    error: BaseException,
    kind: str,
    steps: int,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step of writing, checking and renaming fails once; then nothing does."""
    path = tmp_path / ("bundle" if kind == "bundle" else "explained.onnx")
    if kind == "pair":
        monkeypatch.setattr(writing, "EXTERNAL_ABOVE", 1000)
    ox.instrument(plain, path, methods=["rollout"])
    before = contents(tmp_path)
    explained = graphs.explain(graphs.load(plain), bundle=kind == "bundle")
    failures = done = 0

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == failures + 1:
                raise error
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(ir.serde, "serialize_model", failing(ir.serde.serialize_model))
    monkeypatch.setattr(onnx.checker, "check_model", failing(onnx.checker.check_model))
    monkeypatch.setattr(os, "replace", failing(os.replace))
    while contents(tmp_path) == before:
        done = 0
        try:
            graphs.save(explained, path)
        except (ModelError, KeyboardInterrupt) as raised:
            assert isinstance(raised, KeyboardInterrupt) == isinstance(error, KeyboardInterrupt)
            failures += 1
            assert contents(tmp_path) == before
    assert failures >= steps
    assert outputs(path / "gradient.onnx" if kind == "bundle" else path)["features"].any()


def test_no_torch_is_needed(plain: Path, tmp_path: Path) -> None:
    program = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("onnxscript", "timm", "torch", "torchvision"):
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Block())
import onnxplain

onnxplain.instrument({str(plain)!r}, {str(tmp_path / "explained.onnx")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    ox.instrument(plain, tmp_path / "here.onnx")
    assert (tmp_path / "explained.onnx").read_bytes() == (tmp_path / "here.onnx").read_bytes()


def test_names_that_are_not_text(plain: Path, tmp_path: Path) -> None:
    source, out = (tmp_path / os.fsdecode(name) for name in (b"in\xff.onnx", b"out\xff.onnx"))
    shutil.copy(plain, source)
    with pytest.raises(ModelError, match="its name is not UTF-8"):
        ox.instrument(source, tmp_path / "explained.onnx")
    with pytest.raises(InputError, match="a name that is not UTF-8"):
        ox.instrument(plain, out)
    assert set(tmp_path.iterdir()) == {plain, source}
