"""Opening explained files and bundles, and refusing what cannot be used."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import ToyFile, assert_same, pixels, toy_contract, toy_model
from onnx import TensorProto, helper
from onnx.external_data_helper import convert_model_to_external_data

import onnxplain as ox
from onnxplain.contract import KEY
from onnxplain.outputs import METHODS


def test_a_bundle_is_the_same_model(toy_bundle: Path, explainer: ox.Explainer) -> None:
    bundle = ox.Explainer(toy_bundle, device="cpu")
    assert bundle.methods == explainer.methods
    assert bundle.device == "cpu"
    images = pixels(2)
    for method in METHODS:
        assert_same(
            bundle.explain(images, method=method, target=1),
            explainer.explain(images, method=method, target=1),
        )
    ours, theirs = bundle.taps(images, target=0), explainer.taps(images, target=0)
    np.testing.assert_allclose(ours.attention_gradient, theirs.attention_gradient, rtol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "graph"),
    [
        ("raw_attention", "attention"),
        ("rollout", "attention"),
        ("gradcam", "gradcam"),
        ("attention_gradcam", "gradcam"),
        ("generic_attention", "gradient"),
        ("gradient_rollout", "gradient"),
        (None, "plain"),
    ],
)
def test_a_bundle_opens_only_the_cheapest_graph(
    method: str | None, graph: str, toy_bundle: Path
) -> None:
    for path in toy_bundle.glob("*.onnx"):
        if path.stem != graph:
            path.write_bytes(b"not to be opened")
    bundle = ox.Explainer(toy_bundle, device="cpu")
    if method is None:
        bundle.taps(pixels(1), kinds=())
    else:
        bundle.explain(pixels(1), method=method)


def test_damaged_bundles(toy_bundle: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(toy_bundle, tmp_path / name))

    folder = copy("bare")
    (folder / "contract.json").unlink()
    with pytest.raises(ox.ContractError, match=r"bare: a folder without contract.json"):
        ox.Explainer(folder)
    folder = copy("torn")
    (folder / "contract.json").write_text("{")
    with pytest.raises(ox.ContractError, match="not valid JSON"):
        ox.Explainer(folder)
    folder = copy("graphless")
    (folder / "contract.json").write_text(toy_contract().to_json())
    with pytest.raises(ox.ContractError, match="names no graphs"):
        ox.Explainer(folder)
    folder = copy("hole")
    (folder / "gradcam.onnx").unlink()
    with pytest.raises(ox.ModelError, match=r"gradcam.onnx: no such file"):
        ox.Explainer(folder)
    folder = copy("future")
    graphs = {"plain": "plain.onnx", "saliency": "saliency.onnx"}
    (folder / "contract.json").write_text(replace(toy_contract(), graphs=graphs).to_json())
    with pytest.raises(ox.ContractError, match="'saliency' is unknown; upgrade"):
        ox.Explainer(folder)
    folder = copy("swapped")
    shutil.copy(folder / "plain.onnx", folder / "attention.onnx")
    explainer = ox.Explainer(folder)
    with pytest.raises(ox.ContractError, match=r"attention.0, attention.1, which the graph"):
        explainer.explain(pixels(1), method="rollout")


# Files that cannot be used


def broken(kind: str, path: Path) -> None:
    model = toy_model(toy_contract())
    data = model.SerializeToString()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("this is not a model\n" * 20)
    elif kind == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif kind == "random":
        path.write_bytes(np.random.default_rng(0).bytes(5000))
    elif kind == "plain":
        del model.metadata_props[:]
        onnx.save(model, path)
    elif kind == "newer":
        helper.set_model_props(model, {KEY: json.dumps({"format": 99})})
        onnx.save(model, path)
    elif kind == "damaged":
        helper.set_model_props(model, {KEY: json.dumps({"format": 1})})
        onnx.save(model, path)
    elif kind == "outputs":
        model = toy_model(toy_contract(methods=["rollout"]))
        helper.set_model_props(model, {KEY: toy_contract().to_json()})
        onnx.save(model, path)
    elif kind == "input":
        spec = replace(toy_contract().input, name="image")
        helper.set_model_props(model, {KEY: replace(toy_contract(), input=spec).to_json()})
        onnx.save(model, path)
    elif kind in ("layout", "channels"):
        layout = {"layout": "NHCW", "channels": "NHWC"}[kind]
        spec = replace(toy_contract().input, layout=layout)
        helper.set_model_props(model, {KEY: replace(toy_contract(), input=spec).to_json()})
        onnx.save(model, path)
    elif kind == "weights":
        convert_model_to_external_data(model, location="toy.data", size_threshold=64)
        onnx.save(model, path)
        path.with_name("toy.data").unlink()
    elif kind == "short weights":
        convert_model_to_external_data(model, location="toy.data", size_threshold=64)
        onnx.save(model, path)
        path.with_name("toy.data").write_bytes(b"short")
    elif kind == "operator":
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [helper.make_node("Unheard", ["x"], ["y"])],
            "g",
            [value("x", TensorProto.FLOAT, [1])],
            [value("y", TensorProto.FLOAT, [1])],
        )
        onnx.save(helper.make_model(graph, ir_version=8), path)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("missing", ox.ModelError, "no such file or folder"),
        ("empty", ox.ModelError, "the file is empty"),
        ("text", ox.ModelError, "not an ONNX file, or a truncated one"),
        ("truncated", ox.ModelError, "not an ONNX file, or a truncated one"),
        ("random", ox.ModelError, "not an ONNX file, or a truncated one"),
        ("plain", ox.ContractError, "run: onnxplain instrument .*toy.onnx -o explained.onnx"),
        ("newer", ox.ContractError, "contract format 99, .* upgrade onnxplain"),
        ("damaged", ox.ContractError, "damaged"),
        ("outputs", ox.ContractError, "attention_gradient.0, .* which the graph does not have"),
        ("input", ox.ContractError, "names the input 'image', the graph has pixel_values"),
        ("layout", ox.ContractError, "image layout 'NHCW', this version .* NCHW, NHWC, HWC"),
        ("channels", ox.ContractError, "'pixel_values' has shape .* says ..any', 'any', 'any', 3"),
        ("weights", ox.ModelError, "expected the file toy.data beside it"),
        ("short weights", ox.ModelError, "truncated or of another model"),
        ("operator", ox.ModelError, "cannot load it .*Unheard"),
    ],
)
def test_unusable_files(
    kind: str,
    error: type[Exception],
    words: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "toy.onnx"
    broken(kind, path)
    with pytest.raises(error, match=words) as caught:
        ox.Explainer(path)
    assert "toy.onnx" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_model_that_fails_while_running_is_one_clean_error(
    toy_file: ToyFile, capfd: pytest.CaptureFixture[str]
) -> None:
    path = toy_file()
    model = onnx.load(path)
    wrong = replace(toy_contract().input, size=(16, 16))
    helper.set_model_props(model, {KEY: replace(toy_contract(), input=wrong).to_json()})
    onnx.save(model, path)
    explainer = ox.Explainer(path, device="cpu")
    with pytest.raises(ox.ModelError, match=r"toy.onnx: onnxruntime failed to run it") as caught:
        explainer.explain(np.zeros((1, 3, 16, 16), np.float32))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_contract_that_offers_what_it_cannot_read(toy_file: ToyFile) -> None:
    explainer = ox.Explainer(toy_file(readout=None), device="cpu")
    assert explainer.explain(pixels(1), method="gradcam").grid.shape == (1, 2, 2)
    with pytest.raises(ox.ContractError, match="'rollout' without a readout"):
        explainer.explain(pixels(1), method="rollout")
    explainer = ox.Explainer(toy_file(features=None), device="cpu")
    with pytest.raises(ox.ContractError, match="'gradcam' without the outputs"):
        explainer.explain(pixels(1), method="gradcam")


@pytest.mark.parametrize("threads", [0, -1, "two", 1.5])
def test_wrong_thread_counts(threads: Any, toy_file: ToyFile) -> None:
    with pytest.raises(ox.InputError, match="threads"):
        ox.Explainer(toy_file(), threads=threads)
