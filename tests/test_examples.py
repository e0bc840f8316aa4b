"""The C++ example's own part, and the code of docs/portability.md."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_vits import small_vit

import onnxplain as ox
from benchmarks.portability import BUNDLED, PAGE
from benchmarks.runtimes import BUILD, NODE, REFERENCE, RUNTIMES, Case

LABELS = [
    'a "quoted" one',
    "back\\slash",
    "naïve, 猫",
    '", "',
    "[5]",
    *(f"{i}" for i in range(5, 10)),
]


@pytest.fixture(scope="module", params=["openvino", "onnxruntime"])
def program(request: Any) -> Path:
    name = {"openvino": "OpenVINO, C++", "onnxruntime": "onnxruntime, C++"}[request.param]
    if missing := RUNTIMES[name].missing():
        pytest.skip(f"{name} {missing}")
    return BUILD / f"explain_{request.param}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with odd labels, one without maps, and pictures."""
    folder = tmp_path_factory.mktemp("example")
    methods = ["rollout", "gradcam"]
    files: dict[str, dict[str, Any]] = {
        "maps": {"heatmaps": True, "outputs": "maps", "labels": LABELS},
        "several": {"targets": 2},
        "taps": {"outputs": "taps"},
    }
    for name, options in files.items():
        path = folder / f"{name}.onnx"
        ox.export(small_vit(), path, methods=methods, verify=False, **options)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 3), np.uint8)
    Image.fromarray(pixels[:32]).save(folder / "good.ppm")
    Image.fromarray(pixels).save(folder / "tall.ppm")
    good = (folder / "good.ppm").read_bytes()
    (folder / "comment.ppm").write_bytes(good.replace(b"P6\n", b"P6 # a comment\n", 1))
    (folder / "short.ppm").write_bytes(good[:-1])
    (folder / "deep.ppm").write_bytes(good.replace(b"255", b"511", 1))
    return folder


def explain(program: Path, folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_classes_have_their_labels(program: Path, folder: Path) -> None:
    done = explain(program, folder, "maps.onnx", "comment.ppm", "--top", 10)
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=3) for line in done.stdout.splitlines()[1:11]]
    assert {int(line[2]): line[3] for line in lines} == dict(enumerate(LABELS))
    assert sum(float(line[0]) for line in lines) == pytest.approx(1, abs=1e-3)


def test_the_heatmap_as_a_picture(program: Path, folder: Path) -> None:
    words = ("maps.onnx", "good.ppm", "--target", 3, "--method", "gradcam", "--pgm", "map.pgm")
    assert explain(program, folder, *words).returncode == 0
    picture = np.asarray(Image.open(folder / "good.ppm"))
    expected = REFERENCE.run(Case(folder / "maps.onnx", picture[None], [3]))["heatmap.gradcam"][0]
    found = np.asarray(Image.open(folder / "map.pgm"))
    assert np.abs(found - 255 * expected).max() <= 0.5 + 255 * 1e-4  # rounded


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("", 2, "usage: "),
        ("maps.onnx good.ppm --colour 3", 2, "unknown option --colour"),
        ("maps.onnx good.ppm --target", 2, "--target: expected a value"),
        ("maps.onnx good.ppm --target tabby", 2, "--target tabby: expected a whole number"),
        ("maps.onnx good.ppm --target 10", 2, "--target 10: the model has 10 classes"),
        ("maps.onnx good.ppm --method lrp", 2, "no map of lrp; it has rollout, gradcam"),
        ("maps.onnx good.ppm --pgm no/map.pgm", 1, "no/map.pgm: cannot be written"),
        ("taps.onnx good.ppm", 2, "no maps; export it with --outputs maps"),
        ("several.onnx good.ppm", 2, "the file explains 2 classes at once"),
        ("maps.onnx none.ppm", 1, "none.ppm: cannot be opened"),
        ("maps.onnx maps.onnx", 1, "maps.onnx: not a binary PPM picture"),
        ("maps.onnx short.ppm", 1, "3071 bytes of pixels, expected 3072"),
        ("maps.onnx deep.ppm", 1, "values up to 511, expected 255"),
        ("maps.onnx tall.ppm", 1, "the picture has 32x64 pixels, the model takes 32x32"),
        ("none.onnx good.ppm", 1, "none.onnx"),
        ("good.ppm good.ppm", 1, "good.ppm"),
    ],
)
def test_errors_are_one_line(
    program: Path, folder: Path, words: str, status: int, message: str
) -> None:
    done = explain(program, folder, *words.split())
    assert done.returncode == status
    assert message in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("error: ")


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def test_code_of_the_page(tmp_path: Path) -> None:
    shutil.copy(BUNDLED, tmp_path / "vit.onnx")
    require, openvino = blocks("python")
    subprocess.run([sys.executable, "-c", require], cwd=tmp_path, check=True)
    if not RUNTIMES["OpenVINO, Python"].missing():
        command = [sys.executable, "-c", openvino]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        assert done.stdout.startswith("[[[")
    if not RUNTIMES["onnxruntime-node"].missing():
        (tmp_path / "node_modules").symlink_to(NODE / "node_modules")
        (script,) = blocks("js")
        (tmp_path / "explain.mjs").write_text(script, encoding="utf-8")
        command = ["node", "explain.mjs"]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        assert done.stdout.split() == ["[", "1,", "8,", "8", "]"]
