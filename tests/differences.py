"""Finite differences of small ONNX models, and the reverse walk that must give the same numbers.

Everything runs in float64 under onnx's reference evaluator. Where that evaluator rounds to float32
or lacks a part of an operator, `EXACT` holds the operator's definition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxplain.graphs.backward.gradient import GRADIENT
from onnxplain.graphs.backward.walk import Cotangent, Range, dense, walk
from onnxplain.graphs.builder import Builder
from onnxplain.graphs.values.facts import Dim, Shape
from onnxplain.graphs.values.shapes import infer

__all__ = [
    "TOLERANCE",
    "Array",
    "Case",
    "Differentiated",
    "Fixed",
    "Seed",
    "agree",
    "differences",
    "differentiate",
    "evaluate",
    "one_node",
]

Array = NDArray[Any]

# A power of two, so that float32 inputs of few bits can be moved by it without rounding.
STEP = 2.0**-10
# Relative to the largest element, at least 1. The stencil's error is STEP^4 / 30 = 3e-14 times the
# fifth derivative, which reaches 1e4 here, and rounding adds about 2e-16 |L| / STEP = 2e-12.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Fixed:
    """An operand stored in the model."""

    array: Array


@dataclass(frozen=True)
class Case:
    """One node. `outputs` says for each output whether it has a derivative."""

    op: str
    inputs: Sequence[Array | Fixed | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    opset: int = 17
    outputs: Sequence[bool] = (True,)

    @property
    def operands(self) -> dict[str, Array]:
        """The operands to differentiate for, by name."""
        return {f"x{i}": x for i, x in enumerate(self.inputs) if isinstance(x, np.ndarray)}


@dataclass(frozen=True)
class Seed:
    """Positions start .. stop of one axis of an output, the only ones that have a cotangent."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True)
class Differentiated:
    """A model with the inputs `seed.{output}` and the outputs `cotangent.{tap}`."""

    model: onnx.ModelProto
    found: dict[str, Cotangent]
    shapes: dict[str, Shape]

    @property
    def operators(self) -> list[str]:
        """Operators of the nodes that the walk added."""
        return [n.op_type for n in self.model.graph.node if n.name.startswith("n_explain/")]


def one_node(case: Case) -> onnx.ModelProto:
    """The case as a model. Its first input, unused, stands for the image."""
    kind = helper.np_dtype_to_tensor_dtype
    names = ["" if x is None else f"x{i}" for i, x in enumerate(case.inputs)]
    outputs = [f"y{i}" for i in range(len(case.outputs))]
    node = helper.make_node(case.op, names, outputs, name="node", **case.attributes)
    graph = helper.make_graph(
        [node],
        case.op,
        [
            helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1]),
            *(
                helper.make_tensor_value_info(name, kind(x.dtype), x.shape)
                for name, x in case.operands.items()
            ),
        ],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [
            numpy_helper.from_array(x.array, name)
            for name, x in zip(names, case.inputs, strict=True)
            if isinstance(x, Fixed)
        ],
    )
    opset = helper.make_opsetid("", case.opset)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def differentiate(
    source: onnx.ModelProto, seeds: Mapping[str, Seed | None], taps: Sequence[str]
) -> Differentiated:
    """Walks from `seeds` (None: a whole output) to `taps`; all by name."""
    model = ir.from_proto(source)
    facts = infer(model, model.graph.inputs[0])
    values = {value.name: value for value in facts}
    b = Builder(model.graph, facts)
    cotangents = {values[n]: _seed(b, values[n], s) for n, s in seeds.items()}
    reached = walk(b, cotangents, [values[name] for name in taps], GRADIENT)
    found = {name: reached[values[name]] for name in taps if values[name] in reached}
    shapes = {}
    for name, cotangent in found.items():
        tensor = dense(b, cotangent)
        output = ir.Value()
        b.describe(output, f"cotangent.{name}", tensor.shape, tensor.dtype)
        model.graph.append(ir.node("Identity", [tensor.value], outputs=[output]))
        model.graph.outputs.append(output)
        shapes[name] = tensor.shape
    for output in model.graph.outputs:
        b.describe(output, str(output.name), facts[output].shape, facts[output].dtype)
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)  # recorded shapes against inferred ones
    return Differentiated(proto, found, shapes)


def _seed(b: Builder, value: ir.Value, seed: Seed | None) -> Cotangent:
    shape: list[Dim] = list(b.facts[value].shape)
    place = None
    if seed is not None:
        total = shape[seed.axis]
        assert isinstance(total, int)
        place = Range(seed.axis, seed.start, seed.stop, total)
        shape[seed.axis] = seed.stop - seed.start
    source = ir.Value()
    b.describe(source, f"seed.{value.name}", tuple(shape), b.facts[value].dtype)
    b.graph.inputs.append(source)
    return Cotangent(b.of(source), place)


