"""Files against the plain model that they were made from: outputs, and finite differences."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import timm
import torch
from hand_written import HandWritten, to_file
from onnx import helper, numpy_helper
from onnxruntime.quantization import QuantFormat
from small_vits import small_vit
from source_framework import lively, torchscript, with_dynamo
from test_quantised_files import quantised
from torch import Tensor, nn
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.errors import VerificationError
from onnxplain.export.plain import to_onnx
from onnxplain.graphs import assemble
from onnxplain.graphs.backward.gradient import GRADIENT
from onnxplain.graphs.backward.walk import Cotangent, Step
from onnxplain.graphs.builder import Builder
from onnxplain.graphs.builder import Tensor as Made
from onnxplain.graphs.proof.double import in_double
from onnxplain.graphs.proof.slopes import opened
from onnxplain.graphs.values.uses import dependents
from onnxplain.outputs import GRAPH_KINDS

# Of float32 gradients, against finite differences in float64 that are themselves within 1e-8.
SINGLE = 2e-6
LAYERS = ["attention_gradient.0", "attention_gradient.1", "features_gradient"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.onnx"
    ir.save(to_onnx(small_vit(), image_size=(32, 32)), path)
    return path


@pytest.fixture(scope="module")
def lively_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of attentions that are sharp, so that much of the gradient passes their Softmax."""
    path = tmp_path_factory.mktemp("lively") / "plain.onnx"
    ir.save(to_onnx(lively(small_vit()), image_size=(32, 32)), path)
    return path


def by_name(report: ox.Verification) -> dict[str, Any]:
    return {one.output: one for one in report.differences}


def made(plain: Path, **given: Any) -> ox.Verification:
    """What `verify` finds of a file that `instrument` has verified itself."""
    path = plain.with_name("explained.onnx")
    report = ox.instrument(plain, path, **given)
    assert report.verification is not None
    stored = report.verification["differences"]
    assert stored == ox.Explainer(path).contract.verification["differences"]  # type: ignore[index]
    assert stored["gradients"] < SINGLE
    assert report.verification["gradients"] == "finite differences in float64"
    found = ox.verify(path, against=plain)
    assert found.within
    return found


class TestKinds:
    @pytest.mark.parametrize(
        "given",
        [
            {"outputs": "taps"},
            {"score": "probability", "outputs": "taps"},
            {"seed": "weights", "outputs": "taps"},
            {"require_target": True, "outputs": "taps"},
            {"methods": ["gradcam", "generic_attention"]},
        ],
        ids=str,
    )
    def test_of_a_transformer(self, given: dict[str, Any], plain: Path) -> None:
        found = by_name(made(plain, **given))
        assert list(found) == ["logits", *LAYERS]
        assert found["logits"].relative < 1e-6
        assert found["logits"].bounds == {"relative": 1e-6}
        for name in LAYERS:
            assert found[name].bounds == {"relative_l2": 1e-4}
            assert 0 < found[name].relative < SINGLE
            assert found[name].largest > 0

    def test_of_a_bundle(self, plain: Path) -> None:
        folder = plain.with_name("bundle")
        report = ox.instrument(plain, folder)
        assert report.verification is not None
        assert report.verification["differences"]["gradients"] < SINGLE
        told: list[tuple[str, int, int]] = []
        found = ox.verify(folder, against=plain, step=lambda *what: told.append(what))
        assert found.within
        assert set(by_name(found)) == {"logits", *LAYERS}
        # Two pictures, and the gradients that a graph has.
        totals = dict.fromkeys(GRAPH_KINDS, 2) | {"gradcam": 4, "gradient": 2 + len(LAYERS)}
        assert told == [
            ("reading the models", 0, 1),
            *(
                (f"comparing {kind}.onnx", done, total)
                for kind, total in totals.items()
                for done in range(total + 1)
            ),
        ]

    @pytest.mark.parametrize("given", [{"outputs": "maps"}, {"targets": 3}], ids=str)
    def test_of_maps_alone(self, given: dict[str, Any], plain: Path) -> None:
        """Made of gradients that were verified, and are gone."""
        path = plain.with_name("maps.onnx")
        report = ox.instrument(plain, path, methods=["gradcam", "rollout"], **given)
        assert report.verification is not None
        assert report.verification["differences"]["gradients"] < SINGLE
        found = ox.verify(path, against=plain)
        assert list(by_name(found)) == ["logits"]
        assert found.notes == ("gradients are not compared: the file has none",)

    def test_with_preprocessing_in_the_graph(self, plain: Path) -> None:
        found = made(plain, embed_preprocessing=True, methods=["gradcam", "attention_gradcam"])
        assert "a grey level may differ" in found.notes[0]

    def test_with_weights_of_float16(self, plain: Path) -> None:
        found = by_name(made(plain, precision="fp16", outputs="taps"))
        assert 1e-6 < found["logits"].relative < 2**-8
        assert found["logits"].bounds == {"relative": 2**-8}

    def test_of_float16(self, tmp_path: Path) -> None:
        plain = to_file(HandWritten().half(), tmp_path / "plain.onnx")
        report = ox.instrument(plain, tmp_path / "explained.onnx", outputs="taps")
        assert report.verification is not None
        assert report.verification["differences"]["gradients"] < 2**-8
        assert ox.verify(tmp_path / "explained.onnx", against=plain).within

    def test_of_attention_pooling_and_a_fixed_batch(self, tmp_path: Path) -> None:
        module = lively(small_vit(global_pool="map", class_token=False))
        path = tmp_path / "plain.onnx"
        torch.onnx.export(
            module, (torch.zeros(3, 3, 32, 32),), str(path), dynamo=False, input_names=["image"]
        )
        assert set(by_name(made(path, outputs="taps"))) > set(LAYERS)

    def test_of_relu(self, tmp_path: Path) -> None:
        module = lively(small_vit(act_layer=nn.ReLU))
        made(torchscript(module, tmp_path / "plain.onnx", 17, (32, 32)), outputs="taps")

    @pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "convnext_atto"])
    def test_of_a_convolutional_network(self, name: str, tmp_path: Path) -> None:
        torch.manual_seed(0)
        module = timm.create_model(name, num_classes=5).eval()
        path = with_dynamo(module, tmp_path / "plain.onnx", 20, (64, 64))
        assert set(by_name(made(path))) == {"scores", "features_gradient"}

    def test_of_several_outputs(self, tmp_path: Path) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = lively(small_vit())

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                tokens = self.model.forward_features(x)
                return self.model.forward_head(tokens), tokens

        path = torchscript(Two().eval(), tmp_path / "p.onnx", 17, (32, 32), ("scores", "tokens"))
        found = by_name(made(path, contract={"logits": "scores"}, outputs="taps"))
        assert {"scores", "tokens", *LAYERS} == set(found)


