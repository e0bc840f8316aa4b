"""Builds one explained graph: the model's own, its taps, the reverse walks, and the maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxplain.contract import KEY, Contract
from onnxplain.errors import UnsupportedModelError, UnsupportedOperatorError
from onnxplain.graphs.backward.attnlrp import attn_lrp
from onnxplain.graphs.backward.gradient import GRADIENT
from onnxplain.graphs.backward.relevance import ATTRIBUTION, LRP
from onnxplain.graphs.backward.walk import Cotangent, Rule, dense, walk
from onnxplain.graphs.builder import Builder, Tensor, symbolic
from onnxplain.graphs.heatmaps import heatmap
from onnxplain.graphs.interface import drop_unused, emit, free_names, target_last
from onnxplain.graphs.maps import draw
from onnxplain.graphs.normal.channels_last import channels_last
from onnxplain.graphs.seeds import CLASS_WEIGHTS, TARGET, of_probabilities, seeds
from onnxplain.graphs.selection import maps_alone
from onnxplain.graphs.sizes import for_any_size
from onnxplain.graphs.structure.analysis import Structure, analyse
from onnxplain.graphs.structure.read_tokens import token_weights
from onnxplain.graphs.structure.taps import Features, Layout, Tap
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    INPUT_RELEVANCE,
    INPUT_RELEVANCE_ATTNLRP,
    METHODS,
    POOLING,
    TOKEN_WEIGHTS,
    attention_gradient_name,
    attention_name,
    attention_relevance_lrp_name,
    attention_relevance_name,
    heatmap_name,
    map_name,
)

__all__ = ["build"]

Part = Tap | Features
Walk = tuple[Mapping[str, Rule], dict[str, Sequence[Part]]]


def build(model: ir.Model, contract: Contract, *, require_target: bool = False) -> ir.Model:
    """The explained graph of a contract.

    Args:
        model: With channels first, whatever the contract's layout is.
        contract: What the graph is to hold.
        require_target: Whether the class has no default.
    """
    if contract.input.multiple is None:
        explained = _build_for(model, contract, require_target)
    else:
        explained = for_any_size(
            lambda size: _build_for(model, contract.at(size), require_target),
            contract.input.name,
            contract.input.multiple,
        )
    if contract.input.layout == "NHWC":
        channels_last(explained, contract.input.name)
    several = contract.targets > 1  # there are maps alone
    explained.metadata_props[KEY] = (maps_alone(contract) if several else contract).to_json()
    return explained


def _build_for(model: ir.Model, contract: Contract, required: bool) -> ir.Model:
    """The explained graph for pictures of the contract's size."""
    model = model.clone()
    graph = model.graph
    found = analyse(model, contract.logits, contract.input.size)
    _check_size(found, contract)
    _record_shapes(found)
    free_names(graph, {*_order(contract), TARGET, CLASS_WEIGHTS})
    b = Builder(graph, dict(found.facts), found.facts[found.image].shape[0])
    outputs: dict[str, Tensor] = {}
    for i, (layer, taps) in enumerate(zip(contract.layers, found.layers, strict=True)):
        if layer.attention:
            outputs[attention_name(i)] = _joined(b, [b.of(t.value) for t in taps], taps)
    if any(POOLING in names for names in contract.methods.values()):
        assert found.pool is not None
        outputs[POOLING] = _joined(b, [b.of(found.pool.value)], [found.pool])
    if contract.features:
        outputs[FEATURES] = _joined(b, [b.of(f.value) for f in found.features], found.features)
    walks = [(rules, sought) for rules, sought in _walks(contract, found) if sought]
    asked: Sequence[Tensor | None] = [None]
    if walks:
        weighted = contract.class_weights is not None
        asked = seeds(
            b,
            b.of(found.logits),
            targets=contract.targets,
            weighted=weighted,
            required=required,
        )
    if walks and contract.score != "logit":
        logits = b.of(found.logits)
        asked = [
            of_probabilities(b, logits, seed, contract.score) for seed in asked if seed is not None
        ]
    drawn: dict[str, list[Tensor]] = {}
    for seed in asked:
        values = dict(outputs)
        if seed is not None:
            for rules, sought in walks:
                values |= _walked(b, contract, found, seed, rules, sought)
        for method, options in contract.maps.items():
            drawn.setdefault(method, []).append(draw(b, contract, values, method, options))
    outputs = _maps(b, contract, drawn) | (values if contract.targets == 1 else {})
    for name in sorted(outputs, key=_order(contract).index):
        emit(b, name, outputs[name])
    target_last(graph)
    drop_unused(model)
    # Half of what is added would be shapes of inner values, which can be inferred, and names of
    # nodes whose outputs have names.
    for node in graph:
        added = [value for value in node.outputs if value not in found.facts]
        if len(added) == len(node.outputs):
            node.name = ""
        for value in added:
            if not value.is_graph_output():
                value.type = value.shape = None
    model.ir_version = max(model.ir_version, 4)  # before, an initializer had to be an input
    for domain in [domain for domain in model.opset_imports if domain != ""]:
        del model.opset_imports[domain]
    return model


