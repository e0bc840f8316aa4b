"""What to explain: classes by index or label, each image's likeliest ones, or sums of logits."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.contract import Contract
from onnxplain.errors import InputError

__all__ = [
    "GIVE_LABELS",
    "PREDICTION",
    "ClassWeights",
    "Question",
    "Target",
    "class_index",
    "class_indices",
    "likeliest_first",
    "question",
]

Target = str | int | None
ClassWeights = Mapping[Any, float] | NDArray[Any] | Sequence[Any] | None

PREDICTION = -1
"""Stands for "this image's own argmax" in the graph's `target` input."""

GIVE_LABELS = "make the file again with labels (export or instrument --labels FILE)"
"""What to do where a file has none."""

_SHOWN = 3  # classes of a sum that are named


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about a batch of images.

    Attributes:
        classes: int64 [B, K], K classes of each image; `PREDICTION` for the likeliest, one less
            for the next.
        weights: float32 [B, classes], the sum of logits that is asked for instead, or None.
    """

    classes: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    def __getitem__(self, part: slice) -> Question:
        weights = None if self.weights is None else self.weights[part]
        return Question(classes=self.classes[part], weights=weights)

    def feeds(self, contract: Contract) -> dict[str, NDArray[Any]]:
        """The inputs of the graph by name, first axis B.

        A file that takes several classes at once is asked for one of them as often as it takes.
        """
        feeds: dict[str, NDArray[Any]] = {}
        classes, weights = self.classes, self.weights
        if contract.targets == 1:
            classes = classes[:, 0]
        elif classes.shape[1] == 1:
            classes = classes.repeat(contract.targets, axis=1)
            if weights is not None:
                weights = weights[:, None].repeat(contract.targets, axis=1)
        if contract.target is not None:
            feeds[contract.target] = classes
        if contract.class_weights is not None and weights is not None:
            feeds[contract.class_weights] = weights
        return feeds

    def repeated(self, count: int) -> Question:
        """The question of one image about so many."""
        weights = None if self.weights is None else self.weights.repeat(count, axis=0)
        return Question(classes=self.classes.repeat(count, axis=0), weights=weights)

    def one_by_one(self) -> list[Question]:
        """A question for each of the K classes."""
        return [
            Question(classes=self.classes[:, i : i + 1], weights=self.weights)
            for i in range(self.classes.shape[1])
        ]

    def answered(self, logits: NDArray[Any]) -> NDArray[np.int64]:
        """The first class of each image that is explained, int64 [B]: of a sum, that of the largest
        weight, whatever its sign."""
        if self.weights is not None:
            return np.abs(self.weights).argmax(axis=-1).astype(np.int64)
        classes = self.classes[:, 0]
        if (classes >= 0).all():
            return classes
        order = likeliest_first(logits)
        rank = np.maximum(PREDICTION - classes, 0)
        likeliest = np.take_along_axis(order, rank[:, None], axis=-1)[:, 0]
        return np.where(classes < 0, likeliest, classes).astype(np.int64)

    def names(self, logits: NDArray[Any], contract: Contract) -> tuple[str, ...]:
        """What is explained in words, for each image."""

        def name(index: int) -> str:
            return str(index) if contract.labels is None else contract.labels[index]

        if self.weights is None:
            return tuple(name(index) for index in self.answered(logits).tolist())
        return tuple(_sum(weights, name) for weights in self.weights)


def likeliest_first(logits: NDArray[Any]) -> NDArray[np.intp]:
    """Classes by their logits, [..., classes]; of equal ones the lower first, as in the graph."""
    return (-logits).argsort(axis=-1, kind="stable")


def _sum(weights: NDArray[np.float32], name: Callable[[int], str]) -> str:
    """The sum in words, as `cat - 0.5 dog`."""
    order = np.argsort(-np.abs(weights), kind="stable")
    order = order[weights[order] != 0]
    text = ""
    for i in order[:_SHOWN].tolist():
        size, negative = abs(float(weights[i])), bool(weights[i] < 0)
        sign = (" - " if negative else " + ") if text else ("-" if negative else "")
        text += sign + ("" if size == 1 else f"{size:g} ") + name(i)
    return text + (" ..." if len(order) > _SHOWN else "")


def question(target: Any, class_weights: Any, count: int, contract: Contract) -> Question:
    """What is asked about `count` images.

    Args:
        target: As `class_indices` takes it.
        class_weights: None, or a weight by class (index or label; the others are 0), or an array
            [classes] for all images or [count, classes].
        count: Number of images.
        contract: The model's contract.

    Raises:
        InputError: A class does not exist, the weights do not fit, or both are given.
    """
    classes = class_indices(target, count, contract)[:, None]
    if class_weights is None:
        return Question(classes=classes)
    if target is not None:
        raise InputError("both target and class_weights; give one of them")
    if contract.class_weights is None:
        raise InputError(
            "class_weights: this file takes no sums of logits; export it with seed='weights' "
            "(--seed weights)"
        )
    return Question(classes=classes, weights=_weights(class_weights, count, contract))


def _weights(given: Any, count: int, contract: Contract) -> NDArray[np.float32]:
    if isinstance(given, Mapping):
        by_class: dict[int, float] = {}
        for name, weight in given.items():
            index = class_index(name, contract)
            if index == PREDICTION:
                raise InputError("class_weights: a weight for None; expected a class")
            if index in by_class:
                raise InputError(f"class_weights: {name!r} is class {index}, which has a weight")
            by_class[index] = _number(weight)
        given = np.array([by_class.get(i, 0.0) for i in range(contract.classes)])
    try:
        numbers = np.asarray(given)
    except ValueError:  # rows of different lengths
        numbers = np.array(None)
    if numbers.dtype.kind not in "iuf":
        raise InputError(
            f"class_weights {_brief(given)}; expected weights by class, or an array of numbers "
            f"[{contract.classes}] or [images, {contract.classes}]"
        )
    with np.errstate(over="ignore"):  # said below
        weights = numbers.astype(np.float32)
    if weights.shape not in ((contract.classes,), (count, contract.classes)):
        raise InputError(
            f"class_weights of shape {list(weights.shape)}; expected [{contract.classes}] or "
            f"[{count}, {contract.classes}]"
        )
    weights = np.broadcast_to(weights, (count, contract.classes))
    if not np.isfinite(weights).all():
        where = np.argwhere(~np.isfinite(weights))[0, 1]
        raise InputError(f"class_weights: {weights[:, where].max()} for class {where}; not finite")
    if not weights.any(axis=-1).all():
        raise InputError("class_weights are all 0; expected one that is not, for every image")
    return weights


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 40 else f"{text[:40]}..."


def _number(weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"class_weights: {weight!r}; expected a number") from None


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
        raise InputError(
            f"target {label!r}: this file has no labels; give a class index, or {GIVE_LABELS}"
        )
    close = difflib.get_close_matches(label.casefold(), folded, n=3, cutoff=0.5)
    hint = ", ".join(repr(labels[folded.index(match)]) for match in close)
    raise InputError(
        f"no label {label!r} in this model"
        + (f"; close ones: {hint}" if hint else f"; it has {len(labels)} labels")
    )
