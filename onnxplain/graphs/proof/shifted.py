"""The forward pass of an explained graph, with the values shifted that it has gradients of."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass
from onnx_ir.tape import Tape

from onnxplain.contract import Contract
from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.interface import drop_outputs, only
from onnxplain.graphs.proof.double import in_double
from onnxplain.graphs.values.uses import dependents, sources
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    attention_gradient_name,
    attention_name,
)

__all__ = ["differentiated", "shift_name", "shifted"]


def shift_name(output: str) -> str:
    """Input that is added to the value which an output shows, float32, of the output's shape."""
    return f"shift.{output}"


def differentiated(contract: Contract) -> dict[str, str]:
    """The outputs that a graph has the gradient of, and the gradient's name."""
    pairs = {
        attention_name(i): attention_gradient_name(i)
        for i, layer in enumerate(contract.layers)
        if layer.attention and layer.gradient
    }
    if contract.features and contract.features_gradient:
        pairs[FEATURES] = FEATURES_GRADIENT
    return pairs


def shifted(model: ir.Model, contract: Contract, *, double: bool = True) -> ir.Model:
    """The logits, computed by the forward nodes alone, where values are shifted on the way.

    Besides the image the graph takes `shift_name(output)` for each output of `differentiated`.

    Args:
        model: The explained graph, which is left as it is.
        contract: Its own.
        double: Whether all that depends on a shift is computed in float64; else as it is.

    Raises:
        UnsupportedModelError: An output is computed from the value that it shows by other operators
            than those that turn axes.
    """
    names = list(differentiated(contract))
    model = only(model, [contract.logits, *names])
    graph = model.graph
    ShapeInferencePass()(model)
    shown = {value.name: value for value in graph.outputs}
    shift = _Shift(graph, sources(shown[contract.logits]), double)
    moved = {shift.input(shift_name(name)): name for name in names}
    for value, name in moved.items():
        shift.move(shown[name], value)
    shift.write()
    drop_outputs(model, lambda name: name != contract.logits)
    taken = set().union(*(sources(value) for value in graph.outputs))
    for value in [value for value in graph.inputs if value not in taken]:
        graph.inputs.remove(value)  # the class that is explained
        graph.initializers.pop(str(value.name), None)
    if double:
        in_double(graph, set().union(*(dependents(graph, value) for value in moved)))
    return model


class _Shift:
    """Adds to values of a graph."""

    def __init__(self, graph: ir.Graph, forward: Set[ir.Value], double: bool) -> None:
        self.graph = graph
        self.forward = forward
        self.double = double
        self.tape = Tape()

    def input(self, name: str) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
        self.graph.inputs.append(value)
        return value

    def op(self, op_type: str, *inputs: ir.Value | np.ndarray, **attributes: object) -> ir.Value:
        values = [
            v
            if isinstance(v, ir.Value)
            else self.tape.op("Constant", [], {"value": ir.tensor(np.asarray(v))})
            for v in inputs
        ]
        return self.tape.op(op_type, values, attributes)  # type: ignore[arg-type]

    def move(self, value: ir.Value, far: ir.Value) -> None:
        """Adds `far`, of the shape of `value`, to what the value is made of in the forward pass."""
        node = value.producer()
        if value in self.forward:
            self._add(value, far)
        elif node is not None and node.op_type in ("Cast", "Identity"):
            self.move(_input(node), far)
        elif node is not None and node.op_type == "Reshape":
            before = _input(node)
            self.move(before, self.op("Reshape", far, self.op("Shape", before)))
        elif node is not None and node.op_type == "Transpose":
            perm = node.attributes["perm"].as_ints()
            back = [int(axis) for axis in np.argsort(perm)]
            self.move(_input(node), self.op("Transpose", far, perm=back))
        elif node is not None and node.op_type == "Concat":
            axis = node.attributes["axis"].as_int()
            start = self.op("Constant", value=ir.tensor(np.array([0])))
            for part in node.inputs:
                assert part is not None
                size = self.op("Shape", part, start=axis, end=axis + 1)
                end = self.op("Add", start, size)
                piece = self.op("Slice", far, start, end, np.array([axis]))
                self.move(part, piece)
                start = end
        else:
            kind = "an input" if node is None else node.op_type
            raise UnsupportedModelError(
                f"{value.name} is {kind}; expected a value of the forward pass, or one of which "
                "the axes were turned"
            )

    def _add(self, value: ir.Value, far: ir.Value) -> None:
        """Puts the sum in the place of the value, wherever the forward pass takes it."""
        uses = [use for use in value.uses() if not self.forward.isdisjoint(use.node.outputs)]
        if self.double:
            far = self.op("Cast", far, to=int(ir.DataType.DOUBLE))
        else:
            far = self.op("CastLike", far, value)
        total = self.op("Add", value, far)
        total.type = value.type
        for use in uses:
            use.node.replace_input_with(use.idx, total)

    def write(self) -> None:
        self.graph.extend(self.tape.nodes)
        self.graph.sort()


def _input(node: ir.Node) -> ir.Value:
    value = node.inputs[0]
    assert value is not None
    return value
