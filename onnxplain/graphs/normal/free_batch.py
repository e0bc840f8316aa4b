"""A batch of any size for a file whose exporter fixed it.

What an exporter freezes is the batch in the targets of Reshape and Expand, and in constants that it
has computed for so many images (the class token, repeated). The batch axis of the picture is
followed through the graph node by node. Where a node holds it as a number, the number is taken out;
and slice r of what a node computes from the picture has to need slice r of its operands alone.
So the images of a batch are proven not to mix; a graph for which that fails keeps its batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxplain.errors import ModelError
from onnxplain.graphs.values.axes import BATCH, ELEMENTWISE, Place, follow, origin, volume
from onnxplain.graphs.values.facts import Batch, Facts, Shape
from onnxplain.graphs.values.shapes import PROBES, bound, infer, merge
from onnxplain.graphs.values.stored import tensor_of
from onnxplain.graphs.values.uses import dependents
from onnxplain.graphs.values.visit import visit

__all__ = ["with_free_batch"]


def with_free_batch(model: ir.Model, name: str) -> ir.Model | None:
    """A copy of the model that takes a batch of any size; None where not every node would.

    Args:
        model: A model that computes something from its picture.
        name: Name of the image input, whose height and width are numbers.
    """
    # A batch of 1 merged with another axis may have been before or behind it; the file has one way.
    for leading in (True, False):
        changed = model.clone()
        image = next(value for value in changed.graph.inputs if value.name == name)
        with contextlib.suppress(ModelError):
            if _Freed(changed, image, leading).all_nodes():
                return changed
    return None


class _Freed:
    """The model while its nodes are changed one after the other.

    Attributes:
        batch: The number of images that the file is made for.
        fixed: Facts of the file as it is.
        facts: Facts of the nodes so far, for any batch.
        places: Where the batch lies in what is computed from the picture.
        leading: Whether a batch of 1 is taken to be merged with the axis behind it.
    """

    def __init__(self, model: ir.Model, image: ir.Value, leading: bool) -> None:
        self.leading = leading
        self.graph, self.versions = model.graph, model.opset_imports
        self.fixed = infer(model, image)
        (self.batch,) = _numbers(self.fixed[image].shape[:1])
        assert image.shape is not None
        self.live = dependents(model.graph, image)
        image.shape = ir.Shape(["batch", *list(image.shape)[1:]])
        self.probes = [bound(model, image, probe, None) for probe in PROBES]
        self.facts = {v: self._merged(v) for v in self.probes[0]}
        self.places = {image: Place(0, BATCH)}

    def all_nodes(self) -> bool:
        """Whether every node takes any batch now, and keeps the images apart."""
        for node in list(self.graph):
            sources = [v for v in node.inputs if v in self.live]
            if node.op_type in ("Shape", "Size") or not sources:
                self._visit(node)
            elif any(v not in self.places for v in sources) or not self._free(node):
                return False
        outputs = [value for value in self.graph.outputs if value in self.live]
        return all(self.places[value] == Place(0, BATCH) for value in outputs)

    def _free(self, node: ir.Node) -> bool:
        """Takes the batch out of one node that computes from the picture."""
        if node.domain == "" and node.op_type == "Reshape":
            self._reshape(node)
        elif node.domain == "" and node.op_type == "Expand":
            self._expand(node)
        elif node.domain == "" and (node.op_type in ELEMENTWISE or node.op_type == "Concat"):
            self._repeat(node)
        self._visit(node)
        source = next(v for v in node.inputs if v is not None and v in self.live)
        found = follow(node, source, self.places[source], self.facts)
        if found is None or any(
            origin(node, i, found, self.facts) != self.places[v]
            for i, v in enumerate(node.inputs)
            if v is not None and v in self.live
        ):
            return False
        self.places.update(dict.fromkeys(node.outputs, found))
        return True

    def _visit(self, node: ir.Node) -> None:
        for probe in self.probes:
            visit(node, probe, self.versions)
        self.facts.update((v, self._merged(v)) for v in node.outputs)

    def _merged(self, value: ir.Value) -> Facts:
        return merge(value, *(probe[value] for probe in self.probes))

    def _reshape(self, node: ir.Node) -> None:
        """Sizes as they are, and -1 where the batch comes to lie."""
        source = node.inputs[0]
        assert source is not None
        place, shape = self.places[source], self.facts[source].shape
        before = volume(shape[: place.axis]) * place.before
        sizes = _numbers(self.fixed[node.outputs[0]].shape)
        axis = _axis_of_batch(sizes, before, self.batch, self.leading)
        if axis is not None:
            self._set(node, 1, [-1 if i == axis else size for i, size in enumerate(sizes)])

    def _expand(self, node: ir.Node) -> None:
        """1 in the place of the batch, which the operand has."""
        source, target = node.inputs[0], node.inputs[1]
        assert source is not None and target is not None
        constant = self.facts[target].constant
        if constant is not None:
            axis = self.places[source].axis - len(self.facts[source].shape)
            sizes = [int(size) for size in constant]
            sizes[len(sizes) + axis] = 1
            self._set(node, 1, sizes)

    def _repeat(self, node: ir.Node) -> None:
        """Constants that the exporter repeated for every image: one image's, repeated here."""
        live = next(v for v in node.inputs if v is not None and v in self.live)
        from_end = self.places[live].axis - len(self.facts[live].shape)
        for i, value in enumerate(node.inputs):
            if value is None or value in self.live:
                continue
            axis = len(self.facts[value].shape) + from_end
            if axis < 0 or self.facts[value].shape[axis] != self.batch:
                continue
            if self.batch > 1:
                value = self._one(node, value, axis)
            if node.op_type == "Concat":
                value = self._repeated(node, value, axis, live, self.places[live].axis)
            node.replace_input_with(i, value)

    def _one(self, node: ir.Node, value: ir.Value, axis: int) -> ir.Value:
        """The slice for one image of a constant that is the same for all.

        Raises:
            ModelError: It is not the same for all.
        """
        tensor, maker, fact = tensor_of(value), value.producer(), self.facts[value]
        array = fact.constant if tensor is None else tensor.numpy()
        if array is not None:
            first = array.take([0], axis)
            if (array == first).all():
                return self._constant(first.astype(fact.dtype.numpy()))
        elif maker is not None and maker.op_type == "Expand" and maker.inputs[0] is not None:
            from_end = axis - len(self.facts[value].shape)
            inner = self.facts[maker.inputs[0]].shape
            if len(inner) + from_end < 0 or inner[from_end] == 1:
                ints = [self._constant(np.array([n], np.int64)) for n in (0, 1, axis)]
                return self._node("Slice", [value, *ints], node)
        raise ModelError(f"{value.name} differs between the images of a batch")

    def _repeated(
        self, node: ir.Node, value: ir.Value, axis: int, live: ir.Value, batch_axis: int
    ) -> ir.Value:
        """`value`, of size 1 along `axis`, for as many images as `live` has."""
        rank = len(self.facts[value].shape)
        count = self._node("Shape", [live], node, start=batch_axis, end=batch_axis + 1)
        ones = [
            [self._constant(np.ones(n, np.int64))] if n else [] for n in (axis, rank - axis - 1)
        ]
        target = self._node("Concat", [*ones[0], count, *ones[1]], node, axis=0)
        return self._node("Expand", [value, target], node)

    def _set(self, node: ir.Node, index: int, sizes: Sequence[int]) -> None:
        node.replace_input_with(index, self._constant(np.array(sizes, np.int64)))

    def _constant(self, array: np.ndarray) -> ir.Value:
        name = self._name()
        value = ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape(array.shape),
            const_value=ir.tensor(array, name=name),
        )
        self.graph.register_initializer(value)
        fact = Facts(array.shape, ir.DataType.from_numpy(array.dtype), array)
        for facts in (self.facts, *self.probes):
            facts[value] = fact
        return value

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value], before: ir.Node, **attributes: int
    ) -> ir.Value:
        output = ir.Value(name=self._name())
        made = ir.node(op_type, inputs, attributes, outputs=[output], name=f"n_{output.name}")
        self.graph.insert_before(before, made)
        self._visit(made)
        return output

    def _name(self) -> str:
        return f"free_batch/{len(self.facts)}"


def _numbers(shape: Shape) -> list[int]:
    assert not any(isinstance(size, Batch) for size in shape)
    return [size for size in shape if isinstance(size, int)]


def _axis_of_batch(sizes: Sequence[int], before: int, batch: int, leading: bool) -> int | None:
    """Which axis the batch is in, or a part of, with `before` positions outside of it.

    A batch of 1 may be in several. An axis of its own comes first; then one that it leads, or does
    not lead; the last one, which holds the features, at the end. What is proven of the nodes behind
    shows whether that was right.
    """
    possible = []
    for axis, size in enumerate(sizes):
        outer = math.prod(sizes[:axis])
        if before % outer == 0 and size % (before // outer * batch) == 0:
            last = axis == len(sizes) - 1
            possible.append((size != batch, last, (before == outer) != leading, axis))
    return min(possible)[-1] if possible else None
