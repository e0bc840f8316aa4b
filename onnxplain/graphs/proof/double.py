"""A part of a graph in float64, where finite differences have digits to spare.

onnxruntime's CPU has float64 kernels for products, norms, softmax and arithmetic, and none for Erf,
Conv and some others: `WRITTEN_OUT` says in other operators what these compute.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Set

import numpy as np
import onnx_ir as ir
from numpy.polynomial import Chebyshev, Polynomial
from onnx_ir.tape import Tape

__all__ = ["in_double"]

DOUBLE = ir.DataType.DOUBLE
SHORTER = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def in_double(graph: ir.Graph, values: Set[ir.Value]) -> None:
    """Computes `values` in float64, and everything else as before.

    Weights stay as small as they are and are cast when they are needed.

    Args:
        graph: Its values have types. It is changed in place.
        values: With each of them all that is computed from it.
    """
    cast: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if not values.isdisjoint(node.outputs)]:
        made = _Nodes()
        if node.op_type == "Cast" and node.attributes["to"].as_int() in SHORTER:
            node.attributes["to"] = ir.AttrInt64("to", DOUBLE)
        for i, value in enumerate(node.inputs):
            if value is not None and value not in values and value.dtype in SHORTER:
                if value not in cast:
                    cast[value] = made.op("Cast", value, to=int(DOUBLE))
                    cast[value].shape, cast[value].type = value.shape, ir.TensorType(DOUBLE)
                node.replace_input_with(i, cast[value])
        for value in node.outputs:
            if value.dtype in SHORTER:
                value.type = ir.TensorType(DOUBLE)
        write = WRITTEN_OUT.get(node.op_type) if node.domain == "" else None
        written = None if write is None else write(made, node)
        graph.insert_before(node, made.tape.nodes)
        if written is not None:
            written.type = ir.TensorType(DOUBLE)
            node.outputs[0].replace_all_uses_with(written, replace_graph_outputs=True)
            graph.remove(node, safe=True)


class _Nodes:
    """Nodes in the making."""

    def __init__(self) -> None:
        self.tape = Tape()

    def op(self, op_type: str, *inputs: ir.Value | np.ndarray, **attributes: object) -> ir.Value:
        values = [v if isinstance(v, ir.Value) else self._constant(v) for v in inputs]
        return self.tape.op(op_type, values, attributes)  # type: ignore[arg-type]

    def _constant(self, array: np.ndarray) -> ir.Value:
        return self.tape.op("Constant", [], {"value": ir.tensor(np.asarray(array))})

    def erf(self, x: ir.Value) -> ir.Value:
        """sign(x) (1 - t exp(P(t) - z z)), z = |x|, t = 2 / (2 + z)."""
        z = self.op("Min", self.op("Abs", x), _float(_ERF_ENDS))
        t = self.op("Div", _float(2), self.op("Add", z, _float(2)))
        highest, *others = reversed(_erf_exponent())
        power = self.op("Mul", t, _float(highest))
        for i, coefficient in enumerate(others):
            power = self.op("Mul", power, t) if i else power
            power = self.op("Add", power, _float(coefficient))
        power = self.op("Sub", power, self.op("Mul", z, z))
        rest = self.op("Mul", t, self.op("Exp", power))
        return self.op("Mul", self.op("Sign", x), self.op("Sub", _float(1), rest))


_ERF_ENDS = 6.0  # beyond it erf is 1 to the last bit
_ERF_DEGREE = 14  # within 4e-12, the slope within 2e-9


@functools.cache
def _erf_exponent() -> list[float]:
    """Coefficients of P, lowest first, where erfc(z) = t exp(P(t) - z z) for z from 0 on.

    The form is that of Press et al., Numerical Recipes, section 6.2.2.
    """

    def exponent(t: np.ndarray) -> np.ndarray:
        z = 2 / t - 2
        return np.array([math.log(math.erfc(x) / y) + x * x for x, y in zip(z, t, strict=True)])

    series = Chebyshev.interpolate(exponent, _ERF_DEGREE, domain=[2 / (2 + _ERF_ENDS), 1])
    return list(series.convert(kind=Polynomial).coef)


def _float(value: float) -> np.ndarray:
    return np.array(value, np.float64)


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _number(node: ir.Node, name: str, default: float) -> np.ndarray:
    attribute = node.attributes.get(name)
    return _float(default if attribute is None else attribute.as_float())


def _erf(make: _Nodes, node: ir.Node) -> ir.Value:
    return make.erf(_input(node))


def _gelu(make: _Nodes, node: ir.Node) -> ir.Value | None:
    """That by Erf; the one by Tanh is a function which onnxruntime writes out itself."""
    approximate = node.attributes.get("approximate")
    if approximate is not None and approximate.as_string() != "none":
        return None
    x = _input(node)
    erf = make.erf(make.op("Mul", x, _float(0.5**0.5)))
    return make.op("Mul", make.op("Mul", x, _float(0.5)), make.op("Add", erf, _float(1)))


def _leaky_relu(make: _Nodes, node: ir.Node) -> ir.Value:
    x = _input(node)
    below = make.op("Mul", make.op("Min", x, _float(0)), _number(node, "alpha", 0.01))
    return make.op("Add", make.op("Relu", x), below)


def _hard_sigmoid(make: _Nodes, node: ir.Node) -> ir.Value:
    scaled = make.op("Mul", _input(node), _number(node, "alpha", 0.2))
    return make.op("Clip", make.op("Add", scaled, _number(node, "beta", 0.5)), _float(0), _float(1))


def _hard_swish(make: _Nodes, node: ir.Node) -> ir.Value:
    x = _input(node)
    scaled = make.op("Add", make.op("Mul", x, _float(1 / 6)), _float(0.5))
    return make.op("Mul", x, make.op("Clip", scaled, _float(0), _float(1)))


def _global_average_pool(make: _Nodes, node: ir.Node) -> ir.Value | None:
    x = _input(node)
    if x.shape is None:
        return None
    positions = make.op("ReduceProd", make.op("Shape", x, start=2), keepdims=0)
    total = make.op("ReduceSum", x, _ints(*range(2, len(x.shape))))
    return make.op("Div", total, make.op("Cast", positions, to=int(DOUBLE)))


def _conv(make: _Nodes, node: ir.Node) -> ir.Value | None:
    """The sum over the positions of the kernel of what each weighs there."""
    x, kernel = _input(node), node.inputs[1]
    assert kernel is not None
    padding = node.attributes.get("auto_pad")
    known = kernel.shape is not None and kernel.shape.is_static()
    if not known or (padding is not None and padding.as_string() != "NOTSET"):
        return None
    assert kernel.shape is not None
    outs, ins, *sizes = kernel.shape.numpy()
    n = len(sizes)
    strides, dilations, pads = (
        list(node.attributes[name].as_ints()) if name in node.attributes else default
        for name, default in (("strides", [1] * n), ("dilations", [1] * n), ("pads", [0] * 2 * n))
    )
    groups = node.attributes["group"].as_int() if "group" in node.attributes else 1
    if any(pads):
        x = make.op("Pad", x, _ints(0, 0, *pads[:n], 0, 0, *pads[n:]))
    axes, flat = _ints(*range(2, 2 + n)), _ints(0, groups, ins, -1)
    last = np.iinfo(np.int64).max
    total = seen = None
    for place in itertools.product(*map(range, sizes)):
        starts = [at * d for at, d in zip(place, dilations, strict=True)]
        after = [(k - 1 - at) * d for k, at, d in zip(sizes, place, dilations, strict=True)]
        ends = [-rest if rest else last for rest in after]
        seen = make.op("Slice", x, _ints(*starts), _ints(*ends), axes, _ints(*strides))
        weights = make.op("Slice", kernel, _ints(*place), _ints(*(at + 1 for at in place)), axes)
        weights = make.op("Reshape", weights, _ints(groups, outs // groups, ins))
        part = make.op("MatMul", weights, make.op("Reshape", seen, flat))
        total = part if total is None else make.op("Add", total, part)
    assert total is not None and seen is not None
    batch = make.op("Shape", seen, start=0, end=1)
    shape = make.op("Concat", batch, _ints(outs), make.op("Shape", seen, start=2), axis=0)
    result = make.op("Reshape", total, shape)
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        bias = make.op("Reshape", node.inputs[2], _ints(outs, *[1] * n))
        result = make.op("Add", result, bias)
    return result


def _input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value


WRITTEN_OUT: dict[str, Callable[[_Nodes, ir.Node], ir.Value | None]] = {
    "Conv": _conv,
    "Erf": _erf,
    "Gelu": _gelu,
    "GlobalAveragePool": _global_average_pool,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "LeakyRelu": _leaky_relu,
}
