"""Files of optimum's exporter, against torch. It wants an older transformers than the other tests,
so that these are run in an environment of their own: transformers 4.57 and optimum-onnx 0.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from source_framework import Output, compare, lively
from source_relevance import compare_relevance

reason = "optimum-onnx is not installed"
exporter: Any = pytest.importorskip("optimum.exporters.onnx", reason=reason)
transformers: Any = pytest.importorskip("transformers", reason=reason)

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 10,
}
KINDS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", {}, "logits"),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {}, "logits"),
    "beit": (
        "BeitForImageClassification",
        "BeitConfig",
        {"use_relative_position_bias": True},
        "logits",
    ),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", {}, "pooler_output"),
}


@pytest.mark.parametrize("name", KINDS)
def test_optimum(name: str, tmp_path: Path) -> None:
    kind, config, options, logits = KINDS[name]
    torch.manual_seed(4)
    settings = getattr(transformers, config)(**SMALL, **options, attn_implementation="sdpa")
    model = lively(getattr(transformers, kind)(settings))
    task = "image-classification" if logits == "logits" else "feature-extraction"
    exporter.onnx_export_from_model(model, tmp_path, task=task, do_validation=False)
    plain = tmp_path / "model.onnx"
    contract: dict[str, Any] = {"logits": logits}
    if name == "beit":  # interpolates its positions, so that it takes pictures of any size
        contract["input"] = {"size": [32, 32]}
    report = compare(Output(model, logits), plain, contract=contract)
    assert report.contract.input.size == (32, 32)
    compare_relevance(Output(model, logits), plain, contract=contract)
