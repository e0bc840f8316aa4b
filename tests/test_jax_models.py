"""Vision transformers in Flax, exported by jax2onnx, against JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_vits import with_weights
from source_framework import COMPARED, Arrays, compare_with
from source_relevance import compare_relevance

from onnxplain.contract import Contract
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    attention_gradient_name,
    attention_name,
)

reason = "jax2onnx, jax and flax are not installed"
jax2onnx: Any = pytest.importorskip("jax2onnx", reason=reason)
jax: Any = pytest.importorskip("jax", reason=reason)
jnp: Any = pytest.importorskip("jax.numpy", reason=reason)
nnx: Any = pytest.importorskip("flax.nnx", reason=reason)

WIDTH, HEADS, PATCH, SIDE = 32, 2, 8, 4

Mix = Callable[..., Any]
See = Callable[[Any], Any]


def written_out(query: Any, key: Any, value: Any, *, see: See = lambda x: x, **_: Any) -> Any:
    """Attention of queries, keys and values [batch, tokens, heads, dim]; `see` gets the weights
    [batch, heads, queries, keys], and its result takes their place."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", see(jax.nn.softmax(scores)), value)


def of_jax(query: Any, key: Any, value: Any, **_: Any) -> Any:
    return jax.nn.dot_product_attention(query, key, value)


class Block(nnx.Module):
    """Pre-norm attention and feed-forward layer."""

    def __init__(self, mix: Mix, rngs: Any, fast: bool) -> None:
        def norm() -> Any:
            return nnx.LayerNorm(WIDTH, use_fast_variance=fast, rngs=rngs)

        self.norm1, self.norm2 = norm(), norm()
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, attention_fn=mix, decode=False, rngs=rngs
        )
        self.wide = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.narrow = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.narrow(nnx.gelu(self.wide(self.norm2(x)), approximate=False))


