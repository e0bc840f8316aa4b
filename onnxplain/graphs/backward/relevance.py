"""The relevance tables: layer-wise relevance propagation on the same walk as the gradient.

What travels is the relevance of a value, of the value's shape. Two tables:

- `ATTRIBUTION`, Chefer et al., CVPR 2021 (`transformer_attribution`);
- `LRP`, the plain rules which that paper compares with (`lrp`, `partial_lrp`).

An operator y = f(x) without an entry of its own gets x * VJP_f(R / y), made from its gradient rule.
`docs/methods.md` says which rule each operator has and whether it conserves relevance.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.backward.gradient import GRADIENT
from onnxplain.graphs.backward.gradient.table import Grads, Results, first
from onnxplain.graphs.backward.walk import Cotangent, Rule, Step
from onnxplain.graphs.builder import TINY, Builder, Tensor
from onnxplain.graphs.values.axes import Place, origin, volume
from onnxplain.graphs.values.facts import Batch

__all__ = [
    "ATTRIBUTION",
    "LRP",
    "PASSES",
    "UNKNOWN",
    "again",
    "back",
    "only",
    "scaled_factor",
    "stabilised",
    "unbiased",
]

EPSILON = 1e-9
FEW = 32  # inputs of an output: with as many, all of them speak against it once in 4e9 times

# fmt: off
MOVES = (
    "Cast", "Concat", "DequantizeLinear", "Dropout", "Expand", "Flatten", "Gather", "GlobalMaxPool",
    "Identity", "MaxPool", "Pad", "QuantizeLinear", "Reshape", "Slice", "Split", "Squeeze",
    "Transpose", "Unsqueeze",
)
PASSES = (
    "BatchNormalization", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish",
    "InstanceNormalization", "LayerNormalization", "LeakyRelu", "Log", "LogSoftmax", "Mish", "Pow",
    "PRelu", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softmax", "Softplus", "Softsign", "Sqrt",
    "Tanh",
)
REARRANGES = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
SCALES = ("Div", "Mul")
# Normalisations that the papers say nothing of: no rule.
UNKNOWN = ("LpNormalization", "ReduceL2")
# fmt: on


def stabilised(b: Builder, a: Tensor, c: Tensor) -> Tensor:
    """a / (c + epsilon), for divisors that are 0 only where a is 0 too or is multiplied by 0."""
    return b.div(a, b.add(c, EPSILON))


def divide(b: Builder, a: Tensor, c: Tensor) -> Tensor:
    """a / c, and 0 where c is 0.

    As a c / (c c + tiny): onnxruntime's Where takes as long as six products. The reference divides
    by c + 1e-9, which on the golden models moves relevance by 2e-5 of the largest value.
    """
    return b.div(b.mul(a, c), b.add(b.mul(c, c), TINY))


def passes(s: Step, r: Grads) -> Results:
    """Relevance goes through unchanged."""
    return (first(r),)


def derived(vjp: Rule) -> Rule:
    """The default rule: x * VJP_f(R / y)."""

    def rule(s: Step, r: Grads) -> Results:
        shares = vjp(replace(s, dots=None), [divide(s.b, first(r), s.y)])
        return _contributions(s, shares)

    return rule


def moved(vjp: Rule) -> Rule:
    """Relevance goes where the gradient goes, and stays a multiple of its value if it was one."""

    def rule(s: Step, r: Grads) -> Results:
        wrapped = [Cotangent(g) if isinstance(g, Tensor) else g for g in vjp(s, r)]
        return [None if c is None else replace(c, multiple=s.multiple) for c in wrapped]

    return rule


def _contributions(s: Step, shares: Results, factor: float = 1.0) -> Results:
    """factor * x * share of each operand."""
    results: list[Tensor | None] = [None] * len(shares)
    for i, share in enumerate(shares):
        if share is not None:
            g = share if isinstance(share, Tensor) else s.dense(share)
            results[i] = s.b.mul(s.input(i), g if factor == 1 else s.b.mul(g, factor))
    return results


def linear(s: Step, r: Grads) -> Results:
    """x+ W+ + x- W- under one denominator, by products of x, |x|, W and |W|.

    With y = x W and n = |x| |W|, x+ W+ + x- W- = (y + n) / 2; the halves of the denominator and of
    the result cancel. Every term of it is positive, so where it is 0 there is nothing to share out,
    and the division needs no second look.

    It is 0 where a few inputs are mixed that all speak against the output, as in talking heads or
    by a sparse weight. The two products would then have to cancel to the last bit, so a map with
    few inputs to an output takes all four.
    """
    b, (i, w) = s.b, _operands(s)
    if _has_few_inputs(s, w):
        parts = list(_signed(s, i, w))
        total = b.add(*(again(s, i, x, weight) for x, weight in parts))
        share = stabilised(b, first(r), total)
        return only(i, b.add(*(b.mul(x, back(s, i, share, weight)) for x, weight in parts)))
    size = b.unary("Abs", s.input(i))
    weight = b.unary("Abs", s.input(w))
    total = b.add(unbiased(s), again(s, i, size, weight))
    share = b.div(first(r), b.add(total, 2 * EPSILON))
    signed = b.mul(s.input(i), back(s, i, share, s.input(w)))
    whole = b.add(signed, b.mul(size, back(s, i, share, weight)))
    return only(i, Cotangent(whole, multiple=True))


def _signed(s: Step, i: int, w: int) -> Iterator[tuple[Tensor, Tensor]]:
    """x+ and W+, x- and W-."""
    for bound in ("Max", "Min"):
        yield s.b.binary(bound, s.input(i), 0), s.b.binary(bound, s.input(w), 0)


def _has_few_inputs(s: Step, w: int) -> bool:
    """Whether some output of the map is made of less than `FEW` inputs of weight other than 0."""
    weight, operator = s.input(w), s.node.op_type
    tensor = s.b.stored(weight).const_value
    if tensor is None or operator == "Einsum" or weight.rank < 2:
        return volume(weight.shape) < FEW * FEW
    over: tuple[int, ...] = (weight.rank - 2 if w == 1 else weight.rank - 1,)
    if operator == "Conv":
        over = tuple(range(1, weight.rank))
    elif operator == "Gemm" and s.integer("transB" if w == 1 else "transA", 0):
        over = (int(w == 1),)
    count = np.count_nonzero(tensor.numpy(), axis=over)
    return bool((count[count > 0] < FEW).any())


def linear_apart(s: Step, r: Grads) -> Results:
    """x+ W+ and x- W-, a denominator each."""
    b, (i, w) = s.b, _operands(s)
    parts = []
    for x, weight in _signed(s, i, w):
        share = b.div(first(r), again(s, i, x, weight, bias=EPSILON))
        parts.append(b.mul(x, back(s, i, share, weight)))
    return only(i, b.add(*parts))


def bounded(s: Step, r: Grads) -> Results:
    """z-B rule of a first convolution: x W - low W+ - high W-, with each picture's own bounds."""
    b, x, weight = s.b, s.input(0), s.input(1)
    axes = list(range(1, x.rank))
    bounds = [(b.reduce(op, x, axes, keepdims=True)) for op in ("ReduceMin", "ReduceMax")]
    terms = [(x, weight)]
    for bound, part in zip(bounds, ("Max", "Min"), strict=True):
        terms.append((b.expand(bound, x.shape, x.value), b.binary(part, weight, 0)))
    own, low, high = (again(s, 0, *term) for term in terms)
    share = divide(b, first(r), b.sub(b.sub(own, low), high))
    own, low, high = (b.mul(t, back(s, 0, share, w)) for t, w in terms)
    return (b.sub(b.sub(own, low), high),)


