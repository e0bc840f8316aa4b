"""Behind a mean over all positions and a linear head, Grad-CAM is the class activation map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_vits import small_vit, stir
from timm.models.swin_transformer import SwinTransformer

import onnxplain as ox
from onnxplain.runtime import methods

TARGET = [4, 0, 9]


def test_of_tokens() -> None:
    module = small_vit(img_size=(32, 48), global_pool="avg", reg_tokens=2, fc_norm=False).double()
    images = torch.randn(3, 3, 32, 48, dtype=torch.float64, generator=torch.manual_seed(0))
    tokens = module.eval().forward_features(images).detach().requires_grad_()
    selected = module.forward_head(tokens)[range(3), TARGET].sum()
    (gradient,) = torch.autograd.grad(selected, tokens)
    found = methods.gradcam(tokens.detach(), gradient, prefix_tokens=3, grid=(4, 6))
    patches, weight = tokens.detach()[:, 3:], module.head.weight.detach()[TARGET]
    expected = torch.einsum("bnd, bd -> bn", patches, weight / 24).clamp(min=0).numpy()
    assert expected.any(axis=1).all()
    np.testing.assert_allclose(found.reshape(3, 24), expected, rtol=1e-12, atol=1e-15)


def test_of_a_file(tmp_path: Path) -> None:
    size: dict[str, Any] = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8}
    module = stir(SwinTransformer(**size, depths=(2, 2), num_heads=(2, 4), num_classes=10)).eval()
    ox.export(module, tmp_path / "swin.onnx", image_size=32)
    images = np.random.default_rng(0).normal(size=(3, 3, 32, 32)).astype(np.float32)
    with torch.no_grad():
        tokens = module.forward_features(torch.from_numpy(images))  # [batch, rows, columns, dim]
        weight = module.head.fc.weight[TARGET]
        expected = torch.einsum("bhwd, bd -> bhw", tokens, weight / 64).clamp(min=0).numpy()
    explainer = ox.Explainer(tmp_path / "swin.onnx", device="cpu", threads=1)
    found = explainer.explain(images, method="gradcam", target=TARGET).grid
    assert expected.any(axis=(1, 2)).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * expected.max())
