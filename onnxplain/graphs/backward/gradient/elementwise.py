"""Operators that work element by element, broadcasting included."""

from __future__ import annotations

import math

from onnxplain.graphs.backward.gradient.table import (
    Grads,
    Results,
    first,
    operands,
    pointwise,
    rule,
    where,
)
from onnxplain.graphs.backward.walk import Step
from onnxplain.graphs.builder import Builder, Tensor

__all__: list[str] = []  # imported for its entries


pointwise("Exp", lambda s, x, y: y)
pointwise("Log", lambda s, x, y: s.b.unary("Reciprocal", x))
pointwise("Sqrt", lambda s, x, y: s.b.div(s.b.scalar(0.5, y), y))
pointwise("Reciprocal", lambda s, x, y: s.b.neg(s.b.mul(y, y)))
pointwise("Tanh", lambda s, x, y: s.b.sub(s.b.scalar(1, y), s.b.mul(y, y)))
pointwise("Sigmoid", lambda s, x, y: s.b.mul(y, s.b.sub(s.b.scalar(1, y), y)))
pointwise("Softplus", lambda s, x, y: s.b.unary("Sigmoid", x))
pointwise("Abs", lambda s, x, y: s.b.unary("Sign", x))
pointwise(  # 1 / (1 + |x|)^2, and 1 - |y| = 1 / (1 + |x|)
    "Softsign",
    lambda s, x, y: s.b.binary("Pow", s.b.sub(s.b.scalar(1, y), s.b.unary("Abs", y)), 2),
)
pointwise(
    "Erf",
    lambda s, x, y: s.b.mul(s.b.unary("Exp", s.b.neg(s.b.mul(x, x))), 2 / math.sqrt(math.pi)),
)


@rule("Identity", "Dropout", "Cast")
def _(s: Step, g: Grads) -> Results:
    if s.node.op_type == "Dropout" and any(s.constant(2) or ()):
        raise s.refuse("it is in training mode")
    return (s.b.cast(first(g), s.input(0).dtype),)


@rule("Neg")
def _(s: Step, g: Grads) -> Results:
    return (s.b.neg(first(g)),)


@rule("Relu")
def _(s: Step, g: Grads) -> Results:
    return (where(s, s.b.compare("Greater", s.y, 0), first(g)),)


@rule("LeakyRelu")
def _(s: Step, g: Grads) -> Results:
    return (s.b.where(right(s), first(g), s.b.mul(first(g), s.real("alpha", 0.01))),)


@rule("Elu")
def _(s: Step, g: Grads) -> Results:
    slope = s.b.add(s.y, s.real("alpha", 1.0))
    return (s.b.where(right(s), first(g), s.b.mul(first(g), slope)),)


@rule("Selu")
def _(s: Step, g: Grads) -> Results:
    b, gamma = s.b, s.real("gamma", 1.05070102214813232421875)
    slope = b.add(s.y, gamma * s.real("alpha", 1.67326319217681884765625))
    return (b.mul(first(g), b.where(right(s), b.scalar(gamma, s.y), slope)),)


@rule("PRelu")
def _(s: Step, g: Grads) -> Results:
    b, x, weight = s.b, s.input(0), s.input(1)

    def product(i: int) -> Tensor:
        if i == 0:
            return b.where(right(s), first(g), b.mul(first(g), weight))
        return b.where(right(s), b.scalar(0, x), b.mul(first(g), x))

    return operands(s, product)


def right(s: Step) -> Tensor:
    """Where x > 0; at 0 itself torch takes the slope of the left side."""
    return s.b.compare("Greater", s.input(0), 0)


@rule("Mish")  # x t, t = tanh(softplus(x)): t + x sigmoid(x) (1 - t^2)
def _(s: Step, g: Grads) -> Results:
    b, x = s.b, s.input(0)
    t = b.unary("Tanh", b.unary("Softplus", x))
    rise = b.mul(b.mul(x, b.unary("Sigmoid", x)), b.sub(b.scalar(1, x), b.mul(t, t)))
    return (b.mul(first(g), b.add(t, rise)),)


@rule("Clip")
def _(s: Step, g: Grads) -> Results:
    x, result = s.input(0), first(g)
    if s.has(1):
        result = where(s, s.b.compare("GreaterOrEqual", x, s.input(1)), result)
    if s.has(2):
        result = where(s, s.b.compare("LessOrEqual", x, s.input(2)), result)
    return (result,)


