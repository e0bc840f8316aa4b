"""RotaryEmbedding, standard since opset 23, as the products and sums of its definition."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxplain.graphs.normal.rewrite import Rewrite, rewrites

__all__: list[str] = []


@rewrites("RotaryEmbedding", "")
def rotary_embedding(r: Rewrite) -> Sequence[ir.Value | None]:
    """Turns pairs (a, b) of features to (a cos - b sin, a sin + b cos).

    A pair is one feature of either half, or two neighbours (`interleaved`); features beyond
    `rotary_embedding_dim` stay.
    """
    x, shape = r.input(0), r.sizes(0)
    split = len(shape) == 4
    if not split:
        heads = r.integer("num_heads", 0)
        if heads < 1:
            raise r.refuse("num_heads is missing")
        x = r.op("Reshape", x, r.ints(0, 0, heads, -1))  # [batch, tokens, heads, size]
    size = shape[-1] if split else shape[-1] // r.integer("num_heads", 0)
    turned = r.integer("rotary_embedding_dim", 0) or size
    half = turned // 2
    # The tables are [batch, tokens, half]; x has its heads before or after the tokens.
    axis = 1 if split else 2
    tables = [r.input(1), r.input(2)]
    if r.has(3):
        tables = [r.op("Gather", table, r.input(3), axis=0) for table in tables]
    cos, sin = (r.op("Unsqueeze", table, r.ints(axis)) for table in tables)
    if r.integer("interleaved", 0):
        a, b = _slice(r, x, 0, turned, 2), _slice(r, x, 1, turned, 2)
    else:
        a, b = _slice(r, x, 0, half), _slice(r, x, half, turned)
    real = r.op("Sub", r.op("Mul", cos, a), r.op("Mul", sin, b))
    imaginary = r.op("Add", r.op("Mul", sin, a), r.op("Mul", cos, b))
    if r.integer("interleaved", 0):
        pairs = [r.op("Unsqueeze", part, r.ints(-1)) for part in (real, imaginary)]
        y = r.op("Reshape", r.op("Concat", *pairs, axis=-1), r.ints(0, 0, 0, turned))
    else:
        y = r.op("Concat", real, imaginary, axis=-1)
    if turned < size:
        y = r.op("Concat", y, _slice(r, x, turned, size), axis=-1)
    return (y if split else r.op("Reshape", y, r.ints(0, 0, -1)),)


def _slice(r: Rewrite, x: ir.Value, start: int, stop: int, step: int = 1) -> ir.Value:
    return r.op("Slice", x, r.ints(start), r.ints(stop), r.ints(-1), r.ints(step))
