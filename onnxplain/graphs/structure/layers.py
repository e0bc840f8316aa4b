"""Groups attentions into layers: one after the other, or several side by side on the same tokens.

A sum of several attentions of the same tokens is what one attention with the heads of all computes,
so side by side they are one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.structure.taps import Features, Tap
from onnxplain.graphs.values.axes import Place, origin, volume
from onnxplain.graphs.values.facts import Facts
from onnxplain.graphs.values.uses import dependents

__all__ = ["find_layers", "same_tokens"]


def find_layers(graph: ir.Graph, taps: Sequence[Tap]) -> list[tuple[Tap, ...]]:
    """The attentions by layer: each of a layer is computed from all of the layer before.

    Raises:
        UnsupportedModelError: They run in streams, each of its own attentions.
    """
    layers: list[tuple[Tap, ...]] = []
    behind = {tap.value: dependents(graph, tap.product.outputs[0]) for tap in taps}
    for tap in taps:
        last = layers[-1] if layers else ()
        before = [other for other in last if tap.value in behind[other.value]]
        if len(before) == len(last):
            layers.append((tap,))
        elif not before and (tap.queries, tap.keys) == (last[0].queries, last[0].keys):
            layers[-1] = (*last, tap)
        else:
            raise UnsupportedModelError(
                f"attention {last[-1].value.name} and {tap.value.name} run side by side, in "
                "streams of their own; expected one attention after the other"
            )
    return layers


def same_tokens(
    features: Sequence[Features], facts: dict[ir.Value, Facts], live: set[ir.Value]
) -> bool:
    """Whether all of them are computed from the same tokens, each token from itself alone, as by
    a normalisation of its own for each attention."""
    known = [_token_by_token(entering, facts, live) for entering in features]
    shared = set.intersection(*(set(own.items()) for own in known))
    for entering, own in zip(features, known, strict=True):
        waiting = [entering.value]
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if (value, own[value]) in shared:
                continue
            inputs = [v for v in node.inputs if v in live and v is not None] if node else []
            if not inputs or any(v not in own for v in inputs):
                return False
            waiting += inputs
    return True


def _token_by_token(
    features: Features, facts: dict[ir.Value, Facts], live: set[ir.Value]
) -> dict[ir.Value, int]:
    """The features and what their tokens come from, one from one: value, token axis."""
    assert features.tokens is not None
    found, waiting = {features.value: features.tokens}, [features.value]
    while waiting:
        value = waiting.pop()
        node = value.producer()
        place = Place(found[value], volume([facts[value].shape[found[value]]]))
        for i, source in enumerate(node.inputs if node is not None else ()):
            if source is None or source not in live or source in found:
                continue
            assert node is not None
            own = origin(node, i, place, facts)
            if own is not None and own.whole(facts[source].shape):
                found[source] = own.axis
                waiting.append(source)
    return found
