"""What an explained graph returns besides its logits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.contract import Contract
from onnxplain.errors import InputError
from onnxplain.outputs import POOLING, TOKEN_WEIGHTS

__all__ = ["KINDS", "SINGLE", "Taps", "outputs_of"]

Array = NDArray[np.floating[Any]]

KINDS = (
    "attention",
    "attention_gradient",
    "attention_relevance",
    "attention_relevance_lrp",
    "attention_pooling",
    "token_weights",
    "features",
    "features_gradient",
    "input_gradient",
    "input_relevance",
    "input_relevance_attnlrp",
)
"""The kinds of tap that can be asked for; logits and target always come along."""

SINGLE = KINDS[4:]
"""Those that are one array; the others have one per layer."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Taps:
    """Raw outputs of an explained model. What the file lacks or was not asked for is None.

    Attributes:
        logits: [B, classes], the model's own output.
        target: int64 [B], the class that the gradients belong to.
        attention: Per layer [B, heads, N, N], first layer first. A layer may have fewer tokens, as
            its `AttentionLayer` says.
        attention_gradient: d logit[target] / d attention, same shapes.
        attention_relevance: Relevance propagated to each attention, same shapes.
        attention_relevance_lrp: The same under the plain LRP rules.
        attention_pooling: Attention of a head that pools by it, [B, heads, queries, N].
        token_weights: How much a head that reads tokens in another way takes of each, [B, N].
        features: The Grad-CAM layer, [B, N, D] tokens (those of attentions side by side one behind
            the other along D) or a [B, C, h, w] feature map.
        features_gradient: d logit[target] / d features.
        input_gradient: d logit[target] / d pixels, [B, 3, H, W].
        input_relevance: Relevance of the pixels under the plain LRP rules, [B, 3, H, W].
        input_relevance_attnlrp: The same under the AttnLRP rules.
    """

    logits: Array
    target: NDArray[np.int64]
    attention: list[Array | None] | None = None
    attention_gradient: list[Array | None] | None = None
    attention_relevance: list[Array | None] | None = None
    attention_relevance_lrp: list[Array | None] | None = None
    attention_pooling: Array | None = None
    token_weights: Array | None = None
    features: Array | None = None
    features_gradient: Array | None = None
    input_gradient: Array | None = None
    input_relevance: Array | None = None
    input_relevance_attnlrp: Array | None = None

    def __repr__(self) -> str:
        held = ["logits", *(kind for kind in KINDS if getattr(self, kind) is not None)]
        return f"Taps(target={self.target.tolist()}, with {', '.join(held)})"


def outputs_of(
    kinds: Iterable[str] | None, contract: Contract, have: Collection[str]
) -> dict[str, list[str | None]]:
    """The outputs behind each kind of tap, per layer or as the only one.

    Args:
        kinds: Some of `KINDS`; None is every one that the file has.
        contract: The model's contract.
        have: Names of all outputs that the file has.

    Raises:
        InputError: A kind that does not exist, or that this file has not.
    """
    named: dict[str, list[str | None]] = {
        "attention": [layer.attention for layer in contract.layers],
        "attention_gradient": [layer.gradient for layer in contract.layers],
        "attention_relevance": [layer.relevance for layer in contract.layers],
        "attention_relevance_lrp": [layer.relevance_lrp for layer in contract.layers],
        "attention_pooling": [POOLING],
        "token_weights": [TOKEN_WEIGHTS],
        "features": [contract.features],
        "features_gradient": [contract.features_gradient],
        "input_relevance": [contract.input_relevance],
        "input_relevance_attnlrp": [contract.input_relevance_attnlrp],
    }
    present = {
        kind: [name if name in have else None for name in names]
        for kind, names in named.items()
        if not set(have).isdisjoint(names)
    }
    if kinds is None:
        return present
    wanted = {}
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        if kind not in KINDS:
            raise InputError(f"unknown kind of tap {kind!r}; one of {', '.join(KINDS)}")
        if kind not in present:
            raise InputError(
                f"this file has no {kind}; it has {', '.join(present) or 'logits only'}"
            )
        wanted[kind] = present[kind]
    return wanted
