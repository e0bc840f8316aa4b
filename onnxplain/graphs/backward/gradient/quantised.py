"""Rounding to a few integers: straight through.

The derivative of rounding is 0 almost everywhere. As in training with quantisation (Bengio et al.
2013), it counts as 1 where a value lies in the range of the integers, as 0 where it was cut off.
"""

from __future__ import annotations

import numpy as np

from onnxplain.graphs.backward.gradient.table import Grads, Results, first, rule, where
from onnxplain.graphs.backward.walk import Step
from onnxplain.graphs.values.uses import is_measured

__all__: list[str] = []  # imported for its entries


@rule("DequantizeLinear")
def _(s: Step, g: Grads) -> Results:
    return (first(g),)


@rule("QuantizeLinear")  # saturate(round(x / scale) + zero point)
def _(s: Step, g: Grads) -> Results:
    if is_measured(s.node.inputs[2] if s.has(2) else None):
        return (first(g),)  # from the least to the largest value, so nothing is cut off
    b, x = s.b, s.input(0)
    scale = s.input(1).constant
    zero = s.input(2).constant if s.has(2) else np.zeros((), s.y.dtype.numpy())
    if scale is None or zero is None or scale.size != 1 or zero.size != 1:
        raise s.refuse("its scale is not one number; expected activations quantised per tensor")
    lowest, highest = np.iinfo(s.y.dtype.numpy()).min, np.iinfo(s.y.dtype.numpy()).max
    low, high = (
        float((end - float(zero.item())) * scale.item()) for end in (lowest - 0.5, highest + 0.5)
    )
    inside = b.op(
        "And",
        [b.compare("GreaterOrEqual", x, low), b.compare("LessOrEqual", x, high)],
        x.shape,
    )
    return (where(s, inside, first(g)),)
