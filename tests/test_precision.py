"""Weights stored as float16: what it saves, what it changes, and what is left in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import double
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from small_vits import small_vit
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain import graphs
from onnxplain.cli import app
from onnxplain.differences import is_relevance, rank_correlation
from onnxplain.export.plain import inference_form, to_onnx
from onnxplain.export.verify import relative_difference
from onnxplain.graphs.precision import halved
from onnxplain.outputs import METHODS

Array = NDArray[Any]

ROUNDING = 5e-3  # of the largest value: a weight's 2**-11, grown by a few layers
FLOAT32 = 1e-5  # between two ways to compute the same in float32
MATRICES = 12  # four in each of two blocks, class token, positions, patches, head
LEVELS = onnxruntime.GraphOptimizationLevel

# These divide by sums that pass through zero, so that rounding the weights can move their maps by
# any amount. On the real model the rank correlation with float32 weights falls to 0.91, 0.86 and
# -0.25 under float16; that of the last two to 0.82 and 0.40 when nothing but the last bit of the
# float32 weights changes (1e-7), that of the first to 0.61 when they change by 1e-4.
ILL_CONDITIONED = ("partial_lrp", "transformer_attribution", "lrp")


@pytest.fixture(scope="module")
def module() -> Any:
    return small_vit(embed_dim=256)


@pytest.fixture(scope="module")
def plain(module: Any) -> ir.Model:
    return to_onnx(module, image_size=(32, 32))


@pytest.fixture(scope="module")
def files(plain: ir.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model with its weights as float32 and as float16."""
    folder = tmp_path_factory.mktemp("precision")
    paths = {precision: folder / f"{precision}.onnx" for precision in ("fp32", "fp16")}
    for precision, path in paths.items():
        report = ox.instrument(plain, path, precision=precision)
        assert report.contract.precision == precision
        assert report.kept_float32 == ()
    return paths


def images(batch: int = 2) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    pixels = generator.normal(size=(batch, 3, 32, 32)).astype(np.float32)
    return {"pixel_values": pixels, "target": np.array([4])}


def run(path: Path, level: Any = LEVELS.ORT_ENABLE_ALL) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, images()), strict=True))


def half_weights(model: onnx.ModelProto) -> list[str]:
    kind = onnx.TensorProto.FLOAT16
    return [tensor.name for tensor in model.graph.initializer if tensor.data_type == kind]


# What a file is


def test_the_file_is_half_as_large(files: dict[str, Path]) -> None:
    sizes = {precision: path.stat().st_size for precision, path in files.items()}
    assert 0.5 < sizes["fp16"] / sizes["fp32"] < 0.6  # nodes and vectors stay as they are


def test_inputs_and_outputs_stay_float32(files: dict[str, Path]) -> None:
    whole, half = (onnx.load(files[precision]) for precision in ("fp32", "fp16"))
    assert whole.graph.input == half.graph.input
    assert whole.graph.output == half.graph.output
    assert half_weights(whole) == []
    assert len(half_weights(half)) == MATRICES


def test_what_is_computed_is_finite_and_close(files: dict[str, Path]) -> None:
    whole, half = (run(files[precision]) for precision in ("fp32", "fp16"))
    differences = {}
    for name, values in half.items():
        assert values.dtype == np.float32
        assert np.isfinite(values).all(), name
        differences[name] = relative_difference(values, whole[name])
    linear = {name: d for name, d in differences.items() if not is_relevance(name)}
    assert max(linear.values()) < ROUNDING
    assert differences["input_relevance_attnlrp"] < ROUNDING
    assert differences["logits"] > FLOAT32  # it is not the float32 file once more


def test_a_runtime_that_does_not_fold_computes_the_same(files: dict[str, Path]) -> None:
    folded, each_time = run(files["fp16"]), run(files["fp16"], LEVELS.ORT_DISABLE_ALL)
    for name, values in each_time.items():
        if not is_relevance(name):
            assert relative_difference(values, folded[name]) < FLOAT32, name


