"""Vision transformers of Hugging Face transformers, exported by torch, against torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from source_framework import (
    BATCHES,
    COMPARED,
    TOLERANCE,
    Output,
    compare,
    lively,
    run,
    torchscript,
    with_dynamo,
)
from source_relevance import compare_relevance
from torch_gradcam import Family, torch_gradcam

import onnxplain as ox
from onnxplain.export.verify import relative_difference

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
MLP, CLASSES = {"intermediate_size": 64}, {"num_labels": 10}


@dataclass(frozen=True)
class Kind:
    """A class of transformers and its configuration; the outputs of its files, of which the first
    one is explained; and what must be found."""

    model: str
    config: str
    options: dict[str, Any]
    prefix: tuple[str, ...]
    readout: str
    outputs: tuple[str, ...] = ("logits",)

    def build(self, attention: str) -> Any:
        torch.manual_seed(3)
        config = getattr(transformers, self.config)(
            **SMALL, **self.options, attn_implementation=attention
        )
        return lively(getattr(transformers, self.model)(config))


KINDS = {
    "vit": Kind("ViTForImageClassification", "ViTConfig", MLP | CLASSES, ("cls",), "cls"),
    "deit, distilled": Kind(
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        MLP | CLASSES,
        ("cls", "dist"),
        "cls+dist",
        ("logits", "cls_logits", "distillation_logits"),
    ),
    "beit": Kind(
        "BeitForImageClassification",
        "BeitConfig",
        MLP | CLASSES | {"use_relative_position_bias": True},
        ("prefix0",),
        "mean",
    ),
    "beit, one table of positions": Kind(
        "BeitForImageClassification",
        "BeitConfig",
        MLP | CLASSES | {"use_shared_relative_position_bias": True, "use_mean_pooling": False},
        ("cls",),
        "cls",
    ),
    "dinov2": Kind(
        "Dinov2ForImageClassification",
        "Dinov2Config",
        CLASSES | {"mlp_ratio": 2, "use_swiglu_ffn": True},
        ("prefix0",),
        "gradient",
    ),
    "dinov2 without a head": Kind(
        "Dinov2Model",
        "Dinov2Config",
        {"mlp_ratio": 2},
        ("cls",),
        "cls",
        ("pooler_output", "last_hidden_state"),
    ),
    "siglip": Kind(
        "SiglipVisionModel",
        "SiglipVisionConfig",
        MLP,
        (),
        "attention",
        ("pooler_output", "last_hidden_state"),
    ),
    "clip with projection": Kind(
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        MLP | {"projection_dim": 12},
        ("cls",),
        "cls",
        ("image_embeds", "last_hidden_state"),
    ),
}
# What the older exporter cannot write: its positions are resized with antialiasing.
REGISTERS = Kind(
    "Dinov2WithRegistersForImageClassification",
    "Dinov2WithRegistersConfig",
    CLASSES | {"mlp_ratio": 2, "num_register_tokens": 3},
    ("prefix0", "prefix1", "prefix2", "prefix3"),
    "gradient",
)
OPSETS = (17,)


def check(kind: Kind, attention: str, export: Callable[..., Path], opset: int, path: Path) -> None:
    model = kind.build(attention)
    plain = export(Output(model, *kind.outputs), path, opset, (32, 32), kind.outputs)
    explained = kind.outputs[0]
    report = compare(Output(model, explained), plain, contract={"logits": explained})
    found = report.contract
    assert report.methods == COMPARED
    assert found.readout is not None
    assert (found.tokens.prefix, found.readout.kind) == (kind.prefix, kind.readout)
    if attention == "sdpa":  # written out, transformers takes the softmax in single precision
        compare_relevance(Output(model, explained), plain, contract={"logits": explained})


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", KINDS)
def test_torchscript(name: str, attention: str, opset: int, tmp_path: Path) -> None:
    check(KINDS[name], attention, torchscript, opset, tmp_path / "plain.onnx")


@pytest.mark.parametrize("attention", ["sdpa"])
def test_registers(attention: str, tmp_path: Path) -> None:
    check(REGISTERS, attention, with_dynamo, 20, tmp_path / "plain.onnx")


def test_swin_is_served_with_gradcam(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        **CLASSES,
    )
    model = Output(lively(transformers.SwinForImageClassification(config)), "logits")
    plain = torchscript(model, tmp_path / "plain.onnx", 17, (64, 64))
    report = ox.instrument(plain, tmp_path / "explained.onnx", outputs="both")
    assert report.methods == ("gradcam",)
    family = Family(
        lambda: model,
        (64, 64),
        (8, 8),
        "model.swin.layernorm->",
        "",
        lambda t: t.unflatten(1, (8, 8)).permute(0, 3, 1, 2),
    )
    for batch in BATCHES:
        images, target = torch.randn(batch, 3, 64, 64), torch.arange(batch)
        found = run(
            tmp_path / "explained.onnx", {"image": images.numpy(), "target": target.numpy()}
        )
        expected = torch_gradcam(model, family, images, target)
        assert expected.max() > 0
        assert relative_difference(found["map.gradcam"], expected) <= TOLERANCE
