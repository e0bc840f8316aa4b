"""Brings models into the form that the rest of `graphs` understands: one range of opsets, standard
operators, each attention with its Softmax in sight, nothing in bfloat16.

What the model computes stays the same, to the rounding of the operators that are written out. A
model that has nothing to rewrite is handed back as it is.
"""

from __future__ import annotations

import contextlib

import onnx_ir as ir

from onnxplain.errors import ModelError, UnsupportedModelError
from onnxplain.graphs.normal import (  # noqa: F401
    activations,
    attention,
    fused_attention,
    norms,
    packed,
    products,
    quantised,
    rotary,
)
from onnxplain.graphs.normal.bfloat16 import has_bfloat16, widened
from onnxplain.graphs.normal.channels_last import picture
from onnxplain.graphs.normal.opset import CONVERTED, OPSETS, raised
from onnxplain.graphs.normal.rewrite import MICROSOFT, REWRITES, rewrite
from onnxplain.graphs.values.shapes import PROBES, bound, frozen_batches

__all__ = ["CONVERTED", "OPSETS", "has_bfloat16", "normalised", "widened"]

NCHWC = f"{MICROSOFT}.nchwc"


def normalised(model: ir.Model, size: tuple[int, int] | None = None) -> ir.Model:
    """The model in standard operators of one of `OPSETS`.

    Args:
        model: The model, its functions inlined, `widened`. It is left as it is.
        size: Height and width to look at it with, where the graph takes pictures of any.

    Raises:
        UnsupportedModelError: The opset is out of range or cannot be raised, or an operator of
            onnxruntime's own, or a variant of an attention, has no equal in standard operators.
    """
    model = raised(model)
    _check_operators(model)
    image = picture(model.graph)  # `analyse` says what is there instead
    if image is None or not any((node.domain, node.op_type) in REWRITES for node in model.graph):
        return model
    assert image.shape is not None
    batch = image.shape[0]
    if all(isinstance(dim, int) for dim in image.shape[2:]):
        size = None
    elif size is None:
        return model
    if isinstance(batch, int):
        return _rewritten(model, batch, size)
    try:
        return _rewritten(model, PROBES[0], size)
    except UnsupportedModelError:
        raise
    except ModelError as error:
        for frozen in frozen_batches(model):
            with contextlib.suppress(ModelError):
                return _rewritten(model, frozen, size)
        raise error


def _rewritten(model: ir.Model, batch: int, size: tuple[int, int] | None) -> ir.Model:
    model = model.clone()
    image = picture(model.graph)
    assert image is not None
    rewrite(model, bound(model, image, batch, size))
    return model


def _check_operators(model: ir.Model) -> None:
    for node in model.graph:
        if node.domain == NCHWC:
            raise UnsupportedModelError(
                f"node {node.name} is {NCHWC}.{node.op_type}, in a layout of the machine that "
                "optimised the model; expected one as its exporter wrote it, or optimised by "
                "onnxruntime at the level ORT_ENABLE_EXTENDED"
            )
        if node.domain == MICROSOFT and (MICROSOFT, node.op_type) not in REWRITES:
            raise UnsupportedModelError(
                f"node {node.name} is {MICROSOFT}.{node.op_type}, which has no equal in standard "
                "operators here; expected a model as its exporter wrote it, before any runtime "
                "optimised or quantised it"
            )
