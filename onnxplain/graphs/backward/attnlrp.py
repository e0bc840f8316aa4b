"""The AttnLRP table (Achtibat et al., ICML 2024), on the same walk.

Relevance R of a value x travels as the coefficient c = R / x. The epsilon rule of a linear map then
is the gradient rule (y c over y cancels, so its epsilon is 0), the softmax rule, the first term of
its Taylor expansion, is the gradient of the softmax, and a sum passes c on. A LayerNormalization is
linear but for its deviation, which the identity rule makes a constant. R is divided by a value only
where a nonlinearity of single elements has R_x = R_y. It costs about one backward pass. The walk
starts from c = 1 at the target, which is R = logit; the relevance of a tap is c times its value.
"""

from __future__ import annotations

from dataclasses import replace

from onnxplain.graphs.backward.gradient import GRADIENT
from onnxplain.graphs.backward.gradient.reductions import normalisation
from onnxplain.graphs.backward.gradient.table import Grads, Results, first
from onnxplain.graphs.backward.relevance import (
    PASSES,
    UNKNOWN,
    again,
    back,
    only,
    scaled_factor,
    stabilised,
    unbiased,
)
from onnxplain.graphs.backward.walk import Rule, Step
from onnxplain.graphs.builder import Tensor

__all__ = ["attn_lrp"]


def identity(s: Step, c: Grads) -> Results:
    """R_x = R_y, so c_x = c y / x."""
    return (unchanged(s, c, 0),)


def unchanged(s: Step, c: Grads, i: int) -> Tensor:
    return stabilised(s.b, s.b.mul(first(c), s.y), s.input(i))


def shift(s: Step, c: Grads) -> Results:
    """A sum passes c on, and with it R a / (a + b); one number for all elements takes nothing, as
    the 1 of a GELU written out with 1 + erf."""
    for i in (0, 1):
        if s.fixed(i) and all(d == 1 for d in s.input(i).shape):
            return only(1 - i, unchanged(s, c, 1 - i))
    return GRADIENT[s.node.op_type](s, c)


def deviation_fixed(s: Step, c: Grads) -> Results:
    """x - mean and the affine map are linear, the deviation is a constant: r (cw - mean(cw))."""
    b, (axes, weight, _, r) = s.b, normalisation(s)
    cw = b.mul(first(c), weight)
    return (b.mul(b.sub(cw, b.mean(cw, axes)), r),)


def halved(vjp: Rule) -> Rule:
    """A product of two activations: each factor gets half."""

    def rule(s: Step, c: Grads) -> Results:
        return vjp(s, [s.b.mul(first(c), 0.5)])

    return rule


def multiplication(s: Step, c: Grads) -> Results:
    """A scale is a constant; two activations get half each."""
    if (scaled := scaled_factor(s)) is None:
        return halved(GRADIENT["Mul"])(s, c)
    if scaled == 1 and s.node.op_type == "Div":
        return only(1, unchanged(s, c, 1))
    return GRADIENT[s.node.op_type](replace(s, wants=[i == scaled for i in (0, 1)]), c)


def linear(gamma: float) -> Rule:
    """The epsilon rule; with `gamma`, contributions of the sign of y count 1 + gamma times.

    A bias takes its share R bias / (y + bias) first, whether it is part of the operator or added by
    the next. With n = |x| |W|, the contributions of the sign of y = x W sum to (y + sign(y) n) / 2,
    so the denominator is y + gamma / 2 (y + sign(y) n), and R_x takes three products.
    """

    def rule(s: Step, c: Grads) -> Results:
        vjp = GRADIENT[s.node.op_type]
        if s.node.op_type in ("MatMul", "Einsum") and not (s.fixed(0) or s.fixed(1)):
            return halved(vjp)(s, c)
        if gamma == 0:
            return vjp(s, c)
        b, i = s.b, 0 if s.wants[0] else 1
        x, weight = s.input(i), s.input(1 - i)
        size, absolute = b.unary("Abs", x), b.unary("Abs", weight)
        y = unbiased(s)
        sign = b.unary("Sign", y)
        favoured = b.add(y, b.mul(sign, again(s, i, size, absolute)))
        total = b.add(y, b.mul(favoured, gamma / 2))
        share = stabilised(b, b.mul(first(c), y), total)
        own = b.mul(back(s, i, share, weight), 1 + gamma / 2)
        extra = b.mul(
            b.mul(back(s, i, b.mul(share, sign), absolute), gamma / 2), b.unary("Sign", x)
        )
        return only(i, b.add(own, extra))

    return rule


def attn_lrp(*, gamma: float = 0.0) -> dict[str, Rule]:
    """The table; `gamma` > 0 takes the gamma rule for linear maps and the patch embedding."""
    rules = {operator: vjp for operator, vjp in GRADIENT.items() if operator not in UNKNOWN}
    pointwise = set(PASSES) - {"Softmax", "LogSoftmax", "BatchNormalization"}
    rules.update(dict.fromkeys(pointwise, identity))
    rules.update(dict.fromkeys(("LayerNormalization", "InstanceNormalization"), deviation_fixed))
    rules.update(dict.fromkeys(("Add", "Sub"), shift))
    rules.update(dict.fromkeys(("MatMul", "Gemm", "Einsum", "Conv"), linear(gamma)))
    rules.update(dict.fromkeys(("Mul", "Div"), multiplication))
    return rules
