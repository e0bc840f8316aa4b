"""Random nodes of every operator of the gradient table, away from where they have no derivative."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from differences import Case, Fixed
from random_nodes import Inputs, Source, ints

__all__ = ["CASES", "EQUATIONS"]

Maker = Callable[[Source], Case]

CASES: dict[str, Maker] = {}


def operator(*names: str) -> Callable[[Maker], Maker]:
    def add(make: Maker) -> Maker:
        CASES.update(dict.fromkeys(names, make))
        return make

    return add


# Elementwise


@operator("Exp", "Tanh", "Sigmoid", "Softplus", "Erf", "Neg", "Identity", "Mish")
def _(s: Source) -> Case:
    return s.case([s.normal(s.shape(0))])


@operator("Log", "Sqrt")
def _(s: Source) -> Case:
    return s.case([s.positive(s.shape(0))])


@operator("Reciprocal")
def _(s: Source) -> Case:
    return s.case([s.nonzero(s.shape(0))])


@operator("Relu", "Abs", "Selu")
def _(s: Source) -> Case:
    return s.case([s.normal(s.shape(0), kinks=[0])])


@operator("Softsign")
def _(s: Source) -> Case:
    return s.case([s.normal(s.shape(), kinks=[0])])


@operator("LeakyRelu", "Elu")
def _(s: Source) -> Case:
    return s.case([s.normal(s.shape(0), kinks=[0])], alpha=s.choice([None, 0.5, 1.75]))


@operator("PRelu")
def _(s: Source) -> Case:
    shape = s.shape(0)
    own = shape[s.integer(0, len(shape)) :]
    weight = s.normal([1 if s.flag() else d for d in own])
    return s.case([s.normal(shape, kinks=[0]), weight if s.flag() else Fixed(weight)])


@operator("HardSigmoid")
def _(s: Source) -> Case:
    alpha, beta = s.choice([(None, None), (0.7, 0.25), (0.7, None), (None, 0.25)])
    slope, height = alpha or 0.2, 0.5 if beta is None else beta
    kinks = [-height / slope, (1 - height) / slope]
    return s.case([s.normal(s.shape(0), kinks, scale=2)], alpha=alpha, beta=beta)


@operator("HardSwish")
def _(s: Source) -> Case:
    return s.case([s.normal(s.shape(0), kinks=[-3, 3], scale=2)])


@operator("Gelu")
def _(s: Source) -> Case:
    return s.case([s.normal(s.shape(0))], approximate=s.choice([None, "none", "tanh"]))


@operator("Clip")
def _(s: Source) -> Case:
    low, high = Fixed(np.array(-0.7)), Fixed(np.array(0.9))
    bounds: Inputs = s.choice([[], [low], [None, high], [low, high], [low, None]])
    return s.case([s.normal(s.shape(0), kinks=[-0.7, 0.9]), *bounds])


@operator("Dropout")
def _(s: Source) -> Case:
    more: Inputs = s.choice([[], [Fixed(np.array(0.5))], [None, Fixed(np.array(False))]])
    outputs = (True, False) if s.flag() else (True,)
    return Case(s.op, [s.normal(s.shape(0)), *more], {}, s.opset, outputs)


@operator("Cast")
def _(s: Source) -> Case:
    x = np.asarray(s.random.integers(-64, 64, size=s.shape(0)) / 16)  # exact in both types
    return s.case([x.astype(np.float32) if s.flag() else x], to=s.choice([1, 11]))


@operator("Add", "Sub", "Mul")
def _(s: Source) -> Case:
    return s.case([s.normal(shape) for shape in s.broadcast(2)])


@operator("Div")
def _(s: Source) -> Case:
    numerator, divisor = s.broadcast(2)
    return s.case([s.normal(numerator), s.nonzero(divisor)])


@operator("Pow")
def _(s: Source) -> Case:
    base, exponent = s.broadcast(2)
    kind = s.choice(["tensor", "integers", "number", "square"])
    if kind == "tensor":
        return s.case([s.positive(base), s.normal(exponent)])
    if kind == "integers":
        powers = s.random.integers(-2, 4, size=exponent)
        return s.case([s.nonzero(base), Fixed(powers.astype(s.choice([np.int64, np.int32])))])
    if kind == "number":
        return s.case([s.positive(base), Fixed(np.array(s.choice([0.5, -1.5, 1.0, 0.0])))])
    return s.case([s.normal(base), Fixed(np.array(2.0, s.choice([np.float32, np.float64])))])


@operator("Sum", "Mean")
def _(s: Source) -> Case:
    return s.case([s.normal(shape) for shape in s.broadcast(s.integer(1, 4))])


@operator("Min", "Max")
def _(s: Source) -> Case:
    return s.case(s.apart(*s.broadcast(s.integer(1, 3))))


@operator("Where")
def _(s: Source) -> Case:
    condition, a, b = s.broadcast(3)
    chosen = np.asarray(s.random.random(condition) < 0.5)
    return s.case([Fixed(chosen), s.normal(a), s.normal(b)])


# Products


@operator("MatMul")
def _(s: Source) -> Case:
    k = s.integer(1, 3)
    left, right = s.broadcast(2)
    rows, columns = s.integer(1, 3), s.integer(1, 3)
    a, b = (*left[-3:], rows, k), (*right[-3:], k, columns)
    vector = s.choice(["neither", "neither", "left", "right", "both"])
    return s.case(
        [
            s.normal((k,) if vector in ("left", "both") else a),
            s.normal((k,) if vector in ("right", "both") else b),
        ]
    )


@operator("Gemm")
def _(s: Source) -> Case:
    m, k, n = (s.integer(1, 4) for _ in range(3))
    a, b = s.flag(), s.flag()
    operands = [s.normal((k, m) if a else (m, k)), s.normal((n, k) if b else (k, n))]
    bias = s.choice([None, (), (1,), (n,), (1, n), (m, 1), (m, n)])
    return s.case(
        operands if bias is None else [*operands, s.normal(bias)],
        transA=int(a) if a or s.flag() else None,
        transB=int(b) if b or s.flag() else None,
        alpha=s.choice([None, 0.5, 1.75]),
        beta=s.choice([None, 0.25, 2.0]),
    )


EQUATIONS = [
    "ij,jk->ik", "bhnd,bhmd->bhnm", "bij,bjk->bik", "bnd,hde->bhne", "ij->ji", "ij->i", "i,j->ij",
    "ij,ij->", "ijk,ik->j", "ij,j,k->ik", "a b , b c -> a c", "bij,ij->b", "ij,jk,kl->il", "ijk->",
    "iJ,Jk->ki", "ij,kj->i", "b,bn->bn",
]  # fmt: skip


@operator("Einsum")
def _(s: Source) -> Case:
    equation = s.choice(EQUATIONS)
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes = {k: s.integer(1, 3) for k in sorted(set("".join(terms)))}
    operands = [s.normal([sizes[k] for k in term]) for term in terms]
    return s.case(operands, equation=equation)


@operator("Conv")
def _(s: Source) -> Case:
    spatial = s.integer(1, 2)
    group = s.integer(1, 2)
    channels, out = group * s.integer(1, 2), group * s.integer(1, 2)
    kernel = [s.integer(1, 3) for _ in range(spatial)]
    strides = [s.integer(1, 3) for _ in range(spatial)]
    dilations = [s.integer(1, 2) for _ in range(spatial)]
    pads = [s.integer(0, 1) for _ in range(2 * spatial)]
    size = [d * (k - 1) + 1 + s.integer(0, 2) for k, d in zip(kernel, dilations, strict=True)]
    weight = Fixed(s.normal((out, channels // group, *kernel)))
    bias = [Fixed(s.normal((out,)))] if s.flag() else []
    valid = not any(pads) and s.flag()
    return s.case(
        [s.normal((s.integer(1, 2), channels, *size)), weight, *bias],
        kernel_shape=kernel if s.flag() else None,
        strides=strides if strides != [1] * spatial or s.flag() else None,
        dilations=dilations if dilations != [1] * spatial or s.flag() else None,
        pads=pads if any(pads) or (not valid and s.flag()) else None,
        auto_pad="VALID" if valid else None,
        group=group if group > 1 or s.flag() else None,
    )


# Windows


@operator("AveragePool", "MaxPool")
def _(s: Source) -> Case:
    spatial = s.integer(1, 2)
    kernel = [s.integer(1, 3) for _ in range(spatial)]
    strides = [s.integer(1, 3) for _ in range(spatial)]
    wide = s.op == "MaxPool" or s.opset >= 19
    dilations = [s.integer(1, 2) if wide else 1 for _ in range(spatial)]
    pads = [s.integer(0, k // 2) for k in kernel * 2]
    size = [d * (k - 1) + 1 + s.integer(0, 2) for k, d in zip(kernel, dilations, strict=True)]
    # Runtimes differ in whether a last window that lies in the padding alone is one.
    spare = [size[i] + pads[i] + pads[spatial + i] for i in range(spatial)]
    windows = [
        -(-(n - d * (k - 1) - 1) // step) + 1
        for n, d, k, step in zip(spare, dilations, kernel, strides, strict=True)
    ]
    inside = all((windows[i] - 1) * strides[i] < size[i] + pads[i] for i in range(spatial))
    attributes = {
        "kernel_shape": kernel,
        "strides": strides if strides != [1] * spatial or s.flag() else None,
        "dilations": dilations if dilations != [1] * spatial else None,
        "pads": pads if any(pads) or s.flag() else None,
        "ceil_mode": s.choice([None, 0, 1]) if inside else None,
    }
    if s.op == "AveragePool":
        attributes["count_include_pad"] = s.choice([None, 0, 1])
    given = {k: v for k, v in attributes.items() if v is not None}
    (x,) = s.apart((s.integer(1, 2), s.integer(1, 2), *size))
    outputs = (True, False) if s.op == "MaxPool" and s.flag() else (True,)
    return Case(s.op, [x], given, s.opset, outputs)


@operator("GlobalMaxPool")
def _(s: Source) -> Case:
    return s.case(s.apart(s.shape(3)))


# Reductions and normalisations


@operator("Softmax", "LogSoftmax")
def _(s: Source) -> Case:
    shape = s.shape()
    return s.case([s.normal(shape)], axis=s.choice([None, s.axis(len(shape))]))


@operator("LayerNormalization")
def _(s: Source) -> Case:
    shape = s.shape()
    axis = s.axis(len(shape))
    inner = shape[axis % len(shape) :]
    scale = s.choice([inner, inner[-1:], (1,) * len(inner)])
    bias = [Fixed(s.normal(inner))] if s.flag() else []
    if axis in (-1, len(shape) - 1) and s.flag():
        return s.case([s.normal(shape), Fixed(s.normal(scale)), *bias], epsilon=1e-2)
    return s.case([s.normal(shape), Fixed(s.normal(scale)), *bias], axis=axis, epsilon=1e-2)


@operator("InstanceNormalization")
def _(s: Source) -> Case:
    shape = s.shape(3)
    scale, bias = s.normal(shape[1:2]), s.normal(shape[1:2])
    return s.case([s.normal(shape), Fixed(scale), Fixed(bias)], epsilon=1e-2)


@operator("ReduceL2")
def _(s: Source) -> Case:
    shape = s.shape()
    axes = s.choice([None, s.axes(len(shape), low=1)])
    keepdims = s.choice([None, 0, 1])
    x = s.nonzero(shape)
    if s.opset < 18:
        return s.case([x], axes=axes, keepdims=keepdims)
    return s.case([x] if axes is None else [x, ints(axes)], keepdims=keepdims)


@operator("LpNormalization")
def _(s: Source) -> Case:
    shape = s.shape()
    axis = s.choice([None, s.axis(len(shape))])
    return s.case([s.nonzero(shape)], axis=axis, p=s.choice([None, 2]))


@operator("BatchNormalization")
def _(s: Source) -> Case:
    shape = s.shape(2)
    channels = shape[1:2]
    values = [s.normal(channels), s.normal(channels), s.normal(channels), s.positive(channels)]
    return s.case([s.normal(shape), *map(Fixed, values)], epsilon=s.choice([None, 0.1]))


@operator("ReduceSum", "ReduceMean", "ReduceMax")
def _(s: Source) -> Case:
    shape = s.shape()
    axes = s.choice([None, s.axes(len(shape)), s.axes(len(shape), low=1)])
    (x,) = s.apart(shape)
    keepdims = s.choice([None, 0, 1])
    if s.opset < 18 and s.op != "ReduceSum":  # an empty attribute means all axes
        return s.case([x], axes=axes or None, keepdims=keepdims)
    inputs: Inputs = [x] if axes is None else [x, ints(axes)]
    return s.case(inputs, keepdims=keepdims, noop_with_empty_axes=s.choice([None, 0, 1]))


@operator("GlobalAveragePool")
def _(s: Source) -> Case:
    return s.case([s.normal(s.shape(3))])


# Layout


@operator("Reshape")
def _(s: Source) -> Case:
    shape = s.shape(0)
    target = list(s.choice(factorings(int(np.prod(shape)))))
    for i in range(min(len(shape), len(target))):
        if target[i] == shape[i] and s.flag():
            target[i] = 0
    if target and s.flag():
        target[s.integer(0, len(target) - 1)] = -1
    return s.case([s.normal(shape), ints(target)])


def factorings(number: int) -> list[tuple[int, ...]]:
    """Shapes of `number` elements, ranks up to 4."""
    sides = [n for n in range(1, number + 1) if number % n == 0]
    found: list[tuple[int, ...]] = [()] if number == 1 else []
    for rank in range(1, 5):
        grids = np.array(np.meshgrid(*[sides] * rank)).reshape(rank, -1).T
        found.extend(tuple(int(d) for d in g) for g in grids if np.prod(g) == number)
    return found


@operator("Flatten")
def _(s: Source) -> Case:
    shape = s.shape()
    axis = s.choice([None, s.integer(-len(shape), len(shape))])
    return s.case([s.normal(shape)], axis=axis)


@operator("Squeeze")
def _(s: Source) -> Case:
    shape = s.shape()
    ones = [i for i, d in enumerate(shape) if d == 1 and s.flag()]
    if not ones or s.flag():
        return s.case([s.normal(shape)])
    return s.case([s.normal(shape), ints([i - len(shape) * s.flag() for i in ones])])


@operator("Unsqueeze")
def _(s: Source) -> Case:
    shape = s.shape(0, 3)
    rank = len(shape) + s.integer(1, 2)
    axes = s.permutation(rank)[: rank - len(shape)]
    return s.case([s.normal(shape), ints([a - rank * s.flag() for a in axes])])


@operator("Transpose")
def _(s: Source) -> Case:
    shape = s.shape()
    return s.case([s.normal(shape)], perm=s.choice([None, *[s.permutation(len(shape))] * 3]))


@operator("DepthToSpace", "SpaceToDepth")
def _(s: Source) -> Case:
    block, (batch, channels, rows, columns) = s.integer(1, 2), s.shape(4, 4)
    if s.op == "SpaceToDepth":
        return s.case([s.normal((batch, channels, rows * block, columns * block))], blocksize=block)
    x = s.normal((batch, channels * block * block, rows, columns))
    return s.case([x], blocksize=block, mode=s.choice([None, "DCR", "CRD"]))


@operator("Expand")
def _(s: Source) -> Case:
    shape, target = s.broadcast(2)
    return s.case([s.normal(shape), ints(target)])


@operator("Slice")
def _(s: Source) -> Case:
    shape = s.shape()
    axes = s.axes(len(shape), low=1)
    steps, bounds = [], []
    for axis in axes:
        size = shape[axis]
        step = s.choice([1, 1, 2, 3, -1, -2])
        first, last = sorted((s.integer(0, size - 1), s.integer(0, size - 1)))
        if step > 0:
            start, stop = (
                s.choice([first, first - size]),
                s.choice([last + 1, 2**63 - 1, 2**31 - 1]),
            )
        else:
            start, stop = s.choice([last, last - size, 2**31 - 1]), s.choice([first - 1, -(2**63)])
            stop = -size - 1 if stop == -1 else stop
        steps.append(step)
        bounds.append((start, stop))
    starts, stops = zip(*bounds, strict=True)
    inputs: Inputs = [s.normal(shape), ints(starts), ints(stops)]
    if set(steps) != {1} or s.flag():
        return s.case([*inputs, ints(axes), ints(steps)])
    return s.case(inputs if axes == list(range(len(axes))) else [*inputs, ints(axes)])


@operator("Split")
def _(s: Source) -> Case:
    shape = list(s.shape())
    axis = s.axis(len(shape))
    pieces = [s.integer(1, 3) for _ in range(s.integer(1, 3))]
    more: Inputs = []
    attributes = {"axis": axis} if axis != 0 or s.flag() else {}
    if s.opset >= 18 and s.flag():  # the last piece may be smaller
        count = attributes["num_outputs"] = len(pieces)
        shape[axis] = s.choice([n for n in range(1, 9) if n > (count - 1) * -(-n // count)])
    else:
        shape[axis] = sum(pieces)
        if s.opset >= 18 or len(set(pieces)) > 1 or s.flag():
            more = [ints(pieces)]
    return Case(s.op, [s.normal(shape), *more], attributes, s.opset, (True,) * len(pieces))


@operator("Concat")
def _(s: Source) -> Case:
    shape = s.shape()
    axis = s.axis(len(shape))
    sizes = [s.integer(1, 3) for _ in range(s.integer(1, 3))]
    at = axis % len(shape)
    return s.case([s.normal((*shape[:at], n, *shape[at + 1 :])) for n in sizes], axis=axis)


@operator("Gather")
def _(s: Source) -> Case:
    shape = s.shape()
    axis = s.axis(len(shape))
    size = shape[axis]
    kind = s.choice(["any", "any", "distinct", "run", "number"])
    if kind == "number":
        indices = np.array(s.integer(-size, size - 1))
    elif kind == "distinct":
        indices = s.random.permutation(size)[: s.integer(1, size)]
    elif kind == "run":
        start = s.integer(0, size - 1)
        indices = np.arange(start, s.integer(start, size - 1) + 1)
    else:
        indices = s.random.integers(-size, size, size=s.shape(1, 3))
    known = Fixed(indices.astype(s.choice([np.int64, np.int32])))
    return s.case([s.normal(shape), known], axis=axis if axis != 0 or s.flag() else None)


@operator("Pad")
def _(s: Source) -> Case:
    shape = s.shape()
    axes = s.axes(len(shape), low=1) if s.opset >= 18 and s.flag() else None
    places = range(len(shape)) if axes is None else axes
    before = [s.integer(1 - shape[a], 2) for a in places]
    after = [s.integer(1 - shape[a] - min(b, 0), 2) for a, b in zip(places, before, strict=True)]
    mode = s.choice([None, "constant"])
    inputs: Inputs = [s.normal(shape), ints([*before, *after])]
    value = s.choice([None, Fixed(np.array(0.5))])
    if axes is not None:
        return s.case([*inputs, value, ints(axes)], mode=mode)
    return s.case(inputs if value is None else [*inputs, value], mode=mode)
