"""Which axis becomes which, against the definition: moving slice r moves slice r alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from chains import parse
from differences import Array, Case, Fixed, evaluate, one_node
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_cases import CASES
from random_nodes import Source

from onnxplain.graphs.values.axes import BATCH, ELEMENTWISE, Place, carried, follow, volume
from onnxplain.graphs.values.facts import Facts
from onnxplain.graphs.values.shapes import infer

IMAGE = {"image": np.zeros(1, np.float32)}


@pytest.mark.parametrize("op", sorted(CASES))
@given(data=st.data())
@settings(
    max_examples=20,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_a_carried_axis_keeps_its_slices_apart(op: str, data: st.DataObject) -> None:
    s = Source(data.draw, op)
    case = CASES[op](s)
    node, facts = first_node(case)
    before = run(case)
    for axis in range(before.ndim):
        source = carried(node, axis, facts)
        if source is None:
            assert op not in ELEMENTWISE
            continue
        assert len(source) == len(case.inputs)
        total = before.shape[axis]
        lengths = [
            facts[v].shape[a]
            for v, a in zip(node.inputs, source, strict=True)
            if v and a is not None
        ]
        assert set(lengths) <= {total}
        r = s.integer(0, total - 1)
        inputs = [moved(x, a, r) for x, a in zip(case.inputs, source, strict=True)]
        after = run(replace(case, inputs=inputs))
        assert after.shape == before.shape
        others = np.arange(total) != r
        np.testing.assert_array_equal(after.compress(others, axis), before.compress(others, axis))


def first_node(case: Case) -> tuple[ir.Node, dict[ir.Value, Facts]]:
    model = ir.from_proto(one_node(case))
    return next(iter(model.graph)), infer(model, model.graph.inputs[0])


def run(case: Case) -> Array:
    return evaluate(one_node(case), {**IMAGE, **case.operands})["y0"]


def moved(x: Array | Fixed | None, axis: int | None, r: int) -> Array | Fixed | None:
    """The operand with other values in slice r of an axis."""
    if x is None or axis is None:
        return x
    if isinstance(x, Fixed):
        array = moved(x.array, axis, r)
        assert isinstance(array, np.ndarray)
        return Fixed(array)
    x = x.copy()
    inside = (slice(None),) * axis + (r,)
    x[inside] = ~x[inside] if x.dtype == bool else x[inside] + x.dtype.type(1)
    return x


# What the layout of tokens and the walk's savings rest on: axes that must be found. One that is
# merged into another is given with what runs slower and what runs faster than it.
FOLLOWED: dict[str, list[int | tuple[int, int, int] | None]] = {
    "y = Relu(x)": [0, 1, 2],
    "y = Add(x, row)": [0, 1, 2],
    "y = Mul(table, x)": [0, 1, 2],
    "y = Sub(x, column)": [0, 1, 2],
    "y = Unsqueeze(x, one)": [0, 2, 3],
    "t = Unsqueeze(x, one) y = Squeeze(t, one)": [0, 1, 2],
    "y = Transpose <perm = [2, 0, 1]> (x)": [1, 2, 0],
    "y = Transpose(x)": [2, 1, 0],
    "y = MatMul(x, square)": [0, 1, None],
    "y = MatMul(square, x)": [0, None, 2],
    "y = Gather <axis = 2> (x, number)": [0, 1, None],
    "y = Gather <axis = 1> (x, pair)": [0, None, 3],
    "t = Transpose <perm = [1, 0, 2]> (x) y = GatherND(t, places)": [1, None, 2],
    "y = Slice(x, one, two, two)": [0, 1, None],
    "y = Slice(x, last, start, two, last)": [None, None, None],
    "y = Concat <axis = 2> (x, x)": [0, 1, None],
    "y, z = Split <axis = -1> (x, parts)": [0, 1, None],
    "y = Softmax(x)": [0, 1, None],
    "y = LogSoftmax <axis = 1> (x)": [0, None, 2],
    "y = LayerNormalization <axis = 1> (x, square)": [0, None, None],
    "y = ReduceMean <axes = [1]> (x)": [0, None, 2],
    "y = ReduceSum <keepdims = 0> (x, one)": [0, None, 1],
    "y = ReduceMax <axes = [-1, 0], keepdims = 0> (x)": [None, 0, None],
    "y = Reshape(x, heads)": [0, 1, None],
    "y = Reshape(x, flat)": [(0, 1, 4), (0, BATCH, 1), 1],
    "t = Reshape(x, flat) u = MatMul(t, square) y = Reshape(u, again)": [0, 1, None],
    "y = Flatten(x)": [0, (1, 1, 4), (1, 4, 1)],
    "y = Expand(x, more)": [1, 2, 3],
    "y = Where(mask, x, column)": [0, 1, 2],
    "y = Pad(x, shift)": [0, None, 2],
    'y = Einsum <equation = "bij,jk->kbi"> (x, square)': [1, 2, None],
    "y = ReduceMean(x)": [None, None, None],
    "y = Sin(x)": [None, None, None],
}


@pytest.mark.parametrize("nodes", FOLLOWED)
def test_follow(nodes: str) -> None:
    model = ir.from_proto(
        parse(
            """
            <ir_version: 10, opset_import: ["" : 17]>
            g (float[batch, 4, 4] x, float[4] row, float[4, 4] square) => ()
            <int64[1] one = {1}, int64[1] two = {2}, int64[1] last = {-1}, int64[1] start = {-9},
             int64[2] parts = {1, 3}, int64 number = {2}, int64[2, 2] pair = {0, 1, 1, 3},
             int64[3, 1] places = {2, 0, 1},
             int64[4] heads = {0, 4, 2, 2}, int64[2] flat = {-1, 4}, int64[4] more = {3, 1, 1, 1},
             int64[3] again = {-1, 4, 4}, int64[6] shift = {0, -1, 0, 0, 1, 0},
             bool[4, 1] mask = {1, 0, 0, 1}, float[4, 1] column = {1, 2, 3, 4},
             float[1, 4, 4] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
            { NODES }
            """.replace("NODES", nodes)
        )
    )
    x = model.graph.inputs[0]
    facts = infer(model, x)
    value = x
    places: list[Place | None]
    places = [Place(axis, volume([size])) for axis, size in enumerate(facts[x].shape)]
    for node in model.graph:
        places = [None if p is None else follow(node, value, p, facts) for p in places]
        value = node.outputs[0]
    shape = facts[value].shape
    found = [
        p and (p.axis if p.whole(shape) else (p.axis, p.before, p.inside(shape))) for p in places
    ]
    assert found == FOLLOWED[nodes]


def test_gemm_carries_rows_and_columns() -> None:
    case = Case(
        "Gemm",
        [np.zeros((2, 3)), np.zeros((4, 2)), np.zeros((3, 1))],
        {"transA": 1, "transB": 1},
    )
    node, facts = first_node(case)
    assert carried(node, 0, facts) == (1, None, 0)
    assert carried(node, 1, facts) == (None, 0, None)
