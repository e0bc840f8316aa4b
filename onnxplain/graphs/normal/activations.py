"""The functions of single elements that runtimes fuse, and Swish, standard since opset 24."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxplain.graphs.normal.rewrite import MICROSOFT, Rewrite, rewrites

__all__: list[str] = []

Outputs = Sequence[ir.Value | None]


@rewrites("Gelu", MICROSOFT)
def gelu(r: Rewrite) -> Outputs:
    return (_gelu(r, r.input(0)),)


@rewrites("BiasGelu", MICROSOFT)
def bias_gelu(r: Rewrite) -> Outputs:
    return (_gelu(r, r.op("Add", r.input(0), r.input(1))),)


@rewrites("FastGelu", MICROSOFT)
def fast_gelu(r: Rewrite) -> Outputs:
    x = r.op("Add", r.input(0), r.input(1)) if r.has(1) else r.input(0)
    return (_gelu(r, x, "tanh"),)


@rewrites("QuickGelu", MICROSOFT)
def quick_gelu(r: Rewrite) -> Outputs:
    return (_swish(r, r.real("alpha", 1.702)),)


@rewrites("Swish", "")
def swish(r: Rewrite) -> Outputs:
    return (_swish(r, r.real("alpha", 1.0)),)


def _gelu(r: Rewrite, x: ir.Value, approximate: str = "none") -> ir.Value:
    """x (1 + erf(x / sqrt 2)) / 2, or tanh(sqrt(2 / pi) (x + 0.044715 x^3)) in place of erf."""
    if r.opset >= 20:
        return r.op("Gelu", x, approximate=approximate)
    like = r.input(0)
    if approximate == "none":
        gate = r.op("Erf", r.op("Div", x, r.scalar(math.sqrt(2), like)))
    else:
        cubic = r.op("Mul", r.op("Pow", x, r.scalar(3, like)), r.scalar(0.044715, like))
        inner = r.op("Mul", r.op("Add", x, cubic), r.scalar(math.sqrt(2 / math.pi), like))
        gate = r.op("Tanh", inner)
    twice = r.op("Mul", x, r.op("Add", gate, r.scalar(1, like)))
    return r.op("Mul", twice, r.scalar(0.5, like))


def _swish(r: Rewrite, alpha: float) -> ir.Value:
    """x sigmoid(alpha x)."""
    x = r.input(0)
    inner = x if alpha == 1 else r.op("Mul", x, r.scalar(alpha, x))
    return r.op("Mul", x, r.op("Sigmoid", inner))
