"""Grad-CAM of models without global attention: convolutional, windowed, hierarchical."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import timm
import torch
from PIL import Image
from timm.layers.attention import Attention
from timm.models.hiera import Hiera
from timm.models.maxxvit import MaxxVit, MaxxVitCfg, MaxxVitTransformerCfg
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from torch import Tensor, nn
from torch_gradcam import TOLERANCE, Family, lively, torch_gradcam
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.outputs import METHODS

ATTENTION_METHODS = [name for name, needs in METHODS.items() if not needs.features]


class Convolved(nn.Module):
    """Two layers of attention to all positions, with a convolution between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.layers = nn.ModuleList([Attention(8, num_heads=2) for _ in range(2)])
        self.mix = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = self.mix(x + layer(x.flatten(2).mT).mT.unflatten(2, (4, 6)))
        return self.head(self.pool(x).flatten(1))


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
    "convolved": Family(
        Convolved,
        (16, 24),
        (4, 6),
        "pool",
        "tokens of attention softmax cannot be followed from the picture through all layers",
    ),
}


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
