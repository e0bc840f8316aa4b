"""Which methods a model is served with, and why not with the others."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from onnxplain.contract import Readout
from onnxplain.errors import InputError, UnsupportedModelError
from onnxplain.graphs.backward.relevance import LRP
from onnxplain.graphs.structure.analysis import Structure
from onnxplain.graphs.values.uses import dependents
from onnxplain.outputs import ALIASES, METHODS, Needs

__all__ = ["named", "refusals", "served"]


def named(methods: Iterable[str]) -> list[str]:
    """The methods behind names and aliases.

    Raises:
        InputError: An unknown method, or none given.
    """
    given = [methods] if isinstance(methods, str) else list(methods)
    wanted = [ALIASES.get(method, method) for method in given]
    if not wanted:
        raise InputError(f"no methods given; expected some of {', '.join(METHODS)}")
    for method in wanted:
        if method not in METHODS:
            raise InputError(f"unknown method {method!r}; expected some of {', '.join(METHODS)}")
    return wanted


def served(
    found: Structure,
    readout: Readout | None,
    methods: Iterable[str] | None,
    *,
    probability: bool = False,
) -> tuple[str, ...]:
    """The methods to serve, cheapest first.

    Args:
        found: What the graph is.
        readout: The row that stands for the head; None: there is none.
        methods: Names or aliases; None: every method that is defined for the model.
        probability: Whether the score is a probability, not a logit.

    Raises:
        UnsupportedModelError: None is defined, or one that was asked for is not, with the reason.
        InputError: An unknown method, or none given.
    """
    refused = refusals(found, readout)
    if probability:
        refused |= {m: PROBABILITY for m, n in METHODS.items() if _is_of_relevance(n)}
    if methods is None:
        served = tuple(method for method in METHODS if method not in refused)
        if not served:
            raise UnsupportedModelError("; ".join(f"{m}: {why}" for m, why in refused.items()))
        return served
    wanted = named(methods)
    for method in wanted:
        if method in refused:
            raise UnsupportedModelError(
                f"{method} is not defined for this model: {refused[method]}"
            )
    return tuple(method for method in METHODS if method in wanted)


PROBABILITY = "relevance is shared out from a logit; expected the score logit"


def _is_of_relevance(needs: Needs) -> bool:
    return needs.pixels is not None or {needs.relevance, needs.relevance_lrp} != {"none"}


def refusals(found: Structure, readout: Readout | None) -> dict[str, str]:
    """Methods that are not defined for the model, each with the reason."""
    reasons: dict[str, str] = {}
    pixels = "its rules are for transformers with attention of every token to every token"
    unruled = None if found.no_attention else _without_rule(found)
    for method, needs in METHODS.items():
        if found.no_attention is not None and not needs.features:
            reasons[method] = pixels if needs.pixels else found.no_attention
            continue
        if needs.features and not found.features:
            reasons[method] = "the last attention has no input of shape [batch, tokens, dim]"
        if readout is None and needs.reads_row:
            reasons[method] = (
                "the head reads more than the tokens of the last layer, so no row of the attention "
                "stands for it; to choose one, give "
                'contract={"readout": {"kind": "cls", "ranges": [[0, 1]]}}'
            )
        if needs.pixels and unruled is not None:
            reasons[method] = (
                f"node {unruled.name}: operator {unruled.op_type} lies between the pixels and the "
                "logits and has no relevance rule"
            )
    return reasons


def _without_rule(found: Structure) -> ir.Node | None:
    """A node on the way from the pixels to the logits that the tables have no rule for."""
    leading, last = {found.logits}, found.logits.producer()
    assert last is not None and last.graph is not None
    live = dependents(last.graph, found.image)
    for node in reversed(last.graph):
        if not leading.isdisjoint(node.outputs):
            sources = {v for v in node.inputs if v in live and v is not None}
            rounded = node.op_type == "DequantizeLinear"
            moved = {v for v in sources if rounded or found.facts[v].dtype.is_floating_point()}
            if moved and node.op_type not in LRP:
                return node
            leading |= moved
    return None
