"""The reverse walk: sums, ranges of tokens, splits, and what it leaves alone."""

from __future__ import annotations

import numpy as np
import pytest
from chains import check, outputs_of, parse, values
from differences import Differentiated, agree, differences, differentiate, evaluate

import onnxplain.graphs.backward.walk
from onnxplain.errors import UnsupportedOperatorError
from onnxplain.graphs.backward.walk import Range

# A transformer block with pre-normalisation on five tokens of six channels and two heads.
BLOCK = """
<ir_version: 10, opset_import: ["" : 20]>
block (double[batch, 5, 6] x, double[6] s1, double[6] s2, double[6, 18] wq, double[6, 6] wo,
       double[6, 8] w1, double[8] b1, double[8, 6] w2, double[6, 3] head) => ()
<int64[5] heads = {0, 0, 3, 2, 3}, int64[3] joined = {0, 0, 6}, double root = {0.57735},
 int64 zero = {0}, int64 one = {1}, int64 two = {2}> {
    n1 = LayerNormalization(x, s1)
    qkv = MatMul(n1, wq)
    grouped = Reshape(qkv, heads)
    turned = Transpose <perm = [2, 0, 3, 1, 4]> (grouped)
    q = Gather <axis = 0> (turned, zero)
    k = Gather <axis = 0> (turned, one)
    v = Gather <axis = 0> (turned, two)
    scaled = Mul(q, root)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    scores = MatMul(scaled, kt)
    p = Softmax(scores)
    o = MatMul(p, v)
    ot = Transpose <perm = [0, 2, 1, 3]> (o)
    oj = Reshape(ot, joined)
    a = MatMul(oj, wo)
    r = Add(a, x)
    n2 = LayerNormalization(r, s2)
    h = MatMul(n2, w1)
    hb = Add(b1, h)
    g = Gelu(hb)
    m = MatMul(g, w2)
    z = Add(m, r)
    READ
    y = MatMul(read, head)
}
"""
READS = {  # how a head picks tokens, and the range of queries that the attention is left with
    "read = Gather <axis = 1> (z, zero)": (0, 1),
    "i = Constant <value_ints = [-1]> () read = Gather <axis = 1> (z, i)": (4, 5),
    "i = Constant <value_ints = [1, 2]> () read = Gather <axis = 1> (z, i)": (1, 3),
    "parts = Constant <value_ints = [1, 4]> () f, read = Split <axis = 1> (z, parts)": (1, 5),
    "b = Constant <value_ints = [3]> () e = Constant <value_ints = [5]> ()"
    "i = Constant <value_ints = [1]> () t = Slice(z, b, e, i) read = ReduceMean(t, i)": (3, 5),
    "i = Constant <value_ints = [1, 1]> () read = Gather <axis = 1> (z, i)": None,
    "i = Constant <value_ints = [1]> () read = ReduceMax(z, i)": None,
}


