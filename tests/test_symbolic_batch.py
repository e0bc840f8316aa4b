"""Every rule keeps a batch of any size: the same graph at batch 1, 2 and 5."""

from __future__ import annotations

import pytest
from chains import check, parse

# Nodes with a symbolic batch: batch axes against axes of size 1 and against operands without one.
SYMBOLIC = {
    "y = Mul(x, c)": ["x", "c"],
    "y = Div(c, x2)": ["x2", "c"],
    "y = Add(x, row)": ["x", "row"],
    "y = Sub(cls, x)": ["x", "cls"],
    "y = Max(x, cls, row)": ["x", "cls", "row"],
    "y = Where(mask, x, cls)": ["x", "cls"],
    "y = Pow(x2, row)": ["x2", "row"],
    "s = Shape(x) y = Expand(cls, s)": ["cls"],
    "s = Shape <start = 0, end = 1> (x) t = Concat <axis = 0> (s, two, two) y = Expand(cls, t)": [
        "cls"
    ],
    "y = Concat <axis = 1> (x, c)": ["x", "c"],
    "y = MatMul(x, x)": ["x"],
    "y = MatMul(x, cls)": ["x", "cls"],
    "y = MatMul(cls, x)": ["x", "cls"],
    "y = MatMul(x, row)": ["x", "row"],
    "t = Flatten(x) y = Gemm <transB = 1> (t, wide, row)": ["x", "wide", "row"],
    "t = Flatten(x) y = Gemm <transA = 1> (t, three)": ["x", "three"],
    'y = Einsum <equation = "bij,jk->bki"> (x, square)': ["x", "square"],
    'y = Einsum <equation = "bij->ij"> (x)': ["x"],
    'y = Einsum <equation = "bij->i"> (x)': ["x"],
    "y = Reshape(x, joined)": ["x"],
    "y = Reshape(x, flat)": ["x"],
    "t = Reshape(x, flat) y = Reshape(t, unflat)": ["x", "t"],
    "y = Flatten <axis = 0> (x)": ["x"],
    "y = Flatten <axis = 2> (x)": ["x"],
    "y = Transpose <perm = [1, 0, 2]> (x)": ["x"],
    "y = ReduceMean <axes = [1]> (x)": ["x"],
    "y = ReduceSum <keepdims = 0> (x)": ["x"],
    "y = ReduceSum <keepdims = 0> (x, zero)": ["x"],
    "y = ReduceMax <axes = [0, 2], keepdims = 0> (x)": ["x"],
    "y = Softmax <axis = 0> (x)": ["x"],
    "y = LogSoftmax <axis = 1> (x)": ["x"],
    "y = LayerNormalization <axis = -2> (x, square)": ["x"],
    "y = GlobalAveragePool(x)": ["x"],
    "y = Conv <pads = [1, 0], strides = [2]> (x, kernel)": ["x"],
    "y = Slice(x, one, two, two)": ["x"],
    "y = Gather <axis = 1> (x, twice)": ["x"],
    "y = Pad(x, pads)": ["x"],
    "y = Unsqueeze(x, zero)": ["x"],
}


@pytest.mark.parametrize("nodes", SYMBOLIC)
def test_a_symbolic_batch(nodes: str) -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 2, 2] x, double[batch, 1, 2] c, double[1, 2, 2] cls, double[2] row,
           double[2, 2] square, double[2, 4] wide, double[batch, 3] three,
           double[3, 2, 2] kernel) => ()
        <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[2] joined = {0, -1},
         int64[2] flat = {-1, 2}, int64[3] unflat = {-1, 2, 2}, int64[3] twice = {1, 0, 1},
         int64[6] pads = {0, 1, -1, 0, 0, 2}, bool[2, 1] mask = {1, 0}> {
            x2 = Exp(x)
            NODES
        }
        """.replace("NODES", nodes)
    )
    check(model, SYMBOLIC[nodes], batches=(1, 2, 5))
