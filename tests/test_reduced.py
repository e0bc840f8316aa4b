"""Explained files cut down to some of their methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from conftest import assert_same
from onnx import TensorProto, helper

import onnxplain as ox
from onnxplain.contract import KEY
from onnxplain.errors import ContractError, InputError, ModelError
from onnxplain.graphs.files import writing
from onnxplain.graphs.reduced import reduce_to
from onnxplain.outputs import METHODS
from onnxplain.runtime.model import Model
from onnxplain.runtime.targets import question

GARMENTS = Path(ox.__file__).parent / "demo" / "garments.onnx"
# Both graphs compute the same; onnxruntime may fuse their nodes differently.
ROUNDING = 2e-6


def images(size: int, count: int = 2) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(count, 3, size, size)).astype(np.float32)


def opened(path: Path) -> ox.Explainer:
    return ox.Explainer(path, device="cpu", threads=1)


def assert_nothing_idle(path: Path) -> None:
    """Every node, initializer and optional input of the graph leads to an output."""
    graph = onnx.load(path).graph
    used = {output.name for output in graph.output}
    for node in reversed(graph.node):
        assert used & set(node.output), node.name
        used.update(node.input)
    assert {tensor.name for tensor in graph.initializer} <= used
    assert {value.name for value in graph.input} <= used


def assert_logits_alone(path: Path, whole: Path, x: np.ndarray) -> None:
    assert_nothing_idle(path)
    reduced = opened(path)
    assert reduced.methods == ()
    assert (reduced.contract.target, reduced.contract.class_weights) == (None, None)
    model = Model(path, device="cpu", threads=1)
    values = model.run(list(x), question(None, None, len(x), model.contract), ())
    assert list(values) == ["logits"]
    expected = opened(whole).taps(x, kinds=()).logits
    np.testing.assert_allclose(values["logits"], expected, atol=ROUNDING)


def test_logits_alone(tmp_path: Path) -> None:
    path = tmp_path / "logits.onnx"
    reduce_to(GARMENTS, path, ())
    assert_logits_alone(path, GARMENTS, images(64))
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == ["pixel_values"]
    assert [value.name for value in graph.output] == ["logits"]
    assert len(graph.node) < 0.1 * len(onnx.load(GARMENTS).graph.node)
    with pytest.raises(InputError, match="serves no method"):
        opened(path).explain(images(64))


@pytest.mark.parametrize("method", METHODS)
def test_one_method(method: str, tmp_path: Path) -> None:
    path = tmp_path / "one.onnx"
    reduce_to(GARMENTS, path, [method])
    assert_nothing_idle(path)
    reduced = opened(path)
    assert reduced.methods == (method,)
    assert (reduced.contract.target is None) == (method in ("raw_attention", "rollout"))
    one = reduced.explain(images(64), method=method, target=3)
    # What the relevance rules divide by passes through 0, so they magnify the rounding.
    relevance = any("relevance" in output for output in METHODS[method].outputs(4))
    largest = np.abs(one.grid).max() * (50 if relevance else 1)
    other = opened(GARMENTS).explain(images(64), method=method, target=3)
    np.testing.assert_allclose(one.grid, other.grid, rtol=0, atol=ROUNDING * largest)
    np.testing.assert_allclose(one.logits, other.logits, atol=ROUNDING)


def test_several_methods_and_another_name(tmp_path: Path) -> None:
    path = tmp_path / "two.onnx"
    reduce_to(GARMENTS, path, ["relevance", "gradcam"])
    assert opened(path).methods == ("gradcam", "transformer_attribution")
    names = {value.name for value in onnx.load(path).graph.output}
    assert {"features", "map.gradcam", "attention_relevance.0"} <= names
    assert not {"attention.0", "map.rollout", "input_relevance"} & names


@pytest.mark.parametrize(
    "options",
    [
        {"outputs": "maps"},
        {"targets": 2},
        {"seed": "weights"},
        {"seed": "weights", "targets": 2, "heatmaps": True, "require_target": True},
        {"precision": "fp16"},
    ],
    ids=str,
)
def test_files_of_every_kind(options: dict[str, Any], small: Any, tmp_path: Path) -> None:
    whole, path, bare = (tmp_path / f"{name}.onnx" for name in ("whole", "one", "bare"))
    ox.instrument(small, whole, methods=["rollout", "generic_attention", "gradcam"], **options)
    x = images(32)
    reduce_to(whole, bare, ())
    assert_logits_alone(bare, whole, x)
    reduce_to(whole, path, ["generic_attention"])
    assert_nothing_idle(path)
    assert opened(path).methods == ("generic_attention",)
    assert_same(
        opened(path).explain(x, method="generic_attention", target=4),
        opened(whole).explain(x, method="generic_attention", target=4),
        atol=1e-5,
    )


def test_a_picture_as_it_is(small: Any, tmp_path: Path) -> None:
    whole, path, bare = (tmp_path / f"{name}.onnx" for name in ("whole", "one", "bare"))
    ox.instrument(small, whole, methods=["rollout", "gradcam"], embed_preprocessing=True)
    picture = np.random.default_rng(1).integers(0, 256, (50, 41, 3), dtype=np.uint8)
    reduce_to(whole, bare, ())
    expected = opened(whole).taps(picture).logits
    np.testing.assert_allclose(opened(bare).taps(picture).logits, expected, atol=ROUNDING)
    reduce_to(whole, path, ["gradcam"])
    assert_same(
        opened(path).explain(picture, method="gradcam"),
        opened(whole).explain(picture, method="gradcam"),
        atol=1e-5,
    )


@pytest.fixture
def bundle(small: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    ox.instrument(small, folder)
    return folder


def test_of_a_bundle_the_graph_that_serves(bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.onnx"
    reduce_to(bundle, path, ())
    assert_logits_alone(path, bundle, images(32))
    reduce_to(bundle, path, ["generic_attention", "rollout"])
    assert_nothing_idle(path)
    assert opened(path).methods == ("rollout", "generic_attention")
    assert opened(path).contract.graphs is None
    for method in opened(path).methods:
        one, other = (opened(p).explain(images(32), method=method) for p in (path, bundle))
        assert_same(one, other, atol=1e-5)


def test_of_a_bundle_the_graphs_that_serve_together(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    reduce_to(bundle, folder, ["lrp", "generic_attention"])
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(files) == {"contract.json", "weights.bin", "gradient.onnx", "lrp.onnx"}
    assert files["weights.bin"] <= (bundle / "weights.bin").stat().st_size
    assert_nothing_idle(folder / "gradient.onnx")
    assert opened(folder).methods == ("generic_attention", "lrp")
    for method, tolerance in (("generic_attention", ROUNDING), ("lrp", 50 * ROUNDING)):
        one, other = (opened(p).explain(images(32), method=method) for p in (folder, bundle))
        np.testing.assert_allclose(
            one.grid, other.grid, atol=tolerance * float(np.abs(other.grid).max())
        )


def test_large_weights_go_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "EXTERNAL_ABOVE", 1_000_000)
    path = tmp_path / "logits.onnx"
    reduce_to(GARMENTS, path, ())
    assert {p.name for p in tmp_path.iterdir()} == {"logits.onnx", "logits.onnx.data"}
    assert path.stat().st_size < 100_000
    expected = opened(GARMENTS).taps(images(64), kinds=()).logits
    np.testing.assert_allclose(opened(path).taps(images(64)).logits, expected, atol=ROUNDING)


def test_what_cannot_be_reduced(tmp_path: Path, small: Any, bundle: Path) -> None:
    plain, path = tmp_path / "plain.onnx", tmp_path / "x.onnx"
    ir.save(small, plain)
    with pytest.raises(ContractError, match="not made by onnxplain; run: onnxplain instrument"):
        reduce_to(plain, path, ())
    with pytest.raises(ModelError, match="no such file"):
        reduce_to(tmp_path / "none.onnx", path, ())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ContractError, match=r"without contract\.json"):
        reduce_to(tmp_path / "empty", path, ())
    with pytest.raises(InputError, match="no method 'saliency'; it has raw_attention, rollout"):
        reduce_to(GARMENTS, path, ["rollout", "saliency"])
    with pytest.raises(InputError, match="expected a list of names"):
        reduce_to(GARMENTS, path, "rollout")
    with pytest.raises(InputError, match="is the model itself"):
        reduce_to(bundle, bundle, ())
    with pytest.raises(InputError, match="no such folder"):
        reduce_to(GARMENTS, tmp_path / "none" / "x.onnx", ())
    with pytest.raises(InputError, match="a folder; expected a file name"):
        reduce_to(GARMENTS, tmp_path / "empty", ())
    damaged = tmp_path / "bundle" / "contract.json"
    damaged.write_text(damaged.read_text().replace('"lrp": "lrp.onnx"', '"plain": "plain.onnx"'))
    with pytest.raises(ContractError, match="names no graph for lrp"):
        reduce_to(bundle, path, ["lrp"])
    damaged.write_bytes(b"\xff")
    with pytest.raises(ContractError, match="cannot be read"):
        reduce_to(bundle, path, ())
    assert not path.exists()


def test_an_output_that_no_method_reads_goes_too(tmp_path: Path) -> None:
    model = onnx.load(GARMENTS)
    model.graph.node.append(helper.make_node("Exp", ["logits"], ["more"]))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, [None, 10]))
    whole, path = tmp_path / "whole.onnx", tmp_path / "logits.onnx"
    onnx.save(model, whole)
    reduce_to(whole, path, ())
    assert [value.name for value in onnx.load(path).graph.output] == ["logits"]
    assert KEY in {entry.key for entry in onnx.load(path).metadata_props}
