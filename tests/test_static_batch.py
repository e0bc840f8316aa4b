"""Files whose exporter fixed the batch: any number of images, or one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torchvision
from hand_written import CLASSES, SIZE, HandWritten, to_file
from numpy.typing import NDArray
from small_vits import CONFIGURATIONS
from torch import Tensor, nn

import onnxplain as ox
from onnxplain.outputs import GRAPH_KINDS

TOLERANCE = 1e-5  # of the largest value, single precision
GRADIENTS = GRAPH_KINDS["gradient"]
PLAIN = onnxruntime.SessionOptions()
PLAIN.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def torchvision_vit() -> nn.Module:
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))  # its head is all zeros
    return model


class Centred(nn.Module):
    """A model that is right for one image alone: it takes the mean of all that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = HandWritten()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x - x.mean())
        return logits


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "one axis of batch and heads": (
        lambda: HandWritten(attention="batch * heads, queries, keys"),
        SIZE,
    ),
    "one axis of heads and batch": (
        lambda: HandWritten(attention="heads * batch, queries, keys"),
        SIZE,
    ),
    "torchvision": (torchvision_vit, (32, 32)),
    "timm": (CONFIGURATIONS["class token"], (32, 32)),
    "timm, mean pooling": (CONFIGURATIONS["mean pooling, no class token"], (32, 32)),
}
EXPORTERS: dict[str, dict[str, Any]] = {
    "older exporter": {"opset": 18},
    "current exporter": {"dynamo": True, "opset": 20},
}


def run(path: Path, images: NDArray[np.float32], **feeds: Any) -> dict[str, NDArray[np.float32]]:
    session = onnxruntime.InferenceSession(path, PLAIN, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {"image": images, **feeds}), strict=True))


def pictures(count: int, size: tuple[int, int]) -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=(count, 3, *size)).astype(np.float32)