def test_graphs_of_a_bundle_share_the_halves(
    plain: ir.Model, files: dict[str, Path], tmp_path: Path
) -> None:
    whole = ox.instrument(plain, tmp_path / "whole").files
    half = ox.instrument(plain, tmp_path / "half", precision="fp16").files
    assert 0.5 < half["weights.bin"] / whole["weights.bin"] < 0.51
    pixels = images()["pixel_values"]
    single, bundle = (ox.Explainer(p, device="cpu") for p in (files["fp16"], tmp_path / "half"))
    assert bundle.contract.precision == "fp16"
    for method in set(METHODS) - set(ILL_CONDITIONED):
        one, other = (e.explain(pixels, method=method, target=4) for e in (single, bundle))
        assert relative_difference(other.grid, one.grid) < FLOAT32


def test_what_was_stored_as_float16_is_seen_to_be(plain: ir.Model, tmp_path: Path) -> None:
    ox.instrument(plain, tmp_path / "half", precision="fp16")
    for precision in ("fp32", "fp16"):
        again = tmp_path / f"again_{precision}.onnx"
        report = ox.instrument(tmp_path / "half" / "plain.onnx", again, precision=precision)
        assert report.contract.precision == "fp16"
        assert set(report.methods) == set(METHODS)
        assert len(half_weights(onnx.load(again))) == MATRICES


# What is left in float32


@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([1.0, -3e-5, 65504.0], True),
        ([1.0, 65505.0], False),
        ([1.0, -3.4e38], False),
        ([0.0, float("-inf")], True),
        ([6.2e-5, 1e-9], True),
        ([6.0e-5, 1e-9], False),
        ([0.0, 0.0], True),
    ],
)
def test_weights_out_of_range(values: list[float], stored: bool) -> None:
    array = np.resize(np.array(values, np.float32), (16, 16))
    half = halved(array)
    assert (half is not None) == stored
    if half is not None:
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, array, rtol=2**-11, atol=2**-25)


def test_what_is_no_weight_stays() -> None:
    assert halved(np.ones(1000, np.float32)) is None  # a bias or a scale
    assert halved(np.ones((8, 8), np.float32)) is None  # not worth a node
    assert halved(np.ones((16, 16), np.float64)) is None
    assert halved(np.ones((16, 16), np.int8)) is None


