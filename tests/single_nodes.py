"""Models of one node, run as they are and as the rewrites write them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper

from onnxplain.graphs import normal  # noqa: F401  (fills the table)
from onnxplain.graphs.normal.rewrite import rewrite
from onnxplain.graphs.values.shapes import bound

__all__ = ["Arrays", "floats", "run", "single", "written_out"]

Arrays = Mapping[str, np.ndarray | None]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def single(
    op: str,
    arrays: Arrays,
    opset: int,
    domain: str = "",
    outputs: tuple[str, ...] = ("y",),
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node, whose inputs are those of `arrays`; None is left out."""
    given = {name: array for name, array in arrays.items() if array is not None}
    node = helper.make_node(
        op,
        [name if name in given else "" for name in arrays],
        outputs,
        name="the_node",
        domain=domain,
        **attributes,
    )
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in given.items()
    ]
    results = [helper.make_tensor_value_info(name, 1, None) for name in outputs if name]
    graph = helper.make_graph([node], "single", inputs, results)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run(model: onnx.ModelProto, arrays: Arrays) -> list[np.ndarray]:
    """What onnxruntime gives for it, node by node."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {name: a for name, a in arrays.items() if a is not None})


def written_out(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in standard operators."""
    graph = ir.from_proto(model)
    first = graph.graph.inputs[0]
    assert first.shape is not None
    rewrite(graph, bound(graph, first, int(first.shape[0]), None))  # type: ignore[arg-type]
    del graph.opset_imports["com.microsoft"]  # so that none of its operators can run
    return ir.to_proto(graph)