def _walked(
    b: Builder,
    contract: Contract,
    found: Structure,
    seed: Tensor,
    rules: Mapping[str, Rule],
    sought: Mapping[str, Sequence[Part]],
) -> dict[str, Tensor]:
    """The outputs of one walk."""
    values = {part.value for parts in sought.values() for part in parts}
    try:
        arrived = walk(b, {found.logits: Cotangent(seed)}, values, rules)
    except UnsupportedOperatorError as error:
        if not found.layers:
            raise
        readout = contract.readout
        others = [method for method, n in METHODS.items() if not n.takes_target(readout)]
        raise UnsupportedOperatorError(
            f"{error}; without gradients there are the methods {', '.join(others)}"
        ) from None
    outputs = {}
    for name, parts in sought.items():
        for part in parts:
            if part.value not in arrived:
                raise UnsupportedModelError(f"the logits do not depend on {part.value.name}")
        results = [dense(b, arrived[part.value]) for part in parts]
        if name == INPUT_RELEVANCE_ATTNLRP:  # this table carries relevance / value
            results = [b.mul(r, b.of(p.value)) for r, p in zip(results, parts, strict=True)]
        outputs[name] = _joined(b, results, parts)
        if name == TOKEN_WEIGHTS:
            outputs[name] = token_weights(b, outputs[name])
    return outputs


def _maps(b: Builder, contract: Contract, drawn: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """The outputs with finished maps, made of the map of each class that is asked for."""
    outputs = {}
    for method, maps in drawn.items():
        several = METHODS[method].takes_target(contract.readout)
        kinds = {map_name(method): maps}
        if contract.heatmaps:
            kinds[heatmap_name(method)] = [heatmap(b, contract, method, one) for one in maps]
        for name, tensors in kinds.items():
            if contract.targets > 1 and several:
                outputs[name] = b.concat([b.unsqueeze(tensor, 1) for tensor in tensors], 1)
            else:
                outputs[name] = tensors[0]
    return outputs


def _check_size(found: Structure, contract: Contract) -> None:
    """Refuses a graph for any size that is not at this one what the contract, of another, says.

    Raises:
        UnsupportedModelError: The grid, or the tokens that the head reads, do not follow the size.
    """
    if contract.input.multiple is None:
        return  # whatever the caller says overrides what is found
    size = f"{found.size[0]}x{found.size[1]} pixels"
    if found.tokens is not None and found.tokens.grid != contract.tokens.grid:
        raise UnsupportedModelError(
            f"a grid of {found.tokens.grid} at {size}; expected {contract.tokens.grid}, as many as "
            "at other sizes; export the model for one size"
        )
    read, expected = found.readout, contract.readout
    if read is None or expected is None or read.kind != expected.kind:
        return
    if read.ranges != expected.ranges:
        raise UnsupportedModelError(
            f"the head reads tokens {read.ranges} at {size}; expected {expected.ranges}, which "
            "follow the grid; export the model for one size"
        )


def _walks(contract: Contract, found: Structure) -> list[Walk]:
    """The walks that the outputs of a contract take: a table, and what to find by output name."""
    layers = list(enumerate(zip(contract.layers, found.layers, strict=True)))
    gradient: dict[str, Sequence[Part]]
    gradient = {attention_gradient_name(i): taps for i, (a, taps) in layers if a.gradient}
    if contract.features_gradient:
        gradient[FEATURES_GRADIENT] = found.features
    if any(TOKEN_WEIGHTS in names for names in contract.methods.values()):
        assert found.read is not None
        gradient[TOKEN_WEIGHTS] = [found.read]
    relevance: dict[str, Sequence[Part]]
    relevance = {attention_relevance_name(i): taps for i, (a, taps) in layers if a.relevance}
    plain: dict[str, Sequence[Part]]
    plain = {attention_relevance_lrp_name(i): t for i, (a, t) in layers if a.relevance_lrp}
    shape = found.facts[found.image].shape
    pixels = [Features(found.image, Layout(shape, tuple(range(len(shape))), shape))]
    if contract.input_relevance:
        plain[INPUT_RELEVANCE] = pixels
    attnlrp: dict[str, Sequence[Part]] = {}
    if contract.input_relevance_attnlrp:
        attnlrp[INPUT_RELEVANCE_ATTNLRP] = pixels
    return [
        (GRADIENT, gradient),
        (ATTRIBUTION, relevance),
        (LRP, plain),
        (attn_lrp(**contract.rules.get("attnlrp", {})), attnlrp),
    ]


def _order(contract: Contract) -> list[str]:
    """Names of all outputs in graph order: those of the layers by kind, then the others."""
    layers = range(len(contract.layers))
    return [
        *map(attention_name, layers),
        *map(attention_gradient_name, layers),
        *map(attention_relevance_name, layers),
        *map(attention_relevance_lrp_name, layers),
        POOLING,
        TOKEN_WEIGHTS,
        FEATURES,
        FEATURES_GRADIENT,
        INPUT_RELEVANCE,
        INPUT_RELEVANCE_ATTNLRP,
        *map(map_name, METHODS),
        *map(heatmap_name, METHODS),
    ]


def _record_shapes(found: Structure) -> None:
    """Replaces the shapes that the exporter recorded, which need not be right, by those found."""
    for value, fact in found.facts.items():
        if value.shape is not None and not value.is_initializer():
            value.shape = symbolic(fact.shape)


def _joined(b: Builder, tensors: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
    """The tensors of an output with the axes that the contract promises: the heads of attentions
    side by side, or the features of each token, one after the other."""
    layouts = [part.layout for part in parts]
    turned = [
        b.reshape(b.transpose(b.reshape(x, layout.split), layout.perm), layout.shape)
        for x, layout in zip(tensors, layouts, strict=True)
    ]
    return b.concat(turned, 1 if len(layouts[0].shape) == 4 else 2)
