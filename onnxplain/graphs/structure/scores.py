"""Which value of the graph is explained: the logits before what the model makes of them."""

from __future__ import annotations

import onnx_ir as ir

from onnxplain.graphs.builder import symbolic
from onnxplain.graphs.structure.analysis import Structure
from onnxplain.graphs.values.facts import Facts

__all__ = ["before_the_end", "score_of"]

PROBABILITIES = frozenset({"LogSoftmax", "Sigmoid", "Softmax"})


def score_of(found: Structure) -> str:
    """What makes probabilities of the logits, "softmax" or "sigmoid": the end of the graph, another
    output, or nothing in the file, in which case it is a Softmax."""
    ends = [found.logits.producer(), *found.logits.consumers()]
    if any(end is not None and end.domain == "" and end.op_type == "Sigmoid" for end in ends):
        return "sigmoid"
    return "softmax"


def before_the_end(
    model: ir.Model, found: Structure, *, as_named: bool = False
) -> tuple[ir.Model, str] | None:
    """A copy of the model with the logits as one more output, and the name of that output.

    They are what a Softmax or Sigmoid at the very end makes probabilities of, or an embedding
    [batch, 1, dim] as [batch, dim]. None where the output that was found are the logits.

    Args:
        model: The model.
        found: What it is.
        as_named: Whether probabilities at the end were named, and are what is to be explained.
    """
    shape, dtype = found.facts[found.logits].shape, found.facts[found.logits].dtype
    if len(shape) > 2:
        return _with_output(model, found.logits, Facts((shape[0], shape[-1]), dtype), len(shape))
    inner = _before_probabilities(found)
    if inner is None or as_named:
        return None
    return _with_output(model, inner, found.facts[inner], 2)


def _before_probabilities(found: Structure) -> ir.Value | None:
    """What a Softmax or Sigmoid at the very end makes probabilities of."""
    node = found.logits.producer()
    if node is None or node.domain != "" or node.op_type not in PROBABILITIES:
        return None
    inner = node.inputs[0]
    return inner if inner is not None and inner.producer() is not None else None


def _with_output(model: ir.Model, found: ir.Value, fact: Facts, rank: int) -> tuple[ir.Model, str]:
    """A copy of the model with the value, as [batch, classes], among its outputs, and its name."""
    model = model.clone()
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    value = values[found.name]
    if rank > 2:
        axes = ir.Value(
            name="logits/axes",
            type=ir.TensorType(ir.DataType.INT64),
            shape=ir.Shape([rank - 2]),
            const_value=ir.tensor(list(range(1, rank - 1)), dtype=ir.DataType.INT64),
        )
        graph.register_initializer(axes)
        value = ir.Value(name="logits/squeezed")
        graph.append(ir.node("Squeeze", [values[found.name], axes], outputs=[value]))
    if not value.is_graph_output():
        value.type, value.shape = ir.TensorType(fact.dtype), symbolic(fact.shape)
        if "logits" not in {*values, *graph.initializers, *(v.name for v in graph.inputs)}:
            value.name = "logits"
        graph.outputs.append(value)
    return model, str(value.name)