def close(found: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    assert np.abs(expected).max() > 0, what
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max(), what


@pytest.mark.parametrize(
    ("name", "batch", "exporter"),
    [
        *((name, 1, "older exporter") for name in MODELS),
        ("one axis of heads and batch", 3, "older exporter"),
        ("torchvision", 1, "current exporter"),
        ("torchvision", 3, "current exporter"),
        ("timm", 3, "current exporter"),
    ],
)
def test_any_batch_is_what_the_fixed_one_was(
    name: str, batch: int, exporter: str, tmp_path: Path
) -> None:
    build, size = MODELS[name]
    module = build()
    fixed = to_file(module, tmp_path / "fixed.onnx", batch=batch, size=size, **EXPORTERS[exporter])
    free = to_file(module, tmp_path / "free.onnx", size=size)
    contracts = []
    for path in (fixed, free):
        made = path.with_name(f"explained-{path.name}")
        report = ox.instrument(path, made, methods=GRADIENTS, outputs="taps")
        contracts.append(report.contract)
    assert contracts[0].input.batch is None
    assert contracts[0].layers == contracts[1].layers
    assert contracts[0].readout == contracts[1].readout
    images = pictures(3, size)
    plain = onnxruntime.InferenceSession(fixed, PLAIN, providers=["CPUExecutionProvider"])
    logits = np.concatenate(
        [plain.run(None, {"image": images[i : i + batch]})[0] for i in range(0, 3, batch)]
    )
    together = run(tmp_path / "explained-fixed.onnx", images[:batch])["output"]
    np.testing.assert_array_equal(together, logits[:batch])
    for count in (1, 2, 3):
        found = run(tmp_path / "explained-fixed.onnx", images[:count], target=np.array([2]))
        close(found["output"], logits[:count], "logits")
        expected = run(tmp_path / "explained-free.onnx", images[:count], target=np.array([2]))
        for key, array in expected.items():
            close(found[key], array, key)


def test_a_model_of_one_image_alone_is_explained_one_at_a_time(tmp_path: Path) -> None:
    module = Centred()
    fixed = to_file(module, tmp_path / "fixed.onnx", batch=1)
    contract = ox.instrument(fixed, tmp_path / "explained.onnx").contract
    assert contract.input.batch == 1
    shape = onnx.load(tmp_path / "explained.onnx").graph.input[0].type.tensor_type.shape
    assert shape.dim[0].dim_value == 1
    explainer = ox.Explainer(tmp_path / "explained.onnx", device="cpu", threads=1)
    images = pictures(3, SIZE)
    found = explainer.explain(images, method="generic_attention", target=[1, 2, 0])
    taps = explainer.taps(images, target=[1, 2, 0])
    assert found.grid.shape == (3, 3, 4)
    assert taps.attention_gradient is not None
    for i, target in enumerate((1, 2, 0)):
        centred = torch.from_numpy(images[i : i + 1] - images[i].mean())
        logits, _, gradient = module.inner.expected(centred, torch.tensor([target]))
        close(found.logits[i], logits[0].detach().numpy(), "logits")
        for layer, expected in zip(taps.attention_gradient, gradient, strict=True):
            assert layer is not None
            close(layer[i], expected[0].numpy(), "gradient")


def behind_a_dynamic_input(path: Path) -> Path:
    """The file as exporters leave it that declare a batch of any size, and freeze it inside."""
    model = onnx.load(path)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    for output in model.graph.output:
        output.type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(model, path.with_name(f"frozen-{path.name}"))
    return path.with_name(f"frozen-{path.name}")


@pytest.mark.parametrize(
    ("name", "batch", "exporter"),
    [
        ("torchvision", 3, {}),
        ("torchvision", 2, {"dynamo": True, "opset": 23}),  # with Attention, to be rewritten
        ("timm", 2, {}),
        ("one axis of heads and batch", 2, {}),
    ],
)
def test_a_batch_frozen_behind_a_dynamic_input_is_freed(
    name: str, batch: int, exporter: dict[str, Any], tmp_path: Path
) -> None:
    build, size = MODELS[name]
    fixed = to_file(build(), tmp_path / "fixed.onnx", batch=batch, size=size, **exporter)
    images = pictures(5, size)
    found = []
    for path in (fixed, behind_a_dynamic_input(fixed)):
        made = tmp_path / f"explained-{path.name}"
        assert ox.instrument(path, made, methods=GRADIENTS).contract.input.batch is None
        found.append(run(made, images, target=np.array([2])))
    assert found[0].keys() == found[1].keys()
    for key, array in found[0].items():
        np.testing.assert_array_equal(found[1][key], array, err_msg=key)


def test_a_batch_frozen_behind_a_dynamic_input_that_mixes_images_stays(tmp_path: Path) -> None:
    fixed = to_file(Centred(), tmp_path / "fixed.onnx", batch=2)
    images = pictures(2, SIZE)
    found = []
    for path in (fixed, behind_a_dynamic_input(fixed)):
        made = tmp_path / f"explained-{path.name}"
        assert ox.instrument(path, made, methods=GRADIENTS).contract.input.batch == 2
        shape = onnx.load(made).graph.input[0].type.tensor_type.shape
        assert shape.dim[0].dim_value == 2
        found.append(run(made, images, target=np.array([2])))
    for key, array in found[0].items():
        np.testing.assert_array_equal(found[1][key], array, err_msg=key)


def test_constants_that_differ_between_images_keep_the_batch(tmp_path: Path) -> None:
    class Numbered(nn.Module):
        own: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = HandWritten()
            self.register_buffer("own", torch.arange(2.0).reshape(2, 1, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.inner(x + self.own)
            return logits

    fixed = to_file(Numbered(), tmp_path / "fixed.onnx", batch=2)
    for path in (fixed, behind_a_dynamic_input(fixed)):  # where one image would be broadcast to two
        assert ox.instrument(path, tmp_path / "explained.onnx").contract.input.batch == 2


def test_a_frozen_batch_of_more_than_an_input_may_have_is_refused(tmp_path: Path) -> None:
    plain = to_file(Centred(), tmp_path / "plain.onnx")
    model = onnx.load(plain)
    images, size = "images", onnx.numpy_helper.from_array(np.array([2**40, 3, *SIZE]), "size")
    model.graph.initializer.append(size)
    node = onnx.helper.make_node("Reshape", ["image", "size"], [images])
    for other in model.graph.node:
        other.input[:] = [images if name == "image" else name for name in other.input]
    model.graph.node.insert(0, node)
    onnx.save(model, plain)
    with pytest.raises(ox.UnsupportedModelError, match=r"takes 1099511627776 pictures of"):
        ox.instrument(plain, tmp_path / "explained.onnx")


@pytest.mark.parametrize("batch", [2**20, 2**17])
def test_a_large_batch_is_not_run(batch: int, tmp_path: Path) -> None:
    """Neither one that the input states nor one that is frozen behind it, and freed."""
    model = onnx.load(to_file(HandWritten(), tmp_path / "plain.onnx"))
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    if batch < 2**20:
        dim.dim_value = batch
    size = onnx.numpy_helper.from_array(np.array([batch, 3, *SIZE]), "size")
    model.graph.initializer.append(size)
    for other in model.graph.node:
        other.input[:] = ["images" if name == "image" else name for name in other.input]
    model.graph.node.insert(0, onnx.helper.make_node("Reshape", ["image", "size"], ["images"]))
    onnx.save(model, tmp_path / "plain.onnx")
    with pytest.raises(ox.ModelError, match=f"batch of {batch} pictures .* --no-verify"):
        ox.instrument(tmp_path / "plain.onnx", tmp_path / "x.onnx", methods=GRADIENTS)
    report = ox.instrument(
        tmp_path / "plain.onnx", tmp_path / "x.onnx", methods=GRADIENTS, verify=False
    )
    assert report.contract.input.batch is None
