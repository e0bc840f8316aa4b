"""The last feature map: found in hand-made graphs and modules, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from chains import parse
from timm.models.crossvit import CrossVit
from torch import Tensor, nn
from torch_gradcam import TOLERANCE, Family, lively, torch_gradcam

import onnxplain as ox

BY_HAND = """
    <ir_version: 10, opset_import: ["" : 20]>
    g (float[batch, 3, 2, 3] image) => (float[batch, 2] logits)
    <float[2, 3, 1, 1] kernel = {1, 0, 0, 0, 1, 0}, float[2, 2] weight = {6, -6, 0, 12},
     float[2, 2] twice = {2, 0, 0, 2}, float[2, 4] four = {1, 1, 0, 0, 0, 0, 1, 1},
     int64[1] none = {0}, int64[1] one = {1}, int64[1] end = {9}, int64[2] flat = {0, -1},
     int64[2] rc = {2, 3}, int64[1] last = {3}, int64[1] back = {-1}, int64[1] low = {-9}>
    { mixed = Conv (image, kernel) maps = Relu (mixed) NODES }
"""
POOLED = "pooled = GlobalAveragePool (maps) tokens = Flatten (pooled) "
HEAD = "logits = Gemm (tokens, weight)"


def by_hand(nodes: str, folder: Path, batch: str = "batch") -> Path:
    text = BY_HAND.replace("NODES", nodes).replace("[batch,", f"[{batch},")
    onnx.save(parse(text), folder / "plain.onnx")
    return folder / "plain.onnx"


@pytest.mark.parametrize(
    "head",
    [
        POOLED + HEAD,
        "pooled = ReduceMean <keepdims = 0> (maps, rc) logits = Gemm (pooled, weight)",
        "pooled = AveragePool <kernel_shape = [2, 3]> (maps) t = Flatten (pooled) "
        "logits = MatMul (t, weight)",
        # Positions that change places after the last known ones do not move those.
        "flipped = Slice (maps, back, low, last, back) " + POOLED.replace("maps", "flipped") + HEAD,
    ],
)
@pytest.mark.parametrize("batch", ["batch", "1", "2"])
def test_gradcam_worked_out_by_hand(head: str, batch: str, tmp_path: Path) -> None:
    """Class weights (6, 0) and (-6, 12) over 6 positions: maps relu(F0) and relu(2 F1 - F0)."""
    ox.instrument(by_hand(head, tmp_path, batch), tmp_path / "explained.onnx")
    explainer = ox.Explainer(tmp_path / "explained.onnx", device="cpu", threads=1)
    image = np.zeros((1, 3, 2, 3), np.float32)
    image[0, 0] = [[1, -2, 3], [0, 5, 4]]
    image[0, 1] = [[2, 1, 1], [-1, 3, 2]]
    image[0, 2] = 9  # which the kernel does not see
    first = [[1, 0, 3], [0, 5, 4]]
    second = [[3, 2, 0], [0, 1, 0]]
    for target, expected in ((0, first), (1, second)):
        result = explainer.explain(image, target=target)
        np.testing.assert_allclose(result.grid[0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "head",
    [
        # The head reads one position: the gradient says nothing of the others.
        "a = Slice (maps, none, one, last) p = ReduceMean <keepdims = 0> (a, rc) "
        "logits = Gemm (p, weight)",
        # More follows than precedes: not the last stage of anything.
        POOLED + "h = Gemm (tokens, twice) k = Gemm (h, twice) " + HEAD.replace("tokens", "k"),
    ],
)
def test_what_has_no_last_feature_map_is_refused(head: str, tmp_path: Path) -> None:
    plain = by_hand(head, tmp_path)
    with pytest.raises(ox.UnsupportedModelError, match="and no last feature map") as error:
        ox.instrument(plain, tmp_path / "explained.onnx")
    assert "\n" not in str(error.value)


class InWindows(nn.Module):
    """Computes on windows and pools them without ever putting the picture together again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.GELU())
        self.head = nn.Linear(12, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).permute(0, 2, 3, 1)  # 8 x 12 positions, windows of 4 x 3
        x = x.unflatten(2, (4, 3)).unflatten(1, (2, 4)).transpose(2, 3)
        self.seen = self.mlp(x.reshape(-1, 12, 8))
        return self.head(self.seen.unflatten(0, (-1, 8)).mean((1, 2)))


def test_windows_are_put_together_in_the_map(tmp_path: Path) -> None:
    def whole(t: Tensor) -> Tensor:
        windows = t.unflatten(1, (4, 3)).unflatten(0, (-1, 2, 4))
        return windows.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)

    family = Family(InWindows, (16, 24), (8, 12), "mlp->", "", whole)
    module = lively(InWindows)
    ox.export(module, tmp_path / "windows.onnx", image_size=(16, 24), verify=False)
    images, target = torch.randn(2, 3, 16, 24), torch.tensor([1, 4])
    expected = torch_gradcam(module, family, images, target)
    explainer = ox.Explainer(tmp_path / "windows.onnx", device="cpu", threads=1)
    found = explainer.explain(images.numpy(), target=target.tolist()).grid
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * expected.max())


def test_a_grid_that_is_not_that_of_the_features_is_refused(tmp_path: Path) -> None:
    plain = by_hand(POOLED + HEAD, tmp_path)
    given: dict[str, Any] = {"tokens": {"prefix": ["cls"], "grid": [3, 3]}}
    with pytest.raises(ox.UnsupportedModelError, match=r"a 3x3 grid was given; .* 2x3 positions"):
        ox.instrument(plain, tmp_path / "explained.onnx", contract=given)


def test_branches_with_tokens_of_their_own_are_refused(tmp_path: Path) -> None:
    module = CrossVit(
        img_size=32,
        img_scale=(1.0, 1.0),
        patch_size=(8, 16),
        embed_dim=(16, 32),
        depth=((1, 1, 0),),
        num_heads=(2, 2),
        mlp_ratio=(2.0, 2.0, 2.0),
        num_classes=7,
    )
    reason = "5 queries and 5 keys, the first one 17 and 17: branches with tokens of their own"
    with pytest.raises(ox.UnsupportedModelError, match=f"{reason}; .* and no last feature map"):
        ox.export(module, tmp_path / "branches.onnx", image_size=32)
