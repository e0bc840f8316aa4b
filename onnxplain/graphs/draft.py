"""Drafts the contract: what the graph tells, what the caller knows, and the model's digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir

from onnxplain import __version__
from onnxplain.contract import (
    BFLOAT16,
    CROP_ROUNDINGS,
    HALF,
    INT8,
    AttentionLayer,
    Contract,
    ImageInput,
    Readout,
    Source,
    Tokens,
)
from onnxplain.errors import ContractError, InputError, UnsupportedModelError
from onnxplain.graphs.normal.open_sizes import SizeError
from onnxplain.graphs.structure.analysis import Structure
from onnxplain.graphs.structure.tokens import prefix_names
from onnxplain.graphs.values.uses import is_measured

__all__ = ["draft", "read_labels"]

Record = TypeVar("Record", Tokens, Readout)

# What a caller may say of a model. The rest is what the graph is.
GIVEN = frozenset({"input", "labels", "logits", "readout", "tokens"})
FOUND = ("name", "layout", "size", "multiple", "batch")  # of the input
CHOICES = {
    "crop_mode": ("center", "border", "squash"),
    "interpolation": ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"),
    "color_order": ("RGB", "BGR"),
    "crop_rounding": CROP_ROUNDINGS,
}
LABEL_FILES = "one name per line, or a JSON file with id2label"
LARGEST_CROP = 1.15  # of crop_pct; timm's VOLO models, which pad the picture, have the largest


def draft(
    model: ir.Model,
    found: Structure,
    *,
    source: Source | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    labels: Sequence[str] | str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    bfloat16: bool = False,
) -> Contract:
    """The contract of a model, before it is said which methods and outputs a graph has.

    Args:
        model: The model, `normalised`.
        found: What it is.
        source, preprocessing, labels, overrides: As in `explain`.
        bfloat16: Whether it has bfloat16 as its exporter wrote it.

    Raises:
        UnsupportedModelError: The token layout is neither found nor given, or does not fit.
        InputError: An unknown field, a value of a wrong kind, labels that do not fit.
    """
    changes = dict(overrides or {})
    unknown = set(changes) - GIVEN
    if unknown:
        raise InputError(
            f"contract field {min(unknown)}: not one to give; expected some of "
            f"{', '.join(sorted(GIVEN))}"
        )
    tokens = _tokens(found, changes.pop("tokens", None))
    image = _image(found, tokens, {**changes.pop("input", {}), **(preprocessing or {})})
    readout = found.readout
    if "readout" in changes:
        given = changes.pop("readout")
        readout = None if given is None else _made(Readout, given)
        if readout is not None and readout.weights and readout != found.readout:
            raise InputError(f"readout {readout}: the head has {found.readout}")
    if labels is None:
        labels = changes.pop("labels", None)
    source = source or Source(name=model.graph.name or "unknown")
    digest = source.weights_sha256 or _digest(model)
    versions = {**source.versions, "onnxplain": __version__}
    contract = Contract(
        input=image,
        tokens=tokens,
        readout=readout,
        layers=tuple(_layers(found)),
        classes=found.classes,
        methods={},
        source=dataclasses.replace(source, weights_sha256=digest, versions=versions),
        labels=None if labels is None else read_labels(labels, found.classes),
        logits=found.logits.name or "",
        precision=_precision(model, found, bfloat16),
    )
    try:
        return Contract.from_json(contract.to_json(), where="contract=")
    except (ContractError, TypeError, ValueError) as error:
        raise InputError(str(error)) from None


def read_labels(labels: Sequence[str] | str | Path, classes: int) -> tuple[str, ...]:
    """Class names from a sequence, or from a UTF-8 file.

    Args:
        labels: Names in order; or a text file with one per line; or a JSON file whose `id2label`
            maps numbers to names, as Hugging Face's `config.json` does.
        classes: How many there are.

    Raises:
        InputError: The file cannot be read or is another JSON file, or the names are not as many.
    """
    if isinstance(labels, str | Path):
        try:
            text = Path(labels).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise InputError(f"labels {labels}: {reason}; expected {LABEL_FILES}") from None
        names = _names_in_json(text, labels)
        if names is None:
            names = [name.rstrip("\r") for name in text.rstrip("\n").split("\n")]
    else:
        names = [str(name) for name in labels]
    if len(names) != classes:
        raise InputError(f"{len(names)} labels for a model of {classes} classes")
    return tuple(names)


def _names_in_json(text: str, path: str | Path) -> list[str] | None:
    """The names of `id2label`; None for text that is no JSON object or list."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict | list):
        return None  # a line that reads as a number or a quoted name
    found = data.get("id2label") if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise InputError(f"labels {path}: JSON without id2label; expected {LABEL_FILES}")
    names = [found.get(str(number)) for number in range(len(found))]
    for number, name in enumerate(names):
        if not isinstance(name, str):
            raise InputError(
                f"labels {path}: id2label has no name for class {number}; expected one for each "
                f"of 0 to {len(found) - 1}"
            )
    return [str(name) for name in names]


