"""Files whose input states no sizes, as optimum writes them: [batch, channels, height, width]."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torchvision
from small_vits import CONFIGURATIONS, small_vit
from source_framework import COMPARED, Output, compare, lively, torchscript
from torch import Tensor, nn

import onnxplain as ox
from onnxplain.errors import InputError, UnsupportedModelError
from onnxplain.graphs.findings import find


class ChannelsLast(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.permute(0, 3, 1, 2))


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 2, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 10),
    )


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: CONFIGURATIONS[name] for name in ("class token", "distilled", "registers")},
    "mean pooling": CONFIGURATIONS["mean pooling, no class token"],
    "torchvision": torchvision_vit,
    "overlapping patches": lambda: overlapping(),
}


def overlapping() -> Any:
    """5x5 patches of 8 pixels, 6 apart."""
    model = small_vit(dynamic_img_pad=False)
    model.patch_embed.proj = nn.Conv2d(3, 32, 8, stride=6)
    model.pos_embed = nn.Parameter(torch.zeros(1, 26, 32))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_the_only_size_is_found(name: str, tmp_path: Path) -> None:
    size = (56, 56) if name == "registers" else (32, 32)
    module = lively(MODELS[name]())
    plain = torchscript(module, tmp_path / "plain.onnx", 17, size, open_sizes=True)
    report = compare(module, plain)
    assert report.methods == COMPARED
    assert (report.contract.input.size, report.contract.input.multiple) == (size, None)
    with pytest.raises(InputError, match=r"size \[64, 48\]; .* fit pictures of \[\d\d, \d\d\] al"):
        ox.instrument(plain, tmp_path / "no.onnx", contract={"input": {"size": [64, 48]}})


def test_channels_last(tmp_path: Path) -> None:
    module = ChannelsLast(lively(CONFIGURATIONS["class token"]())).eval()
    plain = torchscript(
        module, tmp_path / "plain.onnx", 17, (32, 32), channels_last=True, open_sizes=True
    )
    contract = ox.instrument(plain, tmp_path / "explained.onnx").contract
    assert (contract.input.layout, contract.input.size) == ("NHWC", (32, 32))


def test_an_optimised_file(tmp_path: Path) -> None:
    module = lively(CONFIGURATIONS["class token"]())
    plain = torchscript(module, tmp_path / "plain.onnx", 17, (32, 32), open_sizes=True)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
    assert any(node.domain for node in onnx.load(tmp_path / "optimised.onnx").graph.node)
    assert compare(module, tmp_path / "optimised.onnx").methods == COMPARED


def test_inspect_finds_it(tmp_path: Path) -> None:
    module = lively(CONFIGURATIONS["class token"]())
    plain = torchscript(module, tmp_path / "plain.onnx", 17, (32, 32), open_sizes=True)
    contract = find(plain).contract
    assert contract is not None
    assert contract.input.size == (32, 32)


def test_any_size_is_not_guessed(tmp_path: Path) -> None:
    module = lively(convolutional())
    plain = torchscript(module, tmp_path / "plain.onnx", 17, (32, 32), open_sizes=True)
    with pytest.raises(UnsupportedModelError, match="pictures of any size; give the size"):
        ox.instrument(plain, tmp_path / "explained.onnx")
    contract = {"input": {"size": [40, 48]}}
    report = ox.instrument(plain, tmp_path / "explained.onnx", contract=contract)
    assert report.contract.input.size == (40, 48)
    assert report.contract.input.multiple is not None


def test_windows_are_not_guessed(tmp_path: Path) -> None:
    """Some weight has as many rows as some size that they fit would have patches."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.SwinConfig(
        image_size=64,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=10,
    )
    module = Output(lively(transformers.SwinForImageClassification(config)), "logits")
    plain = torchscript(module, tmp_path / "plain.onnx", 17, (64, 64), open_sizes=True)
    with pytest.raises(UnsupportedModelError, match="pictures of any size; give the size"):
        ox.instrument(plain, tmp_path / "explained.onnx")
    contract = {"input": {"size": [64, 64]}}
    report = ox.instrument(plain, tmp_path / "explained.onnx", contract=contract)
    assert report.contract.input.size == (64, 64)
    assert report.methods == ("gradcam",)


def test_channels_that_nothing_tells(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 9, opset_import: ["": 17]>
        g (float[n, c, h, w] image) => (float[n, c] logits) {
            pooled = GlobalAveragePool (image)
            logits = Flatten (pooled)
        }
        """
    )
    onnx.save(model, tmp_path / "plain.onnx")
    with pytest.raises(UnsupportedModelError, match=r"image has shape \[n,c,h,w\]; expected"):
        ox.instrument(tmp_path / "plain.onnx", tmp_path / "explained.onnx")