@rule("HardSigmoid")
def _(s: Step, g: Grads) -> Results:
    inside = s.b.op(
        "And",
        [s.b.compare("Greater", s.y, 0), s.b.compare("Less", s.y, 1)],
        s.y.shape,
    )
    return (where(s, inside, s.b.mul(first(g), s.real("alpha", 0.2))),)


@rule("HardSwish")  # x * clip(x / 6 + 1/2, 0, 1)
def _(s: Step, g: Grads) -> Results:
    b, x = s.b, s.input(0)
    gate = b.unary("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    inside = b.op("And", [b.compare("Greater", gate, 0), b.compare("Less", gate, 1)], x.shape)
    slope = b.add(gate, where(s, inside, b.div(x, 6)))
    return (b.mul(first(g), slope),)


@rule("Gelu")
def _(s: Step, g: Grads) -> Results:
    x = s.input(0)
    tanh = s.text("approximate", "none") == "tanh"
    slope = gelu_tanh_slope(s.b, x) if tanh else gelu_slope(s.b, x)
    return (s.b.mul(first(g), slope),)


def gelu_slope(b: Builder, x: Tensor) -> Tensor:
    """Phi(x) + x phi(x), in as few passes over x as the operators allow.

    The affine 0.5 erf + 0.5 is one HardSigmoid, whose clip to 0..1 never acts on it; dividing by
    exp(u * u) saves the sign of exp(-u * u) and is 0 where the exponential overflows.
    """
    u = b.mul(x, math.sqrt(0.5))
    normal_cdf = b.unary("HardSigmoid", b.unary("Erf", u), alpha=0.5, beta=0.5)
    bell = b.div(u, b.unary("Exp", b.mul(u, u)))
    return b.add(normal_cdf, b.mul(bell, 1 / math.sqrt(math.pi)))


def gelu_tanh_slope(b: Builder, x: Tensor) -> Tensor:
    """Slope of x/2 (1 + tanh(c (x + 0.044715 x^3))), c = sqrt(2/pi)."""
    c = math.sqrt(2 / math.pi)
    square = b.mul(x, x)
    inner = b.mul(x, b.add(b.mul(square, 0.044715 * c), c))
    t = b.unary("Tanh", inner)
    inner_slope = b.add(b.mul(square, 3 * 0.044715 * c), c)
    rise = b.mul(b.mul(x, inner_slope), b.sub(b.scalar(1, x), b.mul(t, t)))
    return b.mul(b.add(b.add(t, 1), rise), 0.5)


# Several operands


@rule("Add", "Sum")
def _(s: Step, g: Grads) -> Results:
    return operands(s, lambda i: first(g))


@rule("Sub")
def _(s: Step, g: Grads) -> Results:
    return operands(s, lambda i: first(g) if i == 0 else s.b.neg(first(g)))


@rule("Mean")
def _(s: Step, g: Grads) -> Results:
    return operands(s, lambda i: s.b.mul(first(g), 1 / len(s.x)))


@rule("Mul")
def _(s: Step, g: Grads) -> Results:
    return operands(s, lambda i: s.b.mul(first(g), s.input(1 - i)))


@rule("Div")
def _(s: Step, g: Grads) -> Results:
    b, divisor = s.b, s.input(1)

    def product(i: int) -> Tensor:
        share = b.div(first(g), divisor)
        return share if i == 0 else b.neg(b.mul(share, s.y))

    return operands(s, product)


@rule("Pow")  # x^n: n x^(n-1) and x^n log x
def _(s: Step, g: Grads) -> Results:
    b, base, exponent = s.b, s.input(0), s.input(1)

    def product(i: int) -> Tensor:
        if i == 1:
            return b.mul(first(g), b.mul(s.y, b.unary("Log", base)))
        power = b.cast(exponent, base.dtype)
        lower = b.binary("Pow", base, b.sub(power, 1))
        return b.mul(first(g), b.mul(lower, power))

    return operands(s, product)


@rule("Min", "Max")  # ties share the gradient evenly
def _(s: Step, g: Grads) -> Results:
    b = s.b
    chosen = [b.cast(b.compare("Equal", s.input(i), s.y), s.y.dtype) for i in range(len(s.x))]
    count = chosen[0]
    for other in chosen[1:]:
        count = b.add(count, other)
    share = b.div(first(g), count)
    return operands(s, lambda i: b.mul(share, chosen[i]))


@rule("Where")
def _(s: Step, g: Grads) -> Results:
    b, zero = s.b, s.b.scalar(0, first(g))

    def product(i: int) -> Tensor:
        a, c = (first(g), zero) if i == 1 else (zero, first(g))
        return b.where(s.input(0), a, c)

    return operands(s, product)
