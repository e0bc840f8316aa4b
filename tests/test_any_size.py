"""One file for pictures of every size: what torch and a file made for that size alone give."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import timm
import torch
from conftest import toy_contract
from numpy.typing import NDArray
from PIL import Image
from small_vits import small_vit, stir
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.contract import Contract, Readout, Tokens
from onnxplain.export import verify
from onnxplain.export.plain import inference_form, to_onnx
from onnxplain.export.timm_models import dynamic_arguments
from onnxplain.export.torch_features import torch_features
from onnxplain.export.torch_taps import torch_taps
from onnxplain.export.verify import TOLERANCE, relative_difference
from onnxplain.graphs.sizes import for_any_size

SAME = 1e-5  # the same arithmetic in another order, of the largest value
RELEVANCE = 5e-2  # relative L2; ill-conditioned in float32, and position embeddings differ by 1e-7
ILL_CONDITIONED = ("transformer_attribution", "partial_lrp", "lrp")
FREE: dict[str, Any] = {"dynamic_img_size": True}


def _resnet() -> Any:
    torch.manual_seed(3)
    return stir(timm.create_model("test_resnet", num_classes=10)).eval()


MODELS: dict[str, tuple[Callable[[], Any], int]] = {  # and pixels of a patch
    "class token": (lambda: small_vit(**FREE), 8),
    "mean": (lambda: small_vit(global_pool="avg", class_token=False, **FREE), 8),
    "distilled": (lambda: small_vit(VisionTransformerDistilled, **FREE), 8),
    "pooling": (lambda: small_vit(global_pool="map", class_token=False, **FREE), 8),
    "convolutions": (_resnet, 32),
}
OWN, *OTHERS = (4, 4), (3, 5), (6, 2), (1, 3)  # in patches


@pytest.fixture(scope="module", params=MODELS)
def dynamic(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, int]:
    make, patch = MODELS[request.param]
    module, path = make(), tmp_path_factory.mktemp("dynamic") / "any.onnx"
    ox.export(module, path, image_size=(OWN[0] * patch, OWN[1] * patch), dynamic_size=True)
    return module, path, patch


def _images(grid: tuple[int, int], patch: int) -> NDArray[np.float32]:
    size = (2, 3, grid[0] * patch, grid[1] * patch)
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


@pytest.mark.parametrize("grid", [OWN, *OTHERS])
def test_one_file_agrees_with_torch_at_every_size(
    dynamic: tuple[Any, Path, int], grid: tuple[int, int]
) -> None:
    module, path, patch = dynamic
    images, target = _images(grid, patch), [3, 7]
    taps = ox.Explainer(path, device="cpu").taps(images, target=target)
    with inference_form(module) as frozen:
        pixels, classes = torch.from_numpy(images), torch.tensor(target)
        if taps.attention is None:
            maps = torch_features(frozen, pixels, classes, grid).maps
            pairs = [(taps.features, taps.features_gradient)]
            distance = min(
                max(relative_difference(a, x.numpy()), relative_difference(b, y.numpy()))
                for x, y in maps
                for a, b in pairs
                if a is not None and b is not None and a.size == x.numel()
            )
            assert distance < TOLERANCE
            return
        found = torch_taps(frozen, pixels, classes)
    assert taps.attention_gradient is not None
    assert taps.features is not None and taps.features_gradient is not None
    assert found.features is not None and found.features_gradient is not None
    for ours, theirs in (
        (taps.logits, found.logits),
        *zip(taps.attention, found.attention, strict=True),
        *zip(taps.attention_gradient, found.attention_gradient, strict=True),
        (taps.features, found.features),
        (taps.features_gradient, found.features_gradient),
    ):
        assert ours is not None
        assert relative_difference(ours, theirs.numpy()) < TOLERANCE


def test_maps_are_those_of_a_file_for_that_size_alone(
    dynamic: tuple[Any, Path, int], tmp_path: Path
) -> None:
    module, path, patch = dynamic
    grid = OTHERS[0]
    images = _images(grid, patch)
    fixed = tmp_path / "fixed.onnx"
    ox.export(
        module,
        fixed,
        image_size=(grid[0] * patch, grid[1] * patch),
        dynamic_size=False,
        verify=False,
    )
    one, other = ox.Explainer(path, device="cpu"), ox.Explainer(fixed, device="cpu")
    assert one.methods == other.methods
    for ours, theirs in zip(one.explain_each(images), other.explain_each(images), strict=True):
        assert ours.grid.shape == theirs.grid.shape
        assert ours.heatmap.shape == (2, *images.shape[2:])
        if ours.method in ILL_CONDITIONED:
            apart = np.linalg.norm(ours.grid - theirs.grid) / np.linalg.norm(theirs.grid)
            assert apart < RELEVANCE, ours.method
        else:
            assert relative_difference(ours.grid, theirs.grid) < SAME, ours.method


def test_256_by_192_pixels_and_224_by_224(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, tuple[int, ...]]] = []

    def watched(session: Any, feed: Any, path: Path) -> Any:
        outputs = run(session, feed, path)
        if any("relevance" in name for name in outputs):
            tried.append((path.stem, feed["pixel_values"].shape[2:]))
        return outputs

    run = verify._run
    monkeypatch.setattr(verify, "_run", watched)
    module = small_vit(img_size=224, patch_size=16, depth=1, **FREE)
    report = ox.export(module, tmp_path / "any")  # timm's own argument is enough
    assert report.contract.input.multiple == (16, 16)
    assert report.verification is not None
    sizes = [(224, 224), (240, 256)]
    assert report.verification["sizes"] == [list(size) for size in sizes]
    kinds = ("attnlrp", "lrp", "partial_lrp", "relevance")
    assert sorted(tried) == [(kind, size) for kind in kinds for size in sizes]
    for size, grid in (((224, 224), (14, 14)), ((256, 192), (16, 12))):
        explainer = ox.Explainer(tmp_path / "any", device="cpu", image_size=size)
        assert explainer.contract.tokens.grid == grid
        picture = np.random.default_rng(0).integers(0, 256, (300, 200, 3), dtype=np.uint8)
        result = explainer.explain(picture, method="generic_attention")
        assert result.grid.shape == (1, *grid)
        assert result.heatmap.shape == (1, *size)
        images = np.random.default_rng(0).normal(size=(1, 3, *size)).astype(np.float32)
        with torch.inference_mode():
            expected = module.eval()(torch.from_numpy(images)).numpy()
        logits = ox.Explainer(tmp_path / "any", device="cpu").explain(images).logits
        assert relative_difference(logits, expected) < TOLERANCE


class FirstPatches(VisionTransformer):
    """Its head reads the first three patches, of however many."""

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        return self.head(x[:, 1:4].mean(1))


def test_a_head_that_does_not_follow_the_size_is_refused(tmp_path: Path) -> None:
    module = small_vit(FirstPatches, depth=1, **FREE)
    with pytest.raises(ox.UnsupportedModelError, match=r"head reads tokens \(\(1, 4\),\) at"):
        ox.export(module, tmp_path / "x.onnx", methods=["raw_attention"])


def _contract(**changes: Any) -> Contract:
    contract = toy_contract((8, 12))
    image = replace(contract.input, multiple=(4, 4))
    return replace(contract, input=image, **changes)


def test_tokens_and_readout_follow_the_size() -> None:
    tokens = Tokens(prefix=("cls", "reg0"), grid=(2, 3))
    mean = Readout(kind="mean", ranges=((2, 8),))
    contract = _contract(tokens=tokens, readout=mean).at((16, 4))
    assert contract.tokens.grid == (4, 1)
    assert contract.input.size == (16, 4)
    assert contract.readout == Readout(kind="mean", ranges=((2, 6),))
    everything = Readout(kind="mean", ranges=((0, 8),))
    assert _contract(tokens=tokens, readout=everything).at((4, 4)).readout == Readout(
        kind="mean", ranges=((0, 3),)
    )
    token = Readout(kind="cls", ranges=((0, 1),))
    assert _contract(tokens=tokens, readout=token).at(64).readout == token
    assert Contract.from_json(contract.to_json()) == contract


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((9, 12), "9x12 pixels: expected a height that is a multiple of 4"),
        ((0, 4), "expected pixels or (height, width)"),
        ((4,), "expected pixels or (height, width)"),
        (7, "7x7 pixels"),
        (64.0, "image size 64.0: expected pixels or (height, width)"),
        ({4, 8}, "expected pixels or (height, width)"),
        (True, "image size True: expected pixels"),
        (10**6, "up to 32768"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(size: Any, message: str) -> None:
    with pytest.raises(ox.InputError) as caught:
        _contract().at(size)
    assert message in str(caught.value)


def test_sizes_of_numpy_are_sizes() -> None:
    assert _contract().at(np.int64(8)).input.size == (8, 8)
    assert _contract().at(np.array([8, 16])).input.size == (8, 16)


def test_a_model_of_one_size_says_so(tmp_path: Path) -> None:
    # Rotary embeddings whose grid torch records as a constant: found before anything is compared.
    size: dict[str, Any] = {"depth": 1, "embed_dim": 48, "num_heads": 3, "num_classes": 3}
    module = timm.create_model("vit_small_patch16_dinov3", img_size=64, **size)
    with pytest.raises(ox.ModelError, match="dynamic_size=False exports for one"):
        ox.export(module, tmp_path / "x.onnx", dynamic_size=True, verify=False)
    with pytest.raises(ox.InputError, match=r"image_size 90x90.* a multiple of 16x16"):
        ox.export("test_vit", tmp_path / "x.onnx", image_size=90, dynamic_size=True)
    assert not any(tmp_path.iterdir())


def test_networks_without_the_argument_need_none() -> None:
    arguments = {"num_classes": 3}
    assert dynamic_arguments("poolformer_s12", arguments) == arguments
    assert dynamic_arguments("test_vit", arguments) == arguments | {"dynamic_img_size": True}


def test_a_file_for_one_size_says_which(toy_file: Callable[..., Path]) -> None:
    with pytest.raises(ox.InputError, match="224x224 pixels: this file is made for 8x8"):
        ox.Explainer(toy_file(), device="cpu", image_size=224)


def test_a_damaged_multiple_is_named() -> None:
    text = _contract().to_json().replace('"multiple": [4, 4]', '"multiple": [4, 5]')
    with pytest.raises(ox.ContractError, match="damaged"):
        Contract.from_json(text)


# The numbers in the graph


def _graph(numbers: Callable[[int, int], NDArray[Any]]) -> Callable[[tuple[int, int]], ir.Model]:
    """Makes graphs that return constants which follow from the size in pixels."""

    def build(size: tuple[int, int]) -> ir.Model:
        array = numbers(*size)
        image = ir.Value(
            name="image",
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(["batch", 3, *size]),
        )
        constant = ir.Value(name="c", const_value=ir.tensor(array, name="c"))
        same = ir.node("Identity", [constant], name="same")
        (out,) = same.outputs
        out.name, out.type = "out", ir.TensorType(ir.DataType.from_numpy(array.dtype))
        out.shape = ir.Shape(array.shape)
        graph = ir.Graph(
            [image], [out], nodes=[same], initializers=[constant], opset_imports={"": 18}
        )
        return ir.Model(graph, ir_version=8)

    return build


@pytest.mark.parametrize(
    "numbers",
    [
        lambda h, w: np.array([0, -1, 12, h // 4 * (w // 6) + 1, h, 3 * w], np.int64),
        lambda h, w: np.array([[2 * h * w]], np.int64),
        lambda h, w: np.array(1 / (h // 4 * (w // 6)), np.float32),
        lambda h, w: np.array([h // 4, 2 * w, 7], np.float32),
    ],
)
def test_numbers_are_computed_from_the_size(
    numbers: Callable[[int, int], NDArray[Any]], tmp_path: Path
) -> None:
    model = for_any_size(_graph(numbers), "image", (4, 6))
    ir.save(model, tmp_path / "numbers.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "numbers.onnx")
    for height, width in ((4, 6), (28, 18), (400, 600)):
        image = np.zeros((1, 3, height, width), np.float32)
        (found,) = session.run(None, {"image": image})
        np.testing.assert_array_equal(found, numbers(height, width))


@pytest.mark.parametrize(
    "numbers",
    [
        lambda h, w: np.array([math.isqrt(h * w)], np.int64),
        lambda h, w: np.array([h * h], np.int64),
        lambda h, w: np.array([h // 8], np.int64),
        lambda h, w: np.array([math.sqrt(h)], np.float32),
        lambda h, w: np.array([max(h, w)], np.int64),
        lambda h, w: np.zeros(h, np.int64),
    ],
)
def test_other_numbers_are_refused(numbers: Callable[[int, int], NDArray[Any]]) -> None:
    with pytest.raises(ox.UnsupportedModelError, match="export the model for one size"):
        for_any_size(_graph(numbers), "image", (4, 6))


# Files of others


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.onnx"
    ir.save(to_onnx(small_vit(**FREE), image_size=(32, 32), multiple=(8, 8)), path)
    return path


def test_a_graph_for_any_size_needs_one_to_begin_with(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ox.UnsupportedModelError, match="give the size that they are brought"):
        ox.instrument(plain, tmp_path / "x.onnx")
    for given in ([32], [0, 32], "large", 32):
        with pytest.raises(ox.InputError, match="expected"):
            ox.instrument(plain, tmp_path / "x.onnx", contract={"input": {"size": given}})
    with pytest.raises(ox.UnsupportedModelError, match="do not cover 36x32 pixels"):
        ox.instrument(plain, tmp_path / "x.onnx", contract={"input": {"size": [36, 32]}})
    assert not any(tmp_path.iterdir())


def test_half_free_sizes_are_refused(plain: Path, tmp_path: Path) -> None:
    model = ir.load(plain)
    model.graph.inputs[0].shape = ir.Shape(["batch", 3, 32, "width"])
    with pytest.raises(ox.UnsupportedModelError, match="both fixed or both free"):
        ox.instrument(model, tmp_path / "x.onnx", contract={"input": {"size": [32, 32]}})


def test_command_line(plain: Path, tmp_path: Path) -> None:
    def run(*words: Any) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exit_code == 0, result.output
        return result.output

    model, photo = tmp_path / "x.onnx", tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)).save(photo)
    run("instrument", plain, "--img-size", "32", "-o", model, "--methods", "rollout")
    assert json.loads(run("inspect", model, "--json"))["input"]["multiple"] == [8, 8]
    run("explain", model, photo, "--img-size", "16x40", "--kind", "npy", "-o", tmp_path / "map.npy")
    assert np.load(tmp_path / "map.npy").shape == (2, 5)
    refused = CliRunner().invoke(
        app, ["explain", str(model), str(photo), "--img-size", "20", "-o", str(tmp_path / "y.png")]
    )
    assert refused.exit_code == 2
