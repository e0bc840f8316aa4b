"""Preprocessing inside the graph: a picture of any size goes in, as it is.

What `onnxplain.runtime.preprocessing.preprocess` does, in nodes. Pillow's resize is two products
with matrices that hold the filter's weights: along the rows, rounded to 0..255, then along the
columns. The matrices are computed from the picture's size, for the pixels of the crop alone, so
that cropping and padding need no nodes of their own.

Pillow 13 goes along the columns first where that is much shorter, which shows where a picture of
hard edges is squashed; older ones never do.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from onnxplain.contract import ImageInput
from onnxplain.errors import InputError
from onnxplain.graphs.explained import Explained
from onnxplain.graphs.interface import free_names
from onnxplain.graphs.normal.channels_last import channels_first

__all__ = ["IMAGE", "INTERPOLATIONS", "embed"]

IMAGE = "image"
INTERPOLATIONS = ("bicubic", "bilinear")
CROP_MODES = ("center", "squash", "border")


def embed(explained: Explained) -> Explained:
    """The same graphs with a uint8 picture [height, width, 3], RGB, as their input `IMAGE`.

    They take one picture at a time.

    Raises:
        InputError: The file takes more than one picture at once, pictures of any size, or ones that
            are resized with another filter than `INTERPOLATIONS`.
    """
    spec = explained.contract.input
    if spec.multiple is not None:
        raise InputError(
            "preprocessing in the graph brings every picture to one size; without a dynamic size"
        )
    if spec.batch not in (None, 1):
        raise InputError(
            f"preprocessing in the graph is for one picture, the batch is {spec.batch}"
        )
    if spec.interpolation not in INTERPOLATIONS:
        raise InputError(
            f"preprocessing in the graph with interpolation {spec.interpolation!r}; expected "
            f"{' or '.join(INTERPOLATIONS)}"
        )
    if spec.crop_mode not in CROP_MODES:
        raise InputError(
            f"unknown crop mode {spec.crop_mode!r}; expected one of {', '.join(CROP_MODES)}"
        )
    models = {}
    for kind, model in explained.models.items():
        models[kind], _ = channels_first(model, spec.layout)
        _replace_input(models[kind].graph, spec)
    changed = dataclasses.replace(spec, name=IMAGE, layout="HWC", batch=1)
    explained = dataclasses.replace(explained, models=models)
    return explained.with_contracts(lambda own: dataclasses.replace(own, input=changed))


def _replace_input(graph: ir.Graph, spec: ImageInput) -> None:
    if spec.name != IMAGE:
        free_names(graph, {IMAGE})
    pixels = next(value for value in graph.inputs if value.name == spec.name)
    image = ir.Value(
        name=IMAGE, type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape(["height", "width", 3])
    )
    graph.inputs[list(graph.inputs).index(pixels)] = image
    nodes = _Nodes()
    result = nodes.preprocess(image, spec)
    if pixels.dtype is not None and pixels.dtype != ir.DataType.FLOAT:
        result = nodes.op("Cast", result, to=int(pixels.dtype))
    pixels.replace_all_uses_with(result)
    taken = {v.name for node in graph for v in node.outputs} | {*graph.initializers}
    taken |= {value.name for value in graph.inputs}
    free = (name for i in itertools.count() if (name := f"preprocess/{i}") not in taken)
    for value in nodes.tape.initializers:
        value.name = next(free)
        graph.register_initializer(value)
    for node in nodes.tape.nodes:
        node.name, node.outputs[0].name = "", next(free)
    graph.insert_before(graph[0], nodes.tape.nodes)
    for value in graph.outputs:
        if value.shape is not None:  # one picture
            value.shape = ir.Shape([1, *list(value.shape)[1:]])


class _Nodes:
    """Nodes in the making."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}

    def op(self, op_type: str, *inputs: ir.Value | np.ndarray, **attributes: object) -> ir.Value:
        values = [v if isinstance(v, ir.Value) else self._constant(v) for v in inputs]
        return self.tape.op(op_type, values, attributes)  # type: ignore[arg-type]

    def _constant(self, array: np.ndarray) -> ir.Value:
        key = (array.dtype.str, array.tobytes(), array.shape)
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = self.tape.initializer(ir.tensor(array, name=name), name=name)
        return self._constants[key]

    def preprocess(self, image: ir.Value, spec: ImageInput) -> ir.Value:
        """Normalised pixel values [1, 3, height, width]."""
        original = self.op("Slice", self.op("Shape", image), _ints(0), _ints(2))
        resized = self._resized(original, spec)
        offset = self._offset(resized, spec)
        (rows, inside_rows), (columns, inside_columns) = (
            self._filter(
                spec.interpolation,
                spec.size[axis],
                *(self.op("Gather", pair, np.array(axis)) for pair in (original, resized, offset)),
            )
            for axis in (0, 1)
        )
        channels = self.op("Transpose", image, perm=[2, 0, 1])
        if spec.color_order == "BGR":
            channels = self.op("Gather", channels, _ints(2, 1, 0), axis=0)
        channels = self.op("Cast", channels, to=int(ir.DataType.FLOAT))
        across = self.op("MatMul", channels, self.op("Transpose", columns, perm=[1, 0]))
        picture = self._whole(self.op("MatMul", rows, self._whole(across)))
        inside = self.op("Mul", inside_rows, self.op("Transpose", inside_columns, perm=[1, 0]))
        fill = [round(255 * v) if spec.crop_mode == "border" else 0 for v in spec.mean]
        if spec.color_order == "BGR":
            fill.reverse()
        if any(fill):
            outside = self.op("Sub", _float(1), inside)
            picture = self.op("Add", picture, self.op("Mul", outside, _per_channel(fill)))
        scaled = self.op("Div", picture, _float(255))
        scaled = self.op("Sub", scaled, _per_channel(spec.mean))
        scaled = self.op("Div", scaled, _per_channel(spec.std))
        return self.op("Unsqueeze", scaled, _ints(0))

    def _whole(self, values: ir.Value) -> ir.Value:
        return self.op("Clip", self.op("Round", values), _float(0), _float(255))

    def _resized(self, original: ir.Value, spec: ImageInput) -> ir.Value:
        """Height and width that the picture is resized to."""
        target = [math.floor(side / spec.crop_pct) for side in spec.size]
        if spec.crop_mode == "squash":
            return self.op("Identity", _ints(*target))
        if spec.crop_mode == "center" and target[0] == target[1]:
            short = self.op("ReduceMin", original, keepdims=1)
            return self.op("Div", self.op("Mul", original, _ints(target[0])), short)
        # In double and step by step as in Python, so that halves are rounded to the same side.
        sides = self.op("Cast", original, to=int(ir.DataType.DOUBLE))
        ratios = self.op("Div", sides, np.array(target, np.float64))
        pick = "ReduceMax" if spec.crop_mode == "border" else "ReduceMin"
        rounded = self.op("Round", self.op("Div", sides, self.op(pick, ratios, keepdims=1)))
        whole = self.op("Cast", rounded, to=int(ir.DataType.INT64))
        return self.op("Max", whole, _ints(1))

    def _offset(self, resized: ir.Value, spec: ImageInput) -> ir.Value:
        """The crop's corner, negative where it is padded: half of the rest."""
        rest = self.op("Sub", resized, _ints(*spec.size))
        half = self.op("Div", rest, _ints(2))  # towards 0
        if spec.crop_rounding == "down":
            return half
        odd = self.op("Max", self.op("Sub", rest, self.op("Mul", half, _ints(2))), _ints(0))
        return self.op("Add", half, self.op("Mul", odd, self.op("Mod", half, _ints(2))))

    def _filter(
        self, interpolation: str, size: int, original: ir.Value, resized: ir.Value, offset: ir.Value
    ) -> tuple[ir.Value, ...]:
        """Weights of the original's pixels in the crop's along one axis, [size, original], and
        which of the crop's lie on the picture, [size, 1].

        In double until they are there: a weight that is off in its sixth digit rounds one sum in a
        hundred to another grey level.
        """
        original, resized, offset = (
            self.op("Cast", value, to=int(ir.DataType.DOUBLE))
            for value in (original, resized, offset)
        )
        place = self.op("Add", np.arange(size, dtype=np.float64)[:, None], offset)
        inside = self.op(
            "And",
            self.op("GreaterOrEqual", place, _double(0)),
            self.op("Less", place, resized),
        )
        scale = self.op("Div", original, resized)
        centre = self.op("Mul", self.op("Add", place, _double(0.5)), scale)
        pixels = self.op("Range", _double(0), original, _double(1))
        apart = self.op("Sub", self.op("Add", pixels, _double(0.5)), centre)
        apart = self.op("Abs", self.op("Div", apart, self.op("Max", scale, _double(1))))
        weights = self._bicubic(apart) if interpolation == "bicubic" else self._bilinear(apart)
        total = self.op("ReduceSum", weights, _ints(1), keepdims=1)
        shares = self.op("Where", inside, self.op("Div", weights, total), _double(0))
        return tuple(
            self.op("Cast", value, to=int(ir.DataType.FLOAT)) for value in (shares, inside)
        )

    def _bilinear(self, x: ir.Value) -> ir.Value:
        """max(0, 1 - x)."""
        return self.op("Relu", self.op("Sub", _double(1), x))

    def _bicubic(self, x: ir.Value) -> ir.Value:
        """The cubic convolution kernel of Keys (1981), equation 3 with a = -1/2:
        (1.5 x - 2.5) x² + 1 below 1, ((2.5 - 0.5 x) x - 4) x + 2 below 2."""
        near = self._polynomial(x, 1.5, -2.5, 0.0, 1.0)
        far = self._polynomial(x, -0.5, 2.5, -4.0, 2.0)
        beyond = self.op("Where", self.op("Less", x, _double(2)), far, _double(0))
        return self.op("Where", self.op("Less", x, _double(1)), near, beyond)

    def _polynomial(self, x: ir.Value, first: float, *others: float) -> ir.Value:
        value = self.op("Mul", x, _double(first))
        for i, other in enumerate(others):
            value = self.op("Mul", value, x) if i else value
            value = self.op("Add", value, _double(other)) if other else value
        return value


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _float(value: float) -> np.ndarray:
    return np.array(value, np.float32)


def _double(value: float) -> np.ndarray:
    return np.array(value, np.float64)


def _per_channel(values: Sequence[float]) -> np.ndarray:
    return np.array(values, np.float32)[:, None, None]
