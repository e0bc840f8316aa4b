"""What the attention operators of all domains have in common."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.normal.rewrite import Rewrite

__all__ = ["apart", "repeated", "together"]


def apart(r: Rewrite, x: ir.Value, heads: int) -> ir.Value:
    """[batch, tokens, heads * size] as [batch, heads, tokens, size]."""
    return r.op("Transpose", r.op("Reshape", x, r.ints(0, 0, heads, -1)), perm=[0, 2, 1, 3])


def together(r: Rewrite, x: ir.Value) -> ir.Value:
    """[batch, heads, tokens, size] as [batch, tokens, heads * size]."""
    return r.op("Reshape", r.op("Transpose", x, perm=[0, 2, 1, 3]), r.ints(0, 0, -1))


def repeated(r: Rewrite, x: ir.Value, heads: int, times: int) -> ir.Value:
    """[batch, heads, tokens, size] with every head so many times, one after the other."""
    if times == 1:
        return x
    return r.op("Gather", x, r.ints(*np.repeat(range(heads), times).tolist()), axis=1)
