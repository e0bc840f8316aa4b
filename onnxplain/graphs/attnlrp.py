"""The AttnLRP table (Achtibat et al., ICML 2024), on the same walk.

Relevance R of a value x travels as the coefficient c = R / x. The epsilon rule of a linear map then
is the gradient rule (y c over y cancels, so its epsilon is 0), the softmax rule, the first term of
its Taylor expansion, is the gradient of the softmax, and a sum passes c on: R is divided by a value
only where a rule says R_x = R_y. It costs about one backward pass. The walk starts from c = 1 at
the target, which is R = logit; the relevance of a tap is c times its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.gradient import GRADIENT
from onnxplain.graphs.relevance import PASSES, again, back, is_scale, unbiased
from onnxplain.graphs.walk import Cotangent, Rule, Step

__all__ = ["attn_lrp"]

EPSILON = 1e-6

Coefficients = Sequence[Tensor | None]
Results = Sequence[Tensor | Cotangent | None]


def stabilised(b: Builder, a: Tensor, x: Tensor) -> Tensor:
    """a / (x + epsilon sign(x)), with sign(0) = 1."""
    positive = b.compare("GreaterOrEqual", x, 0)
    shift = b.where(positive, b.scalar(EPSILON, x), b.scalar(-EPSILON, x))
    return b.div(a, b.add(x, shift))


def first(c: Coefficients) -> Tensor:
    assert c[0] is not None
    return c[0]


def identity(s: Step, c: Coefficients) -> Results:
    """R_x = R_y, so c_x = c y / x."""
    return (stabilised(s.b, s.b.mul(first(c), s.y), s.input(0)),)


def halved(vjp: Rule) -> Rule:
    """A product of two activations: each factor gets half."""

    def rule(s: Step, c: Coefficients) -> Results:
        return vjp(s, [s.b.mul(first(c), 0.5)])

    return rule


def multiplication(s: Step, c: Coefficients) -> Results:
    """A scale is a constant; two activations get half each."""
    if s.node.op_type == "Div" or is_scale(s, 1):
        wants = [True, False]
    elif is_scale(s, 0):
        wants = [False, True]
    else:
        return halved(GRADIENT["Mul"])(s, c)
    return GRADIENT[s.node.op_type](replace(s, wants=wants), c)


def linear(gamma: float) -> Rule:
    """The epsilon rule; with `gamma`, contributions of the sign of y count 1 + gamma times.

    With n = |x| |W|, the contributions of that sign sum to (y + sign(y) n) / 2, so the denominator
    is y + gamma / 2 (y + sign(y) n), and R_x takes three products.
    """

    def rule(s: Step, c: Coefficients) -> Results:
        vjp = GRADIENT[s.node.op_type]
        if s.node.op_type in ("MatMul", "Einsum") and not (s.fixed(0) or s.fixed(1)):
            return halved(vjp)(s, c)
        if gamma == 0:
            return vjp(s, c)
        b, i = s.b, 0 if s.wants[0] else 1
        x, weight = s.input(i), s.input(1 - i)
        size, absolute = b.unary("Abs", x), b.unary("Abs", weight)
        y, sign = unbiased(s), b.unary("Sign", s.y)
        favoured = b.add(y, b.mul(sign, again(s, i, size, absolute)))
        total = b.add(s.y, b.mul(favoured, gamma / 2))
        share = stabilised(b, b.mul(first(c), s.y), total)
        own = b.mul(back(s, i, share, weight), 1 + gamma / 2)
        extra = b.mul(
            b.mul(back(s, i, b.mul(share, sign), absolute), gamma / 2), b.unary("Sign", x)
        )
        result = b.add(own, extra)
        return (result,) if i == 0 else (None, result)

    return rule


def attn_lrp(*, gamma: float = 0.0) -> dict[str, Rule]:
    """The table; `gamma` > 0 takes the gamma rule for linear maps and the patch embedding."""
    rules = dict(GRADIENT)
    rules.update(
        dict.fromkeys(set(PASSES) - {"Softmax", "LogSoftmax", "BatchNormalization"}, identity)
    )
    rules.update(dict.fromkeys(("MatMul", "Gemm", "Einsum", "Conv"), linear(gamma)))
    rules.update(dict.fromkeys(("Mul", "Div"), multiplication))
    return rules