def test_cotangents_of_several_consumers_are_summed() -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 3] x) => () {
            t = Tanh(x)
            a = Mul(t, t)
            b = Exp(t)
            c = Sub(b, t)
            d = Add(a, c)
            y = Mul(d, x)
        }
        """
    )
    check(model, ["x", "t", "b"])
    check(model, ["x", "t", "d"], outputs=["y", "a", "t"])


@pytest.mark.parametrize("read", READS)
def test_a_block_read_at_few_tokens(read: str) -> None:
    model = parse(BLOCK.replace("READ", read))
    result = check(model, ["p", "n1", "r"], batches=(1, 2, 5) if "zero" in read else (2,))
    expected = READS[read]
    place = None if expected is None else Range(2, *expected, 5)
    assert result.found["p"].range == place


def test_a_range_gives_the_numbers_of_the_dense_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    model = parse(BLOCK.replace("READ", "read = Gather <axis = 1> (z, one)"))
    taps = ["x", "p", "r"]
    ranged = differentiate(outputs_of(model, ["y"]), {"y": None}, taps)
    monkeypatch.setattr(onnxplain.graphs.backward.walk, "carried", lambda *_: None)
    full = differentiate(outputs_of(model, ["y"]), {"y": None}, taps)
    feeds = values(model, 3) | {"seed.y": np.random.default_rng(1).normal(size=(3, 3))}
    for name, expected in evaluate(full.model, feeds).items():
        agree(evaluate(ranged.model, feeds)[name], expected, 1e-12)
    assert full.found["p"].range is None
    hidden = 8  # channels of the MLP
    assert written(full, hidden) == {5}
    assert written(ranged, hidden) == {1}


def test_float32_statistics_of_a_range_are_those_of_the_forward_pass() -> None:
    text = BLOCK.replace("READ", "read = Gather <axis = 1> (z, one)")
    results = []
    for kind, dtype in (("double", np.float64), ("float", np.float32)):
        model = outputs_of(parse(text.replace("double", kind)), ["y"])
        result = differentiate(model, {"y": None}, ["p", "r"])
        feeds = {k: v.astype(np.float32) for k, v in values(model, 2).items()}
        feeds["seed.y"] = np.ones((2, 3), np.float32)
        results.append(evaluate(result.model, {k: v.astype(dtype) for k, v in feeds.items()}))
    exact, found = results
    assert "n2/1" in [name for node in result.model.graph.node for name in node.output]
    for name in exact:
        agree(found[name], exact[name], 1e-5)  # rounding of float32 through a block


def written(result: Differentiated, width: int) -> set[int]:
    """Token counts of the [batch, tokens, width] tensors that the walk added."""
    added = {n.output[0] for n in result.model.graph.node if n.name.startswith("n_explain/")}
    found = [v.type.tensor_type.shape.dim for v in result.model.graph.value_info if v.name in added]
    return {d[1].dim_value for d in found if len(d) == 3 and d[2].dim_value == width}


SPLITS = {
    "Split": "q, k, v = Split <axis = 2> (w, sizes)",
    "Slice": "q = Slice(w, zero, two, last) k = Slice(w, two, four, last) "
    "v = Slice(w, four, end, last)",
    "Gather": "q = Gather <axis = 2> (w, first) k = Gather <axis = 2> (w, second) "
    "v = Gather <axis = 2> (w, third)",
}


@pytest.mark.parametrize("split", SPLITS)
def test_parts_that_tile_an_axis_are_joined_by_one_concat(split: str) -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 4, 3] x, double[3, 7] m) => ()
        <int64[3] sizes = {2, 2, 3}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4},
         int64[1] end = {9223372036854775807}, int64[1] last = {-1}, int64[2] first = {0, 1},
         int64[2] second = {2, 3}, int64[3] third = {4, -2, 6}> {
            w = MatMul(x, m)
            SPLIT
            kt = Transpose <perm = [0, 2, 1]> (k)
            s = MatMul(q, kt)
            p = Softmax(s)
            y = MatMul(p, v)
        }
        """.replace("SPLIT", SPLITS[split])
    )
    result = check(model, ["x", "w"])
    assert result.operators.count("Concat") == 1
    assert "Pad" not in result.operators


def test_parts_that_leave_a_gap_or_overlap() -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 5] x) => ()
        <int64[2] a = {0, 1}, int64[2] b = {1, 2}, int64[2] c = {3, 4}, int64[2] d = {3, 4}> {
            e = Gather <axis = 1> (x, a)
            f = Gather <axis = 1> (x, b)
            g = Gather <axis = 1> (x, c)
            h = Gather <axis = 1> (x, d)
            i = Mul(e, g)
            j = Mul(f, h)
            y = Mul(i, j)
            z = ReduceMax <axes = [1], keepdims = 0> (x)
        }
        """
    )
    check(model, ["x"])
    check(model, ["x"], outputs=["i", "z"])
    check(model, ["x"], outputs=["j"])


def test_parts_of_two_axes_do_not_tile_one() -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 4, 4] x) => () <int64[2] a = {0, 1}, int64[2] b = {2, 3}> {
            y = Gather <axis = 1> (x, a)
            z = Gather <axis = 2> (x, b)
        }
        """
    )
    check(model, ["x"], outputs=["y", "z"])


