"""Heatmaps inside the graph, as `onnxplain.runtime.explanation.upsample` makes them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxplain.contract import Contract
from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.outputs import DEGENERATE_SPAN, METHODS

__all__ = ["heatmap"]

LARGEST = float(np.finfo(np.float32).max)


def heatmap(b: Builder, contract: Contract, method: str, drawn: Tensor) -> Tensor:
    """The method's map at the size of the model's input, in 0..1.

    Args:
        b: Builder on the graph.
        contract: Of the graph.
        method: One of `METHODS`.
        drawn: Its map, [batch, rows, columns] of the grid or of the pixels.

    Returns:
        [batch, height, width]; 0 where the map is not finite or constant up to rounding, and where
        the model does not see the picture. Of a method with a value per pixel: the positive part.
    """
    size, grid = contract.input.size, contract.tokens.grid
    pixels = METHODS[method].pixels is not None
    if pixels:
        drawn = b.unary("Relu", drawn)
    low, high = (b.reduce(f"Reduce{end}", drawn, [1, 2], keepdims=True) for end in ("Min", "Max"))
    span = b.sub(high, low)
    largest = b.binary("Max", b.unary("Abs", low), b.unary("Abs", high))
    # Not finite: each comparison with NaN is false.
    distinct = b.compare("Greater", span, b.mul(largest, DEGENERATE_SPAN))
    sound = b.op(
        "And",
        [distinct, b.compare("LessOrEqual", largest, LARGEST)],
        span.shape,
        ir.DataType.BOOL,
    )
    zero, one = b.scalar(0, span), b.scalar(1, span)
    scaled = b.div(b.sub(drawn, low), b.where(sound, span, one))
    if not pixels:
        covered = contract.tokens.covered(size)
        rows, columns = (
            _between(b, drawn.dtype, *axis) for axis in zip(grid, covered, strict=True)
        )
        scaled = b.matmul(b.matmul(rows, scaled), b.swap(columns))
        floor = b.reduce("ReduceMin", scaled, [1, 2], keepdims=True)
        top = b.reduce("ReduceMax", scaled, [1, 2], keepdims=True)
        scaled = b.div(b.sub(scaled, floor), b.where(sound, b.sub(top, floor), one))
        for axis in (1, 2):
            scaled = b.pad(scaled, axis, 0, size[axis - 1] - covered[axis - 1])
    return b.where(sound, scaled, zero)


def _between(b: Builder, dtype: ir.DataType, count: int, size: int) -> Tensor:
    """[size, count]: each pixel's shares in the positions next to it, whose centres lie half a
    position from the edge.

    Made of nodes, not stored, so that it follows the size of the picture.
    """
    at = b.mul(b.add(_numbers(b, dtype, size), 0.5), count / size)
    bounds = [b.scalar(n, at) for n in (0, count - 1)]
    at = b.op("Clip", [b.sub(at, 0.5), *bounds], at.shape)
    apart = b.unary("Abs", b.sub(b.unsqueeze(at, 1), _numbers(b, dtype, count)))
    return b.unary("Relu", b.sub(b.scalar(1, apart), apart))


def _numbers(b: Builder, dtype: ir.DataType, count: int) -> Tensor:
    """0, 1, ..., count - 1."""
    bounds = [b.constant(np.array(n, np.int64)) for n in (0, count, 1)]
    return b.cast(b.op("Range", bounds, (count,), ir.DataType.INT64), dtype)
