"""Inferred shapes against the shapes of a run, at batches the inference never saw."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from chains import outputs_of, parse, values
from differences import evaluate

from onnxplain.errors import ModelError, UnsupportedModelError
from onnxplain.graphs.values.facts import Batch, Dim
from onnxplain.graphs.values.shapes import infer

GRAPHS = {
    # The batch and the width are read from the value, the other sizes are constants.
    "legacy reshape": """
        s = Shape(x)
        b = Gather <axis = 0> (s, zero)
        w = Gather <axis = 0> (s, last)
        bu = Unsqueeze(b, first)
        wu = Unsqueeze(w, first)
        t = Concat <axis = 0> (bu, minus, wu)
        y = Reshape(x, t)
        n = Mul(b, two)
        nu = Unsqueeze(n, first)
        u = Concat <axis = 0> (nu, minus)
        z = Reshape(y, u)
    """,
    "reversed and computed sizes": """
        s = Shape(x)
        c = Slice(s, one, three)
        p = ReduceProd <keepdims = 1> (c)
        f = Cast <to = 1> (p)
        q = Cast <to = 7> (f)
        d = Div(q, twos)
        t = Concat <axis = 0> (minus, d)
        y = Reshape(x, t)
    """,
    # As torch's older exporter writes x.expand(-1, ...): -1 becomes 1 by way of Where.
    "expand": """
        ones = ConstantOfShape <value = int64[1] {1}> (lengths)
        wrong = Mul(ones, minus)
        b = Shape <start = 0, end = 1> (x)
        wanted = Concat <axis = 0> (b, minus, minus)
        same = Equal(wanted, wrong)
        t = Where(same, ones, wanted)
        y = Expand(cls, t)
        z = Concat <axis = 1> (y, x)
    """,
    "split, pad, slice": """
        a, bb = Split <axis = 1> (x, parts)
        y = Pad(bb, pads)
        z = Slice(y, one, big, axis, twos)
        m = ReduceMean <axes = [1], keepdims = 0> (z)
        g = Gather <axis = 1> (m, zero)
    """,
    "batch folded into rows": """
        y = Reshape(x, rows)
        t = Transpose <perm = [1, 0]> (y)
        sh = Shape(y)
        back = Reshape(t, halves)
        r = Range(zero, two, unit)
        c = Cast <to = 1> (r)
    """,
}


@pytest.mark.parametrize("name", GRAPHS)
def test_shapes_types_and_constants_are_those_of_a_run(name: str) -> None:
    proto = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (float[batch, 4, 6] x, float[1, 1, 6] cls) => ()
        <int64 zero = {0}, int64 last = {-1}, int64 two = {2}, int64 unit = {1},
         int64[1] first = {0}, int64[1] minus = {-1}, int64[1] one = {1}, int64[1] three = {3},
         int64[1] twos = {2}, int64[1] axis = {1}, int64[1] lengths = {3}, int64[1] big = {99},
         int64[2] parts = {1, 3}, int64[6] pads = {0, 1, 0, 0, 2, -1}, int64[2] rows = {-1, 6},
         int64[3] halves = {3, 2, -1}> { NODES }
        """.replace("NODES", GRAPHS[name])
    )
    model = ir.from_proto(proto)
    facts = infer(model, model.graph.inputs[0])
    names = [value for node in proto.graph.node for value in node.output]
    by_name = {value.name: fact for value, fact in facts.items()}
    assert any(isinstance(d, Batch) for n in names for d in by_name[n].shape)
    for batch in (1, 2, 5):
        for n, found in evaluate(outputs_of(proto, names), values(proto, batch)).items():
            fact = by_name[n]
            assert found.shape == tuple(numbers(d, batch) for d in fact.shape), n
            assert fact.dtype == ir.DataType.from_numpy(found.dtype)
            if fact.constant is not None:
                np.testing.assert_array_equal(fact.constant, found)


