"""Files of optimum's exporter, against torch. It wants an older transformers than the other tests,
so that these are run in an environment of their own: transformers 4.57 and optimum-onnx 0.1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from source_framework import Output, compare, lively
from source_relevance import compare_relevance

import onnxplain as ox

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


def test_a_folder_that_optimum_writes(tmp_path: Path) -> None:
    """From the picture to the logits, with nothing said but the names of its files."""
    torch.manual_seed(4)
    model = lively(transformers.DeiTForImageClassification(transformers.DeiTConfig(**SMALL)))
    size = {"height": 37, "width": 37}
    crop = {"height": 32, "width": 32}
    processor = transformers.DeiTImageProcessor(size=size, crop_size=crop)
    for part in (model, processor):
        part.save_pretrained(tmp_path / "hub")
    exporter.main_export(
        str(tmp_path / "hub"), tmp_path, task="image-classification", do_validation=False
    )
    report = ox.instrument(
        tmp_path / "model.onnx",
        tmp_path / "explained.onnx",
        preprocessing=tmp_path / "preprocessor_config.json",
        labels=tmp_path / "config.json",
    )
    assert report.contract.labels == tuple(f"LABEL_{i}" for i in range(10))
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 256, (83, 61, 3), np.uint8))
    found = ox.Explainer(tmp_path / "explained.onnx").explain(picture, method="gradcam").logits
    with torch.no_grad():
        expected = model(**processor(picture, return_tensors="pt")).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
