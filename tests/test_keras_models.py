"""Vision transformers in Keras on torch, exported by torch, against torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_vits import with_weights
from source_framework import (
    COMPARED,
    Arrays,
    compare_with,
    lively,
    torchscript,
    with_dynamo,
)
from source_relevance import compare_relevance

from onnxplain.contract import Contract
from onnxplain.export.torch_taps import torch_taps
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    attention_gradient_name,
    attention_name,
)

os.environ["KERAS_BACKEND"] = "torch"  # read when Keras is imported
keras: Any = pytest.importorskip("keras", reason="keras is not installed")

WIDTH, HEADS, PATCHES = 32, 2, 16


class Normalisation(keras.layers.Layer):
    """Layer normalisation by hand, for torch's older exporter cannot write that of Keras."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")
        self.shift = self.add_weight(shape=shape[-1:], initializer="zeros")

    def call(self, x: Any) -> Any:
        centred = x - keras.ops.mean(x, -1, keepdims=True)
        variance = keras.ops.mean(centred * centred, -1, keepdims=True)
        return centred / keras.ops.sqrt(variance + 1e-6) * self.scale + self.shift


class ClassToken(keras.layers.Layer):
    """A token before the patches, and the places of all."""

    def build(self, shape: Any) -> None:
        self.token = self.add_weight(shape=(1, 1, WIDTH), initializer="zeros")
        self.places = self.add_weight(shape=(1, 1 + PATCHES, WIDTH), initializer="zeros")

    def call(self, x: Any) -> Any:
        token = keras.ops.broadcast_to(self.token, (keras.ops.shape(x)[0], 1, WIDTH))
        return keras.ops.concatenate([token, x], 1) + self.places


class Attention(keras.layers.MultiHeadAttention):
    """It keeps the tokens that enter."""

    def __init__(self) -> None:
        super().__init__(HEADS, WIDTH // HEADS)
        self.entering: list[Any] = []

    def call(self, query: Any, value: Any, key: Any = None, **options: Any) -> Any:
        self.entering[:] = [query]
        return super().call(query, query, **options)


class Taking(torch.nn.Module):
    """A model with one named input, which torch's current exporter wants; those of Keras take
    whatever comes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, images: torch.Tensor) -> Any:
        return self.model(images)


def keras_vit(norm: Any, channels_last: bool) -> tuple[Any, Attention]:
    """Two blocks on 32x32 pixels, a class token, ten classes; and the last attention."""
    layers = keras.layers
    images = keras.Input((32, 32, 3) if channels_last else (3, 32, 32))
    x = layers.Conv2D(WIDTH, 8, 8, data_format="channels_last")(
        images if channels_last else keras.ops.transpose(images, (0, 2, 3, 1))
    )
    x = ClassToken()(layers.Reshape((PATCHES, WIDTH))(x))
    for _ in range(2):
        attention = Attention()
        y = norm()(x)
        x = x + attention(y, y)
        y = layers.Dense(2 * WIDTH, activation="gelu")(norm()(x))
        x = x + layers.Dense(WIDTH)(y)
    model = keras.Model(images, layers.Dense(10)(norm()(x)[:, 0]))
    return Taking(lively(model)), attention


def of_keras() -> Any:
    return keras.layers.LayerNormalization(epsilon=1e-6)


CASES = {
    "older exporter": (torchscript, 17, Normalisation, False),
    "current exporter": (with_dynamo, 20, Normalisation, False),
    "current exporter, normalisation of Keras": (with_dynamo, 20, of_keras, False),
    "older exporter, channels last": (torchscript, 17, Normalisation, True),
    "current exporter, channels last": (with_dynamo, 20, of_keras, True),
}


@pytest.mark.parametrize("name", CASES)
def test_keras(name: str, tmp_path: Path) -> None:
    export, opset, norm, channels_last = CASES[name]
    model, last = keras_vit(norm, channels_last)

    def source(images: np.ndarray, target: np.ndarray, found: Arrays, contract: Contract) -> Arrays:
        pixels, classes = torch.from_numpy(images), torch.from_numpy(target)
        pixels = pixels.permute(0, 2, 3, 1) if channels_last else pixels
        taps = torch_taps(model, pixels, classes)
        logits = model(pixels.requires_grad_())
        (features,) = last.entering
        chosen = logits.gather(1, classes[:, None]).sum()
        (slope,) = torch.autograd.grad(chosen, [features])
        arrays = {
            contract.logits: taps.logits,
            FEATURES: features.detach(),
            FEATURES_GRADIENT: slope,
        }
        for i in range(2):
            arrays[attention_name(i)] = taps.attention[i]
            arrays[attention_gradient_name(i)] = taps.attention_gradient[i]
        return {name: tensor.numpy() for name, tensor in arrays.items()}

    plain = export(model, tmp_path / "plain.onnx", opset, (32, 32), channels_last=channels_last)
    assert compare_with(source, plain).methods == COMPARED


@pytest.mark.parametrize("name", ["older exporter", "current exporter, channels last"])
def test_relevance(name: str, tmp_path: Path) -> None:
    export, opset, norm, channels_last = CASES[name]
    model, _ = keras_vit(norm, channels_last)
    plain = export(model, tmp_path / "plain.onnx", opset, (32, 32), channels_last=channels_last)
    compare_relevance(timm_twin(model), plain)


def timm_twin(model: Any) -> torch.nn.Module:
    """The same classifier as a VisionTransformer of timm: Keras computes in single precision."""
    given = iter(torch.from_numpy(array) for array in model.model.get_weights())
    weights: dict[str, torch.Tensor] = {}

    def take(name: str, turn: Callable[[torch.Tensor], torch.Tensor] = torch.t) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = turn(next(given)), next(given)

    def normalise(name: str) -> None:
        take(name, lambda scale: scale)

    take("patch_embed.proj", lambda kernel: kernel.permute(3, 2, 0, 1))
    weights["cls_token"], weights["pos_embed"] = next(given), next(given)
    for i in range(2):
        normalise(f"blocks.{i}.norm1")
        qkv = [(next(given).flatten(1).T, next(given).flatten()) for _ in range(3)]
        weights[f"blocks.{i}.attn.qkv.weight"] = torch.cat([kernel for kernel, _ in qkv])
        weights[f"blocks.{i}.attn.qkv.bias"] = torch.cat([bias for _, bias in qkv])
        take(f"blocks.{i}.attn.proj", lambda kernel: kernel.flatten(0, 1).T)
        normalise(f"blocks.{i}.norm2")
        take(f"blocks.{i}.mlp.fc1")
        take(f"blocks.{i}.mlp.fc2")
    normalise("norm")
    take("head")
    return with_weights(weights, 1e-6)
