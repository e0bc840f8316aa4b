"""The demo: the bundled model, what is written, and what is counted."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from typer.testing import CliRunner

from onnxplain import Explainer
from onnxplain.cli import app
from onnxplain.demo.scenes import LABELS, two_garment_scenes
from onnxplain.outputs import METHODS

SCENES, SEED = 6, 0
LARGEST_MODEL = 5_000_000  # bytes; it is part of every installation


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as path:
        assert path.stat().st_size <= LARGEST_MODEL
        return Explainer(path, device="cpu")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("demo") / "out"
    command = ["demo", f"--scenes={SCENES}", f"--seed={SEED}", "--json", "-o", str(folder)]
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, result.stderr) == (0, "")
    return folder, json.loads(result.stdout)


def test_bundled_model_knows_the_garments(explainer: Explainer) -> None:
    assert explainer.contract.labels == LABELS
    assert explainer.methods == tuple(METHODS)


def test_writes_a_panel_for_each_scene_and_one_of_all(shown: tuple[Path, Any]) -> None:
    folder, told = shown
    expected = [folder / f"scene-{i}.png" for i in range(1, SCENES + 1)]
    assert told["pictures"] == [str(path) for path in expected]
    assert sorted(folder.iterdir()) == sorted([*expected, folder / "demo.png"])
    sizes = [Image.open(path).size for path in expected]
    assert Image.open(folder / "demo.png").size == (sizes[0][0], sum(h for _, h in sizes))


def test_counts_the_maps_that_are_largest_on_the_garment(
    shown: tuple[Path, Any], explainer: Explainer
) -> None:
    # The model's input is the scene itself, so the heatmap's places are the scene's.
    expected = dict.fromkeys(METHODS, 0)
    for scene in two_garment_scenes(SCENES, SEED):
        for method in METHODS:
            for target, mask in zip(scene.classes, scene.masks, strict=True):
                one = explainer.explain(scene.image, method=method, target=target)
                place = np.unravel_index(one.heatmap[0].argmax(), mask.shape)
                expected[method] += bool(mask[place]) and not one.degenerate[0]
    assert shown[1]["hits"] == expected
    assert shown[1]["asked"] == 2 * SCENES


def test_shows_which_methods_tell_classes_apart(shown: tuple[Path, Any]) -> None:
    # The garments do not overlap, so a map that is the same for both points at one at most.
    hits = shown[1]["hits"]
    assert max(hits["raw_attention"], hits["rollout"]) <= SCENES
    assert min(hits["gradient_rollout"], hits["generic_attention"]) > SCENES


def test_prints_the_counts_and_where_the_pictures_are(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--scenes", "1", "-o", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (*METHODS, "of 2", str(tmp_path / "demo.png")):
        assert part in result.stdout


def test_model_was_made_from_the_weights_beside_it(explainer: Explainer) -> None:
    """The digest in the contract: SHA-256 over each tensor's name and bytes, in order of names."""
    digest = hashlib.sha256()
    with as_file(files("onnxplain.demo").joinpath("vit_garments.safetensors")) as path:
        weights = load_file(path)
    for name, array in sorted(weights.items()):
        digest.update(name.encode() + array.tobytes())
    assert explainer.contract.source.weights_sha256 == digest.hexdigest()
