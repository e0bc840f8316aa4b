"""Files whose input states no sizes, as optimum writes them: [batch, channels, height, width]."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from onnxplain.graphs import load
from onnxplain.graphs.findings import find
from onnxplain.graphs.normal.channels_last import channels_first


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
    "positions of rows and columns": lambda: Positions((1, 32, 4, 4)),
}


class Positions(nn.Module):
    """Patches of 8 pixels, on which positions are put in one way or another."""

    def __init__(self, shape: tuple[int, ...], *, sliced: bool = False) -> None:
        super().__init__()
        self.inner, self.sliced = small_vit(), sliced
        self.positions, self.head = nn.Parameter(torch.zeros(shape)), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.patch_embed.proj(x)
        if self.positions.ndim == 4:
            x = x + self.positions
        x = x.flatten(2).transpose(1, 2)
        if self.sliced:
            x = x + self.positions[:, : x.shape[1]]
        tokens = self.inner.norm(self.inner.blocks(x))
        scores: Tensor = self.head(tokens.mean(1))
        return scores


def patches_by(*convolutions: nn.Module, count: int) -> Any:
    """A ViT on 32x32 pixels whose patches are cut in another way."""
    model = small_vit()
    model.patch_embed.strict_img_size = False
    model.patch_embed.proj = nn.Sequential(*convolutions)
    model.pos_embed = nn.Parameter(torch.zeros(1, count + 1, 32))
    return model


# What takes one number of patches, or as many as a table has at most, and does not tell of what
# pictures: several sizes have as many patches, or the patches are not those of one convolution.
SEVERAL: dict[str, Callable[[], nn.Module]] = {
    "overlapping": lambda: patches_by(nn.Conv2d(3, 32, 12, stride=5), count=25),
    "over the edges": lambda: patches_by(nn.Conv2d(3, 32, 7, 4, 3), count=64),
    "dilated": lambda: patches_by(nn.Conv2d(3, 32, 4, 8, dilation=2), count=16),
    "padded stem": lambda: patches_by(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 32, 4, 4), count=16
    ),
    "stem": lambda: patches_by(nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 32, 4, 4), count=16),
    "stem by groups": lambda: patches_by(
        nn.Conv2d(3, 6, 3, 1, 1, groups=3), nn.Conv2d(6, 32, 8, 8), count=16
    ),
    "more positions than patches": lambda: Positions((1, 64, 32), sliced=True),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_size_that_is_not_told_is_asked_for(name: str, tmp_path: Path) -> None:
    """And doing what the error says works."""
    module = lively(SEVERAL[name]())
    plain = torchscript(module, tmp_path / "plain.onnx", 17, (32, 32), open_sizes=True)
    with pytest.raises(UnsupportedModelError, match="the size of pictures; give the size"):
        ox.instrument(plain, tmp_path / "explained.onnx")
    report = compare(module, plain, contract={"input": {"size": [32, 32]}})
    assert report.methods == COMPARED
    assert (report.contract.input.size, report.contract.input.multiple) == ((32, 32), None)


def hand_made(
    path: Path, shape: str, nodes: str = "", channels: int = 3, read: str = "image"
) -> Path:
    """Patches of 8 pixels with 16 positions and one attention; `nodes` make `read` of the image."""
    model = onnx.parser.parse_model(
        f"""
        <ir_version: 9, opset_import: ["": 17]>
        g (float[{shape}] image) => (float[n, 4] logits)
        <float[4, {channels}, 8, 8] kernel, float[1, 16, 4] positions, float[4, 4] square,
         int64[3] flat = {{0, 4, -1}}, int64[1] much = {{262144}}> {{
            {nodes}
            patches = Conv <kernel_shape = [8, 8], strides = [8, 8]> ({read}, kernel)
            rows = Reshape (patches, flat)
            tokens = Transpose <perm = [0, 2, 1]> (rows)
            x = Add (tokens, positions)
            keys = Transpose <perm = [0, 2, 1]> (x)
            products = MatMul (x, keys)
            attention = Softmax (products)
            values = MatMul (x, square)
            mixed = MatMul (attention, values)
            y = Add (x, mixed)
            logits = ReduceMean <axes = [1], keepdims = 0> (y)
        }}
        """
    )
    random = np.random.default_rng(0)
    for name, dims in {
        "kernel": (4, channels, 8, 8),
        "positions": (1, 16, 4),
        "square": (4, 4),
    }.items():
        array = random.normal(size=dims).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    "shape",
    ["n, c, h, w", "n, 3, 32, w", "n, 3, h, 32", "n, c, 32, 32", "2, c, h, w", "n, n, n, n"],
)
@pytest.mark.parametrize("given", [{}, {"size": [32, 32]}])
def test_inputs_that_state_some_sizes(shape: str, given: dict[str, Any], tmp_path: Path) -> None:
    plain = hand_made(tmp_path / "plain.onnx", shape)
    contract = ox.instrument(plain, tmp_path / "x.onnx", contract={"input": given}).contract
    assert (contract.input.layout, contract.input.size) == ("NCHW", (32, 32))


def test_bfloat16(tmp_path: Path) -> None:
    """Its convolution is one that no opset before 22 allows, until it is float32."""
    plain = hand_made(tmp_path / "plain.onnx", "n, c, h, w")
    model = onnx.load(plain)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor)
            narrow = array.astype(onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16))
            tensor.CopyFrom(onnx.numpy_helper.from_array(narrow, tensor.name))
    onnx.save(model, plain)
    contract = ox.instrument(plain, tmp_path / "x.onnx").contract
    assert (contract.precision, contract.input.size) == ("bfloat16", (32, 32))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ("n, 3, 224, w", r"height 224 and width w; .* \(write both into the file, or neither\)"),
        ("n, 4, h, w", r"image has shape \[n,4,h,w\]; expected"),
    ],
)
def test_inputs_that_contradict_the_graph(shape: str, words: str, tmp_path: Path) -> None:
    plain = hand_made(tmp_path / "plain.onnx", shape)
    with pytest.raises(UnsupportedModelError, match=words):
        ox.instrument(plain, tmp_path / "x.onnx")


@pytest.mark.parametrize("shape", ["n, 3, 3, 3", "n, 32, 32, c", "n, h, w, c"])
def test_channels_are_where_the_convolution_takes_them_from(shape: str, tmp_path: Path) -> None:
    turn = "turned = Transpose <perm = [0, 3, 1, 2]> (image)"
    plain = hand_made(tmp_path / "plain.onnx", shape, turn, read="turned")
    _, layout = channels_first(load(plain))
    assert layout == "NHWC"


@pytest.mark.parametrize("shape", ["n, 3, h, w", "n, 3, 32, 32"])
def test_constants_are_bounded(shape: str, tmp_path: Path) -> None:
    """Each of few bytes in the file, where the size is looked for and where operators are written
    out."""
    nodes = "\n".join(
        f"many{i} = ConstantOfShape <value = int64[1] {{{i}}}> (much)" for i in range(600)
    )
    plain = hand_made(tmp_path / "plain.onnx", shape, nodes + "\nunused = Swish (image)")
    model = onnx.load(plain)
    model.opset_import[0].version = 24
    model.graph.node[-1].CopyFrom(
        onnx.parser.parse_node("logits = ReduceMean <keepdims = 0> (y, axis)")
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    onnx.save(model, plain)
    code = (
        "import sys, onnxplain as ox\n"
        "from untrusted_worker import peak\n"
        "try: ox.instrument(sys.argv[1], sys.argv[2])\n"
        "except ox.UnsupportedModelError as error: print(error)\n"
        "print(peak())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, plain, tmp_path / "x.onnx"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
    )
    *_, size = done.stdout.split()
    assert "the size of pictures" in done.stdout or "more than 1073741824 bytes" in done.stdout
    assert int(size) < 2e9


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
    with pytest.raises(UnsupportedModelError, match="the size of pictures; give the size"):
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
    with pytest.raises(UnsupportedModelError, match="the size of pictures; give the size"):
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
    with pytest.raises(UnsupportedModelError, match=r"image has shape \[n,c,h,w\]; .* say where"):
        ox.instrument(tmp_path / "plain.onnx", tmp_path / "explained.onnx")
