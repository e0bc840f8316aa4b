"""An explained model with the weights behind a depth replaced.

The cascading randomisation of Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018,
section 3: weights are replaced from the logits towards the picture, a level at a time. A map that
stays the same does not depend on what the model has learned.

The weights are what the logits are computed from. The walks back read the same tensors and hold
nothing else that was computed from them, so the gradients and relevance of the result are those of
the model with the replaced weights. (A relevance rule chose between two forms of one formula by how
many zeros a weight had; they differ by rounding.)

*What is a weight.* A constant in float32, float16 or bfloat16 that the logits depend on, with three
different values, all finite: so neither a scale, nor a mask, nor a size. What is applied to the
picture before the first product with such a constant (mean, std) is preprocessing, and the scales
of a Resize are none either. Tables of positions are weights: a file does not say which were
learned.

*What replaces it.* The same values in another order, drawn anew for each tensor from the seed and
the tensor's name. So every value stays in its domain (a variance positive) and every layer keeps
its scale; and a level has the replacements of those before.

*How deep it lies.* By how many layers of attention depend on it; those side by side are one. With L
layers there are L + 1 levels: what no attention depends on, what only the last one depends on too,
..., everything. The query and key of a layer belong to its attention, its value vectors, where
they have a weight of their own, come behind it.

In a model without such layers the products with a weight are counted instead, from the logits, and
cut into at most `MOST_LEVELS` levels of as many each. Another weight counts as the product that
is computed next after it, and with the first level where there is none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from onnxplain.contract import KEY, Contract
from onnxplain.errors import InputError, UnsupportedModelError
from onnxplain.graphs.explained import SINGLE, Explained
from onnxplain.graphs.files.writing import check_destination, refuse_itself, save
from onnxplain.graphs.interface import drop_unused
from onnxplain.graphs.normal.channels_last import channels_first
from onnxplain.graphs.reduced import drop_methods, reduced
from onnxplain.graphs.structure.analysis import analyse
from onnxplain.graphs.values.uses import sources

__all__ = ["MOST_LEVELS", "levels", "randomise"]

MOST_LEVELS = 8  # of a model without attention layers
PRODUCTS = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"})
SIZES = frozenset({"Shape", "Size"})  # operators that read no values
FLOATS = frozenset({ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.FLOAT16})
LEAST_LIFTED = 3  # numbers in a Constant node; fewer are no weight

Cascade = list[tuple[str, set[str]]]


def levels(source: str | os.PathLike[str]) -> list[str]:
    """What has been replaced at level 1, 2, ... of the cascade, in words.

    `behind attention 5` is every weight that the attention of layer 5 does not depend on, but what
    comes after it does; `last 7 of 54 products` are that many, counted from the logits; the last
    level is `all`.

    Args:
        source: An explained file or a bundle folder.

    Raises:
        ModelError, ContractError: The source is missing, damaged, or not an explained model.
        UnsupportedModelError: It has no weights in floating point.
    """
    return [name for name, _ in _cascade(_lifted(reduced(source, ())))]


def randomise(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    level: int,
    *,
    seed: int,
    methods: Iterable[str] | None = None,
) -> None:
    """Writes an explained model with the weights of a level, and of those before it, permuted.

    Args:
        source: An explained file or a bundle folder.
        path: Where the result goes: a file, or, where a bundle serves the methods by several graphs
            together, a bundle, whose graphs have the same weights.
        level: From 1, the weights next to the logits, to `len(levels(source))`, all of them.
        seed: Not negative. With the same seed a weight is permuted alike at every level.
        methods: Names of the methods that the result serves; none: the logits alone; None: all.

    Raises:
        ModelError: The source is missing, damaged or not ONNX, or the result cannot be written.
        ContractError: The source is not an explained model.
        UnsupportedModelError: It has no weights in floating point.
        InputError: No such level or method, a negative seed, or a path that cannot be written.
    """
    if not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed {seed!r}; expected a whole number from 0 on")
    refuse_itself(source, path)
    explained = _lifted(reduced(source, methods))
    check_destination(Path(path), bundle=SINGLE not in explained.models)
    cascade = _cascade(explained)
    if not isinstance(level, int) or not 1 <= level <= len(cascade):
        raise InputError(f"level {level!r}; expected 1 to {len(cascade)}")
    name, _ = cascade[level - 1]
    replaced = set().union(*(weights for _, weights in cascade[:level]))
    permuted: dict[int, ir.TensorProtocol] = {}  # the graphs of a bundle share their weights
    for model in explained.models.values():
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if value.name in replaced and tensor is not None:
                if id(tensor) not in permuted:
                    permuted[id(tensor)] = _permuted(tensor, str(value.name), seed)
                value.const_value = permuted[id(tensor)]

    def told(contract: Contract) -> Contract:
        source = dataclasses.replace(
            contract.source,
            name=f"{contract.source.name}, randomised: {name}, seed {seed}",
            weights_sha256="",
        )
        return dataclasses.replace(contract, source=source, verification=None)

    save(explained.with_contracts(told), path)


def _permuted(tensor: ir.TensorProtocol, name: str, seed: int) -> ir.TensorProtocol:
    """The values of a tensor in another order; made when it is written, and not kept."""
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u4").tolist()

    def make() -> ir.TensorProtocol:
        rng = np.random.default_rng([seed, *words])
        array = tensor.numpy()
        return ir.tensor(rng.permutation(array.reshape(-1)).reshape(array.shape), name=name)

    return ir.LazyTensor(make, dtype=tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name)


def _lifted(explained: Explained) -> Explained:
    """The same graphs with the tensors of their Constant nodes among the other weights."""
    for model in explained.models.values():
        LiftConstantsToInitializersPass(size_limit=LEAST_LIFTED)(model)
    return explained


def _cascade(explained: Explained) -> Cascade:
    """The levels: their names, and the names of the weights that each one adds."""
    model = next(iter(explained.models.values())).clone()
    drop_methods(model, ())
    contract = Contract.from_json(model.metadata_props[KEY])
    if contract.input.layout == "HWC":
        _cut_preprocessing(model, contract)
    else:
        model, _ = channels_first(model, contract.input.layout)
    graph = model.graph
    image = next(v for v in graph.inputs if v.name == contract.input.name)
    carried = _carried(graph)
    weights = _weights(graph, image, carried)
    if not weights:
        raise UnsupportedModelError(
            "no weights to randomise: expected products with constants in float32, float16 or "
            "bfloat16"
        )
    if not contract.layers:
        return _by_products(graph, carried, weights)
    found = analyse(model, contract.logits, contract.input.size)
    behind = [set().union(*(sources(tap.value) for tap in layer)) for layer in found.layers]
    count = len(behind)
    names = [*(f"behind attention {i}" for i in reversed(range(count))), "all"]
    depth = {weight: sum(weight in layer for layer in behind) for weight in weights}
    return [
        (name, {str(weight.name) for weight in weights if depth[weight] == i})
        for i, name in enumerate(names)
    ]


def _cut_preprocessing(model: ir.Model, contract: Contract) -> None:
    """Makes the pixel values that the graph computes of a picture its input instead."""
    graph = model.graph
    made = [v for node in graph for v in node.outputs if str(v.name).startswith("preprocess/")]
    pixels = ir.Value(
        name=contract.input.name,
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape([1, 3, *contract.input.size]),
    )
    made[-1].replace_all_uses_with(pixels)
    places = [i for i, v in enumerate(graph.inputs) if v.name == contract.input.name]
    graph.inputs[places[0]] = pixels
    drop_unused(model)


def _carried(graph: ir.Graph) -> dict[ir.Value, set[ir.Value]]:
    """The weights that each constant value is computed from: cast, transposed, expanded."""
    carried = {v: {v} for v in graph.initializers.values() if _may_be_weight(v)}
    moving = set(graph.inputs)
    for node in graph:
        if node.op_type in SIZES:
            continue
        if any(v in moving for v in node.inputs):
            moving.update(node.outputs)
        elif found := set().union(*_operands(node, carried)):
            carried.update(dict.fromkeys(node.outputs, found))
    return carried


def _may_be_weight(value: ir.Value) -> bool:
    """Whether it is a tensor of floats, all finite, with three different values at least."""
    tensor = value.const_value
    if tensor is None or value.is_graph_input() or tensor.dtype not in FLOATS:
        return False
    others = array = tensor.numpy().reshape(-1)
    for _ in range(2):
        others = others[others != others[0]] if others.size else others
    return bool(others.size and np.isfinite(array).all())


def _weights(
    graph: ir.Graph, image: ir.Value, carried: dict[ir.Value, set[ir.Value]]
) -> set[ir.Value]:
    """The constants that are weights."""
    found: set[ir.Value] = set()
    applied: set[ir.Value] = set()  # to the picture before the first product
    raw = {image}
    for node in graph:
        if node.op_type in SIZES:
            continue
        own = set().union(*_operands(node, carried))
        if any(v in raw for v in node.inputs) and not (node.op_type in PRODUCTS and own):
            raw.update(node.outputs)
            applied |= own
        else:
            found |= own
    return found - applied


def _operands(node: ir.Node, carried: dict[ir.Value, set[ir.Value]]) -> Iterator[set[ir.Value]]:
    """The constants that each operand of a node carries; of a Resize, not its scales."""
    values = node.inputs[:1] if node.op_type == "Resize" else node.inputs
    return (carried[v] for v in values if v is not None and v in carried)


def _by_products(
    graph: ir.Graph, carried: dict[ir.Value, set[ir.Value]], weights: set[ir.Value]
) -> Cascade:
    """Levels of about as many products each, counted from the logits."""
    products = [
        node
        for node in reversed(graph)
        if node.op_type in PRODUCTS and any(own & weights for own in _operands(node, carried))
    ]
    rank = {node: i for i, node in enumerate(products)}
    after: dict[ir.Value, int] = {}  # the product that is computed next of what a value goes into
    of: dict[ir.Value, int] = dict.fromkeys(weights, 0)
    for node in reversed(graph):
        here = rank.get(node, max((after.get(v, 0) for v in node.outputs), default=0))
        for value in node.inputs:
            if value is not None:
                after[value] = max(after.get(value, 0), here)
        for weight in set().union(*_operands(node, carried)) & weights:
            of[weight] = max(of[weight], here)
    count, total = min(MOST_LEVELS, len(products)), len(products)
    cascade: Cascade = []
    for level in range(count):
        ranks = range(level * total // count, (level + 1) * total // count)
        name = "all" if level == count - 1 else f"last {ranks.stop} of {total} products"
        cascade.append((name, {str(w.name) for w in weights if of[w] in ranks}))
    return cascade
