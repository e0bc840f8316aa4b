"""Weights packed into four bits, against the same model with the weights written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hand_written import SIZE, HandWritten, to_file
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from single_nodes import run

import onnxplain as ox
from onnxplain.graphs import load
from onnxplain.graphs.normal import normalised
from onnxplain.outputs import METHODS

TOLERANCE = 1e-5  # of the largest value, single precision
BLOCK = 16
FEEDS = {
    "image": np.random.default_rng(0).normal(size=(3, 3, *SIZE)).astype(np.float32),
    "target": np.array([1, 4, 2]),
}


def packed(plain: Path, path: Path, *, symmetric: bool) -> Path:
    quantizer = MatMulNBitsQuantizer(
        onnx.load(plain), block_size=BLOCK, is_symmetric=symmetric, accuracy_level=0
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(path))
    return path


def unpacked(path: Path, to: Path) -> Path:
    """In standard operators, and what is computed from constants alone as constants."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(to)
    onnxruntime.InferenceSession(
        ir.to_proto(normalised(load(path))).SerializeToString(), options, ["CPUExecutionProvider"]
    )
    return to


def packed_in(path: Path) -> set[str]:
    tensors = onnx.load(path).graph.initializer
    return {tensor.name for tensor in tensors if tensor.data_type == onnx.TensorProto.UINT8}


@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_are_those_of_the_weights_written_out(symmetric: bool, tmp_path: Path) -> None:
    plain = to_file(HandWritten(), tmp_path / "plain.onnx")
    path = packed(plain, tmp_path / "packed.onnx", symmetric=symmetric)
    float_path = unpacked(path, tmp_path / "float.onnx")
    made, expected = (ox.instrument(p, p.with_suffix(".x.onnx")) for p in (path, float_path))
    assert set(made.methods) == set(METHODS)
    assert len(packed_in(path)) > 5
    assert packed_in(made.path) == packed_in(path)
    assert made.verification is not None
    assert made.verification["gradients"] == "finite differences in float64"
    assert ox.verify(made.path, against=path).within
    outputs = [value.name for value in onnx.load(made.path).graph.output]
    assert outputs == [value.name for value in onnx.load(expected.path).graph.output]
    results = (run(onnx.load(report.path), FEEDS) for report in (made, expected))
    for name, found, right in zip(outputs, *results, strict=True):
        assert np.abs(right).max() > 0, name
        assert np.abs(found - right).max() <= TOLERANCE * np.abs(right).max(), name
