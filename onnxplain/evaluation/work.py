"""The work that takes time, done in pieces that are kept as they are finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.errors import ImageError, OnnxplainError
from onnxplain.evaluation.datasets import Dataset, Sample, read_masks
from onnxplain.evaluation.measures import BASELINES
from onnxplain.evaluation.progress import Progress
from onnxplain.evaluation.sanity import PREDICTION_CHANGED, randomisation
from onnxplain.evaluation.study import Layout, Study
from onnxplain.graphs.reduced import reduce_to
from onnxplain.runtime.explainer import Explainer
from onnxplain.runtime.model import Model
from onnxplain.runtime.preprocessing import prepare_picture
from onnxplain.runtime.streaming import ahead
from onnxplain.steps import Step

__all__ = ["Work", "spread"]

_DECODERS = 2
_AHEAD = 4  # pictures decoded before they are needed


class Work:
    """Measures the pictures of a dataset, and the maps of random weights.

    Args:
        explainer: Of the model.
        data: The pictures.
        layout: What is measured.
        progress: Where what is finished is kept, and what was finished before.
        scratch: A folder for graphs.
        source: The model.
        settings: As `evaluate` makes them.
    """

    def __init__(
        self,
        explainer: Explainer,
        data: Dataset,
        layout: Layout,
        progress: Progress,
        scratch: Path,
        source: Path,
        settings: dict[str, Any],
    ) -> None:
        self._explainer = explainer
        self._data = data
        self._layout = layout
        self._progress = progress
        self._scratch = scratch
        self._source = source
        self._settings = settings

    def pictures(self, on_error: Callable[[str, str], None], tell: Step) -> None:
        done = self._progress.pictures_done()
        count = len(done)
        tell("evaluating", count, len(self._data))
        waiting = (one for one in self._data.numbered() if one[0] not in done)
        study = None
        for (number, sample), outcome in ahead(
            waiting, self._prepare, workers=_DECODERS, count=_AHEAD
        ):
            try:
                if isinstance(outcome, OnnxplainError):
                    raise outcome
                study = study or self._study()
                pixels, masks = outcome
                record, facts = study.measure(sample, pixels, masks)
            except ImageError as error:
                self._progress.add_failure(number, sample.name, str(error))
                on_error(sample.name, str(error))
            else:
                facts["objects"] = len(masks)
                facts["masks"] = sum(mask is not None for mask in masks)
                self._progress.add_picture(number, sample.name, facts, record)
            count += 1
            tell("evaluating", count, len(self._data))

    def _prepare(
        self, item: tuple[int, Sample]
    ) -> tuple[NDArray[np.float32], list[NDArray[np.int8] | None]]:
        _, sample = item
        pixels, picture = prepare_picture(sample.image, self._explainer.contract.input)
        return pixels, read_masks(sample, picture)

    def _study(self) -> Study:
        """The graphs that the pictures need, cut down to what is asked of them."""
        options = {"device": self._settings["device"], "threads": self._settings["threads"]}
        plain = self._scratch / "plain.onnx"
        reduce_to(self._source, plain, ())
        explainer, methods = self._explainer, self._settings["methods"]
        if set(methods) < set(explainer.methods):
            asked = self._scratch / "asked.onnx"
            reduce_to(self._source, asked, methods)
            explainer = Explainer(asked, image_size=self._settings["image_size"], **options)
        return Study(
            explainer,
            Model(plain, **options),
            self._layout,
            fills=self._settings["fills"],
            steps=self._settings["steps"],
            seed=self._settings["seed"],
            batch_size=self._settings["batch_size"],
        )

    def levels(self, chosen: Sequence[int], names: Sequence[str], tell: Step) -> None:
        """The maps of the chosen pictures by models with random weights, level by level."""
        done = self._progress.levels()
        if not chosen or len(done) == len(names):
            return
        facts = {number: facts for number, _, facts, _ in self._progress.pictures()}
        known = [number for number in chosen if number in facts]
        if not known:
            return
        images = []
        for number, sample in self._data.numbered():
            if number in known:
                images.append(prepare_picture(sample.image, self._explainer.contract.input)[0])
        count = len(done)
        tell("randomising weights", count, len(names))
        numbers = {name: i for i, name in enumerate(names, start=1)}
        for name, found in randomisation(
            self._source,
            images,
            [facts[number]["predicted"] for number in known],
            self._settings["methods"],
            seed=self._settings["seed"],
            scratch=self._scratch,
            device=self._settings["device"],
            threads=self._settings["threads"],
            done=[name for name, i in numbers.items() if i in done],
        ):
            record = np.full((len(self._layout.methods) + 1, len(chosen)), np.nan)
            columns = [chosen.index(number) for number in known]
            for row, method in enumerate((*self._layout.methods, PREDICTION_CHANGED)):
                # The baselines do not look at the model.
                record[row, columns] = 1 if method in BASELINES else found[method]
            self._progress.add_level(numbers[name], record)
            count += 1
            tell("randomising weights", count, len(names))


def spread(numbers: Sequence[int], chosen: int) -> list[int]:
    """So many of the numbers, as evenly as can be."""
    count = len(numbers)
    chosen = min(chosen, count)
    return [numbers[i * count // chosen] for i in range(chosen)]
