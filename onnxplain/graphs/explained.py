"""Builds the explained graph: the model's own graph, its taps as outputs, and the reverse walk."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxplain.contract import KEY, Contract, Source
from onnxplain.errors import InputError, UnsupportedModelError, UnsupportedOperatorError
from onnxplain.graphs.attnlrp import attn_lrp
from onnxplain.graphs.builder import Builder, Tensor, symbolic
from onnxplain.graphs.choice import served
from onnxplain.graphs.draft import FOUND, draft
from onnxplain.graphs.gradient import GRADIENT
from onnxplain.graphs.interface import (
    TARGET,
    add_target,
    drop_outputs,
    emit,
    free_names,
    one_hot,
    target_last,
)
from onnxplain.graphs.maps import draw, options_of
from onnxplain.graphs.read_tokens import token_weights
from onnxplain.graphs.relevance import ATTRIBUTION, LRP
from onnxplain.graphs.selection import maps_alone, with_methods
from onnxplain.graphs.shapes import Facts
from onnxplain.graphs.sizes import for_any_size
from onnxplain.graphs.structure import Structure, analyse
from onnxplain.graphs.taps import Features, Layout, Tap
from onnxplain.graphs.walk import Cotangent, Rule, dense, walk
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    GRAPH_KINDS,
    INPUT_RELEVANCE,
    INPUT_RELEVANCE_ATTNLRP,
    METHODS,
    POOLING,
    TOKEN_WEIGHTS,
    attention_gradient_name,
    attention_name,
    attention_relevance_lrp_name,
    attention_relevance_name,
    map_name,
)

__all__ = ["SINGLE", "Explained", "explain"]

SINGLE = "single"
OUTPUTS = ("taps", "maps", "both")
PROBABILITIES = frozenset({"LogSoftmax", "Sigmoid", "Softmax"})
Part = Tap | Features


@dataclass(frozen=True)
class Explained:
    """An explained model in memory.

    Attributes:
        contract: The contract of the whole: every method that one of the graphs serves.
        models: The graphs by kind: `SINGLE`, or those of `GRAPH_KINDS` for a bundle. Each has its
            own contract in its metadata.
        source_bytes: Size of the weights of the model before it was explained.
        kept_float32: Names of the weights that were to be float16 and are not.
    """

    contract: Contract
    models: dict[str, ir.Model]
    source_bytes: int
    kept_float32: tuple[str, ...] = ()

    def with_verification(self, verification: Mapping[str, Any]) -> Explained:
        """The same graphs, with the measured differences in every contract."""
        return self.with_contracts(
            lambda contract: dataclasses.replace(contract, verification=dict(verification))
        )

    def maps_alone(self) -> Explained:
        """The same graphs without the outputs that their maps are made of."""
        made_of = {name for names in self.contract.methods.values() for name in names}
        for model in self.models.values():
            drop_outputs(model, lambda name: name in made_of)
        return self.with_contracts(maps_alone)

    def with_contracts(self, change: Callable[[Contract], Contract]) -> Explained:
        """The same graphs with every contract, their own and that of the whole, changed."""
        for model in self.models.values():
            own = Contract.from_json(model.metadata_props[KEY])
            model.metadata_props[KEY] = change(own).to_json()
        return dataclasses.replace(self, contract=change(self.contract))


def explain(
    model: ir.Model,
    *,
    bundle: bool = False,
    methods: Iterable[str] | None = None,
    contract: Mapping[str, Any] | None = None,
    labels: Sequence[str] | str | Path | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    source: Source | None = None,
    gamma: float = 0.0,
    outputs: str = "taps",
    options: Mapping[str, Any] | None = None,
) -> Explained:
    """Adds to a model the outputs that the methods read, and the contract that names them.

    Args:
        model: A plain ViT with global attention, or, for Grad-CAM alone, any classifier with a last
            feature map; opset 17 to 22. It is left as it is. The plain graph of a bundle brings its
            preprocessing, labels and token names along.
        bundle: One graph per kind of method instead of one graph for all.
        methods: Names of `METHODS`; None: every one that the architecture supports.
        contract: Fields of the contract that override what is found; see `instrument`.
        labels: Class names in order, or a text file with one per line.
        preprocessing: Fields of `ImageInput`: mean, std, crop_pct, crop_mode, interpolation.
        source: Where the model came from; None: the digest of its weights alone.
        gamma: How much more `attnlrp` counts contributions of the sign of the output; 0 is the
            epsilon rule. Recorded in the contract.
        outputs: "taps", what the methods read; "maps", their finished maps; or "both".
        options: Of the maps: head_fusion, discard_ratio, start_layer. Recorded in the contract.

    Raises:
        UnsupportedModelError: The model, or a method on it, cannot be explained, with the reason.
        InputError: An unknown method or field, labels that do not fit.
    """
    if not 0 <= gamma < math.inf:
        raise InputError(f"gamma {gamma}; expected a number from 0 on")
    if outputs not in OUTPUTS:
        raise InputError(f"outputs {outputs!r}; expected one of {', '.join(OUTPUTS)}")
    known = _known(model)
    overrides = {**known, **(contract or {})}
    logits = overrides.pop("logits", None)
    size = _size(overrides)
    found = analyse(model, logits, size)
    if logits is None and (inner := _before_probabilities(found)) is not None:
        model, logits = _with_logits(model, inner, found.facts[inner])
        found = analyse(model, logits, size)
    base = draft(
        model,
        found,
        source=source,
        preprocessing=preprocessing,
        labels=labels,
        overrides=overrides,
    )
    chosen = served(found, base.readout, methods)
    if gamma and "attnlrp" in chosen:
        base = dataclasses.replace(base, rules={"attnlrp": {"gamma": gamma}})
    if outputs != "taps":
        maps = {method: options_of(method, options or {}, len(base.layers)) for method in chosen}
        base = dataclasses.replace(base, maps=maps)
    elif options:
        raise InputError(f"{', '.join(options)} without maps; expected outputs maps or both")
    whole = with_methods(base, chosen)
    weights = [value.const_value for value in model.graph.initializers.values()]
    source_bytes = sum(tensor.nbytes for tensor in weights if tensor is not None)
    models: dict[str, ir.Model] = {}
    if not bundle:
        models[SINGLE] = _build(model, whole)
    else:
        seen = set()
        for kind, methods_of_kind in GRAPH_KINDS.items():
            own = tuple(method for method in chosen if method in methods_of_kind)
            if own not in seen and (own or kind == "plain"):
                seen.add(own)
                models[kind] = _build(model, with_methods(base, own))
        graphs = {kind: f"{kind}.onnx" for kind in models}
        whole = dataclasses.replace(whole, graphs=graphs)
    explained = Explained(whole, models, source_bytes)
    return explained.maps_alone() if outputs == "maps" else explained


def _size(overrides: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size that pictures are brought to, as far as it is given."""
    given = (overrides.get("input") or {}).get("size")
    if given is None:
        return None
    try:
        height, width = map(operator.index, given)
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        raise InputError(f"input size {given!r}; expected [height, width] in pixels")
    return height, width


