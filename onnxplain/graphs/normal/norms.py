"""Layer and RMS normalisation, alone or with the sum before them, as runtimes fuse it."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxplain.graphs.normal.rewrite import MICROSOFT, Rewrite, rewrites

__all__: list[str] = []

Outputs = Sequence[ir.Value | None]


@rewrites("LayerNormalization", MICROSOFT)
def layer_normalization(r: Rewrite) -> Outputs:
    """onnxruntime has had the operator since before it was a standard one, at opset 17."""
    return r.several(
        "LayerNormalization",
        3 if r.used(2) else 2 if r.used(1) else 1,
        *r.node.inputs,
        axis=r.integer("axis", -1),
        epsilon=r.real("epsilon", 1e-5),
        stash_type=r.integer("stash_type", 1),
    )


@rewrites("RMSNormalization", "")
@rewrites("SimplifiedLayerNormalization", "", MICROSOFT)
def rms_normalization(r: Rewrite) -> Outputs:
    """x / sqrt(mean(x^2) + epsilon), times the scale."""
    rank = len(r.sizes(0))
    axes = range(r.integer("axis", -1) % rank, rank)
    return _rms(r, r.input(0), r.input(1), [axis - rank for axis in axes])


@rewrites("SkipLayerNormalization", MICROSOFT)
def skip_layer_normalization(r: Rewrite) -> Outputs:
    """LayerNormalization of the sum of two streams, which is an output too."""
    x = _sum(r, 4)
    count = 3 if r.used(2) else 2 if r.used(1) else 1
    beta = r.optional(3)
    epsilon = r.real("epsilon", 1e-12)
    normal = r.several("LayerNormalization", count, x, r.input(2), beta, axis=-1, epsilon=epsilon)
    return (*normal, *[None] * (3 - count), x)


@rewrites("SkipSimplifiedLayerNormalization", MICROSOFT)
def skip_rms_normalization(r: Rewrite) -> Outputs:
    """RMS normalisation of the sum of two streams, which is an output too."""
    x = _sum(r, 3)
    y, _ = _rms(r, x, r.input(2), [-1])
    return y, None, None, x


def _rms(r: Rewrite, x: ir.Value, scale: ir.Value, axes: Sequence[int]) -> Outputs:
    if (stash := r.integer("stash_type", 1)) != 1:
        raise r.refuse(f"stash_type is {stash}; expected 1, float32")
    like = r.input(0)
    if (found := r.facts[like].dtype) not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        raise r.refuse(f"it normalises {found}; expected float32")
    squares = r.op("Pow", x, r.scalar(2, like))
    if r.opset >= 18:
        mean = r.op("ReduceMean", squares, r.ints(*axes), keepdims=1)
    else:
        mean = r.op("ReduceMean", squares, axes=list(axes), keepdims=1)
    root = r.op("Sqrt", r.op("Add", mean, r.scalar(r.real("epsilon", 1e-5), like)))
    inverse = r.op("Reciprocal", root)
    return r.op("Mul", r.op("Mul", x, inverse), scale), inverse


def _sum(r: Rewrite, bias: int) -> ir.Value:
    """Both streams, with the bias (input `bias`) of the last projection on the one that has it."""
    x, skip = r.input(0), r.input(1)
    if r.has(bias):
        producer = skip.producer()
        if producer is not None and producer.op_type == "MatMul":
            skip = r.op("Add", skip, r.input(bias))
        else:
            x = r.op("Add", x, r.input(bias))
    return r.op("Add", x, skip)
