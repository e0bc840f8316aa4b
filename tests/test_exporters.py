"""Files made by torch's own exporters of timm, torchvision and torch models, against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from small_vits import CONFIGURATIONS, small_vit
from source_framework import COMPARED, compare, lively, torchscript
from torch import Tensor, nn

SIZE = (32, 32)
TORCHSCRIPT = (17,)
CURRENT = (18, 22)


def fused(module: Any, yes: bool) -> Any:
    """timm's setting for scaled_dot_product_attention."""
    for part in module.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = yes
    return module.eval()


class Encoder(nn.Module):
    """A vision transformer of torch's own encoder layers."""

    def __init__(self, *, norm_first: bool, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            32, 2, 64, activation="gelu", norm_first=norm_first, batch_first=batch_first
        )
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.places = nn.Parameter(torch.zeros(1, 17, 32))
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)
        self.batch_first = batch_first

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        x = self.layers(x) if self.batch_first else self.layers(x.transpose(0, 1)).transpose(0, 1)
        return self.head(x[:, 0])


class OfChannels(nn.BatchNorm1d):
    """Batch normalisation of the last axis."""

    def forward(self, x: Tensor) -> Tensor:
        last = x.ndim - 1
        return super().forward(x.transpose(1, last)).transpose(1, last)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=10,
    )


def batch_normalised() -> nn.Module:
    return small_vit(norm_layer=OfChannels, global_pool="avg", class_token=False)


MODELS: dict[str, Callable[[], Any]] = {
    **{name: build for name, build in CONFIGURATIONS.items() if "pixels" not in name},
    "torchvision": torchvision_vit,
    "post-norm encoder": lambda: Encoder(norm_first=False, batch_first=True),
    "post-norm encoder, tokens first": lambda: Encoder(norm_first=False, batch_first=False),
    "pre-norm encoder": lambda: Encoder(norm_first=True, batch_first=True),
    "batch normalisation, mean pooling": batch_normalised,
}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return tmp_path / "plain.onnx"


def size_of(name: str) -> tuple[int, int]:
    return (56, 56) if name == "registers" else SIZE


@pytest.mark.parametrize("opset", TORCHSCRIPT)
@pytest.mark.parametrize("name", MODELS)
def test_torchscript(name: str, opset: int, plain: Path) -> None:
    torch.manual_seed(3)
    module = fused(lively(MODELS[name]()), opset >= 14)  # torch exports it from there on
    report = compare(module, torchscript(module, plain, opset, size_of(name)))
    assert report.methods == COMPARED
