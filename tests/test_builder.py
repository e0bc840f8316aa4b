"""What the builder saves: transposes that cancel, or that wait for the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from chains import outputs_of, parse
from differences import Array, agree, evaluate
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxplain.graphs.backward.relevance import divide
from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.values.shapes import infer

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[batch, 3, 4] x, float[batch, 4, 3] z) => () {
    xt = Transpose <perm = [0, 2, 1]> (x)
    y = Add(xt, z)
}
"""
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
Z = np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32)


XT = X.transpose(0, 2, 1)
Write = Callable[[Builder, Tensor, Tensor, Tensor], Tensor]


def built(write: Write) -> tuple[list[str], Array]:
    """Operators that the builder adds for an expression, and the value of the expression."""
    model = ir.from_proto(outputs_of(parse(MODEL), ["y"]))
    facts = infer(model, model.graph.inputs[0])
    b = Builder(model.graph, facts)
    names = {str(value.name): b.of(value) for value in facts}
    result = write(b, names["x"], names["xt"], names["z"])
    output = b.op("Identity", [result], result.shape)
    b.rename(output, "out")
    model.graph.outputs.append(output.value)
    RemoveUnusedNodesPass()(model)
    added = [node.op_type for node in model.graph if str(node.name).startswith("n_explain/")]
    proto = outputs_of(ir.to_proto(model), ["out"])
    return added[:-1], evaluate(proto, {"x": X, "z": Z})["out"]


@pytest.mark.parametrize(
    ("write", "added", "expected"),
    [
        (lambda b, x, xt, z: b.swap(xt), [], X),
        (lambda b, x, xt, z: b.swap(b.swap(z)), [], Z),
        (lambda b, x, xt, z: b.mul(xt, b.swap(x)), ["Mul", "Transpose"], XT * XT),
        (lambda b, x, xt, z: b.swap(b.mul(xt, xt)), ["Mul"], X * X),
        (lambda b, x, xt, z: b.mul(xt, 0.5), ["Mul", "Transpose"], XT / 2),
        (lambda b, x, xt, z: b.mul(xt, z), ["Mul"], XT * Z),
        (lambda b, x, xt, z: b.mul(xt, b.slice(z, 1, 0, 1)), ["Slice", "Mul"], XT * Z[:, :1]),
    ],
)
def test_transposes_wait(write: Write, added: list[str], expected: Array) -> None:
    operators, value = built(write)
    assert operators == added
    np.testing.assert_array_equal(value, expected)


def test_division_by_zero_is_zero() -> None:
    """Residual sums cancel exactly now and then; what they divide may be anything."""
    model = ir.from_proto(outputs_of(parse(MODEL), ["y"]))
    facts = infer(model, model.graph.inputs[0])
    b = Builder(model.graph, facts)
    a, c = (b.of(value) for value in facts if value.name in ("z", "y"))
    b.rename(divide(b, a, c), "out")
    model.graph.outputs.append(next(v for n in model.graph for v in n.outputs if v.name == "out"))
    proto = outputs_of(ir.to_proto(model), ["out"])
    z, y = np.full((1, 4, 3), 3, np.float32), np.zeros((1, 4, 3), np.float32)
    y[0, 0] = 1e-3, -1e-9, 4
    found = evaluate(proto, {"x": (y - z).transpose(0, 2, 1), "z": z})["out"]
    divisor = z + (y - z)
    expected = np.divide(z, divisor, out=np.zeros_like(z), where=divisor != 0)
    assert np.count_nonzero(divisor == 0) == 10
    agree(found, expected, 1e-6)