def _before_probabilities(found: Structure) -> ir.Value | None:
    """What a Softmax or Sigmoid at the very end makes probabilities of."""
    node = found.logits.producer()
    if node is None or node.domain != "" or node.op_type not in PROBABILITIES:
        return None
    inner = node.inputs[0]
    return inner if inner is not None and inner.producer() is not None else None


def _with_logits(model: ir.Model, inner: ir.Value, fact: Facts) -> tuple[ir.Model, str]:
    """A copy of the model with the value as one more output, and the name of that output."""
    model = model.clone()
    values = {value.name: value for node in model.graph for value in node.outputs}
    value = values[inner.name]
    value.type, value.shape = ir.TensorType(fact.dtype), symbolic(fact.shape)
    if "logits" not in {*values, *model.graph.initializers, *(v.name for v in model.graph.inputs)}:
        value.name = "logits"
    if not value.is_graph_output():
        model.graph.outputs.append(value)
    return model, str(value.name)


def _known(model: ir.Model) -> dict[str, Any]:
    """What the plain graph of a bundle says of itself, as overrides for the contract."""
    if KEY not in model.metadata_props:
        return {}
    own = Contract.from_json(model.metadata_props[KEY])
    if own.methods:
        raise UnsupportedModelError("explained already; expected the model that it was made from")
    image = {k: v for k, v in dataclasses.asdict(own.input).items() if k not in FOUND}
    image |= {"size": own.input.size}
    return {"input": image, "labels": own.labels, "tokens": {"prefix": own.tokens.prefix}}


def _build(model: ir.Model, contract: Contract) -> ir.Model:
    """The explained graph of a contract."""
    if contract.input.multiple is None:
        explained = _build_for(model, contract)
    else:
        explained = for_any_size(
            lambda size: _build_for(model, contract.at(size)),
            contract.input.name,
            contract.input.multiple,
        )
    explained.metadata_props[KEY] = contract.to_json()
    return explained


def _build_for(model: ir.Model, contract: Contract) -> ir.Model:
    """The explained graph for pictures of the contract's size."""
    model = model.clone()
    graph = model.graph
    found = analyse(model, contract.logits, contract.input.size)
    _check_size(found, contract)
    _record_shapes(found)
    free_names(graph, {*_order(contract), TARGET})
    b = Builder(graph, dict(found.facts))
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
    if walks:
        seed = Cotangent(one_hot(b, b.of(found.logits), add_target(graph)))
    for rules, sought in walks:
        values = {part.value for parts in sought.values() for part in parts}
        try:
            arrived = walk(b, {found.logits: seed}, values, rules)
        except UnsupportedOperatorError as error:
            if not found.layers:
                raise
            readout = contract.readout
            others = [method for method, n in METHODS.items() if not n.takes_target(readout)]
            raise UnsupportedOperatorError(
                f"{error}; without gradients there are the methods {', '.join(others)}"
            ) from None
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
    outputs |= {
        map_name(method): draw(b, contract, outputs, method, options)
        for method, options in contract.maps.items()
    }
    for name in sorted(outputs, key=_order(contract).index):
        emit(b, name, outputs[name])
    target_last(graph)
    RemoveUnusedNodesPass()(model)
    for node in graph:  # shapes of inner values are a third of what is added, and can be inferred
        for value in node.outputs:
            if value not in found.facts and not value.is_graph_output():
                value.type = value.shape = None
    model.ir_version = max(model.ir_version, 4)  # before, an initializer had to be an input
    for domain in [domain for domain in model.opset_imports if domain != ""]:
        del model.opset_imports[domain]
    return model


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


def _walks(
    contract: Contract, found: Structure
) -> list[tuple[Mapping[str, Rule], dict[str, Sequence[Part]]]]:
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