def _operands(s: Step) -> tuple[int, int]:
    """Positions of the activation and of the weight."""
    return (0, 1) if s.wants[0] else (1, 0)


def only(i: int, result: Tensor | Cotangent) -> Results:
    """For a rule of two operands of which one gets everything."""
    return (result, None) if i == 0 else (None, result)


def again(s: Step, i: int, x: Tensor, weight: Tensor, bias: float = 0.0) -> Tensor:
    """The product of the node for other operands, plus a number instead of its own bias."""
    b, operator = s.b, s.node.op_type
    attributes = {k: a.value for k, a in s.node.attributes.items()}
    inputs = [x, weight] if i == 0 else [weight, x]
    product = s.b.op(operator, inputs, s.y.shape, **attributes)
    return b.add(product, bias) if bias else product


def back(s: Step, i: int, share: Tensor, weight: Tensor) -> Tensor:
    """`share` taken back through the product with `weight`."""
    x = list(s.x)
    x[1 - i] = weight
    g = GRADIENT[s.node.op_type](replace(s, x=x, dots=None), [share])[i]
    assert g is not None
    return g if isinstance(g, Tensor) else s.dense(g)


def unbiased(s: Step) -> Tensor:
    """The product without the bias that Gemm and Conv add."""
    if not s.has(2):
        return s.y
    bias = s.input(2)
    if s.node.op_type == "Conv":
        bias = s.b.reshape(bias, (bias.shape[0], *(1,) * (s.y.rank - 2)))
    beta = s.real("beta", 1.0)
    return s.b.sub(s.y, bias if beta == 1 else s.b.mul(bias, beta))


