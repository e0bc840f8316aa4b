"""Which class to explain: indices, labels, or each image's prediction."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.contract import Contract
from onnxplain.errors import InputError

__all__ = ["PREDICTION", "Target", "class_index", "class_indices"]

Target = str | int | None

PREDICTION = -1
"""Stands for "this image's own argmax" in the graph's `target` input."""


def class_indices(target: Any, count: int, contract: Contract) -> NDArray[np.int64]:
    """One class per image, `PREDICTION` where the target is None.

    Args:
        target: A `Target` for all images, or a sequence with one per image (or with a single one).
        count: Number of images.
        contract: The model's contract.

    Raises:
        InputError: A class does not exist, or there are not as many as images.
    """
    if isinstance(target, np.ndarray):
        target = target.tolist()
    if target is None or isinstance(target, str) or not isinstance(target, Sequence):
        return np.full(count, class_index(target, contract), np.int64)
    indices = [class_index(one, contract) for one in target]
    if len(indices) not in (1, count):
        raise InputError(f"{len(indices)} targets for {count} images; give one, or one per image")
    return np.full(count, indices, np.int64)


def class_index(target: Any, contract: Contract) -> int:
    """The index of one class; `PREDICTION` for None.

    A string is a label: as written, else with any capitals, else the number that it spells.
    """
    if target is None:
        return PREDICTION
    if isinstance(target, str):
        return _labelled(target, contract)
    if not isinstance(target, int | np.integer) or isinstance(target, bool):
        raise InputError(
            f"target {target!r} is a {type(target).__name__}, expected a class index, a label, or "
            "None for the prediction"
        )
    if not 0 <= target < contract.classes:
        raise InputError(f"target {int(target)} is not in 0..{contract.classes - 1}")
    return int(target)


def _labelled(label: str, contract: Contract) -> int:
    labels = contract.labels or ()
    folded = [known.casefold() for known in labels]
    for names, name in ((list(labels), label), (folded, label.casefold())):
        places = [i for i, known in enumerate(names) if known == name]
        if len(places) > 1:
            raise InputError(
                f"label {label!r} names classes {', '.join(map(str, places[:5]))}; give the index"
            )
        if places:
            return places[0]
    if label.isascii() and label.isdecimal():
        return class_index(int(label), contract)
    if not labels:
        raise InputError(f"target {label!r}: this file has no labels; give a class index")
    close = difflib.get_close_matches(label.casefold(), folded, n=3, cutoff=0.5)
    hint = ", ".join(repr(labels[folded.index(match)]) for match in close)
    raise InputError(
        f"no label {label!r} in this model"
        + (f"; close ones: {hint}" if hint else f"; it has {len(labels)} labels")
    )
