"""Sums, means and maxima over axes, and the normalisations built on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxplain.graphs.backward.gradient.table import Grads, Results, first, rule, where
from onnxplain.graphs.backward.walk import Step
from onnxplain.graphs.builder import Builder, Tensor

__all__: list[str] = []  # imported for its entries


@rule("Softmax")  # y * (g - sum(g * y))
def _(s: Step, g: Grads) -> Results:
    b, axis = s.b, s.integer("axis", -1) % s.y.rank
    dots = s.dots if axis == s.y.rank - 1 else None
    if dots is None:
        dots = b.sum(b.mul(first(g), s.y), [axis])
    return (b.mul(s.y, b.sub(first(g), dots)),)


@rule("LogSoftmax")  # g - softmax * sum(g)
def _(s: Step, g: Grads) -> Results:
    b = s.b
    return (b.sub(first(g), b.mul(b.unary("Exp", s.y), b.sum(first(g), [s.integer("axis", -1)]))),)


@rule("LayerNormalization", "InstanceNormalization")
def _(s: Step, g: Grads) -> Results:
    axes, weight, c, r = normalisation(s)
    return (unnormalised(s.b, s.b.mul(first(g), weight), axes, c, r),)


def unnormalised(b: Builder, gw: Tensor, axes: Sequence[int], c: Tensor, r: Tensor) -> Tensor:
    """r (gw - mean(gw)) - c r^3 mean(gw c), with c = x - mean and r = 1 / deviation."""
    tilt = b.mul(b.mul(r, b.mul(r, r)), b.mean(b.mul(gw, c), axes))
    return b.sub(b.mul(b.sub(gw, b.mean(gw, axes)), r), b.mul(c, tilt))


def normalisation(s: Step) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Of a normalisation: its axes, its scale, x - mean, and 1 / deviation."""
    b, x, scale = s.b, s.input(0), s.input(1)
    if any(s.wants[1:]):
        raise s.refuse("its scale or bias depends on the attention")
    axes = list(range(s.integer("axis", -1) % x.rank, x.rank))
    if s.node.op_type == "InstanceNormalization":  # over rows and columns, its scale per channel
        axes = list(range(2, x.rank))
        scale = b.reshape(scale, (x.shape[1], *(1,) * len(axes)))
    elif x.dtype.name == "FLOAT":  # the operator's own statistics are always float32
        shape = tuple(1 if i in axes else d for i, d in enumerate(x.shape))
        mean, r = s.output(1, shape), s.output(2, shape)
        return axes, scale, b.sub(x, mean), r
    return axes, scale, *statistics(b, x, axes, s.real("epsilon", 1e-5))


def statistics(b: Builder, x: Tensor, axes: Sequence[int], epsilon: float) -> tuple[Tensor, Tensor]:
    """x - mean and 1 / deviation over `axes`."""
    centred = b.sub(x, b.mean(x, axes))
    variance = b.add(b.mean(b.mul(centred, centred), axes), epsilon)
    return centred, b.unary("Reciprocal", b.unary("Sqrt", variance))


@rule("ReduceL2")  # g x / y; 0 where all x are 0
def _(s: Step, g: Grads) -> Results:
    b, norm = s.b, spread(s, s.y)
    share = where(s, b.compare("Greater", norm, 0), b.div(spread(s, first(g)), norm))
    return (b.mul(s.input(0), share),)


@rule("LpNormalization")  # (g - y sum(g y)) / norm; 0 where all x are 0
def _(s: Step, g: Grads) -> Results:
    b, axis = s.b, s.integer("axis", -1)
    if s.integer("p", 2) != 2:
        raise s.refuse(f"p is {s.integer('p', 2)}; expected 2")
    norm = b.reduce("ReduceL2", s.input(0), [axis], keepdims=True)
    along = b.mul(s.y, b.sum(b.mul(first(g), s.y), [axis]))
    result = b.div(b.sub(first(g), along), norm)
    return (where(s, b.compare("Greater", norm, 0), result),)


@rule("BatchNormalization")  # inference: x * scale / sqrt(variance + epsilon), per channel
def _(s: Step, g: Grads) -> Results:
    b, x = s.b, s.input(0)
    if s.integer("training_mode", 0) or any(s.wants[1:]):
        raise s.refuse("it is in training mode or its parameters depend on the attention")
    deviation = b.unary("Sqrt", b.add(s.input(4), s.real("epsilon", 1e-5)))
    factor = b.div(s.input(1), deviation)
    return (b.mul(first(g), b.reshape(factor, (x.shape[1], *(1,) * (x.rank - 2)))),)


def spread(s: Step, x: Tensor) -> Tensor:
    """A reduced tensor with the reduced axes back, of size 1."""
    if s.integer("keepdims", 1):
        return x
    for axis in s.axes():
        x = s.b.unsqueeze(x, axis)
    return x


@rule("ReduceSum", "ReduceMean")
def _(s: Step, g: Grads) -> Results:
    x, share = s.input(0), spread(s, first(g))
    if s.node.op_type == "ReduceMean":
        share = s.b.div(share, number(s, s.axes()))
    return (s.b.expand(share, x.shape, x.value),)


@rule("ReduceMax")  # ties share the gradient evenly
def _(s: Step, g: Grads) -> Results:
    b, x = s.b, s.input(0)
    chosen = b.cast(b.compare("Equal", x, spread(s, s.y)), x.dtype)
    share = b.div(spread(s, first(g)), b.sum(chosen, s.axes()))
    return (b.mul(chosen, share),)


@rule("GlobalAveragePool")
def _(s: Step, g: Grads) -> Results:
    x = s.input(0)
    share = s.b.div(first(g), number(s, range(2, x.rank)))
    return (s.b.expand(share, x.shape, x.value),)


def number(s: Step, axes: Sequence[int]) -> int:
    """How many elements are reduced to one."""
    sizes = [s.input(0).shape[axis] for axis in axes]
    if not all(isinstance(size, int) for size in sizes):
        raise s.refuse("it averages over the batch")
    return math.prod(int(size) for size in sizes if isinstance(size, int))
