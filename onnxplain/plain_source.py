"""Compares an explained file with the plain model that it was made from. Needs onnx."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxplain.contract import INT8, KEY, Contract
from onnxplain.differences import TOLERANCE, Difference, measure
from onnxplain.errors import InputError, ModelError
from onnxplain.graphs import Explained, load
from onnxplain.graphs.normal.packed import has_packed_weights
from onnxplain.graphs.proof.shifted import differentiated
from onnxplain.graphs.proof.slopes import Slopes, ask, opened, unproven
from onnxplain.graphs.proof.trial import SHIFTED, question, sessions_of, unchanged
from onnxplain.runtime.devices import candidates, open_session
from onnxplain.runtime.model import Model
from onnxplain.steps import Step, counted

__all__ = ["compare"]

Array = NDArray[Any]
Feeds = dict[str, Array]


def compare(
    model: Model,
    contract: Contract,
    source: Path,
    images: Sequence[Array],
    pixels: Sequence[Array],
    tolerance: float,
    step: Step,
) -> tuple[list[Difference], list[str]]:
    """The outputs that both have on every image, and the gradients of the first ones.

    Args:
        model: The explained file or bundle.
        contract: Its contract, for pictures of the size that is run.
        source: The plain model.
        images: What the file takes.
        pixels: The same as normalised pixel values.
        tolerance: What a gradient may be off, relatively; what the model computed before may be off
            by a hundredth of it.
        step: Called with what is going on, how much of it is done, and of how much.

    Returns:
        Differences, an output perhaps several times; and what is to be said besides.

    Raises:
        InputError: The plain model takes other pictures.
        ModelError: onnxruntime cannot run one of them.
    """
    scale = tolerance / TOLERANCE
    # Optimised, they round to other steps, or sum products with packed weights in another order.
    as_is = contract.precision == INT8 or has_packed_weights(load(source))
    try:
        plain = opened(source, optimised=not as_is)
    except ModelError as error:
        raise ModelError(f"{source}: {error}") from None
    (image, *others) = plain.get_inputs()
    if others or (contract.input.layout != "HWC" and image.name != contract.input.name):
        inputs = ", ".join(value.name for value in plain.get_inputs())
        raise InputError(
            f"{source} takes {inputs}, {model.path} {contract.input.name}; expected the model that "
            "it was made from"
        )
    allowed = scale * unchanged(contract.precision)
    notes = []
    if contract.input.layout == "HWC":
        allowed = tolerance
        notes.append("one side does the preprocessing in the graph: a grey level may differ")
    elif model.device != "cpu":
        allowed = max(allowed, tolerance)
    differences: list[Difference] = []
    reasons = []
    for file in model.files:
        graph = load(file)
        own = Contract.from_json(graph.metadata_props[KEY]).at(contract.input.size)
        if model.device == "cpu":
            session = opened(file, optimised=not as_is)
        else:
            session, _ = open_session(file, candidates(model.device, None))
        names = {value.name for value in session.get_outputs()}
        reasons.append(unproven(own))
        pairs = {} if reasons[-1] else differentiated(own)
        batches = _batches(own, image.shape[:1], len(images))
        told = counted(step, f"comparing {file.name}", len(batches) + len(pairs))
        for chosen in batches:
            other = own.input.fed(np.stack([pixels[i] for i in chosen]))
            one = images[chosen[0]] if own.input.layout == "HWC" else other
            try:
                expected = ask(plain, {image.name: other})
            except ModelError as error:
                made_from = f"expected the model that {model.path} was made from"
                raise ModelError(f"{source}: {error}; {made_from}") from None
            feeds = {own.input.name: one, **question(own, len(other), expected)}
            shared = sorted(names & expected.keys())
            found = ask(session, feeds, [own.logits, *shared, *pairs, *pairs.values()])
            differences += [measure(n, found[n], expected[n], allowed) for n in shared]
            told()
            if pairs:  # of the first batch
                made, how = _slopes(graph, own, feeds, found, scale, told)
                differences += made
                notes.append(f"gradients: relative L2 errors, estimated by {how}")
                pairs = {}
    if all(reasons):
        notes.append(f"gradients are not compared: {reasons[-1]}")
    return differences, notes


def _batches(contract: Contract, fixed: list[Any], images: int) -> list[list[int]]:
    """The numbers of the images of each run; the last one fills up a batch."""
    known = fixed and isinstance(fixed[0], int)
    size = fixed[0] if known else contract.input.batch or 1
    return [[min(start + i, images - 1) for i in range(size)] for start in range(0, images, size)]


def _slopes(
    graph: ir.Model,
    contract: Contract,
    feeds: Feeds,
    found: Feeds,
    scale: float,
    told: Callable[[], None],
) -> tuple[list[Difference], str]:
    """The gradients of a graph against finite differences, each of which is `told`, and what these
    are in words."""
    alone = Explained(contract, {}, 0)
    with (
        tempfile.TemporaryDirectory(prefix="onnxplain-") as folder,
        sessions_of(alone, {"graph": (graph, contract)}, Path(folder) / "graph") as sessions,
    ):
        slopes = Slopes(contract, sessions["graph" + SHIFTED], feeds, found)
        measured = {}
        for name, difference in slopes.differences(each=True):
            measured[name] = difference
            told()
    allowed = scale * slopes.tolerance
    differences = []
    for name, difference in measured.items():
        gradient = found[name].astype(np.float64)
        differences.append(
            Difference(
                output=name,
                shape=gradient.shape,
                largest=float(np.abs(gradient).max(initial=0)),
                absolute=difference * float(np.sqrt(np.mean(np.square(gradient)))),
                relative=difference,
                relative_l2=difference,
                spearman=None,
                bounds={"relative_l2": allowed},
                within=difference <= allowed,
            )
        )
    return differences, slopes.kind
