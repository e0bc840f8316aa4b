"""Attentions side by side are one attention with the heads of all.

A block that adds two attentions of the same tokens computes what a block with one attention of
twice the heads computes, so it has to be explained alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_vits import small_vit
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from timm.models.vision_transformer import ParallelThingsBlock

import onnxplain as ox
from onnxplain.outputs import METHODS

IMAGES = np.random.default_rng(0).normal(size=(10, 3, 32, 32)).astype(np.float32)
TARGET = list(range(10))
SAME = 1e-5  # float32 on both sides, of the largest value
HEADS, WIDTH = 2, 32

# What is not here has rules for sums of branches that differ from those for one linear map.
ALIKE: dict[str, list[dict[str, Any]]] = {
    "raw_attention": [{}],
    "rollout": [{}, {"head_fusion": "max", "discard_ratio": 0.3, "start_layer": 1}],
    "gradcam": [{}],
    "attention_gradcam": [{}],
    "gradient_rollout": [{}, {"discard_ratio": 0.3}],
    "generic_attention": [{}],
    "attnlrp": [{}],
}


def parallel() -> Any:
    return small_vit(num_heads=HEADS, block_fn=ParallelThingsBlock)


def merged(blocks: Any, module: Any) -> Any:
    """`module` with one attention and one MLP in each block that do what the blocks do."""
    for block, (attns, ffns) in zip(
        module.blocks, ((b.attns, b.ffns) for b in blocks), strict=True
    ):
        block.norm1.load_state_dict(attns[0].norm.state_dict())
        block.norm2.load_state_dict(ffns[0].norm.state_dict())
        block.attn = Attention(WIDTH, 2 * HEADS, attn_head_dim=WIDTH // HEADS, qkv_bias=True)
        parts = [branch.attn.state_dict() for branch in attns]
        of_heads = {k: [p[k].unflatten(0, (3, -1)) for p in parts] for k in parts[0] if "qkv" in k}
        state = {k: torch.cat(v, 1).flatten(0, 1) for k, v in of_heads.items()}
        state["proj.weight"] = torch.cat([p["proj.weight"] for p in parts], 1)
        state["proj.bias"] = parts[0]["proj.bias"] + parts[1]["proj.bias"]
        block.attn.load_state_dict(state)
        block.mlp = Mlp(WIDTH, 8 * WIDTH)
        parts = [branch.mlp.state_dict() for branch in ffns]
        state = {k: torch.cat([p[k] for p in parts]) for k in ("fc1.weight", "fc1.bias")}
        state["fc2.weight"] = torch.cat([p["fc2.weight"] for p in parts], 1)
        state["fc2.bias"] = parts[0]["fc2.bias"] + parts[1]["fc2.bias"]
        block.mlp.load_state_dict(state)
    return module


@pytest.mark.parametrize("pool", [{}, {"global_pool": "avg", "class_token": False}])
def test_explained_as_one_attention_of_all_heads(pool: dict[str, Any], tmp_path: Path) -> None:
    module = small_vit(num_heads=HEADS, block_fn=ParallelThingsBlock, **pool)
    for block in module.blocks:
        for branches in (block.attns, block.ffns):
            branches[1].norm.load_state_dict(branches[0].norm.state_dict())
    twin = small_vit(num_heads=HEADS, **pool)
    state = {k: v for k, v in module.state_dict().items() if not k.startswith("blocks")}
    twin.load_state_dict(state, strict=False)
    twin = merged(module.blocks, twin)
    found, expected = (
        ox.Explainer(ox.export(m, tmp_path / f"{i}.onnx").path, device="cpu", threads=1)
        for i, m in enumerate((module, twin))
    )
    assert [layer.heads for layer in found.contract.layers] == [2 * HEADS] * 2
    for method, choices in ALIKE.items():
        for options in choices:
            one, other = (
                e.explain(IMAGES, method=method, target=TARGET, **options).grid
                for e in (found, expected)
            )
            assert other.any()
            np.testing.assert_allclose(one, other, rtol=0, atol=SAME * np.abs(other).max())


def test_norms_of_their_own(tmp_path: Path) -> None:
    """Grad-CAM sees the tokens as each of the attentions does."""
    report = ox.export(parallel(), tmp_path / "vit.onnx")
    assert report.methods == tuple(METHODS)
    assert report.verification is not None
    assert max(report.verification["differences"].values()) < SAME
    explainer = ox.Explainer(tmp_path / "vit.onnx", device="cpu", threads=1)
    taps = explainer.taps(IMAGES, target=TARGET)
    assert taps.features is not None and taps.features_gradient is not None
    assert taps.features.shape == (10, 17, 2 * WIDTH)
    for method in METHODS:
        assert explainer.explain(IMAGES, method=method).grid.any(), method
