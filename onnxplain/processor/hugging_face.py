"""Hugging Face's image processors in the terms of the contract.

They resize, crop around the centre, multiply by `rescale_factor`, subtract `image_mean` and divide
by `image_std`, in this order, each step only if its `do_...` says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from onnxplain.errors import InputError
from onnxplain.processor.classes import ENDINGS, PROCESSORS, Processor, processor_of
from onnxplain.processor.settings import Preprocessing, Settings, Triple

__all__ = ["from_hugging_face"]

# What a file may say beside: none of it changes the pixel values of a picture that is RGB.
WITHOUT_EFFECT = {
    "_processor_class",
    "_valid_processor_keys",
    "auto_map",
    "data_format",
    "device",
    "disable_grouping",
    "do_convert_rgb",
    "do_reduce_labels",
    "feature_extractor_type",
    "image_processor_type",
    "input_data_format",
    "model_input_names",
    "pad_size",
    "processor_class",
    "reduce_labels",
    "return_tensors",
    "transformers_version",
}
STEPS = {
    "crop_size",
    "default_to_square",
    "do_pad",
    "image_mean",
    "image_std",
    "resample",
    "size",
}
CODE = {"AutoImageProcessor", "AutoFeatureExtractor"}  # in auto_map: the repository's own
LARGEST_CONVNEXT_CROP = 384  # pictures of this size and more are not cropped
CROP_OPTIONS = "--crop-mode and --crop-pct"
OTHERWISE = f"{CROP_OPTIONS} say what to do instead"

Crop = tuple[tuple[int, int], float, str]


def from_hugging_face(config: Settings, name: object, given: Collection[str]) -> Preprocessing:
    """The preprocessing of an image processor.

    Args:
        config: The fields of its file.
        name: Of its class, or the model_type of its model; None where neither is said.
        given: As in `read_processor`.

    Raises:
        InputError: The class or a field is not known, is left out without a default, or cannot be
            expressed.
    """
    processor = _known(config, name)
    own = {key: value for key, value in config.fields.items() if value is not None}
    defaults = processor.defaults
    meaning = WITHOUT_EFFECT | STEPS | defaults.keys()
    settings = Settings({**defaults, **own}, config.where)
    for field in sorted(own.keys() - meaning):
        if own[field]:
            raise settings.refusal(
                field, f"not known of {name}; take it out of the file if pixels do not depend on it"
            )
    fields: dict[str, Any] = {"color_order": "RGB", "crop_rounding": "down"}
    if "do_flip_channel_order" in defaults:
        if settings.flag("do_normalize"):
            raise settings.refusal("do_normalize", f"{name} does not do it; expected false")
        if settings.flag("do_flip_channel_order"):
            fields["color_order"] = "BGR"
    if "interpolation" not in given:
        _require(settings, "resample", "--interpolation")
        fields["interpolation"] = settings.interpolation("resample")
    if not {"mean", "std"} <= set(given):
        fields["mean"], fields["std"] = _normalisation(settings)
    size = None
    if not {"crop_mode", "crop_pct"} <= set(given):
        size, fields["crop_pct"], fields["crop_mode"] = _crop(settings, processor)
    return Preprocessing(fields=fields, size=size)


def _known(config: Settings, name: object) -> Processor:
    if name is None:
        raise InputError(
            f"{config.where}: neither image_processor_type in it nor model_type in a config.json "
            'beside it; add what it is, such as "image_processor_type": "ViTImageProcessor"'
        )
    code = config.fields.get("auto_map")
    if isinstance(code, dict) and CODE & code.keys():
        raise config.refusal("auto_map", "made by code of its own; give --mean, --std, ... instead")
    processor = processor_of(name) if isinstance(name, str) else None
    if processor is None:
        raise InputError(
            f"{config.where}: image processor {str(name)[:80]!r} is not known; expected "
            f"{', '.join(PROCESSORS)} with the ending {ENDINGS[0]}; give --mean, --std, ... instead"
        )
    return processor


def _require(settings: Settings, field: str, options: str) -> None:
    if not settings.has(field):
        raise InputError(
            f"{settings.where}: {field} is left out, and transformers has no one default for it; "
            f"give {options}"
        )


def _normalisation(settings: Settings) -> tuple[Triple, Triple]:
    """Mean and standard deviation for pixels of 0 to 1."""
    scale, shift = 255.0, 0.0
    if settings.flag("do_rescale"):
        scale *= settings.number("rescale_factor")
        shift = float(settings.flag("rescale_offset"))
    mean: Triple = (0.0, 0.0, 0.0)
    std: Triple = (1.0, 1.0, 1.0)
    if settings.flag("do_normalize"):
        mean = settings.triple("image_mean")
        std = settings.triple("image_std", above_zero=True)
    if settings.flag("include_top"):  # divides once more
        top = settings.triple("image_std", above_zero=True)
        std = (std[0] * top[0], std[1] * top[1], std[2] * top[2])
    low = tuple((m + shift) / scale for m in mean)
    width = tuple(s / scale for s in std)
    if not all(0 <= v <= 1 for v in low) or not all(0 < v <= 1 for v in width):
        raise InputError(
            f"{settings.where}: image_mean {[*mean]} and image_std {[*std]}, rescaled by "
            f"{scale / 255:.6g}, are mean {[*low]} and std {[*width]} of pixels in 0..1; expected "
            "0 to 1; give --mean and --std"
        )
    return (low[0], low[1], low[2]), (width[0], width[1], width[2])


def _crop(settings: Settings, processor: Processor) -> Crop:
    """The size of the pixel values, and `crop_pct` and `crop_mode` that lead to it."""
    if not settings.flag("do_resize"):
        raise settings.refusal("do_resize", f"pictures of any size cannot be taken; {OTHERWISE}")
    if settings.flag("do_pad"):
        raise settings.refusal("do_pad", f"padding cannot be expressed; {OTHERWISE}")
    for field in ("size", "do_center_crop"):
        _require(settings, field, CROP_OPTIONS)
    resized = _resized(settings, processor)
    cropped = settings.flag("do_center_crop")
    if "crop_pct" in processor.own:
        return _convnext(settings, resized, cropped)
    if not cropped:
        if isinstance(resized, int):
            raise settings.refusal(
                "size", f"without do_center_crop the longer side is left open; {OTHERWISE}"
            )
        return resized, 1.0, "squash"
    _require(settings, "crop_size", CROP_OPTIONS)
    crop = _crop_size(settings)
    sides = (resized, resized) if isinstance(resized, int) else resized
    if isinstance(resized, int) and crop[0] != crop[1]:
        raise settings.refusal(
            "crop_size", f"of a size by the shorter side, expected a square; {OTHERWISE}"
        )
    if crop[0] > sides[0] or crop[1] > sides[1]:
        raise settings.refusal(
            "crop_size", f"more than size, padding cannot be expressed; {OTHERWISE}"
        )
    share = _share(crop, sides)
    if share is None:
        raise settings.refusal(
            "crop_size", f"not one share of height and width of {[*sides]}; {OTHERWISE}"
        )
    return crop, share, "center" if isinstance(resized, int) else "squash"


def _resized(settings: Settings, processor: Processor) -> int | tuple[int, int]:
    """What pictures are resized to: the shorter side, or height and width."""
    value = settings.fields["size"]
    if isinstance(value, dict):
        known = {name: side for name, side in value.items() if side is not None}
        if known.keys() == {"height", "width"}:
            return settings.sides("size", [known["height"], known["width"]])
        if known.keys() == {"shortest_edge"}:
            return settings.sides("size", [known["shortest_edge"]] * 2)[0]
        raise settings.refusal(
            "size", f"expected height and width, or shortest_edge alone; {OTHERWISE}"
        )
    if isinstance(value, list):
        return settings.sides("size", value)
    height, width = settings.sides("size", [value, value])
    said = settings.has("default_to_square")
    square = settings.flag("default_to_square") if said else processor.square
    return (height, width) if square else height


def _crop_size(settings: Settings) -> tuple[int, int]:
    value = settings.fields["crop_size"]
    if isinstance(value, dict):
        return settings.sides("crop_size", [value.get("height"), value.get("width")])
    return settings.sides("crop_size", value if isinstance(value, list) else [value, value])


def _convnext(settings: Settings, resized: int | tuple[int, int], cropped: bool) -> Crop:
    """ConvNeXt's `size` is that of the crop; `crop_pct` says what it is a crop of."""
    if not isinstance(resized, int):
        raise settings.refusal("size", f"expected shortest_edge; {OTHERWISE}")
    if cropped:
        raise settings.refusal("do_center_crop", f"cropped twice; {OTHERWISE}")
    size = (resized, resized)
    if resized >= LARGEST_CONVNEXT_CROP:
        return size, 1.0, "squash"
    share = settings.number("crop_pct")
    if share > 1:
        raise settings.refusal("crop_pct", f"expected at most 1; {OTHERWISE}")
    return size, share, "center"


def _share(crop: tuple[int, int], resized: tuple[int, int]) -> float | None:
    """The `crop_pct` of which `crop` is cut from `resized`: floor(crop / share) is the latter."""
    pairs = list(zip(crop, resized, strict=True))
    most = min(inner / outer for inner, outer in pairs)
    least = max(inner / (outer + 1) for inner, outer in pairs)
    for share in (most, math.nextafter(most, 0), (most + least) / 2):
        if all(math.floor(inner / share) == outer for inner, outer in pairs):
            return share
    return None
