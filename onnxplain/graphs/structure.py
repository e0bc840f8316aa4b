"""What a graph is, as far as explaining it goes: input, logits, taps, tokens, readout."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxplain.contract import Readout
from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.shapes import Batch, Facts, infer
from onnxplain.graphs.taps import Tap, attention_input, dependents, find_taps
from onnxplain.graphs.tokens import find_readout, find_tokens

__all__ = ["OPSETS", "Structure", "analyse"]

OPSETS = range(17, 23)


@dataclass(frozen=True)
class Structure:
    """What was found. `facts` covers every value of the graph; `classes` counts the logits."""

    image: ir.Value
    logits: ir.Value
    classes: int
    size: tuple[int, int]
    batch: int | None
    taps: tuple[Tap, ...]
    features: ir.Value | None
    prefix: int | None  # None, like grid: not found
    grid: tuple[int, int] | None
    readout: Readout | None
    facts: dict[ir.Value, Facts]


def analyse(model: ir.Model) -> Structure:
    """Finds everything that `Structure` names.

    Raises:
        UnsupportedModelError: The model is not a plain ViT with global attention, with the reason.
    """
    graph = model.graph
    _check_operators(model)
    image = _image(graph)
    facts = infer(model, image)
    size = facts[image].shape[2:]
    live = dependents(graph, image)
    logits, classes = _logits(graph, facts, live)
    taps = find_taps(graph, facts, live)
    if not taps:
        raise UnsupportedModelError(
            "no attention found: expected a Softmax that multiplies value vectors computed from "
            "the image (a fused Attention operator hides it)"
        )
    uneven = [t for t in taps if (t.queries, t.keys) != (taps[0].queries, taps[0].queries)]
    batch = facts[image].shape[0]
    if uneven or any(_windows(t, facts, taps[0].heads) for t in taps):
        raise UnsupportedModelError(
            "the attention layers do not all span the same tokens (windowed, pooled or "
            "class attention); expected global attention in every layer"
        )
    found = find_tokens(graph, facts, taps[0], live)
    height, width = size
    assert isinstance(height, int) and isinstance(width, int)
    return Structure(
        image=image,
        logits=logits,
        classes=classes,
        size=(height, width),
        batch=batch if isinstance(batch, int) else None,
        taps=tuple(taps),
        features=attention_input(taps[-1], facts, live),
        prefix=found[0] if found else None,
        grid=found[1] if found else None,
        readout=find_readout(taps[-1], facts, logits),
        facts=facts,
    )


def _windows(tap: Tap, facts: dict[ir.Value, Facts], heads: int) -> bool:
    """Whether [windows * batch * heads, n, n] hides in the first axis."""
    shape = facts[tap.value].shape
    return len(shape) == 3 and tap.heads != heads


def _check_operators(model: ir.Model) -> None:
    opset = model.opset_imports.get("")
    if opset not in OPSETS:
        raise UnsupportedModelError(
            f"opset {opset}; expected {OPSETS[0]} to {OPSETS[-1]} (export the model again)"
        )
    for node in model.graph:
        if node.domain not in ("", "ai.onnx"):
            raise UnsupportedModelError(
                f"node {node.name} is {node.domain}.{node.op_type}, not a standard operator; "
                "expected a model as its exporter wrote it, before any runtime optimised it"
            )
        if any(
            a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for a in node.attributes.values()
        ):
            raise UnsupportedModelError(
                f"node {node.name} ({node.op_type}) holds a subgraph; expected a graph without "
                "control flow"
            )


def _image(graph: ir.Graph) -> ir.Value:
    """The image input, [batch, 3, height, width] with fixed height and width."""
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    pictures = [v for v in inputs if v.shape is not None and len(v.shape) == 4]
    if len(pictures) != 1:
        found = ", ".join(f"{v.name} {v.shape}" for v in inputs) or "none"
        raise UnsupportedModelError(
            f"inputs: {found}; expected one image input [batch, 3, height, width]"
        )
    (image,) = pictures
    assert image.shape is not None
    channels, *size = image.shape[1:]
    if channels != 3 or not all(isinstance(d, int) for d in size):
        raise UnsupportedModelError(
            f"input {image.name} has shape {image.shape}; expected [batch, 3, height, width] with "
            "fixed height and width"
        )
    return image


def _logits(
    graph: ir.Graph, facts: dict[ir.Value, Facts], live: set[ir.Value]
) -> tuple[ir.Value, int]:
    for value in graph.outputs:
        shape = facts[value].shape
        if value in live and len(shape) == 2 and facts[value].dtype.is_floating_point():
            classes = shape[1]
            if isinstance(classes, int) and (isinstance(shape[0], Batch) or shape[0] == 1):
                return value, classes
    found = ", ".join(f"{v.name} {facts[v].shape}" for v in graph.outputs)
    raise UnsupportedModelError(f"outputs: {found}; expected logits [batch, classes]")
