"""Small timm vision transformers, one for each way in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import timm
import torch
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.hybrid_embed import HybridEmbed
from timm.layers.mlp import SwiGLU
from timm.layers.norm_act import GroupNormAct
from timm.models.deit import VisionTransformerDistilled
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer

__all__ = ["CONFIGURATIONS", "hybrid", "small_vit", "stir", "with_weights"]


def stir(module: Any) -> Any:
    """Random values everywhere: the zero biases and unit scales of fresh models hide errors."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.startswith("head") and parameter.ndim == 2:
                parameter.copy_(0.2 * noise)
            elif parameter.ndim == 1 or name.endswith(("token", "embed")):
                parameter.add_(0.1 * noise)
    return module


def small_vit(cls: type[torch.nn.Module] = VisionTransformer, **changes: Any) -> Any:
    """Two blocks of four heads on 32x32 pixels in patches of 8, ten classes."""
    torch.manual_seed(3)
    arguments = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 4,
        "num_classes": 10,
    }
    return stir(cls(**{**arguments, **changes}))


def with_weights(weights: Mapping[str, torch.Tensor], epsilon: float) -> Any:
    """The same of two heads and 64 features in between, with these weights by timm's names and
    `epsilon` in its normalisations."""
    norm = partial(torch.nn.LayerNorm, eps=epsilon)
    same = small_vit(num_heads=2, mlp_ratio=2, norm_layer=norm)
    same.load_state_dict(weights)
    return same.eval()


def hybrid(convolution: Callable[..., Any] = Conv2dSame, **changes: Any) -> Any:
    """A transformer on the features of a small convolutional network with group normalisation."""
    torch.manual_seed(3)
    backbone = ResNetV2(
        [1],
        channels=(128,),
        stem_chs=32,
        num_classes=0,
        global_pool="",
        stem_type="same",
        preact=False,
        norm_layer=partial(GroupNormAct, num_groups=32, eps=2**-17),  # which is a float32
        conv_layer=convolution,
    )
    return small_vit(embed_layer=partial(HybridEmbed, backbone=backbone), patch_size=2, **changes)


def _registers() -> Any:
    torch.manual_seed(3)
    size: dict[str, Any] = {
        "img_size": 56,
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 4,
        "num_classes": 10,
    }
    return stir(timm.create_model("vit_small_patch14_reg4_dinov2", **size))


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "class token": small_vit,
    "mean pooling, no class token": lambda: small_vit(global_pool="avg", class_token=False),
    "distilled": lambda: small_vit(VisionTransformerDistilled),
    "registers": _registers,
    "layer scale": lambda: small_vit(init_values=0.5),
    "qk norm": lambda: small_vit(qk_norm=True),
    "64 x 32 pixels": lambda: small_vit(img_size=(64, 32)),
    "swiglu": lambda: small_vit(mlp_layer=SwiGLU, act_layer="silu"),
    "pre-norm": lambda: small_vit(pre_norm=True, act_layer="quick_gelu"),
    "three layers": lambda: small_vit(depth=3, num_heads=2),
}
