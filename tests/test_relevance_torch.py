"""The relevance tables against torch, against written-out operators, and against conservation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from conservation import TABLES, left
from double import carried, run
from numpy.typing import ArrayLike, NDArray
from onnx import parser
from onnx.reference import ReferenceEvaluator
from small_vits import hybrid, small_vit
from timm.layers.mlp import GluMlp, SwiGLU
from timm.layers.std_conv import StdConv2dSame
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ParallelThingsBlock
from torch_relevance import AttnLRP, Attribution, Plain, Program, Table
from written_out import written_out

import onnxplain as ox
from onnxplain.export.plain import to_onnx
from onnxplain.export.verify import relative_difference
from onnxplain.graphs.backward.attnlrp import attn_lrp
from onnxplain.graphs.backward.relevance import ATTRIBUTION
from onnxplain.graphs.backward.walk import Cotangent, Rule, dense, walk
from onnxplain.graphs.builder import Builder
from onnxplain.graphs.values.shapes import infer
from onnxplain.outputs import METHODS

Array = NDArray[np.float64]

# Heads of 16 features, so that 1 / sqrt(16) is a float32. No configuration is a golden one.
CONFIGURATIONS: dict[str, Callable[[], torch.nn.Module]] = {
    "mean pooling": lambda: small_vit(num_heads=2, global_pool="avg", class_token=False),
    "LayerScale, registers": lambda: small_vit(
        num_heads=2, init_values=0.5, reg_tokens=3, no_embed_class=True
    ),
    "qk norm, pre-norm, quick GELU": lambda: small_vit(
        num_heads=2, qk_norm=True, pre_norm=True, act_layer="quick_gelu"
    ),
    "SwiGLU": lambda: small_vit(num_heads=2, mlp_layer=SwiGLU, act_layer="silu"),
    "distilled, GLU": lambda: small_vit(
        VisionTransformerDistilled, num_heads=2, mlp_layer=GluMlp, act_layer="sigmoid"
    ),
    "hybrid": lambda: hybrid(num_heads=2),
    "parallel blocks": lambda: small_vit(num_heads=2, block_fn=ParallelThingsBlock),
}
REFERENCES: dict[str, Table] = {
    "attribution": Attribution(),
    "lrp": Plain(),
    "attnlrp": AttnLRP(),
    "attnlrp, gamma 0.25": AttnLRP(gamma=0.25),
}
# Of the largest value in a layer. The AttnLRP table divides by x + 1e-9 where torch passes
# relevance on, up to 4e-6 behind the many activations of a hybrid; in the others rounding is
# amplified where a residual sum passes through zero.
TOLERANCE = 5e-6


@functools.cache
def plain(configuration: str) -> ir.Model:
    return to_onnx(CONFIGURATIONS[configuration](), image_size=(32, 32))


@functools.cache
def program(configuration: str) -> Program:
    module = CONFIGURATIONS[configuration]().double().eval()
    for part in module.modules():
        if hasattr(part, "inplace"):
            setattr(part, "inplace", False)  # noqa: B010 - what it would overwrite is wanted
    return Program(module, torch.from_numpy(images(3)))


def images(count: int) -> Array:
    return np.random.default_rng(0).normal(size=(count, 3, 32, 32))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_relevance_equals_torch(configuration: str, table: str) -> None:
    pixels, target = images(3), np.array([4, 0, 9])
    expected = program(configuration).relevance(torch.from_numpy(target), REFERENCES[table])
    rules, coefficients = TABLES[table]
    model = carried(plain(configuration), rules, coefficients=coefficients)
    found = run(model, {"pixel_values": pixels, "seed": np.eye(10)[target]})
    assert relative_difference(found["logits"], expected.logits.numpy()) < 1e-9
    pairs = {
        "pixels": expected.pixels,
        **{f"attention.{i}": r for i, r in enumerate(expected.attention)},
    }
    assert len(pairs) == (5 if configuration == "parallel blocks" else 3)
    for name, theirs in pairs.items():
        assert theirs.abs().max() > 0
        assert relative_difference(found[name], theirs.numpy()) < TOLERANCE, name


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_attribution_is_conserved(configuration: str) -> None:
    """Up to the 1e-9 of its denominators, which counts most where gates come close to zero."""
    sums = left(plain(configuration), "attribution", images(3))
    assert sums.shape == (2, 3)
    np.testing.assert_allclose(sums, 1, rtol=0, atol=1e-4)


# One operator or many


@pytest.mark.parametrize("table", TABLES)
def test_written_out_operators_carry_the_same_relevance(table: str) -> None:
    rules, coefficients = TABLES[table]
    whole = plain("LayerScale, registers")
    feeds = {"pixel_values": images(2), "seed": np.eye(10)[[7, 1]]}
    split = written_out(whole)
    operators = {node.op_type for node in split.graph}
    assert not operators & {"LayerNormalization", "Gelu"} and {"Erf", "Pow"} <= operators
    expected, found = (
        run(carried(model, rules, coefficients=coefficients), feeds) for model in (whole, split)
    )
    for name in ("attention.0", "attention.1", "pixels"):
        assert relative_difference(found[name], expected[name]) < TOLERANCE, name


# Single rules, with numbers that can be followed on paper

NUMPY = {"double": np.float64, "float": np.float32}


def brought(
    body: str,
    rules: Mapping[str, Rule],
    seed: ArrayLike,
    *,
    dtype: str = "double",
    **inputs: ArrayLike,
) -> dict[str, Array]:
    """What the rules bring to each input of a small graph whose result is `y`; 2 and 1 are `two`
    and `one`."""
    arrays = {name: np.asarray(x, NUMPY[dtype]) for name, x in inputs.items()}
    arguments = ", ".join(f"{dtype}{list(x.shape)} {name}" for name, x in arrays.items())
    constants = f"<{dtype} one = {{1.0}}, {dtype} two = {{2.0}}>"
    text = f'<ir_version: 9, opset_import: ["": 18]> g ({arguments}) => (y) {constants} {{{body}}}'
    graph = (model := ir.from_proto(parser.parse_model(text))).graph
    facts = infer(model, graph.inputs[0])
    b = Builder(graph, facts)
    (y,), sources = graph.outputs, list(graph.inputs)
    start = ir.Value()
    b.describe(start, "seed", facts[y].shape, facts[y].dtype)
    b.rename(b.of(y), "y")
    graph.inputs.append(start)
    arrived = walk(b, {y: Cotangent(b.of(start))}, sources, rules)
    for value in sources:
        result = dense(b, arrived[value])
        b.rename(result := b.op("Identity", [result], result.shape), f"to.{value.name}")
        graph.outputs.append(result.value)
    session = ReferenceEvaluator(ir.to_proto(model))
    found = session.run(None, {**arrays, "seed": np.asarray(seed, NUMPY[dtype])})
    return dict(zip(arrays, list(found)[1:], strict=True))


def test_what_speaks_against_an_output_takes_nothing() -> None:
    # The first output has no positive contribution, the second 2 and 1: its relevance is shared
    # out to the last bit, though the first one's 1 / 1e-9 would swamp it in single precision.
    for dtype in NUMPY:
        body = f"w = Constant <value = {dtype}[2, 2] {{-1, 2, -1, 1}}> () y = MatMul (x, w)"
        found = brought(body, ATTRIBUTION, [[1, 1]], dtype=dtype, x=[[1, 1]])
        np.testing.assert_allclose(found["x"], [[2 / 3, 1 / 3]], rtol=1e-6)


def test_difference_keeps_the_total() -> None:
    # y = (2, 3) and S = (1, 0), so a S = (3, 0) and -b S = (-1, 0): 3/4 and 1/4 of the total 2
    found = brought("y = Sub (a, b)", ATTRIBUTION, [[2, 0]], a=[[3, 4]], b=[[1, 1]])
    np.testing.assert_allclose(found["a"], [[1.5, 0]], rtol=1e-8)
    np.testing.assert_allclose(found["b"], [[0.5, 0]], rtol=1e-8)


def test_a_sum_over_a_stack_is_a_residual_sum() -> None:
    # y = (2, 3) and S = (1, 0): 3 and -1, of whose sizes 3/4 and 1/4 of the total 2
    body = """axis = Constant <value_ints = [0]> () one_a = Unsqueeze (a, axis)
        one_b = Unsqueeze (b, axis) stack = Concat <axis = 0> (one_a, one_b)
        y = ReduceSum <keepdims = 0> (stack, axis)"""
    found = brought(body, ATTRIBUTION, [[2, 0]], a=[[3, 4]], b=[[-1, -1]])
    np.testing.assert_allclose(found["a"], [[1.5, 0]], rtol=1e-8)
    np.testing.assert_allclose(found["b"], [[0.5, 0]], rtol=1e-8)


def test_gate_of_each_feature_gets_half_from_all_tokens() -> None:
    x, gate = [[[1, 2], [3, 4]]], [[[0.5, 0.25]]]
    found = brought("y = Mul (x, gate)", ATTRIBUTION, [[[1, 2], [3, 4]]], x=x, gate=gate)
    np.testing.assert_array_equal(found["x"], [[[0.5, 1], [1.5, 2]]])
    np.testing.assert_array_equal(found["gate"], [[[2, 3]]])


@pytest.mark.parametrize(
    "body",
    ["y = Pow (x, two)", "y = Div (one, x)", "y = Reciprocal (x)", "y = Sqrt (x)", "y = Log (x)"],
)
def test_functions_of_one_element_pass_relevance(body: str) -> None:
    found = brought(body, ATTRIBUTION, [[5, 7]], x=[[2, 3]])
    np.testing.assert_array_equal(found["x"], [[5, 7]])
    # AttnLRP carries relevance over value: c y before, c y / x after
    y = {"Pow": [4, 9], "Sqrt": np.sqrt([2, 3]), "Log": np.log([2, 3])}.get(body[4:8].strip(" ("))
    y = np.array([1 / 2, 1 / 3] if y is None else y)
    found = brought(body, attn_lrp(), [[5, 7]], x=[[2, 3]])
    np.testing.assert_allclose(found["x"] * [2, 3], [[5, 7] * y], rtol=1e-8)


def test_gamma_favours_the_sign_of_the_result() -> None:
    # Contributions 2 and -1 of y = 1; with gamma = 1 they count 4 and -1 of 3.
    body = "size = Constant <value_ints = [2, 1]> () w = Expand (one, size) y = MatMul (x, w)"
    found = brought(body, attn_lrp(gamma=1.0), [[3]], x=[[2, -1]])
    np.testing.assert_allclose(found["x"] * [2, -1], [[4, -1]], rtol=1e-8)


def test_a_maximum_gets_what_its_windows_have() -> None:
    # 2 of the second position from the first two windows, and 7 of the last one, whose value is 0
    body = "y = MaxPool <kernel_shape = [1, 2]> (x)"
    found = brought(body, ATTRIBUTION, [[[[1, 1, 7]]]], x=[[[[1, 3, 0, 0]]]])
    np.testing.assert_array_equal(found["x"], [[[[0, 2, 7, 0]]]])


def test_standardised_weights_are_constants() -> None:
    """The weights of the convolutions computed in the graph, or stored as they come out."""
    standard = hybrid(functools.partial(StdConv2dSame, eps=1e-8))
    stored = hybrid()
    state = stored.state_dict() | standard.state_dict()
    for name, module in standard.named_modules():
        if isinstance(module, StdConv2dSame):
            weight = module.weight.double()
            weight = weight - weight.mean((1, 2, 3), keepdim=True)
            weight /= (weight.square().mean((1, 2, 3), keepdim=True) + module.eps).sqrt()
            state |= {f"{name}.weight": weight, f"{name}.bias": torch.zeros(len(weight))}
    stored.load_state_dict(state)
    feeds = {"pixel_values": images(2), "seed": np.eye(10)[[7, 1]]}
    found, expected = (
        run(carried(to_onnx(m, image_size=(32, 32)), attn_lrp(), coefficients=True), feeds)
        for m in (standard, stored)
    )
    for name in ("logits", "attention.0", "pixels"):  # stored weights are float32
        assert relative_difference(found[name], expected[name]) < 1e-5, name


def test_a_hybrid_is_served_with_all_methods(tmp_path: Path) -> None:
    module = hybrid(functools.partial(StdConv2dSame, eps=1e-8))
    report = ox.export(module, tmp_path / "vit.onnx")
    assert report.methods == tuple(METHODS)
    explainer = ox.Explainer(tmp_path / "vit.onnx", device="cpu", threads=1)
    for method in METHODS:
        result = explainer.explain(images(2).astype(np.float32), method=method)
        assert np.isfinite(result.grid).all() and result.grid.any(), method
