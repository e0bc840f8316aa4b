"""Pictures with channels last: their model is explained as one that takes channels first.

Before anything is looked for, the input becomes [batch, 3, height, width] and a Transpose makes of
it what the model's nodes read. So taps, rules and maps know one layout. The explained graph has
its own input again: the model's nodes read it as they did, and what was added reads one Transpose
of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import onnx_ir as ir

from onnxplain.errors import InputError
from onnxplain.graphs.normal.open_sizes import layout_of

__all__ = ["channels_first", "channels_last", "picture"]

LAYOUTS = {"NCHW": "[batch, 3, height, width]", "NHWC": "[batch, height, width, 3]"}
TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def channels_first(model: ir.Model, layout: str | None = None) -> tuple[ir.Model, str]:
    """A model that takes pictures [batch, 3, height, width], and the layout that its file has.

    Args:
        model: With one input of rank 4 that has no default; another is handed back as it is. It is
            left as it is.
        layout: "NHWC" or "NCHW", for an input whose shape does not tell. None: channels are where
            the size is 3; where both or neither are, where the first convolution takes them from;
            where that is not seen, of two first.

    Raises:
        InputError: Another layout, or one that the input's shape contradicts.
    """
    if layout not in (None, *LAYOUTS):
        raise InputError(f"input layout {layout!r}; expected {' or '.join(LAYOUTS)}")
    image = picture(model.graph)
    if image is None:
        return model, layout or "NCHW"
    assert image.shape is not None
    dims = list(image.shape)
    # Of several inputs `analyse` says the shapes that they have in the file.
    alone = all(v is image or v.name in model.graph.initializers for v in model.graph.inputs)
    if layout is None and alone and (dims[1] == 3) == (dims[3] == 3):
        read = layout_of(image)
        if read is not None and dims[read.index("C")] in (3, *_free(dims)):
            layout = read
    if layout is None and (dims[1] == 3 or dims[3] != 3 or not alone):
        return model, "NCHW"
    layout = layout or "NHWC"
    channels = layout.index("C")
    if isinstance(dims[channels], int) and dims[channels] != 3:
        raise InputError(
            f"input layout {layout!r}; input {image.name} has shape {image.shape}, expected "
            f"{LAYOUTS[layout]}"
        )
    dims[channels] = 3
    model = model.clone()
    image = picture(model.graph)
    assert image is not None
    image.shape = ir.Shape(dims)
    if layout == "NHWC":
        first = _replaced(model.graph, image, TO_FIRST)
        turned = _transposed(model.graph, first, TO_LAST, "channels_last")
        image.replace_all_uses_with(turned, replace_graph_outputs=True)
    return model, layout


def channels_last(model: ir.Model, name: str) -> None:
    """Undoes `channels_first`, in an explained graph too.

    Args:
        model: What `channels_first` made, and nodes added since. It is changed in place.
        name: Of its picture.
    """
    graph = model.graph
    first = next(value for value in graph.inputs if value.name == name)
    last = _replaced(graph, first, TO_LAST)
    for node in [use.node for use in first.uses()]:
        perm = node.attributes.get("perm")
        if node.op_type == "Transpose" and perm is not None and (*perm.as_ints(),) == TO_LAST:
            node.outputs[0].replace_all_uses_with(last, replace_graph_outputs=True)
            graph.remove(node, safe=True)
    if first.uses():
        first.replace_all_uses_with(_transposed(graph, last, TO_FIRST, "channels_first"))


def _free(dims: Sequence[int | ir.SymbolicDim]) -> list[ir.SymbolicDim]:
    return [size for size in dims if not isinstance(size, int)]


def picture(graph: ir.Graph) -> ir.Value | None:
    """The one input that can be a picture; None where there is no such one."""
    pictures = [
        value
        for value in graph.inputs
        if value.name not in graph.initializers
        and value.shape is not None
        and len(value.shape) == 4
    ]
    return pictures[0] if len(pictures) == 1 and pictures[0].uses() else None


def _replaced(graph: ir.Graph, image: ir.Value, perm: Sequence[int]) -> ir.Value:
    """A new input in place of `image`, of its name and with its axes in another order."""
    assert image.shape is not None
    shape = ir.Shape([image.shape[axis] for axis in perm])
    changed = ir.Value(name=image.name, type=image.type, shape=shape)
    graph.inputs[list(graph.inputs).index(image)] = changed
    return changed


def _transposed(graph: ir.Graph, image: ir.Value, perm: Sequence[int], layout: str) -> ir.Value:
    """The output of a new Transpose before all other nodes."""
    taken = {value.name for node in graph for value in node.outputs} | {*graph.initializers}
    stem = f"{image.name}/{layout}"
    names = (f"{stem}/{i}" if i else stem for i in itertools.count())
    made = ir.Value(name=next(name for name in names if name not in taken), type=image.type)
    node = ir.node("Transpose", [image], {"perm": list(perm)}, outputs=[made])
    graph.insert_before(graph[0], node)
    return made
