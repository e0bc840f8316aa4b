"""The names, outputs and order of an explained graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Set

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.seeds import CLASS_WEIGHTS, TARGET
from onnxplain.graphs.values.uses import dependents

__all__ = ["drop_outputs", "drop_unused", "emit", "free_names", "only", "target_last"]


def free_names(graph: ir.Graph, reserved: Set[str]) -> None:
    """Renames inner values of the model that bear one of the names which the contract gives away.

    Raises:
        UnsupportedModelError: An input, output or weight bears one.
    """
    for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]:
        if value.name in reserved:
            raise UnsupportedModelError(
                f"the model has an input, output or weight named {value.name}, which an explained "
                "model uses otherwise; rename it"
            )
    names = {value.name for node in graph for value in node.outputs}
    for node in graph:
        for value in node.outputs:
            if value.name in reserved:
                value.name = next(
                    name for i in itertools.count() if (name := f"{value.name}/{i}") not in names
                )


def emit(b: Builder, name: str, tensor: Tensor) -> None:
    """Makes a tensor an output of the graph under `name`."""
    value = tensor.value
    if value.is_graph_output() or value.is_graph_input() or value.is_initializer():
        tensor = b.op("Identity", [tensor], tensor.shape)
    b.rename(tensor, name)
    b.graph.outputs.append(tensor.value)


def drop_outputs(model: ir.Model, unwanted: Callable[[str], bool]) -> None:
    """Removes the outputs with such names, and what was computed for them alone."""
    for value in [v for v in model.graph.outputs if unwanted(str(v.name))]:
        model.graph.outputs.remove(value)
    drop_unused(model)


def only(model: ir.Model, names: Iterable[str]) -> ir.Model:
    """A copy of what computes the outputs of these names; inputs keep their defaults."""
    outputs = [value for value in model.graph.outputs if value.name in set(names)]
    graph = ir.convenience.extract(model.graph, model.graph.inputs, outputs)
    for value in graph.inputs:
        if value.const_value is not None:
            graph.register_initializer(value)
    return ir.Model(graph, ir_version=model.ir_version)


def drop_unused(model: ir.Model) -> None:
    """Removes what no output needs."""
    RemoveUnusedNodesPass()(model)
    for node in model.graph:
        for i, value in enumerate(node.outputs):
            # OpenCV loses count of the constants where an output is left out before another one.
            value.name = value.name or f"{node.outputs[-1].name}/{i}"


def target_last(graph: ir.Graph) -> None:
    """Puts what depends on the class last.

    onnxruntime computes first what stands last of a node's operands: so what the walks need of the
    forward pass (slopes, denominators) is computed when they come to need it, not all of it before.
    """
    asked = [value for value in graph.inputs if value.name in (TARGET, CLASS_WEIGHTS)]
    late = set().union(*(dependents(graph, value) for value in asked))
    for node in [node for node in graph if not late.isdisjoint(node.outputs)]:
        graph.remove(node)
        graph.append(node)
