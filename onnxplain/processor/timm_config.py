"""timm's `config.json`: its `pretrained_cfg` has the names of the contract."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from onnxplain.processor.settings import INTERPOLATIONS, Preprocessing, Settings

__all__ = ["from_timm"]

# What `timm.data.resolve_data_config` takes where the file has nothing.
DEFAULTS: dict[str, Any] = {
    "input_size": [3, 224, 224],
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
    "crop_pct": 0.875,
    "crop_mode": "center",
    "interpolation": "bicubic",
}
MODES = ("center", "border", "squash")
LARGEST_CROP = 1.15  # VOLO's, which pad the picture


def from_timm(config: Settings, given: Collection[str]) -> Preprocessing:
    """The preprocessing of timm's evaluation transform.

    Args:
        config: The `pretrained_cfg`.
        given: As in `read_processor`.

    Raises:
        InputError: A field is not of the kind that timm takes.
    """
    found = {name: value for name, value in config.fields.items() if value not in (None, [], "")}
    config = Settings({**DEFAULTS, **found}, config.where)
    fields: dict[str, Any] = {"color_order": "RGB"}
    if config.has("crop_border_pixels"):
        raise config.refusal("crop_border_pixels", "cannot be expressed; crop the pictures before")
    if "mean" not in given:
        fields["mean"] = config.triple("mean")
    if "std" not in given:
        fields["std"] = config.triple("std", above_zero=True)
    if "interpolation" not in given:
        fields["interpolation"] = _one_of(config, "interpolation", INTERPOLATIONS)
    if "crop_mode" not in given:
        fields["crop_mode"] = _one_of(config, "crop_mode", MODES)
    if "crop_pct" not in given:
        fields["crop_pct"] = config.number("crop_pct")
        if fields["crop_pct"] > LARGEST_CROP:
            raise config.refusal("crop_pct", f"expected at most {LARGEST_CROP}")
    size = config.fields["input_size"]
    if not isinstance(size, list) or len(size) != 3 or size[0] != 3:
        raise config.refusal("input_size", "expected [3, height, width], of pictures in colour")
    return Preprocessing(fields=fields, size=config.sides("input_size", size[1:]))


def _one_of(config: Settings, name: str, choices: Collection[str]) -> str:
    value = config.fields[name]
    if not isinstance(value, str) or value not in choices:
        raise config.refusal(name, f"expected one of {', '.join(choices)}")
    return value
