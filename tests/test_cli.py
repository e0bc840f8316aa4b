"""The command line on good input: what it writes, what it prints, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import timm
import typer
from conftest import LABELS, ToyFile, toy_contract
from PIL import Image
from typer.testing import CliRunner, Result

import onnxplain
from onnxplain import console
from onnxplain.cli import app
from onnxplain.export.plain import to_onnx
from onnxplain.inputs import find_pictures, place_results


def onnxplain_command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def done(*arguments: object) -> str:
    """Runs a command that must succeed in silence; its stdout."""
    result = onnxplain_command(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def summary(*arguments: object) -> Any:
    return json.loads(done(*arguments, "--json"))


def picture(path: Path, *, size: tuple[int, int] = (20, 12), seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_version_and_help() -> None:
    assert done("--version") == f"onnxplain {onnxplain.__version__}\n"
    help_text = done("--help")
    for command in ("export", "instrument", "explain", "compare", "inspect", "verify", "demo"):
        assert command in help_text


def test_every_option_says_what_it_takes_and_what_it_is_by_default() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) == 8
    for name, command in commands.items():
        for parameter in command.params:
            text, where = parameter.help or "", f"{name} {parameter.name}"
            assert text.endswith("."), where
            if parameter.default is None and not parameter.required:
                assert "Default: " in text, where
            if parameter.metavar and parameter.metavar[1] == ",":  # a list in one word
                assert re.search(r"(such as|some of) [\w.]+,[\w.]+", text, re.IGNORECASE), where


def test_python_dash_m_is_the_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "onnxplain", "--version"], capture_output=True, text=True, check=True
    )
    assert ran.stdout == f"onnxplain {onnxplain.__version__}\n"


class TestExplain:
    def test_overlay_has_the_originals_size(self, toy_file: ToyFile, tmp_path: Path) -> None:
        cat = picture(tmp_path / "cat.png")
        out = done("explain", toy_file(), cat, "--method", "rollout", "-o", tmp_path / "out")
        written = tmp_path / "out" / "cat.rollout.png"
        assert list((tmp_path / "out").iterdir()) == [written]
        assert str(written) in out
        with Image.open(written) as overlay:
            assert (overlay.size, overlay.mode) == ((20, 12), "RGB")

    def test_heatmap_has_the_models_size(self, toy_file: ToyFile, tmp_path: Path) -> None:
        cat, out = picture(tmp_path / "cat.png"), tmp_path / "cat.heatmap.png"
        done("explain", toy_file(size=(8, 16)), cat, "--kind", "heatmap", "-o", out)
        with Image.open(out) as heatmap:
            assert (heatmap.size, heatmap.mode) == ((16, 8), "L")

    def test_options_reach_the_method(self, toy_file: ToyFile, tmp_path: Path) -> None:
        model, cat, out = toy_file(size=(16, 16)), picture(tmp_path / "cat.png"), tmp_path / "c.npy"
        options: dict[str, Any] = {"head_fusion": "max", "discard_ratio": 0.3, "start_layer": 1}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        done("explain", model, cat, "--method", "rollout", "--kind", "npy", "-o", out, *flags)
        explainer = onnxplain.Explainer(model)
        expected = explainer.explain(cat, method="rollout", **options).grid[0]
        plain = explainer.explain(cat, method="rollout").grid[0]
        np.testing.assert_array_equal(np.load(out), expected)
        assert not np.array_equal(expected, plain)

    def test_alpha_and_colormap_reach_the_overlay(self, toy_file: ToyFile, tmp_path: Path) -> None:
        model, cat, out = toy_file(), picture(tmp_path / "cat.png"), tmp_path / "cat.overlay.png"
        done("explain", model, cat, "--alpha", "0.25", "--colormap", "jet", "-o", out)
        expected = onnxplain.Explainer(model).explain(cat).overlay(alpha=0.25, colormap="jet")[0]
        with Image.open(out) as overlay:
            np.testing.assert_array_equal(np.asarray(overlay), expected)

    @pytest.mark.parametrize("target", ["Egyptian cat", "egyptian CAT", "1"])
    def test_target_by_label_or_number(
        self, toy_file: ToyFile, tmp_path: Path, target: str
    ) -> None:
        cat = picture(tmp_path / "cat.png")
        told = summary("explain", toy_file(), cat, "--target", target, "-o", tmp_path / "out")
        (result,) = told["results"]
        assert (result["target"], result["label"]) == (1, LABELS[1])

    def test_json_tells_what_was_done(self, toy_file: ToyFile, tmp_path: Path) -> None:
        model, cat = toy_file(), picture(tmp_path / "cat.png")
        told = summary("explain", model, cat, "--method", "gradcam", "-o", tmp_path / "out")
        result = onnxplain.Explainer(model).explain(cat, method="gradcam")
        shares = np.exp(result.logits[0].astype(float))
        top = int(result.target[0])
        assert told["results"][0].pop("probability") == pytest.approx(
            shares[top] / shares.sum(),
            rel=1e-12,  # float64 arithmetic on the same logits
        )
        assert told == {
            "model": str(model),
            "device": "cpu",
            "method": "gradcam",
            "kind": "overlay",
            "results": [
                {
                    "input": str(cat),
                    "output": str(tmp_path / "out" / "cat.gradcam.png"),
                    "target": top,
                    "label": LABELS[top],
                    "degenerate": bool(result.degenerate[0]),
                }
            ],
            "failed": [],
        }

    def test_batches_do_not_change_results(self, toy_file: ToyFile, tmp_path: Path) -> None:
        for i in range(5):
            picture(tmp_path / "photos" / f"{i}.png", seed=i)
        model, maps = toy_file(), []
        for size in (1, 2, 8):
            out = tmp_path / f"out{size}"
            done(
                "explain",
                model,
                tmp_path / "photos",
                "--kind=npy",
                f"--batch-size={size}",
                "-o",
                out,
            )
            maps.append([np.load(path) for path in sorted(out.iterdir())])
        assert len(maps[0]) == 5
        # float32 sums of up to 8 tokens, in another order for another batch size
        np.testing.assert_allclose(maps[1], maps[0], rtol=1e-5)
        np.testing.assert_allclose(maps[2], maps[0], rtol=1e-5)

    def test_works_on_a_bundle(self, toy_bundle: Path, tmp_path: Path) -> None:
        cat = picture(tmp_path / "cat.png")
        for method in onnxplain.Explainer(toy_bundle).methods:
            done("explain", toy_bundle, cat, "--method", method, "-o", tmp_path / "out")
            assert (tmp_path / "out" / f"cat.{method}.png").exists()


class TestInputs:
    def test_pictures_of_a_folder_are_told_by_their_suffix(self, tmp_path: Path) -> None:
        for name in ("b.JPG", "a.png", "notes.txt", ".c.png.part", "deep/d.webp"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        found, failures = find_pictures([tmp_path])
        assert list(found.values()) == [Path("a"), Path("b")]
        assert failures == {}
        deep, _ = find_pictures([tmp_path], recursive=True)
        assert list(deep.values()) == [Path("a"), Path("b"), Path("deep/d")]

    def test_a_file_is_taken_whatever_its_suffix(self, tmp_path: Path) -> None:
        found, _ = find_pictures([tmp_path / "scan.dat"])
        assert found == {tmp_path / "scan.dat": Path("scan")}

    def test_same_names_from_two_places_do_not_overwrite_each_other(self, tmp_path: Path) -> None:
        names = ("x/cat.png", "y/cat.png", "y/Cat.jpg", "y/cat-2.png")
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        found, _ = find_pictures(tmp_path / name for name in names)
        assert len({str(place).casefold() for place in found.values()}) == len(names)

    def test_a_picture_named_twice_comes_once(self, tmp_path: Path) -> None:
        (tmp_path / "cat.png").touch()
        found, _ = find_pictures([tmp_path / "cat.png", tmp_path])
        assert list(found) == [tmp_path / "cat.png"]

    def test_a_name_with_dots_is_kept_whole(self, tmp_path: Path) -> None:
        found, _ = find_pictures([tmp_path / "cat.2024.jpg"])
        (place,) = place_results(found, tmp_path, method="rollout", kind="npy").values()
        assert place == tmp_path / "cat.2024.rollout.npy"


class TestCompare:
    def test_a_row_for_each_of_the_likeliest_classes(
        self, toy_file: ToyFile, tmp_path: Path
    ) -> None:
        model, cat = toy_file(), picture(tmp_path / "cat.png")
        out = tmp_path / "new" / "panel.png"
        told = summary("compare", model, cat, "-o", out, "--top", "3")
        logits = onnxplain.Explainer(model).taps(cat, kinds=()).logits[0]
        assert [row["target"] for row in told["classes"]] == (-logits).argsort().tolist()
        assert sum(row["probability"] for row in told["classes"]) == pytest.approx(1, rel=1e-12)
        assert told["methods"] == list(toy_contract().methods)
        with Image.open(out) as panel:
            three_rows = panel.size
        done("compare", model, cat, "-o", out, "--top", "1")
        with Image.open(out) as panel:
            assert panel.width == three_rows[0]
            assert panel.height < three_rows[1]

    def test_named_classes(self, toy_file: ToyFile, tmp_path: Path) -> None:
        arguments = ("compare", toy_file(), picture(tmp_path / "cat.png"), "-o", tmp_path / "p.png")
        told = summary(*arguments, "--target", "espresso", "--target", "0")
        assert [row["label"] for row in told["classes"]] == ["espresso", "tabby"]

    def test_blank_maps_are_marked(self, toy_file: ToyFile, tmp_path: Path) -> None:
        # One grey everywhere: every patch gets the same attention, so no map has anything to show.
        grey = tmp_path / "grey.png"
        Image.new("RGB", (8, 8), (90, 90, 90)).save(grey)
        model, out = toy_file(), tmp_path / "p.png"
        told = summary("compare", model, grey, "-o", out, "--top", "1")
        assert "rollout" in told["classes"][0]["degenerate"]
        assert "blank maps" in done("compare", model, grey, "-o", out)
        pixels = np.asarray(Image.open(out).convert("RGB")).astype(int)
        assert (
            (pixels[..., 0] > 180) & (pixels[..., 1:].max(axis=-1) < 60)
        ).any()  # struck through


class TestInspect:
    @pytest.mark.parametrize("kind", ["file", "bundle"])
    def test_json_is_the_contract(self, kind: str, toy_file: ToyFile, toy_bundle: Path) -> None:
        model = toy_file() if kind == "file" else toy_bundle
        contract = onnxplain.Explainer(model).contract
        assert summary("inspect", model) == json.loads(contract.to_json())

    def test_table_says_what_matters(self, toy_file: ToyFile) -> None:
        text = done("inspect", toy_file(size=(8, 16)))
        for part in (
            *LABELS,
            *toy_contract().methods,
            "8 x 16",
            "2 x 4 patches",
            "cls",
            "bilinear",
        ):
            assert part in text


def heed_interrupts() -> None:
    """A shell has them ignored by what it runs in the background, and its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Waits, with its files half done, for a signal.
