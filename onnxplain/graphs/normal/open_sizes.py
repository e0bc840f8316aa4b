"""Sizes of pictures that a file leaves open though its graph has them.

Optimum declares batch, channels, height and width of every vision model as free. The convolution
that reads the picture has the channels; and where a table of positions fits one number of patches,
pictures have one size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnxplain.errors import InputError, ModelError
from onnxplain.graphs.values.axes import ELEMENTWISE, QUANTISERS
from onnxplain.graphs.values.facts import of_stored
from onnxplain.graphs.values.shapes import PROBES, bound, frozen_batches, visit_all

__all__ = ["SizeError", "layout_of", "with_its_size"]

Axes = tuple[int, ...]
LAYOUTS: dict[Axes, str] = {(0, 1, 2, 3): "NCHW", (0, 3, 1, 2): "NHWC"}
PREFIXES = range(10)  # so many tokens may have positions and be no patch
LARGEST_SIDE = 2**14  # of pictures that are tried
TRIED = 64  # sizes, of one file
Size = tuple[int, int]


class SizeError(InputError):
    """A size was given for pictures that the model does not take."""


def layout_of(image: ir.Value) -> str | None:
    """Where the first convolution takes three channels from; None where that is not seen."""
    found = _stem(image)
    if found is None:
        return None
    convolution, axes = found
    weight, group = _weight(convolution), convolution.attributes.get("group")
    channels = 0 if weight is None or len(weight) != 4 else weight[1]
    groups = 1 if group is None else group.as_int()
    return LAYOUTS.get(axes) if channels * groups == 3 else None


def with_its_size(model: ir.Model, image: ir.Value, size: Size | None) -> ir.Model:
    """The model with the height and width that it takes in the shape of its input, if the input
    leaves them open and only one size fits the graph.

    Args:
        model: Any; it is left as it is.
        image: Its input [batch, 3, height, width].
        size: What the user says of them.

    Raises:
        SizeError: The graph takes one size alone, and not this one.
    """
    assert image.shape is not None
    stated = list(image.shape)[2:]
    if image.shape[1] != 3 or all(isinstance(d, int) for d in stated):
        return model
    if size is None or not _fits(model, image, size):
        sizes = (one for one in _candidates(model, image) if _agree(one, stated))
        only = next((one for one in sizes if _is_only(model, image, one)), None)
        if only is not None and size is not None:
            raise SizeError(
                f"input size {[*size]}; the positions of the model fit pictures of {[*only]} alone"
            )
        size = only
    elif all(_fits(model, image, one) for one in _larger(image, size)):
        return model  # it takes any
    if size is None or not _agree(size, stated):
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


def _agree(size: Size, stated: Sequence[int | ir.SymbolicDim]) -> bool:
    return all(one == d for one, d in zip(size, stated, strict=True) if isinstance(d, int))


def _is_only(model: ir.Model, image: ir.Value, size: Size) -> bool:
    """Whether a size fits, and others do not: twice the size would, were it about windows, and a
    pixel less, did positions that are too many not matter."""
    less = size[0] - 1, size[1] - 1
    return _fits(model, image, size) and not any(
        _fits(model, image, one) for one in (less, *_larger(image, size))
    )


def _larger(image: ir.Value, size: Size) -> Iterator[Size]:
    """Sizes that a graph takes which takes any: of whole patches more, and so large that no table
    of positions was made for it."""
    stride = _stride(image)
    yield size[0] + stride, size[1] + 2 * stride
    for times in (2, min(16, LARGEST_SIDE // max(size))):
        yield times * size[0], times * size[1]


def _stride(image: ir.Value) -> int:
    found = _stem(image)
    strides = None if found is None else found[0].attributes.get("strides")
    return 1 if strides is None else strides.as_ints()[0]


def _candidates(model: ir.Model, image: ir.Value) -> Iterator[Size]:
    """Pictures of as many patches as a weight has rows, tokens before them left out, or rows and
    columns.

    Of patches that tile the picture alone: where they overlap, have gaps or reach over its edges,
    several sizes have the same patches. A table without rows and columns is one of a square.
    """
    found = _stem(image)
    weight = None if found is None else _weight(found[0])
    if found is None or weight is None or len(weight) != 4 or not _tiles(found[0], weight):
        return
    dim, patch = weight[0], weight[2]
    grids: dict[Size, None] = {}
    tensors = (value.const_value for value in model.graph.initializers.values())
    for shape in (tuple(t.shape.numpy()) for t in tensors if t is not None):
        if len(shape) == 4 and shape[0] == 1 and dim in (shape[1], shape[3]):
            first = 2 if shape[1] == dim else 1
            grids[shape[first], shape[first + 1]] = None
        elif shape[-1:] == (dim,) and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)):
            for patches in (shape[-2] - prefix for prefix in PREFIXES):
                side = math.isqrt(max(patches, 0))
                if side > 1 and side * side == patches:
                    grids[side, side] = None
    for rows, columns in itertools.islice(grids, TRIED):
        yield rows * patch, columns * patch


def _tiles(convolution: ir.Node, weight: tuple[int, ...]) -> bool:
    """Whether it cuts the picture into square patches, each pixel in one of them."""
    ints = {
        name: list(attribute.as_ints())
        for name in ("strides", "pads", "dilations")
        if (attribute := convolution.attributes.get(name)) is not None
    }
    square = [weight[2]] * 2 == [*weight[2:]] == ints.get("strides")
    return square and not any(ints.get("pads", [])) and set(ints.get("dilations", [])) <= {1}


def _fits(model: ir.Model, image: ir.Value, size: Size) -> bool:
    """Whether every node takes what pictures of a size become, up to one of a runtime's own."""
    return (
        min(size) > 0
        and max(size) <= LARGEST_SIDE
        and any(_fits_batch(model, image, size, b) for b in (PROBES[0], *frozen_batches(model)))
    )


def _fits_batch(model: ir.Model, image: ir.Value, size: Size, batch: int) -> bool:
    try:
        standard = itertools.takewhile(lambda node: node.domain == "", model.graph)
        visit_all(standard, bound(model, image, batch, size), model.opset_imports)
    except ModelError:
        return False
    return True


def _weight(convolution: ir.Node) -> tuple[int, ...] | None:
    """Its shape, where it is stored: as it is, in fewer bits or quantised."""
    weight = convolution.inputs[1]
    while weight is not None and (node := weight.producer()) is not None:
        if node.op_type not in {"Cast", "Identity"} | QUANTISERS:
            break
        weight = node.inputs[0]
    stored = None if weight is None else of_stored(weight)
    if stored is None:
        return None
    return tuple(d for d in stored.shape if isinstance(d, int))
