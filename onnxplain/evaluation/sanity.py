"""The model randomisation test: do the maps change when the weights do?

Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, section 3: cascading randomisation,
and the rank correlation of each map with that of the model as it was. A map that still agrees with
a random model shows edges or places, not what the model has learned. What is replaced at each level
is defined in `onnxplain.graphs.randomised`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.differences import rank_correlation
from onnxplain.errors import InputError
from onnxplain.graphs.randomised import levels, randomise
from onnxplain.graphs.reduced import reduce_to
from onnxplain.runtime import dispatch
from onnxplain.runtime.model import Model
from onnxplain.runtime.targets import Question

__all__ = ["PREDICTION_CHANGED", "randomisation"]

PREDICTION_CHANGED = "prediction_changed"
"""Stands among the methods: 1 for each picture whose prediction is another than it was, else 0."""


def randomisation(
    source: str | os.PathLike[str],
    images: Sequence[NDArray[Any]],
    classes: Sequence[int],
    methods: Sequence[str],
    *,
    seed: int,
    scratch: Path,
    device: str = "auto",
    threads: int | None = None,
    batch_size: int = 8,
    done: Collection[str] = (),
) -> Iterator[tuple[str, dict[str, NDArray[np.float64]]]]:
    """Runs the cascade, level by level from the logits to all weights.

    The maps are raw, with a sign where a method has a value per pixel, and of the same class at
    every level. Those of the model as it is are made once per call and kept, float32; one model is
    open at a time.

    Args:
        source: An explained file or a bundle folder.
        images: What the model takes: float32 [3, H, W] of one size, or uint8 [H, W, 3] where the
            preprocessing is in the graph. May read them from elsewhere; each is asked for once per
            level.
        classes: Index of the class to explain, for each image.
        methods: Names of methods that the source serves.
        seed: Of the permutations, not negative.
        scratch: Folder for a copy of the model, or two; each is gone when its level is done.
        device, threads: As of `onnxplain.Explainer`.
        batch_size: Images per run of the model.
        done: Names of levels to leave out.

    Yields:
        The name of the level, as in `onnxplain.graphs.randomised.levels`, and for each method the
        rank correlation with the map before, float64 [images], in -1..1; under
        `PREDICTION_CHANGED` whether the largest logit is another.

    Raises:
        InputError: A method that the source does not serve, not a class for each image, or no
            images.
        OnnxplainError: The model cannot be read, randomised, written or run.
    """
    if not len(images) == len(classes) > 0:
        raise InputError(f"{len(classes)} classes for {len(images)} images; expected one for each")

    def explained(path: Path) -> tuple[NDArray[np.int64], dict[str, list[NDArray[np.float32]]]]:
        model = Model(path, device=device, threads=threads)
        predictions: list[int] = []
        maps: dict[str, list[NDArray[np.float32]]] = {method: [] for method in methods}
        for start in range(0, len(images), batch_size):
            batch = [images[i] for i in range(start, min(start + batch_size, len(images)))]
            asked = np.array(classes[start : start + batch_size], np.int64)[:, None]
            logits, grids = _explain(model, batch, Question(classes=asked), methods)
            predictions += _predictions(logits)
            for method, grid in grids.items():
                maps[method] += list(grid)
        return np.array(predictions), maps

    waiting = [(i, name) for i, name in enumerate(levels(source), 1) if name not in done]
    if not waiting:
        return
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        path = Path(folder) / "model.onnx"
        reduce_to(source, path, methods)
        predicted, original = explained(path)
    for level, name in waiting:
        with tempfile.TemporaryDirectory(dir=scratch) as folder:
            path = Path(folder) / "model.onnx"
            randomise(source, path, level, seed=seed, methods=methods)
            changed, maps = explained(path)
        found = {
            method: np.array(list(map(rank_correlation, own, maps[method])))
            for method, own in original.items()
        }
        yield name, {**found, PREDICTION_CHANGED: (changed != predicted).astype(np.float64)}


def _explain(
    model: Model, batch: Sequence[NDArray[Any]], asked: Question, methods: Sequence[str]
) -> tuple[NDArray[Any], dict[str, NDArray[np.float32]]]:
    """Logits [B, classes], and the raw maps [B, h, w] of each method with its default options."""
    contract = model.contract
    if contract.input.layout != "HWC":
        contract = contract.at(batch[0].shape[1:])
    chosen = {method: dispatch.choose(method, contract) for method in methods}
    outputs = {name for own in chosen.values() for name in dispatch.reads(own, contract, {})}
    # A model of permuted weights may well exceed what float32 holds.
    values = model.run(batch, asked, outputs, finite=False)
    logits = values[contract.logits]
    return logits, {m: dispatch.compute(own, values, contract, {}) for m, own in chosen.items()}


def _predictions(logits: NDArray[Any]) -> list[int]:
    """The largest logit of each image; -1, which is no class, where they are not finite."""
    finite = np.isfinite(logits).all(axis=-1)
    return np.where(finite, logits.argmax(axis=-1), -1).tolist()
