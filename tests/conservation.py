"""How much relevance is left where the tokens enter each block, relative to the seed.

`python tests/conservation.py` prints the table of `docs/methods.md`. Everything is in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import torch
from double import carried, run
from numpy.typing import NDArray
from small_vits import small_vit
from timm.layers.mlp import SwiGLU
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from torch import nn

from onnxplain.export.plain import to_onnx
from onnxplain.graphs.backward.attnlrp import attn_lrp
from onnxplain.graphs.backward.relevance import ATTRIBUTION, LRP
from onnxplain.graphs.backward.walk import Rule

__all__ = ["TABLES", "left"]

TABLES: dict[str, tuple[Mapping[str, Rule], bool]] = {
    "attribution": (ATTRIBUTION, False),
    "lrp": (LRP, False),
    "attnlrp": (attn_lrp(), True),
    "attnlrp, gamma 0.25": (attn_lrp(gamma=0.25), True),
}
"""The tables, and whether what they carry is relevance over value."""


def left(model: ir.Model, table: str, images: NDArray[np.floating]) -> NDArray[np.float64]:
    """Sum of the relevance of the tokens that enter each block over the seed, [layers, B].

    Each image is explained for its prediction. The seed is 1 or, for AttnLRP, the logit.

    Args:
        model: A plain classifier.
        table: One of `TABLES`.
        images: [B, 3, H, W].
    """
    rules, coefficients = TABLES[table]
    graph = carried(model, rules, coefficients=coefficients)
    logits = run(model, {"pixel_values": images})["logits"]
    seed = np.eye(logits.shape[1])[logits.argmax(1)]
    found = run(graph, {"pixel_values": images, "seed": seed})
    layers = sum(name.startswith("stream.") for name in found)
    sums = np.stack([found[f"stream.{i}"].sum((1, 2)) for i in range(layers)])
    return np.asarray(sums / (logits.max(1) if coefficients else 1))


class TokenBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of [B, N, D] over D, with statistics other than 0 and 1."""

    def __init__(self, dim: int, **_: object) -> None:
        super().__init__(dim)
        generator = torch.Generator().manual_seed(1)
        self.running_mean = 0.3 * torch.randn(dim, generator=generator)
        self.running_var = 0.5 + torch.rand(dim, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class TalkingHeads(nn.Module):
    """Attention whose heads are mixed by a linear map before and after the softmax."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.before, self.after = nn.Linear(heads, heads), nn.Linear(heads, heads)
        with torch.no_grad():  # near the identity, so that the mixed rows still sum to about 1
            for mix in (self.before, self.after):
                mix.weight.copy_(0.8 * torch.eye(heads) + 0.1)

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.before((q @ k.mT / 4).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        attention = self.after(scores.softmax(-1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj((attention @ v).transpose(1, 2).flatten(2))


def talking_heads() -> nn.Module:
    module = small_vit(depth=4, num_heads=2)
    for block in module.blocks:
        block.attn = TalkingHeads(32, 2)
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "class token": lambda: small_vit(depth=4, num_heads=2),
    "LayerScale": lambda: small_vit(depth=4, num_heads=2, init_values=0.5),
    "registers": lambda: small_vit(depth=4, num_heads=2, reg_tokens=3, no_embed_class=True),
    "qk norm": lambda: small_vit(depth=4, num_heads=2, qk_norm=True),
    "SwiGLU": lambda: small_vit(depth=4, num_heads=2, mlp_layer=SwiGLU, act_layer="silu"),
    "mean pooling": lambda: small_vit(depth=4, num_heads=2, global_pool="avg", class_token=False),
    "distilled": lambda: small_vit(VisionTransformerDistilled, depth=4, num_heads=2),
    "BatchNormalization": lambda: small_vit(depth=4, num_heads=2, norm_layer=TokenBatchNorm),
    "rotary embedding": lambda: small_vit(Eva, depth=4, num_heads=2, use_rot_pos_emb=True),
    "talking heads": talking_heads,
}


def row(model: ir.Model, table: str, images: NDArray[np.floating]) -> list[str]:
    """From the last block to the first: the largest error where it is small, else the range."""
    cells = []
    for layer in left(model, table, images)[::-1]:
        error = np.abs(layer - 1).max()
        cells.append(f"{error:.0e}" if error < 1e-2 else f"{layer.min():.2g} to {layer.max():.2g}")
    return cells


def main() -> None:
    images = np.random.default_rng(0).normal(size=(4, 3, 32, 32))
    for name, make in MODELS.items():
        model = to_onnx(make(), image_size=(32, 32))
        for table in TABLES:
            print("|", " | ".join([name, table, *row(model, table, images)]), "|", flush=True)


if __name__ == "__main__":
    main()
