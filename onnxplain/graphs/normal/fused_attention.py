"""The attention operators of onnxruntime as the products and the Softmax that they stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from onnxplain.graphs.normal.heads import apart, together
from onnxplain.graphs.normal.rewrite import MICROSOFT, Rewrite, rewrites

__all__: list[str] = []

Outputs = Sequence[ir.Value | None]


@rewrites("Attention", MICROSOFT)
def attention(r: Rewrite) -> Outputs:
    """Self-attention with the projection to queries, keys and values in it."""
    _expect_none(r, {3: "mask_index", 4: "past", 6: "past_sequence_length"}, ("do_rotary",))
    if r.used(1):
        raise r.refuse("its output present is used; expected no cache of keys")
    heads, widths = _heads(r), r.node.attributes.get("qkv_hidden_sizes")
    sizes = list(widths.as_ints()) if widths else [r.sizes(1)[-1] // 3] * 3
    joined = r.op("MatMul", r.input(0), r.input(1))
    if r.has(2):
        joined = r.op("Add", joined, r.input(2))
    q, k, v = (apart(r, x, heads) for x in r.several("Split", 3, joined, r.ints(*sizes), axis=-1))
    y = _attend(r, q, k, v, sizes[0] // heads, r.optional(5))
    return (together(r, y),)


@rewrites("MultiHeadAttention", MICROSOFT)
def multi_head_attention(r: Rewrite) -> Outputs:
    """Attention between projected queries, keys and values."""
    unknown = {4: "key_padding_mask", 6: "past_key", 7: "past_value", 8: "past_sequence_length"}
    _expect_none(r, {**unknown, 9: "cache_indirection"})
    if any(map(r.used, (1, 2, 3))):
        raise r.refuse("more than its first output is used")
    if not (r.has(1) and r.has(2)) or len(r.sizes(0)) != 3 or len(r.sizes(1)) == 5:
        raise r.refuse("queries, keys and values are packed; expected an input for each")
    heads = _heads(r)
    inputs = [r.input(i) for i in range(3)]
    widths = [r.sizes(i)[-1] * (heads if len(r.sizes(i)) == 4 else 1) for i in range(3)]
    if r.has(3):
        if any(len(r.sizes(i)) == 4 for i in (1, 2)):
            raise r.refuse(
                "keys or values come by head, with a bias; expected [batch, keys, width]"
            )
        biases = r.several("Split", 3, r.input(3), r.ints(*widths), axis=0)
        inputs = [r.op("Add", x, bias) for x, bias in zip(inputs, biases, strict=True)]
    q, k, v = (x if len(r.sizes(i)) == 4 else apart(r, x, heads) for i, x in enumerate(inputs))
    y = _attend(r, q, k, v, widths[0] // heads, r.optional(5))
    return (together(r, y),)


def _attend(
    r: Rewrite, q: ir.Value, k: ir.Value, v: ir.Value, size: int, bias: ir.Value | None
) -> ir.Value:
    """softmax(scale q k^T + bias) v for [batch, heads, tokens, size]."""
    scale = r.real("scale", 0.0) or 1 / math.sqrt(size)
    scaled = r.op("Mul", q, r.scalar(scale, r.input(0)))
    scores = r.op("MatMul", scaled, r.op("Transpose", k, perm=[0, 1, 3, 2]))
    if bias is not None:
        scores = r.op("Add", scores, bias)
    return r.op("MatMul", r.op("Softmax", scores, axis=-1), v)


def _heads(r: Rewrite) -> int:
    if (heads := r.integer("num_heads", 0)) < 1:
        raise r.refuse("num_heads is missing")
    return heads


def _expect_none(r: Rewrite, inputs: dict[int, str], attributes: Sequence[str] = ()) -> None:
    """Refuses masks and caches, which classifiers of pictures do without."""
    given = [name for i, name in inputs.items() if r.has(i)]
    given += [name for name in (*attributes, "unidirectional") if r.integer(name, 0)]
    if given:
        raise r.refuse(f"{given[0]} is given; expected attention of every token to every token")