def product(s: Step, r: Grads) -> Results:
    """P V and Q K^T: each factor gets half of x * VJP(R / y)."""
    share = (stabilised if s.multiple else divide)(s.b, first(r), s.y)
    shares = GRADIENT[s.node.op_type](replace(s, dots=None), [share])
    return _contributions(s, shares, 0.5)  # onnxruntime scales within the product


def multiplication(s: Step, r: Grads) -> Results:
    """A scale passes relevance on to what it scales; two activations get half each."""
    if (scaled := scaled_factor(s)) is not None:
        return only(scaled, first(r))
    half = s.b.mul(first(r), 0.5)
    return [s.b.unbroadcast(half, s.input(i).shape) for i in (0, 1)]


def scaled_factor(s: Step) -> int | None:
    """Which operand of a Mul or Div the other one scales; None for two activations."""
    if s.fixed(0):
        return 1
    if s.node.op_type == "Div" or s.fixed(1) or is_spread(s, 1):
        return 0
    return 1 if is_spread(s, 0) else None


def is_spread(s: Step, i: int) -> bool:
    """Whether operand `i` is one number per token, repeated over the features.

    Such an operand is the mean or the deviation of a normalisation written out.
    """
    return s.input(i).shape[-1:] != s.y.shape[-1:]


def is_bias(s: Step, i: int) -> bool:
    """Whether operand `i` is a constant per feature: it varies along the last axis at most, or
    along axes that the weight of a product made, such as heads and their features."""
    if not s.fixed(i):
        return False
    axes = [k for k, d in enumerate(s.input(i).shape, s.y.rank - s.input(i).rank) if d != 1]
    if all(axis == s.y.rank - 1 for axis in axes):
        return True
    value = s.node.inputs[1 - i]
    whole = () if value is None else s.b.facts[value].shape  # the step may be at a few tokens
    if value is None or len(whole) != s.y.rank:
        return False
    places = [Place(axis, volume(whole[axis : axis + 1])) for axis in axes]
    return all(_is_feature(s.b, value, place) for place in places)


def _is_feature(b: Builder, value: ir.Value, place: Place | None) -> bool:
    """Whether positions of a value are those of a weight, be they rearranged or scaled since."""
    node = value.producer()
    while node is not None and place is not None:
        moved = [k for k, v in enumerate(node.inputs) if v is not None and not b.is_fixed(v)]
        if node.op_type not in REARRANGES and not (node.op_type in SCALES and len(moved) == 1):
            break
        place = origin(node, moved[0], place, b.facts)
        source = node.inputs[moved[0]]
        node = None if source is None else source.producer()
    if node is None or place is None or node.op_type not in ("Conv", "Einsum", "Gemm", "MatMul"):
        return False
    if node.op_type == "Conv":
        return place.axis == 1
    weights = [k for k in (0, 1) if (v := node.inputs[k]) is not None and b.is_fixed(v)]
    if len(weights) != 1:
        return False
    own, other = (origin(node, k, place, b.facts) for k in (weights[0], 1 - weights[0]))
    return own is not None and other is None


