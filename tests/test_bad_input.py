"""The command line on bad input: one line that says what is wrong, and the right exit status."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import timm
from conftest import ToyFile, toy_contract, toy_model
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from typer.testing import CliRunner

from onnxplain.cli import app
from onnxplain.export.plain import to_onnx

UNUSABLE = 2


def complaint(*arguments: object, status: int = UNUSABLE) -> str:
    """Runs a command that must fail with one line on stderr and nothing on stdout; the line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("onnxplain: ")
    return line


def real_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onnxplain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    path = tmp_path / "cat.png"
    pixels = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def convolution() -> onnx.ModelProto:
    """A classifier without any attention, or positions that could be shown."""
    weight = numpy_helper.from_array(np.ones((5, 3, 32, 32), np.float32), "weight")
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["pixel_values", "weight"], ["maps"]),
            helper.make_node("ReduceMean", ["maps", "axes"], ["logits"], keepdims=0),
        ],
        "convolution",
        [value("pixel_values", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [value("logits", TensorProto.FLOAT, ["batch", 5])],
        [weight, axes],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def with_contract(**fields: object) -> bytes:
    """The toy model with its contract's fields changed, whether or not that makes sense."""
    model = toy_model(toy_contract())
    document = json.loads(model.metadata_props[0].value) | fields
    model.metadata_props[0].value = json.dumps(document)
    return model.SerializeToString()


BAD_MODELS: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "text": (lambda: b"this is not a model\n" * 50, "not an ONNX"),
    "truncated": (lambda: toy_model(toy_contract()).SerializeToString()[:-200], "truncated"),
    "without a contract": (lambda: convolution().SerializeToString(), "onnxplain instrument"),
    "newer format": (lambda: with_contract(format=99), "upgrade onnxplain"),
    "damaged contract": (lambda: with_contract(tokens=None), "damaged"),
    "outputs missing": (lambda: with_contract(logits="scores"), "scores"),
}


@pytest.mark.parametrize("command", ["explain", "compare", "inspect"])
@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_model(command: str, case: str, cat: Path, tmp_path: Path) -> None:
    if (command, case) == ("inspect", "without a contract"):
        return  # which it looks into
    make, expected = BAD_MODELS[case]
    model, out = tmp_path / "model.onnx", tmp_path / "out.png"
    model.write_bytes(make())
    inputs = () if command == "inspect" else (cat, "-o", out)
    line = complaint(command, model, *inputs)
    assert str(model) in line
    assert expected in line
    assert not out.exists()


@pytest.mark.parametrize("command", ["explain", "compare", "inspect", "instrument"])
def test_missing_model(command: str, cat: Path, tmp_path: Path) -> None:
    inputs = {"inspect": (), "instrument": ("-o", "x.onnx")}.get(command, (cat, "-o", "x.png"))
    line = complaint(command, tmp_path / "no.onnx", *inputs)
    assert f"{tmp_path / 'no.onnx'}: no such file" in line


def test_folder_that_is_no_bundle(cat: Path, tmp_path: Path) -> None:
    assert "contract.json" in complaint("explain", tmp_path, cat, "-o", tmp_path / "out")


def test_bundle_with_a_graph_missing(toy_bundle: Path, cat: Path, tmp_path: Path) -> None:
    (toy_bundle / "gradient.onnx").unlink()
    line = complaint("explain", toy_bundle, cat, "-o", tmp_path / "out")
    assert str(toy_bundle / "gradient.onnx") in line


INSTRUMENT_REFUSES: Mapping[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "empty"),
    "text": (lambda: b"this is not a model\n" * 50, "not an ONNX"),
    "truncated": (lambda: toy_model(toy_contract()).SerializeToString()[:-200], "not an ONNX"),
    "no attention": (lambda: convolution().SerializeToString(), "attention"),
    "explained": (lambda: toy_model(toy_contract()).SerializeToString(), "was made from"),
}


