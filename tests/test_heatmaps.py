"""Heatmaps as outputs of the graph: those that the runtime draws, which are the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from small_vits import small_vit
from timm.models.resnet import BasicBlock, ResNet

import onnxplain as ox
from onnxplain.export.plain import to_onnx
from onnxplain.outputs import METHODS, heatmap_name

SAME = 1e-5  # of 1: positions and shares of pixels in single precision

MODELS: dict[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "square": (small_vit, (32, 32)),
    "not square": (lambda: small_vit(img_size=(24, 40)), (24, 40)),
    "a strip left over": (lambda: small_vit(img_size=(35, 44)), (35, 44)),
    "convolutional": (lambda: ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10).eval(), (96, 64)),
}


def run(path: Path, pixels: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {"pixel_values": pixels}), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_heatmaps_are_those_of_the_runtime(name: str, tmp_path: Path) -> None:
    build, size = MODELS[name]
    path = tmp_path / "x.onnx"
    ox.instrument(
        to_onnx(build(), image_size=size),
        path,
        heatmaps=True,
        contract={"input": {"size": size}},
    )
    images = np.random.default_rng(0).normal(size=(3, 3, *size)).astype(np.float32)
    found = run(path, images)
    explainer = ox.Explainer(path, device="cpu")
    for result in explainer.explain_each(images):
        heatmap = found[heatmap_name(result.method)]
        assert heatmap.shape == (3, *size)
        assert not result.degenerate.any()
        assert heatmap.min() == 0 and heatmap.max() == 1
        np.testing.assert_allclose(heatmap, result.heatmap, rtol=0, atol=SAME)


def test_any_size(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    ox.export(small_vit(dynamic_img_size=True), path, heatmaps=True, verify=False)
    explainer = ox.Explainer(path, device="cpu")
    for size in ((32, 32), (24, 56), (64, 8)):
        images = np.random.default_rng(0).normal(size=(2, 3, *size)).astype(np.float32)
        found = run(path, images)
        for result in explainer.explain_each(images):
            heatmap = found[heatmap_name(result.method)]
            np.testing.assert_allclose(heatmap, result.heatmap, rtol=0, atol=SAME)


def test_degenerate_maps_are_zero(tmp_path: Path) -> None:
    """The same picture everywhere and no positions: all patches are alike."""
    module = small_vit(pos_embed="none", class_token=False, global_pool="avg")
    path = tmp_path / "x.onnx"
    ox.instrument(to_onnx(module, image_size=(32, 32)), path, heatmaps=True)
    images = np.full((2, 3, 32, 32), 0.5, np.float32)
    images[1] = np.nan
    found = run(path, images)
    results = {result.method: result for result in ox.Explainer(path).explain_each(images)}
    flat = [method for method, result in results.items() if result.degenerate.all()]
    assert {"rollout", "gradcam", "generic_attention"} <= set(flat)
    for method in METHODS:
        if method in flat:
            assert not found[heatmap_name(method)].any(), method
        else:
            assert not found[heatmap_name(method)][1].any(), method
