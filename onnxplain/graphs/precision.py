"""Weights stored as float16: half the file, computed in float32 all the same.

A weight becomes a float16 initializer with a Cast to float32 behind it. What goes in and comes out
stays float32, and nothing is computed in float16: half of onnxruntime's CPU kernels lack it, and
gradients and relevance leave its range (the 1e-9 in the relevance rules is 0 there).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from onnxplain.contract import BFLOAT16, HALF, INT8, PRECISIONS
from onnxplain.errors import InputError, ModelError
from onnxplain.graphs.explained import Explained
from onnxplain.graphs.values.stored import SMALL, cast_behind, is_large, names_in

__all__ = ["check_precision", "halved", "narrow"]

LARGEST = float(np.finfo(np.float16).max)
SMALLEST = float(np.finfo(np.float16).smallest_normal)


def check_precision(precision: str) -> None:
    """Raises InputError for a name that is not one of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise InputError(f"precision {precision!r}; expected one of {', '.join(PRECISIONS)}")


def halved(array: np.ndarray) -> np.ndarray | None:
    """The nearest float16 values of a float32 weight; None where it should stay float32.

    It should stay where a value is too large for float16 (65504), or where all are so small
    (below 6e-5) that float16 has less than its 11 bits for them. Infinities, as in masks, stay
    what they are. What is not `is_large` is not worth it.
    """
    if array.ndim < 2 or array.dtype != np.float32 or array.nbytes <= SMALL:
        return None
    largest = float(np.abs(array[np.isfinite(array)]).max(initial=0))
    if largest > LARGEST or 0 < largest < SMALLEST:
        return None
    return array.astype(np.float16)


def narrow(explained: Explained, *, lossless: bool = False) -> Explained:
    """Stores the weights of every graph as float16. The graphs are changed in place.

    Args:
        explained: Graphs in float32.
        lossless: Only weights that lose nothing by it: those of a model that was rounded before.
            What its exporter computed from them (tables of positions, say) stays float32.

    Raises:
        ModelError: No weight can be stored as float16.
    """
    if explained.contract.precision in (HALF, INT8):
        return explained  # as small as that, or smaller
    tensors: dict[int, ir.TensorProtocol | None] = {}  # graphs of a bundle share their weights
    kept: dict[str, None] = {}
    for model in explained.models.values():
        casts = []
        names = names_in(model.graph)
        for name, value in list(model.graph.initializers.items()):
            tensor = value.const_value
            if tensor is None or value.is_graph_input() or value.is_graph_output():
                continue
            if id(tensor) not in tensors:
                tensors[id(tensor)] = _narrowed(tensor, lossless)
            half = tensors[id(tensor)]
            if half is not None:
                casts.append(cast_behind(value, names))
                value.const_value, value.type = half, ir.TensorType(ir.DataType.FLOAT16)
            elif tensor.dtype == ir.DataType.FLOAT and is_large(tensor):
                kept[name] = None
        if casts:
            model.graph.insert_before(model.graph[0], casts)
    stored = explained.contract.precision in ("fp16", BFLOAT16)
    if not stored and all(t is None for t in tensors.values()):
        raise ModelError(
            "no weight of the model can be stored as float16: expected float32 matrices or kernels "
            "with values up to 65504; leave the precision at fp32"
        )
    explained = dataclasses.replace(explained, kept_float32=tuple(kept))
    if explained.contract.precision == BFLOAT16:
        return explained
    return explained.with_contracts(lambda own: dataclasses.replace(own, precision="fp16"))


def _narrowed(tensor: ir.TensorProtocol, lossless: bool) -> ir.TensorProtocol | None:
    if tensor.dtype != ir.DataType.FLOAT or not is_large(tensor):
        return None
    array = tensor.numpy()
    half = halved(array)
    if half is None or (lossless and not np.array_equal(half, array, equal_nan=True)):
        return None
    return ir.tensor(half, name=tensor.name)
