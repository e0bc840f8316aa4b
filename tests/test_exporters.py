"""Files made by torch's own exporters of timm, torchvision and torch models, against torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from small_vits import CONFIGURATIONS, small_vit
from source_framework import COMPARED, compare, lively, torchscript, with_dynamo
from source_relevance import compare_relevance
from torch import Tensor, nn


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


class Weighing(nn.Module):
    """Layers of nn.MultiheadAttention alone that are asked for their weights, which is another path
    through torch, with the heads within the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(2)])
        self.layers = nn.ModuleList([nn.MultiheadAttention(32, 2) for _ in range(2)])
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).permute(2, 0, 1)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            x = x + layer(y, y, y, need_weights=True)[0]
        return self.head(x.mean(0))


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
    "weights asked for": Weighing,
    "batch normalisation, mean pooling": batch_normalised,
}


# The older exporter: every model at one opset.
TORCHSCRIPT = [(17, name) for name in MODELS]
# Raised to 17. Below 14 torch writes neither fused attention nor torchvision's.
TORCHSCRIPT += [(opset, "class token") for opset in (11, 13, 14, 16)]
TORCHSCRIPT += [(11, "mean pooling, no class token"), (13, "pre-norm"), (14, "torchvision")]
# The current exporter, which has LayerNormalization in every one, and Gelu from 20 on.
CURRENT = [
    (18, "class token"),
    (20, "torchvision"),
    (20, "post-norm encoder"),
    (20, "batch normalisation, mean pooling"),
    (22, "swiglu"),
    (23, "class token"),  # with the Attention operator
    (24, "class token"),
]


def build(name: str, opset: int) -> Any:
    torch.manual_seed(3)
    module = lively(MODELS[name]())
    for part in module.modules():
        if hasattr(part, "fused_attn"):  # timm's name for scaled_dot_product_attention
            part.fused_attn = opset >= 14  # before, torch cannot write it
    return module


def size_of(name: str) -> tuple[int, int]:
    return (56, 56) if name == "registers" else (32, 32)


@pytest.mark.parametrize(("opset", "name"), TORCHSCRIPT)
def test_torchscript(name: str, opset: int, tmp_path: Path) -> None:
    module = build(name, opset)
    plain = torchscript(module, tmp_path / "plain.onnx", opset, size_of(name))
    assert compare(module, plain).methods == COMPARED
    compare_relevance(module, plain)


@pytest.mark.parametrize(("opset", "name"), CURRENT)
def test_current_exporter(name: str, opset: int, tmp_path: Path) -> None:
    module = build(name, opset)
    plain = with_dynamo(module, tmp_path / "plain.onnx", opset, size_of(name))
    assert compare(module, plain).methods == COMPARED
    compare_relevance(module, plain)


@pytest.mark.parametrize("name", ["class token", "swiglu"])
def test_attention_written_out(name: str, tmp_path: Path) -> None:
    """As timm computes it without scaled_dot_product_attention."""
    module = build(name, 11)
    plain = torchscript(module, tmp_path / "plain.onnx", 17, size_of(name))
    assert compare(module, plain).methods == COMPARED
