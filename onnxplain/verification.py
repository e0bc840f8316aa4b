"""Compares what two explained files compute, a file on two devices, or a file with torch."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.contract import PREPROCESSING, Contract, height_and_width
from onnxplain.differences import TOLERANCE, Difference, measure
from onnxplain.errors import InputError
from onnxplain.outputs import map_name
from onnxplain.runtime import dispatch
from onnxplain.runtime.model import Model, NotInstrumentedError
from onnxplain.runtime.preprocessing import prepare
from onnxplain.runtime.targets import PREDICTION, Question
from onnxplain.steps import Step, counted, silent

__all__ = ["Verification", "verify"]

_TORCH = "timm:"
_Values = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Two sides compared output by output.

    Attributes:
        path, device: The file, and what it ran on.
        against: The other side, and what it ran on.
        tolerance: What `relative` may be.
        differences: One for each output that both have.
        notes: What else differs: outputs that only one side has, predictions, preprocessing, values
            that are not finite.
    """

    path: Path
    device: str
    against: str
    tolerance: float
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def within(self) -> bool:
        """Whether every output is within tolerance."""
        return all(one.within for one in self.differences)


@dataclass(frozen=True, kw_only=True)
class _Side:
    name: str
    contract: Contract
    outputs: frozenset[str]  # besides the logits

    @classmethod
    def of(cls, model: Model) -> _Side:
        name = f"{model.path} on {model.device}"
        return cls(name=name, contract=model.contract, outputs=frozenset(model.outputs))

    def at(self, size: int | Iterable[int]) -> _Side:
        return replace(self, contract=self.contract.at(size))


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    device: str | Sequence[Any] = "cpu",
    images: Iterable[Any] = (),
    batch: int | None = None,
    seed: int | None = None,
    tolerance: float = TOLERANCE,
    image_size: int | tuple[int, int] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    step: Step | None = None,
    **model_kwargs: Any,
) -> Verification:
    """Compares an explained file with another, with itself on the CPU, with a timm model, or with
    the plain ONNX file that it was made from.

    Both sides explain the same pictures, for each one's prediction, for another class (for as many
    as both take at once), and for a sum of logits if both take one. All outputs that both have are
    compared. Where one has the finished map of a method and the
    other what it is made of, the map is computed from that. An output is within tolerance if its
    largest difference is at most `tolerance` of its largest value; relevance, and maps made of it,
    if their relative L2 difference is at most 1e-2 and the maps' rank correlation at least 0.999.
    Values that are NaN or infinite have to be so on both sides.

    A plain file has outputs but no explanations: they are compared, within a hundredth of
    `tolerance` where both compute in float32, and the gradients of `path` with finite differences
    of its own forward pass, for the class after the likeliest of the first picture.

    Files of float16 weights are compared as they are: expect differences of 1e-2, and more in
    relevance.

    Args:
        path: The file or bundle.
        against: Another one, or "timm:NAME", which needs the extra `export` and compares with torch
            in the runs that an export makes, or the plain ONNX file, which needs the extra
            `graphs`. None: the file itself.
        device: What runs `path`, as in `Explainer`. The other side runs on the CPU.
        images: Pictures as in `Explainer.explain`, beside random ones.
        batch: Number of random pictures; None: 2.
        seed: Of the random pictures; None: 0.
        tolerance: The largest difference by the largest value that is tolerated.
        image_size: Pixels, or height and width, for files that take several sizes.
        checkpoint: Weights of the timm model, .safetensors or .pth.
        step: Called with what is going on, how much of it is done, and of how much.
        **model_kwargs: For timm.create_model: num_classes=, pretrained=True (downloads), ...

    Raises:
        InputError: An argument is wrong, or the sides cannot be compared: they take pictures of
            other sizes or tell other numbers of classes apart.
        ModelError: A file is missing, damaged or not explained, or the checkpoint does not fit.
        ImageError: A picture cannot be read.
        DeviceError: The device cannot be had.
        MissingDependencyError: "timm:NAME" without the extra `export`, a plain file without
            `graphs`.
    """
    if not 0 <= tolerance < math.inf:
        raise InputError(f"tolerance is {tolerance!r}, expected a number from 0 on")
    with_torch = isinstance(against, str) and against.startswith(_TORCH)
    if not with_torch and (checkpoint is not None or model_kwargs):
        given = [*([] if checkpoint is None else ["checkpoint"]), *sorted(model_kwargs)]
        raise InputError(f"{', '.join(given)}: for a comparison with timm:NAME alone")
    if against is None and device == "cpu":
        raise InputError(
            "nothing to compare with: give another file (against=, --against), or a device to "
            "compare with the CPU (device=, --device)"
        )
    pictures = [images] if isinstance(images, str | os.PathLike) else list(images)
    drawn = batch is not None or seed is not None
    if with_torch and (pictures or drawn):
        raise InputError("images, batch, seed: torch is compared in the runs that an export makes")
    tell = step or silent
    tell("reading the models", 0, 1)
    model = Model(path, device=device)
    side = _Side.of(model)
    if image_size is not None:
        side = side.at(height_and_width(image_size))
    if with_torch:
        weights = None if checkpoint is None else Path(checkpoint)
        name = str(against).removeprefix(_TORCH)
        compared = _with_torch(model, side, name, weights, model_kwargs, tolerance, tell)
    elif against is None and model.device == "cpu":
        raise InputError(f"device {device!r} is the CPU here, so there is nothing to compare with")
    else:
        noise = _noise(side.contract, 2 if batch is None else batch, 0 if seed is None else seed)
        try:
            other = Model(path if against is None else against, device="cpu")
        except NotInstrumentedError:
            source = Path(str(against))
            return _with_source(model, side, source, [*noise, *pictures], tolerance, tell)
        compared = _with_file(model, side, other, [*noise, *pictures], tolerance, tell)
    return Verification(
        path=model.path,
        device=model.device,
        against=compared.second.name,
        tolerance=tolerance,
        differences=tuple(compared.differences.values()),
        notes=tuple(compared.notes),
    )


