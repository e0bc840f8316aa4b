"""Files that onnxslim and onnxsim made smaller explain as those that they were made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import double
import numpy as np
import onnx
import pytest
from source_framework import COMPARED, UNCHANGED, compare, run, torchscript, with_dynamo
from test_exporters import build, size_of

import onnxplain as ox
from onnxplain import graphs
from onnxplain.export.verify import relative_difference
from onnxplain.outputs import METHODS

onnxsim: Any = pytest.importorskip("onnxsim", reason="onnxsim is not installed")
onnxslim: Any = pytest.importorskip("onnxslim", reason="onnxslim is not installed")

Tool = Callable[[Path, Path], None]

# Relative to the largest value, in double. Constants are folded in single precision, which
# relevance amplifies.
FOLDED = 3e-5


def slim(plain: Path, slimmed: Path) -> None:
    onnx.save(onnxslim.slim(onnx.load(plain)), slimmed)


def simplify(plain: Path, simplified: Path, **options: Any) -> None:
    model, checked = onnxsim.simplify(onnx.load(plain), **options)
    assert checked
    onnx.save(model, simplified)


TOOLS: dict[str, Tool] = {"onnxslim": slim, "onnxsim": simplify}
EXPORTERS = {"older exporter": (torchscript, 17), "current exporter": (with_dynamo, 20)}
MODELS = ["class token", "mean pooling, no class token", "torchvision"]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", MODELS)
def test_slimmed(name: str, exporter: str, tool: str, tmp_path: Path) -> None:
    export, opset = EXPORTERS[exporter]
    module = build(name, opset)
    plain = export(module, tmp_path / "plain.onnx", opset, size_of(name))
    slimmed = tmp_path / "slimmed.onnx"
    TOOLS[tool](plain, slimmed)
    assert len(onnx.load(slimmed).graph.node) < len(onnx.load(plain).graph.node)

    assert compare(module, slimmed).methods == COMPARED

    images = np.random.default_rng(0).normal(size=(3, 3, *size_of(name))).astype(np.float32)
    before, after = (run(path, {"image": images})["scores"] for path in (plain, slimmed))
    assert relative_difference(after, before) <= UNCHANGED
    feed = {"image": images, "target": np.array([1, 4, 7])}
    explained = [graphs.explain(graphs.load(path)) for path in (plain, slimmed)]
    assert all(e.contract.methods.keys() == METHODS.keys() for e in explained)
    expected, found = (double.run(e.models["single"], feed) for e in explained)
    assert found.keys() == expected.keys()
    for output, array in expected.items():
        assert relative_difference(found[output], array) <= FOLDED, output


def test_batch_fixed_on_the_way(tmp_path: Path) -> None:
    """onnxsim fixes the shape of the input on demand; explained, the file takes any batch."""
    module = build("torchvision", 17)
    plain = torchscript(module, tmp_path / "plain.onnx", 17, (32, 32))
    fixed = tmp_path / "fixed.onnx"
    simplify(plain, fixed, overwrite_input_shapes={"image": [2, 3, 32, 32]})
    outputs = []
    for path in (plain, fixed):
        explained = path.with_name(f"explained-{path.name}")
        ox.instrument(path, explained, methods=COMPARED, outputs="both")
        images = np.random.default_rng(0).normal(size=(3, 3, 32, 32)).astype(np.float32)
        outputs.append(run(explained, {"image": images, "target": np.array([1, 4, 7])}))
    assert outputs[0].keys() == outputs[1].keys()
    for output, array in outputs[0].items():
        assert relative_difference(outputs[1][output], array) <= UNCHANGED, output
