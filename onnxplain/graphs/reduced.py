"""An explained file cut down to some of its methods, or to the logits alone.

onnxruntime computes every output of a graph however few are fetched. Who runs a model a hundred
times for each map needs a graph that holds nothing else.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from onnxplain.contract import BUNDLE_FILE, KEY, Contract
from onnxplain.errors import ContractError, InputError
from onnxplain.graphs.explained import SINGLE, Explained
from onnxplain.graphs.files.reading import load
from onnxplain.graphs.files.writing import check_destination, refuse_itself, save
from onnxplain.graphs.interface import drop_outputs
from onnxplain.graphs.seeds import CLASS_WEIGHTS, TARGET
from onnxplain.graphs.selection import maps_alone, with_methods
from onnxplain.outputs import ALIASES, GRAPH_KINDS, METHODS, heatmap_name, map_name

__all__ = ["drop_methods", "reduce_to", "reduced"]


def reduce_to(
    source: str | os.PathLike[str], path: str | os.PathLike[str], methods: Iterable[str]
) -> None:
    """Writes an explained model that serves some methods of another and computes nothing else.

    Args:
        source: An explained file or a bundle folder.
        path: Where the result goes: a file, or, where a bundle serves the methods by several graphs
            together, a bundle of these alone. `onnxplain.Explainer` opens either.
        methods: Names of methods that the source serves; none: the logits alone.

    Raises:
        ModelError: The source is missing, damaged or not ONNX, or the result cannot be written.
        ContractError: The source is not an explained model.
        InputError: A method that the source does not serve, or a path that cannot be written.
    """
    refuse_itself(source, path)
    explained = reduced(source, methods)
    check_destination(Path(path), bundle=SINGLE not in explained.models)
    save(explained, path)


def reduced(source: str | os.PathLike[str], methods: Iterable[str] | None) -> Explained:
    """What `reduce_to` writes, in memory; None: every method that the source serves.

    Of a bundle as few graphs as serve the methods together are loaded, and their weights once.

    Raises:
        ModelError, ContractError, InputError: As in `reduce_to`.
    """
    path = Path(source)
    if path.is_dir():
        whole = Contract.of_bundle(path)
        chosen = _served(whole, methods, path)
        plan = _cheapest_graphs(whole, chosen, path)
        assert whole.graphs is not None
        models = {kind: load(path / Path(whole.graphs[kind]).name) for kind in plan}
        _share_weights(models.values())
    else:
        models = {SINGLE: load(path)}
        whole = _contract_of(models[SINGLE], path)
        chosen = _served(whole, methods, path)
        plan = {SINGLE: chosen}
    weights = [v.const_value for m in models.values() for v in m.graph.initializers.values()]
    source_bytes = sum({id(t): t.nbytes for t in weights if t is not None}.values())
    for kind, model in models.items():
        _contract_of(model, path)
        drop_methods(model, plan[kind])
    whole = _selected(whole, chosen)
    if len(models) == 1:
        (model,) = models.values()
        whole, models = Contract.from_json(model.metadata_props[KEY]), {SINGLE: model}
    else:
        whole = dataclasses.replace(whole, graphs={kind: f"{kind}.onnx" for kind in models})
    return Explained(whole, models, source_bytes)


def drop_methods(model: ir.Model, kept: tuple[str, ...]) -> None:
    """Removes from an explained graph what it computes for other methods than those of `kept`."""
    contract = _selected(Contract.from_json(model.metadata_props[KEY]), kept)
    names = {contract.logits, *(name for reads in contract.methods.values() for name in reads)}
    names |= {map_name(method) for method in contract.maps}
    names |= {heatmap_name(method) for method in contract.maps if contract.heatmaps}
    drop_outputs(model, lambda name: name not in names)
    for value in [v for v in model.graph.inputs if v.name in (TARGET, CLASS_WEIGHTS)]:
        if not value.uses():
            model.graph.inputs.remove(value)
            model.graph.initializers.pop(str(value.name), None)
    model.metadata_props[KEY] = contract.to_json()


def _selected(contract: Contract, methods: tuple[str, ...]) -> Contract:
    """The contract of the same graph with these methods alone."""
    alone = all(contract.methods[method] == (map_name(method),) for method in methods)
    selected = with_methods(contract, methods)
    return maps_alone(selected) if alone and methods else selected


def _served(contract: Contract, methods: Iterable[str] | None, where: Path) -> tuple[str, ...]:
    """The methods by their own names, cheapest first."""
    have = [name for name in METHODS if name in contract.methods]
    if methods is None:
        return tuple(have)
    if isinstance(methods, str):
        raise InputError(f"methods {methods!r}; expected a list of names")
    asked = [ALIASES.get(method, method) for method in methods]
    if others := [method for method in asked if method not in have]:
        raise InputError(f"{where}: no method {others[0]!r}; it has {', '.join(have) or 'none'}")
    return tuple(name for name in have if name in asked)


def _contract_of(model: ir.Model, path: Path) -> Contract:
    if KEY not in model.metadata_props:
        raise ContractError(
            f"{path}: ONNX, but not made by onnxplain; run: onnxplain instrument {path} "
            "-o explained.onnx"
        )
    return Contract.from_json(model.metadata_props[KEY], where=str(path))


def _cheapest_graphs(
    contract: Contract, methods: tuple[str, ...], folder: Path
) -> dict[str, tuple[str, ...]]:
    """The kinds of graphs that serve the methods together, and what each one serves of them."""
    kinds = [kind for kind in GRAPH_KINDS if kind in (contract.graphs or {})]
    plan: dict[str, tuple[str, ...]] = {}
    left = set(methods)
    while left or not plan:
        # Of those that serve as many, the first is the cheapest.
        kind = max(kinds, key=lambda kind: len(left & set(GRAPH_KINDS[kind])), default=None)
        if kind is None or kind in plan:
            raise ContractError(
                f"{folder / BUNDLE_FILE}: names no graph for {min(left, default='the logits')}; "
                "make the bundle again"
            )
        plan[kind] = tuple(method for method in methods if method in GRAPH_KINDS[kind])
        left -= set(plan[kind])
    return plan


def _share_weights(models: Iterable[ir.Model]) -> None:
    """Makes one tensor of the weights that the graphs of a bundle read from the same place."""
    shared: dict[tuple[object, ...], ir.TensorProtocol] = {}
    for model in models:
        for value in model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                place = (tensor.path, tensor.offset, tensor.length)
                value.const_value = shared.setdefault(place, tensor)
