"""Every rule of the gradient table against finite differences in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from chains import parse
from differences import (
    TOLERANCE,
    Array,
    Case,
    Fixed,
    Seed,
    agree,
    differences,
    differentiate,
    evaluate,
    one_node,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operator_cases import CASES, EQUATIONS
from random_nodes import Source

from onnxplain.errors import UnsupportedOperatorError
from onnxplain.graphs.backward.gradient import GRADIENT

IMAGE = {"image": np.zeros(1, np.float32)}
NUMPY = {"tensor(float)": np.float32, "tensor(double)": np.float64}
SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# What timm's plain vision transformers need between the first attention and the logits, and the
# neighbours of these operators.
PROMISED = """
    Add Sub Mul Div Neg Pow Sqrt Reciprocal Exp Log Erf Tanh Sigmoid Relu Gelu HardSigmoid Clip
    Softmax LogSoftmax LayerNormalization ReduceMean ReduceSum ReduceMax MatMul Gemm Einsum
    Transpose Reshape Squeeze Unsqueeze Flatten Expand Slice Split Concat Gather Where Cast Identity
    Dropout Pad Min Max Conv GlobalAveragePool BatchNormalization Sum Mean
    LeakyRelu Elu Selu Mish PRelu Softsign HardSwish MaxPool AveragePool GlobalMaxPool
    InstanceNormalization ReduceL2 LpNormalization DepthToSpace SpaceToDepth
"""
# The formula holds in float64, but the slope 1/5 or 1/6 of these is an attribute, and so a float32.
COARSE = {"HardSigmoid": 1e-7, "HardSwish": 1e-7}
# Rounding of float32 in a few operations, the largest numbers being some tens.
FLOAT32 = 1e-5


def test_every_promised_operator_has_a_rule_and_every_rule_a_case() -> None:
    assert set(PROMISED.split()) <= GRADIENT.keys()
    # Rounding has no finite differences; test_quantised_files.py compares it with torch.
    assert GRADIENT.keys() == CASES.keys() | {"DequantizeLinear", "QuantizeLinear"}


@pytest.mark.parametrize("op", sorted(CASES))
@given(data=st.data())
@settings(SETTINGS, max_examples=20)
def test_rule(op: str, data: st.DataObject) -> None:
    s = Source(data.draw, op)
    case = CASES[op](s)
    seeds, weights, full = random_seeds(s, case)
    operands = list(case.operands)
    taps = [name for name in operands if s.flag()] or operands
    source = one_node(case)
    result = differentiate(source, seeds, taps)
    feeds = {**IMAGE, **case.operands}
    outputs = evaluate(result.model, {**feeds, **weights})
    for name in taps:
        found = outputs[f"cotangent.{name}"]
        assert found.dtype == case.operands[name].dtype
        assert result.shapes[name] == found.shape
        agree(found, differences(source, feeds, full, name), COARSE.get(op, TOLERANCE))


@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(equation: str) -> None:
    random = np.random.default_rng(0)
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes = {k: 2 + i % 2 for i, k in enumerate(sorted(set("".join(terms))))}
    operands = [random.normal(size=[sizes[k] for k in term]) for term in terms]
    case = Case("Einsum", operands, {"equation": equation})
    source = one_node(case)
    feeds = {**IMAGE, **case.operands}
    weights = {"y0": random.normal(size=evaluate(source, feeds)["y0"].shape)}
    model = differentiate(source, {"y0": None}, list(case.operands)).model
    outputs = evaluate(model, {**feeds, "seed.y0": weights["y0"]})
    for name in case.operands:
        agree(outputs[f"cotangent.{name}"], differences(source, feeds, weights, name))


@pytest.mark.parametrize("op", sorted(CASES))
@given(data=st.data())
@settings(SETTINGS, max_examples=4)
def test_onnxruntime_agrees_in_float32(op: str, data: st.DataObject) -> None:
    s = Source(data.draw, op)
    case = CASES[op](s)
    seeds, weights, _ = random_seeds(s, case)
    exact = differentiate(one_node(case), seeds, list(case.operands))
    expected = evaluate(exact.model, {**IMAGE, **case.operands, **weights})
    small = replace(case, inputs=[single(x) for x in case.inputs])
    result = differentiate(one_node(small), seeds, list(case.operands))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        result.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {**IMAGE, **small.operands, **weights}
    feeds = {i.name: feeds[i.name].astype(NUMPY[i.type]) for i in session.get_inputs()}
    names = [f"cotangent.{name}" for name in case.operands]
    for name, found in zip(names, session.run(names, feeds), strict=True):
        agree(found, expected[name], FLOAT32)


def single(x: Array | Fixed | None) -> Array | Fixed | None:
    if isinstance(x, Fixed):
        return Fixed(x.array.astype(np.float32)) if x.array.dtype == np.float64 else x
    return None if x is None else x.astype(np.float32)


def random_seeds(
    s: Source, case: Case
) -> tuple[dict[str, Seed | None], dict[str, Array], dict[str, Array]]:
    """Seeds of some outputs, some of them ranges; their values; the same with zeros written out."""
    outputs = evaluate(one_node(case), {**IMAGE, **case.operands})
    names = [f"y{i}" for i, smooth in enumerate(case.outputs) if smooth]
    seeds: dict[str, Seed | None] = {}
    weights, full = {}, {}
    for name in [name for name in names if s.flag()] or names:
        y = outputs[name]
        w = s.normal(y.shape).astype(np.float32).astype(y.dtype)  # exact in both types
        seeds[name], weights[f"seed.{name}"], full[name] = None, w, w
        if y.ndim and s.flag():
            axis = s.integer(0, y.ndim - 1)
            start = s.integer(0, y.shape[axis] - 1)
            stop = s.integer(start + 1, y.shape[axis])
            inside = (slice(None),) * axis + (slice(start, stop),)
            seeds[name], weights[f"seed.{name}"] = Seed(axis, start, stop), w[inside]
            full[name] = np.zeros_like(w)
            full[name][inside] = w[inside]
    return seeds, weights, full


TIES = {  # at a kink: 0 where torch gives 0, even shares where several are the largest
    "y = Relu(x)": ([-1, 0, 2], [0, 0, 1]),
    "y = LeakyRelu <alpha = 0.5> (x)": ([-1, 0, 2], [0.5, 0.5, 1]),
    "y = PRelu(x, two)": ([-1, 0, 2], [2, 2, 1]),
    "y = ReduceL2(x)": ([0, 0], [0, 0]),
    "y = Abs(x)": ([-1, 0, 2], [-1, 0, 1]),
    "y = Clip(x, low, high)": ([-2, -1, 0, 1, 2], [0, 1, 1, 1, 0]),
    "y = HardSigmoid <alpha = 0.5, beta = 0.5> (x)": ([-1, 0, 1], [0, 0.5, 0]),
    "y = HardSwish(x)": ([-3, 0, 3], [0, 0.5, 1]),
    "y = Max(x, high)": ([0, 1, 2], [0, 0.5, 1]),
    "y = Min(x, high, high)": ([0, 1, 2], [1, 1 / 3, 0]),
    "y = Max(x, x)": ([0, 1], [1, 1]),
    "y = ReduceMax(x)": ([1, 3, 3, 2, 3], [0, 1 / 3, 1 / 3, 0, 1 / 3]),
    "y = Where(yes, x, low)": ([2, 3], [1, 1]),
    "y = Pow(x, two)": ([-1, 0, 2], [-2, 0, 4]),
    "y = Pow(x, unit)": ([0, 2], [1, 1]),
}


@pytest.mark.parametrize("node", TIES)
def test_where_there_is_no_derivative(node: str) -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[N] x) => (y) <double low = {-1}, double high = {1}, double two = {2},
        int64 unit = {1}, bool yes = {1}> { NODE }
        """.replace("NODE", node).replace("N]", f"{len(TIES[node][0])}]")
    )
    x, expected = (np.array(values, float) for values in TIES[node])
    result = differentiate(model, {"y": None}, ["x"])
    shape = evaluate(model, {"x": x})["y"].shape
    found = evaluate(result.model, {"x": x, "seed.y": np.ones(shape)})["cotangent.x"]
    tolerance = COARSE.get(result.model.graph.node[0].op_type, TOLERANCE)
    agree(found, expected, tolerance)


