"""Products with weights of a few bits, packed into bytes block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.normal.rewrite import MICROSOFT, Rewrite, rewrites

__all__ = ["has_packed_weights"]

BYTE = 8  # bits
# The level at which onnxruntime rounds what the weights are multiplied with to 8 bits, too.
ROUNDS = 4


def has_packed_weights(model: ir.Model) -> bool:
    return any(node.op_type == "MatMulNBits" for node in model.graph)


@rewrites("MatMulNBits", MICROSOFT)
def matmul_nbits(r: Rewrite) -> Sequence[ir.Value | None]:
    """x W^T, W = (q - zero) scale, with a scale and a zero point for each block of a row.

    The weights stay packed, and are unpacked where they are read.
    """
    bits, block = r.integer("bits", 4), r.integer("block_size", 32)
    rows, width = r.integer("N", 0), r.integer("K", 0)
    if r.integer("accuracy_level", 0) == ROUNDS:
        raise r.refuse(
            "its accuracy_level 4 rounds activations to 8 bits in a way of the processor's own; "
            "quantise with accuracy_level 0 or 1"
        )
    if r.has(4):
        raise r.refuse("its columns are reordered")
    if bits not in (2, 4, 8):
        raise r.refuse(f"it has {bits} bits")
    if min(block, rows, width) < 1:
        raise r.refuse(f"its N is {rows}, K {width}, block_size {block}; expected 1 or more")
    blocks = -(-width // block)
    stored, wanted = math.prod(r.sizes(1)), rows * blocks * block * bits // BYTE
    if stored != wanted:
        raise r.refuse(f"its weights have {stored} bytes; expected {wanted} by N, K and block_size")
    dtype = r.facts[r.input(0)].dtype
    scale = r.op("Reshape", r.input(2), r.ints(rows, blocks, 1))
    zero = r.optional(3)
    if zero is None:
        zero = r.scalar(2 ** (bits - 1), r.input(0))
    else:
        if r.facts[zero].dtype == ir.DataType.UINT8:
            zero = _unpacked(r, zero, rows, bits, dtype)
            zero = r.op("Slice", zero, *map(r.ints, (0, blocks, 1)))
        zero = r.op("Reshape", zero, r.ints(rows, blocks, 1))
    steps = _unpacked(r, r.input(1), rows, bits, dtype)
    steps = r.op("Reshape", steps, r.ints(rows, blocks, -1))
    weight = r.op("Mul", r.op("Sub", steps, zero), scale)
    weight = r.op("Reshape", weight, r.ints(rows, -1))
    if blocks * block != width:
        weight = r.op("Slice", weight, *map(r.ints, (0, width, 1)))
    y = r.op("MatMul", r.input(0), r.op("Transpose", weight, perm=[1, 0]))
    return (r.op("Add", y, r.input(5)) if r.has(5) else y,)


def _unpacked(r: Rewrite, value: ir.Value, rows: int, bits: int, dtype: ir.DataType) -> ir.Value:
    """Numbers of `bits` bits from the bytes of each row, the lowest bits first: [rows, numbers]."""
    parts, rest = [], r.op("Reshape", value, r.ints(rows, -1))
    for _ in range(BYTE // bits - 1):
        shift = r.constant(np.array(bits, np.uint8))
        above = r.op("BitShift", rest, shift, direction="RIGHT")
        size = r.constant(np.array(2**bits, dtype.numpy()))
        upper = r.op("Mul", r.op("Cast", above, to=int(dtype)), size)
        parts.append(r.op("Sub", r.op("Cast", rest, to=int(dtype)), upper))
        rest = above
    parts.append(r.op("Cast", rest, to=int(dtype)))
    if len(parts) == 1:
        return parts[0]
    last = r.ints(2)
    joined = r.op("Concat", *(r.op("Unsqueeze", part, last) for part in parts), axis=2)
    return r.op("Reshape", joined, r.ints(0, -1))