def test_a_weight_too_large_stays_and_is_named(plain: ir.Model, tmp_path: Path) -> None:
    model = plain.clone()
    large = next(v for v in model.graph.initializers.values() if list(v.shape or ()) == [256, 768])
    assert large.const_value is not None
    array = large.const_value.numpy().copy()
    array[3, 5] = 1e5
    large.const_value = ir.tensor(array, name=large.name)
    source = tmp_path / "large.onnx"
    ir.save(model, source)
    path = tmp_path / "out.onnx"
    report = ox.instrument(source, path, precision="fp16")
    assert report.kept_float32 == (large.name,)
    assert len(half_weights(onnx.load(path))) == MATRICES - 1
    assert np.isfinite(run(path)["logits"]).all()
    arguments = ["instrument", str(source), "-o", str(path), "--precision", "fp16"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0
    assert f"kept in float32: {large.name}" in result.stderr
    summary = json.loads(result.stdout)
    assert (summary["precision"], summary["kept_float32"]) == ("fp16", [large.name])


def test_a_model_without_float32_weights_is_refused(plain: ir.Model, tmp_path: Path) -> None:
    explained = graphs.explain(double.doubled(plain), methods=["rollout"])
    with pytest.raises(ox.ModelError, match="no weight of the model can be stored as float16"):
        graphs.narrow(explained)


def test_lossless_keeps_what_rounding_would_change(plain: ir.Model) -> None:
    explained = graphs.explain(plain, methods=["rollout"])
    with pytest.raises(ox.ModelError, match="no weight of the model can be stored as float16"):
        graphs.narrow(explained, lossless=True)  # nobody rounded it before
    model = plain.clone()
    weights = [v for v in model.graph.initializers.values() if v.const_value is not None]
    first, *others = (v for v in weights if halved(v.const_value.numpy()) is not None)  # type: ignore[union-attr]
    for value in others:
        assert value.const_value is not None
        rounded = halved(value.const_value.numpy())
        assert rounded is not None
        value.const_value = ir.tensor(rounded.astype(np.float32), name=value.name)
    explained = graphs.narrow(graphs.explain(model, methods=["rollout"]), lossless=True)
    assert explained.kept_float32 == (first.name,)


def test_an_unknown_precision(plain: ir.Model, tmp_path: Path) -> None:
    with pytest.raises(ox.InputError, match="precision 'int8'; expected one of fp32, fp16"):
        ox.instrument(plain, tmp_path / "x.onnx", precision="int8")
    with pytest.raises(ox.InputError, match="precision 'int8'; expected one of fp32, fp16"):
        ox.export("vit_tiny_patch16_224", tmp_path / "x.onnx", precision="int8")
    assert list(tmp_path.iterdir()) == []


# Against torch


def test_export_is_verified_against_the_rounded_module(module: Any, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    report = ox.export(module, tmp_path / "vit.onnx", precision="fp16")
    assert report.verification is not None
    assert report.verification["weights"] == "fp16"
    assert max(report.verification["differences"].values()) < FLOAT32
    assert (report.contract.precision, report.kept_float32) == ("fp16", ())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    with torch.inference_mode(), inference_form(module) as frozen:
        unrounded = frozen(torch.from_numpy(images()["pixel_values"])).numpy()
    difference = relative_difference(run(tmp_path / "vit.onnx")["logits"], unrounded)
    assert FLOAT32 < difference < ROUNDING


def test_inspect_tells_the_precision(files: dict[str, Path]) -> None:
    told = {p: CliRunner().invoke(app, ["inspect", str(path)]).stdout for p, path in files.items()}
    assert "weights stored as float16" in told["fp16"]
    assert "float16" not in told["fp32"]


# The real model


def test_maps_of_the_real_model(shared_real: Path, tmp_path: Path) -> None:
    model: dict[str, Any] = {
        "checkpoint": shared_real / "vit_tiny_tinyimagenet200.safetensors",
        "num_classes": 200,
        "verify": False,
    }
    paths = {precision: tmp_path / f"{precision}.onnx" for precision in ("fp32", "fp16")}
    for precision, path in paths.items():
        ox.export("vit_tiny_patch16_224", path, precision=precision, **model)
    sizes = {precision: path.stat().st_size for precision, path in paths.items()}
    assert sizes["fp16"] < 0.52 * sizes["fp32"]
    whole, half = (ox.Explainer(path, device="cpu", threads=2) for path in paths.values())
    names = ("chelsea.png", "coffee.png", "china.jpg", "chelsea.png")
    pictures = [shared_real / name for name in names]
    target = [*whole.explain(pictures[:3], method="rollout").target.tolist(), 150]
    compared = 0
    for one, other in zip(
        whole.explain_each(pictures, target=target),
        half.explain_each(pictures, target=target),
        strict=True,
    ):
        assert relative_difference(other.logits, one.logits) < ROUNDING
        assert (other.logits.argmax(1) == one.logits.argmax(1)).all()
        assert np.isfinite(other.grid).all()
        if one.method in ILL_CONDITIONED:
            continue
        for ours, theirs, blank in zip(other.grid, one.grid, one.degenerate, strict=True):
            assert blank or rank_correlation(ours, theirs) > 0.99, one.method
            compared += not blank
    assert compared >= 4 * (len(METHODS) - len(ILL_CONDITIONED)) - 1  # one blank map
