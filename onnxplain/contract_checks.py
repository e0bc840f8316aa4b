"""Whether a contract can be relied on: what a damaged or foreign one may say."""

from __future__ import annotations

import math

from onnxplain.contract import (
    BFLOAT16,
    CROP_ROUNDINGS,
    HALF,
    INT8,
    LARGEST_INPUT,
    PRECISIONS,
    Contract,
)
from onnxplain.outputs import METHODS, map_name

__all__ = ["check"]


def _check_kinds(contract: Contract) -> None:
    """That names are text and counts are counts.

    Raises:
        ValueError: What is not.
    """
    image, source = contract.input, contract.source
    texts = [image.name, image.layout, image.crop_mode, image.interpolation, image.color_order]
    texts += [contract.logits, source.name, source.framework, *contract.tokens.prefix]
    texts += [*(contract.labels or ()), *(contract.graphs or {}).values()]
    texts += [name for names in contract.methods.values() for name in names]
    names = [contract.target, contract.class_weights, contract.features, contract.features_gradient]
    names += [contract.input_relevance, contract.input_relevance_attnlrp]
    for layer in contract.layers:
        names += [layer.attention, layer.gradient, layer.relevance, layer.relevance_lrp]
    texts += [name for name in names if name is not None]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{text!r} where a name should be")
    counts = [contract.classes, contract.targets]
    counts += [] if image.batch is None else [image.batch]
    for number in (*counts, *(layer.heads for layer in contract.layers)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{number!r} where a count should be")
    for record in (source.versions, contract.rules, contract.verification or {}):
        if not isinstance(record, dict):
            raise ValueError(f"{record!r} where names and values should be")
    if "" in (image.name, contract.target, contract.class_weights):
        raise ValueError("an input without a name")
    if not isinstance(contract.heatmaps, bool):
        raise ValueError(f"heatmaps {contract.heatmaps!r}")
    if image.color_order not in ("RGB", "BGR"):
        raise ValueError(f"color_order {image.color_order!r}")
    if image.crop_rounding not in CROP_ROUNDINGS:
        raise ValueError(f"crop_rounding {image.crop_rounding!r}")


def check(contract: Contract) -> None:
    """What a reader relies on, so that a damaged contract is said to be one.

    Raises:
        ValueError: What does not fit.
    """
    _check_kinds(contract)
    image, count = contract.input, contract.tokens.count
    if contract.labels is not None and len(contract.labels) != contract.classes:
        raise ValueError(f"{len(contract.labels)} labels for {contract.classes} classes")
    numbers = (*image.mean, *image.std, image.crop_pct)
    usual = all(map(math.isfinite, numbers)) and min(*image.std, image.crop_pct) > 0
    if not usual or not 1e-3 <= image.crop_pct <= 1e3:
        raise ValueError(f"mean {image.mean}, std {image.std}, crop_pct {image.crop_pct}")
    if math.prod(image.size) * (image.batch or 1) > LARGEST_INPUT:
        raise ValueError(f"batch {image.batch} of {image.size[0]}x{image.size[1]} pixels")
    if count > image.size[0] * image.size[1] + len(contract.tokens.prefix):
        raise ValueError(f"{count} tokens for {image.size[0]}x{image.size[1]} pixels")
    if image.multiple is not None and image.size != tuple(
        side * count for side, count in zip(image.multiple, contract.tokens.grid, strict=True)
    ):
        raise ValueError(f"{contract.tokens.grid} times {image.multiple} pixels on {image.size}")
    if contract.tokens.patch is not None and any(
        count * patch > size
        for count, patch, size in zip(
            contract.tokens.grid, contract.tokens.patch, image.size, strict=True
        )
    ):
        raise ValueError(f"patches of {contract.tokens.patch} pixels on {image.size}")
    if image.multiple is not None and contract.tokens.patch is not None:
        raise ValueError(f"patches of {contract.tokens.patch} pixels on pictures of any size")
    if contract.score not in ("logit", "softmax", "sigmoid"):
        raise ValueError(f"score {contract.score!r}")
    if contract.precision not in (*PRECISIONS, HALF, BFLOAT16, INT8):
        raise ValueError(f"precision {contract.precision!r}")
    for layer in contract.layers:
        if layer.kind not in ("global", "class") or not 0 <= layer.first_token < count:
            raise ValueError(f"layer of kind {layer.kind!r} from token {layer.first_token} on")
    readout = contract.readout
    if readout is not None:
        kinds = ("cls", "cls+dist", "mean", "attention", "gradient")
        if readout.kind not in kinds or not readout.ranges:
            raise ValueError(f"readout {readout.kind!r} of ranges {readout.ranges}")
        for start, stop in readout.ranges:
            if not 0 <= start < stop <= count:
                raise ValueError(f"readout range {start}..{stop} of {count} tokens")
        if readout.weights and len(readout.ranges) != 1:
            raise ValueError(f"readout {readout.kind} of {len(readout.ranges)} ranges")
    if not all(isinstance(options, dict) for options in contract.maps.values()):
        raise ValueError(f"maps {contract.maps!r}")
    if contract.targets > contract.classes:
        raise ValueError(f"{contract.targets} targets of {contract.classes} classes")
    if unknown := set(contract.maps) - set(contract.methods):
        raise ValueError(f"a map of {min(unknown)}, which is not among the methods")
    for method, names in contract.methods.items():
        needs = METHODS.get(method)
        if needs is None:
            continue  # of a later version
        expected = set(needs.outputs(len(contract.layers), readout))
        if method in contract.maps and set(names) == {map_name(method)}:
            continue  # without what the map was made of
        if needs.reads_row and not contract.layers:
            raise ValueError(f"{method} without attention layers")
        if set(names) != expected:
            raise ValueError(f"{method} reads {', '.join(sorted(expected ^ set(names)))}")
        if needs.takes_target(readout) and contract.target is None:
            raise ValueError(f"{method} without a target")
        if contract.targets > 1 and needs.takes_target(readout):
            raise ValueError(f"{method} of {contract.targets} targets without its map")
