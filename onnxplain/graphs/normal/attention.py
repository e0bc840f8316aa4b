"""The Attention operator of opsets 23 to 25 as the products and the Softmax that it stands for.

After its definition in ONNX (as corrected in onnx 1.23): q and k are each multiplied by the root of
the scale, a query that no key is left for gets zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.normal.heads import apart, repeated, together
from onnxplain.graphs.normal.rewrite import Rewrite, rewrites

__all__: list[str] = []

RAW, PROBABILITIES = 0, 3  # what qk_matmul_output is, where versions agree on its meaning
CACHE = {4: "past_key", 5: "past_value"}


@rewrites("Attention", "")
def attention(r: Rewrite) -> Sequence[ir.Value | None]:
    """y = softmax(cap(root q (root k)^T) + bias) v, where root^2 is the scale."""
    for i, name in CACHE.items():
        if r.has(i):
            raise r.refuse(f"{name} is given; expected attention without a cache of keys")
    if r.used(1) or r.used(2):
        raise r.refuse("present_key or present_value is used; expected no cache of keys")
    q, k, v = r.input(0), r.input(1), r.input(2)
    shape, keys = r.sizes(0), r.sizes(1)
    split = len(shape) == 4
    heads, kv_heads = shape[1], keys[1]
    if not split:
        heads, kv_heads = r.integer("q_num_heads", 0), r.integer("kv_num_heads", 0)
        if min(heads, kv_heads) < 1:
            raise r.refuse("q_num_heads and kv_num_heads are missing")
        q, k, v = apart(r, q, heads), apart(r, k, kv_heads), apart(r, v, kv_heads)
    if heads % kv_heads:
        raise r.refuse(f"{heads} query heads do not share {kv_heads} key heads evenly")
    k, v = (repeated(r, x, kv_heads, heads // kv_heads) for x in (k, v))
    size = shape[-1] if split else shape[-1] // heads
    root = r.scalar(math.sqrt(r.real("scale", 1 / math.sqrt(size))), r.input(0))
    keys_first = r.op("Transpose", r.op("Mul", k, root), perm=[0, 1, 3, 2])
    raw = scores = r.op("MatMul", r.op("Mul", q, root), keys_first)
    if cap := r.real("softcap", 0.0):
        limit = r.scalar(cap, r.input(0))
        scores = r.op("Mul", r.op("Tanh", r.op("Div", scores, limit)), limit)
    bias = _bias(r, q, k)
    none_left = None
    if bias is not None:
        # No gradient passes a Softmax over -inf alone, so such a row is first left unmasked.
        if _may_mask_all(r):
            zero = r.scalar(0, r.input(0))
            most = r.op("ReduceMax", bias, r.ints(-1), keepdims=1)
            none_left = r.op("Equal", most, r.scalar(-math.inf, r.input(0)))
            bias = r.op("Where", none_left, zero, bias)
        scores = r.op("Add", scores, bias)
    own = r.facts[r.input(0)].dtype
    precision = ir.DataType(r.integer("softmax_precision", int(own)))
    if precision != own:
        scores = r.op("Cast", scores, to=int(precision))
    chances = r.op("Softmax", scores, axis=-1)
    if precision != own:
        chances = r.op("Cast", chances, to=int(own))
    if none_left is not None:
        chances = r.op("Where", none_left, r.scalar(0, r.input(0)), chances)
    y = r.op("MatMul", chances, v)
    return (y if split else together(r, y), None, None, _shown(r, raw, chances))


def _bias(r: Rewrite, q: ir.Value, k: ir.Value) -> ir.Value | None:
    """What is added to the scores: the mask, and -inf where a query must not look."""
    zero, never = 0.0, -math.inf
    bias = None
    if r.has(3):
        bias, keys = r.input(3), r.sizes(1)[-2]
        if (found := r.sizes(3)[-1]) != keys:
            raise r.refuse(f"its mask is for {found} keys; there are {keys}")
        if r.facts[bias].dtype == ir.DataType.BOOL:
            like = r.input(0)
            bias = r.op("Where", bias, r.scalar(zero, like), r.scalar(never, like))
    if r.has(6) or r.integer("is_causal", 0) or _windowed(r):
        like = r.input(0)
        window = r.op("Where", _seen(r, q, k), r.scalar(zero, like), r.scalar(never, like))
        bias = window if bias is None else r.op("Add", bias, window)
    return bias


def _seen(r: Rewrite, q: ir.Value, k: ir.Value) -> ir.Value:
    """[queries, keys]: whether the key is not after the query, and within the window around it.

    Keys may be padded: then [batch, 1, queries, keys], and the last query is at the last true key.
    """
    causal = r.integer("is_causal", 0)
    left, right = r.integer("left_window_size", -1), r.integer("right_window_size", -1)
    at, keys = _positions(r, q, 1), _positions(r, k, 0)
    conditions = []
    if r.has(6):
        true = r.op("Reshape", r.input(6), r.ints(-1, 1, 1, 1))
        at = r.op("Add", at, r.op("Sub", true, r.op("Shape", q, start=2, end=3)))
        conditions.append(r.op("Less", keys, true))
    before = r.op("Sub", at, keys)
    if causal:
        conditions.append(r.op("GreaterOrEqual", before, r.ints(0)))
    if left >= 0:
        conditions.append(r.op("LessOrEqual", before, r.ints(left)))
    if right >= 0:
        conditions.append(r.op("GreaterOrEqual", before, r.ints(-right)))
    return functools.reduce(lambda a, b: r.op("And", a, b), conditions)


def _positions(r: Rewrite, x: ir.Value, axis: int) -> ir.Value:
    """0, 1, 2, ... for the tokens of [batch, heads, tokens, size], with a second axis."""
    count = r.op("Squeeze", r.op("Shape", x, start=2, end=3))
    zero, one = (r.constant(np.array(n, np.int64)) for n in (0, 1))
    return r.op("Unsqueeze", r.op("Range", zero, count, one), r.ints(axis))


def _windowed(r: Rewrite) -> bool:
    return max(r.integer(f"{side}_window_size", -1) for side in ("left", "right")) >= 0


def _may_mask_all(r: Rewrite) -> bool:
    """Whether a query may have no key left. A causal one has the first, unless a mask hides it."""
    if r.has(6) or _windowed(r):
        return True
    if not r.has(3):
        return False
    mask = r.facts[r.input(3)].constant
    if mask is None and (tensor := r.input(3).const_value) is not None:
        mask = tensor.numpy()
    if mask is None or r.integer("is_causal", 0):
        return True
    left = mask if mask.dtype == np.bool_ else mask > -math.inf
    return not left.any(-1).all()


def _shown(r: Rewrite, raw: ir.Value, chances: ir.Value) -> ir.Value | None:
    """The output qk_matmul_output, where it is one of two that all versions agree on."""
    mode = r.integer("qk_matmul_output_mode", RAW)
    return {RAW: raw, PROBABILITIES: chances}.get(mode)
