"""Operators that onnxruntime fuses, written out in standard ones, equal what it makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from single_nodes import Arrays, floats, run, single, written_out

from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.normal.rewrite import MICROSOFT, REWRITES

# float32, a few sums of a dozen numbers of size 1.
TOLERANCE = 4e-6

SCALAR = np.array(0.01, np.float32)


def whole(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).integers(0, 255, shape, np.uint8)


X, SKIP, WIDE, VECTOR = floats(2, 5, 12), floats(2, 5, 12, seed=1), floats(5, 12), floats(12)
BIAS = floats(12, seed=1)
SUMMED = {"x": X, "skip": SKIP, "gamma": VECTOR, "beta": BIAS, "bias": floats(12, seed=2)}
FOUR = {"outputs": ("y", "", "", "sum")}
Q, K, V = floats(2, 5, 12), floats(2, 7, 12), floats(2, 7, 9)
PROJECTED = {"x": X, "w": floats(12, 36), "b": floats(36)}
THREE = {"num_heads": 3}
PICTURE = {"x": floats(2, 3, 6, 6), "w": floats(4, 3, 3, 3), "b": floats(4)}
SUM = floats(2, 4, 6, 6)
SAME = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}

CASES: list[tuple[str, str, Arrays, dict[str, Any]]] = [
    ("Gelu", "", {"x": X}, {}),
    ("BiasGelu", "", {"x": X, "b": VECTOR}, {}),
    ("FastGelu", "", {"x": X}, {}),
    ("FastGelu", "bias", {"x": X, "b": VECTOR}, {}),
    ("QuickGelu", "", {"x": X}, {}),
    (
        "QuickGelu",
        "SiLU",
        {
            "x": X,
        },
        {"alpha": 1.0},
    ),
    ("SkipLayerNormalization", "", SUMMED, {"epsilon": 1e-5, **FOUR}),
    ("SkipLayerNormalization", "bare", {"x": X, "skip": WIDE, "gamma": VECTOR}, {}),
    (
        "SkipSimplifiedLayerNormalization",
        "",
        {"x": X, "skip": SKIP, "gamma": VECTOR, "bias": BIAS},
        {"epsilon": 1e-5, **FOUR},
    ),
    ("FusedMatMul", "", {"a": floats(2, 3, 5, 6), "b": floats(2, 3, 6, 4)}, {"alpha": 0.3}),
    ("FusedMatMul", "a", {"a": floats(2, 3, 6, 5), "b": floats(2, 3, 6, 4)}, {"transA": 1}),
    ("FusedMatMul", "b", {"a": floats(2, 3, 5, 6), "b": floats(2, 3, 4, 6)}, {"transB": 1}),
    ("FusedMatMul", "both", {"a": floats(6, 5), "b": floats(4, 6)}, {"transA": 1, "transB": 1}),
    (
        "FusedMatMul",
        "batches",
        {"a": floats(5, 2, 3, 6), "b": floats(6, 2, 3, 4)},
        {"transBatchA": 1, "transBatchB": 1},
    ),
    (
        "FusedMatMul",
        "batches and rows",
        {"a": floats(6, 2, 3, 5), "b": floats(2, 3, 6, 4)},
        {"transBatchA": 1, "transA": 1},
    ),
    ("Attention", "", PROJECTED, THREE),
    ("Attention", "no bias", {"x": X, "w": PROJECTED["w"]}, THREE),
    ("Attention", "scale", PROJECTED, {**THREE, "scale": 0.2}),
    (
        "Attention",
        "additive bias",
        {**PROJECTED, "mask": None, "past": None, "bias": floats(1, 3, 5, 5)},
        THREE,
    ),
    (
        "Attention",
        "wider values",
        {"x": X, "w": floats(12, 24), "b": floats(24)},
        {**THREE, "qkv_hidden_sizes": [6, 6, 12]},
    ),
    ("MultiHeadAttention", "", {"q": Q, "k": K, "v": V}, THREE),
    ("MultiHeadAttention", "bias", {"q": Q, "k": K, "v": V, "b": floats(33)}, THREE),
    (
        "MultiHeadAttention",
        "additive bias",
        {"q": Q, "k": K, "v": V, "b": None, "mask": None, "bias": floats(1, 1, 5, 7)},
        {**THREE, "scale": 0.2},
    ),
    (
        "MultiHeadAttention",
        "keys and values by head",
        {"q": Q, "k": floats(2, 3, 7, 4), "v": floats(2, 3, 7, 4, seed=1)},
        THREE,
    ),
]
CASES += [
    (
        "FusedGemm",
        name,
        {"a": floats(5, 6), "b": floats(4, 6), "c": floats(4)},
        {"activation": name, "transB": 1, "alpha": 0.5, "beta": 2.0, **parameters},
    )
    for name, parameters in (
        ("Relu", {}),
        ("Sigmoid", {}),
        ("Softplus", {}),
        ("Softsign", {}),
        ("Tanh", {}),
        ("Elu", {"activation_alpha": 0.7}),
        ("HardSigmoid", {"activation_alpha": 0.3, "activation_beta": 0.4}),
        ("LeakyRelu", {"activation_alpha": 0.2}),
        ("Selu", {"activation_alpha": 0.7, "activation_gamma": 1.1}),
    )
]
CASES += [
    (
        "FusedConv",
        f"{name}{', sum' if 'z' in more else ''}",
        {**PICTURE, **more},
        {**SAME, "activation": name, **({"activation_params": values} if values else {})},
    )
    for name, values in (
        ("Relu", []),
        ("Sigmoid", []),
        ("Tanh", []),
        ("Clip", [-0.5, 0.5]),
        ("HardSigmoid", [0.3, 0.4]),
        ("LeakyRelu", [0.2]),
    )
    for more in ({}, {"z": SUM})
]
CASES.append(("FusedConv", "sum alone", {**PICTURE, "z": SUM}, SAME))

STEPS = {"a": whole(2, 5, 12), "b": whole(12, 4), "a_step": SCALAR, "b_step": floats(1, seed=3)}
COLUMNS = {**STEPS, "b_step": floats(4), "a_zero": whole(), "b_zero": whole(4, seed=1)}
DYNAMIC = {"a": X, "b": whole(12, 4), "b_step": SCALAR}
CASES += [
    ("MatMulIntegerToFloat", "", {**STEPS, "a_zero": whole()}, {}),
    ("MatMulIntegerToFloat", "of columns, bias", {**COLUMNS, "bias": floats(4)}, {}),
    ("DynamicQuantizeMatMul", "", DYNAMIC, {}),
    (
        "DynamicQuantizeMatMul",
        "zero point, bias",
        {**DYNAMIC, "b_zero": whole(), "bias": floats(4)},
        {},
    ),
]
PACKED: dict[int, Arrays] = {
    bits: {"x": floats(2, 5, 40), "w": whole(6, 3, 2 * bits), "scale": floats(18) / 2**bits}
    for bits in (4, 8)
}
IN_BLOCKS = {"K": 40, "N": 6, "block_size": 16}
MORE: list[tuple[int, str, Arrays]] = [
    (4, "", {}),
    (8, "", {}),
    (4, ", zero points", {"zero": whole(6, 2)}),
    (8, ", zero points", {"zero": whole(6, 3)}),
    (4, ", zero points in floats", {"zero": floats(6, 3, seed=1)}),
    (4, ", bias", {"zero": None, "order": None, "bias": floats(6)}),
]
CASES += [
    ("MatMulNBits", f"{bits} bits{what}", {**PACKED[bits], **more}, {**IN_BLOCKS, "bits": bits})
    for bits, what, more in MORE
]


@pytest.mark.parametrize(
    "opset", [17, 20]
)  # without and with standard Gelu and ReduceMean by input
@pytest.mark.parametrize("case", CASES, ids=[f"{op} {what}" for op, what, *_ in CASES])
def test_it_equals_onnxruntime(case: tuple[str, str, Arrays, dict[str, Any]], opset: int) -> None:
    op, _, arrays, options = case
    model = single(op, arrays, opset, MICROSOFT, **options)
    results = run(written_out(model), arrays), run(model, arrays)
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("op", ["LayerNormalization", "SimplifiedLayerNormalization"])
@pytest.mark.parametrize("opset", [17, 20])
def test_normalisations_in_the_standard_domain(op: str, opset: int) -> None:
    """As onnxruntime writes them; `LayerNormalization` is then ours to move to its own domain."""
    arrays = {"x": X, "scale": VECTOR}
    model = single(op, arrays, opset, epsilon=1e-3)
    (expected,) = run(model, arrays)
    if op == "LayerNormalization":
        model.graph.node[0].domain = MICROSOFT
    (found,) = run(written_out(model), arrays)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_every_rule_is_tested() -> None:
    tested = {op for op, *_ in CASES} | {"LayerNormalization", "SimplifiedLayerNormalization"}
    assert {op for domain, op in REWRITES if domain == MICROSOFT} == tested


REFUSED: list[tuple[str, Arrays, dict[str, Any], str]] = [
    ("Attention", {**PROJECTED, "mask": np.ones((2, 5), np.int32)}, THREE, "mask_index is given"),
    ("Attention", PROJECTED, {**THREE, "unidirectional": 1}, "unidirectional is given"),
    ("Attention", PROJECTED, {**THREE, "do_rotary": 1}, "do_rotary is given"),
    ("Attention", PROJECTED, {**THREE, "outputs": ("y", "present")}, "its output present is used"),
    (
        "MultiHeadAttention",
        {"q": floats(2, 5, 3, 3, 4)},
        THREE,
        "queries, keys and values are pack",
    ),
    (
        "MultiHeadAttention",
        {"q": Q, "k": K, "v": V, "b": None, "mask": np.ones((2, 7), np.int32)},
        THREE,
        "key_padding_mask is given; expected attention of every token to every token",
    ),
    ("FusedConv", PICTURE, {**SAME, "activation": "Elu"}, "its activation is Elu; expected Clip, "),
    ("MatMulNBits", PACKED[4], {**IN_BLOCKS, "bits": 3}, "it has 3 bits"),
    ("MatMulNBits", PACKED[4], {**IN_BLOCKS, "block_size": 0}, "N is 6, K 40, block_size 0; expec"),
    ("MatMulNBits", PACKED[4], {**IN_BLOCKS, "N": 7}, "have 144 bytes; expected 168 by N, K and"),
    ("MatMulNBits", PACKED[4], {**IN_BLOCKS, "N": 6.0}, "its N is FLOAT; expected INT"),
    (
        "MatMulNBits",
        PACKED[4],
        {**IN_BLOCKS, "accuracy_level": 4},
        "its accuracy_level 4 rounds activations to 8 bits",
    ),
]


@pytest.mark.parametrize(
    ("op", "arrays", "options", "found"), REFUSED, ids=[f"{op}: {why}" for op, *_, why in REFUSED]
)
def test_what_is_refused(op: str, arrays: Arrays, options: dict[str, Any], found: str) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        written_out(single(op, arrays, 17, MICROSOFT, **options))
    assert str(raised.value).startswith(f"node the_node is com.microsoft.{op}, which has no equal")
    assert found in str(raised.value)
