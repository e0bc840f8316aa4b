"""Walks through random graphs of tokens, read at a few of them, against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
from chains import check, outputs_of, parse, values
from differences import agree, differentiate, evaluate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onnxplain.graphs.backward.walk

# Each makes {o}, [batch, 4, 6], of {a} and {b} of the same shape.
STEPS = [
    "{o} = Tanh({a})",
    "{o}c = Tanh({b}) {o} = Mul({a}, {o}c)",
    "{o} = Sub({a}, {b})",
    "{o} = LayerNormalization <epsilon = 0.1> ({a}, s)",
    "{o} = MatMul({a}, w)",
    '{o} = Einsum <equation = "bij,kj->bik"> ({a}, w)',
    "{o} = Softmax <axis = 1> ({a})",
    "{o} = Softmax <axis = 2> ({a})",
    "{o} = Where(mask, {a}, {b})",
    "{o}c, {o}d = Split <axis = 2> ({a}, channels) {o} = Concat <axis = 2> ({o}d, {o}c)",
    "{o}c, {o}d = Split <axis = 2> ({a}, halves) {o}e = Mul({o}c, {o}d) "
    "{o} = Concat <axis = 2> ({o}c, {o}e)",
    "{o}c, {o}d = Split <axis = 1> ({a}, tokens) {o} = Concat <axis = 1> ({o}d, {o}c)",
    "{o}c = Slice({a}, one, last, one) {o}d = Slice({b}, zero, two, one) "
    "{o} = Concat <axis = 1> ({o}d, {o}c)",
    "{o}c = Transpose <perm = [0, 2, 1]> ({b}) {o}d = MatMul({a}, {o}c) {o}e = Softmax({o}d) "
    "{o} = MatMul({o}e, {b})",
    "{o}c = Reshape({a}, heads) {o}d = Transpose <perm = [0, 2, 1, 3]> ({o}c) {o}e = Tanh({o}d) "
    "{o}f = Transpose <perm = [0, 2, 1, 3]> ({o}e) {o} = Reshape({o}f, joined)",
    "{o}c = Reshape({a}, rows) {o}d = Gemm <alpha = 0.5> ({o}c, w, s) {o} = Reshape({o}d, joined)",
    "{o}c = ReduceMean <axes = [1]> ({a}) {o} = Add({b}, {o}c)",
    "{o}c = ReduceSum <keepdims = 0> ({a}, two) {o}d = Unsqueeze({o}c, two) {o} = Mul({b}, {o}d)",
    "{o}c = Gather <axis = 1> ({a}, third) {o}d = Unsqueeze({o}c, one) {o} = Add({o}d, {b})",
    "{o}c = Gather <axis = 1> ({a}, order) {o} = Add({o}c, {b})",
    "{o}c = Gather <axis = 1> ({a}, twice) {o} = Add({o}c, {b})",
    "{o}c = Pad({a}, pads) {o}d = Slice({o}c, one, end, one) {o} = Mul({o}d, {b})",
]
READS = [
    "y = Gather <axis = 1> ({a}, third)",
    "y = Gather <axis = 1> ({a}, one)",
    "y = Slice({a}, one, last, one)",
    "y = Slice({a}, one, last, two)",
    "c, y = Split <axis = 1> ({a}, tokens)",
    "c = Slice({a}, one, last, one) y = ReduceMean <axes = [1]> (c)",
    "c = Gather <axis = 1> ({a}, third) y = MatMul(c, w)",
    "y = Identity({a})",
]


@given(data=st.data())
@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
def test_random_graph(data: st.DataObject) -> None:
    made, lines = ["x"], []
    for i in range(data.draw(st.integers(2, 6))):
        # {a} is most often the newest value, so that chains grow long
        a = data.draw(st.sampled_from([made[-1], made[-1], *made]))
        b = data.draw(st.sampled_from(made))
        lines.append(data.draw(st.sampled_from(STEPS)).format(o=f"v{i}", a=a, b=b))
        made.append(f"v{i}")
    lines.append(data.draw(st.sampled_from(READS)).format(a=made[-1]))
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 4, 6] x, double[6, 6] w, double[6] s) => ()
        <int64[2] channels = {2, 4}, int64[2] halves = {3, 3}, int64[2] tokens = {1, 3},
         int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] last = {-1},
         int64[1] end = {99}, int64[4] heads = {0, 4, 2, 3}, int64[3] joined = {-1, 4, 6},
         int64[2] rows = {-1, 6}, int64 third = {2}, int64[4] order = {2, 0, 3, 1},
         int64[4] twice = {1, 1, -1, 0}, int64[6] pads = {0, 0, 0, 0, 1, 0},
         bool[4, 1] mask = {1, 0, 0, 1}> { NODES }
        """.replace("NODES", "\n".join(lines))
    )
    taps = ["x", made[-1]]
    check(model, taps)
    with pytest.MonkeyPatch.context() as patch:
        ranged = differentiate(outputs_of(model, ["y"]), {"y": None}, taps)
        patch.setattr(onnxplain.graphs.backward.walk, "carried", lambda *_: None)
        full = differentiate(outputs_of(model, ["y"]), {"y": None}, taps)
    feeds: dict[str, Any] = values(model, 3)
    feeds["seed.y"] = evaluate(outputs_of(model, ["y"]), feeds)["y"]
    for name, expected in evaluate(full.model, feeds).items():
        agree(evaluate(ranged.model, feeds)[name], expected, 1e-12)