class TestWrong:
    """Gradients that are off by 1 %."""

    def refused(self, plain: Path, folder: Path) -> str:
        for path in (folder / "explained.onnx", folder / "bundle"):
            with pytest.raises(VerificationError) as error:
                ox.instrument(plain, path)
        assert not list(folder.iterdir())
        return str(error.value)

    @pytest.mark.parametrize("operator", ["Gelu", "LayerNormalization", "MatMul", "Softmax"])
    def test_by_a_rule(
        self, operator: str, lively_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rule = GRADIENT[operator]

        def wrong(step: Step, grads: Sequence[Made | None]) -> list[Any]:
            return [
                result
                if result is None
                else replace(result, tensor=step.b.mul(result.tensor, 1.01))
                if isinstance(result, Cotangent)
                else step.b.mul(result, 1.01)
                for result in rule(step, grads)
            ]

        monkeypatch.setitem(GRADIENT, operator, wrong)
        message = self.refused(lively_file, tmp_path)
        assert "gradient" in message
        assert "of its norm, allowed is 0.0001; nothing was written" in message
        assert "\n" not in message

    @pytest.mark.parametrize("output", LAYERS)
    @pytest.mark.parametrize("part", ["all", "one row"])
    def test_of_one_layer(
        self,
        output: str,
        part: str,
        plain: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        walked = assemble._walked

        def wrong(b: Builder, *rest: Any) -> dict[str, Made]:
            found = walked(b, *rest)
            if output in found:
                size = cast(int, found[output].shape[-2])
                factor = np.full((size, 1), 1.01 if part == "all" else 1.0, np.float32)
                factor[0] = 1.01 if part == "all" else 0.9  # the class token's, the largest
                found[output] = b.mul(found[output], b.constant(factor))
            return found

        monkeypatch.setattr(assemble, "_walked", wrong)
        assert f"plain.onnx: {output} differs from the finite" in self.refused(plain, tmp_path)
        path = tmp_path / "unverified.onnx"
        report = ox.instrument(plain, path, verify=False, outputs="taps")
        assert report.verification is None
        found = ox.verify(path, against=plain)
        assert [one.output for one in found.differences if not one.within] == [output]

    def test_of_the_model(self, plain: Path, tmp_path: Path) -> None:
        """A file that computes something else than the model that it is compared with."""
        ox.instrument(plain, tmp_path / "explained.onnx", outputs="taps")
        model = onnx.load(plain)
        weight = max(model.graph.initializer, key=lambda w: len(w.raw_data))
        array = numpy_helper.to_array(weight) * np.float32(1.0001)
        weight.CopyFrom(numpy_helper.from_array(array, weight.name))
        onnx.save(model, tmp_path / "other.onnx")
        found = ox.verify(tmp_path / "explained.onnx", against=tmp_path / "other.onnx")
        assert [one.output for one in found.differences if not one.within] == ["logits"]
        wider = ox.verify(
            tmp_path / "explained.onnx", against=tmp_path / "other.onnx", tolerance=0.1
        )
        assert wider.within


def test_rounding_to_8_bits_is_not_compared(tmp_path: Path) -> None:
    whole = to_file(HandWritten(), tmp_path / "whole.onnx")
    plain = quantised(whole, tmp_path / "plain.onnx", QuantFormat.QDQ)
    report = ox.instrument(plain, tmp_path / "explained.onnx", outputs="taps")
    assert report.verification is not None
    assert report.verification["differences"] == {"output": 0}
    assert "no derivative" in report.verification["gradients"]
    found = ox.verify(tmp_path / "explained.onnx", against=plain)
    assert found.within
    assert "no derivative" in found.notes[-1]


def test_what_is_not_finite_is_refused(plain: Path, tmp_path: Path) -> None:
    model = onnx.load(plain)
    weight = max(model.graph.initializer, key=lambda w: len(w.raw_data))
    array = numpy_helper.to_array(weight) * np.float32(np.nan)
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(model, tmp_path / "nan.onnx")
    with pytest.raises(VerificationError, match="is not finite for a random image"):
        ox.instrument(tmp_path / "nan.onnx", tmp_path / "explained.onnx")
    assert not (tmp_path / "explained.onnx").exists()


def test_of_any_size(tmp_path: Path) -> None:
    module = lively(small_vit(dynamic_img_size=True))
    plain = tmp_path / "plain.onnx"
    ir.save(to_onnx(module, image_size=(32, 32), multiple=(8, 8)), plain)
    size = {"input": {"size": [32, 32]}}
    report = ox.instrument(plain, tmp_path / "explained.onnx", contract=size, outputs="taps")
    assert report.verification is not None
    assert report.verification["differences"]["gradients"] < SINGLE
    for height, width in ((32, 32), (40, 24)):
        found = ox.verify(tmp_path / "explained.onnx", against=plain, image_size=(height, width))
        assert found.within
        assert set(by_name(found)) >= set(LAYERS)


class TestCommands:
    def test_instrument_and_verify(self, plain: Path, tmp_path: Path) -> None:
        path = tmp_path / "explained.onnx"
        done = CliRunner().invoke(app, ["instrument", str(plain), "-o", str(path)])
        (line,) = (x for x in done.stdout.splitlines() if x.startswith("verified"))
        assert line.startswith("verified: against the source file in onnxruntime ")
        assert line.endswith("; gradients: finite differences in float64")
        done = CliRunner().invoke(app, ["verify", str(path), "--against", str(plain), "--json"])
        assert done.exit_code == 0
        told = json.loads(done.stdout)
        assert {one["output"] for one in told["outputs"]} == {"logits", *LAYERS}

    def test_without(self, plain: Path, tmp_path: Path) -> None:
        path = tmp_path / "explained.onnx"
        done = CliRunner().invoke(app, ["instrument", str(plain), "-o", str(path), "--no-verify"])
        assert "verified: no\n" in done.stdout

    def test_without_onnxruntime(self, plain: Path, tmp_path: Path) -> None:
        code = (
            "import sys; sys.modules['onnxruntime'] = None\n"
            "import onnxplain as ox\n"
            f"ox.instrument({str(plain)!r}, {str(tmp_path / 'a.onnx')!r}, verify=False)\n"
            f"ox.instrument({str(plain)!r}, {str(tmp_path / 'b.onnx')!r})"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "MissingDependencyError: verification runs the model" in done.stderr
        assert [path.name for path in tmp_path.iterdir()] == ["a.onnx"]


# What is written out in float64, against float32


@pytest.mark.parametrize(
    ("operator", "attributes", "weights"),
    [
        ("Conv", {"strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2]}, [(6, 4, 3, 2)]),
        ("Conv", {"group": 2}, [(6, 2, 3, 3), (6,)]),
        ("Conv", {"group": 4, "pads": [1, 1, 1, 1]}, [(4, 1, 3, 3), (4,)]),
        ("Erf", {}, []),
        ("Gelu", {}, []),
        ("GlobalAveragePool", {}, []),
        ("HardSigmoid", {"alpha": 0.3}, []),
        ("HardSwish", {}, []),
        ("LeakyRelu", {"alpha": 0.2}, []),
    ],
    ids=str,
)
def test_written_out(operator: str, attributes: Any, weights: list[Any], tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape).astype(np.float32) for shape in weights]
    names = [f"w{i}" for i in range(len(arrays))]
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", *names], ["y"], **attributes)],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 4, 7, 9])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a, n) for a, n in zip(arrays, names, strict=True)],
    )
    single = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    double = ir.from_proto(single)
    (x,) = double.graph.inputs
    x.type = ir.TensorType(ir.DataType.DOUBLE)
    in_double(double.graph, dependents(double.graph, x))
    images = random.normal(size=(2, 4, 7, 9)) * 2
    (found,) = opened(ir.to_proto(double).SerializeToString()).run(None, {"x": images})
    (expected,) = opened(single.SerializeToString()).run(None, {"x": images.astype(np.float32)})
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    if operator == "Erf":
        exact = np.vectorize(math.erf)(images)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-11)
