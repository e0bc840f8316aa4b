"""What is measured about one picture: its maps, the pictures that are made of it, and the sums."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from onnxplain.contract import Contract
from onnxplain.differences import rank_correlation
from onnxplain.errors import ImageError
from onnxplain.evaluation import localisation, perturbation
from onnxplain.evaluation.baselines import center_gaussian, random_map, seed_of
from onnxplain.evaluation.datasets import Sample
from onnxplain.evaluation.measures import BASELINES, CENTER_GAUSSIAN, RANDOM, TENTHS, Measure
from onnxplain.outputs import METHODS
from onnxplain.runtime.explainer import Explainer
from onnxplain.runtime.explanation import upsample
from onnxplain.runtime.model import Model
from onnxplain.runtime.targets import PREDICTION, Question, likeliest_first

__all__ = ["Layout", "Map", "Study"]

Floats = NDArray[np.float64]
Mask = NDArray[np.int8]


@dataclass(frozen=True)
class Map:
    """A map of one picture: raw on its grid, and as a heatmap [H, W] in 0..1."""

    grid: NDArray[np.float32]
    heatmap: NDArray[np.float32]
    degenerate: bool

    @classmethod
    def of_grid(cls, grid: NDArray[np.float32], contract: Contract) -> Map:
        size = contract.input.size
        heatmap, degenerate = upsample(grid[None], size, contract.tokens.covered(size))
        return cls(grid, heatmap[0], bool(degenerate[0]))


class Layout:
    """Where in the record of a picture each number is: [methods, columns].

    Columns are the numerator and the denominator of each ratio, then the curves, each point the sum
    over the questions of the picture.
    """

    def __init__(self, methods: Sequence[str], measures: Sequence[Measure]) -> None:
        self.methods = (*methods, *BASELINES)
        self.measures = tuple(measures)
        parts = [part for measure in measures for part in measure.parts]
        self.parts = tuple(dict.fromkeys(parts))
        self._ratio = {part: 2 * i for i, part in enumerate(self.parts)}
        self._curve: dict[str, slice] = {}
        width = 2 * len(self.parts)
        for measure in measures:
            if measure.points and measure.name != "randomisation":
                self._curve[measure.name] = slice(width, width + measure.points)
                width += measure.points
        self._width = width

    def empty(self) -> Floats:
        return np.zeros((len(self.methods), self._width))

    def has(self, name: str) -> bool:
        return name in self._ratio

    def add(
        self,
        record: Floats,
        method: str,
        part: str,
        value: float,
        count: float = 1,
        curve: Floats | None = None,
    ) -> None:
        """Adds to the sum and count of a ratio, and to its curve."""
        row = record[self.methods.index(method)]
        column = self._ratio[part]
        row[column] += value
        row[column + 1] += count
        if curve is not None:
            row[self._curve[part]] += curve

    def sums(self, record: Floats) -> Floats:
        """[methods, parts, 2]."""
        return record[:, : 2 * len(self.parts)].reshape(len(self.methods), len(self.parts), 2)

    def curves(self, totals: Floats) -> Iterator[tuple[Measure, str, Floats]]:
        """The mean curve of each measure and method, of records that were added up."""
        for measure in self.measures:
            for method, row in zip(self.methods, totals, strict=True):
                if measure.name in self._curve and (
                    count := row[self._ratio[measure.parts[0]] + 1]
                ):
                    yield measure, method, row[self._curve[measure.name]] / count


@dataclass(frozen=True)
class _Asked:
    """A question about a picture: the class, and which predictions are right."""

    kind: str  # "predicted" or "target"
    label: int
    right: frozenset[int]


class Study:
    """Measures pictures, one at a time.

    Args:
        explainer: Makes the maps.
        plain: The logits alone, for the pictures that are made of each picture.
        layout: What is measured.
        fills, steps: Of `measures_of`.
        seed: Of the random map and the noise of "road".
        batch_size: Pictures in a run of `plain`.
    """

    def __init__(
        self,
        explainer: Explainer,
        plain: Model,
        layout: Layout,
        *,
        fills: Sequence[str],
        steps: int,
        seed: int,
        batch_size: int,
    ) -> None:
        self._explainer = explainer
        self._plain = plain
        self._layout = layout
        self._methods = [name for name in layout.methods if name not in BASELINES]
        self._groups = {measure.group for measure in layout.measures}
        self._fills = fills if "perturbation" in self._groups else ()
        self._steps = steps if "insertion_deletion" in self._groups else 0
        self._seed = seed
        contract = explainer.contract
        size = contract.input.size
        self._batch = np.empty((batch_size, 3, *size), np.float32)
        self._patches = perturbation.patch_of_pixel(
            size, contract.tokens.grid, contract.tokens.covered(size)
        )
        self._center = Map.of_grid(center_gaussian(contract.tokens.grid), contract)

    def measure(
        self, sample: Sample, pixels: NDArray[np.float32], masks: Sequence[Mask | None]
    ) -> tuple[Floats, dict[str, Any]]:
        """The record of a picture, and its facts: the prediction, the labels.

        Args:
            sample: The picture's name and objects.
            pixels: [3, H, W], normalised.
            masks: [H, W] of each object, or None.

        Raises:
            ImageError: The model answers with logits that are not finite.
        """
        pixels = np.ascontiguousarray(pixels)  # or every copy of them takes twice as long
        clean = self._logits(pixels[None])[0]
        predicted, *others = likeliest_first(clean)[:2].tolist()
        labels = [one.label for one in sample.objects if one.label is not None]
        questions = [_Asked("predicted", predicted, frozenset(labels or [predicted]))]
        questions += [_Asked("target", label, frozenset([label])) for label in labels]
        sensitive = self._layout.has("class_sensitivity")
        classes = dict.fromkeys([predicted, *labels, *(others if sensitive else [])])
        maps = self._maps(sample.name, pixels, list(classes))
        record = self._layout.empty()
        if self._fills or self._steps:
            self._add_faithfulness(record, sample.name, pixels, clean, questions, maps)
        if "localisation" in self._groups:
            self._add_localisation(record, sample, masks, predicted, maps)
        if sensitive:
            for method in self._layout.methods:
                pair = (maps[method, label].grid for label in (predicted, *others))
                self._layout.add(record, method, "class_sensitivity", rank_correlation(*pair))
        right = predicted in questions[0].right if labels else None
        return record, {"predicted": predicted, "labels": labels, "right": right}

    def _maps(
        self, name: str, pixels: NDArray[np.float32], classes: list[int]
    ) -> dict[tuple[str, int], Map]:
        """The map of each method for each class; the same object where the class makes no
        difference."""
        contract = self._explainer.contract
        seed = seed_of(self._seed, name)
        random = Map.of_grid(random_map(seed, contract.tokens.grid), contract)
        found = {(RANDOM, label): random for label in classes}
        found |= {(CENTER_GAUSSIAN, label): self._center for label in classes}
        if not self._methods:
            return found
        several = np.repeat(pixels[None], len(classes), axis=0)
        for one in self._explainer.explain_each(several, methods=self._methods, target=classes):
            maps = [
                Map(*m) for m in zip(one.grid, one.heatmap, one.degenerate.tolist(), strict=True)
            ]
            if not METHODS[one.method].takes_target(contract.readout):
                maps = maps[:1] * len(maps)
            found |= {(one.method, label): m for label, m in zip(classes, maps, strict=True)}
        return found

    def _logits(self, pictures: NDArray[np.float32]) -> NDArray[Any]:
        question = Question(classes=np.full((len(pictures), 1), PREDICTION, np.int64))
        logits = self._plain.run(pictures, question, (), finite=False)
        values = logits[self._explainer.contract.logits]
        if not np.isfinite(values).all():
            raise ImageError(
                "the model's logits are not finite, for this picture or what was made of it; leave "
                "it out, or mend the model"
            )
        return values

    def _add_faithfulness(
        self,
        record: Floats,
        name: str,
        pixels: NDArray[np.float32],
        clean: NDArray[Any],
        questions: Sequence[_Asked],
        maps: Mapping[tuple[str, int], Map],
    ) -> None:
        asked = [
            (method, question, maps[method, question.label])
            for method in self._layout.methods
            for question in questions
        ]
        different = {id(m): m for _, _, m in asked}  # a map is tried once, whoever asks for it
        random = maps[RANDOM, questions[0].label]
        pictures = itertools.chain.from_iterable(
            self._pictures(name, pixels, m, random) for m in different.values()
        )
        answers = self._answers(pictures)
        for number, key in enumerate(different):
            # None is like the clean picture: the curves start with it.
            answer = answers[number * self._count : (number + 1) * self._count]
            for method, question, m in asked:
                if id(m) == key:
                    self._add_curves(record, method, question, clean, answer)

    @property
    def _count(self) -> int:
        """Pictures that are made for a map."""
        ends = 1 if self._steps else 0  # the blurred picture, with which insertion starts
        return 2 * len(TENTHS[1:]) * len(self._fills) + 2 * self._steps + ends

    def _pictures(
        self, name: str, pixels: NDArray[np.float32], m: Map, random: Map
    ) -> Iterator[NDArray[np.float32]]:
        contract = self._explainer.contract
        seed = seed_of(self._seed, name)
        if self._fills:
            ranks = perturbation.ranks_from_highest(m.heatmap, random.heatmap)
            for fill in self._fills:
                yield from perturbation.perturbed(pixels, ranks, fill, contract.input, seed)
        if self._steps:
            if m.grid.shape == contract.tokens.grid and not m.degenerate:
                values: NDArray[Any] = m.grid.reshape(-1)
            else:
                values = perturbation.patch_values(m.heatmap, self._patches)
            ranks = perturbation.ranks_from_highest(values, random.grid.reshape(-1))
            yield perturbation.blurred(pixels)
            yield from perturbation.inserted(pixels, ranks, self._patches, self._steps)
            yield from perturbation.deleted(pixels, ranks, self._patches, self._steps)

    def _answers(self, pictures: Iterator[NDArray[np.float32]]) -> NDArray[Any]:
        found = []
        batch = self._batch  # the same memory for all: to get it anew takes longer than to fill it
        while count := _fill(batch, pictures):
            found.append(self._logits(batch[:count]))
        return np.concatenate(found)

    def _add_curves(
        self,
        record: Floats,
        method: str,
        question: _Asked,
        clean: NDArray[Any],
        answer: NDArray[Any],
    ) -> None:
        logits = np.concatenate([clean[None], answer])
        shares = softmax(logits.astype(np.float64), axis=1)[:, question.label]
        right = np.isin(logits.argmax(axis=1), list(question.right)).astype(np.float64)
        removed = len(TENTHS[1:])
        x = np.array(TENTHS) / 10
        start = 1
        for fill in self._fills:
            most = [0, *range(start, start + removed)]
            least = [0, *range(start + removed, start + 2 * removed)]
            start += 2 * removed
            curves = {
                "positive": right[most],
                "negative": right[least],
                "difference": shares[least] - shares[most],
            }
            for kind, curve in curves.items():
                part = f"perturbation.{fill}.{kind}.{question.kind}"
                self._add_curve(record, method, part, curve, x)
        if self._steps:
            inserted = range(start, start + self._steps + 1)
            deleted = [0, *range(inserted.stop, inserted.stop + self._steps)]
            patches = int(self._patches[-1, -1]) + 1
            x = np.arange(self._steps + 1) * patches // self._steps / patches
            for kind, chosen in (("insertion", list(inserted)), ("deletion", deleted)):
                self._add_curve(record, method, f"{kind}.{question.kind}", shares[chosen], x)

    def _add_curve(self, record: Floats, method: str, part: str, curve: Floats, x: Floats) -> None:
        value = float(perturbation.area(curve, x))
        self._layout.add(record, method, part, value, curve=curve)

    def _add_localisation(
        self,
        record: Floats,
        sample: Sample,
        masks: Sequence[Mask | None],
        predicted: int,
        maps: Mapping[tuple[str, int], Map],
    ) -> None:
        for i, (one, mask) in enumerate(zip(sample.objects, masks, strict=True)):
            if mask is None or not (mask == 1).any() or not (mask == 0).any():
                continue  # nothing of it is left in what the model sees, or nothing else
            others = [m for j, m in enumerate(masks) if j != i and m is not None]
            label = predicted if one.label is None else one.label
            for method in self._layout.methods:
                heatmap = maps[method, label].heatmap
                for part, (value, count) in _on_object(heatmap, mask, others).items():
                    self._layout.add(record, method, part, value, count)


def _fill(batch: NDArray[np.float32], pictures: Iterator[NDArray[np.float32]]) -> int:
    """Puts the next pictures into a batch; how many there were."""
    count = 0
    for count, picture in enumerate(itertools.islice(pictures, len(batch)), start=1):
        batch[count - 1] = picture
    return count


def _on_object(
    heatmap: NDArray[np.float32], mask: Mask, others: Sequence[Mask]
) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of each measure of localisation."""
    cut = localisation.segmentation(heatmap, mask)
    found: dict[str, tuple[float, float]] = {
        "pixel_accuracy": (cut.correct, cut.counted),
        "iou_object": (cut.intersection_object, cut.union_object),
        "iou_background": (cut.intersection_background, cut.union_background),
        "map": (localisation.average_precision(heatmap, mask), 1),
        "energy": (localisation.energy_inside(heatmap, mask), 1),
        "pointing_game": (localisation.pointing_game(heatmap, mask), 1),
    }
    if others:
        elsewhere = localisation.other_objects(mask, others)
        found["pointing_other"] = (localisation.pointing_game(heatmap, elsewhere), 1)
    return found
