"""Grad-CAM of models without global attention: convolutional, windowed, hierarchical."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import timm
import torch
import torch.nn.functional as F
from chains import parse
from numpy.typing import NDArray
from PIL import Image
from timm.models.hiera import Hiera
from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.outputs import METHODS

# Single precision on both sides, relative to the largest value of the map.
TOLERANCE = 1e-4
ATTENTION_METHODS = [name for name, needs in METHODS.items() if not needs.features]


@dataclass(frozen=True)
class Family:
    """A small model, where torch has its Grad-CAM layer, and what a refusal must say.

    `layer` names the module whose input, or with "->" whose output, is the layer; `nchw` brings
    that to [batch, channels, rows, columns].
    """

    build: Callable[[], nn.Module]
    size: tuple[int, int]
    grid: tuple[int, int]
    layer: str
    reason: str
    nchw: Callable[[Tensor], Tensor] = lambda t: t


def maxvit(block: str) -> nn.Module:
    return MaxxVit(
        MaxxVitCfg(
            embed_dim=(16, 32),
            depths=(1, 1),
            block_type=("C", block),
            stem_width=8,
            transformer_cfg=MaxxVitTransformerCfg(dim_head=8, window_size=(4, 4), grid_size=(4, 4)),
        ),
        img_size=64,
        num_classes=7,
    )


NO_ATTENTION = "no attention found: expected a Softmax"
FAMILIES = {
    "resnet": Family(
        lambda: timm.create_model("test_resnet", num_classes=7),
        (64, 96),
        (2, 3),
        "global_pool",
        NO_ATTENTION,
    ),
    "convnext": Family(
        lambda: timm.create_model("test_convnext", num_classes=7),
        (96, 64),
        (3, 2),
        "head.global_pool",
        NO_ATTENTION,
    ),
    "efficientnet": Family(
        lambda: timm.create_model("test_efficientnet", num_classes=7),
        (64, 96),
        (2, 3),
        "global_pool",
        NO_ATTENTION,
    ),
    "mobilenetv3": Family(
        lambda: timm.create_model("mobilenetv3_small_050", num_classes=7),
        (64, 64),
        (2, 2),
        "global_pool",
        NO_ATTENTION,
    ),
    "swin": Family(
        lambda: SwinTransformer(
            img_size=32,
            patch_size=2,
            window_size=4,
            embed_dim=8,
            depths=(2, 2),
            num_heads=(2, 4),
            num_classes=7,
        ),
        (32, 32),
        (8, 8),
        "norm->",
        "is over windows of 16 of the 256 positions; "
        "expected attention of every token to every token",
        lambda t: t.permute(0, 3, 1, 2),
    ),
    "maxvit": Family(
        lambda: maxvit("M"), (64, 64), (8, 8), "head.global_pool", "is over windows of 16 of the 64"
    ),
    "hiera": Family(
        lambda: Hiera(
            img_size=(64, 128), embed_dim=8, num_heads=1, stages=(1, 1, 1, 1), num_classes=7
        ),
        (64, 128),
        (2, 4),
        "blocks->",
        "is over windows of 64 of the 128 positions",
        lambda t: t.unflatten(1, (2, 4)).permute(0, 3, 1, 2),
    ),
    "pvt_v2": Family(
        lambda: PyramidVisionTransformerV2(
            embed_dims=(8, 8, 16, 16), num_heads=(1, 1, 2, 2), depths=(1, 1, 1, 1), num_classes=7
        ),
        (64, 96),
        (2, 3),
        "stages->",
        "384 queries and 6 keys",
    ),
}


def lively(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with random biases, scales and statistics: fresh ones hide errors."""
    torch.manual_seed(3)
    module = build().eval()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
                noise = torch.randn(tensor.shape)
                tensor.add_(noise.abs() if name.endswith("running_var") else 0.1 * noise)
    return module


def torch_gradcam(
    module: nn.Module, family: Family, images: Tensor, target: Tensor
) -> NDArray[np.float32]:
    """The map by hooks and autograd alone, float32 [batch, rows, columns]."""
    seen: list[Tensor] = []
    name = family.layer.removesuffix("->")
    layer = module.get_submodule(name)
    if isinstance(layer, nn.Sequential | nn.ModuleList):  # its last part, however it is called
        layer = list(layer)[-1]
    if family.layer.endswith("->"):
        handle = layer.register_forward_hook(lambda m, args, output: seen.append(output))
    else:
        handle = layer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    logits = module(images.clone().requires_grad_())
    handle.remove()
    (features,) = seen
    (gradient,) = torch.autograd.grad(logits.gather(1, target[:, None]).sum(), features)
    features, gradient = family.nchw(features.detach()), family.nchw(gradient)
    weights = gradient.mean((2, 3), keepdim=True)
    return F.relu((weights * features).sum(1)).numpy()


