"""Sizes of pictures that a file leaves open though its graph has them.

Optimum declares batch, channels, height and width of every vision model as free. The convolution
that reads the picture has the channels; and where a table of positions fits one number of patches,
pictures have one size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from onnxplain.errors import InputError, ModelError
from onnxplain.graphs.axes import ELEMENTWISE, QUANTISERS
from onnxplain.graphs.shapes import PROBES, bound, frozen_batches, visit
from onnxplain.graphs.stored import tensor_of

__all__ = ["layout_of", "with_its_size"]

Axes = tuple[int, ...]
LAYOUTS: dict[Axes, str] = {(0, 1, 2, 3): "NCHW", (0, 3, 1, 2): "NHWC"}
PREFIXES = range(10)  # so many tokens may have positions and be no patch
LARGEST_SIDE = 2**14  # of pictures that are tried
Size = tuple[int, int]


def layout_of(image: ir.Value) -> str | None:
    """Where the first convolution takes three channels from; None where that is not seen."""
    found = _stem(image)
    if found is None:
        return None
    convolution, axes = found
    weight = _shape(convolution.inputs[1])
    return LAYOUTS.get(axes) if weight is not None and weight[1] == 3 else None


def with_its_size(model: ir.Model, image: ir.Value, size: Size | None) -> ir.Model:
    """The model with the height and width that it takes in the shape of its input, if the input
    leaves them open and only one size fits the graph.

    Args:
        model: Any; it is left as it is.
        image: Its input [batch, 3, height, width].
        size: What the user says of them.

    Raises:
        InputError: The graph takes one size alone, and not this one.
    """
    assert image.shape is not None
    if any(isinstance(d, int) for d in list(image.shape)[2:]):
        return model
    if size is None or not _fits(model, image, size):
        only = next((one for one in _candidates(model, image) if _is_only(model, image, one)), None)
        if only is not None and size is not None:
            raise InputError(
                f"input size {[*size]}; the positions of the model fit pictures of {[*only]} alone"
            )
        size = only
    if size is None or _fits(model, image, _next(image, size)):
        return model
    model = model.clone()
    own = next(value for value in model.graph.inputs if value.name == image.name)
    own.shape = ir.Shape([*list(image.shape)[:2], *size])
    return model


def _stem(image: ir.Value) -> tuple[ir.Node, Axes] | None:
    """The convolution that reads the picture, and which axes of it that reads as its own."""
    value: ir.Value = image
    axes: Axes = (0, 1, 2, 3)
    while True:
        readers = [n for n in value.consumers() if n.op_type not in ("Shape", "Size")]
        if len(readers) != 1 or readers[0].domain != "":
            return None
        (node,) = readers
        if node.op_type == "Conv":
            return (node, axes) if node.inputs[0] is value else None
        if node.op_type == "Transpose" and (perm := node.attributes.get("perm")) is not None:
            axes = tuple(axes[axis] for axis in perm.as_ints())
        elif node.op_type not in ELEMENTWISE | QUANTISERS:
            return None
        value = node.outputs[0]


def _is_only(model: ir.Model, image: ir.Value, size: Size) -> bool:
    """Whether a size fits, and others do not: twice the size would, were it about windows."""
    others = _next(image, size), (2 * size[0], 2 * size[1])
    fits = [_fits(model, image, one) for one in (size, *others)]
    return fits == [True, False, False]


def _next(image: ir.Value, size: Size) -> Size:
    """A size that differs in both by whole patches."""
    stride = _stride(image)
    return size[0] + stride, size[1] + 2 * stride


def _stride(image: ir.Value) -> int:
    found = _stem(image)
    strides = None if found is None else found[0].attributes.get("strides")
    return 1 if strides is None else strides.as_ints()[0]


def _candidates(model: ir.Model, image: ir.Value) -> Iterator[Size]:
    """Square pictures of as many patches as some weight has rows, tokens before them left out."""
    found = _stem(image)
    weight = None if found is None else _shape(found[0].inputs[1])
    if found is None or weight is None or len(weight) != 4:
        return
    pads = found[0].attributes.get("pads")
    padded = 0 if pads is None else pads.as_ints()[0] + pads.as_ints()[2]
    stride, kernel = _stride(image), weight[2]
    shapes = [tuple(v.shape or ()) for v in model.graph.initializers.values()]
    tables = [s for s in shapes if len(s) == 3 and s[0] == 1] + [s for s in shapes if len(s) == 2]
    seen = set()
    for _, rows, _ in ((1, *shape)[-3:] for shape in tables):
        for prefix in PREFIXES:
            side = math.isqrt(max(rows - prefix, 0))
            if side > 1 and side * side == rows - prefix and side not in seen:
                seen.add(side)
                pixels = (side - 1) * stride + kernel - padded
                yield pixels, pixels


def _fits(model: ir.Model, image: ir.Value, size: Size) -> bool:
    """Whether every node takes what pictures of a size become, up to one of a runtime's own."""
    return max(size) <= LARGEST_SIDE and any(
        _fits_batch(model, image, size, b) for b in (PROBES[0], *frozen_batches(model))
    )


def _fits_batch(model: ir.Model, image: ir.Value, size: Size, batch: int) -> bool:
    try:
        facts = bound(model, image, batch, size)
        for node in model.graph:
            if node.domain != "":
                break
            visit(node, facts, model.opset_imports)
    except ModelError:
        return False
    return True


def _shape(value: ir.Value | None) -> tuple[int, ...] | None:
    tensor = None if value is None else tensor_of(value)
    return None if tensor is None else tuple(tensor.shape.numpy())