def _image(found: Structure, tokens: Tokens, given: Mapping[str, Any]) -> ImageInput:
    image = ImageInput(
        name=found.image.name or "",
        layout=found.layout,
        size=found.size,
        multiple=_multiple(found, tokens) if found.any_size else None,
        batch=1 if found.batch is None and _is_rounded_together(found) else found.batch,
    )
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    for field, value in given.items():
        if field not in {f.name for f in dataclasses.fields(ImageInput)}:
            raise InputError(
                f"preprocessing field {field}; expected some of mean, std, crop_pct, "
                f"{', '.join(CHOICES)}"
            )
        if field in FOUND and value != (own := getattr(image, field)):
            kind = SizeError if field == "size" else InputError
            raise kind(f"input {field} {value!r}; the graph's own is {own!r}")
        if field in CHOICES and value not in CHOICES[field]:
            raise InputError(f"{field} {value!r}; expected one of {', '.join(CHOICES[field])}")
    image = dataclasses.replace(image, **given)
    _check_numbers(image)
    return image


def _check_numbers(image: ImageInput) -> None:
    pixels = "pixels are 0..1: divide by 255"
    valid: dict[str, tuple[Callable[[Any], bool], str]] = {
        "mean": (
            lambda mean: len(mean) == 3 and all(0 <= v <= 1 for v in mean),
            f"three numbers of 0 to 1 ({pixels})",
        ),
        "std": (
            lambda std: len(std) == 3 and all(0 < v <= 1 for v in std),
            f"three numbers above 0 and at most 1 ({pixels})",
        ),
        "crop_pct": (
            lambda crop: 0 < crop <= LARGEST_CROP,
            f"a number above 0 and at most {LARGEST_CROP}, such as 0.9 for 90 %",
        ),
    }
    for field, (is_valid, expected) in valid.items():
        value = getattr(image, field)
        try:
            fits = is_valid(value)
        except TypeError:
            fits = False
        if not fits:
            raise InputError(f"{field} {value!r}; expected {expected}")


def _multiple(found: Structure, tokens: Tokens) -> tuple[int, int]:
    """Height and width of what one position of the grid stands for."""
    (height, width), (rows, columns) = found.size, tokens.grid
    if tokens.patch is not None or height % rows or width % columns:
        raise UnsupportedModelError(
            f"{rows}x{columns} patches do not cover {height}x{width} pixels; give a size that they "
            "do, for a graph that takes pictures of any"
        )
    return height // rows, width // columns


def _layers(found: Structure) -> Iterator[AttentionLayer]:
    for i, layer in enumerate(found.layers):
        later = 0 if found.tokens is None else found.tokens.prefix - found.tokens.before[i]
        kind = "global" if layer[0].queries == layer[0].keys else "class"
        heads = sum(tap.heads for tap in layer)
        yield AttentionLayer(heads=heads, kind=kind, first_token=later)


def _tokens(found: Structure, given: Mapping[str, Any] | None) -> Tokens:
    fields: dict[str, Any] = dict(given or {})
    if found.tokens is not None:
        if fields.setdefault("grid", found.tokens.grid) == found.tokens.grid:
            fields.setdefault("patch", found.tokens.patch)
        fields.setdefault("prefix", prefix_names(found.tokens.prefix, found.readout))
    if "grid" not in fields or "prefix" not in fields:
        raise UnsupportedModelError(
            "the patch grid was not found; give it, as in "
            'contract={"tokens": {"prefix": ["cls"], "grid": [14, 14]}}'
        )
    try:
        rows, columns = map(operator.index, fields["grid"])
    except (TypeError, ValueError):
        raise InputError(f"tokens grid {fields['grid']!r}; expected [rows, columns]") from None
    tokens = _made(Tokens, {**fields, "grid": (rows, columns)})
    if not found.layers:
        if found.tokens is not None and tokens.grid != found.tokens.grid:
            raise UnsupportedModelError(
                f"a {rows}x{columns} grid was given; the last feature map, all that is served "
                f"here, has {found.tokens.grid[0]}x{found.tokens.grid[1]} positions"
            )
        return dataclasses.replace(tokens, prefix=())  # a feature map has none
    if tokens.count != (keys := found.layers[-1][0].keys):
        raise UnsupportedModelError(
            f"{len(tokens.prefix)} prefix tokens and a {tokens.grid[0]}x{tokens.grid[1]} grid make "
            f"{tokens.count} tokens; the attention spans {keys}"
        )
    return tokens


def _made(kind: type[Record], fields: Mapping[str, Any]) -> Record:
    try:
        return kind(**fields)
    except TypeError:
        known = ", ".join(f.name for f in dataclasses.fields(kind))
        raise InputError(f"fields {', '.join(fields)}; expected {known}") from None


def _is_rounded_together(found: Structure) -> bool:
    """Whether the steps that values are rounded with are measured on all images of a run."""
    return any(map(is_measured, found.facts))


def _precision(model: ir.Model, found: Structure, bfloat16: bool) -> str:
    if any(node.op_type == "QuantizeLinear" for node in model.graph):
        return INT8
    values = [tap.value for layer in found.layers for tap in layer]
    values += [features.value for features in found.features]
    if any(found.facts[value].is_half for value in values):
        return HALF
    if bfloat16:
        return BFLOAT16
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return (
        "fp16" if any(t is not None and t.dtype == ir.DataType.FLOAT16 for t in tensors) else "fp32"
    )


def _digest(model: ir.Model) -> str:
    """SHA-256 over the names, types, shapes and bytes of the weights, in order of their names."""
    digest = hashlib.sha256()
    for name, value in sorted(model.graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None:
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(tensor.tobytes())
    return digest.hexdigest()
