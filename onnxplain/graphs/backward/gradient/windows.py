"""Convolution and pooling: operators that slide a window over rows and columns."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.backward.gradient.table import Grads, Results, first, rule
from onnxplain.graphs.backward.walk import Step
from onnxplain.graphs.builder import Tensor
from onnxplain.graphs.values.axes import size_of, volume

__all__: list[str] = []  # imported for its entries


@rule("Conv")
def _(s: Step, g: Grads) -> Results:
    weight = s.input(1)
    if any(s.wants[1:]):
        raise s.refuse("its weights depend on the attention")
    return (transposed(s, first(g), weight, s.integer("group", 1)),)


@rule("AveragePool")  # each output is shared out evenly over the positions that it counts
def _(s: Step, g: Grads) -> Results:
    b, x = s.b, s.input(0)
    kernel = s.integers("kernel_shape")
    assert kernel is not None
    spatial = len(kernel)
    strides, dilations, pads = geometry(s, spatial)
    counts = np.ones((), x.dtype.numpy())
    for axis in range(spatial):
        size, out = x.shape[2 + axis], s.y.shape[2 + axis]
        assert isinstance(size, int) and isinstance(out, int)
        padded = s.integer("count_include_pad", 0)
        low, high = (-pads[axis], size + pads[spatial + axis]) if padded else (0, size)
        starts = strides[axis] * np.arange(out) - pads[axis]
        places = starts[:, None] + dilations[axis] * np.arange(kernel[axis])
        counted = ((low <= places) & (places < high)).sum(1)
        counts = (counts[..., None] * counted).astype(counts.dtype)
    channels = x.shape[1]
    assert isinstance(channels, int)
    ones = b.constant(np.ones((channels, 1, *kernel), counts.dtype))
    return (transposed(s, b.div(first(g), b.constant(counts)), ones, channels),)


@rule("MaxPool")  # all of it to the first of the largest
def _(s: Step, g: Grads) -> Results:
    b, x = s.b, s.input(0)
    if s.integer("storage_order", 0):
        raise s.refuse("storage_order 1; expected 0")
    places = s.output(1, s.y.shape, ir.DataType.INT64)  # counted over all images
    if s.range is not None:
        places = b.sub(places, s.range.start * volume(x.shape[1:]))
    flat, many = (size_of(volume(x.shape)),), (size_of(volume(s.y.shape)),)
    zeros = b.expand(b.constant(np.zeros(1, x.dtype.numpy())), flat, b.reshape(x, flat).value)
    parts = [zeros, b.reshape(places, many), b.reshape(first(g), many)]
    total = b.op("ScatterElements", parts, flat, axis=0, reduction="add")
    return (b.reshape(total, x.shape),)


@rule("GlobalMaxPool")  # all of it to the first of the largest
def _(s: Step, g: Grads) -> Results:
    b, x = s.b, s.input(0)
    number = volume(x.shape[2:])
    flat, one = (*x.shape[:2], number), (*x.shape[:2], 1)
    best = b.op("ArgMax", [b.reshape(x, flat)], one, ir.DataType.INT64, axis=2)
    chosen = b.compare("Equal", best, b.constant(np.arange(number, dtype=np.int64)))
    share = b.mul(b.cast(chosen, x.dtype), b.reshape(first(g), one))
    return (b.reshape(share, x.shape),)


def geometry(s: Step, spatial: int) -> tuple[list[int], list[int], list[int]]:
    """Strides, dilations and pads of the windows."""
    if (padding := s.text("auto_pad", "NOTSET")) not in ("NOTSET", "VALID"):  # VALID: none
        raise s.refuse(f"auto_pad {padding}; expected explicit pads")
    strides = s.integers("strides") or [1] * spatial
    dilations = s.integers("dilations") or [1] * spatial
    return strides, dilations, s.integers("pads") or [0] * (2 * spatial)


def transposed(s: Step, g: Tensor, weight: Tensor, group: int) -> Tensor:
    """The sum, at each position of x, of what the windows that saw it give back."""
    x, spatial = s.input(0), weight.rank - 2
    strides, dilations, pads = geometry(s, spatial)
    pads, left = list(pads), []
    for axis in range(spatial):
        size, out, kernel = x.shape[2 + axis], s.y.shape[2 + axis], weight.shape[2 + axis]
        assert isinstance(size, int) and isinstance(out, int) and isinstance(kernel, int)
        reach = (out - 1) * strides[axis] + dilations[axis] * (kernel - 1) + 1
        unseen = size + pads[axis] + pads[spatial + axis] - reach
        left.append(max(unseen, 0))
        pads[spatial + axis] -= min(unseen, 0)  # with ceil_mode the last window stands out
    return s.b.op(
        "ConvTranspose",
        [g, weight],
        x.shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        output_padding=left,
        group=group,
    )