@pytest.mark.parametrize("case", INSTRUMENT_REFUSES)
def test_instrument_refuses(case: str, tmp_path: Path) -> None:
    make, expected = INSTRUMENT_REFUSES[case]
    model, out = tmp_path / "model.onnx", tmp_path / "explained.onnx"
    model.write_bytes(make())
    assert expected in complaint("instrument", model, "-o", out)
    assert sorted(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--method", "lime"], "'lime' is not a method of onnxplain; it has raw_attention"),
        (["--target", "tiger"], "no label 'tiger' in this model"),
        (["--target", "tabb"], "close ones: 'tabby'"),
        (["--target", "3"], "target 3 is not in 0..2"),
        (["--target", "-1"], "'-1'"),
        (["--device", "cuda"], "CUDAExecutionProvider"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--method", "rollout", "--discard-ratio", "1.5"], "1.5"),
        (["--method", "rollout", "--head-fusion", "median"], "median"),
        (["--method", "rollout", "--start-layer", "7"], "7"),
        (["--method", "gradcam", "--head-fusion", "max"], "no option 'head_fusion'"),
        (["--alpha", "2"], "alpha is 2.0, expected 0..1"),
        (["--colormap", "mauve"], "unknown colormap 'mauve'; one of "),
        (["--kind", "gif"], "--kind"),
        (["--batch-size", "0"], "--batch-size"),
        (["--bogus"], "--bogus"),
    ],
)
def test_bad_option_of_explain(
    arguments: list[str], expected: str, toy_file: ToyFile, cat: Path, tmp_path: Path
) -> None:
    if "cuda" in arguments and "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    out = tmp_path / "out"
    assert expected in complaint("explain", toy_file(), cat, "-o", out, *arguments)
    assert not out.exists() or not list(out.iterdir())


def test_method_that_this_file_does_not_serve(toy_file: ToyFile, cat: Path, tmp_path: Path) -> None:
    model = toy_file(methods={"rollout": ("attention.0", "attention.1")})
    line = complaint("explain", model, cat, "--method", "gradcam", "-o", tmp_path / "out")
    assert "method 'gradcam' is not in this file; it has rollout" in line


@pytest.mark.parametrize(
    "arguments", [[], ["explain"], ["bogus"], ["compare", "x.onnx", "y.png"]], ids=str
)
def test_wrong_usage_is_one_line(arguments: list[str]) -> None:
    assert "--help" in complaint(*arguments)