def _with_file(
    model: Model, side: _Side, other: Model, pictures: list[Any], tolerance: float, tell: Step
) -> _Comparison:
    comparison = _Comparison(*_of_one_kind(side, _Side.of(other)), tolerance)
    first, second = comparison.first, comparison.second
    images, images2 = (
        [image for image, _ in prepare(pictures, one.contract.input)] for one in (first, second)
    )

    one, two = first.contract, second.contract
    # Files that take several classes at once are asked for as many if both take as many.
    columns = np.arange(one.targets if one.targets == two.targets else 1)
    weighted = one.class_weights is not None and two.class_weights is not None
    told = counted(tell, "comparing", 6 if weighted else 4)  # two runs for each question

    def ask(asked: Question) -> NDArray[Any]:
        found = model.run(images, asked, comparison.wanted(first))
        told()
        expected = other.run(images2, asked, comparison.wanted(second))
        if len(columns) == 1:
            found = dispatch.of_first_class(found, one)
            expected = dispatch.of_first_class(expected, two)
        comparison.add(found, expected)
        told()
        return expected[two.logits]

    ranks = np.full((len(pictures), 1), PREDICTION) - columns
    logits = ask(Question(classes=ranks))
    classes = (logits.argmax(axis=-1)[:, None] + 1 + columns) % two.classes
    ask(Question(classes=classes))
    if weighted:
        weights = np.random.default_rng(0).normal(size=logits.shape).astype(np.float32)
        ask(Question(classes=classes[:, :1], weights=weights))
    return comparison