REFUSED = {
    'y = Einsum <equation = "...ij->...i"> (x)': "no ellipsis",
    'y = Einsum <equation = "bcjj->bc"> (x)': "or diagonal",
    'y = Einsum <equation = "bcij"> (x)': "expected an explicit result",
    'y = Conv <auto_pad = "SAME_UPPER"> (x, kernel)': "auto_pad SAME_UPPER",
    "y = LpNormalization <axis = 1, p = 1> (x)": "p is 1",
    "y = MaxPool <kernel_shape = [2, 2], storage_order = 1> (x)": "storage_order 1",
    'y = Pad <mode = "edge"> (x, pads)': "its mode repeats elements",
    "y, m, v = BatchNormalization <training_mode = 1> (x, c, c, c, c)": "training mode",
    "y = Dropout(x, half, yes)": "training mode",
    "y = ReduceMean <axes = [0]> (x)": "averages over the batch",
    "y = Concat <axis = 0> (x, x)": "the batch axis",
    "y = Gather(x, pads)": "the batch axis",
    "y = Slice(x, one, two)": "the batch axis",
    "y = Clip(x, low)": "input 1",
    "i = Cast <to = 7> (low) y = Gather <axis = 1> (x, i)": "input 1 is computed from the image",
}


@pytest.mark.parametrize("nodes", REFUSED)
def test_what_has_no_rule_is_refused_by_name(nodes: str) -> None:
    model = parse(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (double[batch, 2, 3, 3] x, double low) => (y)
        <double[1, 2, 2, 2] kernel = {1, 2, 3, 4, 5, 6, 7, 8}, double[2] c = {1, 2},
         int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 1}, double half = {0.5}, bool yes = {1},
         int64[1] one = {1}, int64[1] two = {2}> { NODES }
        """.replace("NODES", nodes)
    )
    with pytest.raises(
        UnsupportedOperatorError, match=r"^node .* has no gradient here: "
    ) as caught:
        differentiate(model, {"y": None}, ["x", "low"])
    assert REFUSED[nodes] in str(caught.value)
