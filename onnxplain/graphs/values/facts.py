"""What a file itself says of a value: its shape and element type, and what a stored one holds."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxplain.errors import ModelError, UnsupportedModelError

__all__ = [
    "FOLDED",
    "Batch",
    "Dim",
    "Facts",
    "Shape",
    "of_constant",
    "of_stored",
    "of_tensor",
    "show",
]

FOLDED = 4096  # values up to this many elements are computed; weights are not
NUMBERS = {
    ir.AttributeType.FLOAT: np.float32,
    ir.AttributeType.FLOATS: np.float32,
    ir.AttributeType.INT: np.int64,
    ir.AttributeType.INTS: np.int64,
}


@dataclass(frozen=True)
class Batch:
    """A size that is `factor` times the batch size."""

    factor: int = 1

    def __str__(self) -> str:
        return "batch" if self.factor == 1 else f"{self.factor}*batch"


Dim = int | Batch


Shape = tuple[Dim, ...]


def show(shape: Shape) -> str:
    """The shape as messages give it: [batch, 3, 224, 224]."""
    return f"[{', '.join(str(size) for size in shape)}]"


@dataclass(frozen=True)
class Facts:
    """Shape, element type and, where it does not depend on the input, value of one value.

    `counts` says that the elements are 0, 1, 2, ... in order, for every batch.
    """

    shape: Shape
    dtype: ir.DataType
    constant: np.ndarray | None = None
    counts: bool = False

    @property
    def is_half(self) -> bool:
        """Whether it is float16."""
        return self.dtype == ir.DataType.FLOAT16


def of_stored(value: ir.Value) -> Facts | None:
    """Facts of a weight or of what a Constant holds; None of any other value."""
    if value.const_value is not None:
        return of_tensor(value.const_value)
    node = value.producer()
    if node is None or (node.domain, node.op_type) != ("", "Constant"):
        return None
    with contextlib.suppress(ModelError):
        return of_constant(node)
    return None


def of_tensor(tensor: ir.TensorProtocol) -> Facts:
    """Its value is known where it is small."""
    shape = tuple(tensor.shape.numpy())
    small = int(np.prod(shape, dtype=np.int64)) <= FOLDED
    return Facts(shape, tensor.dtype, tensor.numpy() if small else None)


def of_constant(node: ir.Node) -> Facts:
    """Of what a Constant node holds."""
    if len(node.attributes) != 1:
        raise ModelError(f"node {node.name}: a Constant of {len(node.attributes)} values")
    (attribute,) = node.attributes.values()
    if attribute.type == ir.AttributeType.TENSOR:
        return of_tensor(attribute.as_tensor())
    if attribute.type not in NUMBERS:
        raise UnsupportedModelError(f"node {node.name}: a Constant that is not a tensor")
    array = np.array(attribute.value, NUMBERS[attribute.type])
    return Facts(array.shape, ir.DataType.from_numpy(array.dtype), array)