def _with_source(
    model: Model, side: _Side, source: Path, pictures: list[Any], tolerance: float, tell: Step
) -> Verification:
    from onnxplain.plain_source import compare

    images = [image for image, _ in prepare(pictures, side.contract.input)]
    pixels = images
    if side.contract.input.layout == "HWC":
        outside = replace(side.contract.input, layout="NCHW")
        pixels = [image for image, _ in prepare(pictures, outside)]
    measured, notes = compare(model, side.contract, source, images, pixels, tolerance, tell)
    differences: dict[str, Difference] = {}
    for one in measured:
        before = differences.get(one.output)
        differences[one.output] = one if before is None else before.worse(one)
    return Verification(
        path=model.path,
        device=model.device,
        against=f"{source}, the model without explanations",
        tolerance=tolerance,
        differences=tuple(differences.values()),
        notes=tuple(dict.fromkeys(notes)),
    )


def _with_torch(
    model: Model,
    side: _Side,
    name: str,
    checkpoint: Path | None,
    model_kwargs: Mapping[str, Any],
    tolerance: float,
    tell: Step,
) -> _Comparison:
    from onnxplain.export import require_packages

    require_packages()
    if side.contract.input.layout == "HWC":
        raise InputError(
            f"{side.name} takes pictures as they are and torch pixel values; compare with a file "
            "exported without --embed-preprocessing (embed_preprocessing=False)"
        )
    from onnxplain.export.reference import (
        reference_contract,
        reference_outputs,
        reference_runs,
        reference_values,
    )

    with tempfile.TemporaryDirectory(prefix="onnxplain-") as folder:
        tell("running torch", 0, 1)
        runs = reference_runs(
            name, side.contract, Path(folder), checkpoint=checkpoint, model_kwargs=model_kwargs
        )
        shown = reference_outputs(runs[0], side.contract, side.outputs)
        contract = reference_contract(side.contract, shown)
        torch = _Side(name=f"{_TORCH}{name} in torch", contract=contract, outputs=shown)
        comparison = _Comparison(side, torch, tolerance)
        told = counted(tell, "comparing", len(runs))
        for run in runs:
            feed, _, _ = run
            pixels = feed[side.contract.input.name]
            prediction = np.full(len(pixels), PREDICTION, np.int64)
            target = feed.get(side.contract.target or "", prediction)
            asked = Question(classes=target[:, None])
            found = model.run(list(pixels), asked, comparison.wanted(side))
            found = dispatch.of_first_class(found, side.contract)
            expected = reference_values(run, found, side.contract)
            comparison.add(found, expected, size=pixels.shape[2:])
            told()
    return comparison


