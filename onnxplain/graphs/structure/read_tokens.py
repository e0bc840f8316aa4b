"""Finds the tokens that a head reads in a way of its own: by a maximum, by weights, in groups.

No row of token positions stands for such a head. How much it takes of each token is then read off
the gradient of the logit at these tokens. For a head that averages it is the same at every token it
reads, and for one that picks a token it is zero at all others, so this continues what the row of
those is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxplain.contract import Readout
from onnxplain.graphs.builder import TINY, Builder, Tensor
from onnxplain.graphs.structure.feature_map import as_feature_map, narrows
from onnxplain.graphs.structure.taps import Features, Tap, token_features
from onnxplain.graphs.values.axes import Place, follow, size_of, trace, volume
from onnxplain.graphs.values.facts import Facts
from onnxplain.graphs.values.positions import COLUMN, IMAGE, ROW, Axes, count

__all__ = ["find_read_tokens", "token_weights"]


KEPT = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def find_read_tokens(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    live: set[ir.Value],
    places: Mapping[ir.Value, Axes],
    image: ir.Value,
    layers: Sequence[Sequence[Tap]],
) -> tuple[Features, Readout] | None:
    """The last value that all the logits know of the picture passes through and that has the
    tokens of the last layer, not mixed since.

    Returns:
        The value and the readout "gradient" of its tokens; None where there is none.
    """
    last = layers[-1]
    if any(tap.queries < tap.keys for tap in last):
        return None
    images = trace(graph, facts, image, Place(0, volume(facts[image].shape[:1])))
    reached = _token_by_token(graph, facts, last)
    for value in reversed([v for v in narrows(graph, live) if v in reached]):
        place = reached[value]
        features = token_features(value, place.axis, facts, images)
        if features is not None and place.whole(facts[value].shape):
            later = _by_rows_and_columns(value, facts, live, places, count(places[image], IMAGE))
            return later or features, Readout(kind="gradient", ranges=((0, place.count),))
    return None


def _token_by_token(
    graph: ir.Graph, facts: dict[ir.Value, Facts], layer: Sequence[Tap]
) -> dict[ir.Value, Place]:
    """Where the tokens lie in what the layer writes and in what each of them alone becomes."""
    reached = {tap.product.outputs[0]: Place(tap.rows, tap.queries) for tap in layer}
    behind = set[ir.Value | None](reached)
    for node in graph:
        sources = [v for v in dict.fromkeys(node.inputs) if v in behind and v is not None]
        if not sources or node.op_type == "Shape":
            continue
        behind.update(node.outputs)
        found = {follow(node, v, reached[v], facts) if v in reached else None for v in sources}
        place = found.pop()
        if not found and place is not None:
            reached.update(dict.fromkeys(node.outputs, place))
    return reached


def _by_rows_and_columns(
    value: ir.Value,
    facts: dict[ir.Value, Facts],
    live: set[ir.Value],
    places: Mapping[ir.Value, Axes],
    images: int,
) -> Features | None:
    """The last of what a head makes of tokens when it lays them out in rows and columns."""
    result = None
    while True:
        found = as_feature_map(value, places.get(value, ()), images)
        result = result if found is None else found[0]
        consumers = [n for n in value.consumers() if not live.isdisjoint(n.outputs)]
        if len(consumers) != 1 or consumers[0].inputs[0] is not value:
            return result
        (node,) = consumers
        if node.op_type == "LayerNormalization":
            attribute = node.attributes.get("axis")
            axis = attribute.as_int() if attribute else -1
            over = places.get(value, ())[axis % len(facts[value].shape) :]
            if count(over, ROW, COLUMN) > 1:
                return result
        elif node.op_type not in KEPT:
            return result
        value = node.outputs[0]


def token_weights(b: Builder, gradient: Tensor) -> Tensor:
    """Share of each token in the size of the gradient, [batch, tokens].

    Args:
        b: Builder on the graph.
        gradient: d logit / d tokens, [batch, tokens, dim], or of a feature map, [batch, channels,
            rows, columns].
    """
    features = 1 if gradient.rank == 4 else 2
    sizes = b.sum(b.unary("Abs", gradient), [features], keepdims=False)
    sizes = b.reshape(sizes, (sizes.shape[0], size_of(volume(sizes.shape[1:]))))
    total = b.sum(sizes, [1])
    return b.div(sizes, b.binary("Max", total, TINY))  # 0 where the logit depends on no token
