"""Attention, features and their gradients of ten timm configurations against torch autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from small_vits import CONFIGURATIONS, stir

import onnxplain as ox
from onnxplain.contract import Readout
from onnxplain.export.plain import inference_form
from onnxplain.export.torch_taps import torch_taps
from onnxplain.export.verify import relative_difference
from onnxplain.outputs import METHODS

# Single precision, a few layers: both sides are this far from the exact value.
TOLERANCE = 1e-5


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gradients_equal_autograd(name: str, tmp_path: Path) -> None:
    module = CONFIGURATIONS[name]()
    report = ox.export(module, tmp_path / "vit.onnx", verify=False)
    assert tuple(report.contract.methods) == tuple(METHODS)
    images = torch.randn(3, 3, *report.contract.input.size, generator=torch.manual_seed(0))
    target = torch.tensor([4, 0, 9])
    with inference_form(module) as frozen:
        expected = torch_taps(frozen, images, target)
    found = ox.Explainer(tmp_path / "vit.onnx", device="cpu").taps(
        images.numpy(), target=target.tolist()
    )
    assert found.attention is not None and found.attention_gradient is not None
    pairs = [
        (found.logits, expected.logits),
        (found.features, expected.features),
        (found.features_gradient, expected.features_gradient),
        *zip(found.attention, expected.attention, strict=True),
        *zip(found.attention_gradient, expected.attention_gradient, strict=True),
    ]
    for ours, theirs in pairs:
        assert ours is not None and theirs is not None
        assert np.abs(theirs.numpy()).max() > 0
        assert ours.shape == tuple(theirs.shape)
        assert relative_difference(ours, theirs.numpy()) < TOLERANCE


def test_projections_that_cut_off_what_they_read(tmp_path: Path) -> None:
    """Each projection of Gemma's attention has a Clip of its own before and behind it."""
    size: dict[str, Any] = {"img_size": (64, 96), "embed_dim": 64, "num_heads": 2, "depth": 2}
    module = stir(timm.create_model("gemma4_vit_167m", num_classes=10, **size))
    for name, bound in module.named_buffers():
        if name.endswith(("_min", "_max")):
            bound.fill_(-1.0 if name.endswith("_min") else 0.8)
    report = ox.export(module, tmp_path / "vit.onnx", image_size=(64, 96))
    assert report.methods == tuple(METHODS)
    assert report.contract.tokens.grid == (4, 6)
    assert report.contract.readout == Readout(kind="mean", ranges=((0, 24),))


def test_the_reference_itself_against_differences() -> None:
    """torch_taps: adding to one attention weight changes the logit as its gradient says."""
    module = CONFIGURATIONS["class token"]().double().eval()
    images = torch.randn(1, 3, 32, 32, dtype=torch.float64, generator=torch.manual_seed(0))
    taps = torch_taps(module, images, torch.tensor([2]))
    layer, position, step = 0, (0, 1, 3, 5), 1e-4

    def logit(change: float) -> float:
        def push(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            pushed = output.clone()
            pushed[position] += change
            return pushed

        handle = module.blocks[layer].attn.attn_drop.register_forward_hook(push)
        for block in module.blocks:
            block.attn.fused_attn = False
        try:
            return float(module(images)[0, 2].detach())
        finally:
            handle.remove()

    slope = (logit(step) - logit(-step)) / (2 * step)
    assert slope == pytest.approx(float(taps.attention_gradient[layer][position]), rel=1e-6)
