"""The contract: one JSON document in an explained model that says how to read its outputs.

`graphs` writes it into the model's metadata under `KEY`; `runtime` reads it from there and guesses
nothing from shapes. This module knows neither onnx nor onnxruntime.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

from onnxplain.errors import ContractError, InputError
from onnxplain.outputs import POOLING, TOKEN_WEIGHTS

__all__ = [
    "BFLOAT16",
    "BUNDLE_FILE",
    "CROP_ROUNDINGS",
    "FORMAT",
    "HALF",
    "INT8",
    "KEY",
    "LARGEST_INPUT",
    "LARGEST_SIDE",
    "PRECISIONS",
    "PREPROCESSING",
    "AttentionLayer",
    "Contract",
    "ImageInput",
    "Readout",
    "Source",
    "Tokens",
    "height_and_width",
]

KEY = "onnxplain"
BUNDLE_FILE = "contract.json"  # that of a bundle's graphs together, in its folder
FORMAT = 1
LARGEST_SIDE = 2**15  # pixels
LARGEST_INPUT = LARGEST_SIDE**2  # pixels of all pictures of a batch of a fixed size
PRECISIONS = ("fp32", "fp16")  # what weights are stored in; inputs, outputs and arithmetic are fp32
HALF = "half"  # the model computes in float16, and what explains it in float32
BFLOAT16 = "bfloat16"  # what the model computes in bfloat16, the file computes in float32
# The model rounds to 8 bits; gradients and relevance pass straight through, and are 0 where a value
# was cut off at the end of the range.
INT8 = "int8"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the model came from."""

    name: str = "unknown"
    framework: str = "onnx"  # "timm", "torch" or "onnx"
    weights_sha256: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def height_and_width(size: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, int]:
    """Both, of an image size that is given as both or as one number of pixels.

    Raises:
        InputError: It is neither.
    """
    try:
        if isinstance(size, set | dict | bytes | bool):
            raise TypeError
        height, width = size if isinstance(size, Iterable) else (size, size)
        sides = operator.index(height), operator.index(width)
        if not 1 <= min(sides) <= max(sides) <= LARGEST_SIDE:
            raise ValueError
    except (TypeError, ValueError):
        raise InputError(
            f"image size {size!r}: expected pixels or (height, width), up to {LARGEST_SIDE}"
        ) from None
    return sides