class TestPictures:
    @pytest.fixture
    def photos(self, cat: Path, tmp_path: Path) -> Path:
        folder = tmp_path / "photos"
        folder.mkdir()
        good = cat.read_bytes()
        (folder / "a.png").write_bytes(good)
        (folder / "b-empty.png").write_bytes(b"")
        (folder / "c-text.jpg").write_text("no picture\n" * 9)
        (folder / "d-truncated.png").write_bytes(good[: len(good) // 2])
        (folder / "e.png").write_bytes(good)
        return folder

    def test_the_good_ones_of_a_folder_are_done(
        self, photos: Path, toy_file: ToyFile, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        ran = real_process(
            *("explain", toy_file(), photos, "gone.png", "--method", "rollout"),
            *("--batch-size", "2", "-o", out),
        )
        assert ran.returncode == 1
        assert sorted(path.name for path in out.iterdir()) == ["a.rollout.png", "e.rollout.png"]
        lines = ran.stderr.splitlines()
        assert len(lines) == 4
        for bad in ("b-empty.png", "c-text.jpg", "d-truncated.png", "gone.png"):
            assert sum(bad in line for line in lines) == 1
        assert len(ran.stdout.splitlines()) == 2

    def test_json_names_the_failed(self, photos: Path, toy_file: ToyFile, tmp_path: Path) -> None:
        ran = real_process("explain", toy_file(), photos, "--json", "-o", tmp_path / "out")
        told = json.loads(ran.stdout)
        assert [Path(one["input"]).name for one in told["results"]] == ["a.png", "e.png"]
        failed = {Path(one["input"]).name: one["error"] for one in told["failed"]}
        assert sorted(failed) == ["b-empty.png", "c-text.jpg", "d-truncated.png"]
        assert "empty" in failed["b-empty.png"]

    def test_folder_without_pictures(self, toy_file: ToyFile, tmp_path: Path) -> None:
        (tmp_path / "none" / "deep").mkdir(parents=True)
        line = complaint("explain", toy_file(), tmp_path / "none", "-o", tmp_path / "o", status=1)
        assert f"{tmp_path / 'none'}: no pictures in this folder; --recursive" in line

    @pytest.mark.parametrize("content", [None, b"", b"text"], ids=["missing", "empty", "text"])
    def test_compare(self, content: bytes | None, toy_file: ToyFile, tmp_path: Path) -> None:
        image, out = tmp_path / "image.png", tmp_path / "panel.png"
        if content is not None:
            image.write_bytes(content)
        assert str(image) in complaint("compare", toy_file(), image, "-o", out)
        assert not out.exists()


class TestOutput:
    def test_one_file_for_two_pictures(self, cat: Path, toy_file: ToyFile, tmp_path: Path) -> None:
        second = tmp_path / "second.png"
        second.write_bytes(cat.read_bytes())
        line = complaint("explain", toy_file(), cat, second, "-o", tmp_path / "out.png")
        assert "one file for 2 pictures; give a folder" in line

    def test_suffix_that_does_not_fit_the_kind(
        self, cat: Path, toy_file: ToyFile, tmp_path: Path
    ) -> None:
        out = tmp_path / "out.png"
        assert ".npy" in complaint("explain", toy_file(), cat, "--kind", "npy", "-o", out)

    @pytest.mark.parametrize("command", ["explain", "compare"])
    def test_an_input_is_never_overwritten(
        self, command: str, cat: Path, toy_file: ToyFile
    ) -> None:
        before = cat.read_bytes()
        assert "would be overwritten" in complaint(command, toy_file(), cat, "-o", cat)
        assert cat.read_bytes() == before

    def test_panel_of_no_kind_of_picture(
        self, cat: Path, toy_file: ToyFile, tmp_path: Path
    ) -> None:
        assert "try .png" in complaint("compare", toy_file(), cat, "-o", tmp_path / "panel.txt")

    @pytest.mark.parametrize("command", ["explain", "compare"])
    def test_place_that_cannot_be_written(
        self, command: str, cat: Path, toy_file: ToyFile, tmp_path: Path
    ) -> None:
        # A file in the way stops root as well, whom permissions do not.
        (tmp_path / "file").touch()
        out = tmp_path / "file" / "deep" / "out.png"
        line = complaint(command, toy_file(), cat, "-o", out)
        assert os.strerror(errno.ENOTDIR) in line or os.strerror(errno.EEXIST) in line

    @pytest.mark.parametrize("command", ["explain", "compare"])
    def test_full_disk(self, command: str, cat: Path, toy_file: ToyFile, tmp_path: Path) -> None:
        """No more than 2000 bytes fit into a file: what a full disk is to the writer."""
        model, out = toy_file(), tmp_path / "out" / "picture.png"
        out.parent.mkdir()
        out.write_bytes(b"what was there before")
        ran = real_process(
            *(command, model, cat, "-o", out),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)),
        )
        assert (ran.returncode, ran.stdout) == (UNUSABLE, "")
        (line,) = ran.stderr.splitlines()
        assert os.strerror(errno.EFBIG) in line
        assert list(out.parent.iterdir()) == [out]
        assert out.read_bytes() == b"what was there before"


@pytest.fixture(scope="module")
def plain_vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "vit.onnx"
    module = timm.create_model("test_vit", num_classes=3, img_size=32)
    ir.save(to_onnx(module, image_size=(32, 32)), path)
    return path


class TestModelOutput:
    """What was at the place before stays there until the new file or bundle is whole."""

    @pytest.fixture(params=["vit.onnx", "bundle"])
    def place(self, request: pytest.FixtureRequest, plain_vit: Path, tmp_path: Path) -> Path:
        out = tmp_path / "models" / str(request.param)
        out.parent.mkdir()
        result = CliRunner().invoke(app, ["instrument", str(plain_vit), "-o", str(out)])
        assert result.exit_code == 0
        return out

    def test_full_disk(self, plain_vit: Path, place: Path) -> None:
        before = snapshot(place.parent)
        ran = real_process(
            *("instrument", plain_vit, "-o", place, "--methods", "rollout"),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)),
        )
        assert (ran.returncode, ran.stdout) == (UNUSABLE, "")
        (line,) = ran.stderr.splitlines()
        assert os.strerror(errno.EFBIG) in line
        assert snapshot(place.parent) == before

    def test_interrupt(self, plain_vit: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before, replace = snapshot(place.parent), os.replace
        reached: list[Path] = []

        def interrupted(source: Path, destination: Path) -> None:
            if Path(source) != place and Path(destination) == place and not reached:
                reached.append(source)
                raise KeyboardInterrupt
            replace(source, destination)

        monkeypatch.setattr("os.replace", interrupted)
        command = ["instrument", str(plain_vit), "-o", str(place), "--methods", "rollout"]
        result = CliRunner().invoke(app, command)
        assert (result.exit_code, result.stderr) == (130, "onnxplain: interrupted\n")
        assert reached
        assert snapshot(place.parent) == before

    @pytest.mark.parametrize(
        "stage",
        [
            "reading the model",
            "finding the attention",
            "making the graphs",
            "verifying",
            "writing",
        ],
    )
    def test_interrupt_in_any_stage(
        self, stage: str, plain_vit: Path, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = snapshot(place.parent)
        told: list[str] = []

        def tell(what: str, done: int, total: int) -> None:
            told.append(what)
            if what == stage and done == total - 1:
                raise KeyboardInterrupt

        monkeypatch.setattr("onnxplain.making.stages", lambda: contextlib.nullcontext(tell))
        # As of large models, which are on disk while they are tried.
        monkeypatch.setattr("onnxplain.graphs.proof.trial.SMALL", 0)
        result = CliRunner().invoke(app, ["instrument", str(plain_vit), "-o", str(place)])
        assert (result.exit_code, result.stdout) == (130, "")
        assert result.stderr == "onnxplain: interrupted\n"
        assert told[-1] == stage
        assert snapshot(place.parent) == before


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["vit_nano"], "timm has no model 'vit_nano'"),
        (["test_vit", "--checkpoint", "gone.safetensors"], "gone.safetensors: no such file"),
        (["test_vit", "--labels", "gone.txt"], "gone.txt"),
        (["test_vit", "--methods", "lime"], "unknown method 'lime'"),
        (["test_vit", "--img-size", "64by64"], "--img-size '64by64'"),
        (["test_vit", "--num-classes", "0"], "--num-classes"),
    ],
)
def test_export_refuses(arguments: list[str], expected: str, tmp_path: Path) -> None:
    out = tmp_path / "vit.onnx"
    assert expected in complaint("export", *arguments, "-o", out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--mean", "--std"])
@pytest.mark.parametrize("value", ["0.5", "1,2", "1,2,3,4", "a,b,c", ""])
def test_instrument_refuses_what_is_not_three_numbers(option: str, value: str) -> None:
    line = complaint("instrument", "x.onnx", "-o", "y.onnx", option, value)
    assert f"{option} {value!r}: expected three numbers" in line


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        ("torch", "export", "export"),
        ("onnx", "instrument", "graphs"),
        ("onnx_ir", "export", "export"),
    ],
)
def test_missing_package_says_what_to_install(
    missing: str, command: str, extra: str, tmp_path: Path
) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from onnxplain.__main__ import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, command, "test_vit", "-o", str(tmp_path / "x.onnx")],
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stdout) == (UNUSABLE, "")
    (line,) = ran.stderr.splitlines()
    assert missing in line
    assert "pip install onnxplain[" in line
    assert extra in line.partition("pip install")[2]


def test_debug_shows_where_an_error_comes_from(tmp_path: Path) -> None:
    ran = real_process("inspect", tmp_path / "no.onnx", "--debug")
    assert ran.returncode == UNUSABLE
    first, *_, last = ran.stderr.splitlines()
    assert first.startswith("Traceback")
    assert last.startswith("onnxplain: ")


def test_interrupt_that_an_extension_module_hid(
    toy_file: ToyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("initialization failed") from error

    monkeypatch.setattr("onnxplain.runtime.model.Model.__init__", loading)
    assert complaint("inspect", toy_file(), status=130) == "onnxplain: interrupted"


def test_an_unforeseen_error_is_one_line_too(
    toy_file: ToyFile, cat: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of a\nkind")

    monkeypatch.setattr("onnxplain.runtime.dispatch.compute", broken)
    line = complaint("explain", toy_file(), cat, "-o", tmp_path / "out")
    assert "unexpected ZeroDivisionError: of a kind (--debug shows where)" in line
