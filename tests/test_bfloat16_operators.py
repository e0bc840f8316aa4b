"""Operators in bfloat16 are what they are in float32, whichever way they come by their type.

Each case is built for an element type: what is built in bfloat16 and widened has to give the bits
of what is built in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxplain.graphs.normal.bfloat16 import widened

X = np.array([[-1.5, 0.25, 3.0], [0.5, -2.0, 1.0]], np.float32)
SHAPE = numpy_helper.from_array(np.array([2, 3]), "shape")


def tensor(kind: int, name: str, *values: float) -> onnx.TensorProto:
    return helper.make_tensor(name, kind, [len(values)] if len(values) > 1 else [], values)


def node(op: str, inputs: str, output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], name=f"make_{output}", **attributes)


def constants(kind: int) -> list[onnx.NodeProto]:
    return [
        node("Constant", "", "c", value=tensor(kind, "c", 1, 2, 3)),
        node("Constant", "", "s", value=SHAPE),
        node("ConstantOfShape", "s", "d", value=helper.make_tensor("v", kind, [1], [0.5])),
        node("Mul", "x c", "m"),
        node("Add", "m d"),
    ]


def casts(kind: int) -> list[onnx.NodeProto]:
    return [
        node("Cast", "x", "i", to=TensorProto.INT64),
        node("Cast", "i", "f", to=kind),
        node("CastLike", "i x", "g"),
        node("Cast", "x", "d", to=TensorProto.DOUBLE),
        node("Cast", "d", "e", to=kind),
        node("Sum", "f g e"),
    ]


def made(kind: int) -> list[onnx.NodeProto]:
    return [
        node("EyeLike", "x", "i", dtype=kind),
        node("RandomUniformLike", "x", "r", dtype=kind, seed=1.0),
        node("RandomNormal", "", "n", dtype=kind, seed=1.0, shape=[2, 3]),
        node("Sum", "x i r n"),
    ]


def quantised(kind: int) -> list[onnx.NodeProto]:
    return [
        node("Constant", "", "s", value=tensor(kind, "s", 0.125)),
        node("Constant", "", "z", value=tensor(TensorProto.INT8, "z", 3)),
        node("QuantizeLinear", "x s z", "q"),
        node("DequantizeLinear", "q s z"),
    ]


def bounded(kind: int) -> list[onnx.NodeProto]:
    return [
        node("Constant", "", "l", value=tensor(kind, "l", -1)),
        node("Constant", "", "h", value=tensor(kind, "h", 2)),
        node("Clip", "x l h", "c"),
        node("Constant", "", "one", value=tensor(kind, "one", 1, 1, 1)),
        node("LayerNormalization", "c one", stash_type=kind),
    ]


def attention(kind: int) -> list[onnx.NodeProto]:
    """Two queries, of which the second sees nothing."""
    never = helper.make_tensor("m", kind, [2, 2], [0, -1, -np.inf, -np.inf])
    return [
        node("Constant", "", "mask", value=never),
        node("Constant", "", "four", value=numpy_helper.from_array(np.array([0, 1]), "four")),
        node("Unsqueeze", "x four", "q"),
        node("Attention", "q q q mask", "a", softmax_precision=kind),
        node("Squeeze", "a four"),
    ]


def written(make: Any, kind: int) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        make(kind), "g", [value("x", kind, [2, 3])], [value("y", kind, [2, 3])]
    )
    opset = helper.make_opsetid("", 23 if make is attention else 21)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


@pytest.mark.parametrize("make", [constants, casts, made, quantised, bounded, attention])
def test_operators(make: Any) -> None:
    model = ir.to_proto(widened(ir.from_proto(written(make, TensorProto.BFLOAT16))))
    onnx.checker.check_model(model, full_check=True)
    found, expected = (computed(m) for m in (model, written(make, TensorProto.FLOAT)))
    np.testing.assert_array_equal(found, expected)


def computed(model: onnx.ModelProto) -> NDArray[Any]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (y,) = session.run(None, {"x": X})
    return y


def test_a_model_without_bfloat16_is_left_alone() -> None:
    model = ir.from_proto(written(constants, TensorProto.FLOAT))
    assert widened(model) is model
