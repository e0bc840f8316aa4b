"""`onnxplain verify`: two files, two devices, or a file and torch, compared output by output."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import timm
import torch
from conftest import LABELS, ToyFile, toy_contract
from onnx import numpy_helper
from PIL import Image
from small_vits import small_vit
from test_bad_input import BAD_MODELS, complaint
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.differences import measure
from onnxplain.export.plain import to_onnx
from onnxplain.outputs import METHODS, depends_on_class, heatmap_name, map_name
from onnxplain.reporting import print_verification
from onnxplain.runtime.model import Model
from onnxplain.runtime.targets import PREDICTION, Question
from onnxplain.verification import Verification

ROUNDING = 1e-5  # of float32 sums over tokens and layers in another order


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def told(*arguments: object, status: int) -> Any:
    """The summary of a comparison that must end with this status, in silence."""
    code, stdout, stderr = run(*arguments, "--json")
    assert (code, stderr) == (status, "")
    return json.loads(stdout)


def changed(path: Path, name: str, change: Any, to: str) -> Path:
    """The same file with another weight."""
    model = onnx.load(path)
    (weight,) = (w for w in model.graph.initializer if w.name == name)
    array = change(numpy_helper.to_array(weight)).astype(np.float32)
    weight.CopyFrom(numpy_helper.from_array(array, name))
    onnx.save(model, path.with_name(to))
    return path.with_name(to)


def plain_file(module: Any, size: int, folder: Path) -> Path:
    """The model as timm has it, so that it need not be exported for each kind of file."""
    ir.save(to_onnx(module, image_size=(size, size)), folder / "plain.onnx")
    return folder / "plain.onnx"


def by_name(report: ox.Verification) -> dict[str, Any]:
    return {one.output: one for one in report.differences}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small transformer as a file of each kind and as a bundle."""
    folder = tmp_path_factory.mktemp("exported")
    plain = plain_file(small_vit(), 32, folder)
    for outputs in ("taps", "maps", "both"):
        ox.instrument(plain, folder / f"{outputs}.onnx", outputs=outputs)
    ox.instrument(plain, folder / "bundle")
    few = ["rollout", "gradcam"]
    ox.instrument(plain, folder / "half.onnx", precision="fp16", methods=few)
    options = {"head_fusion": "max", "start_layer": 1}
    for outputs in ("maps", "both"):
        path = folder / f"max.{outputs}.onnx"
        ox.instrument(plain, path, outputs=outputs, map_options=options, methods=few)
    ox.instrument(plain, folder / "heatmaps.onnx", heatmaps=True, methods=few)
    path = folder / "several.onnx"
    ox.instrument(plain, path, targets=3, heatmaps=True, methods=few)
    ox.instrument(plain, folder / "sums.onnx", seed="weights", methods=few)
    for name in ("embedded", "cropped"):
        ox.instrument(
            plain,
            folder / f"{name}.onnx",
            embed_preprocessing=name == "embedded",
            preprocessing={"crop_pct": 0.9},
            methods=few,
        )
    return folder


