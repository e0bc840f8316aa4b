"""A vision transformer as Hugging Face's `ViTForImageClassification` is written: queries, keys and
values by a projection each, which onnxruntime's optimiser fuses into its own Attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["HEADS", "WIDTH", "HuggingViT"]

HEADS, WIDTH, SIZE = 2, 32, 32


class Block(nn.Module):
    """Pre-norm attention and feed-forward layer, with the names of the original."""

    def __init__(self) -> None:
        super().__init__()
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.intermediate, self.output = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.layernorm_before(hidden)
        q, k, v = (self.by_head(layer(x)) for layer in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH // HEADS)
        context = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).contiguous()
        hidden = self.dense(context.view(*context.shape[:2], WIDTH)) + hidden
        x = self.intermediate(self.layernorm_after(hidden))
        return self.output(nn.functional.gelu(x)) + hidden

    def by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)


class HuggingViT(nn.Module):
    """Two blocks on 32x32 pixels in patches of 8, a class token, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position_embeddings = nn.Parameter(torch.randn(1, 17, WIDTH) / 4)
        self.layers = nn.ModuleList([Block(), Block()])
        self.layernorm, self.classifier = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.projection(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(image.shape[0], -1, -1), patches], 1)
        x = tokens + self.position_embeddings
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.layernorm(x)[:, 0])
