"""Facts of every value of a graph before it runs: element type, shape, constant value.

Files come from many exporters: some record no shapes, some freeze them, some compute the targets of
Reshape and Expand with chains of Shape, Gather and Concat. So nothing recorded is believed. The
image input is bound to two batch sizes in turn, every node's output shapes are inferred from
concrete input shapes, and integer chains are computed. A size that differs between the two is a
multiple of the batch; everything else is static.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from onnxplain.errors import ModelError, UnsupportedModelError
from onnxplain.graphs.values.facts import Batch, Dim, Facts, of_stored, of_tensor
from onnxplain.graphs.values.visit import visit

__all__ = [
    "COMPUTED_BYTES",
    "PROBES",
    "bound",
    "frozen_batches",
    "infer",
    "merge",
    "room_behind",
    "visit_all",
]

PROBES = (7, 11)  # two batch sizes; neither is 1, which would look like a broadcast
FROZEN = 16  # batch sizes that are tried
COMPUTED_BYTES = 2**30  # all together, for one batch size


def infer(
    model: ir.Model, image: ir.Value, size: tuple[int, int] | None = None
) -> dict[ir.Value, Facts]:
    """Facts of every value of the main graph.

    Args:
        model: Model with plain operators and no subgraphs.
        image: The image input. A batch size frozen in the file stays static, also where the input
            promises any batch and the nodes behind it work for one of `frozen_batches` only.
        size: Height and width that the image is bound to; None: those that it states.

    Raises:
        ModelError: A node contradicts its operator's definition, for whatever batch.
        UnsupportedModelError: A shape depends on more than the batch size.
    """
    batch = image.shape[0] if image.shape is not None else None
    if isinstance(batch, int):
        return _propagate(model, image, batch, size)
    try:
        runs = [_propagate(model, image, probe, size) for probe in PROBES]
    except UnsupportedModelError:
        raise
    except ModelError as error:
        tried = frozen_batches(model)
        for frozen in tried:
            with contextlib.suppress(ModelError):
                facts = _propagate(model, image, frozen, size)
                # Else one image is broadcast to what the exporter computed for several.
                if any(facts[v].shape[:1] in ((), (frozen,)) for v in model.graph.outputs):
                    return facts
        if tried == [1]:  # nothing says that it is about the batch
            raise error
        raise ModelError(
            f"{error} (in a batch of {PROBES[0]}, and none of {', '.join(map(str, tried))} fits; "
            "export it with a batch of any size, or with its size as the input's first axis)"
        ) from None
    return {value: merge(value, *(run[value] for run in runs)) for value in runs[0]}


def frozen_batches(model: ir.Model) -> list[int]:
    """Batch sizes that an exporter may have frozen behind an input of any batch: 1, and with what
    the targets of Reshape and Expand, and constants in a Concat, begin."""
    found = {1}
    for node in model.graph:
        targets = node.op_type in ("Reshape", "Expand")
        for value in node.inputs[1:2] if targets else node.inputs:
            stored = None if value is None else of_stored(value)
            if stored is None:
                continue
            if targets and stored.constant is not None and stored.constant.size:
                found.add(int(stored.constant.reshape(-1)[0]))
            elif (
                node.op_type == "Concat"
                and len(stored.shape) > 1
                and isinstance(stored.shape[0], int)
            ):
                found.add(stored.shape[0])
    return sorted(size for size in found if size > 0)[:FROZEN]


def merge(value: ir.Value, first: Facts, second: Facts) -> Facts:
    """What both batch sizes of `PROBES` agree on."""
    if len(first.shape) != len(second.shape):
        raise UnsupportedModelError(f"the rank of {value.name} changes with the batch size")
    shape: list[Dim] = []
    for one, other in zip(first.shape, second.shape, strict=True):
        assert isinstance(one, int) and isinstance(other, int)
        if one == other:
            shape.append(one)
            continue
        factor = one // PROBES[0]
        if (factor * PROBES[0], factor * PROBES[1]) != (one, other):
            raise UnsupportedModelError(
                f"{value.name} has size {one} for batch {PROBES[0]} and {other} for batch "
                f"{PROBES[1]}; expected a multiple of the batch"
            )
        shape.append(Batch(factor))
    same = (
        first.constant is not None
        and second.constant is not None
        and np.array_equal(first.constant, second.constant)
    )
    counts = _counts(first.constant) and _counts(second.constant)
    return Facts(tuple(shape), first.dtype, first.constant if same else None, counts)


def _counts(array: np.ndarray | None) -> bool:
    return (
        array is not None
        and array.dtype == np.int64
        and np.array_equal(array.reshape(-1), np.arange(array.size))
    )


def _propagate(
    model: ir.Model, image: ir.Value, batch: int, size: tuple[int, int] | None
) -> dict[ir.Value, Facts]:
    """Facts of every value with batch and picture bound to sizes, so that all are numbers."""
    facts = bound(model, image, batch, size)
    visit_all(model.graph, facts, model.opset_imports)
    return facts


def visit_all(
    nodes: Iterable[ir.Node], facts: dict[ir.Value, Facts], versions: dict[str, int]
) -> None:
    """Adds the facts of the outputs of nodes in order, in bounded memory."""
    room = COMPUTED_BYTES
    for node in nodes:
        visit(node, facts, versions)
        room = room_behind(node, facts, room)


def room_behind(node: ir.Node, facts: Mapping[ir.Value, Facts], room: int) -> int:
    """How many bytes of constants may be computed behind a node, of those before it."""
    made = (facts[value].constant for value in node.outputs)
    room -= sum(array.nbytes for array in made if array is not None)
    if room < 0:
        raise UnsupportedModelError(
            f"the constants that are computed up to node {node.name} take more than "
            f"{COMPUTED_BYTES} bytes; expected a graph that computes on the image"
        )
    return room


def bound(
    model: ir.Model, image: ir.Value, batch: int, size: tuple[int, int] | None
) -> dict[ir.Value, Facts]:
    """Facts of inputs and weights, with batch and picture bound to sizes."""
    facts: dict[ir.Value, Facts] = {}
    for value in model.graph.inputs:
        dims = list(value.shape or ())
        if value is image or (dims and not isinstance(dims[0], int)):
            dims[0] = batch
        if value is image and size is not None:
            dims[2:] = size
        if value.dtype is None or not all(isinstance(d, int) for d in dims):
            raise UnsupportedModelError(
                f"input {value.name} has shape {value.shape}; expected fixed sizes after the batch"
            )
        facts[value] = Facts(tuple(d for d in dims if isinstance(d, int)), value.dtype)
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            facts[value] = of_tensor(value.const_value)
    return facts