def evaluate(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Every output of the model, by name."""
    session = ReferenceEvaluator(model, new_ops=EXACT)
    return dict(zip(session.output_names, session.run(None, dict(feeds)), strict=True))


def differences(
    model: onnx.ModelProto,
    feeds: Mapping[str, Array],
    weights: Mapping[str, Array],
    name: str,
    directions: Iterable[Array] | None = None,
) -> Array:
    """Slopes of L = sum of weights times outputs along directions of one input, in its shape.

    Args:
        model: The model.
        feeds: Its inputs.
        weights: By output; those left out weigh nothing.
        name: The input to move.
        directions: None: every element in turn, and the result is the gradient. Otherwise the
            result has one slope for each.
    """
    session = ReferenceEvaluator(model, new_ops=EXACT)
    x, used = feeds[name], list(weights)

    def loss(moved: Array) -> float:
        outputs = session.run(used, {**feeds, name: moved})
        pairs = zip(used, outputs, strict=True)
        return sum(float(np.sum(weights[k].astype(float) * y)) for k, y in pairs)

    def slope(direction: Array) -> float:
        stencil = ((1, 8), (-1, -8), (2, -1), (-2, 1))
        return sum(w * loss(x + (k * STEP * direction).astype(x.dtype)) for k, w in stencil) / (
            12 * STEP
        )

    if directions is not None:
        return np.array([slope(direction) for direction in directions])
    units = np.eye(x.size).reshape(x.size, *x.shape)
    return np.array([slope(unit) for unit in units]).reshape(x.shape)


def agree(found: Array, expected: Array, tolerance: float = TOLERANCE) -> None:
    """Fails unless both have one shape and differ by at most `tolerance`, relatively."""
    assert found.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


def _at(parts: Array, place: tuple[int, ...]) -> Array:
    """Weights [group, out, in] at one position of the kernel."""
    index: tuple[slice | int, ...] = (*[slice(None)] * 3, *place)
    return np.asarray(parts[index])


class Erf(OpRun):
    """In the precision of its input; the evaluator's own rounds to float32."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (_erf(x),)


class Gelu(OpRun):
    """As `Erf`; the evaluator's own is made of that."""

    op_domain = ""

    def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
        if approximate == "tanh":
            inner = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        else:
            inner = _erf(x / math.sqrt(2))
        return ((x / 2 * (1 + inner)).astype(x.dtype),)


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


class Mean(OpRun):
    """With broadcasting, which the evaluator's own lacks."""

    op_domain = ""

    def _run(self, *parts: Array) -> tuple[Array]:
        return (np.asarray(sum(parts) / len(parts)),)


class Pad(OpRun):
    """Constant padding; the evaluator's own refuses negative pads."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        pads: Array,
        value: Array | None = None,
        axes: Array | None = None,
        mode: str = "constant",
    ) -> tuple[Array]:
        assert mode == "constant"
        places = range(x.ndim) if axes is None else [int(a) % x.ndim for a in axes]
        widths = [(0, 0)] * x.ndim
        for i, axis in enumerate(places):
            widths[axis] = (int(pads[i]), int(pads[len(places) + i]))
        kept = tuple(
            slice(max(-a, 0), n + min(b, 0)) for n, (a, b) in zip(x.shape, widths, strict=True)
        )
        fill = 0 if value is None else value.item()
        grown = [(max(a, 0), max(b, 0)) for a, b in widths]
        return (np.pad(x[kept], grown, constant_values=fill),)


class Conv(OpRun):
    """Sum over the positions of the kernel, with groups; the evaluator's own is slow."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int = 1,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array]:
        n = x.ndim - 2
        pads, strides, dilations = pads or [0] * 2 * n, strides or [1] * n, dilations or [1] * n
        x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:n], pads[n:], strict=True)])
        size = [
            (x.shape[2 + i] - dilations[i] * (weight.shape[2 + i] - 1) - 1) // strides[i] + 1
            for i in range(n)
        ]
        y = np.zeros((len(x), group, len(weight) // group, *size), x.dtype)
        parts = weight.reshape(group, -1, *weight.shape[1:])
        for place in itertools.product(*map(range, weight.shape[2:])):
            window = tuple(
                slice(k * d, k * d + (o - 1) * s + 1, s)
                for k, d, o, s in zip(place, dilations, size, strides, strict=True)
            )
            seen = x[(slice(None), slice(None), *window)].reshape(len(x), group, -1, *size)
            y += np.einsum("ngc...,gmc->ngm...", seen, _at(parts, place))
        y = y.reshape(len(x), -1, *size)
        return (y if bias is None else y + bias.reshape(-1, *[1] * n),)


class ConvTranspose(OpRun):
    """The adjoint of `Conv`; the evaluator's own mixes up groups."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int = 1,
        kernel_shape: Sequence[int] | None = None,
        output_padding: Sequence[int] | None = None,
        output_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array]:
        assert bias is None and pads and strides and dilations and output_padding is not None
        n, batch, size = x.ndim - 2, len(x), x.shape[2:]
        grown = [
            (size[i] - 1) * strides[i]
            + dilations[i] * (weight.shape[2 + i] - 1)
            + 1
            + output_padding[i]
            for i in range(n)
        ]
        y = np.zeros((batch, group * weight.shape[1], *grown), x.dtype)
        parts = weight.reshape(group, -1, *weight.shape[1:])
        x = x.reshape(batch, group, -1, *size)
        for place in itertools.product(*map(range, weight.shape[2:])):
            window = tuple(
                slice(k * d, k * d + (o - 1) * s + 1, s)
                for k, d, o, s in zip(place, dilations, size, strides, strict=True)
            )
            share = np.einsum("ngm...,gmc->ngc...", x, _at(parts, place))
            y[(slice(None), slice(None), *window)] += share.reshape(batch, -1, *size)
        kept = tuple(slice(pads[i], grown[i] - pads[n + i]) for i in range(n))
        return (y[(slice(None), slice(None), *kept)],)


def _seen(
    x: Array,
    fill: float,
    ceil_mode: int,
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    dilations: Sequence[int] | None,
    pads: Sequence[int] | None,
) -> Array:
    """What each window of a pooling sees, [batch, channels, *windows, positions of the kernel]."""
    n = len(kernel)
    pads, strides, dilations = pads or [0] * 2 * n, strides or [1] * n, dilations or [1] * n
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilations, strict=True)]
    room = [x.shape[2 + i] + pads[i] + pads[n + i] - reach[i] for i in range(n)]
    size = [(-(-r // s) if ceil_mode else r // s) + 1 for r, s in zip(room, strides, strict=True)]
    over = [max(0, (o - 1) * s - r) for o, s, r in zip(size, strides, room, strict=True)]
    widths = [(pads[i], pads[n + i]) for i in range(n)]
    x = np.pad(x, [(0, 0), (0, 0), *widths], constant_values=fill)
    x = np.pad(x, [(0, 0)] * 2 + [(0, extra) for extra in over], constant_values=math.nan)
    windows = []
    for place in itertools.product(*map(range, kernel)):
        window = tuple(
            slice(k * d, k * d + (o - 1) * s + 1, s)
            for k, d, o, s in zip(place, dilations, size, strides, strict=True)
        )
        windows.append(x[(slice(None), slice(None), *window)])
    return np.stack(windows, axis=-1)


class AveragePool(OpRun):
    """By definition; the evaluator's own fails for some paddings."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        auto_pad: str | None = None,
        ceil_mode: int = 0,
        count_include_pad: int = 0,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] = (),
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array]:
        fill = 0 if count_include_pad else math.nan
        seen = _seen(x, fill, ceil_mode, kernel_shape, strides, dilations, pads)
        return (np.nanmean(seen, axis=-1).astype(x.dtype),)


