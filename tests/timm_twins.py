"""timm models with the weights of vision transformers of other packages, and their relevance.

The relevance of torch_relevance.py is written for timm's modules. What another package computes is
the same function of the same weights, so its files must carry the same relevance.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from double import run
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch_relevance import AttnLRP, Attribution, Plain, relevance

from onnxplain import graphs
from onnxplain.export.torch_taps import torch_taps
from onnxplain.export.verify import relative_difference
from onnxplain.outputs import (
    INPUT_RELEVANCE,
    INPUT_RELEVANCE_ATTNLRP,
    attention_relevance_lrp_name,
    attention_relevance_name,
    map_name,
)
from onnxplain.runtime import methods

__all__ = ["TOLERANCES", "classifier", "compare_relevance", "twin"]

# By opset, relative to the largest value, in double. Up to opset 19 GELU is written out with a
# square root of 2 in single precision, which plain LRP at the pixels amplifies to 1e-4.
TOLERANCES = {17: 1e-3, 20: 1e-6}

NAMES = {  # of parameters, to timm's
    "torchvision": {
        r"class_token": "cls_token",
        r"encoder\.pos_embedding": "pos_embed",
        r"conv_proj": "patch_embed.proj",
        r"encoder\.layers\.encoder_layer_(\d+)": r"blocks.\1",
        r"self_attention\.in_proj_": "attn.qkv.",
        r"self_attention\.out_proj": "attn.proj",
        r"ln_(\d)": r"norm\1",
        r"mlp\.0": "mlp.fc1",
        r"mlp\.3": "mlp.fc2",
        r"encoder\.ln": "norm",
        r"heads\.head": "head",
    },
    "transformers": {
        r"vit\.embeddings\.cls_token": "cls_token",
        r"vit\.embeddings\.position_embeddings": "pos_embed",
        r"vit\.embeddings\.patch_embeddings\.projection": "patch_embed.proj",
        r"vit\.layers": "blocks",
        r"attention\.(.)_proj": r"attn.\1",
        r"layernorm_before": "norm1",
        r"layernorm_after": "norm2",
        r"vit\.layernorm": "norm",
        r"classifier": "head",
    },
}


def twin(module: nn.Module, package: str) -> nn.Module:
    """The same classifier of 32x32 pixels in patches of 8 as a VisionTransformer of timm.

    Args:
        module: Two layers of two heads and 32 features, 64 in between, ten classes.
        package: A key of `NAMES`.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        for pattern, replacement in NAMES[package].items():
            name = re.sub(pattern, replacement, name)
        weights[name] = tensor
    for name in [name for name in weights if ".attn.q." in name]:
        parts = [weights.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
        weights[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    for name in [name for name in weights if ".attn.o." in name]:
        weights[name.replace(".o.", ".proj.")] = weights.pop(name)
    (epsilon,) = {m.eps for m in module.modules() if isinstance(m, nn.LayerNorm)}
    return classifier(weights, epsilon)


def classifier(weights: Mapping[str, Tensor], epsilon: float) -> nn.Module:
    """The VisionTransformer of timm that has these weights by its own names, `epsilon` in its
    normalisations."""
    same = VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
        num_classes=10,
        norm_layer=partial(nn.LayerNorm, eps=epsilon),
    )
    same.load_state_dict(weights)
    return same.eval()


def compare_relevance(plain: Path, module: nn.Module, tolerance: float, batch: int = 3) -> None:
    """Explains the file and compares relevance and the maps made of it, in double.

    Args:
        plain: A file with the input `image`.
        module: The timm model that it is, with a class token.
        tolerance: Relative to the largest value.
        batch: Number of images.
    """
    module = module.double()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 32, 32, dtype=torch.float64, generator=generator)
    target = torch.arange(batch) * 3 + 1
    attribution, lrp, attnlrp = (
        relevance(module, images, target, table) for table in (Attribution(), Plain(), AttnLRP())
    )
    gradient = torch_taps(module, images, target).attention_gradient
    expected = {
        INPUT_RELEVANCE: lrp.pixels,
        INPUT_RELEVANCE_ATTNLRP: attnlrp.pixels,
        **{attention_relevance_name(i): r for i, r in enumerate(attribution.attention)},
        attention_relevance_lrp_name(1): lrp.attention[1],
        map_name("transformer_attribution"): methods.transformer_attribution(
            gradient, attribution.attention
        ),
        map_name("partial_lrp"): methods.partial_lrp([lrp.attention[1]]),
        map_name("lrp"): methods.lrp(lrp.pixels),
        map_name("attnlrp"): methods.attnlrp(attnlrp.pixels),
    }
    explained = graphs.explain(graphs.load(plain))
    last = explained.contract.input.layout == "NHWC"
    pictures = images.permute(0, 2, 3, 1) if last else images
    feeds = {"image": pictures.numpy(), "target": target.numpy()}
    found = run(explained.models["single"], feeds)
    for name, values in expected.items():
        array = np.asarray(values)
        assert relative_difference(found[name], array) <= tolerance, name