@pytest.fixture(scope="module", params=FAMILIES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Family, nn.Module, Path]:
    family = FAMILIES[request.param]
    module = lively(family.build)
    path = tmp_path_factory.mktemp("gradcam") / f"{request.param}.onnx"
    report = ox.export(module, path, image_size=family.size)
    assert report.methods == ("gradcam",)
    assert report.verification is not None
    assert report.verification["differences"].keys() == {
        "logits",
        "features",
        "features_gradient",
    }
    return family, module, path


def test_map_equals_torch(exported: tuple[Family, nn.Module, Path]) -> None:
    family, module, path = exported
    explainer = ox.Explainer(path, device="cpu", threads=1)
    assert explainer.methods == ("gradcam",)
    assert explainer.contract.layers == ()
    assert explainer.contract.readout is None
    assert explainer.contract.tokens.prefix == ()
    assert explainer.contract.tokens.grid == family.grid
    for batch in (1, 3):
        images = torch.randn(batch, 3, *family.size, generator=torch.manual_seed(batch))
        maps = np.stack(
            [torch_gradcam(module, family, images, torch.full((batch,), c)) for c in range(7)]
        )
        target = maps.max((2, 3)).argmax(0)  # classes with something to show
        expected = maps[target, np.arange(batch)]
        result = explainer.explain(images.numpy(), method="gradcam", target=target.tolist())
        assert result.grid.shape == expected.shape == (batch, *family.grid)
        assert expected.max() > 0
        assert len(np.unique(expected)) > 2
        np.testing.assert_allclose(result.grid, expected, rtol=0, atol=TOLERANCE * expected.max())


def test_other_methods_are_refused_with_the_reason(
    exported: tuple[Family, nn.Module, Path], tmp_path: Path
) -> None:
    family, _, path = exported
    plain = plain_of(path, tmp_path)
    for method in ATTENTION_METHODS:
        with pytest.raises(ox.UnsupportedModelError, match=f"{method} is not defined") as error:
            ox.instrument(plain, tmp_path / "x.onnx", methods=[method])
        pixels = "its rules are for transformers"
        assert (pixels if METHODS[method].pixels else family.reason) in str(error.value)
        assert "\n" not in str(error.value)


def plain_of(path: Path, folder: Path) -> Path:
    """The model without what explains it."""
    model = onnx.load(path)
    kept = onnx.utils.Extractor(model).extract_model(["pixel_values"], ["logits"])
    onnx.save(kept, folder / "plain.onnx")
    return folder / "plain.onnx"


# End to end, on a picture


@pytest.fixture(scope="module")
def cnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolutional network by its name, for pictures that are not square."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("cnn") / "cnn.onnx"
    ox.export("test_efficientnet", path, image_size=(64, 96), num_classes=5)
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    noise = np.random.default_rng(0).integers(0, 256, (80, 130, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def test_picture_to_overlay(cnn: Path, picture: Path) -> None:
    explainer = ox.Explainer(cnn, device="cpu", threads=1)
    config = timm.get_pretrained_cfg("test_efficientnet")
    assert config is not None
    assert explainer.contract.input.size == (64, 96)
    assert explainer.contract.input.mean == config.mean
    assert explainer.contract.input.std == config.std
    result = explainer.explain(picture)
    assert result.method == "gradcam"
    assert result.grid.shape == (1, 2, 3)
    assert result.heatmap.shape == (1, 64, 96)
    assert result.overlay()[0].shape == (80, 130, 3)
    taps = explainer.taps(picture)
    assert taps.features is not None and taps.features_gradient is not None
    assert taps.features.shape == taps.features_gradient.shape == (1, 256, 2, 3)
    with pytest.raises(ox.InputError, match="'rollout' is not in this file; it has gradcam"):
        explainer.explain(picture, method="rollout")


def test_commands(cnn: Path, picture: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0
        return done.output

    told = run("inspect", str(cnn))
    assert re.search("features.*2 x 3 positions of the last feature map", told)
    assert re.search("attention.*none of every token", told)
    assert json.loads(run("inspect", str(cnn), "--json"))["layers"] == []
    run("compare", str(cnn), str(picture), "-o", str(tmp_path / "panel.png"))
    assert Image.open(tmp_path / "panel.png").width > 2 * 130
    run("explain", str(cnn), str(picture), "-o", str(tmp_path / "out"))
    assert list((tmp_path / "out").iterdir())


def test_bundle_has_a_plain_graph_and_one_for_gradcam(cnn: Path, tmp_path: Path) -> None:
    report = ox.instrument(plain_of(cnn, tmp_path), tmp_path / "bundle")
    assert report.methods == ("gradcam",)
    names = sorted(path.name for path in (tmp_path / "bundle").glob("*.onnx"))
    assert names == ["gradcam.onnx", "plain.onnx"]
    images = np.random.default_rng(1).normal(size=(2, 3, 64, 96)).astype(np.float32)
    one, other = (
        ox.Explainer(path, device="cpu", threads=1).explain(images)
        for path in (cnn, tmp_path / "bundle")
    )
    np.testing.assert_array_equal(one.grid, other.grid)


# Hand-made graphs: what is found and what is not

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
