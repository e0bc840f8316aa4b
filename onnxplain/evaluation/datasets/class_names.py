"""The model's classes by the names that a dataset gives them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onnxplain.contract import Contract
from onnxplain.errors import InputError
from onnxplain.evaluation.datasets.files import read_text
from onnxplain.runtime.targets import GIVE_LABELS, class_index

__all__ = ["ClassNames", "read_mask_labels"]

_SHOWN = 3  # unknown names that a message explains


class ClassNames:
    """Finds classes by label as written; else whatever its capitals, spaces, `_` and `-`; else by
    number."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._folded: dict[str, set[str]] = {}
        for label in contract.labels or ():
            self._folded.setdefault(_folded(label), set()).add(label)

    def index(self, name: str) -> int:
        """The class of one name.

        Raises:
            InputError: There is none, or several; the message has labels that are close.
        """
        alike = self._folded.get(_folded(name), set())
        return class_index(next(iter(alike)) if len(alike) == 1 else name, self._contract)

    @property
    def labelled(self) -> bool:
        """Whether the classes have names."""
        return self._contract.labels is not None

    def label(self, index: int) -> str:
        """A class in words."""
        labels = self._contract.labels
        return f"class {index}" if labels is None else f"class {index}, {labels[index]!r},"

    def indices(self, names: Iterable[str], *, what: str) -> dict[str, int]:
        """The classes of several names, or one error about all that are unknown.

        Args:
            names: The names.
            what: What they are, for the message: "photos: folders".

        Raises:
            InputError: Some name no class.
        """
        found: dict[str, int] = {}
        unknown: dict[str, str] = {}
        for name in names:
            try:
                found[name] = self.index(name)
            except InputError as error:
                unknown[name] = str(error)
        count = len(found) + len(unknown)
        if unknown and not self.labelled:
            raise InputError(
                f"{what} that name no class of the model, {len(unknown)} of {count} "
                f"({', '.join(list(unknown)[:_SHOWN])}{', ...' if len(unknown) > _SHOWN else ''}): "
                f"it has no labels; name classes by number, 0 to {self._contract.classes - 1}, "
                f"or {GIVE_LABELS}"
            )
        if unknown:
            reasons = ". ".join(list(unknown.values())[:_SHOWN])
            more = f". And {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
            raise InputError(
                f"{what} that name no class of the model, {len(unknown)} of {count}: "
                f"{reasons}{more}"
            )
        return found


def _folded(name: str) -> str:
    return "".join(c for c in name.casefold() if c not in "_- ")


def read_mask_labels(path: Path, names: ClassNames) -> dict[int, int]:
    """The pixel values of the model's classes, from a text file.

    Args:
        path: Line i, counted from 0, names pixel value i. Line 0 is the background. Names that the
            model does not know, and empty lines, stand for other things on the pictures.
        names: The model's classes.

    Returns:
        The pixel value of each class that is named.

    Raises:
        InputError: The file cannot be read, names no class, or one class twice.
    """
    values: dict[int, int] = {}
    for value, line in enumerate(read_text(path).splitlines()):
        if value == 0 or not line.strip():
            continue
        try:
            index = names.index(line.strip())
        except InputError:
            continue
        if index in values:
            raise InputError(
                f"{path}: pixel values {values[index]} and {value} (lines counted from 0) both "
                f"name class {index}; expected one value for a class"
            )
        values[index] = value
    if not values:
        do = "" if names.labelled else f"; the model has no labels, so {GIVE_LABELS}"
        raise InputError(
            f"{path}: no line from the second on names a class of the model; expected the name of "
            f"pixel value i in line i, the background in line 0{do}"
        )
    return values
