"""The outputs that explained graphs have, and which of them each method reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "ALIASES",
    "DEGENERATE_SPAN",
    "FEATURES",
    "FEATURES_GRADIENT",
    "GRAPH_KINDS",
    "INPUT_RELEVANCE",
    "INPUT_RELEVANCE_ATTNLRP",
    "METHODS",
    "POOLING",
    "TOKEN_WEIGHTS",
    "Needs",
    "attention_gradient_name",
    "attention_name",
    "attention_relevance_lrp_name",
    "attention_relevance_name",
    "depends_on_class",
    "heatmap_name",
    "map_name",
]

POOLING = "attention_pooling"  # of a head that pools by attention, [batch, heads, queries, tokens]
TOKEN_WEIGHTS = "token_weights"  # of a head that weighs them as it will, [batch, tokens], sum 1
FEATURES = "features"
FEATURES_GRADIENT = "features_gradient"
INPUT_RELEVANCE = "input_relevance"  # of the plain LRP table
INPUT_RELEVANCE_ATTNLRP = "input_relevance_attnlrp"

# A map whose span is below this share of its largest magnitude is constant up to the rounding of
# float32 sums over layers and tokens; stretched to 0..1 it would show noise as if it were evidence.
DEGENERATE_SPAN = 1e-5


def attention_name(layer: int) -> str:
    """Output that holds the attention of `layer`, [batch, heads, tokens, tokens]."""
    return f"attention.{layer}"


def attention_gradient_name(layer: int) -> str:
    """Output that holds d logit[target] / d attention of `layer`, same shape as the attention."""
    return f"attention_gradient.{layer}"


def attention_relevance_name(layer: int) -> str:
    """Output that holds the relevance of the attention of `layer`, same shape as the attention."""
    return f"attention_relevance.{layer}"


def attention_relevance_lrp_name(layer: int) -> str:
    """The same under the plain LRP rules."""
    return f"attention_relevance_lrp.{layer}"


def map_name(method: str) -> str:
    """Output that holds the finished map of `method`, [batch, rows, columns] of the grid, or of
    the pixels."""
    return f"map.{method}"


def heatmap_name(method: str) -> str:
    """Output that holds the map of `method` as a heatmap in 0..1, [batch, height, width]."""
    return f"heatmap.{method}"


class _Readout(Protocol):
    """Which tokens the head reads, as the contract says it."""

    @property
    def weights(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Which outputs a method reads: of "all" layers, the "last" or "none"; and which others."""

    attention: str = "none"
    gradient: str = "none"
    relevance: str = "none"
    relevance_lrp: str = "none"
    features: bool = False
    pixels: str | None = None  # the output that holds a value per pixel

    @property
    def reads_row(self) -> bool:
        """Whether the map starts from the tokens that the head reads."""
        return not self.features and self.pixels is None

    @property
    def class_specific(self) -> bool:
        """Whether the method itself depends on the class that is asked for."""
        return any(map(depends_on_class, self.outputs(1)))

    def weights(self, readout: _Readout | None) -> str | None:
        """Name of the output with the weight of each token, where the row depends on the image."""
        return readout.weights if readout is not None and self.reads_row else None

    def takes_target(self, readout: _Readout | None) -> bool:
        """Whether the map depends on the class, be it by the tokens that the head reads for it."""
        return self.class_specific or self.weights(readout) == TOKEN_WEIGHTS

    def outputs(self, layers: int, readout: _Readout | None = None) -> tuple[str, ...]:
        """Names of the outputs for a model of `layers` attention layers and its readout."""
        weights = self.weights(readout)
        span = {"all": range(layers), "last": range(layers - 1, layers), "none": range(0)}
        return (
            *(attention_name(i) for i in span[self.attention]),
            *(attention_gradient_name(i) for i in span[self.gradient]),
            *(attention_relevance_name(i) for i in span[self.relevance]),
            *(attention_relevance_lrp_name(i) for i in span[self.relevance_lrp]),
            *((FEATURES, FEATURES_GRADIENT) if self.features else ()),
            *((self.pixels,) if self.pixels else ()),
            *((weights,) if weights else ()),
        )


METHODS: dict[str, Needs] = {
    "raw_attention": Needs(attention="last"),
    "rollout": Needs(attention="all"),
    "gradcam": Needs(features=True),
    "attention_gradcam": Needs(attention="last", gradient="last"),
    "partial_lrp": Needs(relevance_lrp="last"),
    "gradient_rollout": Needs(attention="all", gradient="all"),
    "generic_attention": Needs(attention="all", gradient="all"),
    "attnlrp": Needs(pixels=INPUT_RELEVANCE_ATTNLRP),
    "transformer_attribution": Needs(gradient="all", relevance="all"),
    "lrp": Needs(pixels=INPUT_RELEVANCE),
}
"""Every method and what it reads, cheapest first."""


def depends_on_class(output: str) -> bool:
    """Whether an output of this name is another for another class."""
    for method, needs in METHODS.items():
        if output in (map_name(method), heatmap_name(method)):
            return needs.class_specific
    return "gradient" in output or "relevance" in output or output == TOKEN_WEIGHTS


ALIASES = {"relevance": "transformer_attribution"}
"""Other names under which the literature's code knows a method."""

GRAPH_KINDS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "attention": ("raw_attention", "rollout"),
    "gradcam": ("gradcam", "attention_gradcam"),
    "partial_lrp": ("partial_lrp",),
    "gradient": (
        "raw_attention",
        "rollout",
        "gradcam",
        "attention_gradcam",
        "gradient_rollout",
        "generic_attention",
    ),
    "attnlrp": ("attnlrp",),
    "relevance": ("transformer_attribution",),
    "lrp": ("lrp",),
}
"""The graphs of a bundle and the methods each one serves, cheapest first."""
