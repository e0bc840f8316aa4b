"""The fields of a file of preprocessing, each of the kind that it should be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplain.contract import LARGEST_SIDE
from onnxplain.errors import InputError

__all__ = ["INTERPOLATIONS", "Preprocessing", "Settings", "Triple"]

Triple = tuple[float, float, float]
INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""By the numbers that Pillow has for them."""
_LONGEST_SHOWN = 80  # characters of a value, in a message


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """How pictures become pixel values.

    Attributes:
        fields: Those of `PREPROCESSING` that were read.
        size: Height and width that pictures are brought to; None where they were not read.
    """

    fields: dict[str, Any]
    size: tuple[int, int] | None


@dataclass(frozen=True)
class Settings:
    """Fields by name; one that is null is as good as left out."""

    fields: Mapping[str, Any]
    where: Path

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def refusal(self, name: str, reason: str) -> InputError:
        field = name if name.isidentifier() else repr(name)
        field, shown = (
            text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
            for text in (field, repr(self.fields.get(name)))
        )
        return InputError(f"{self.where}: {field} {shown}: {reason}")

    def flag(self, name: str) -> bool:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(name, "expected true or false")
        return bool(value)

    def number(self, name: str) -> float:
        """A finite number above 0."""
        value = _finite(self.fields.get(name))
        if value is None or value <= 0:
            raise self.refusal(name, "expected a number above 0")
        return value

    def triple(self, name: str, *, above_zero: bool = False) -> Triple:
        """Three numbers, or one that stands for three."""
        value = self.fields.get(name)
        parts = value if isinstance(value, list) else [value] * 3
        red, green, blue = map(_finite, parts) if len(parts) == 3 else (None, None, None)
        if red is None or green is None or blue is None:
            raise self.refusal(name, "expected three numbers")
        if above_zero and min(red, green, blue) <= 0:
            raise self.refusal(name, "expected numbers above 0")
        return red, green, blue

    def sides(self, name: str, value: Any) -> tuple[int, int]:
        """Height and width in pixels, from `value`, a part of the field."""
        whole = isinstance(value, Sequence) and len(value) == 2
        if not whole or not all(type(v) is int and 1 <= v <= LARGEST_SIDE for v in value):
            raise self.refusal(name, f"expected height and width, up to {LARGEST_SIDE}")
        return value[0], value[1]

    def interpolation(self, name: str) -> str:
        """By Pillow's number, or by name."""
        value = self.fields.get(name)
        if type(value) is int and 0 <= value < len(INTERPOLATIONS):
            return INTERPOLATIONS[value]
        if isinstance(value, str) and value.lower() in INTERPOLATIONS:
            return value.lower()
        numbered = ", ".join(f"{number} ({n})" for number, n in enumerate(INTERPOLATIONS))
        raise self.refusal(name, f"expected one of {numbered}; --interpolation says another")


def _finite(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
