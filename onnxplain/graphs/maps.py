"""The methods inside the graph: from the outputs that they read to finished maps.

The formulas are those of `onnxplain.runtime.methods`, which is the reference. A map is the patch
part of a row vector that passes through one matrix per layer, last layer first. The walk back
through the model comes by the layers in the same order, so a layer's matrix can be used up as soon
as its gradient is there, and its attention need not wait for the other layers.

onnxruntime computes of a node's operands first the one that stands last in the file. So the
matrices are written before the rows that pass through them: a row is there before the next matrix
is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxplain.contract import Contract
from onnxplain.errors import InputError
from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.values.facts import Shape
from onnxplain.outputs import METHODS

__all__ = ["OPTIONS", "draw", "options_of"]

OPTIONS: dict[str, tuple[str, ...]] = {
    "rollout": ("head_fusion", "discard_ratio", "start_layer"),
    "gradient_rollout": ("discard_ratio", "start_layer"),
    "transformer_attribution": ("start_layer",),
}
"""What a method's map depends on besides the picture and the class."""

_FUSE = {"mean": "ReduceMean", "max": "ReduceMax", "min": "ReduceMin"}


def options_of(method: str, given: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The options of a method's map, with the defaults of those that are not given.

    Raises:
        InputError: A value that the method does not take.
    """
    known = {option for options in OPTIONS.values() for option in options}
    for option in given:
        if option not in known:
            raise InputError(
                f"unknown map option {option!r}; expected some of {', '.join(sorted(known))}"
            )
    chosen = {"head_fusion": "mean", "discard_ratio": 0.0, "start_layer": 0} | dict(given)
    if chosen["head_fusion"] not in _FUSE:
        fusions = ", ".join(_FUSE)
        raise InputError(f"unknown head_fusion {chosen['head_fusion']!r}; one of {fusions}")
    ratio, start = chosen["discard_ratio"], chosen["start_layer"]
    if not isinstance(ratio, int | float) or not 0 <= ratio < 1:
        raise InputError(f"discard_ratio is {ratio!r}, expected 0 <= ratio < 1")
    if not isinstance(start, int) or (layers and not 0 <= start < layers):
        raise InputError(f"start_layer is {start!r}, expected 0..{layers - 1}")
    return {name: chosen[name] for name in OPTIONS.get(method, ())}


def draw(
    b: Builder,
    contract: Contract,
    values: Mapping[str, Tensor],
    method: str,
    options: Mapping[str, Any],
) -> Tensor:
    """The method's map, [batch, rows, columns] of the grid or of the pixels.

    Args:
        b: Builder on the graph.
        contract: Of the graph with the outputs that the method reads.
        values: These outputs by name, as the contract promises them.
        method: One of `METHODS`.
        options: As `options_of` gives them.
    """
    needs = METHODS[method]
    if needs.pixels is not None:
        return b.sum(values[needs.pixels], [1], keepdims=False)
    if needs.features:
        assert contract.features is not None and contract.features_gradient is not None
        return _gradcam(b, contract, values[contract.features], values[contract.features_gradient])
    return _METHODS[method](_Rows(b, contract, values), options)


@dataclass(frozen=True)
class _Rows:
    """What the methods that start from the head's row have in common."""

    b: Builder
    contract: Contract
    values: Mapping[str, Tensor]

    def layers(self, kind: str, start: int = 0) -> list[tuple[int, Tensor]]:
        """Number and output of the layers, last first, down to `start`."""
        found = [getattr(layer, kind) for layer in self.contract.layers]
        numbers = range(len(found) - 1, start - 1, -1)
        return [(i, self.values[found[i]]) for i in numbers if found[i] is not None]

    @property
    def dtype(self) -> ir.DataType:
        return next(iter(self.values.values())).dtype

    def row(self) -> Tensor:
        """Weight of each token in what the head reads, [1 or batch, 1, tokens]."""
        readout, count = self.contract.readout, self.contract.tokens.count
        assert readout is not None
        if readout.weights is not None:
            ((start, stop),) = readout.ranges
            weights = self.values[readout.weights]
            if weights.rank == 4:  # of a pooling attention, by head and query
                weights = self.b.mean(weights, [1, 2], keepdims=False)
            return self.b.pad(self.b.unsqueeze(weights, 1), 2, start, count - stop)
        total = sum(stop - start for start, stop in readout.ranges)
        weight = self.b.constant(np.full((1, 1, 1), 1 / total, self.dtype.numpy()))
        parts = [
            self.b.pad(
                self.b.expand(weight, (1, 1, stop - start), weight.value), 2, start, count - stop
            )
            for start, stop in readout.ranges
        ]
        return functools.reduce(self.b.add, parts)

    def onward(self, row: Tensor, number: int, matrix: Tensor, scale: Tensor | None) -> Tensor:
        """`row` after a layer: `row . M + row`, with M's rows divided by `scale` + 1 if given."""
        b, first = self.b, self.contract.layers[number].first_token
        count = self.contract.tokens.count
        queries, keys = matrix.shape[-2:]
        assert isinstance(queries, int) and isinstance(keys, int)
        first = 0 if queries == keys == count else first
        if scale is not None:
            scale = b.pad(scale, 2, first, count - first - queries)
            row = b.div(row, b.add(scale, 1.0))
        # Tokens that the layer does not have stay as they are.
        own = b.slice(row, 2, first, first + queries)
        added = b.pad(self.through(own, matrix), 2, first, count - first - keys)
        return b.add(added, row)

    def through(self, row: Tensor, matrix: Tensor) -> Tensor:
        """`row . matrix`, with the row as the second operand."""
        column = self.b.matmul(self.b.swap(matrix), self.b.swap(row))
        return self.b.swap(column)

    def identity(self, tokens: int) -> Tensor:
        """[tokens, tokens]."""
        b, integer = self.b, ir.DataType.INT64
        bounds = [b.constant(np.array(n, np.int64)) for n in (0, tokens, 1)]
        numbers = b.op("Range", bounds, (tokens,), integer)
        same = b.compare("Equal", b.unsqueeze(numbers, 0), b.unsqueeze(numbers, 1))
        return b.cast(same, self.dtype)

    def to_grid(self, tokens: Tensor) -> Tensor:
        """The patch part of [batch, 1, tokens] as [batch, rows, columns]."""
        count, prefix = self.contract.tokens.count, len(self.contract.tokens.prefix)
        patches = self.b.slice(tokens, 2, prefix, count)
        return self.b.reshape(patches, (tokens.shape[0], *self.contract.tokens.grid))

    def last(self, kind: str) -> Tensor:
        """Output of the last layer, with all tokens."""
        number, tensor = self.layers(kind)[0]
        return self.square(number, tensor)

    def square(self, number: int, tensor: Tensor) -> Tensor:
        """The matrices of a layer with zeros for the tokens that it does not have."""
        count, first = self.contract.tokens.count, self.contract.layers[number].first_token
        for axis in (tensor.rank - 2, tensor.rank - 1):
            size = tensor.shape[axis]
            assert isinstance(size, int)
            tensor = self.b.pad(tensor, axis, first, count - first - size)
        return tensor


def _raw_attention(rows: _Rows, options: Mapping[str, Any]) -> Tensor:
    fused = rows.b.mean(rows.last("attention"), [1], keepdims=False)
    return rows.to_grid(rows.through(rows.row(), fused))


def _partial_lrp(rows: _Rows, options: Mapping[str, Any]) -> Tensor:
    positive = rows.b.unary("Relu", rows.last("relevance_lrp"))
    fused = rows.b.mean(positive, [1], keepdims=False)
    return rows.to_grid(rows.through(rows.row(), fused))


def _attention_gradcam(rows: _Rows, options: Mapping[str, Any]) -> Tensor:
    b, row = rows.b, rows.b.unsqueeze(rows.row(), 1)
    attention, gradient = rows.last("attention"), rows.last("gradient")
    prefix, count = len(rows.contract.tokens.prefix), rows.contract.tokens.count
    weights = b.mean(b.slice(rows.through(row, gradient), 3, prefix, count), [3])
    fused = b.mean(b.mul(weights, rows.through(row, attention)), [1], keepdims=False)
    return rows.to_grid(b.unary("Relu", fused))


def _rollout(rows: _Rows, options: Mapping[str, Any]) -> Tensor:
    fuse = _FUSE[options["head_fusion"]]
    b, tokens, product = rows.b, rows.contract.tokens.count, None
    fused = []
    # First layer first, as the attentions come, so that none has to wait for the last one.
    for number, attention in reversed(rows.layers("attention", options["start_layer"])):
        matrix = rows.square(number, b.reduce(fuse, attention, [1], keepdims=False))
        matrix = _discard(rows, matrix, options["discard_ratio"])
        fused.append((matrix, b.add(b.sum(matrix, [2]), 1.0)))
    for matrix, scale in fused:
        if product is None:
            product = b.div(b.add(matrix, rows.identity(tokens)), scale)
        else:
            product = b.div(b.add(b.matmul(matrix, product), product), scale)
    assert product is not None
    return rows.to_grid(rows.through(rows.row(), product))


def _gradient_rollout(rows: _Rows, options: Mapping[str, Any]) -> Tensor:
    b = rows.b
    fused = []
    for (i, a), (_, g) in zip(
        rows.layers("attention", options["start_layer"]),
        rows.layers("gradient", options["start_layer"]),
        strict=True,
    ):
        matrix = b.unary("Relu", b.mean(b.mul(a, g), [1], keepdims=False))
        if options["discard_ratio"]:
            matrix = _discard(rows, rows.square(i, matrix), options["discard_ratio"])
        fused.append((i, matrix, b.swap(b.sum(matrix, [2]))))
    row = rows.row()
    for number, matrix, scale in fused:
        row = rows.onward(row, number, matrix, scale)
    return rows.to_grid(row)


def _discard(rows: _Rows, fused: Tensor, ratio: float) -> Tensor:
    """Zeroes the int(ratio * N * N) lowest entries; of equal ones the first, as TopK does."""
    b, tokens = rows.b, rows.contract.tokens.count
    count = int(ratio * tokens * tokens)
    if not count:
        return fused
    batch = fused.shape[0]
    flat = b.reshape(fused, (batch, tokens * tokens))
    shape = (batch, count)
    lowest = b.op(
        "TopK", [flat, b.ints([count])], shape, ir.DataType.INT64, output=1, axis=1, largest=0
    )
    zeros = b.mul(b.cast(lowest, flat.dtype), 0.0)
    kept = b.op("ScatterElements", [flat, lowest, zeros], flat.shape, axis=1)
    if rows.contract.tokens.prefix:  # the class token's attention to itself is never discarded
        rest = b.slice(kept, 1, 1, tokens * tokens)
        kept = b.concat([b.slice(flat, 1, 0, 1), rest], 1)
    return b.reshape(kept, fused.shape)


def _accumulate(rows: _Rows, first: str, second: str, start: int) -> Tensor:
    """`r . (I + E_last) ... (I + E_start)`, E = mean_h(relu(a * b))."""
    b = rows.b
    pairs = zip(rows.layers(first, start), rows.layers(second, start), strict=True)
    fused = [
        (number, b.mean(b.unary("Relu", b.mul(x, y)), [1], keepdims=False))
        for (number, x), (_, y) in pairs
    ]
    row = rows.row()
    for number, matrix in fused:
        row = rows.onward(row, number, matrix, None)
    return rows.to_grid(row)


def _generic_attention(rows: _Rows, options: Mapping[str, Any]) -> Tensor:
    return _accumulate(rows, "attention", "gradient", 0)


def _transformer_attribution(rows: _Rows, options: Mapping[str, Any]) -> Tensor:
    return _accumulate(rows, "gradient", "relevance", options["start_layer"])


_METHODS: dict[str, Callable[[_Rows, Mapping[str, Any]], Tensor]] = {
    "raw_attention": _raw_attention,
    "rollout": _rollout,
    "attention_gradcam": _attention_gradcam,
    "partial_lrp": _partial_lrp,
    "gradient_rollout": _gradient_rollout,
    "generic_attention": _generic_attention,
    "transformer_attribution": _transformer_attribution,
}


def _gradcam(b: Builder, contract: Contract, features: Tensor, gradient: Tensor) -> Tensor:
    batch, grid = features.shape[0], contract.tokens.grid
    if features.rank == 4:
        flat: Shape = (batch, features.shape[1], grid[0] * grid[1])
        f, weights = b.reshape(features, flat), b.mean(b.reshape(gradient, flat), [2])
        fused = b.sum(b.mul(f, weights), [1], keepdims=False)
    else:
        prefix, count = len(contract.tokens.prefix), contract.tokens.count
        f, g = (b.slice(x, 1, prefix, count) for x in (features, gradient))
        fused = b.sum(b.mul(f, b.mean(g, [1])), [2], keepdims=False)
    return b.reshape(b.unary("Relu", fused), (batch, *grid))
