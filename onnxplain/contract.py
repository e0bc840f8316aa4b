"""The contract: one JSON document in an explained model that says how to read its outputs.

`graphs` writes it into the model's metadata under `KEY`; `runtime` reads it from there and guesses
nothing from shapes. This module knows neither onnx nor onnxruntime.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from onnxplain.errors import ContractError

__all__ = [
    "ALIASES",
    "FEATURES",
    "FEATURES_GRADIENT",
    "FORMAT",
    "GRAPH_KINDS",
    "INPUT_RELEVANCE",
    "INPUT_RELEVANCE_ATTNLRP",
    "KEY",
    "METHODS",
    "POOLING",
    "PRECISIONS",
    "AttentionLayer",
    "Contract",
    "ImageInput",
    "Needs",
    "Readout",
    "Source",
    "Tokens",
    "attention_gradient_name",
    "attention_name",
    "attention_relevance_lrp_name",
    "attention_relevance_name",
]

KEY = "onnxplain"
FORMAT = 1

POOLING = "attention_pooling"  # of a head that pools by attention, [batch, heads, queries, tokens]
FEATURES = "features"
FEATURES_GRADIENT = "features_gradient"
INPUT_RELEVANCE = "input_relevance"  # of the plain LRP table
INPUT_RELEVANCE_ATTNLRP = "input_relevance_attnlrp"

PRECISIONS = ("fp32", "fp16")  # what weights are stored in; inputs, outputs and arithmetic are fp32


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
        """Whether the map depends on the class that is asked for."""
        names = self.outputs(1)
        return any("gradient" in name or "relevance" in name for name in names)

    def pooling(self, readout: Readout | None) -> str | None:
        """Name of the output with the weight of each token, where the row depends on the image."""
        return readout.pooling if readout is not None and self.reads_row else None

    def outputs(self, layers: int, readout: Readout | None = None) -> tuple[str, ...]:
        """Names of the outputs for a model of `layers` attention layers and its readout."""
        pooling = self.pooling(readout)
        span = {"all": range(layers), "last": range(layers - 1, layers), "none": range(0)}
        return (
            *(attention_name(i) for i in span[self.attention]),
            *(attention_gradient_name(i) for i in span[self.gradient]),
            *(attention_relevance_name(i) for i in span[self.relevance]),
            *(attention_relevance_lrp_name(i) for i in span[self.relevance_lrp]),
            *((FEATURES, FEATURES_GRADIENT) if self.features else ()),
            *((self.pixels,) if self.pixels else ()),
            *((pooling,) if pooling else ()),
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


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the model came from."""

    name: str = "unknown"
    framework: str = "onnx"  # "timm", "torch" or "onnx"
    weights_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """The image input and the preprocessing that leads to it.

    A picture is resized so that its shorter side is `size / crop_pct` (crop mode "center"; "border"
    fits the longer side and pads; "squash" ignores the aspect ratio), cropped to `size`, scaled to
    0..1 and normalised with `mean` and `std` in `color_order`.
    """

    name: str = "pixel_values"
    layout: str = "NCHW"
    size: tuple[int, int]  # height, width
    batch: int | None = None  # None: any
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    crop_pct: float = 1.0
    crop_mode: str = "center"
    interpolation: str = "bicubic"
    color_order: str = "RGB"


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token sequence: the prefix tokens by name, then the patches row by row.

    The patches cover the picture, or, where they are `patch` pixels high and wide and that does not
    divide it, all of it but a strip below and to the right.
    """

    prefix: tuple[str, ...]
    grid: tuple[int, int]  # rows, columns of patches
    patch: tuple[int, int] | None = None

    @property
    def count(self) -> int:
        return len(self.prefix) + self.grid[0] * self.grid[1]


@dataclass(frozen=True, kw_only=True)
class Readout:
    """Which tokens the head reads: the mean over the half-open `ranges` of token positions, or, for
    a head that pools by attention, each token of the range as much as the output `POOLING` says."""

    kind: str  # "cls", "mean", "cls+dist", "attention"
    ranges: tuple[tuple[int, int], ...]

    @property
    def pooling(self) -> str | None:
        """Name of the output with the weight of each token, where it depends on the image."""
        return POOLING if self.kind == "attention" else None


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention layer. An output that this file does not have is None.

    Its queries and keys are the tokens from `first_token` on: those before come in only behind it.
    Of the kind "class" it has the first of them as its only query.
    """

    heads: int
    kind: str = "global"  # or "class"
    first_token: int = 0
    attention: str | None = None
    gradient: str | None = None
    relevance: str | None = None
    relevance_lrp: str | None = None


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything the runtime knows about an explained model."""

    input: ImageInput
    tokens: Tokens
    readout: Readout | None  # None: no token row stands for the head; Grad-CAM needs none
    layers: tuple[AttentionLayer, ...]
    classes: int
    methods: dict[str, tuple[str, ...]]  # method -> outputs it reads
    source: Source = field(default_factory=Source)
    labels: tuple[str, ...] | None = None
    precision: str = "fp32"  # one of PRECISIONS
    target: str | None = "target"  # None: no output depends on the class
    logits: str = "logits"
    features: str | None = None
    features_gradient: str | None = None
    input_relevance: str | None = None
    input_relevance_attnlrp: str | None = None
    rules: dict[str, Any] = field(default_factory=dict)  # options of the tables fixed at export
    verification: dict[str, Any] | None = None
    graphs: dict[str, str] | None = None  # in a bundle's contract.json: graph kind -> file name
    format: int = FORMAT

    def to_json(self) -> str:
        """One JSON document, keys in a fixed order, so that equal contracts are equal bytes."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str, *, where: str = "the model") -> Contract:
        """Parses and checks a contract.

        Args:
            text: The JSON document.
            where: The file's name, for messages.

        Raises:
            ContractError: Not JSON, a newer format, or a field missing or of a wrong kind.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ContractError(f"{where}: the contract is not valid JSON ({error})") from None
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise ContractError(f"{where}: the contract has no format version; make the file again")
        if data["format"] > FORMAT:
            raise ContractError(
                f"{where}: contract format {data['format']}, this onnxplain reads up to {FORMAT}; "
                "upgrade onnxplain"
            )
        try:
            return _contract(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ContractError(
                f"{where}: the contract is damaged ({type(error).__name__}: {error}); "
                "make the file again"
            ) from None


def _pair(value: Any) -> tuple[int, int]:
    first, second = (int(v) for v in value)
    if first < 1 or second < 1:
        raise ValueError(f"size {first}x{second}")
    return first, second


def _triple(value: Any) -> tuple[float, float, float]:
    first, second, third = (float(v) for v in value)
    return first, second, third


def _check(contract: Contract) -> None:
    """What a reader relies on, so that a damaged contract is said to be one.

    Raises:
        ValueError: What does not fit.
    """
    image, count = contract.input, contract.tokens.count
    if contract.labels is not None and len(contract.labels) != contract.classes:
        raise ValueError(f"{len(contract.labels)} labels for {contract.classes} classes")
    numbers = (*image.mean, *image.std, image.crop_pct)
    if not all(map(math.isfinite, numbers)) or min(*image.std, image.crop_pct) <= 0:
        raise ValueError(f"mean {image.mean}, std {image.std}, crop_pct {image.crop_pct}")
    if count > image.size[0] * image.size[1] + len(contract.tokens.prefix):
        raise ValueError(f"{count} tokens for {image.size[0]}x{image.size[1]} pixels")
    if contract.tokens.patch is not None and any(
        count * patch > size
        for count, patch, size in zip(
            contract.tokens.grid, contract.tokens.patch, image.size, strict=True
        )
    ):
        raise ValueError(f"patches of {contract.tokens.patch} pixels on {image.size}")
    if not isinstance(contract.logits, str):
        raise ValueError(f"logits {contract.logits!r}")
    if contract.precision not in PRECISIONS:
        raise ValueError(f"precision {contract.precision!r}")
    for layer in contract.layers:
        if layer.kind not in ("global", "class") or not 0 <= layer.first_token < count:
            raise ValueError(f"layer of kind {layer.kind!r} from token {layer.first_token} on")
    readout = contract.readout
    if readout is not None:
        if readout.kind not in ("cls", "cls+dist", "mean", "attention") or not readout.ranges:
            raise ValueError(f"readout {readout.kind!r} of ranges {readout.ranges}")
        for start, stop in readout.ranges:
            if not 0 <= start < stop <= count:
                raise ValueError(f"readout range {start}..{stop} of {count} tokens")
        if readout.pooling and len(readout.ranges) != 1:
            raise ValueError(f"readout attention of {len(readout.ranges)} ranges")
    for method, names in contract.methods.items():
        needs = METHODS.get(method)
        if needs is None:
            continue  # of a later version
        expected = set(needs.outputs(len(contract.layers), readout))
        if needs.reads_row and not contract.layers:
            raise ValueError(f"{method} without attention layers")
        if set(names) != expected:
            raise ValueError(f"{method} reads {', '.join(sorted(expected ^ set(names)))}")


def _contract(data: dict[str, Any]) -> Contract:
    image = data["input"]
    tokens, readout = data["tokens"], data["readout"]
    contract = Contract(
        **{
            **data,
            "input": ImageInput(
                **{
                    **image,
                    "size": _pair(image["size"]),
                    "mean": _triple(image["mean"]),
                    "std": _triple(image["std"]),
                }
            ),
            "tokens": Tokens(
                prefix=tuple(tokens["prefix"]),
                grid=_pair(tokens["grid"]),
                patch=None if tokens.get("patch") is None else _pair(tokens["patch"]),
            ),
            "readout": None
            if readout is None
            else Readout(
                kind=readout["kind"], ranges=tuple((int(a), int(b)) for a, b in readout["ranges"])
            ),
            "layers": tuple(AttentionLayer(**layer) for layer in data["layers"]),
            "methods": {name: tuple(outputs) for name, outputs in data["methods"].items()},
            "source": Source(**data.get("source", {})),
            "labels": None if data.get("labels") is None else tuple(data["labels"]),
        }
    )
    _check(contract)
    return contract
