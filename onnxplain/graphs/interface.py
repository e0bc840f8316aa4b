"""The inputs and outputs of an explained graph: the target, the seed made of it, names, order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.taps import dependents

__all__ = ["TARGET", "add_target", "drop_outputs", "emit", "free_names", "one_hot", "target_last"]

TARGET = "target"


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


def add_target(graph: ir.Graph) -> Tensor:
    """The optional input: an initializer of the same name makes -1 its default."""
    value = ir.Value(
        name=TARGET,
        type=ir.TensorType(ir.DataType.INT64),
        shape=ir.Shape(["targets"]),
        const_value=ir.tensor(np.array([-1], np.int64), name=TARGET),
    )
    graph.inputs.append(value)
    graph.register_initializer(value)
    return Tensor(value, (1,), ir.DataType.INT64)


def one_hot(b: Builder, logits: Tensor, target: Tensor) -> Tensor:
    """1 at each image's class, the argmax where the target is negative; [batch, classes]."""
    batch, classes = logits.shape
    assert isinstance(classes, int)
    best = b.op("ArgMax", [logits], (batch,), ir.DataType.INT64, axis=1, keepdims=0)
    chosen = b.where(b.compare("Less", target, 0), best, target)
    indices = b.constant(np.arange(classes, dtype=np.int64))
    return b.cast(b.compare("Equal", b.unsqueeze(chosen, 1), indices), logits.dtype)


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
    RemoveUnusedNodesPass()(model)


def target_last(graph: ir.Graph) -> None:
    """Puts what depends on the class last.

    onnxruntime computes first what stands last of a node's operands: so what the walks need of the
    forward pass (slopes, denominators) is computed when they come to need it, not all of it before.
    """
    for value in graph.inputs:
        if value.name == TARGET:
            late = dependents(graph, value)
            for node in [node for node in graph if not late.isdisjoint(node.outputs)]:
                graph.remove(node)
                graph.append(node)