_WAITS = """
import time
from onnxplain.__main__ import main
from onnxplain.graphs.files import writing

def waiting(*_):
    print("reached", flush=True)
    time.sleep(60)

writing._check_written = waiting
main()
"""


class TestInterrupt:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_leaves_no_temporary_folder(self, number: signal.Signals, tmp_path: Path) -> None:
        plain = tmp_path / "plain.onnx"
        module = timm.create_model("test_vit", num_classes=3, img_size=32)
        ir.save(to_onnx(module, image_size=(32, 32)), plain)
        command = ["instrument", str(plain), "-o", str(tmp_path / "explained.onnx")]
        with subprocess.Popen(
            [sys.executable, "-c", _WAITS, *command, "--methods", "rollout"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "reached\n"
            assert list(tmp_path.glob(".explained.onnx.*/*"))
            process.send_signal(number)
            _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (128 + number, "onnxplain: interrupted\n")
        assert list(tmp_path.iterdir()) == [plain]

    def test_leaves_no_half_written_file(self, toy_file: ToyFile, tmp_path: Path) -> None:
        first = picture(tmp_path / "photos" / "0.png", size=(1000, 800))
        for i in range(1, 400):
            os.link(first, tmp_path / "photos" / f"{i}.png")
        out = tmp_path / "out"
        command = ["explain", str(toy_file()), str(tmp_path / "photos"), "-o", str(out)]
        with subprocess.Popen(
            [sys.executable, "-m", "onnxplain", *command],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_interrupts,
        ) as process:
            deadline = time.monotonic() + 60
            while not any(out.glob("*.png")) and time.monotonic() < deadline:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (130, "onnxplain: interrupted\n")
        written = list(out.iterdir())
        assert 0 < len(written) < 400
        for path in written:
            with Image.open(path) as overlay:
                overlay.load()  # raises where the file is cut off

    def test_is_heeded_where_it_was_swallowed(self, capsys: pytest.CaptureFixture[str]) -> None:
        """As by an import that may fail, which takes any error for a missing library."""

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        own = typer.Typer(cls=console.Commands)

        @own.callback()
        def several() -> None:
            """Makes `swallow` one of several commands."""

        @own.command()
        def swallow() -> None:
            with console.progress("steps", 2) as step:
                step()
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
                step()
                print("went on")

        with pytest.raises(SystemExit) as ended:
            own(["swallow"])
        assert ended.value.code == 130
        assert capsys.readouterr() == ("", "onnxplain: interrupted\n")
        assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("exported")
    (folder / "labels.txt").write_text("".join(f"class {i}\n" for i in range(7)))
    told = summary(
        *("export", "test_vit", "--num-classes", 7, "--labels", folder / "labels.txt"),
        *("--img-size", "64x96", "--methods", "rollout,gradcam", "-o", folder / "vit.onnx"),
    )
    return folder / "vit.onnx", told


class TestModelsFromTorch:
    """The way from a timm name to a heatmap, by commands alone."""

    def test_export(self, exported: tuple[Path, Any]) -> None:
        path, told = exported
        assert told["path"] == str(path)
        assert told["files"] == {"vit.onnx": path.stat().st_size}
        assert told["methods"] == ["rollout", "gradcam"]
        assert told["verification"]["differences"]["logits"] <= 1e-4
        contract = onnxplain.Explainer(path).contract
        assert contract.input.size == (64, 96)
        assert contract.labels == tuple(f"class {i}" for i in range(7))

    def test_explain(self, exported: tuple[Path, Any], tmp_path: Path) -> None:
        cat = picture(tmp_path / "cat.png", size=(200, 150))
        told = summary("explain", exported[0], cat, "--target", "class 3", "-o", tmp_path / "out")
        assert told["method"] == "gradcam"
        assert told["results"][0]["target"] == 3

    def test_instrument(self, tmp_path: Path) -> None:
        module = timm.create_model("test_vit", num_classes=3, img_size=(64, 96))
        ir.save(to_onnx(module, image_size=(64, 96)), tmp_path / "plain.onnx")
        (tmp_path / "labels.txt").write_text("\n".join(LABELS))
        out = tmp_path / "bundle"
        ran = onnxplain_command(
            *(
                "instrument",
                tmp_path / "plain.onnx",
                "-o",
                out,
                "--labels",
                tmp_path / "labels.txt",
            ),
            *("--mean", "0.5,0.4,0.3", "--std", "0.2, 0.3, 0.4", "--crop-pct", "0.9"),
            *("--interpolation", "bilinear", "--methods", "rollout, generic_attention"),
            *("--crop-mode", "squash", "--json"),
        )
        assert (ran.exit_code, ran.stderr.strip()) == (
            0,
            "onnxplain: assumed color_order RGB, which the graph does not tell",
        )
        told = json.loads(ran.stdout)
        assert told["methods"] == ["rollout", "generic_attention"]
        assert told["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
        contract = onnxplain.Explainer(out).contract
        assert contract.labels == LABELS
        assert contract.input.mean == (0.5, 0.4, 0.3)
        assert contract.input.std == (0.2, 0.3, 0.4)
        assert (contract.input.crop_pct, contract.input.interpolation) == (0.9, "bilinear")
        assert contract.input.crop_mode == "squash"
        done("explain", out, picture(tmp_path / "cat.png"), "-o", tmp_path / "cat.overlay.png")

    def test_what_instrument_assumes(self, tmp_path: Path) -> None:
        module = timm.create_model("test_vit", num_classes=3, img_size=64)
        plain = tmp_path / "plain.onnx"
        ir.save(to_onnx(module, image_size=(64, 64)), plain)
        rest = ("-o", tmp_path / "out.onnx", "--methods", "rollout", "--no-verify")
        ran = onnxplain_command("instrument", plain, *rest, "--mean", "0,0,0")
        assert ran.exit_code == 0
        assert "assumed std (0.229, 0.224, 0.225), crop_pct 1.0, crop_mode center" in ran.stderr
        assert "interpolation bicubic, color_order RGB, which the graph does not" in ran.stderr
        wrong = onnxplain_command("instrument", plain, *rest, "--crop-mode", "stretch")
        assert wrong.exit_code == 2