def addition(balance: bool) -> Rule:
    """S = R / (a + b); R_a = a S, R_b = b S; with `balance`, each rescaled by its share of sums.

    A constant per feature (a bias) takes nothing, nor does one number per token (a mean).
    """

    def rule(s: Step, r: Grads) -> Results:
        b = s.b
        for i in (1, 0):
            if is_bias(s, i) or is_spread(s, i):
                return only(1 - i, first(r))
        share = divide(b, first(r), s.y)
        parts = [b.mul(s.input(i), share) for i in (0, 1)]
        if s.node.op_type == "Sub":
            parts[1] = b.neg(parts[1])
        if balance:
            parts = _balanced(b, parts, first(r))
        return [b.unbroadcast(p, s.input(i).shape) for i, p in enumerate(parts)]

    return rule


def of_a_stack(other: Rule) -> Rule:
    """A sum over a stack of branches is the residual sum of them, `other` any other sum."""

    def rule(s: Step, r: Grads) -> Results:
        b, axes, stack = s.b, s.axes(), s.node.inputs[0]
        producer = None if stack is None else stack.producer()
        if len(axes) != 1 or producer is None or producer.op_type != "Concat":
            return other(s, r)
        (axis,), count = axes, len(producer.inputs)
        joined = producer.attributes["axis"].as_int() % s.input(0).rank
        if joined != axis or s.input(0).shape[axis] != count:
            return other(s, r)
        branches = [b.slice(s.input(0), axis, i, i + 1) for i in range(count)]
        share = divide(b, first(r), s.y)
        parts = [b.mul(b.reshape(x, s.y.shape), share) for x in branches]
        parts = _balanced(b, parts, first(r))
        return (b.concat([b.reshape(p, branches[0].shape) for p in parts], axis),)

    return rule


def _balanced(b: Builder, parts: list[Tensor], r: Tensor) -> list[Tensor]:
    """R_a * |sum R_a| / (|sum R_a| + |sum R_b| ...) * sum R / sum R_a, sums per image.

    Where the images are on one axis with something else, such as heads, sums are per entry of it.
    """
    images = [i for i, d in enumerate(r.shape) if d == b.batch or isinstance(d, Batch)]
    axes = [i for i in range(r.rank) if i not in images[:1]]
    sums = [b.sum(p, axes) for p in parts]
    sizes = [b.unary("Abs", total) for total in sums]
    whole, total = functools.reduce(b.add, sizes), b.sum(r, axes)
    return [
        b.mul(part, divide(b, b.mul(divide(b, size, whole), total), own))
        for part, size, own in zip(parts, sizes, sums, strict=True)
    ]


def matrix(affine: Rule) -> Rule:
    """A product with a weight is a linear map, one of two activations is not."""

    def rule(s: Step, r: Grads) -> Results:
        if s.node.op_type in ("MatMul", "Einsum") and not (s.fixed(0) or s.fixed(1)):
            return product(s, r)
        return affine(s, r)

    return rule


def first_convolution(other: Rule) -> Rule:
    """The z-B rule where the convolution reads the picture itself, `other` elsewhere."""

    def rule(s: Step, r: Grads) -> Results:
        return (bounded if _is_picture(s.node.inputs[0]) else other)(s, r)

    return rule


def _is_picture(value: ir.Value | None) -> bool:
    """Whether it is the input of the graph, be it in another precision or layout."""
    node = None if value is None else value.producer()
    if node is not None and node.op_type in ("Cast", "Transpose"):
        return _is_picture(node.inputs[0])
    return value is not None and value.is_graph_input()


def table(affine: Rule, balance: bool) -> dict[str, Rule]:
    rules = {op: derived(vjp) for op, vjp in GRADIENT.items() if op not in UNKNOWN}
    rules.update({operator: moved(GRADIENT[operator]) for operator in MOVES})
    rules.update(dict.fromkeys(PASSES, passes))
    rules.update(dict.fromkeys(("MatMul", "Gemm", "Einsum", "Conv"), matrix(affine)))
    rules.update(dict.fromkeys(("Add", "Sub"), addition(balance)))
    rules.update(dict.fromkeys(("Mul", "Div"), multiplication))
    if balance:
        rules["ReduceSum"] = of_a_stack(rules["ReduceSum"])
    return rules


ATTRIBUTION = table(linear, balance=True)
LRP = table(linear_apart, balance=False)
LRP["Conv"] = first_convolution(LRP["Conv"])
