"""A map shows a patch where it is: with registers, two head tokens, odd grids, pooling heads.

Without position embeddings a transformer cannot tell patches apart that look alike. On a picture
that is flat but for one patch, every map is flat but for that patch, whatever the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_vits import CONFIGURATIONS, small_vit, stir
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.tnt import TNT

import onnxplain as ox
from onnxplain.outputs import METHODS

MAPS = tuple(method for method, needs in METHODS.items() if needs.pixels is None)
FLAT = 1e-3  # of how far the patch stands out; float32, whose sums depend on the place
NOISE = 3e-6  # of the largest value: sums of up to 846 numbers in float32

REGISTERS = ("reg0", "reg1", "reg2", "reg3")


def many(size: int, **changes: Any) -> Any:
    """As many tokens as large models have, and next to nothing besides."""
    return small_vit(img_size=size, patch_size=4, embed_dim=16, num_heads=2, **changes)


MODELS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "class token": (CONFIGURATIONS["class token"], ("cls",)),
    "mean": (CONFIGURATIONS["mean pooling, no class token"], ()),
    "distilled": (CONFIGURATIONS["distilled"], ("cls", "dist")),
    "registers": (CONFIGURATIONS["registers"], ("cls", "reg0", "reg1", "reg2", "reg3")),
    "a strip left out": (lambda: small_vit(img_size=(39, 45)), ("cls",)),
    "not square": (CONFIGURATIONS["64 x 32 pixels"], ("cls",)),
    "pooling behind registers": (
        lambda: small_vit(global_pool="map", class_token=True, reg_tokens=1),
        ("cls", "reg0"),
    ),
    "class attention": (lambda: small_vit(Cait), ("cls",)),
    "attention within patches": (lambda: small_tnt(), ("cls",)),
    "distilled, not square": (
        lambda: small_vit(VisionTransformerDistilled, img_size=(24, 40)),
        ("cls", "dist"),
    ),
    "registers, not square": (
        lambda: small_vit(img_size=(40, 24), reg_tokens=4),
        ("cls", *REGISTERS),
    ),
    "201 tokens": (lambda: many(56, reg_tokens=4), ("cls", *REGISTERS)),
    "846 tokens": (lambda: many(116, reg_tokens=4), ("cls", *REGISTERS)),
    "256 tokens": (lambda: many(64, class_token=False, global_pool="avg"), ()),
    "260 tokens": (
        lambda: many(64, class_token=False, global_pool="avg", reg_tokens=4),
        REGISTERS,
    ),
}
SQUARES = {"201 tokens": 14, "846 tokens": 29, "256 tokens": 16, "260 tokens": 16}


def small_tnt(cls: type[TNT] = TNT, **changes: Any) -> Any:
    """Two blocks of attention within patches of 16 pixels and between them."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {
        "img_size": (48, 32),
        "embed_dim": 32,
        "inner_dim": 8,
        "depth": 2,
        "num_classes": 10,
    }
    module: Any = stir(cls(num_heads_inner=2, num_heads_outer=4, **sizes, **changes).eval())
    module.image_size = (48, 32)  # it does not say
    return module


@pytest.mark.parametrize("name", MODELS)
def test_the_only_patch_that_differs(name: str, tmp_path: Path) -> None:
    build, prefix = MODELS[name]
    module = build()
    for key in ("pos_embed", "patch_pos"):
        getattr(module, key, torch.zeros(1)).data.zero_()
    contract = ox.export(module, tmp_path / "vit.onnx", methods=MAPS, verify=False).contract
    assert contract.tokens.prefix == prefix
    rows, columns = contract.tokens.grid
    if name in SQUARES:
        assert name == f"{contract.tokens.count} tokens"
        assert (rows, columns) == (SQUARES[name], SQUARES[name])
    (height, width), random = contract.input.size, np.random.default_rng(0)
    side = (contract.tokens.patch or (height // rows,))[0]
    assert (height // side, width // side) == (rows, columns)
    places = [(0, 0), (rows - 1, 0), (rows // 2, columns - 1), (rows - 1, columns - 1)]
    images = np.zeros((len(places), 3, height, width), np.float32)
    for image, (row, column) in zip(images, places, strict=True):
        image[:, row * side : (row + 1) * side, column * side : (column + 1) * side] = (
            random.normal(size=(3, side, side))
        )
    shown = 0
    explainer = ox.Explainer(tmp_path / "vit.onnx", device="cpu", threads=1)
    for result in explainer.explain_each(images, target=1):
        for grid, (row, column) in zip(result.grid, places, strict=True):
            # Cut off as a whole, as evidence against the class is, or lost in float32 beside the
            # identity matrices of the product over layers.
            noise = NOISE * np.abs(grid).max()
            if np.ptp(grid) <= noise:
                continue
            others = np.delete(grid.reshape(-1), row * columns + column)
            away = abs(grid[row, column] - others.mean())
            assert away > 0 and np.ptp(others) <= FLAT * away + noise, (result.method, row, column)
            shown += 1
        for heatmap, blank, (row, column) in zip(
            result.heatmap, result.degenerate, places, strict=True
        ):
            if not blank:
                away = np.abs(heatmap - np.median(heatmap[: rows * side, : columns * side]))
                away[rows * side :] = away[:, columns * side :] = 0
                peak = np.unravel_index(away.argmax(), away.shape)
                assert (peak[0] // side, peak[1] // side) == (row, column), result.method
                assert not heatmap[rows * side :].any() and not heatmap[:, columns * side :].any()
    assert shown > len(places) * len(MAPS) / 2


@pytest.mark.parametrize("legacy", [False, True])
def test_attention_within_patches_leaves_all_methods(legacy: bool, tmp_path: Path) -> None:
    report = ox.export(small_tnt(legacy=legacy), tmp_path / "tnt.onnx")
    assert report.methods == tuple(METHODS)
    assert report.contract.tokens.grid == (3, 2)
    assert [layer.heads for layer in report.contract.layers] == [4, 4]
    assert report.verification is not None
    assert "attention_gradient" in report.verification["differences"]


class Shifted(TNT):
    """Patches that overlap with their neighbours between the layers."""

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.pixel_embed(x, self.pixel_pos)
        outer = self.norm2_proj(self.proj(self.norm1_proj(inner.reshape(x.shape[0], 6, -1))))
        outer = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), outer), 1)
        for block in self.blocks:
            inner, outer = block(inner, outer)
            inner = inner.unflatten(0, (-1, 6)).flatten(1, 2).roll(8, 1).reshape(inner.shape)
        return self.norm(outer)


def test_attention_within_windows_that_are_no_patches_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ox.UnsupportedModelError, match="within windows or groups"):
        ox.export(small_tnt(Shifted), tmp_path / "shifted.onnx")
