"""The table of rewrites, and what one of them sees: a node, what is known of it, and a place to
write the standard operators that do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.values.facts import Facts
from onnxplain.graphs.values.shapes import COMPUTED_BYTES, room_behind
from onnxplain.graphs.values.visit import visit

__all__ = ["MICROSOFT", "REWRITES", "Rewrite", "Rule", "rewrite", "rewrites"]

MICROSOFT = "com.microsoft"


@dataclass
class Rewrite:
    """One node to replace.

    Attributes:
        node: The node.
        facts: Shapes and types of its inputs, for one batch and size of the picture: what a rule
            writes may depend on ranks, heads and widths, not on the number of tokens.
        opset: Version of the standard operators to write.
        names: Names of values that are taken.
        made: The nodes written so far, in order.
    """

    node: ir.Node
    facts: Mapping[ir.Value, Facts]
    opset: int
    names: set[str | None]
    made: list[ir.Node] = field(default_factory=list)

    def has(self, index: int) -> bool:
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def input(self, index: int) -> ir.Value:
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        if value is None:
            raise self.refuse(f"input {index} is missing")
        return value

    def optional(self, index: int) -> ir.Value | None:
        """Input `index`, None where it is left out."""
        return self.input(index) if self.has(index) else None

    def sizes(self, index: int) -> list[int]:
        """The shape of input `index`."""
        return [size for size in self.facts[self.input(index)].shape if isinstance(size, int)]

    def used(self, index: int) -> bool:
        """Whether output `index` is."""
        outputs = self.node.outputs
        return index < len(outputs) and (
            bool(outputs[index].uses()) or outputs[index].is_graph_output()
        )

    def integer(self, name: str, default: int) -> int:
        attribute = self._attribute(name, ir.AttributeType.INT)
        return default if attribute is None else attribute.as_int()

    def real(self, name: str, default: float) -> float:
        attribute = self._attribute(name, ir.AttributeType.FLOAT)
        return default if attribute is None else attribute.as_float()

    def _attribute(self, name: str, kind: ir.AttributeType) -> ir.Attr | None:
        attribute = self.node.attributes.get(name)
        if attribute is not None and attribute.type != kind:
            raise self.refuse(f"its {name} is {attribute.type.name}; expected {kind.name}")
        return attribute

    def refuse(self, why: str) -> UnsupportedModelError:
        name = f"{self.node.domain or 'ai.onnx'}.{self.node.op_type}"
        return UnsupportedModelError(
            f"node {self.node.name} is {name}, which has no equal in plain operators here: {why}"
        )

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """The result of a standard operator; attributes that are None are left out."""
        return self.several(op_type, 1, *inputs, **attributes)[0]

    def several(
        self, op_type: str, outputs: int, *inputs: ir.Value | None, **attributes: Any
    ) -> Sequence[ir.Value]:
        given = {name: value for name, value in attributes.items() if value is not None}
        step = f"{op_type}_{len(self.made)}"
        name = f"{self.node.outputs[0].name}/{step}"
        values = [ir.Value(name=self._free(f"{name}.{i}" if i else name)) for i in range(outputs)]
        node = ir.node(op_type, inputs, given, outputs=values, name=f"{self.node.name}/{step}")
        self.made.append(node)
        return node.outputs

    def _free(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def constant(self, array: np.ndarray) -> ir.Value:
        return self.op("Constant", value=ir.tensor(array))

    def ints(self, *values: int) -> ir.Value:
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float, like: ir.Value) -> ir.Value:
        """A constant of the element type of `like`, which the node reads."""
        return self.constant(np.array(value, self.facts[like].dtype.numpy()))


Rule = Callable[[Rewrite], Sequence[ir.Value | None]]
"""Writes the standard operators; returns what takes the place of each output of the node, None (or
nothing, at the end) for outputs that it does not make."""

REWRITES: dict[tuple[str, str], Rule] = {}
"""Rule of each operator that is rewritten, by domain and name."""


def rewrites(operator: str, *domains: str) -> Callable[[Rule], Rule]:
    """Adds a rule for the operator in these domains."""

    def add(function: Rule) -> Rule:
        REWRITES.update({(domain, operator): function for domain in domains})
        return function

    return add


def rewrite(model: ir.Model, facts: dict[ir.Value, Facts]) -> None:
    """Replaces every node that there is a rule for.

    Args:
        model: The model, changed in place.
        facts: Facts of its inputs and weights; those of the rest are added.
    """
    graph = model.graph
    names = {value.name for value in facts} | {v.name for node in graph for v in node.outputs}
    room = COMPUTED_BYTES
    own: set[ir.Node] = set()  # of the operator that a rule is for, written by the rule
    for node in graph:  # what a rule writes is visited next
        rule = REWRITES.get((node.domain, node.op_type))
        if rule is None or node in own:
            visit(node, facts, model.opset_imports)
            room = room_behind(node, facts, room)
        else:
            step = Rewrite(node, facts, model.opset_imports[""], names)
            _replace(graph, step, rule)
            own.update(made for made in step.made if made.op_type == node.op_type)


def _replace(graph: ir.Graph, step: Rewrite, rule: Rule) -> None:
    results = list(rule(step))
    pairs = []
    for i, (old, new) in enumerate(zip_longest(step.node.outputs, results)):
        if old is not None and new is not None:
            pairs.append((old, new))
        elif old is not None and step.used(i):
            raise step.refuse(f"its output {old.name} is used")
    old_values, new_values = zip(*pairs, strict=True)
    ir.convenience.replace_nodes_and_values(
        graph, step.node, [step.node], step.made, old_values, new_values
    )
