"""Older and newer opsets, and what onnxruntime makes of a model: explained as the plain file is.

What a file computes never changes: logits are the same bits where nothing is rewritten but the
opset, 1e-6 otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir
import onnxruntime
import pytest
from hand_written import to_file
from hugging_vit import HEADS, WIDTH, HuggingViT
from onnx import helper
from small_vits import small_vit, stir

import onnxplain as ox
from onnxplain import graphs
from onnxplain.errors import UnsupportedModelError
from onnxplain.outputs import METHODS

optimizer = pytest.importorskip("onnxruntime.transformers.optimizer")
fusion = pytest.importorskip("onnxruntime.transformers.fusion_options")

SIZE = (32, 32)
LOGITS = 1e-6  # of the largest; what is written out rounds otherwise than what is fused
TOLERANCE = 1e-4  # of the largest value
# Plain LRP divides by sums that pass through zero; in float32 only its L2 distance says something.
ILL = ("input_relevance", "map.lrp")
ILL_TOLERANCE = 2e-3
LEVELS = onnxruntime.GraphOptimizationLevel


def timm_vit() -> Any:
    module = small_vit()
    for block in module.blocks:
        block.attn.fused_attn = False
    return module.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return to_file(timm_vit(), folder / "plain.onnx", opset=17, size=SIZE)


@pytest.fixture(scope="module")
def expected(plain: Path) -> dict[str, np.ndarray]:
    return outputs(plain, plain.with_name("plain_explained.onnx"))


def session(path: Path, level: Any = LEVELS.ORT_DISABLE_ALL, save: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 3  # it warns of every file that it saves
    if save is not None:
        options.optimized_model_filepath = str(save)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def optimised(path: Path, level: Any, to: Path) -> Path:
    session(path, level, to)
    return to


def pixels(batch: int = 3) -> np.ndarray:
    return np.random.default_rng(batch).normal(size=(batch, 3, *SIZE)).astype(np.float32)


def outputs(source: Path, path: Path, batch: int = 3) -> dict[str, np.ndarray]:
    """All that the explained file gives; its logits are those of the source."""
    report = ox.instrument(source, path)
    assert set(report.methods) == set(METHODS)
    model = onnx.load(path)
    assert {node.domain for node in model.graph.node} == {""}
    feeds = {"image": pixels(batch), "target": np.arange(batch) + 1}
    run = session(path)
    names = [value.name for value in run.get_outputs()]
    found = dict(zip(names, run.run(None, feeds), strict=True))
    (logits,) = session(source).run(None, {"image": feeds["image"]})
    assert np.abs(found["output"] - logits).max() <= LOGITS * np.abs(logits).max()
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        difference = found[name] - array
        if name in ILL:
            assert np.linalg.norm(difference) <= ILL_TOLERANCE * np.linalg.norm(array), name
        else:
            assert np.abs(difference).max() <= TOLERANCE * np.abs(array).max(), name


def operators(path: Path) -> Counter[str]:
    return Counter(f"{node.domain}.{node.op_type}" for node in onnx.load(path).graph.node)


# Opsets


@pytest.mark.parametrize("opset", [11, 13, 16])
def test_an_older_opset(opset: int, folder: Path, expected: dict[str, np.ndarray]) -> None:
    source = to_file(timm_vit(), folder / f"opset{opset}.onnx", opset=opset, size=SIZE)
    path = folder / f"explained{opset}.onnx"
    found = outputs(source, path)
    assert_same(found, expected)
    (logits,) = session(source).run(None, {"image": pixels()})
    np.testing.assert_array_equal(found["output"], logits)
    assert onnx.load(path).opset_import[0].version == 17


@pytest.fixture(scope="module")
def with_attention(folder: Path) -> Path:
    path = to_file(small_vit().eval(), folder / "23.onnx", opset=23, dynamo=True, size=SIZE)
    assert operators(path)[".Attention"] == 2
    return path


@pytest.mark.parametrize("opset", [23, 24, 25])
def test_the_attention_operator(
    opset: int, with_attention: Path, folder: Path, expected: dict[str, np.ndarray]
) -> None:
    model = onnx.load(with_attention)
    model.opset_import[0].version = opset  # nothing changed for the operators of this file
    source = folder / f"opset{opset}.onnx"
    onnx.save(model, source)
    assert_same(outputs(source, folder / f"explained{opset}.onnx"), expected)


def test_one_image_alone(with_attention: Path, plain: Path, folder: Path) -> None:
    expected = outputs(plain, folder / "one_plain.onnx", batch=1)
    assert_same(outputs(with_attention, folder / "one.onnx", batch=1), expected)


# onnxruntime's optimiser

Optimise = Callable[[Path, Path], Path]


def extended(source: Path, to: Path) -> Path:
    return optimised(source, LEVELS.ORT_ENABLE_EXTENDED, to)


def transformers(source: Path, to: Path, *, level: int | None = None, mha: bool = False) -> Path:
    options = fusion.FusionOptions("vit")
    options.use_multi_head_attention = mha
    optimizer.optimize_model(
        str(source),
        model_type="vit",
        num_heads=HEADS,
        hidden_size=WIDTH,
        optimization_options=options,
        opt_level=level,
    ).save_model_to_file(str(to))
    return to


MICROSOFT = "com.microsoft."


@pytest.mark.parametrize(
    ("opset", "fused"),
    [
        (11, {".LayerNormalization", f"{MICROSOFT}Gelu"}),
        (17, {f"{MICROSOFT}FusedMatMul", f"{MICROSOFT}BiasGelu"}),
    ],
)
def test_a_file_that_onnxruntime_optimised(
    opset: int, fused: set[str], folder: Path, expected: dict[str, np.ndarray]
) -> None:
    source = to_file(timm_vit(), folder / f"source{opset}.onnx", opset=opset, size=SIZE)
    path = extended(source, folder / f"extended{opset}.onnx")
    assert operators(path).keys() >= fused
    assert_same(outputs(path, folder / f"extended{opset}_explained.onnx"), expected)


def test_the_attention_operator_optimised(
    with_attention: Path, folder: Path, expected: dict[str, np.ndarray]
) -> None:
    path = extended(with_attention, folder / "extended23.onnx")
    fused = {".Attention", f"{MICROSOFT}BiasGelu", f"{MICROSOFT}SkipLayerNormalization"}
    assert operators(path).keys() >= fused
    assert_same(outputs(path, folder / "extended23_explained.onnx"), expected)


def test_a_file_of_the_transformers_optimiser(
    plain: Path, folder: Path, expected: dict[str, np.ndarray]
) -> None:
    path = transformers(plain, folder / "optimised.onnx")
    assert operators(path)[f"{MICROSOFT}SkipLayerNormalization"] == 4
    assert_same(outputs(path, folder / "optimised_explained.onnx"), expected)


@pytest.mark.parametrize("opset", [14, 17])
@pytest.mark.parametrize("mha", [False, True])
def test_fused_attention(opset: int, mha: bool, folder: Path) -> None:
    source = folder / f"hugging{opset}.onnx"
    to_file(stir(HuggingViT()).eval(), source, opset=opset, size=SIZE)
    expected = outputs(source, folder / f"hugging{opset}_explained.onnx")
    fused = transformers(source, folder / f"fused{opset}{mha}.onnx", level=0, mha=mha)
    name = "MultiHeadAttention" if mha else "Attention"
    assert operators(fused)[MICROSOFT + name] == 2
    assert_same(outputs(fused, folder / f"fused{opset}{mha}_explained.onnx"), expected)


def test_weights_beside_the_file(folder: Path, expected: dict[str, np.ndarray]) -> None:
    source = to_file(timm_vit(), folder / "inside.onnx", opset=13, size=SIZE)
    path = folder / "beside.onnx"
    model = onnx.load(extended(source, folder / "beside_source.onnx"))
    onnx.save(model, path, save_as_external_data=True, location="beside.bin", size_threshold=64)
    assert_same(outputs(path, folder / "beside_explained.onnx"), expected)


# What is refused


def refused(path: Path, found: str) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        ox.instrument(path, path.with_name("none.onnx"))
    assert str(raised.value).startswith(f"{path}: ")
    assert found in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_layout_of_one_machine(plain: Path, folder: Path) -> None:
    path = optimised(plain, LEVELS.ORT_ENABLE_ALL, folder / "all.onnx")
    assert "com.microsoft.nchwc.Conv" in operators(path)
    refused(path, "is com.microsoft.nchwc.Conv, in a layout of the machine that optimised the")
    refused(path, "optimised by onnxruntime at the level ORT_ENABLE_EXTENDED")


@pytest.mark.parametrize("op", ["QAttention", "PackedAttention", "MatMulBnb4", "BiasSoftmax"])
def test_an_operator_that_is_packed_or_quantised(op: str, plain: Path, folder: Path) -> None:
    model = onnx.load(plain)
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type, softmax.domain = op, "com.microsoft"
    del softmax.attribute[:]
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    path = folder / f"{op}.onnx"
    onnx.save(model, path)
    refused(path, f"node {softmax.name} is com.microsoft.{op}, which has no equal in standard")


def test_what_the_converter_cannot_raise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = to_file(timm_vit(), folder / "old.onnx", opset=12, size=SIZE)

    def failing(*_: object) -> None:
        raise RuntimeError("No Adapter From Version $12 for Same\nand more")

    monkeypatch.setattr(onnx.version_converter, "convert_version", failing)
    refused(old, "opset 12: onnx's version converter cannot raise it to 17 (No Adapter From Ver")


@pytest.mark.parametrize("opset", [10, 26])
def test_an_opset_out_of_range(opset: int, plain: Path, folder: Path) -> None:
    model = onnx.load(plain)
    model.opset_import[0].version = opset
    with pytest.raises(UnsupportedModelError, match=f"opset {opset}; expected 11 to 25"):
        graphs.explain(onnx_ir.from_proto(model))
