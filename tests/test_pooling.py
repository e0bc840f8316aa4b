"""Heads that pool by attention, and blocks that are not one attention before one MLP."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from small_vits import small_vit, stir

import onnxplain as ox
from onnxplain.contract import Contract, Readout
from onnxplain.errors import ContractError, InputError
from onnxplain.outputs import METHODS, POOLING
from onnxplain.runtime import methods

SIZE, GRID = (32, 32), (4, 4)
IMAGES = np.random.default_rng(0).normal(size=(3, 3, *SIZE)).astype(np.float32)
TARGET = [4, 0, 9]
SAME = 1e-5  # float32 on both sides, of the largest value


def close(found: NDArray[Any], expected: NDArray[Any], tolerance: float = SAME) -> None:
    largest = float(np.abs(expected).max())
    assert largest > 0
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest)


def pooled(prefix: int) -> Any:
    return small_vit(global_pool="map", class_token=prefix > 0, reg_tokens=max(prefix - 1, 0))


def weights_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> NDArray[Any]:
    """The pooling attention, mean over heads, caught where torch multiplies with the values."""
    caught: list[torch.Tensor] = []
    pool = module.attn_pool
    pool.fused_attn = False

    def softmax(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        caught.append(original(tensor, *args, **kwargs))
        return caught[-1]

    original = torch.Tensor.softmax
    monkeypatch.setattr(torch.Tensor, "softmax", softmax)
    with torch.no_grad():
        module.eval()(torch.from_numpy(IMAGES))
    monkeypatch.undo()
    assert caught[-1].shape[-2] == 1
    return caught[-1].mean((1, 2)).numpy()


@pytest.fixture(scope="module", params=[0, 3], ids=["patches alone", "class token and registers"])
def prefix(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def model(prefix: int, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    module, path = pooled(prefix), tmp_path_factory.mktemp("pooled") / "vit.onnx"
    report = ox.export(module, path)
    assert report.methods == tuple(METHODS)
    assert report.verification is not None
    assert report.verification["differences"][POOLING] < SAME
    return module, path


def test_maps_start_from_the_pooling_attention(
    model: tuple[Any, Path], prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, path = model
    explainer = ox.Explainer(path, device="cpu", threads=1)
    assert explainer.contract.readout == Readout(kind="attention", ranges=((prefix, 16 + prefix),))
    taps = explainer.taps(IMAGES, target=TARGET)
    assert taps.attention is not None and taps.attention_gradient is not None
    tokens = 16 + prefix
    row = np.zeros((3, 1, tokens))
    row[:, 0, prefix:] = weights_of(module, monkeypatch)
    assert taps.attention_pooling is not None
    close(taps.attention_pooling.mean((1, 2)), row[:, 0, prefix:])
    (a0, a1), (g0, g1) = (
        [np.asarray(layer, np.float64) for layer in kind if layer is not None]
        for kind in (taps.attention, taps.attention_gradient)
    )
    one = np.eye(tokens)

    def rolled(layer: NDArray[Any]) -> NDArray[Any]:
        matrix = layer.mean(1) + one
        return matrix / matrix.sum(-1, keepdims=True)

    def generic(a: NDArray[Any], g: NDArray[Any]) -> NDArray[Any]:
        return np.maximum(a * g, 0).mean(1) + one

    heads = (row[:, None] @ a1)[:, :, 0, prefix:]
    weights = (row[:, None] @ g1)[:, :, 0, prefix:].mean(-1, keepdims=True)
    expected = {
        "raw_attention": (row @ a1.mean(1))[:, 0, prefix:],
        "rollout": (row @ rolled(a1) @ rolled(a0))[:, 0, prefix:],
        "generic_attention": (row @ generic(a1, g1) @ generic(a0, g0))[:, 0, prefix:],
        "attention_gradcam": np.maximum((weights * heads).mean(1), 0),
    }
    for method, values in expected.items():
        grid = explainer.explain(IMAGES, method=method, target=TARGET).grid
        close(grid, values.reshape(3, *GRID))


def test_every_method_is_per_image(model: tuple[Any, Path]) -> None:
    explainer = ox.Explainer(model[1], device="cpu", threads=1)
    for method in METHODS:
        if method == "lrp":  # mostly rounding in float32, see docs/methods.md
            continue
        together = explainer.explain(IMAGES, method=method, target=TARGET).grid
        for i, target in enumerate(TARGET):
            alone = explainer.explain(IMAGES[i : i + 1], method=method, target=target).grid
            error = np.abs(together[i] - alone[0]).max()
            assert error <= (1e-3 if "attribution" in method else 1e-4) * np.abs(together).max()
        assert together.any()


def test_a_bundle_has_the_pooling_attention_where_it_is_read(tmp_path: Path) -> None:
    report = ox.export(pooled(0), tmp_path / "vit", methods=["rollout", "gradcam"], verify=False)
    read = report.contract.methods
    assert POOLING in read["rollout"] and POOLING not in read["gradcam"]
    explainer = ox.Explainer(tmp_path / "vit", device="cpu", threads=1)
    assert explainer.explain(IMAGES, method="rollout").grid.shape == (3, *GRID)
    assert explainer.explain(IMAGES, method="gradcam").grid.shape == (3, *GRID)


def test_weights_for_each_image() -> None:
    random = np.random.default_rng(1)
    attention = [random.random((2, 3, 5, 5)) for _ in range(2)]
    weights = random.random((2, 5))
    together = methods.rollout(attention, readout=weights, prefix_tokens=1)
    for i in range(2):
        alone = methods.rollout([a[i] for a in attention], readout=weights[i], prefix_tokens=1)
        np.testing.assert_array_equal(together[i], alone)
    with pytest.raises(InputError, match=r"readout has shape \(3, 5\)"):
        methods.rollout(attention, readout=random.random((3, 5)))
    with pytest.raises(InputError, match="readout holds NaN"):
        methods.rollout(attention, readout=np.full((2, 5), np.nan))


def test_what_the_head_does_not_do_cannot_be_said(model: tuple[Any, Path], tmp_path: Path) -> None:
    given = {"readout": {"kind": "attention", "ranges": [[0, 16]]}}
    plain = tmp_path / "plain"
    ox.export(small_vit(), plain, methods=["rollout"], verify=False)
    with pytest.raises(InputError, match=r"readout .*attention.*: the head has .*cls"):
        ox.instrument(plain / "plain.onnx", tmp_path / "vit.onnx", contract=given)
    contract = ox.Explainer(model[1], device="cpu", threads=1).contract
    damaged = json.loads(dataclasses.replace(contract).to_json())
    damaged["readout"]["ranges"] = []
    with pytest.raises(ContractError, match="damaged"):
        Contract.from_json(json.dumps(damaged))


@pytest.mark.parametrize(
    "name",
    [
        # The attention beside the MLP: what enters it is what the norm puts out, not the block.
        "vit_pwee_patch16_reg1_gap_256",
        "vit_base_patch16_xp_224",
        # Differential attention: the values are multiplied by a difference of two softmaxes.
        "vit_dwee_patch16_reg1_gap_256",
        "vit_dpwee_patch16_reg1_gap_256",
    ],
)
def test_other_blocks(name: str, tmp_path: Path) -> None:
    size: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3}
    report = ox.export(stir(timm.create_model(name, **size)), tmp_path / "vit.onnx")
    assert report.methods == tuple(METHODS)
    assert report.verification is not None
    assert max(report.verification["differences"].values()) < SAME