def test_row_dots_of_a_product_serve_a_softmax_over_rows_alone() -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 1, 4, 5] x, double[1, 2, 3, 4] s, double[batch, 2, 3, 4] t) => () {
            p = Softmax(s)
            broadcast = MatMul(p, x)
            r = Softmax(t)
            rows = MatMul(r, x)
            twice = Mul(r, r)
            q = Softmax <axis = 2> (t)
            columns = MatMul(q, x)
        }
        """
    )
    check(model, ["x", "s"], outputs=["broadcast"])
    check(model, ["x", "t"], outputs=["columns"])
    check(model, ["x", "t"], outputs=["rows"])
    check(model, ["x", "t"], outputs=["rows", "twice"])


BELOW = """
    <ir_version: 10, opset_import: ["" : 17, "ai.onnx.ml" : 3]>
    g (float[batch, 3] x) => () {
        a = Sin(x)
        b = Tanh(a)
        c = Exp(b)
        y = ai.onnx.ml.Binarizer <threshold = 0.5> (c)
    }
"""


def test_nothing_below_the_first_tap_is_differentiated() -> None:
    result = differentiate(outputs_of(parse(BELOW), ["c"]), {"c": None}, ["b"])
    assert result.operators == ["Mul"]  # of Exp; neither Tanh nor Sin, which has no rule


def test_a_tap_above_every_seed_is_not_found() -> None:
    result = differentiate(outputs_of(parse(BELOW), ["b"]), {"b": None}, ["b", "c"])
    assert result.found.keys() == {"b"}
    assert result.operators == []


@pytest.mark.parametrize(
    ("seed", "tap", "message"),
    [
        ("b", "x", "ai.onnx.Sin lies between the attention and the logits and has no gradient"),
        ("y", "c", "operator ai.onnx.ml.Binarizer lies between"),
    ],
)
def test_an_operator_without_a_rule_is_named(seed: str, tap: str, message: str) -> None:
    model = outputs_of(parse(BELOW), [seed])
    for i, node in enumerate(model.graph.node):
        node.name = f"blocks/{i}"
    with pytest.raises(UnsupportedOperatorError, match=message) as caught:
        differentiate(model, {seed: None}, [tap])
    assert ("blocks/0" if seed == "b" else "blocks/3") in str(caught.value)


@pytest.mark.parametrize(
    ("node", "taps"),
    [
        ("y = Clip(x, low)", "low"),
        ("y = Pad(x, pads, low)", "low"),
        ("y = LayerNormalization(x, scale)", "scale"),
        ("y = BatchNormalization(x, scale, scale, scale, scale)", "scale"),
        ("y = Conv(image, scale3)", "scale3"),
    ],
)
def test_an_operand_that_a_rule_leaves_out_is_refused(node: str, taps: str) -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 3] x, double low, double[3] scale, double[batch, 3, 4] image,
           double[2, 3, 2] scale3) => ()
        <int64[4] pads = {0, 1, 0, 1}> { NODE }
        """.replace("NODE", node)
    )
    with pytest.raises(UnsupportedOperatorError, match=r"node .* has no gradient here"):
        differentiate(outputs_of(model, ["y"]), {"y": None}, [taps])


def test_integers_end_the_walk() -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 3] x) => () {
            whole = Cast <to = 7> (x)
            back = Cast <to = 11> (whole)
            y = Mul(back, x)
        }
        """
    )
    assert check(model, ["x"]).operators == ["Mul"]


def test_outputs_that_a_node_leaves_out() -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (float[batch, 3] x, float[3] s) => () {
            y, mean, inverse = LayerNormalization(x, s)
        }
        """
    )
    model.graph.node[0].output[1] = ""
    model = outputs_of(model, ["y", "inverse"])
    result = differentiate(model, {"y": None}, ["x"])
    feeds = values(model, 2) | {"seed.y": np.array([[1, 2, 0], [0.5, -1, 3]], np.float32)}
    found = evaluate(result.model, feeds)["cotangent.x"]
    exact = {k: np.asarray(v, np.float64) for k, v in feeds.items()}
    expected = differences(outputs_of(model, ["y"]), exact, {"y": exact["seed.y"]}, "x")
    agree(found, expected, 1e-5)
