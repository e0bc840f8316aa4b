"""Layers that do not have all tokens: a class token that comes in late, or that alone attends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small_vits import small_vit
from timm.models.cait import Cait
from timm.models.convit import ConVit

import onnxplain as ox
from onnxplain.contract import Readout
from onnxplain.outputs import METHODS

Array = NDArray[Any]
IMAGES = np.random.default_rng(0).normal(size=(3, 3, 32, 32)).astype(np.float32)
TARGET = [4, 0, 9]
SAME = 1e-5  # float32 on both sides, of the largest value
PATCHES = 16

MODELS: dict[str, Callable[[], Any]] = {
    "class attention": lambda: small_vit(Cait, depth_token_only=2),
    "the class token comes in late": lambda: small_vit(ConVit, depth=3, local_up_to_layer=2),
}
LAYERS = {
    "class attention": [("global", 1), ("global", 1), ("class", 0), ("class", 0)],
    "the class token comes in late": [("global", 1), ("global", 1), ("global", 0)],
}


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def explainer(name: str, tmp_path_factory: pytest.TempPathFactory) -> ox.Explainer:
    path = tmp_path_factory.mktemp("late") / "vit.onnx"
    report = ox.export(MODELS[name](), path)
    assert report.methods == tuple(METHODS)
    assert report.verification is not None
    assert max(report.verification["differences"].values()) < SAME
    return ox.Explainer(path, device="cpu", threads=1)


def test_what_the_contract_says(name: str, explainer: ox.Explainer) -> None:
    contract = explainer.contract
    assert [(layer.kind, layer.first_token) for layer in contract.layers] == LAYERS[name]
    assert contract.tokens.prefix == ("cls",)
    assert contract.readout == Readout(kind="cls", ranges=((0, 1),))


def back(row: Array, layers: list[Array], normalised: bool) -> Array:
    """A row over class token and patches, taken back through the layers; each as its own case."""
    token, patches = row[:, :1], row[:, 1:]
    for matrix in reversed(layers):
        total = matrix.sum(-1) + 1 if normalised else np.ones(matrix.shape[:-1])
        if matrix.shape[1:] == (PATCHES, PATCHES):
            patches = patches / total
            patches = patches + (patches[:, None] @ matrix)[:, 0]
        elif matrix.shape[1:] == (1, PATCHES + 1):
            token = token / total
            spread = token * matrix[:, 0]
            token, patches = token + spread[:, :1], patches + spread[:, 1:]
        else:
            both = np.concatenate([token, patches], 1) / total
            both = both + (both[:, None] @ matrix)[:, 0]
            token, patches = both[:, :1], both[:, 1:]
    return patches.reshape(-1, 4, 4)


def test_maps(explainer: ox.Explainer) -> None:
    taps = explainer.taps(IMAGES, target=TARGET)

    def layers(kind: list[Any] | None) -> list[Array]:
        assert kind is not None
        return [np.asarray(layer, np.float64) for layer in kind]

    attention, gradient = layers(taps.attention), layers(taps.attention_gradient)
    relevance = layers(taps.attention_relevance)
    start = np.zeros((3, PATCHES + 1))
    start[:, 0] = 1

    def weighted(others: list[Array]) -> list[Array]:
        return [np.maximum(a * g, 0).mean(1) for a, g in zip(others, gradient, strict=True)]

    expected = {
        "rollout": back(start, [a.mean(1) for a in attention], normalised=True),
        "generic_attention": back(start, weighted(attention), normalised=False),
        "transformer_attribution": back(start, weighted(relevance), normalised=False),
        "raw_attention": attention[-1].mean(1)[:, 0, 1:].reshape(3, 4, 4),
    }
    for method, grid in expected.items():
        found = explainer.explain(IMAGES, method=method, target=TARGET).grid
        assert grid.any()
        np.testing.assert_allclose(found, grid, rtol=0, atol=SAME * np.abs(grid).max())


def test_every_method_gives_a_map(explainer: ox.Explainer) -> None:
    for result in explainer.explain_each(IMAGES, target=TARGET):
        assert np.isfinite(result.grid).all()
        assert result.heatmap.shape == (3, 32, 32)


def test_two_prefix_tokens_leave_no_single_query(tmp_path: Path) -> None:
    """Of which of them the query of class attention is, the graph does not tell."""

    class Two(Cait):
        def forward_features(self, x: Any) -> Any:
            x = self.patch_embed(x) + self.pos_embed
            x = self.blocks(torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1))
            token = self.cls_token.expand(x.shape[0], -1, -1)
            for block in self.blocks_token_only:
                token = block(x, token)
            return self.norm(torch.cat([token, x], 1))

    with pytest.raises(ox.UnsupportedModelError, match="2 tokens stand before it"):
        ox.export(small_vit(Two), tmp_path / "vit.onnx")
