"""Heads that read tokens in a way of their own: how much of each, by the gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from hand_written import SIZE, HandWritten, to_file
from numpy.typing import NDArray
from small_vits import small_vit, stir

import onnxplain as ox
from onnxplain import graphs
from onnxplain.contract import Readout
from onnxplain.graphs.structure import analysis
from onnxplain.outputs import METHODS, TOKEN_WEIGHTS
from onnxplain.runtime import methods

SAME = 1e-5  # float32 on both sides, of the largest value
IMAGES = np.random.default_rng(0).normal(size=(3, 3, *SIZE)).astype(np.float32)
TARGET = [4, 0, 2]
GRID = (3, 4)


def close(found: Any, expected: NDArray[Any]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=SAME * np.abs(expected).max())


def explained(module: Any, folder: Path) -> ox.Explainer:
    plain = to_file(module, folder / "plain.onnx")
    report = ox.instrument(plain, folder / "explained.onnx")
    assert report.methods == tuple(METHODS)
    return ox.Explainer(folder / "explained.onnx", device="cpu", threads=1)


def tokens_of(module: Any) -> torch.Tensor:
    """What the head reads, [batch, tokens, dim]."""
    caught: list[torch.Tensor] = []
    handle = module.norm.register_forward_hook(lambda m, args, output: caught.append(output))
    with torch.no_grad():
        module(torch.from_numpy(IMAGES))
    handle.remove()
    return caught[0]


def test_of_a_maximum_each_token_counts_by_the_features_it_has_most_of(tmp_path: Path) -> None:
    module: Any = HandWritten(read="maximum")
    explainer = explained(module, tmp_path)
    assert explainer.contract.readout == Readout(kind="gradient", ranges=((0, 13),))
    winners = tokens_of(module).argmax(1).numpy()  # [batch, features]
    sizes = np.abs(module.head.weight.detach().numpy())[TARGET]
    expected = np.zeros((3, 13))
    for weights, places, size in zip(expected, winners, sizes, strict=True):
        np.add.at(weights, places, size / size.sum())
    taps = explainer.taps(IMAGES, target=TARGET)
    close(taps.token_weights, expected)
    assert taps.attention is not None
    attention = [np.asarray(layer) for layer in taps.attention if layer is not None]
    found = explainer.explain(IMAGES, method="rollout", target=TARGET).grid
    close(found, methods.rollout(attention, grid=GRID, readout=expected))
    other = explainer.explain(IMAGES, method="rollout", target=[1, 1, 1]).grid
    assert np.abs(found - other).max() > SAME * np.abs(found).max()


@pytest.mark.parametrize("read", ["weighted", "class token beside the mean"])
def test_of_other_heads_it_is_the_share_of_the_gradient(read: str, tmp_path: Path) -> None:
    module: Any = HandWritten(read=read)
    explainer = explained(module, tmp_path)
    tokens = tokens_of(module).requires_grad_()
    logits = module.read(module, tokens)
    (slope,) = torch.autograd.grad(logits[range(3), TARGET].sum(), tokens)
    sizes = slope.abs().sum(2).numpy()
    taps = explainer.taps(IMAGES, target=TARGET)
    close(taps.token_weights, sizes / sizes.sum(1, keepdims=True))


@pytest.mark.parametrize(
    ("read", "expected"),
    [("mean of patches", [0] + [1 / 12] * 12), ("class token", [1] + [0] * 12)],
)
def test_it_continues_what_the_row_is(
    read: str, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analysis, "find_readout", lambda *_: None)
    taps = explained(HandWritten(read=read), tmp_path).taps(IMAGES, target=TARGET)
    close(taps.token_weights, np.array([expected] * 3))


def test_a_class_that_no_token_speaks_for_has_no_row(tmp_path: Path) -> None:
    module: Any = HandWritten(read="maximum")
    module.head.weight.data[TARGET[0]] = 0
    explainer = explained(module, tmp_path)
    taps = explainer.taps(IMAGES, target=TARGET[0])
    assert taps.token_weights is not None and not taps.token_weights.any()
    assert explainer.explain(IMAGES, method="rollout", target=TARGET[0]).degenerate.all()


@pytest.mark.parametrize(
    "changes",
    [
        {"global_pool": "max"},
        {"global_pool": "avgmax", "reg_tokens": 2},
        {"global_pool": "max", "class_token": False},
    ],
)
def test_pooling_by_the_maximum_is_exported(changes: dict[str, Any], tmp_path: Path) -> None:
    report = ox.export(small_vit(**changes), tmp_path / "vit.onnx")
    served_and_verified(report)


@pytest.mark.parametrize("name", ["qwen3_vit_88m_merge", "deepseek_vit_412m_align"])
def test_groups_of_patches_are_exported(name: str, tmp_path: Path) -> None:
    size: dict[str, Any] = {"embed_dim": 64, "num_heads": 4, "out_features": 48, "depth": 2}
    sides = {"qwen3_vit_88m_merge": (64, 96), "deepseek_vit_412m_align": (56, 84)}[name]
    module = stir(timm.create_model(name, num_classes=10, img_size=sides, **size))
    report = ox.export(module, tmp_path / "vit.onnx", image_size=sides)
    served_and_verified(report)
    assert report.contract.tokens.grid == (4, 6)
    assert report.contract.readout == Readout(kind="gradient", ranges=((0, 24),))
    explainer = ox.Explainer(report.path, device="cpu", threads=1)
    images = np.random.default_rng(1).normal(size=(2, 3, *sides)).astype(np.float32)
    weights = explainer.taps(images).token_weights
    assert weights is not None and (weights > 0).all()  # it reads every patch
    close(weights.sum(1), np.ones(2))


def served_and_verified(report: graphs.Report) -> None:
    assert report.methods == tuple(METHODS)
    assert report.verification is not None
    differences = report.verification["differences"]
    assert TOKEN_WEIGHTS in differences and max(differences.values()) < SAME