def _noise(contract: Contract, count: int, seed: int) -> list[NDArray[np.uint8]]:
    """Random pictures of the size that is only cropped, so that no resizing evens them out.

    Raises:
        InputError: `count` or `seed` is no number, or negative.
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise InputError(f"batch is {count!r}, expected a positive number")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise InputError(f"seed is {seed!r}, expected a number from 0 on")
    image = contract.input
    height, width = (int(side / max(image.crop_pct, 0.25)) for side in image.size)
    generator = np.random.default_rng(seed)
    return list(generator.integers(0, 256, (count, height, width, 3), dtype=np.uint8))


def _of_one_kind(first: _Side, second: _Side) -> tuple[_Side, _Side]:
    """Both, for pictures of a size that both take.

    Raises:
        InputError: There is none, or they tell other numbers of classes apart.
    """
    one, other = first.contract, second.contract
    try:
        if one.input.multiple is not None and other.input.multiple is None:
            first = first.at(other.input.size)
        else:
            second = second.at(one.input.size)
    except InputError as error:
        raise InputError(f"{first.name} cannot be compared with {second.name}: {error}") from None
    if one.classes != other.classes:
        raise InputError(
            f"{first.name} has {one.classes} classes and {second.name} {other.classes}; expected "
            "models of the same classes"
        )
    return first, second


class _Comparison:
    """The outputs that two sides share, and how far they are apart in the runs added so far."""

    def __init__(self, first: _Side, second: _Side, tolerance: float) -> None:
        self.first, self.second, self.tolerance = first, second, tolerance
        self.differences: dict[str, Difference] = {}
        self.notes: dict[str, None] = {}  # in order, each once
        self.maps: dict[str, Mapping[str, Any]] = {}  # method -> options, of maps to be computed
        self.shared = set(first.outputs & second.outputs)
        for method in dispatch.served(first.contract):
            if method in dispatch.served(second.contract):
                self._plan(method)
        for one, other in ((first, second), (second, first)):
            alone = one.outputs - other.outputs - self.wanted(one)
            if kinds := sorted({_NUMBER.sub("", name) for name in alone}):
                self._note(f"only {one.name} has {', '.join(kinds)}")
        image, image2 = first.contract.input, second.contract.input
        if (image.layout == "HWC") != (image2.layout == "HWC"):
            self._note("one side does the preprocessing in the graph: a grey level may differ")
        for name in PREPROCESSING:
            if (a := getattr(image, name)) != (b := getattr(image2, name)):
                self._note(f"{name} is {a} in {first.name} and {b} in {second.name}")

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def _plan(self, method: str) -> None:
        """Whether the method's map is an output of both, or has to be computed."""
        fixed = [
            side.contract.maps[method]
            for side in (self.first, self.second)
            if method in side.contract.maps
        ]
        if not fixed or (len(fixed) == 2 and fixed[0] == fixed[1]):
            return
        # Maps for other options are other maps, and so are what is made of them.
        self.shared -= {name for name in self.shared if name.partition(".")[2] == method}
        for options in fixed:
            try:
                for side in (self.first, self.second):
                    dispatch.reads(method, side.contract, options)
            except InputError as error:
                reason = str(error)
            else:
                self.maps[method] = options
                return
        self._note(f"the maps of {method} are not compared: {reason}")

    def wanted(self, side: _Side) -> set[str]:
        """Outputs to fetch of a side, besides its logits."""
        made_of = (dispatch.reads(m, side.contract, options) for m, options in self.maps.items())
        return self.shared.union(*made_of)

    def add(self, found: _Values, expected: _Values, size: tuple[int, int] | None = None) -> None:
        """Takes in one run: outputs by name, for pixels of the contract's size or another."""
        sides = (self.first, found), (self.second, expected)
        contracts = [side.contract if size is None else side.contract.at(size) for side, _ in sides]
        logits = [values[c.logits] for c, values in zip(contracts, (found, expected), strict=True)]
        if (logits[0].argmax(axis=-1) != logits[1].argmax(axis=-1)).any():
            self._note("predictions differ, and with them what depends on the class")
        self._add("logits", *logits)
        for name in sorted(self.shared, key=_in_order):
            self._add(name, found[name], expected[name])
        for method, options in self.maps.items():
            maps = (
                dispatch.compute(method, values, c, options)
                for c, values in zip(contracts, (found, expected), strict=True)
            )
            self._add(map_name(method), *maps)

    def _add(self, output: str, found: NDArray[Any], expected: NDArray[Any]) -> None:
        if found.shape != expected.shape:
            ours, theirs = list(found.shape), list(expected.shape)
            self._note(f"{output} is {ours} in {self.first.name}, {theirs} in {self.second.name}")
        for side, values in ((self.first, found), (self.second, expected)):
            if not np.isfinite(values).all():
                self._note(f"{output} holds NaN or infinite values in {side.name}")
        difference = measure(output, found, expected, self.tolerance)
        before = self.differences.get(output)
        self.differences[output] = difference if before is None else before.worse(difference)


_NUMBER = re.compile(r"\.\d+$")


def _in_order(output: str) -> tuple[str, int]:
    """By kind, then by layer."""
    stem, _, number = output.rpartition(".")
    return (stem, int(number)) if number.isdecimal() else (output, 0)