class TestFiles:
    def test_equal(self, toy_file: ToyFile) -> None:
        one, other = toy_file("one.onnx"), toy_file("other.onnx")
        summary = told(one, "--against", other, status=0)
        assert summary["model"] == str(one)
        assert summary["against"] == f"{other} on cpu"
        assert summary["within"] is True
        assert summary["notes"] == []
        outputs = {"logits", *(name for names in toy_contract().methods.values() for name in names)}
        assert {one["output"] for one in summary["outputs"]} == outputs
        for one in summary["outputs"]:
            assert (one["absolute"], one["relative"], one["relative_l2"]) == (0, 0, 0)
            assert one["shape"][0] == 2
            assert one["largest"] > 0

    def test_table(self, toy_file: ToyFile) -> None:
        one = toy_file("one.onnx")
        other = changed(one, "head", lambda w: w * 1.5, "other.onnx")
        code, stdout, stderr = run(one, "--against", other)
        assert (code, stderr) == (1, "")
        rows = {line.split()[0]: line.split()[1:] for line in stdout.splitlines()[1:]}
        assert rows["logits"][2:] == ["3.3e-01", "3.3e-01", "no"]
        assert rows["attention.0"][1:] == ["0.0e+00", "0.0e+00", "0.0e+00", "yes"]
        off = [name for name, cells in rows.items() if cells[-1] == "no"]
        assert stdout.splitlines()[-1] == f"differ: {', '.join(off)}"
        assert "logits" in off
        code, stdout, _ = run(one, "--against", one)
        assert (code, stdout.splitlines()[-1]) == (0, "the same within tolerance")
        lines = stdout.splitlines()
        relevance = "attention_relevance.0..1, attention_relevance_lrp.1, input_relevance"
        assert lines[-3:-1] == [
            "held to relative <= 0.0001: logits, attention.0..1, attention_gradient.0..1, "
            "features, features_gradient",
            f"held to L2 <= 0.01: {relevance}, input_relevance_attnlrp",
        ]

    def test_each_output_says_what_it_was_held_to(self, toy_file: ToyFile) -> None:
        one = toy_file("one.onnx")
        summary = told(one, "--against", one, "--tolerance", "0.25", status=0)
        for output in summary["outputs"]:
            relevance = "relevance" in output["output"]
            assert output["bounds"] == ({"relative_l2": 1e-2} if relevance else {"relative": 0.25})

    @pytest.mark.parametrize("columns", [80, 160])
    def test_a_terminal_shows_each_output_on_a_line(
        self, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        longest = max((heatmap_name(method) for method in METHODS), key=len)
        values = np.random.default_rng(0).normal(size=(1, 8, 8))
        report = Verification(
            path=Path("one.onnx"),
            device="cpu",
            against="other.onnx on cpu",
            tolerance=1e-4,
            differences=(measure(longest, values, values, 1e-4),),
            notes=(),
        )
        if columns == 80:
            monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
            monkeypatch.setenv("TERM", "dumb")  # which is that wide, and without colours
        print_verification(report, as_json=False)
        _, heads, row, held, _ = capsys.readouterr().out.splitlines()
        names = ["output", "largest", "absolute", "relative", "L2", "Spearman", "ok"]
        assert heads.split() == names
        assert row.split()[0] == longest
        assert row.split()[-2:] == ["1.00000", "yes"]
        assert held == f"held to L2 <= 0.01, Spearman >= 0.999: {longest}"

    def test_a_weight_changed(self, toy_file: ToyFile) -> None:
        other = toy_file("other.onnx")
        one = changed(other, "head", lambda w: w * 1.001, "one.onnx")
        report = ox.verify(one, against=other)
        assert not report.within
        for name, difference in by_name(report).items():
            power = 2 if name == "input_relevance_attnlrp" else 1  # times the logit, and again
            alike = name.startswith("attention_relevance_lrp")  # the toy's does not use the head
            if name == "logits" or (depends_on_class(name) and not alike):
                # what is measured of numbers that are themselves rounded to 2**-24
                assert difference.relative == pytest.approx(1.001**power - 1, rel=1e-3), name
                assert difference.relative_l2 == pytest.approx(1.001**power - 1, rel=1e-3), name
                assert difference.absolute <= difference.largest * 0.0021
                assert difference.within == ("relevance" in name), name
            else:
                assert difference.absolute == 0
                assert difference.within
        assert ox.verify(one, against=other, tolerance=0.0011).within
        told(one, "--against", other, "--tolerance", 0.0009, status=1)
        told(one, "--against", other, "--tolerance", 0.0011, status=0)

    def test_relevance_has_a_tolerance_of_its_own(self, toy_file: ToyFile) -> None:
        other = toy_file("other.onnx")
        one = changed(other, "head", lambda w: w * 1.012, "one.onnx")
        found = by_name(ox.verify(one, against=other, tolerance=0.1))
        assert found["attention_gradient.0"].within
        assert not found["attention_relevance.0"].within

    def test_bundle_against_a_single_file(self, exported: Path) -> None:
        report = ox.verify(exported / "bundle", against=exported / "both.onnx")
        contract = ox.Explainer(exported / "both.onnx").contract
        outputs = {"logits", *(name for names in contract.methods.values() for name in names)}
        outputs |= set(map(map_name, METHODS))
        assert set(by_name(report)) == outputs
        assert max(one.relative for one in report.differences) < ROUNDING
        assert report.within
        assert report.notes == ()

    def test_it_tells_what_is_going_on(self, toy_file: ToyFile) -> None:
        steps: list[tuple[str, int, int]] = []
        one = toy_file("one.onnx")
        ox.verify(one, against=one, step=lambda *what: steps.append(what))
        # What each of both makes of two questions.
        comparing = [("comparing", done, 4) for done in range(5)]
        assert steps == [("reading the models", 0, 1), *comparing]

    @pytest.mark.parametrize("number", [0, 2])
    def test_interrupt(self, number: int, toy_file: ToyFile, monkeypatch: Any) -> None:
        def tell(what: str, done: int, total: int) -> None:
            if (what, done) == ("comparing", number):
                raise KeyboardInterrupt

        monkeypatch.setattr("onnxplain.cli.stages", lambda: contextlib.nullcontext(tell))
        one = toy_file("one.onnx")
        assert run(one, "--against", one, "--json") == (130, "", "onnxplain: interrupted\n")

    def test_other_precision(self, exported: Path) -> None:
        report = ox.verify(exported / "half.onnx", against=exported / "both.onnx")
        assert not report.within
        found = by_name(report)
        assert 1e-4 < found["logits"].relative < 1e-2
        assert not found["logits"].within
        wider = ox.verify(exported / "half.onnx", against=exported / "both.onnx", tolerance=1e-2)
        assert by_name(wider)["logits"].within

    def test_pictures(self, toy_file: ToyFile, tmp_path: Path) -> None:
        pixels = np.random.default_rng(3).integers(0, 256, (30, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "a.png")
        Image.fromarray(pixels[:9]).save(tmp_path / "b.jpg")
        images = ("--image", tmp_path / "a.png", "--image", tmp_path / "b.jpg")
        one, other = toy_file("one.onnx"), toy_file("other.onnx")
        summary = told(one, "--against", other, "--batch", 3, *images, status=0)
        assert {one["shape"].pop(0) for one in summary["outputs"]} == {5}

    def test_random_pictures_follow_the_seed(self, toy_file: ToyFile) -> None:
        one, other = toy_file("one.onnx"), toy_file("other.onnx")
        largest = [
            by_name(ox.verify(one, against=other, seed=seed))["logits"].largest
            for seed in (None, 0, 1)
        ]
        assert largest[0] == largest[1] != largest[2]

    def test_a_fixed_batch(self, toy_file: ToyFile) -> None:
        one = toy_file("one.onnx", input=replace(toy_contract().input, batch=3))
        assert ox.verify(one, against=toy_file("other.onnx"), batch=4).within

    def test_other_preprocessing_is_said(self, toy_file: ToyFile) -> None:
        image = replace(toy_contract().input, mean=(0.4, 0.5, 0.5))
        one, other = toy_file("one.onnx", input=image), toy_file("other.onnx")
        report = ox.verify(one, against=other)
        assert not report.within
        (note,) = (note for note in report.notes if note.startswith("mean"))
        assert note == (
            f"mean is (0.4, 0.5, 0.5) in {one} on cpu and (0.5, 0.5, 0.5) in {other} on cpu"
        )

    def test_other_predictions_are_said(self, toy_file: ToyFile) -> None:
        other = toy_file("other.onnx")
        one = changed(other, "head", lambda w: -w, "one.onnx")
        assert "predictions differ" in " ".join(ox.verify(one, against=other).notes)

    def test_outputs_of_one_alone_are_said(self, toy_file: ToyFile) -> None:
        one = toy_file("one.onnx", methods=["rollout"])
        other = toy_file("other.onnx", methods=["rollout", "gradcam"])
        report = ox.verify(one, against=other)
        assert set(by_name(report)) == {"logits", "attention.0", "attention.1"}
        assert report.notes == (f"only {other} on cpu has features, features_gradient",)
        assert report.within

    def test_other_shapes_differ(self, toy_file: ToyFile) -> None:
        one = toy_file("one.onnx")
        model = onnx.load(one)
        tapped = next(node for node in model.graph.node if node.output[0] == "attention.1")
        tapped.output[0] = "whole"
        for node in model.graph.node:
            node.input[:] = ["whole" if name == "attention.1" else name for name in node.input]
        model.graph.node.append(
            onnx.helper.make_node("Gather", ["whole", "column"], ["attention.1"], axis=1)
        )
        del model.graph.value_info[:]
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        other = one.with_name("other.onnx")
        onnx.save(model, other)
        report = ox.verify(one, against=other)
        found = by_name(report)
        assert found["attention.1"].absolute == math.inf
        assert not found["attention.1"].within
        assert found["attention.0"].within
        assert f"attention.1 is [2, 2, 5, 5] in {one} on cpu, [2, 1, 5, 5] in {other} on cpu" in (
            report.notes
        )


class TestMaps:
    def test_maps_against_taps(self, exported: Path) -> None:
        report = ox.verify(exported / "maps.onnx", against=exported / "taps.onnx")
        assert set(by_name(report)) == {"logits", *map(map_name, METHODS)}
        assert report.within
        assert report.notes == ()
        for one in report.differences:
            assert one.relative < ROUNDING
            if one.output != "logits":
                assert one.spearman is not None
                assert one.spearman > 0.999
                assert one.shape[1:] in ((4, 4), (32, 32))

    @pytest.mark.parametrize(("one", "other"), [("both", "taps"), ("taps", "both")])
    def test_taps_and_maps_against_taps(self, one: str, other: str, exported: Path) -> None:
        report = ox.verify(exported / f"{one}.onnx", against=exported / f"{other}.onnx")
        assert {"attention.1", "map.rollout", "map.lrp"} <= set(by_name(report))
        assert report.within
        assert report.notes == ()

    def test_maps_alone_against_both(self, exported: Path) -> None:
        report = ox.verify(exported / "maps.onnx", against=exported / "both.onnx")
        assert set(by_name(report)) == {"logits", *map(map_name, METHODS)}
        assert report.within
        assert "attention_gradient" in report.notes[0]

    def test_a_wrong_map_is_found(self, exported: Path) -> None:
        model = onnx.load(exported / "maps.onnx")
        node = next(node for node in model.graph.node if "map.rollout" in node.output)
        node.output[list(node.output).index("map.rollout")] = "right"
        model.graph.node.append(onnx.helper.make_node("Neg", ["right"], ["map.rollout"]))
        onnx.save(model, exported / "wrong.onnx")
        report = ox.verify(exported / "wrong.onnx", against=exported / "taps.onnx")
        assert [one.output for one in report.differences if not one.within] == ["map.rollout"]
        assert by_name(report)["map.rollout"].spearman == pytest.approx(-1)

    def test_maps_for_other_options_are_computed_for_them(self, exported: Path) -> None:
        for other in ("taps", "both"):
            report = ox.verify(exported / "max.maps.onnx", against=exported / f"{other}.onnx")
            assert set(by_name(report)) == {"logits", "map.rollout", "map.gradcam"}
            assert report.within

    def test_maps_for_other_options_that_cannot_be_computed_are_named(self, exported: Path) -> None:
        report = ox.verify(exported / "max.maps.onnx", against=exported / "maps.onnx")
        assert "map.rollout" not in by_name(report)
        assert "map.gradcam" in by_name(report)
        assert report.within
        (note,) = (note for note in report.notes if "of rollout are not compared" in note)
        assert "head_fusion" in note


class TestKinds:
    """Files that are asked in other ways."""

    def outputs(self, exported: Path, one: str, other: str) -> dict[str, Any]:
        report = ox.verify(exported / f"{one}.onnx", against=exported / f"{other}.onnx")
        assert report.within
        return by_name(report)

    def test_heatmaps(self, exported: Path) -> None:
        found = self.outputs(exported, "heatmaps", "several")
        for method in ("rollout", "gradcam"):
            assert found[f"heatmap.{method}"].shape == (2, 32, 32)
            assert found[f"heatmap.{method}"].largest == 1
            assert found[f"heatmap.{method}"].spearman > 0.999

    def test_several_classes_at_once(self, exported: Path) -> None:
        found = self.outputs(exported, "several", "several")
        assert found["map.gradcam"].shape == (2, 3, 4, 4)
        assert found["map.rollout"].shape == (2, 4, 4)

    @pytest.mark.parametrize("other", ["both", "taps", "maps"])
    def test_several_classes_against_one(self, other: str, exported: Path) -> None:
        for pair in (("several", other), (other, "several")):
            found = self.outputs(exported, *pair)
            assert {"logits", "map.gradcam", "map.rollout"} == set(found)
            assert found["map.gradcam"].shape == (2, 4, 4)

    def test_sums_of_logits_are_asked_for_too(
        self, exported: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Question] = []
        run = Model.run

        def listen(self: Model, images: Any, question: Question, outputs: Any) -> Any:
            asked.append(question)
            return run(self, images, question, outputs)

        monkeypatch.setattr(Model, "run", listen)
        self.outputs(exported, "sums", "taps")
        assert [question.weights is None for question in asked] == [True] * 4
        for i in range(0, 4, 2):
            np.testing.assert_array_equal(asked[i].classes, asked[i + 1].classes)
        assert (asked[0].classes == PREDICTION).all()
        assert (asked[2].classes >= 0).all()
        asked.clear()
        self.outputs(exported, "sums", "sums")
        assert [question.weights is None for question in asked] == [True] * 4 + [False] * 2

    def test_preprocessing_in_the_graph(self, exported: Path) -> None:
        for pair in (("embedded", "cropped"), ("cropped", "embedded"), ("embedded", "embedded")):
            assert "attention_gradient.0" not in (found := self.outputs(exported, *pair))
            assert {"logits", "attention.0", "features_gradient", "map.gradcam"} <= set(found)
            assert found["attention.0"].shape[0] == 2

    def test_preprocessing_in_the_graph_against_torch(self, exported: Path) -> None:
        path = exported / "embedded.onnx"
        line = complaint("verify", path, "--against", "timm:test_vit", "--checkpoint", "w.pth")
        assert "takes pictures as they are" in line


class TestNotFinite:
    """The toy's `bias` is a part of its gradients and of nothing else."""

    def test_on_both_sides(self, toy_file: ToyFile) -> None:
        one = changed(toy_file(), "bias", lambda w: w * np.nan, "one.onnx")
        report = ox.verify(one, against=changed(one, "bias", lambda w: w, "other.onnx"))
        assert report.within
        assert any(n.startswith("attention_gradient.0 holds NaN") for n in report.notes)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("swapped", [False, True])
    def test_on_one_side(self, toy_file: ToyFile, value: float, swapped: bool) -> None:
        whole = toy_file("whole.onnx")
        broken = changed(whole, "bias", lambda w: w * 0 + value, "broken.onnx")
        one, other = (whole, broken) if swapped else (broken, whole)
        summary = told(one, "--against", other, status=1)
        found = {one["output"]: one for one in summary["outputs"]}
        assert found["attention_gradient.0"]["absolute"] is None
        assert found["attention_gradient.0"]["within"] is False
        assert found["attention.0"]["within"] is True
        text = f"attention_gradient.0 holds NaN or infinite values in {broken} on cpu"
        assert text in summary["notes"]

    def test_infinite_values_of_another_sign(self, toy_file: ToyFile) -> None:
        one = changed(toy_file(), "bias", lambda w: w * 0 + np.inf, "one.onnx")
        other = changed(one, "bias", lambda w: -w, "other.onnx")
        assert not by_name(ox.verify(one, against=other))["attention_gradient.0"].within

    def test_no_logits(self, toy_file: ToyFile) -> None:
        other = toy_file("other.onnx")
        one = changed(other, "head", lambda w: w * np.nan, "one.onnx")
        assert "logits are not finite" in complaint("verify", one, "--against", other)


class TestMeasure:
    """By hand."""

    def test_of_an_output(self) -> None:
        found, expected = np.array([[1.0, -4.5]]), np.array([[1.0, -4.0]])
        one = measure("logits", found, expected, 0.125)
        assert (one.largest, one.absolute, one.relative, one.within) == (4, 0.5, 0.125, True)
        assert one.bounds == {"relative": 0.125}
        assert one.relative_l2 == pytest.approx(0.5 / 17**0.5)
        assert one.spearman is None
        assert not measure("logits", found, expected, 0.1249).within

    def test_of_zeros(self) -> None:
        zeros, ones = np.zeros((1, 2)), np.ones((1, 2))
        assert measure("logits", zeros, zeros, 0).within
        assert measure("logits", ones, zeros, 0.5).relative == 1

    def test_the_lowest_rank_correlation_counts(self) -> None:
        expected = np.array([[[1.0, 2], [3, 4]], [[1, 2], [3, 4]]])
        found = np.array([[[1.0, 2], [3, 4]], [[1, 2], [4, 3]]])
        assert measure("map.rollout", found, expected, 1).spearman == pytest.approx(0.8)

    def test_equal_values_share_their_rank(self) -> None:
        # Ranks 1.5, 1.5, 3, 4 and 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
        found, expected = np.array([[[0.0, 0], [1, 2]]]), np.array([[[0.0, 1], [2, 3]]])
        spearman = measure("heatmap.gradcam", found, expected, 1).spearman
        assert spearman == pytest.approx(4.5 / (4.5 * 5) ** 0.5)

    def test_blank_maps(self) -> None:
        blank, steep = np.full((1, 2, 2), 0.1), np.array([[[1.0, 2], [3, 4]]])
        assert measure("map.lrp", blank, blank, 0).spearman == 1
        assert measure("map.lrp", blank, steep, 0).spearman == 0

    @pytest.mark.parametrize("output", ["map.lrp", "heatmap.partial_lrp", "map.attnlrp"])
    def test_of_maps_of_relevance(self, output: str) -> None:
        expected = np.linspace(1, 2, 4096).reshape(1, 64, 64)
        assert measure(output, expected * 1.009, expected, 0).within
        assert not measure(output, expected * 1.011, expected, 1).within
        steps = np.where(np.arange(4096) % 2, 0.004, -0.004).reshape(expected.shape)
        near = measure(output, expected + steps, expected, 0)
        assert near.relative_l2 < 0.01
        assert near.within
        swapped = measure(output, expected[:, ::-1] * 1e-3 + 1, expected * 1e-3 + 1, 1)
        assert swapped.relative_l2 < 0.01
        assert not swapped.within

    def test_of_relevance_that_is_no_map(self) -> None:
        expected = np.array([1.0, 2, 3])[None]
        assert measure("attention_relevance.3", expected * 1.009, expected, 0).within
        assert measure("input_relevance", expected * 1.009, expected, 0).within
        assert not measure("attention_gradient.3", expected * 1.009, expected, 0).within


class TestDevices:
    @pytest.mark.skipif(
        "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
        reason="this onnxruntime has CUDA",
    )
    def test_a_device_that_cannot_be_had(self, toy_file: ToyFile) -> None:
        line = complaint("verify", toy_file(), "--device", "cuda")
        assert "has no CUDAExecutionProvider" in line
        assert "has no CUDA" in complaint(
            "verify", toy_file(), "--device", "cuda", "--against", toy_file("b.onnx")
        )

    def test_a_device_that_is_unknown(self, toy_file: ToyFile) -> None:
        assert "unknown device 'tpu'" in complaint("verify", toy_file(), "--device", "tpu")

    def test_the_cpu_against_itself(self, toy_file: ToyFile) -> None:
        assert "nothing to compare with" in complaint("verify", toy_file())
        with pytest.raises(ox.InputError, match="is the CPU here"):
            ox.verify(toy_file(), device=["CPUExecutionProvider"])

    @pytest.mark.skipif(
        "AzureExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="this onnxruntime has no other provider that runs on any machine",
    )
    def test_a_file_on_two_devices(self, toy_file: ToyFile) -> None:
        path = toy_file()
        report = ox.verify(path, device=["AzureExecutionProvider", "CPUExecutionProvider"])
        assert (report.device, report.against) == ("azure", f"{path} on cpu")
        assert len(report.differences) > len(toy_contract().layers)
        assert report.within


class TestRefused:
    def test_another_size(self, toy_file: ToyFile) -> None:
        one, other = toy_file("one.onnx"), toy_file("other.onnx", size=(8, 16))
        line = complaint("verify", one, "--against", other)
        assert f"{one} on cpu cannot be compared with {other} on cpu: 8x8 pixels" in line
        assert "8x16" in line

    def test_another_number_of_classes(self, toy_file: ToyFile) -> None:
        one = toy_file("one.onnx")
        other = toy_file("other.onnx", classes=4, labels=None)
        line = complaint("verify", one, "--against", other)
        assert f"{len(LABELS)} classes" in line
        assert f"{other} on cpu 4" in line

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ({"tolerance": -1.0}, "tolerance"),
            ({"tolerance": math.nan}, "tolerance"),
            ({"batch": 0}, "batch is 0"),
            ({"batch": 1.5}, r"batch is 1\.5"),
            ({"seed": -1}, "seed is -1"),
            ({"seed": "x"}, "seed is 'x'"),
            ({"checkpoint": "w.pth"}, "checkpoint: for a comparison with timm"),
            ({"num_classes": 3}, "num_classes: for a comparison with timm"),
            ({"image_size": 16}, "16x16 pixels: this file is made for 8x8"),
            ({"images": ["no.png"]}, r"no\.png"),
        ],
    )
    def test_arguments(self, arguments: Any, expected: str, toy_file: ToyFile) -> None:
        with pytest.raises(ox.InputError, match=expected):
            ox.verify(toy_file(), against=toy_file("other.onnx"), **arguments)

    @pytest.mark.parametrize("case", BAD_MODELS)
    @pytest.mark.parametrize("position", [0, 1])
    def test_bad_files(self, case: str, position: int, toy_file: ToyFile) -> None:
        make, expected = BAD_MODELS[case]
        bad = toy_file("bad.onnx")
        bad.write_bytes(make())
        files = [toy_file("good.onnx")]
        files.insert(position, bad)
        line = complaint("verify", files[0], "--against", files[1])
        if (case, position) == ("without a contract", 1):  # as it may be, of the same model
            expected = f"expected the model that {files[0]} was made from"
        assert str(bad) in line
        assert expected in line

    @pytest.mark.parametrize("position", [0, 1])
    def test_missing_files(self, position: int, toy_file: ToyFile, tmp_path: Path) -> None:
        files = [toy_file()]
        files.insert(position, tmp_path / "no.onnx")
        line = complaint("verify", files[0], "--against", files[1])
        assert f"{tmp_path / 'no.onnx'}: no such file" in line

    def test_a_picture_that_is_none(self, toy_file: ToyFile, tmp_path: Path) -> None:
        (tmp_path / "cat.jpg").write_text("meow")
        line = complaint(
            *("verify", toy_file(), "--against", toy_file("b.onnx")),
            *("--image", tmp_path / "cat.jpg"),
        )
        assert str(tmp_path / "cat.jpg") in line


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """timm's smallest models with a file of their weights, and explained."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    module = timm.create_model("test_vit", num_classes=5, img_size=32)
    torch.save(module.state_dict(), folder / "test_vit.pth")
    ox.export(
        "test_vit",
        folder / "any.onnx",
        checkpoint=folder / "test_vit.pth",
        image_size=32,
        num_classes=5,
        methods=["rollout", "gradcam"],
        dynamic_size=True,
        verify=False,
    )
    image = ox.Explainer(folder / "any.onnx").contract.input
    names = ("mean", "std", "crop_pct", "crop_mode", "interpolation")
    preprocessing = {name: getattr(image, name) for name in names}
    methods = ["rollout", "gradcam", "generic_attention", "partial_lrp"]
    plain = plain_file(module, 32, folder)
    for outputs in ("both", "maps"):
        path = folder / f"test_vit.{outputs}.onnx"
        ox.instrument(plain, path, outputs=outputs, methods=methods, preprocessing=preprocessing)
    module = timm.create_model("test_resnet", num_classes=5)
    torch.save(module.state_dict(), folder / "test_resnet.pth")
    plain = plain_file(module, 64, folder)
    for outputs in ("both", "maps"):
        ox.instrument(plain, folder / f"test_resnet.{outputs}.onnx", outputs=outputs)
    return folder


class TestAnySize:
    @pytest.mark.parametrize(("one", "other"), [("any", "test_vit.both"), ("test_vit.both", "any")])
    def test_the_size_is_the_one_that_both_take(self, one: str, other: str, trained: Path) -> None:
        report = ox.verify(trained / f"{one}.onnx", against=trained / f"{other}.onnx")
        assert {"attention.0", "features_gradient", "map.rollout"} <= set(by_name(report))
        assert report.within

    def test_a_size_that_is_asked_for(self, trained: Path) -> None:
        path = trained / "any.onnx"
        summary = told(path, "--against", path, "--img-size", "64x48", status=0)
        shapes = {one["output"]: one["shape"] for one in summary["outputs"]}
        assert shapes["attention.0"][2:] == [13, 13]


class TestTorch:
    @pytest.fixture(autouse=True)
    def nothing_is_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        yield
        assert list(temporary.iterdir()) == []

    def arguments(self, trained: Path, file: str, name: str = "test_vit") -> tuple[object, ...]:
        weights = ("--checkpoint", trained / f"{name}.pth", "--num-classes", 5)
        return (trained / f"{file}.onnx", "--against", f"timm:{name}", *weights)

    def test_taps_and_maps(self, trained: Path) -> None:
        summary = told(*self.arguments(trained, "test_vit.both"), status=0)
        found = {one["output"]: one for one in summary["outputs"]}
        compared = {"attention.0", "attention_gradient.5", "features", "features_gradient"}
        assert compared | {"logits", "map.rollout", "map.gradcam"} <= set(found)
        assert not any("relevance" in output or "lrp" in output for output in found)
        assert 0 < found["logits"]["relative"] < ROUNDING
        (note,) = summary["notes"]
        assert note.endswith("has attention_relevance_lrp, map.partial_lrp")
        assert summary["against"] == "timm:test_vit in torch"

    def test_maps_alone_against_what_torch_makes_them_of(self, trained: Path) -> None:
        summary = told(*self.arguments(trained, "test_vit.maps"), status=0)
        outputs = {one["output"] for one in summary["outputs"]}
        assert outputs == {"logits", "map.rollout", "map.gradcam", "map.generic_attention"}

    def test_a_network_without_attention(self, trained: Path) -> None:
        summary = told(*self.arguments(trained, "test_resnet.both", "test_resnet"), status=0)
        outputs = {one["output"] for one in summary["outputs"]}
        assert outputs == {"logits", "features", "features_gradient", "map.gradcam"}
        summary = told(*self.arguments(trained, "test_resnet.maps", "test_resnet"), status=0)
        assert {one["output"] for one in summary["outputs"]} == {"logits"}

    def test_any_size(self, trained: Path) -> None:
        summary = told(*self.arguments(trained, "any"), status=0)
        assert {one["output"] for one in summary["outputs"]} >= {"logits", "attention.0"}

    def test_other_weights(self, trained: Path) -> None:
        state = torch.load(trained / "test_vit.pth")
        state["head.weight"] *= 1.01
        torch.save(state, trained / "other.pth")
        path, *arguments = self.arguments(trained, "test_vit.both")
        arguments[arguments.index(trained / "test_vit.pth")] = trained / "other.pth"
        summary = told(path, *arguments, status=1)
        found = {one["output"]: one for one in summary["outputs"]}
        assert not found["logits"]["within"]
        assert found["attention.5"]["within"]

    @pytest.mark.parametrize(
        ("against", "options", "expected"),
        [
            ("timm:test_vit", {"num_classes": 5}, "random weights"),
            ("timm:vit_nothing", {"checkpoint": "test_vit"}, "no model 'vit_nothing'"),
            ("timm:test_vit", {"checkpoint": "test_vit"}, "num_classes=5"),
            ("timm:test_vit2", {"checkpoint": "test_vit", "num_classes": 5}, "does not fit"),
            ("timm:test_vit", {"checkpoint": "absent", "num_classes": 5}, "no such file"),
            ("timm:test_vit", {"seed": 1}, "images, batch, seed"),
            ("timm:test_vit", {"images": ["cat.jpg"]}, "images, batch, seed"),
        ],
    )
    def test_refused(self, against: str, options: Any, expected: str, trained: Path) -> None:
        if "checkpoint" in options:
            options = options | {"checkpoint": trained / f"{options['checkpoint']}.pth"}
        with pytest.raises((ox.InputError, ox.ModelError), match=expected):
            ox.verify(trained / "test_vit.both.onnx", against=against, **options)

    def test_a_model_of_another_kind(self, trained: Path) -> None:
        line = complaint(
            "verify", *self.arguments(trained, "test_vit.both", "test_resnet"), "--img-size", 32
        )
        assert line.startswith("onnxplain: timm:test_resnet is not the model of the file: ")
        assert "no_verify" not in line
        assert "verify=False" not in line

    def test_another_number_of_classes(self, trained: Path, tmp_path: Path) -> None:
        module = timm.create_model("test_vit", num_classes=4, img_size=32)
        torch.save(module.state_dict(), tmp_path / "four.pth")
        with pytest.raises(ox.InputError, match="4 classes and the file 5; pass num_classes=5"):
            ox.verify(
                trained / "test_vit.both.onnx",
                against="timm:test_vit",
                checkpoint=tmp_path / "four.pth",
                num_classes=4,
            )

    def test_without_the_extra(self, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "timm", None)
        line = complaint("verify", *self.arguments(trained, "test_vit.both"))
        assert "needs timm" in line
        assert "onnxplain[cpu,export]" in line
