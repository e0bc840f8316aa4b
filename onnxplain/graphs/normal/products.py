"""Products that runtimes fuse with what stands around them: scales, transposes, activations."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxplain.graphs.normal.rewrite import MICROSOFT, Rewrite, rewrites

__all__: list[str] = []

Outputs = Sequence[ir.Value | None]

# Parameters of the activations that onnxruntime fuses into a convolution, in its order.
PARAMETERS = {
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
}


@rewrites("FusedMatMul", MICROSOFT)
def fused_matmul(r: Rewrite) -> Outputs:
    """alpha a b, with either operand transposed before."""
    operands = []
    for i, name in enumerate("AB"):
        rank = len(r.sizes(i))
        perm = list(range(rank))
        if r.integer(f"transBatch{name}", 0) and rank > 2:
            perm = [*perm[1:-1], 0, perm[-1]]
        if r.integer(f"trans{name}", 0) and rank > 1:
            perm[-2:] = reversed(perm[-2:])
        moved = perm != sorted(perm)
        operands.append(r.op("Transpose", r.input(i), perm=perm) if moved else r.input(i))
    y = r.op("MatMul", *operands)
    alpha = r.real("alpha", 1.0)
    return (y if alpha == 1 else r.op("Mul", y, r.scalar(alpha, r.input(0))),)


@rewrites("FusedGemm", MICROSOFT)
def fused_gemm(r: Rewrite) -> Outputs:
    """A Gemm, then an activation, whose attributes are those called activation_..."""
    own, its = {}, {}
    for name, attribute in r.node.attributes.items():
        if name.startswith("activation_"):
            its[name.removeprefix("activation_")] = attribute.value
        elif name != "activation":
            own[name] = attribute.value
    y = r.op("Gemm", *r.node.inputs, **own)
    return (r.op(r.node.attributes["activation"].as_string(), y, **its),)


@rewrites("FusedConv", MICROSOFT)
def fused_conv(r: Rewrite) -> Outputs:
    """A convolution, then the sum with a fourth input, then an activation."""
    given = dict(r.node.attributes)
    activation, parameters = given.pop("activation", None), given.pop("activation_params", None)
    own = {name: attribute.value for name, attribute in given.items()}
    y = r.op("Conv", *r.node.inputs[:3], **own)
    if r.has(3):
        y = r.op("Add", y, r.input(3))
    if activation is None or not activation.as_string():
        return (y,)
    name = activation.as_string()
    values = [] if parameters is None else list(parameters.as_floats())
    if name == "Clip":
        return (r.op("Clip", y, *(r.scalar(value, r.input(0)) for value in values)),)
    if name not in PARAMETERS:
        raise r.refuse(f"its activation is {name}; expected Clip, {', '.join(PARAMETERS)}")
    return (r.op(name, y, **dict(zip(PARAMETERS[name], values, strict=True))),)
