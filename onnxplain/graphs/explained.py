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

from onnxplain.contract import KEY, Contract, Source
from onnxplain.errors import InputError, UnsupportedModelError
from onnxplain.graphs.assemble import build
from onnxplain.graphs.choice import served
from onnxplain.graphs.draft import FOUND, draft
from onnxplain.graphs.interface import drop_outputs
from onnxplain.graphs.maps import options_of
from onnxplain.graphs.normal import has_bfloat16, normalised, widened
from onnxplain.graphs.normal.channels_last import channels_first, picture
from onnxplain.graphs.normal.free_batch import with_free_batch
from onnxplain.graphs.normal.open_sizes import with_its_size
from onnxplain.graphs.request import Request
from onnxplain.graphs.seeds import CLASS_WEIGHTS
from onnxplain.graphs.selection import maps_alone, with_methods
from onnxplain.graphs.structure.analysis import Structure, analyse
from onnxplain.graphs.structure.scores import before_the_end, score_of
from onnxplain.outputs import GRAPH_KINDS
from onnxplain.steps import Step, silent

__all__ = ["SINGLE", "Explained", "explain", "known", "with_structure"]

SINGLE = "single"


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
    request: Request | None = None,
    step: Step = silent,
) -> Explained:
    """Adds to a model the outputs that the methods read, and the contract that names them.

    Args:
        model: A plain ViT with global attention, or, for Grad-CAM alone, any classifier with a last
            feature map; opset 11 to 25. It is left as it is. The plain graph of a bundle brings its
            preprocessing, labels and token names along.
        bundle: One graph per kind of method instead of one graph for all.
        methods: Names of `METHODS`; None: every one that the architecture supports.
        contract: Fields of the contract that override what is found; see `instrument`.
        labels: Class names in order, or a text file with one per line.
        preprocessing: Fields of `ImageInput`: mean, std, crop_pct, crop_mode, interpolation.
        source: Where the model came from; None: the name of its graph. Without a digest of the
            weights, theirs is taken.
        gamma: How much more `attnlrp` counts contributions of the sign of the output; 0 is the
            epsilon rule. Recorded in the contract.
        request: What the file is to hold; None: `Request()`. Recorded in the contract.
        step: Called with what is going on, how much of it is done, and of how much.

    Raises:
        UnsupportedModelError: The model, or a method on it, cannot be explained, with the reason.
        InputError: An unknown method or field, labels that do not fit.
    """
    if not isinstance(gamma, int | float) or not 0 <= gamma < math.inf:
        raise InputError(f"gamma {gamma!r}; expected a number from 0 on")
    request = request or Request()
    brought, said = known(model), contract or {}
    image = {**brought.get("input", {}), **(said.get("input") or {})}
    overrides = {**brought, **said, "input": image}
    logits = overrides.pop("logits", None)
    size = _size(image)
    layout = image.get("layout")
    probability = request.score == "probability"
    bfloat16 = has_bfloat16(model)
    step("finding the attention", 0, 1)
    model, found, score = with_structure(
        model, logits, size, layout=layout, probability=probability
    )
    base = draft(
        model,
        found,
        source=source,
        preprocessing=preprocessing,
        labels=labels,
        overrides=overrides,
        bfloat16=bfloat16,
    )
    chosen = served(found, base.readout, methods, probability=probability)
    base = dataclasses.replace(base, score=score)
    if gamma and "attnlrp" not in chosen:
        raise InputError("gamma is of the method attnlrp, which is not among those of this file")
    if gamma:
        base = dataclasses.replace(base, rules={"attnlrp": {"gamma": gamma}})
    whole = with_methods(_requested(base, request, chosen), chosen)
    weights = [value.const_value for value in model.graph.initializers.values()]
    source_bytes = sum(tensor.nbytes for tensor in weights if tensor is not None)
    kinds = {SINGLE: tuple(chosen)}
    if bundle:
        kinds = {}
        for kind, methods_of_kind in GRAPH_KINDS.items():
            own = tuple(method for method in chosen if method in methods_of_kind)
            if own not in kinds.values() and (own or kind == "plain"):
                kinds[kind] = own
    models: dict[str, ir.Model] = {}
    for kind, own in kinds.items():
        step("making the graphs", len(models), len(kinds))
        contract_of_kind = with_methods(whole, own)
        models[kind] = build(model, contract_of_kind, require_target=request.require_target)
    if bundle:
        graphs = {kind: f"{kind}.onnx" for kind in models}
        whole = dataclasses.replace(whole, graphs=graphs)
    explained = Explained(whole, models, source_bytes)
    return explained if request.taps else explained.maps_alone()


def with_structure(
    model: ir.Model,
    logits: str | None,
    size: tuple[int, int] | None,
    *,
    layout: str | None = None,
    probability: bool = False,
) -> tuple[ir.Model, Structure, str]:
    """What a model is, the model in the form that is explained, and what is explained of a class.

    The form: `widened`, with channels first, `normalised`, for any batch where that can be had, and
    with the logits as an output where it has probabilities.

    Args:
        model: As its exporter wrote it; it is left as it is.
        logits: Name of the output that is explained; None: the one that is found.
        size: Height and width, where the graph takes pictures of any.
        layout: "NCHW" or "NHWC", where the shape of the input does not tell.
        probability: Whether the probability of a class is explained, and not its logit.
    """
    model, layout = channels_first(widened(model), layout)
    image = picture(model.graph)
    if image is not None:
        model = with_its_size(model, image, size)
    model = normalised(model, size)
    found = analyse(model, logits, size)
    score = score_of(found) if probability else "logit"
    inner = before_the_end(model, found, as_named=logits is not None and not probability)
    if inner is not None:
        model, logits = inner
        found = analyse(model, logits, size)
    if found.batch is not None and not found.any_size:
        freed = with_free_batch(model, found.image.name or "")
        if freed is not None:
            model, found = freed, analyse(freed, logits, size)
    return model, dataclasses.replace(found, layout=layout), score


def _requested(contract: Contract, request: Request, methods: Iterable[str]) -> Contract:
    """The contract of a file that holds what is requested."""
    if request.targets > contract.classes:
        raise InputError(f"{request.targets} targets; the model has {contract.classes} classes")
    maps: dict[str, dict[str, Any]] = {}
    if request.maps:
        layers = len(contract.layers)
        maps = {method: options_of(method, request.map_options, layers) for method in methods}
    return dataclasses.replace(
        contract,
        maps=maps,
        heatmaps=request.heatmaps,
        targets=request.targets,
        class_weights=CLASS_WEIGHTS if request.seed == "weights" else None,
    )


def _size(image: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size that pictures are brought to, as far as it is given."""
    given = image.get("size")
    if given is None:
        return None
    try:
        height, width = map(operator.index, given)
    except (TypeError, ValueError):
        height = width = 0
    if min(height, width) < 1:
        raise InputError(f"input size {given!r}; expected [height, width] in pixels")
    return height, width


def known(model: ir.Model) -> dict[str, Any]:
    """What the plain graph of a bundle says of itself, as overrides for the contract.

    Raises:
        UnsupportedModelError: The model is explained already.
    """
    if KEY not in model.metadata_props:
        return {}
    own = Contract.from_json(model.metadata_props[KEY])
    if own.methods:
        raise UnsupportedModelError("explained already; expected the model that it was made from")
    image = {k: v for k, v in dataclasses.asdict(own.input).items() if k not in FOUND}
    image |= {"size": own.input.size}
    return {"input": image, "labels": own.labels, "tokens": {"prefix": own.tokens.prefix}}