CROP_ROUNDINGS = ("even", "down")
PREPROCESSING = ("mean", "std", "crop_pct", "crop_mode", "interpolation", "color_order")
"""Fields of `ImageInput` that say how a picture becomes pixel values, which no graph tells; and
`crop_rounding`, which is worth no word where it is not given."""


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """The image input and the preprocessing that leads to it.

    Its layout is "NCHW", normalised pixel values [batch, 3, height, width]; "NHWC", the same with
    channels last, [batch, height, width, 3]; or "HWC": one picture as it is, uint8
    [height, width, 3], of any size and RGB, which the graph itself brings there.

    A picture is resized so that its shorter side is `size / crop_pct` (crop mode "center"; "border"
    fits the longer side and pads; "squash" ignores the aspect ratio), cropped to `size`, scaled to
    0..1 and normalised with `mean` and `std` in `color_order`. The crop starts at half of what is
    left over, of which `crop_rounding` makes a whole number of pixels.

    Where heights and widths may be any `multiple` of two numbers, `size` is what pictures are
    brought to unless another is asked for, and the rest of the contract is that of `size`.
    """

    name: str = "pixel_values"
    layout: str = "NCHW"
    size: tuple[int, int]  # height, width
    multiple: tuple[int, int] | None = None  # of which any size will do; None: only `size`
    batch: int | None = None  # None: any; else so many, or one would change what is said of others
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    crop_pct: float = 1.0
    crop_mode: str = "center"
    crop_rounding: str = "even"  # half of an odd rest: "even" as in timm, "down" as in transformers
    interpolation: str = "bicubic"
    color_order: str = "RGB"

    def fed(self, pixels: Any) -> Any:
        """What the graph is given for pixel values, an array [batch, 3, height, width]."""
        return pixels.transpose(0, 2, 3, 1).copy() if self.layout == "NHWC" else pixels

    def at(self, size: SupportsIndex | Iterable[SupportsIndex]) -> ImageInput:
        """The input for pictures of another size.

        Args:
            size: Pixels, or height and width.

        Raises:
            InputError: The model does not take this size; the message says which it takes.
        """
        height, width = height_and_width(size)
        if (height, width) == self.size:
            return self
        if self.multiple is None:
            raise InputError(
                f"{height}x{width} pixels: this file is made for {self.size[0]}x{self.size[1]} "
                "and no other size; export the model for that size, or for any (dynamic_size=True, "
                "--dynamic-size)"
            )
        high, wide = self.multiple
        if height % high or width % wide:
            raise InputError(
                f"{height}x{width} pixels: expected a height that is a multiple of {high} and a "
                f"width that is a multiple of {wide}"
            )
        return dataclasses.replace(self, size=(height, width))


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

    def covered(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of pixels, from the upper left, that the patches cover of `size`."""
        if self.patch is None:
            return size
        return self.grid[0] * self.patch[0], self.grid[1] * self.patch[1]


@dataclass(frozen=True, kw_only=True)
class Readout:
    """Which tokens the head reads: the mean over the half-open `ranges` of token positions.

    Of a head that pools by attention, each token of the range as much as the output `POOLING` says.
    Of one that reads tokens in another way (kind "gradient": the maximum, groups of patches), as
    much as `TOKEN_WEIGHTS` says: the size of the gradient of the logit at the token, summed over
    its features, of the sum over all tokens.
    """

    kind: str  # "cls", "mean", "cls+dist", "attention", "gradient"
    ranges: tuple[tuple[int, int], ...]

    @property
    def weights(self) -> str | None:
        """Name of the output with the weight of each token, where it depends on the image."""
        return {"attention": POOLING, "gradient": TOKEN_WEIGHTS}.get(self.kind)


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One attention layer. An output that this file does not have is None.

    Attentions side by side, of the same tokens, are one layer with the heads of all.

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
    precision: str = "fp32"  # one of PRECISIONS, HALF, BFLOAT16 or INT8
    target: str | None = "target"  # None: no output depends on the class
    logits: str = "logits"
    features: str | None = None
    features_gradient: str | None = None
    input_relevance: str | None = None
    input_relevance_attnlrp: str | None = None
    maps: dict[str, dict[str, Any]] = field(default_factory=dict)  # method -> options of its map
    heatmaps: bool = False  # whether each map is there as a heatmap too
    targets: int = 1  # so many classes of each image at once; maps then have an axis for them
    class_weights: str | None = None  # input that asks for a sum of logits instead of a class
    score: str = "logit"  # what gradients are of: or the probability by "softmax" or "sigmoid"
    rules: dict[str, Any] = field(default_factory=dict)  # options of the tables fixed at export
    verification: dict[str, Any] | None = None
    graphs: dict[str, str] | None = None  # in a bundle's contract.json: graph kind -> file name
    format: int = FORMAT

    def at(self, size: SupportsIndex | Iterable[SupportsIndex]) -> Contract:
        """The contract for pictures of another size: its grid, and the tokens that are read.

        Args:
            size: Pixels, or height and width.

        Raises:
            InputError: The model does not take this size; the message says which it takes.
        """
        image, tokens, readout = self.input.at(size), self.tokens, self.readout
        if image is self.input or image.multiple is None:
            return self
        rows, columns = (
            side // part for side, part in zip(image.size, image.multiple, strict=True)
        )
        moved = dataclasses.replace(tokens, grid=(rows, columns))
        if readout is not None:
            # A bound behind the first patch is taken for one at the end of all patches.
            first, added = len(tokens.prefix), moved.count - tokens.count
            ranges = (tuple(b + added if b > first else b for b in r) for r in readout.ranges)
            readout = dataclasses.replace(readout, ranges=tuple((a, b) for a, b in ranges))
        return dataclasses.replace(self, input=image, tokens=moved, readout=readout)

    def to_json(self) -> str:
        """One JSON document, keys in a fixed order, so that equal contracts are equal bytes."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def of_bundle(cls, folder: Path) -> Contract:
        """The contract of a bundle's folder.

        Raises:
            ContractError: There is none, or it cannot be read; or as in `from_json`.
        """
        document = folder / BUNDLE_FILE
        try:
            text = document.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ContractError(
                f"{folder}: a folder without {BUNDLE_FILE}; give a bundle made by onnxplain "
                "export, or an .onnx file"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ContractError(f"{document}: cannot be read ({error})") from None
        return cls.from_json(text, where=str(document))

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
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
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


def _contract(data: dict[str, Any]) -> Contract:
    from onnxplain.contract_checks import check

    image = data["input"]
    tokens, readout = data["tokens"], data["readout"]
    contract = Contract(
        **{
            **data,
            "input": ImageInput(
                **{
                    **image,
                    "size": _pair(image["size"]),
                    "multiple": None if image.get("multiple") is None else _pair(image["multiple"]),
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
    check(contract)
    return contract
