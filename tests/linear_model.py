"""A classifier whose ideal explanation is known: the first logit is a weighted sum of pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxplain.contract import KEY, Contract, ImageInput, Source, Tokens
from onnxplain.outputs import map_name

__all__ = ["CLASSES", "linear_contract", "write_linear_model"]

CLASSES = ("bright", "dark")


def linear_contract(size: tuple[int, int], grid: tuple[int, int]) -> Contract:
    methods: dict[str, tuple[str, ...]] = {n: (map_name(n),) for n in ("attnlrp", "lrp")}
    return Contract(
        input=ImageInput(size=size, mean=(0, 0, 0), std=(1, 1, 1)),
        tokens=Tokens(prefix=(), grid=grid),
        readout=None,
        layers=(),
        classes=2,
        labels=CLASSES,
        methods=methods,
        maps={name: {} for name in methods},
        source=Source(name="linear"),
    )


def write_linear_model(
    path: Path, weights: NDArray[np.float32], threshold: float, grid: tuple[int, int]
) -> Path:
    """Logits: the sum of `weights` [H, W] times the first channel, and `threshold`.

    Its `map.attnlrp` is what each pixel adds to the first logit, so the ideal map of that class;
    `map.lrp` is that upside down.
    """
    height, width = weights.shape
    contract = linear_contract((height, width), grid)
    constants: dict[str, NDArray[Any]] = {
        "weights": weights[None].astype(np.float32),
        "threshold": np.array([[threshold]], np.float32),
        "largest": np.array(weights.max(), np.float32),
        "nothing": np.zeros((1, 1, 1), np.float32),
        "start": np.array([0], np.int64),
        "stop": np.array([1], np.int64),
        "axis": np.array([1], np.int64),
        "places": np.array([1, 2], np.int64),
        "column": np.array([1], np.int64),
        "target": np.array([-1], np.int64),
    }
    node = helper.make_node
    nodes = [
        node("Slice", ["pixel_values", "start", "stop", "axis"], ["channel"]),
        node("Squeeze", ["channel", "axis"], ["plane"]),
        node("Mul", ["plane", "weights"], ["parts"]),
        node("ReduceSum", ["parts", "places"], ["sum"], keepdims=0),
        node("Unsqueeze", ["sum", "column"], ["first"]),
        node("Mul", ["first", "nothing.2"], ["zero"]),
        node("Add", ["zero", "threshold"], ["second"]),
        node("Concat", ["first", "second"], ["logits"], axis=1),
        # The class makes no difference to the maps, but they have to depend on it.
        node("Cast", ["target"], ["class"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["class", "places"], ["class.3"]),
        node("Mul", ["class.3", "nothing"], ["shift"]),
        node("Add", ["parts", "shift"], ["map.attnlrp"]),
        node("Sub", ["largest", "map.attnlrp"], ["map.lrp"]),
    ]
    constants["nothing.2"] = np.zeros((1, 1), np.float32)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "linear",
        [
            value("pixel_values", TensorProto.FLOAT, ["batch", 3, height, width]),
            value("target", TensorProto.INT64, ["targets"]),
        ],
        [
            value("logits", TensorProto.FLOAT, ["batch", 2]),
            *(
                value(map_name(m), TensorProto.FLOAT, ["batch", height, width])
                for m in contract.maps
            ),
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {KEY: contract.to_json()})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path
