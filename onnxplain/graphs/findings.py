"""What `instrument` would find in a file and make of it, method by method, without writing it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from onnxplain.contract import PREPROCESSING, Contract, ImageInput, Source
from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.assemble import build
from onnxplain.graphs.choice import refusals
from onnxplain.graphs.draft import draft
from onnxplain.graphs.explained import known, with_structure
from onnxplain.graphs.files.naming import name_of
from onnxplain.graphs.files.reading import load
from onnxplain.graphs.files.sound import blaming
from onnxplain.graphs.normal import has_bfloat16
from onnxplain.graphs.normal.channels_last import channels_first
from onnxplain.graphs.selection import with_methods
from onnxplain.graphs.structure.analysis import Structure
from onnxplain.graphs.values.facts import Facts, Shape, show
from onnxplain.graphs.values.shapes import infer
from onnxplain.graphs.values.uses import dependents, sources
from onnxplain.outputs import METHODS
from onnxplain.steps import Step, silent

__all__ = ["Findings", "find"]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a file is that nobody has instrumented.

    Attributes:
        path: The file.
        name: Name of the model, `name_of`.
        opset: Version of the operator set, None where the file has none.
        nodes: Number of nodes, functions put in.
        weights: Number of weights.
        inputs, outputs: Of the graph, each with element type and shape.
        contract: What an explained file would say of itself; None where there can be none.
        layers: Heads and tokens of each attention layer.
        features: Names and shapes of the values that Grad-CAM reads.
        no_attention: Why there is no layer, where there is none.
        cost: Cost of each method that can be had, in forward passes: the multiply-adds of products
            and convolutions that the model and what the method reads take, over those of the model.
        refused: Why the others cannot be had.
        reason: Why nothing can be explained; None where something can.
    """

    path: Path
    name: str
    opset: int | None
    nodes: int
    weights: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    contract: Contract | None = None
    layers: tuple[tuple[int, int], ...] = ()
    features: tuple[str, ...] = ()
    no_attention: str | None = None
    cost: dict[str, float] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    reason: str | None = None

    @property
    def assumed(self) -> dict[str, object]:
        """The preprocessing that an explained file would have, which no graph tells."""
        image = ImageInput(size=(1, 1))
        return {name: getattr(image, name) for name in PREPROCESSING}


def find(
    path: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = None,
    step: Step = silent,
) -> Findings:
    """Looks into a file.

    Args:
        path: Any ONNX file.
        image_size: Height and width to look at it with, where the graph takes pictures of any.
        step: Called with what is going on, how much of it is done, and of how much.

    Raises:
        ModelError: It is missing, damaged or not ONNX, or explained already.
    """
    step("reading the model", 0, 1)
    model = load(path)
    known(model)
    graph = model.graph
    weights = [value.const_value for value in graph.initializers.values()]
    seen = Findings(
        path=Path(path),
        name=name_of(model, path),
        opset=model.opset_imports.get(""),
        nodes=len(graph),
        weights=sum(math.prod(tensor.shape.numpy()) for tensor in weights if tensor is not None),
        inputs=tuple(_shown(v) for v in graph.inputs if v.name not in graph.initializers),
        outputs=tuple(_shown(v) for v in graph.outputs),
    )
    with blaming(path):
        try:
            bfloat16 = has_bfloat16(model)
            step("finding the attention", 0, 1)
            model, found, _ = with_structure(model, None, image_size)
        except UnsupportedModelError as error:
            return dataclasses.replace(seen, reason=str(error))
        seen = dataclasses.replace(
            seen,
            layers=tuple((sum(t.heads for t in taps), taps[0].keys) for taps in found.layers),
            features=tuple(f"{f.value.name} {show(f.layout.shape)}" for f in found.features),
            no_attention=found.no_attention,
        )
        step("counting what methods cost", 0, 1)
        try:
            return _with_methods(seen, model, found, bfloat16)
        except UnsupportedModelError as error:
            return dataclasses.replace(seen, reason=str(error))


def _with_methods(seen: Findings, model: ir.Model, found: Structure, bfloat16: bool) -> Findings:
    base = draft(model, found, source=Source(name=seen.name), bfloat16=bfloat16)
    one_size = dataclasses.replace(base, input=dataclasses.replace(base.input, multiple=None))
    refused = refusals(found, base.readout)
    possible = tuple(method for method in METHODS if method not in refused)
    try:
        cost = _costs(model, with_methods(one_size, possible))
    except UnsupportedModelError:  # of one or more of them
        cost = {}
        for method in possible:
            try:
                cost |= _costs(model, with_methods(one_size, (method,)))
            except UnsupportedModelError as error:
                refused[method] = str(error)
    return dataclasses.replace(
        seen,
        contract=with_methods(base, tuple(cost)),
        cost=cost,
        refused={method: refused[method] for method in METHODS if method in refused},
        reason=None if cost else "none of the methods can be had",
    )


def _costs(model: ir.Model, contract: Contract) -> dict[str, float]:
    """The cost of each method of a contract, counted in the graph that has them all."""
    explained, _ = channels_first(build(model, contract), contract.input.layout)
    graph = explained.graph
    image = next(value for value in graph.inputs if value.name == contract.input.name)
    image.shape = ir.Shape([contract.input.batch or 1, 3, *contract.input.size])
    facts = infer(explained, image)
    live = dependents(graph, image)
    products = {
        value: _multiply_adds(node, [_sizes(facts[v].shape) for v in node.inputs if v], facts)
        for node in graph
        for value in node.outputs[:1]
        if value in live
    }
    outputs = {value.name: value for value in graph.outputs}
    own = sources(outputs[contract.logits])

    def added(names: Iterable[str]) -> int:
        values = set().union(*(sources(outputs[name]) for name in names)) - own
        return sum(products.get(value, 0) for value in values)

    plain = sum(products.get(value, 0) for value in own)
    return {m: 1 + added(names) / max(plain, 1) for m, names in contract.methods.items()}


def _multiply_adds(
    node: ir.Node, shapes: Sequence[Sequence[int]], facts: dict[ir.Value, Facts]
) -> int:
    result = math.prod(_sizes(facts[node.outputs[0]].shape))
    if node.op_type == "MatMul":
        return result * shapes[0][-1]
    if node.op_type == "Gemm":
        turned = node.attributes.get("transA")
        return result * shapes[0][0 if turned is not None and turned.as_int() else 1]
    if node.op_type == "Conv":
        return result * math.prod(shapes[1][1:])
    if node.op_type == "ConvTranspose":
        return math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if node.op_type == "Einsum":
        equation = node.attributes["equation"].as_string().replace(" ", "").partition("->")[0]
        terms = equation.split(",")
        sizes = {
            letter: size
            for term, shape in zip(terms, shapes, strict=True)
            for letter, size in zip(term, shape, strict=False)  # "..." is one size of several
        }
        return math.prod(sizes.values())
    return 0


def _sizes(shape: Shape) -> list[int]:
    return [size for size in shape if isinstance(size, int)]


def _shown(value: ir.Value) -> str:
    return f"{value.name} {value.dtype} {value.shape}"
