"""One explained graph for pictures of every size.

The rules write sizes into the graph as numbers: targets of Reshape, bounds of Slice, pads. Where
the picture's size is free, the graph is built for several sizes, and every number that is not the
same in all of them is computed from the picture instead. With h and w the rows and columns of the
grid, such a number is a + b h + c w + d h w: a count of patches, of tokens, of pixels, or a
multiple of one; or, as the factor of a mean, one over such a number. Four sizes determine the four
integers, and a fifth one has to agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.interface import drop_unused
from onnxplain.graphs.values.facts import Facts

__all__ = ["for_any_size"]

# Grids, rows and columns. Primes, so that no two sizes of a graph are equal by chance.
_FIT = ((19, 29), (19, 31), (23, 29), (23, 31))
_CHECK = (61, 37)  # higher than wide, where the others are wider
_PLACES = 1e-5  # float32 and a few roundings: how near one over a count is to it

Build = Callable[[tuple[int, int]], ir.Model]
Item = TypeVar("Item")


def for_any_size(build: Build, image: str, multiple: tuple[int, int]) -> ir.Model:
    """The graph that `build` makes, for every size.

    Args:
        build: Makes the graph for one height and width. Graphs of different sizes have the same
            nodes in the same order.
        image: Name of the image input.
        multiple: Height and width in pixels of one position of the grid.

    Raises:
        UnsupportedModelError: The graphs differ in more than such numbers.
    """
    sizes = [(h * multiple[0], w * multiple[1]) for h, w in (*_FIT, _CHECK)]
    models = [build(size) for size in sizes]
    _Union([model.graph for model in models], image, multiple).write()
    drop_unused(models[0])
    return models[0]


class _Union:
    """The graphs node by node, and what is written into the first one."""

    def __init__(self, graphs: Sequence[ir.Graph], image: str, multiple: tuple[int, int]) -> None:
        self.graphs = graphs
        self.graph = graphs[0]
        self.image = next(v for v in self.graph.inputs if v.name == image)
        self.multiple = multiple
        self.places: dict[ir.Value, tuple[object, ...]] = {}  # where a value comes from
        self.b = Builder(self.graph, {self.image: Facts((), ir.DataType.FLOAT)})

    def write(self) -> None:
        before = self.graph[0]
        for values in _together("inputs", [g.inputs for g in self.graphs]):
            self._pair("input", values)
        count = len(self.graph)
        for nodes in _together("nodes", self.graphs):
            self._node(nodes)
        for node in list(self.graph)[count:]:  # what is computed from the size comes first
            self.graph.remove(node)
            self.graph.insert_before(before, node)
        for values in _together("outputs", [g.outputs for g in self.graphs]):
            if len({self.places[v] for v in values}) > 1:
                raise _differ(f"output {values[0].name}")

    def _pair(self, place: object, values: Sequence[ir.Value]) -> None:
        for value in values:
            self.places[value] = (place, values[0].name)
        shapes = [None if value.shape is None else list(value.shape) for value in values]
        if values[0].is_graph_output() or values[0].is_graph_input():
            if any(shape is None or len(shape) != len(shapes[0] or ()) for shape in shapes):
                raise _differ(f"shape of {values[0].name}")
            dims = zip(*(shape or () for shape in shapes), strict=True)
            values[0].shape = ir.Shape([self._dim(sizes) for sizes in dims])
        else:  # to be inferred
            values[0].shape = None

    def _dim(self, sizes: Sequence[int | ir.SymbolicDim]) -> int | ir.SymbolicDim:
        if all(size == sizes[0] for size in sizes):
            return sizes[0]
        if not all(isinstance(size, int) for size in sizes):
            return ir.SymbolicDim(None)
        h, w = self.multiple
        names = {(0, h, 0, 0): "height", (0, 0, w, 0): "width"}
        numbers = _polynomial([Fraction(int(size)) for size in sizes])  # type: ignore[arg-type]
        return ir.SymbolicDim(None if numbers is None else names.get(numbers, _show(numbers)))

    def _node(self, nodes: Sequence[ir.Node]) -> None:
        node = nodes[0]
        kinds = {(n.domain, n.op_type, len(n.inputs), len(n.outputs)) for n in nodes}
        if len(kinds) > 1 or any(not _same_attributes(node, other) for other in nodes[1:]):
            raise _differ(f"node {node.outputs[0].name} ({node.op_type})")
        for i, values in enumerate(zip(*(n.inputs for n in nodes), strict=True)):
            if any(value is None for value in values):
                if any(value is not None for value in values):
                    raise _differ(f"input {i} of node {node.outputs[0].name} ({node.op_type})")
                continue
            known = [value for value in values if value is not None]
            if all(value in self.places for value in known):
                if len({self.places[value] for value in known}) > 1:
                    raise _differ(f"input {i} of node {node.outputs[0].name} ({node.op_type})")
                continue
            tensors = [v.const_value for v in known if v not in self.places]
            tensors = [tensor for tensor in tensors if tensor is not None]
            if len(tensors) < len(known):
                raise _differ(f"input {i} of node {node.outputs[0].name} ({node.op_type})")
            if any(tensor is not tensors[0] for tensor in tensors):
                made = self._computed([tensor.numpy() for tensor in tensors], node)
                if made is not None:
                    node.replace_input_with(i, made)
        for number, values in enumerate(zip(*(n.outputs for n in nodes), strict=True)):
            self._pair((id(node), number), values)

    def _computed(self, arrays: Sequence[np.ndarray], node: ir.Node) -> ir.Value | None:
        """The value that is each of the arrays at its size; None where they are all the same."""
        first = arrays[0]
        if any(array.shape != first.shape or array.dtype != first.dtype for array in arrays):
            raise _differ(f"a constant of node {node.outputs[0].name} ({node.op_type})")
        if all(np.array_equal(array, first) for array in arrays):
            return None
        for inverse in (False, True) if first.dtype.kind == "f" else (False,):
            numbers = [
                _polynomial([_count(value, inverse) for value in values])
                for values in zip(*(array.reshape(-1).tolist() for array in arrays), strict=True)
            ]
            if None not in numbers:
                whole = np.array(numbers, np.int64).reshape(*first.shape, 4)
                return self._expression(whole, first.dtype, inverse)
        raise UnsupportedModelError(
            f"a number of node {node.outputs[0].name} ({node.op_type}) follows from the picture's "
            "size in a way that is not known; export the model for one size"
        )

    def _expression(self, numbers: np.ndarray, dtype: np.dtype, inverse: bool) -> ir.Value:
        b = self.b
        value = b.sum(b.mul(b.constant(numbers), self._terms()), [-1], keepdims=False)
        value = b.cast(value, ir.DataType.from_numpy(dtype))
        return (b.unary("Reciprocal", value) if inverse else value).value

    def _terms(self) -> Tensor:
        """[1, h, w, h w]."""
        b, integer = self.b, ir.DataType.INT64
        size = b.op("Shape", [b.of(self.image)], (2,), integer, start=2, end=4)
        grid = b.div(size, b.ints(self.multiple))
        return b.concat([b.ints([1]), grid, b.reduce("ReduceProd", grid, [0], keepdims=True)], 0)


Numbers = tuple[int, int, int, int]


def _polynomial(values: Sequence[Fraction | None]) -> Numbers | None:
    """a, b, c, d such that a + b h + c w + d h w is each value at its grid, or None."""
    if any(value is None for value in values):
        return None
    known = [value for value in values if value is not None]
    (h0, w0), (h1, w1) = _FIT[0], _FIT[-1]
    low, wide, high, both = known[:4]
    d = (both - high - wide + low) / ((h1 - h0) * (w1 - w0))
    b = (high - low) / (h1 - h0) - d * w0
    c = (wide - low) / (w1 - w0) - d * h0
    a = low - b * h0 - c * w0 - d * h0 * w0
    h, w = _CHECK
    if known[4] != a + b * h + c * w + d * h * w or any(n.denominator > 1 for n in (a, b, c, d)):
        return None
    return int(a), int(b), int(c), int(d)


def _count(value: float, inverse: bool) -> Fraction | None:
    """The integer that a number is, or that it is one over."""
    if not math.isfinite(value) or (inverse and not value):
        return None
    count = round(1 / value if inverse else value)
    exact = abs(count * value - 1) < _PLACES if inverse else count == value
    return Fraction(count) if exact else None


def _show(numbers: Numbers) -> str:
    """The polynomial as the name of a size, such as 1+rows*columns."""
    names = ("", "rows", "columns", "rows*columns")
    terms = [
        name if n == 1 and name else f"{n}{name and '*'}{name}"
        for n, name in zip(numbers, names, strict=True)
        if n
    ]
    return "+".join(terms)


def _same_attributes(one: ir.Node, other: ir.Node) -> bool:
    if one.attributes.keys() != other.attributes.keys():
        return False
    return all(_same(a.value, other.attributes[name].value) for name, a in one.attributes.items())


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    if isinstance(one, ir.TensorProtocol) and isinstance(other, ir.TensorProtocol):
        return np.array_equal(one.numpy(), other.numpy())
    return bool(one == other)


def _together(what: str, graphs: Iterable[Iterable[Item]]) -> Iterator[tuple[Item, ...]]:
    lists = [list(items) for items in graphs]
    if len({len(items) for items in lists}) > 1:
        raise _differ(f"number of {what}")
    return iter(zip(*lists, strict=True))


def _differ(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the {what} depends on the picture's size; export the model for one size"
    )
