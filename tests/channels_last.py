"""A model of channels first as one of channels last, which exporters of torch do not write."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper

__all__ = ["turned"]


def turned(source: Path, path: Path) -> Path:
    """The model as a file that takes pictures [batch, height, width, 3] and transposes them.

    Args:
        source: Takes [batch, 3, height, width] as its first input.
        path: Where it goes.
    """
    model = onnx.load(source)
    image = model.graph.input[0]
    dims = image.type.tensor_type.shape.dim
    own = [onnx.TensorShapeProto.Dimension.FromString(d.SerializeToString()) for d in dims]
    for dim, axis in zip(dims, (0, 2, 3, 1), strict=True):
        dim.CopyFrom(own[axis])
    for node in model.graph.node:
        node.input[:] = ["turned" if name == image.name else name for name in node.input]
    first = helper.make_node("Transpose", [image.name], ["turned"], perm=[0, 3, 1, 2])
    model.graph.node.insert(0, first)
    onnx.save(model, path)
    return path
