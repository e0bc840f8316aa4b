"""Files that compute in float16: explained in float32, against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hand_written import SIZE, HandWritten, to_file
from numpy.typing import NDArray
from small_vits import small_vit
from torch import Tensor, nn

import onnxplain as ox
from onnxplain.export.plain import inference_form
from onnxplain.export.torch_taps import torch_taps
from onnxplain.outputs import METHODS

# Every value of the forward pass is rounded to 11 bits, 2**-11 of it, some thirty times one after
# another; the roundings are independent. What is added to the graph computes in float32.
HALF = 2.0**-8
IMAGES = np.random.default_rng(0).normal(size=(3, 3, *SIZE)).astype(np.float16)
TARGET = np.array([1, 4, 2])


class Wrapped(nn.Module):
    """float32 pixels in, float32 logits out, float16 between them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.anchor = nn.Parameter(torch.zeros(1))  # of the type of the pixels

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x.half())
        return logits.float()


def run(path: Path, **feeds: Any) -> dict[str, NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds), strict=True))


def close(found: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    largest = np.abs(expected).max()
    assert largest > 0, what
    assert np.isfinite(found).all(), what
    assert np.abs(found.astype(np.float64) - expected).max() <= HALF * largest, what


def rounded() -> HandWritten:
    """The float32 model with the weights that the file has."""
    return HandWritten().half().float()


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with float16 input, weights, arithmetic and output."""
    return to_file(HandWritten().half(), tmp_path_factory.mktemp("half") / "plain.onnx")


@pytest.fixture(scope="module")
def explained(halves: Path) -> Path:
    path = halves.with_name("explained.onnx")
    contract = ox.instrument(halves, path).contract
    assert contract.precision == "half"
    assert set(contract.methods) == set(METHODS)
    return path


def assert_taps(found: dict[str, NDArray[Any]]) -> None:
    images = torch.from_numpy(IMAGES.astype(np.float32))
    logits, attention, gradient = rounded().expected(images, torch.from_numpy(TARGET))
    close(found["output"], logits.numpy(), "logits")
    for i in range(2):
        close(found[f"attention.{i}"], attention[i].numpy(), f"attention {i}")
        close(found[f"attention_gradient.{i}"], gradient[i].numpy(), f"gradient {i}")


def test_attention_and_gradients_equal_torch(explained: Path) -> None:
    found = run(explained, image=IMAGES, target=TARGET)
    assert_taps(found)
    assert found.pop("output").dtype == np.float16
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}
    assert all(np.isfinite(array).all() for array in found.values())


@pytest.mark.parametrize("exporter", [{"opset": 17}, {"dynamo": True, "opset": 20}], ids=str)
def test_float32_at_both_ends(exporter: dict[str, Any], tmp_path: Path) -> None:
    path = to_file(Wrapped(HandWritten().half()), tmp_path / "plain.onnx", **exporter)
    ox.instrument(path, tmp_path / "explained.onnx")
    found = run(tmp_path / "explained.onnx", image=IMAGES.astype(np.float32), target=TARGET)
    assert_taps(found)
    assert {array.dtype for array in found.values()} == {np.dtype(np.float32)}


def test_a_timm_model(tmp_path: Path) -> None:
    path = to_file(
        small_vit().half(), tmp_path / "plain.onnx", size=(32, 32), dynamo=True, opset=20
    )
    ox.instrument(path, tmp_path / "explained.onnx", outputs="taps")
    images = np.random.default_rng(1).normal(size=(3, 3, 32, 32)).astype(np.float16)
    found = run(tmp_path / "explained.onnx", image=images, target=TARGET)
    with inference_form(small_vit().half().float().eval()) as frozen:
        pixels = torch.from_numpy(images.astype(np.float32))
        taps = torch_taps(frozen, pixels, torch.from_numpy(TARGET))
    for i, (a, g) in enumerate(zip(taps.attention, taps.attention_gradient, strict=True)):
        assert isinstance(a, Tensor) and isinstance(g, Tensor)
        close(found[f"attention.{i}"], a.numpy(), f"attention {i}")
        close(found[f"attention_gradient.{i}"], g.numpy(), f"gradient {i}")


def test_relevance_is_that_of_the_float32_model(explained: Path, tmp_path: Path) -> None:
    """Its rules divide by sums that pass through zero, so it is compared as a whole; those of `lrp`
    most of all, down to the pixels, which magnifies roundings a hundredfold."""
    plain = to_file(rounded(), tmp_path / "plain.onnx")
    ox.instrument(plain, tmp_path / "explained.onnx")
    expected = run(tmp_path / "explained.onnx", image=IMAGES.astype(np.float32), target=TARGET)
    found = run(explained, image=IMAGES, target=TARGET)
    checked = 0
    for name in expected:
        if name.startswith("map.") and expected[name].any():
            one, other = found[name].ravel(), expected[name].ravel()
            least = 0.95 if name == "map.lrp" else 0.999
            assert np.corrcoef(one, other)[0, 1] > least, name
            checked += 1
    assert checked >= 9


def test_the_model_computes_what_it_did(halves: Path, explained: Path) -> None:
    """Its nodes are there as they were. onnxruntime's CPU computes in float32 and rounds to float16
    between some nodes, between others when other nodes are there: that is the last bit."""
    nodes = [
        (node.op_type, list(node.input), node.output[0], str(node.attribute))
        for node in onnx.load(explained).graph.node
    ]
    for node in onnx.load(halves).graph.node:
        assert (node.op_type, list(node.input), node.output[0], str(node.attribute)) in nodes
    own = run(halves, image=IMAGES)["output"]
    bit = np.spacing(np.abs(own).max())
    assert np.abs(run(explained, image=IMAGES)["output"] - own).max() <= bit


def test_the_runtime_feeds_float16(explained: Path, tmp_path: Path) -> None:
    explainer = ox.Explainer(explained, device="cpu", threads=1)
    taps = explainer.taps(IMAGES.astype(np.float32), target=TARGET.tolist())
    assert taps.logits.dtype == np.float32
    found = run(explained, image=IMAGES, target=TARGET)
    np.testing.assert_array_equal(taps.logits, found["output"])
    picture = np.random.default_rng(3).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    for method in METHODS:
        result = explainer.explain(picture, method=method)
        assert np.isfinite(result.heatmap).all(), method


def test_preprocessing_and_stored_weights(halves: Path, explained: Path, tmp_path: Path) -> None:
    path = tmp_path / "embedded.onnx"
    report = ox.instrument(halves, path, embed_preprocessing=True, precision="fp16")
    assert report.contract.precision == "half"
    picture = np.random.default_rng(3).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    one, other = (ox.Explainer(p, device="cpu", threads=1) for p in (path, explained))
    close(one.explain(picture).logits, other.explain(picture).logits, "logits")