def numbers(dim: Dim, batch: int) -> int:
    return dim.factor * batch if isinstance(dim, Batch) else dim


def test_values_that_hold_the_batch_are_no_constants() -> None:
    model = ir.from_proto(
        parse(
            """
            <ir_version: 10, opset_import: ["" : 17]>
            g (float[batch, 4] x) => () {
                s = Shape(x)
                t = Shape <start = 1> (x)
                y = Neg(x)
            }
            """
        )
    )
    facts = infer(model, model.graph.inputs[0])
    shape, tail, y = (node.outputs[0] for node in model.graph)
    assert facts[shape].constant is None
    assert facts[shape].shape == (2,)
    np.testing.assert_array_equal(facts[tail].constant, [4])
    assert facts[y].shape == (Batch(), 4)


def test_a_frozen_batch_stays_and_recorded_shapes_are_not_believed() -> None:
    proto = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (float[3, 4] x) => (float[9, 9] y)
        <float[1, 1] z> {
            z = Transpose(x)
            y = Neg(z)
        }
        """
    )
    model = ir.from_proto(proto)
    facts = infer(model, model.graph.inputs[0])
    assert [facts[node.outputs[0]].shape for node in model.graph] == [(4, 3), (4, 3)]


def frozen(first: int, second: int) -> ir.Model:
    text = """
    <ir_version: 10, opset_import: ["" : 17]>
    g (float[batch, 4] x) => (float[a, b, c] y) <int64[3] frozen = {FIRST, SECOND, 2}> {
        y = Reshape(x, frozen)
    }
    """
    return ir.from_proto(parse(text.replace("FIRST", str(first)).replace("SECOND", str(second))))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_frozen_behind_a_dynamic_input_is_found(batch: int) -> None:
    model = frozen(batch, 2)
    x = model.graph.inputs[0]
    assert infer(model, x)[x].shape == (batch, 4)


def test_a_batch_that_none_fits_says_which_were_tried() -> None:
    model = frozen(3, 5)
    with pytest.raises(ModelError) as caught:
        infer(model, model.graph.inputs[0])
    assert str(caught.value) == (
        f"node {model.graph[0].name} (Reshape) makes 30 elements of 28 (in a batch of 7, and none "
        "of 1, 3 fits; export it with a batch of any size, or with its size as the input's first "
        "axis)"
    )


@pytest.mark.parametrize(
    ("nodes", "error", "message"),
    [
        ("y = com.microsoft.Gelu(x)", UnsupportedModelError, "com.microsoft.Gelu, not a standard"),
        ("y = NonZero(x)", UnsupportedModelError, r"y \(NonZero\) depends on more than the batch"),
        ("t = MatMul(x, x) y = Neg(t)", ModelError, r"MatMul\) is not valid ONNX"),
        ("y = Concat <axis = 0> (x, extra)", UnsupportedModelError, "a multiple of the batch"),
        (
            "s = Shape <end = 1> (x) t = ConstantOfShape <value = int64[1] {1}> (s) "
            "y = Expand(extra, t)",
            UnsupportedModelError,
            "the rank of y changes with the batch size",
        ),
    ],
)
def test_what_cannot_be_inferred(nodes: str, error: type[Exception], message: str) -> None:
    model = ir.from_proto(
        parse(
            """
            <ir_version: 10, opset_import: ["" : 17, "com.microsoft" : 1]>
            g (float[batch, 4] x) => ()
            <float[1, 4] extra = {1, 2, 3, 4}> { NODES }
            """.replace("NODES", nodes)
        )
    )
    with pytest.raises(error, match=message):
        infer(model, model.graph.inputs[0])


def test_an_input_of_unknown_size_is_refused() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 17]> g (float[batch, 3, h, w] x) => () '
            "{ y = Neg(x) }"
        )
    )
    with pytest.raises(UnsupportedModelError, match="expected fixed sizes after the batch"):
        infer(model, model.graph.inputs[0])