class FlaxViT(nnx.Module):
    """Two blocks on 32x32 pixels in patches of 8, a class token, ten classes.

    Attributes:
        channels_first: Whether it takes images as [batch, 3, height, width], which it transposes,
            or as is usual in Flax.
        reshaped: Whether patches are cut out by reshaping, or by a convolution.
    """

    def __init__(self, mix: Mix, *, channels_first: bool, reshaped: bool, fast: bool) -> None:
        rngs = nnx.Rngs(0)
        self.channels_first, self.reshaped = channels_first, reshaped
        sides = (PATCH, PATCH)
        self.patches = (
            nnx.Linear(3 * PATCH * PATCH, WIDTH, rngs=rngs)
            if reshaped
            else nnx.Conv(3, WIDTH, sides, sides, padding="VALID", rngs=rngs)
        )
        self.token = nnx.Param(jnp.zeros((1, 1, WIDTH)))
        self.places = nnx.Param(jnp.zeros((1, 1 + SIDE * SIDE, WIDTH)))
        self.blocks = nnx.List([Block(mix, rngs, fast) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, use_fast_variance=fast, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        if self.channels_first:
            images = images.transpose(0, 2, 3, 1)
        batch = images.shape[0]
        if self.reshaped:
            images = images.reshape(batch, SIDE, PATCH, SIDE, PATCH, 3).swapaxes(2, 3)
            images = images.reshape(batch, SIDE * SIDE, PATCH * PATCH * 3)
        x = self.patches(images).reshape(batch, SIDE * SIDE, WIDTH)
        token = jnp.broadcast_to(self.token[...], (batch, 1, WIDTH))
        x = jnp.concatenate([token, x], axis=1) + self.places[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


@dataclass
class Seen:
    """Values on the way to the logits, each moved by its share of `shifts`, None: not at all."""

    shifts: list[Any] | None = None
    values: list[Any] = field(default_factory=list)

    def __call__(self, value: Any) -> Any:
        shift = 0 if self.shifts is None else self.shifts[len(self.values)]
        self.values.append(value)
        return value + shift


@dataclass(frozen=True)
class Case:
    """A model and how it is exported."""

    mix: Mix = nnx.dot_product_attention
    channels_first: bool = True
    reshaped: bool = False
    fast: bool = True
    opset: int = 23
    batch: str | int = "n"
    options: dict[str, Any] = field(default_factory=dict)

    def model(self, mix: Mix) -> Any:
        """With random values everywhere: zeros and ones hide errors."""
        model = FlaxViT(
            mix, channels_first=self.channels_first, reshaped=self.reshaped, fast=self.fast
        )
        state = nnx.state(model, nnx.Param)
        leaves, tree = jax.tree.flatten(state)
        random = np.random.default_rng(0)
        leaves = [x + 0.1 * random.normal(size=x.shape).astype(np.float32) for x in leaves]
        nnx.update(model, jax.tree.unflatten(tree, leaves))
        return model

    def export(self, path: Path) -> Path:
        sides = (SIDE * PATCH, SIDE * PATCH)
        jax2onnx.to_onnx(
            self.model(self.mix),
            [(self.batch, 3, *sides) if self.channels_first else (self.batch, *sides, 3)],
            opset=self.opset,
            return_mode="file",
            output_path=str(path),
            input_names=["image"],
            output_names=["scores"],
            **self.options,
        )
        return path

    def logits(self, images: np.ndarray, see: Seen) -> Any:
        """Of images [batch, 3, height, width]; seen are the weights of each attention and, before
        those of the last, the tokens that enter it."""

        def watched(query: Any, key: Any, value: Any, **_: Any) -> Any:
            return written_out(query, key, value, see=see)

        model = self.model(watched)
        attention = model.blocks[-1].attention
        model.blocks[-1].attention = lambda x: attention(see(x))
        return model(images if self.channels_first else images.transpose(0, 2, 3, 1))

    def source(
        self, images: np.ndarray, target: np.ndarray, found: Arrays, contract: Contract
    ) -> Arrays:
        """What JAX has for the outputs of the explained file."""
        seen = Seen()
        logits = self.logits(images, seen)

        def of_targets(shifts: list[Any]) -> Any:
            moved = self.logits(images, Seen(shifts))
            return jnp.take_along_axis(moved, target[:, None], axis=1).sum()

        slopes = jax.grad(of_targets)([jnp.zeros(x.shape) for x in seen.values])
        arrays = {contract.logits: logits}
        values = [attention_name(0), FEATURES, attention_name(1)]
        gradients = [attention_gradient_name(0), FEATURES_GRADIENT, attention_gradient_name(1)]
        arrays |= dict(zip(values, seen.values, strict=True))
        arrays |= dict(zip(gradients, slopes, strict=True))
        return {name: np.asarray(array) for name, array in arrays.items()}


CASES = {
    "of Flax": Case(),
    "of JAX": Case(mix=of_jax),
    "written out": Case(mix=written_out, opset=18),
    "patches by reshape": Case(reshaped=True, opset=21),
    "channels first by the exporter": Case(
        channels_first=False, options={"inputs_as_nchw": [0]}, opset=21
    ),
    "channels last": Case(channels_first=False),
    "channels last, patches by reshape": Case(channels_first=False, reshaped=True, opset=21),
    "LayerNormalization": Case(fast=False, options={"normalization_mode": "prefer_native"}),
}


@pytest.mark.parametrize("name", CASES)
def test_flax(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = case.export(tmp_path / "plain.onnx")
    assert compare_with(case.source, plain).methods == COMPARED


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("fast", [True, False])
def test_relevance(fast: bool, channels_first: bool, tmp_path: Path) -> None:
    """Normalisation written out, in either way, has the relevance of the operator."""
    case = Case(fast=fast, channels_first=channels_first)
    plain = case.export(tmp_path / "plain.onnx")
    compare_relevance(timm_twin(case.model(case.mix)), plain)


def timm_twin(model: Any) -> torch.nn.Module:
    """The same classifier as a VisionTransformer of timm."""
    weights: dict[str, Any] = {
        "cls_token": model.token[...],
        "pos_embed": model.places[...],
        "patch_embed.proj.weight": model.patches.kernel[...].transpose(3, 2, 0, 1),
        "patch_embed.proj.bias": model.patches.bias[...],
        **_affine("norm", model.norm),
        **_affine("head", model.head),
    }
    for i, block in enumerate(model.blocks):
        attention = block.attention
        qkv = (attention.query, attention.key, attention.value)
        kernels = [part.kernel[...].reshape(WIDTH, WIDTH).T for part in qkv]
        weights |= {
            f"blocks.{i}.attn.qkv.weight": jnp.concatenate(kernels),
            f"blocks.{i}.attn.qkv.bias": jnp.concatenate([p.bias[...].reshape(-1) for p in qkv]),
            f"blocks.{i}.attn.proj.weight": attention.out.kernel[...].reshape(WIDTH, WIDTH).T,
            f"blocks.{i}.attn.proj.bias": attention.out.bias[...],
            **_affine(f"blocks.{i}.norm1", block.norm1),
            **_affine(f"blocks.{i}.norm2", block.norm2),
            **_affine(f"blocks.{i}.mlp.fc1", block.wide),
            **_affine(f"blocks.{i}.mlp.fc2", block.narrow),
        }
    tensors = {name: torch.from_numpy(np.array(x)) for name, x in weights.items()}
    return with_weights(tensors, model.norm.epsilon)


def _affine(name: str, layer: Any) -> dict[str, Any]:
    """Weight and bias of a projection or a normalisation."""
    weight = layer.scale[...] if isinstance(layer, nnx.LayerNorm) else layer.kernel[...].T
    return {f"{name}.weight": weight, f"{name}.bias": layer.bias[...]}
