"""A real classifier, photos and our own preprocessing, from export to the maximum of a map."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

import onnxplain as ox
from onnxplain.differences import is_relevance
from onnxplain.export.verify import relative_difference
from onnxplain.outputs import INPUT_RELEVANCE_ATTNLRP, METHODS, map_name
from onnxplain.runtime import dispatch
from onnxplain.runtime.preprocessing import prepare

# Single precision, twelve layers: batch size and graph optimisation change the order of sums.
TOLERANCE = 1e-5

GRADIENT_METHODS = ("gradcam", "attention_gradcam", "gradient_rollout", "generic_attention")

# Outline of the cat in chelsea.png, (x, y) in pixels of the picture, without its whiskers.
CAT = [
    *[(40, 0), (402, 0), (378, 44), (360, 70), (357, 100), (361, 124), (355, 161), (348, 191)],
    *[(321, 214), (315, 234), (311, 254), (301, 278), (301, 300), (0, 300), (0, 150), (35, 100)],
]


@pytest.fixture(scope="module")
def vit(shared_real: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "vit.onnx"
    ox.export(
        "vit_tiny_patch16_224",
        path,
        checkpoint=shared_real / "vit_tiny_tinyimagenet200.safetensors",
        num_classes=200,
        labels=shared_real / "labels.txt",
    )
    return path


@pytest.fixture(scope="module")
def explainer(vit: Path) -> ox.Explainer:
    return ox.Explainer(vit, device="cpu", threads=2)


@pytest.mark.parametrize(
    ("picture", "label", "probability"),
    [
        ("chelsea.png", "tabby", 0.8614),
        ("coffee.png", "espresso", 0.9999),
        ("china.jpg", "lakeside", 0.8413),
    ],
)
def test_prediction(
    picture: str, label: str, probability: float, explainer: ox.Explainer, shared_real: Path
) -> None:
    result = explainer.explain(shared_real / picture, method="rollout")
    assert result.labels == (label,)
    assert softmax(result.logits)[0].max() == pytest.approx(probability, abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_finished_maps_are_those_of_numpy(
    method: str, explainer: ox.Explainer, vit: Path, shared_real: Path
) -> None:
    """Both from one run: relevance of two runs that compute otherwise differs by more."""
    names = [map_name(method), *METHODS[method].outputs(len(explainer.contract.layers))]
    without_maps = dataclasses.replace(explainer.contract, maps={})
    session = onnxruntime.InferenceSession(vit, providers=["CPUExecutionProvider"])
    for picture in ("chelsea.png", "coffee.png", "china.jpg"):
        ((pixels, _),) = prepare(shared_real / picture, explainer.contract.input)
        arrays = session.run(names, {"pixel_values": pixels[None], "target": np.array([7])})
        values = dict(zip(names, arrays, strict=True))
        expected = dispatch.compute(method, values, without_maps, {})
        assert relative_difference(values[map_name(method)], expected) < TOLERANCE, picture


@pytest.mark.parametrize("method", GRADIENT_METHODS)
def test_tabby_is_on_the_cat(method: str, explainer: ox.Explainer, shared_real: Path) -> None:
    """The maximum is on the cat, or on a patch that touches one (whiskers, outline)."""
    result = explainer.explain(shared_real / "chelsea.png", method=method, target="tabby")
    assert not result.degenerate[0]
    picture = Image.open(shared_real / "chelsea.png")
    mask = Image.new("L", picture.size)
    ImageDraw.Draw(mask).polygon(CAT, fill=1)
    side = min(picture.size) * 224 / 256  # of the centre crop, in pixels of the picture
    patch = side / 14
    row, column = np.unravel_index(result.grid[0].argmax(), (14, 14))
    left = (picture.width - side) / 2 + (column - 1) * patch
    top = (picture.height - side) / 2 + (row - 1) * patch
    around = mask.crop((round(left), round(top), round(left + 3 * patch), round(top + 3 * patch)))
    assert np.asarray(around).any()


@pytest.mark.parametrize(
    "method", ["gradcam", "gradient_rollout", "generic_attention", "transformer_attribution"]
)
@pytest.mark.parametrize("order", [("tabby", "espresso"), ("espresso", "tabby")])
def test_two_classes_in_one_picture_are_told_apart(
    method: str, order: tuple[str, str], explainer: ox.Explainer, shared_real: Path
) -> None:
    files = {"tabby": "chelsea.png", "espresso": "coffee.png"}
    scene = Image.new("RGB", (256, 256), (128, 128, 128))
    for place, label in enumerate(order):
        scene.paste(centre_square(shared_real / files[label], 128), (128 * place, 64))
    for place, label in enumerate(order):
        grid = explainer.explain(scene, method=method, target=label).grid[0]
        halves = grid[:, :7], grid[:, 7:]
        assert halves[place].max() > halves[1 - place].max()
        assert halves[place].sum() > 1.5 * halves[1 - place].sum()


def test_batches_agree(explainer: ox.Explainer, shared_real: Path) -> None:
    names = ("chelsea.png", "coffee.png", "china.jpg")
    pictures = [shared_real / names[i % 3] for i in range(8)]
    targets = [f"{label}" for label in ("tabby", "snail", "espresso", "koala") * 2]
    together = {one.method: one for one in explainer.explain_each(pictures, target=targets)}
    assert together.keys() == set(METHODS)
    for count in (1, 2):
        for start in range(0, 4, count):
            part = slice(start, start + count)
            for alone in explainer.explain_each(pictures[part], target=targets[part]):
                whole = together[alone.method]
                for ours, theirs in zip(alone.grid, whole.grid[part], strict=True):
                    assert relative_difference(ours, theirs) < TOLERANCE, alone.method
                assert relative_difference(alone.logits, whole.logits[part]) < TOLERANCE


def test_a_call_leaves_nothing_behind(explainer: ox.Explainer, shared_real: Path) -> None:
    one, two = shared_real / "chelsea.png", shared_real / "coffee.png"
    calls = (explainer.explain_each(p) for p in (one, two, one))
    for first, other, again in zip(*calls, strict=True):
        assert np.array_equal(first.grid, again.grid)
        assert np.array_equal(first.logits, again.logits)
        assert not np.array_equal(first.grid, other.grid)


def test_every_optimisation_level_gives_the_same(vit: Path) -> None:
    levels = onnxruntime.GraphOptimizationLevel
    image = np.random.default_rng(0).normal(size=(2, 3, 224, 224)).astype(np.float32)
    feed = {"pixel_values": image, "target": np.array([3, 150])}
    names, expected = run(vit, levels.ORT_DISABLE_ALL, feed)
    for level in (levels.ORT_ENABLE_BASIC, levels.ORT_ENABLE_EXTENDED, levels.ORT_ENABLE_ALL):
        for name, ours, theirs in zip(names, run(vit, level, feed)[1], expected, strict=True):
            # Relevance that was divided by residual sums near zero: see test_relevance.py.
            attnlrp = name in (INPUT_RELEVANCE_ATTNLRP, map_name("attnlrp"))
            if is_relevance(name) and not attnlrp:
                assert np.isfinite(ours).all(), (level, name)
            else:
                tolerance = 1e-4 if attnlrp else TOLERANCE
                assert relative_difference(ours, theirs) < tolerance, (level, name)


def run(
    path: Path, level: onnxruntime.GraphOptimizationLevel, feed: dict[str, NDArray[np.generic]]
) -> tuple[list[str], list[NDArray[np.float32]]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [v.name for v in session.get_outputs()]
    return names, session.run(names, feed)


def centre_square(path: Path, side: int) -> Image.Image:
    picture = Image.open(path).convert("RGB")
    edge = min(picture.size)
    left, top = (picture.width - edge) // 2, (picture.height - edge) // 2
    square = picture.crop((left, top, left + edge, top + edge))
    return square.resize((side, side), Image.Resampling.BICUBIC)


def softmax(logits: NDArray[np.floating]) -> NDArray[np.floating]:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