class MaxPool(OpRun):
    """By definition, with the place of each maximum among all elements of x."""

    op_domain = ""

    def _run(
        self,
        x: Array,
        auto_pad: str | None = None,
        ceil_mode: int = 0,
        dilations: Sequence[int] | None = None,
        kernel_shape: Sequence[int] = (),
        pads: Sequence[int] | None = None,
        storage_order: int = 0,
        strides: Sequence[int] | None = None,
    ) -> tuple[Array, ...]:
        windows = (kernel_shape, strides, dilations, pads)
        seen = _seen(x, math.nan, ceil_mode, *windows)
        places = _seen(np.arange(x.size).reshape(x.shape) + 0.0, math.nan, ceil_mode, *windows)
        best = np.nanargmax(seen, axis=-1)[..., None]
        y, index = (np.take_along_axis(a, best, -1)[..., 0] for a in (seen, places))
        return (y.astype(x.dtype), index.astype(np.int64))[: len(self.onnx_node.output)]


class GlobalMaxPool(OpRun):
    """Of any rank; the evaluator's own drops axes."""

    op_domain = ""

    def _run(self, x: Array) -> tuple[Array]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class QuantizeLinear(OpRun):
    """Per tensor, of any opset; the evaluator's own is of 19."""

    op_domain = ""

    def _run(self, x: Array, scale: Array, zero: Array, **_: Any) -> tuple[Array]:
        range_ = np.iinfo(zero.dtype)
        return (np.clip(np.rint(x / scale) + zero, range_.min, range_.max).astype(zero.dtype),)


class DequantizeLinear(OpRun):
    op_domain = ""

    def _run(self, x: Array, scale: Array, zero: Array, axis: int = 1, **_: Any) -> tuple[Array]:
        if scale.size > 1:  # one for each index of an axis
            others = [i for i in range(x.ndim) if i != axis % x.ndim]
            scale, zero = np.expand_dims(scale, others), np.expand_dims(zero, others)
        return ((x.astype(scale.dtype) - zero.astype(scale.dtype)) * scale,)


EXACT = [Erf, Gelu, Mean, Pad, Conv, ConvTranspose, AveragePool, MaxPool, GlobalMaxPool]
EXACT += [QuantizeLinear, DequantizeLinear]
