"""What a graph is, as far as explaining it goes: input, logits, taps, tokens, readout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import onnx_ir as ir

from onnxplain.contract import LARGEST_INPUT, Readout
from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.structure.feature_map import find_feature_map
from onnxplain.graphs.structure.layers import find_layers, same_tokens
from onnxplain.graphs.structure.read_tokens import find_read_tokens
from onnxplain.graphs.structure.taps import Features, Tap, check_windows, find_features, find_taps
from onnxplain.graphs.structure.tokens import TokenLayout, find_readout, find_tokens
from onnxplain.graphs.values.axes import Place, trace, volume
from onnxplain.graphs.values.facts import Facts, show
from onnxplain.graphs.values.positions import Axes, positions
from onnxplain.graphs.values.shapes import infer
from onnxplain.graphs.values.uses import dependents, sources

__all__ = ["Structure", "analyse"]

ARITHMETIC = (ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
INTEGER_ARITHMETIC = frozenset({"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"})


@dataclass(frozen=True)
class Structure:
    """What was found. `facts` covers every value of the graph; `classes` counts the logits.

    A layer is an attention, or several that run side by side on the same tokens, which is one with
    the heads of all. `features` are what enters the last layer, one for each of its attentions that
    has tokens of its own, or none where there is no such value. `pool` is the attention by which a
    head pools the tokens of the last layer, `read` the tokens at which the readout "gradient" is
    taken.

    A model without global attention has no layers, `no_attention` says why, and `features` is its
    last feature map, whose rows and columns are the grid of `tokens`.

    `size` is what the picture was bound to, which `any_size` says is one of many. `layout` is that
    of the file; `image` has channels first.
    """

    image: ir.Value
    logits: ir.Value
    classes: int
    size: tuple[int, int]
    any_size: bool
    batch: int | None
    layers: tuple[tuple[Tap, ...], ...]
    features: tuple[Features, ...]
    tokens: TokenLayout | None  # None: not found
    readout: Readout | None
    facts: dict[ir.Value, Facts]
    pool: Tap | None = None
    read: Features | None = None
    no_attention: str | None = None
    layout: str = "NCHW"


def analyse(
    model: ir.Model, logits: str | None = None, size: tuple[int, int] | None = None
) -> Structure:
    """Finds everything that `Structure` names.

    Args:
        model: The model, `normalised`.
        logits: Name of the output that holds the logits; None: the only one of shape
            [batch, classes], or the one of these that is called logits.
        size: Height and width to look at it with, where the graph takes pictures of any.

    Raises:
        UnsupportedModelError: The model has neither global attention over tokens nor a last
            feature map, with the reason.
    """
    graph = model.graph
    image = _image(graph)
    fixed = _fixed_size(image)
    size = fixed or size
    if size is None:
        raise UnsupportedModelError(
            f"input {image.name} does not state the size of pictures; give the size that they are "
            'brought to, as in contract={"input": {"size": [224, 224]}} or --img-size 224'
        )
    _check_operators(model)
    assert image.shape is not None
    _check_input(image, size, image.shape[0])
    facts = infer(model, image, size)
    batch = facts[image].shape[0]
    _check_input(image, size, batch)  # one that is frozen behind the input is known now
    live = dependents(graph, image)
    found_logits, classes = _logits(graph, facts, live, image, logits)
    live &= sources(found_logits)
    _check_precision(facts, live)
    places = positions(graph, facts, image)
    no_attention = None
    layers: list[tuple[Tap, ...]]
    try:
        layers, pool, features, found = _attention(graph, facts, live, image, places)
    except UnsupportedModelError as error:
        layers, pool, features, found, no_attention = [], None, (), None, error
    if found is None:
        last = find_feature_map(graph, facts, live, places, image)
        if last is None and no_attention is not None:
            raise UnsupportedModelError(
                f"{no_attention}; and no last feature map, for Grad-CAM, that all which the head "
                "reads passes through"
            )
        if last is not None:
            no_attention = no_attention or _not_over(layers[0][0], math.prod(last[1]))
            layers, pool, features, grid = [], None, (last[0],), last[1]
            found = TokenLayout(grid, (0,))
    read, readout = None, None
    if layers:
        readout = find_readout(graph, facts, layers, pool, found_logits)
    if layers and readout is None:
        tokens = find_read_tokens(graph, facts, live, places, image, layers)
        read, readout = tokens or (None, None)
    return Structure(
        image=image,
        logits=found_logits,
        classes=classes,
        size=size,
        any_size=fixed is None,
        batch=batch if isinstance(batch, int) else None,
        layers=tuple(layers),
        features=features,
        tokens=found,
        readout=readout,
        facts=facts,
        pool=pool,
        read=read,
        no_attention=None if no_attention is None else str(no_attention),
    )


def _attention(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    live: set[ir.Value],
    image: ir.Value,
    places: Mapping[ir.Value, Axes],
) -> tuple[list[tuple[Tap, ...]], Tap | None, tuple[Features, ...], TokenLayout | None]:
    """The layers of global attention, that of a pooling head, the tokens that enter the last
    layer, and their layout."""
    images = trace(graph, facts, image, Place(0, volume(facts[image].shape[:1])))
    taps, windows = find_taps(graph, facts, live, images)
    taps, pool = _pooled(taps)
    found = find_tokens(graph, facts, image, taps, places) if taps else None
    check_windows(windows, facts, places, None if found is None else found.grid)
    _check_taps(graph, taps)
    layers, entering = find_layers(graph, taps), []
    if found is not None:
        before = dict(zip((tap.value for tap in taps), found.before, strict=True))
        found = replace(found, before=tuple(before[layer[0].value] for layer in layers))
    _check_class_attention(layers, found)
    for layer in layers:
        entered = [find_features(tap, facts, live, images) for tap in layer]
        entering = [features for features in entered if features is not None]
        one = len(layer) == 1
        if not one and (len(entering) < len(layer) or not same_tokens(entering, facts, live)):
            raise UnsupportedModelError(
                f"attention {' and '.join(str(tap.value.name) for tap in layer[:2])} run side by "
                "side, not on the same tokens; expected one attention after the other"
            )
    last = layers[-1][0]
    if not entering and len(last.layout.split) > len(facts[last.value].shape):
        raise UnsupportedModelError(
            f"attention {last.value.name} has shape {show(facts[last.value].shape)} and no "
            "input [batch, tokens, dim]: attention within windows; expected global attention"
        )
    return layers, pool, tuple({features.value: features for features in entering}.values()), found


def _pooled(taps: list[Tap]) -> tuple[list[Tap], Tap | None]:
    """The layers, and the attention of a head that pools: few queries, many tokens."""
    if len(taps) > 1 and taps[-1].queries < taps[-1].keys <= taps[-2].queries:
        return taps[:-1], taps[-1]
    return taps, None


def _check_taps(graph: ir.Graph, taps: Sequence[Tap]) -> None:
    """Refuses attention that is not global."""
    if not taps:
        raise UnsupportedModelError(
            "no attention found: expected a Softmax that multiplies value vectors computed from "
            "the image (a fused Attention operator hides it)"
        )
    for before, tap in pairwise([taps[0], *taps]):
        itself = before.queries == before.keys <= tap.queries == tap.keys
        of_class = tap.queries == 1 and before.keys <= tap.keys == taps[-1].keys
        if not itself and not (of_class and tap is not taps[0]):
            kind = "pooled, windowed or between channels"
            if tap is not taps[0] and tap.value not in dependents(graph, before.product.outputs[0]):
                kind = "branches with tokens of their own"
            raise UnsupportedModelError(
                f"attention {tap.value.name} has {tap.queries} queries and {tap.keys} keys, the "
                f"first one {taps[0].queries} and {taps[0].keys}: {kind}; expected attention of "
                "every token to every token, then of the class token at most"
            )


def _check_class_attention(layers: Sequence[Sequence[Tap]], found: TokenLayout | None) -> None:
    """The one query of class attention is the class token, which has to be the only prefix."""
    taps = list(chain.from_iterable(layers))
    uneven = [tap for tap in taps if tap.queries != taps[-1].keys]
    if uneven and (found is None or found.prefix != 1):
        what = "no grid was found" if found is None else f"{found.prefix} tokens stand before it"
        raise UnsupportedModelError(
            f"attention {uneven[0].value.name} has {uneven[0].queries} queries and "
            f"{uneven[0].keys} keys, the last one {taps[-1].keys} keys; expected a patch grid with "
            f"a class token before it, but {what}"
        )


def _not_over(tap: Tap, positions: int) -> UnsupportedModelError:
    """Why attention says nothing of the positions of the last feature map."""
    if tap.keys == positions:
        return UnsupportedModelError(
            f"the tokens of attention {tap.value.name} cannot be followed from the picture through "
            "all layers; expected patches of one grid, which attention alone mixes"
        )
    return UnsupportedModelError(
        f"attention {tap.value.name} is not over the {positions} positions; expected attention of "
        "every token to every token"
    )


def _check_precision(facts: dict[ir.Value, Facts], live: set[ir.Value]) -> None:
    for value, fact in facts.items():
        if value in live and fact.dtype.is_floating_point() and fact.dtype not in ARITHMETIC:
            raise UnsupportedModelError(
                f"{value.name} is {fact.dtype}, which onnxruntime has no CPU kernels for; expected "
                "float32, float16 or bfloat16"
            )


def _check_operators(model: ir.Model) -> None:
    for node in model.graph:
        if node.domain != "":
            raise UnsupportedModelError(
                f"node {node.name} is {node.domain}.{node.op_type}, not a standard operator; "
                "expected a model as its exporter wrote it, before any runtime optimised it"
            )
        if node.op_type in INTEGER_ARITHMETIC:
            raise UnsupportedModelError(
                f"node {node.name} is {node.op_type}, arithmetic on integers, which has no "
                "gradient; expected QuantizeLinear and DequantizeLinear around operators on floats "
                "(QDQ format)"
            )
        if any(
            a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
            for a in node.attributes.values()
        ):
            raise UnsupportedModelError(
                f"node {node.name} ({node.op_type}) holds a subgraph; expected a graph without "
                "control flow (torch.onnx.export with dynamo=True writes none)"
            )


def _image(graph: ir.Graph) -> ir.Value:
    """The image input, float [batch, 3, height, width]."""
    inputs = [v for v in graph.inputs if v.name not in graph.initializers]
    pictures = [v for v in inputs if v.shape is not None and len(v.shape) == 4]
    if len(inputs) != 1 or len(pictures) != 1:
        found = ", ".join(f"{v.name} {v.shape}" for v in inputs) or "none"
        raise UnsupportedModelError(
            f"inputs: {found}; expected one image input [batch, 3, height, width], and others only "
            "with a default (an initializer of the same name: add one, or make them constants)"
        )
    (image,) = pictures
    assert image.shape is not None
    dims = list(image.shape)
    if dims[1] != 3:
        raise UnsupportedModelError(
            f"input {image.name} has shape {image.shape}; expected [batch, 3, height, width] or "
            "[batch, height, width, 3]" + _what_to_say(dims)
        )
    if image.dtype not in ARITHMETIC:
        raise UnsupportedModelError(
            f"input {image.name} is {image.dtype}; expected float32, float16 or bfloat16 (export "
            "the model with such an input)"
        )
    return image


def _what_to_say(dims: Sequence[int | ir.SymbolicDim]) -> str:
    if isinstance(dims[1], int) and isinstance(dims[3], int):
        return ""
    return (
        '; if it takes three channels, say where, contract={"input": {"layout": "NCHW"}} or "NHWC" '
        "in Python, or write the number into the file"
    )


def _check_input(image: ir.Value, size: tuple[int, int], batch: object) -> None:
    pixels = math.prod(size) * (batch if isinstance(batch, int) else 1)
    if min(size) < 1 or not 1 <= pixels <= LARGEST_INPUT:
        raise UnsupportedModelError(
            f"input {image.name} takes {batch} pictures of {size[0]}x{size[1]}; expected from 1 to "
            f"{LARGEST_INPUT} pixels"
        )


def _fixed_size(image: ir.Value) -> tuple[int, int] | None:
    """Height and width that the file states, None where it takes any."""
    assert image.shape is not None
    height, width = image.shape[2:]
    if isinstance(height, int) and isinstance(width, int):
        return height, width
    if isinstance(height, int) or isinstance(width, int):
        raise UnsupportedModelError(
            f"input {image.name} has height {height} and width {width}; expected height and width "
            "that are both fixed or both free (write both into the file, or neither)"
        )
    return None


def _logits(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    live: set[ir.Value],
    image: ir.Value,
    name: str | None,
) -> tuple[ir.Value, int]:
    """The output [batch, classes] and the number of classes; or one [batch, 1, dim]."""
    batch = facts[image].shape[0]
    possible: dict[str, tuple[ir.Value, int]] = {}
    deeper: dict[str, tuple[ir.Value, int]] = {}
    for value in graph.outputs:
        shape = facts[value].shape
        if value in live and len(shape) >= 2 and facts[value].dtype.is_floating_point():
            count, *middle, classes = shape
            if count == batch and isinstance(classes, int) and all(d == 1 for d in middle):
                (deeper if middle else possible)[value.name or ""] = value, classes
    if not possible or name in deeper:
        possible = deeper
    if name is None and len(possible) == 1:
        (name,) = possible
    elif name is None and "logits" in possible:
        name = "logits"
    if name is not None and name in possible:
        return possible[name]
    found = ", ".join(f"{v.name} {show(facts[v].shape)}" for v in graph.outputs)
    one = min(possible, default="")
    several = f'; choose one: contract={{"logits": "{one}"}}, --logits {one}' if possible else ""
    raise UnsupportedModelError(f"outputs: {found}; expected logits [batch, classes]{several}")
