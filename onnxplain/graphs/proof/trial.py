"""Proves explained graphs without the framework that the model is from.

What the model computed before, it computes still; and gradients equal finite differences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxplain.contract import BFLOAT16, HALF, INT8, KEY, Contract
from onnxplain.errors import ModelError, VerificationError
from onnxplain.graphs.explained import Explained
from onnxplain.graphs.files.writing import drafted
from onnxplain.graphs.interface import drop_unused, only
from onnxplain.graphs.proof.shifted import differentiated, shifted
from onnxplain.graphs.proof.slopes import ROUNDED, RUNTIME, Slopes, ask, opened, unproven
from onnxplain.graphs.values.shapes import frozen_batches
from onnxplain.steps import Step, counted, silent

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

__all__ = ["SHIFTED", "change", "question", "sessions_of", "unchanged", "verified"]

Array = NDArray[Any]

SOURCE, SHIFTED = "source", "-shifted"
UNCHANGED = 1e-6  # what the model computed before, where nodes were written otherwise
TRIED = 2**25  # pixels of a random batch
SMALL = 2**26  # bytes of the weights of all models together, which are in memory once more
OVERFLOW = (
    "on processors without VNNI onnxruntime lets products of uint8 and int8 overflow: quantise to "
    "weights in uint8 or with reduce_range"
)
WITHOUT = "instrument without verification (verify=False, --no-verify)"


def verified(
    explained: Explained, source: ir.Model, path: Path, *, step: Step = silent
) -> Explained:
    """The same graphs, with the measured differences in every contract.

    A random image is run, a batch of them where that is fixed, and one of a second size where sizes
    are free. The graphs run without onnxruntime's optimisations: so nodes that are as they were
    compute the same bits.

    Args:
        explained: The graphs, with the raw outputs of their methods.
        source: The model that they were made from.
        path: Files for the trial are written beside it, and are gone afterwards.
        step: Called with what is going on, how much of it is done, and of how much.

    Raises:
        VerificationError: A difference is above the bound, or values are not finite.
        ModelError: onnxruntime cannot run the model, or a file cannot be written.
    """
    own = {
        kind: Contract.from_json(model.metadata_props[KEY])
        for kind, model in explained.models.items()
    }
    kinds = [kind for kind in own if differentiated(own[kind])] or [*own][:1]
    before = [str(value.name) for value in source.graph.outputs]
    models = {}
    runs = explained.contract.precision != BFLOAT16
    if runs:
        models[SOURCE] = source.clone()
        drop_unused(models[SOURCE])  # or a node of a stranger's file takes memory for nothing
    for kind in kinds:
        pairs = differentiated(own[kind])
        names = {own[kind].logits, *before, *pairs, *pairs.values()}
        models[kind] = only(explained.models[kind], names)  # relevance takes most of the time
    worst: dict[str, float] = {}
    gradients = unproven(explained.contract)
    try:
        gradients_of = {
            kind: (models[kind], own[kind]) for kind in kinds if not unproven(own[kind])
        }
        trial = dataclasses.replace(explained, models=models)
        parts = [(kind, contract) for kind in kinds for contract in _at_sizes(own[kind])]
        total = len(parts) + sum(kind in gradients_of for kind, _ in parts)
        told = counted(step, "verifying", total)
        with sessions_of(trial, gradients_of, path) as sessions:
            frozen = frozen_batches(source)
            for kind, contract in parts:
                feeds, expected, found = _run(
                    contract, sessions.get(SOURCE), sessions[kind], frozen
                )
                _check_changes(worst, contract, expected, found)
                told()
                if kind in gradients_of:
                    slopes = Slopes(contract, sessions[kind + SHIFTED], feeds, found)
                    gradients = slopes.kind
                    _check_slopes(worst, slopes)
                    told()
    except ModelError as error:
        raise type(error)(f"cannot be verified: {error}; {WITHOUT}") from None
    return explained.with_verification(
        {
            "framework": SOURCE,
            "version": RUNTIME,
            "outputs": None if runs else "onnxruntime does not run the model in bfloat16",
            "gradients": gradients,
            "differences": {name: float(f"{value:.1e}") for name, value in worst.items()},
        }
    )


def unchanged(precision: str) -> float:
    """What the outputs that a model had before may differ by, relatively."""
    return ROUNDED if precision in ("fp16", HALF) else UNCHANGED


def change(found: Array, expected: Array) -> float:
    """Largest absolute difference by the largest expected value (by 1 if all are 0); infinite where
    the shapes differ, or values that are not finite."""
    if found.shape != expected.shape:
        return np.inf
    a, b = found.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.where(np.isfinite(a), 0, a), np.where(finite, 0, b), equal_nan=True):
        return np.inf
    apart, sizes = np.abs(a[finite] - b[finite]), np.abs(b[finite])
    return float(apart.max(initial=0)) / (float(sizes.max(initial=0)) or 1.0)


def question(contract: Contract, images: int, expected: Mapping[str, Array]) -> dict[str, Array]:
    """The feeds that ask for the class after the likeliest of each image.

    The gradient of the probability of the likeliest one may be made of what cancels.

    Args:
        contract: Of the graph that is asked.
        images: How many.
        expected: What the model computes of the images, probabilities or logits among it.
    """
    scores = [v for v in expected.values() if v.size == images * contract.classes]
    scores = [expected[contract.logits]] if contract.logits in expected else scores
    ranked = scores[0].reshape(images, -1) if scores else np.zeros((images, contract.classes))
    classes = (ranked.argmax(axis=1) + 1) % contract.classes
    weights = np.zeros((images, contract.classes), np.float32)
    if contract.targets > 1:
        classes = classes[:, None].repeat(contract.targets, axis=1)
        weights = weights[:, None].repeat(contract.targets, axis=1)
    named = {contract.target: classes, contract.class_weights: weights}
    return {name: array for name, array in named.items() if name is not None}


def _run(
    contract: Contract,
    plain: InferenceSession | None,
    graph: InferenceSession,
    frozen: Sequence[int],
) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """Feeds, what the model makes of them, and what the explained graph does.

    A model whose batch is `frozen` behind an input of any is run in that batch.
    """
    inputs = {value.name: value.shape for value in (plain or graph).get_inputs()}
    fixed = inputs[contract.input.name][:1]
    images = fixed[0] if fixed and isinstance(fixed[0], int) else contract.input.batch or 1
    for count in (images, *frozen):
        if count * math.prod(contract.input.size) > TRIED:
            raise ModelError(
                f"a batch of {count} pictures has more than the {TRIED} pixels that are tried"
            )
        pixels = np.random.default_rng(0).standard_normal(
            (count, 3, *contract.input.size), np.float32
        )
        feeds = {contract.input.name: contract.input.fed(pixels)}
        try:
            expected = {} if plain is None else ask(plain, feeds)
            break
        except ModelError:
            if count == (images, *frozen)[-1]:
                raise
    feeds |= question(contract, count, expected)
    return feeds, expected, ask(graph, feeds)


def _check_changes(
    worst: dict[str, float],
    contract: Contract,
    expected: Mapping[str, Array],
    found: Mapping[str, Array],
) -> None:
    """Takes in what the outputs differ by that the model had before.

    Raises:
        VerificationError: By more than is allowed.
    """
    if not np.isfinite(found[contract.logits]).all():
        raise VerificationError(
            f"{contract.logits} is not finite for a random image: a weight must be NaN, infinite "
            f"or far too large; {WITHOUT}"
        )
    allowed = unchanged(contract.precision)
    for name in sorted(expected.keys() & found.keys()):
        difference = change(found[name], expected[name])
        if not difference <= allowed:
            hint = f"; {OVERFLOW}, or {WITHOUT}" if contract.precision == INT8 else ""
            raise VerificationError(
                f"{name} differs from that of the model by {difference:.2g} of its largest value, "
                f"allowed is {allowed:.2g}; nothing was written{hint}"
            )
        worst[name] = max(worst.get(name, 0.0), difference)


def _check_slopes(worst: dict[str, float], slopes: Slopes) -> None:
    """Takes in what the gradients differ by from finite differences.

    Raises:
        VerificationError: By more than is allowed; with the layer that differs most.
    """
    for name, difference in slopes.differences(each=False):
        if not difference <= slopes.tolerance:
            each = dict(slopes.differences(each=True))
            most = max(each, key=lambda name: np.nan_to_num(each[name], nan=np.inf))
            raise VerificationError(
                f"{most} differs from the finite differences by {each[most]:.2g} of its norm, "
                f"allowed is {slopes.tolerance:.2g}; nothing was written"
            )
        worst[name] = max(worst.get(name, 0.0), difference)


@contextlib.contextmanager
def sessions_of(
    models: Explained, explained: Mapping[str, tuple[ir.Model, Contract]], path: Path
) -> Iterator[dict[str, InferenceSession]]:
    """Sessions of models, by name, and by name and `SHIFTED` of what moves explained ones.

    Args:
        models: Models as they are.
        explained: Graphs with their contracts, for `shifted`.
        path: Large models are written beside it, and are gone afterwards.

    Raises:
        ModelError: onnxruntime cannot run one of them, or it cannot be written.
    """
    for double in (True, False):
        moved = {
            name + SHIFTED: shifted(model, contract, double=double)
            for name, (model, contract) in explained.items()
        }
        every = dataclasses.replace(models, models={**models.models, **moved})
        with _placed(every, path) as places:
            try:
                sessions = {name: opened(place) for name, place in places.items()}
            except ModelError:  # an operator without a kernel in float64
                if not double or not moved:
                    raise
            else:
                yield sessions
                return


@contextlib.contextmanager
def _placed(explained: Explained, path: Path) -> Iterator[dict[str, Path | bytes]]:
    """Where onnxruntime finds the models: the bytes of small ones, or files."""
    models = explained.models
    weights = [v.const_value for m in models.values() for v in m.graph.initializers.values()]
    inside = not any(isinstance(weight, ir.ExternalTensor) for weight in weights)
    if inside and sum(weight.nbytes for weight in weights if weight is not None) < SMALL:
        yield {name: ir.to_proto(model).SerializeToString() for name, model in models.items()}
        return
    with drafted(explained, path) as (files, _):
        yield dict(zip(models, files, strict=True))


def _at_sizes(contract: Contract) -> Iterator[Contract]:
    """For the size of the contract, and for another one where sizes are free."""
    yield contract
    (height, width), multiple = contract.input.size, contract.input.multiple
    if multiple is not None:
        yield contract.at((height + multiple[0], width + 2 * multiple[1]))
