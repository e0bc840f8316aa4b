"""Writes nodes into a graph and keeps their shapes, which the rules need to undo broadcasting.

A `Tensor` is a value of the graph with its shape. Asking twice for the same node gives the same
node, two transposes in a row cancel, a transpose waits until its result is needed, and a sum over
nothing is no node: rules can be written as the formulas they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.values.facts import Batch, Dim, Facts, Shape
from onnxplain.graphs.values.uses import is_measured

__all__ = ["TINY", "Builder", "Tensor", "broadcast", "symbolic"]

TINY = 1e-37  # next to nothing, and yet a normal float32


@dataclass(frozen=True)
class Tensor:
    """A value of the graph with its shape, element type and, where known, its constant value."""

    value: ir.Value
    shape: Shape
    dtype: ir.DataType
    constant: np.ndarray | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)


def broadcast(*shapes: Shape) -> Shape:
    """Shape of an elementwise result, by the multidirectional broadcasting of ONNX."""
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(next((d for d in dims if d != 1), 1) for dims in zip(*padded, strict=True))


ANY_BATCH = Batch()


class Builder:
    """Appends nodes to `graph`; `facts` tells the shapes of the values that are there already,
    `batch` how many images there are."""

    def __init__(
        self, graph: ir.Graph, facts: dict[ir.Value, Facts], batch: Dim = ANY_BATCH
    ) -> None:
        self.graph = graph
        self.facts = facts
        self.batch = batch
        self._made: dict[Any, ir.Value] = {}
        self._names = {
            *(v.name for v in graph.inputs),
            *graph.initializers,
            *(v.name for node in graph for v in node.outputs),
        }
        self._fixed: dict[ir.Value, bool] = {}
        self._stacks: dict[ir.Value, tuple[list[Tensor], int]] = {}  # parts and axis of a Concat

    def of(self, value: ir.Value) -> Tensor:
        """The tensor of a value that the graph had before; one in float16 as float32.

        What is added is computed in float32: relevance divides by 1e-9, which is 0 in float16.
        """
        fact = self.facts[value]
        tensor = Tensor(value, fact.shape, fact.dtype, fact.constant)
        if not fact.is_half:
            return tensor
        whole = self.cast(tensor, ir.DataType.FLOAT)
        return replace(whole, constant=_as_float32(fact.constant))

    def stored(self, tensor: Tensor) -> ir.Value:
        """The value that `of` made a tensor of."""
        node = tensor.value.producer()
        before = None if node is None or node.op_type != "Cast" else node.inputs[0]
        fact = None if before is None else self.facts.get(before)
        cast = fact is not None and fact.dtype in (ir.DataType.BFLOAT16, ir.DataType.FLOAT16)
        return before if cast and before is not None else tensor.value

    def is_fixed(self, value: ir.Value) -> bool:
        """Whether a value is computed from constants and shapes alone, or counts as a constant."""
        if value not in self._fixed:
            node = value.producer()
            if node is None:
                self._fixed[value] = value.is_initializer() and not value.is_graph_input()
            else:
                sources = [v for v in node.inputs if v is not None]
                self._fixed[value] = (
                    node.op_type == "Shape"
                    or is_measured(value)
                    or all(map(self.is_fixed, sources))
                )
        return self._fixed[value]

    def op(
        self,
        op_type: str,
        inputs: Sequence[Tensor | None],
        shape: Shape,
        dtype: ir.DataType | None = None,
        *,
        output: int = 0,
        **attributes: Any,
    ) -> Tensor:
        """A node, and the one of its outputs that is wanted. `dtype` is that of the first input
        unless given."""
        values = [None if t is None else t.value for t in inputs]
        key = (op_type, output, *values, *sorted((k, repr(v)) for k, v in attributes.items()))
        if dtype is None:
            assert inputs[0] is not None
            dtype = inputs[0].dtype
        if key not in self._made:
            name = self._name(op_type)
            made = ir.Value()
            _annotate(made, name, shape, dtype)
            outputs = [*(ir.Value(name=f"{name}/{i}") for i in range(output)), made]
            node = ir.node(op_type, values, attributes or None, outputs=outputs, name=f"n_{name}")
            self.graph.append(node)
            self._made[key] = made
        return Tensor(self._made[key], shape, dtype)

    def describe(self, value: ir.Value, name: str, shape: Shape, dtype: ir.DataType) -> None:
        """Names a new output of a node that was there before and records its shape."""
        _annotate(value, name, shape, dtype)
        self.facts[value] = Facts(shape, dtype)

    def rename(self, tensor: Tensor, name: str) -> None:
        """Gives a value a name of its own and records the shape found for it."""
        _annotate(tensor.value, name, tensor.shape, tensor.dtype)

    def _name(self, stem: str) -> str:
        number = len(self._made)
        while (name := f"explain/{stem}_{number}") in self._names:
            number += 1
        self._names.add(name)
        return name

    def constant(self, array: np.ndarray) -> Tensor:
        """A constant, stored once however often it is asked for."""
        array = np.asarray(array)
        key = ("constant", array.dtype.str, array.shape, array.tobytes())
        dtype = ir.DataType.from_numpy(array.dtype)
        if key not in self._made:
            name = self._name("Constant")
            value = ir.Value(
                name=name,
                type=ir.TensorType(dtype),
                shape=ir.Shape(array.shape),
                const_value=ir.tensor(array, name=name),
            )
            self.graph.register_initializer(value)
            self._made[key] = value
        return Tensor(self._made[key], array.shape, dtype, array)

    def ints(self, values: Sequence[int]) -> Tensor:
        return self.constant(np.array(values, np.int64))

    def scalar(self, value: float, like: Tensor) -> Tensor:
        """A rank-0 constant of the element type of `like`."""
        return self.constant(np.array(value, like.dtype.numpy()))

    # Elementwise

    def unary(self, op_type: str, x: Tensor, **attributes: Any) -> Tensor:
        return self.op(op_type, [x], x.shape, **attributes)

    def binary(self, op_type: str, a: Tensor, b: Tensor | float) -> Tensor:
        """`a op b` with broadcasting; a number becomes a constant of the type of `a`."""
        if not isinstance(b, Tensor):
            b = self.scalar(b, a)
        if (perm := _perm(a)) is not None and (b.rank == 0 or _perm(b) == perm):
            back = [perm.index(axis) for axis in range(a.rank)]
            b = b if b.rank == 0 else self.transpose(b, back)
            return self.transpose(self.binary(op_type, self.transpose(a, back), b), perm)
        return self.op(op_type, [a, b], broadcast(a.shape, b.shape))

    def add(self, a: Tensor, b: Tensor | float) -> Tensor:
        return self.binary("Add", a, b)

    def sub(self, a: Tensor, b: Tensor | float) -> Tensor:
        return self.binary("Sub", a, b)

    def mul(self, a: Tensor, b: Tensor | float) -> Tensor:
        return self.binary("Mul", a, b)

    def div(self, a: Tensor, b: Tensor | float) -> Tensor:
        return self.binary("Div", a, b)

    def neg(self, a: Tensor) -> Tensor:
        return self.unary("Neg", a)

    def compare(self, op_type: str, a: Tensor, b: Tensor | float) -> Tensor:
        if not isinstance(b, Tensor):
            b = self.scalar(b, a)
        return self.op(op_type, [a, b], broadcast(a.shape, b.shape), ir.DataType.BOOL)

    def where(self, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
        shape = broadcast(condition.shape, a.shape, b.shape)
        return self.op("Where", [condition, a, b], shape, a.dtype)

    def cast(self, x: Tensor, dtype: ir.DataType) -> Tensor:
        return x if x.dtype == dtype else self.op("Cast", [x], x.shape, dtype, to=int(dtype))

    # Products

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b` for operands of rank 2 or more."""
        stack = broadcast(a.shape[:-2], b.shape[:-2])
        return self.op("MatMul", [a, b], (*stack, a.shape[-2], b.shape[-1]))

    def apart(self, x: Tensor) -> Tensor:
        """A square weight as a value of its own, for a product with its transpose.

        OpenVINO (2026.4, on the CPU) takes a square constant that it has packed for one product
        for its transpose in another. Two signs, which every runtime folds, make two constants.
        """
        square = x.rank == 2 and x.shape[0] == x.shape[1] and x.shape[0] != 1
        return self.neg(self.neg(x)) if square and self.is_fixed(x.value) else x

    def swap(self, x: Tensor) -> Tensor:
        """`x` with its last two axes exchanged."""
        return self.transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))

    def is_swapped(self, x: Tensor) -> bool:
        """Whether `x` was made by `swap`, or could have been."""
        return _perm(x) == [*range(x.rank - 2), x.rank - 1, x.rank - 2]

    # Layout

    def transpose(self, x: Tensor, perm: Sequence[int]) -> Tensor:
        if (order := _perm(x)) is not None:
            perm = [order[p] for p in perm]
            producer = x.value.producer()
            assert producer is not None and producer.inputs[0] is not None
            shape = [x.shape[order.index(axis)] for axis in range(x.rank)]
            x = Tensor(producer.inputs[0], tuple(shape), x.dtype)
        if list(perm) == list(range(x.rank)):
            return x
        if (joined := self._joined_elsewhere(x, perm)) is not None:
            return joined
        return self.op("Transpose", [x], tuple(x.shape[p] for p in perm), perm=list(perm))

    def _joined_elsewhere(self, x: Tensor, perm: Sequence[int]) -> Tensor | None:
        """The transpose of stacked parts (q, k and v) that are joined along the next axis instead.

        An axis less is worth it: onnxruntime moves a single axis twice as fast as it permutes.
        """
        parts, axis = self._stacks.get(x.value, ([], 0))
        place = list(perm).index(axis)
        if not parts or place == x.rank - 1 or not isinstance(x.shape[perm[place + 1]], int):
            return None

        def without(index: int) -> int:
            return index - (index > axis)

        whole = self.concat(
            [self.reshape(p, (*p.shape[:axis], *p.shape[axis + 1 :])) for p in parts],
            without(perm[place + 1]),
        )
        turned = self.transpose(whole, [without(p) for p in perm if p != axis])
        return self.reshape(turned, tuple(x.shape[p] for p in perm))

    def reshape(self, x: Tensor, shape: Shape) -> Tensor:
        """`x` with another shape; at most one size that depends on the batch may move."""
        if x.shape == shape:
            return x
        kept = [i < x.rank and x.shape[i] == d for i, d in enumerate(shape)]
        target = [
            d if isinstance(d, int) else 0 if same else -1
            for d, same in zip(shape, kept, strict=True)
        ]
        return self.op("Reshape", [x, self.ints(target)], shape)

    def unsqueeze(self, x: Tensor, axis: int) -> Tensor:
        shape = (*x.shape[:axis], 1, *x.shape[axis:])
        return self.op("Unsqueeze", [x, self.ints([axis])], shape)

    def squeeze(self, x: Tensor, axis: int) -> Tensor:
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        return self.op("Squeeze", [x, self.ints([axis])], shape)

    def slice(self, x: Tensor, axis: int, start: int, stop: int) -> Tensor:
        if (start, stop) == (0, x.shape[axis]):
            return x
        shape = (*x.shape[:axis], stop - start, *x.shape[axis + 1 :])
        bounds = [self.ints([start]), self.ints([stop]), self.ints([axis])]
        return self.op("Slice", [x, *bounds], shape)

    def pad(self, x: Tensor, axis: int, before: int, after: int) -> Tensor:
        """Zeros along one axis. Pads are full-rank: onnxruntime 1.32 moves a Transpose through a
        Pad that has the `axes` input without moving the axes."""
        if before == after == 0:
            return x
        size = x.shape[axis]
        assert isinstance(size, int)
        pads = [0] * (2 * x.rank)
        pads[axis], pads[x.rank + axis] = before, after
        shape = (*x.shape[:axis], before + size + after, *x.shape[axis + 1 :])
        return self.op("Pad", [x, self.ints(pads)], shape)

    def concat(self, parts: Sequence[Tensor], axis: int) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        total: Dim = 0
        for part in parts:
            size = part.shape[axis]
            assert isinstance(size, int) and isinstance(total, int)
            total += size
        shape = (*parts[0].shape[:axis], total, *parts[0].shape[axis + 1 :])
        result = self.op("Concat", parts, shape, axis=axis)
        if all(part.shape[axis] == 1 for part in parts):
            self._stacks[result.value] = list(parts), axis
        return result

    def expand(self, x: Tensor, shape: Shape, like: ir.Value) -> Tensor:
        """`x` broadcast to `shape`, which is that of the value `like`."""
        if x.shape == shape:
            return x
        if any(isinstance(d, Batch) and d != s for d, s in zip(shape, _pad(x, shape), strict=True)):
            target = self.op(
                "Shape", [Tensor(like, shape, x.dtype)], (len(shape),), ir.DataType.INT64
            )
        else:  # sizes that x has already may be 1 in the target
            target = self.ints([d if isinstance(d, int) else 1 for d in shape])
        return self.op("Expand", [x, target], shape)

    # Reductions

    def reduce(self, op_type: str, x: Tensor, axes: Sequence[int], *, keepdims: bool) -> Tensor:
        """A Reduce operator over `axes`; no axes, no node."""
        if not axes:
            return x
        axes = sorted(axis % x.rank for axis in axes)
        shape = tuple(
            1 if i in axes else d for i, d in enumerate(x.shape) if keepdims or i not in axes
        )
        if op_type == "ReduceSum" or self.graph.opset_imports[""] >= 18:
            return self.op(op_type, [x, self.ints(axes)], shape, keepdims=int(keepdims))
        return self.op(op_type, [x], shape, axes=list(axes), keepdims=int(keepdims))

    def sum(self, x: Tensor, axes: Sequence[int], *, keepdims: bool = True) -> Tensor:
        return self.reduce("ReduceSum", x, axes, keepdims=keepdims)

    def mean(self, x: Tensor, axes: Sequence[int], *, keepdims: bool = True) -> Tensor:
        return self.reduce("ReduceMean", x, axes, keepdims=keepdims)

    def unbroadcast(self, x: Tensor, shape: Shape) -> Tensor:
        """Sums `x` over the axes along which an operand of `shape` was repeated."""
        extra = x.rank - len(shape)
        axes = [i for i, d in enumerate(shape, extra) if d == 1 and x.shape[i] != 1]
        summed = self.sum(x, [*range(extra), *axes])
        return self.reshape(summed, shape) if extra else summed


def _as_float32(constant: np.ndarray | None) -> np.ndarray | None:
    return None if constant is None else constant.astype(np.float32)


def _pad(x: Tensor, shape: Shape) -> Shape:
    return (1,) * (len(shape) - x.rank) + tuple(x.shape)


def _perm(x: Tensor) -> list[int] | None:
    """How `x` was transposed, if it was."""
    producer = x.value.producer()
    if producer is None or producer.op_type != "Transpose" or producer.domain != "":
        return None
    perm = producer.attributes.get("perm")
    return list(reversed(range(x.rank))) if perm is None else list(perm.as_ints())


def _annotate(value: ir.Value, name: str, shape: Shape, dtype: ir.DataType) -> None:
    value.name = name
    value.type = ir.TensorType(dtype)
    value.shape = symbolic(shape)


def symbolic(shape: Shape) -> ir.Shape:
    """The shape as the file records it, with names for sizes that depend on the batch."""
    return ir.Shape([d if isinstance(d, int) else str(d) for d in shape])
