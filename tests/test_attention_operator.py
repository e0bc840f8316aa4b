"""The Attention operator of opsets 23 to 25, and its neighbours, written out: by hand, against
onnx's reference evaluator, and against onnxruntime."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx.reference
import pytest
from differences import agree, differences, differentiate, evaluate
from single_nodes import Arrays, floats, run, single, written_out

from onnxplain.errors import UnsupportedModelError

# float32, a few sums of a dozen numbers of size 1.
TOLERANCE = 2e-6

Q, K, V = floats(2, 4, 5, 6), floats(2, 4, 7, 6), floats(2, 4, 7, 3)
Q3, K3, V3 = floats(2, 5, 12), floats(2, 7, 12), floats(2, 7, 9)
QKV = {"q": Q, "k": K, "v": V}
THREE = {"q_num_heads": 3, "kv_num_heads": 3}
NO_CACHE = {"past_key": None, "past_value": None}
SEEN = np.arange(35).reshape(5, 7) % 3 > 0
BLIND = SEEN & (np.arange(5) != 2)[:, None]  # query 2 sees nothing


def close(found: np.ndarray, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def additive(seen: np.ndarray) -> np.ndarray:
    return np.where(seen, floats(*seen.shape), -np.inf).astype(np.float32)


CASES: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "by head": (QKV, {}),
    "side by side": ({"q": Q3, "k": K3, "v": V3}, THREE),
    "scale": (QKV, {"scale": 0.5625}),  # 0.75 squared: onnx takes the root in float32
    "soft cap": (QKV, {"softcap": 0.5}),
    "causal": (QKV, {"is_causal": 1}),
    "causal, more queries": ({"q": K, "k": Q, "v": floats(2, 4, 5, 3)}, {"is_causal": 1}),
    "grouped heads": ({"q": Q, "k": K[:, :2], "v": V[:, :2]}, {}),
    "one key head": ({"q": Q, "k": K[:, :1], "v": V[:, :1]}, {}),
    "grouped, side by side": (
        {"q": floats(2, 5, 24), "k": K3, "v": V3},
        {"q_num_heads": 6, "kv_num_heads": 3},
    ),
    "mask": ({**QKV, "mask": floats(5, 7)}, {}),
    "mask by head": ({**QKV, "mask": floats(4, 5, 7)}, {}),
    "mask by image": ({**QKV, "mask": floats(2, 1, 5, 7)}, {}),
    "mask by image and head": ({**QKV, "mask": floats(2, 4, 5, 7)}, {}),
    "mask and soft cap": ({**QKV, "mask": floats(5, 7)}, {"softcap": 0.5}),
    "mask and causal": ({**QKV, "mask": floats(5, 7)}, {"is_causal": 1}),
    "which keys": ({**QKV, "mask": SEEN}, {}),
    "which keys, causal": ({**QKV, "mask": SEEN}, {"is_causal": 1}),
    "a query that sees nothing": ({**QKV, "mask": BLIND}, {}),
    "a query that sees nothing, additive": ({**QKV, "mask": additive(BLIND)}, {}),
    "softmax in double": (QKV, {"softmax_precision": onnx.TensorProto.DOUBLE}),
}
PADDED: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "padded keys": ({**QKV, "mask": None, **NO_CACHE, "true": np.array([4, 6])}, {}),
    "no true key": ({**QKV, "mask": None, **NO_CACHE, "true": np.array([0, 7])}, {}),
    "padded keys, causal": (
        {**QKV, "mask": None, **NO_CACHE, "true": np.array([4, 6])},
        {"is_causal": 1},
    ),
    "padded keys, mask": ({**QKV, "mask": SEEN, **NO_CACHE, "true": np.array([3, 6])}, {}),
}
WINDOWS: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "window": (QKV, {"left_window_size": 2, "right_window_size": 1}),
    "window, causal": (QKV, {"left_window_size": 2, "is_causal": 1}),
    "window that leaves queries behind": (
        {"q": K, "k": Q, "v": floats(2, 4, 5, 3)},
        {"left_window_size": 1},
    ),
}
ALL = [
    *((23, name, *case) for name, case in CASES.items()),
    *((24, name, *case) for name, case in {**CASES, **PADDED}.items()),
    *((25, name, *case) for name, case in WINDOWS.items()),
]


@pytest.mark.parametrize(
    ("opset", "arrays", "attributes"),
    [(opset, *case) for opset, _, *case in ALL],
    ids=[f"{name}, {opset}" for opset, name, *_ in ALL],
)
def test_it_equals_onnx_and_onnxruntime(
    opset: int, arrays: Arrays, attributes: dict[str, Any]
) -> None:
    model = single("Attention", arrays, opset, **attributes)
    (found,) = run(written_out(model), arrays)
    feeds = {name: array for name, array in arrays.items() if array is not None}
    (reference,) = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    (fused,) = run(model, arrays)
    for expected in (reference, fused):
        close(found, expected)


@pytest.mark.parametrize(
    ("opset", "arrays", "attributes"),
    [(opset, *case) for opset, _, *case in ALL],
    ids=[f"{name}, {opset}" for opset, name, *_ in ALL],
)
def test_its_gradient_is_that_of_the_operator(
    opset: int, arrays: Arrays, attributes: dict[str, Any]
) -> None:
    """The operator itself, as onnx computes it, moved along random directions of each operand."""
    feeds = {name: array for name, array in arrays.items() if array is not None}
    operands = [name for name in feeds if feeds[name].dtype == np.float32]
    feeds |= {name: feeds[name].astype(np.float64) for name in operands}
    model = single("Attention", {**arrays, **feeds}, opset, **attributes)
    shape = evaluate(model, feeds)["y"].shape
    weights = np.random.default_rng(1).normal(size=shape)
    result = differentiate(written_out(model), {"y": None}, operands)
    outputs = evaluate(result.model, {**feeds, "seed.y": weights})
    for name in operands:
        gradient = outputs[f"cotangent.{name}"]
        assert gradient.any()
        directions = np.random.default_rng(2).normal(size=(4, *gradient.shape))
        expected = differences(model, feeds, {"y": weights}, name, directions)
        found = np.tensordot(directions, gradient, gradient.ndim)
        agree(found, expected)


@pytest.mark.parametrize("mask", [BLIND, additive(BLIND).astype(np.float64)], ids=["which", "sum"])
def test_a_query_that_sees_nothing_has_no_gradient(mask: np.ndarray) -> None:
    arrays = {"q": Q, "k": K, "v": V, "mask": mask}
    arrays |= {name: arrays[name].astype(np.float64) for name in "qkv"}
    model = written_out(single("Attention", arrays, 24))
    result = differentiate(model, {"y": None}, ["q", "k", "v"])
    seed = np.random.default_rng(1).normal(size=(2, 4, 5, 3))
    whole = evaluate(result.model, {**arrays, "seed.y": seed})
    assert not whole["cotangent.q"][:, :, 2].any()
    assert all(whole["cotangent.q"][:, :, i].any() for i in (0, 1, 3, 4))
    seed[:, :, [0, 1, 3, 4]] = 0  # what that query alone gives the keys and values
    alone = evaluate(result.model, {**arrays, "seed.y": seed})
    assert not any(alone[f"cotangent.{name}"].any() for name in "qkv")


def by_hand(**attributes: Any) -> np.ndarray:
    """Two tokens: q = 0, log 9; k = 0, 1; v = 0, 1. The result is the chance of the second key."""
    q = np.array([0, math.log(9)], np.float32).reshape(1, 1, 2, 1)
    k = v = np.array([0, 1], np.float32).reshape(1, 1, 2, 1)
    arrays: dict[str, np.ndarray | None] = {"q": q, "k": k, "v": v}
    if "mask" in attributes:
        arrays["mask"] = np.asarray(attributes.pop("mask"))
    (y,) = run(written_out(single("Attention", arrays, 23, **attributes)), arrays)
    return y.reshape(-1)


def test_values_worked_out_by_hand() -> None:
    close(by_hand(), [1 / 2, 9 / 10])
    close(by_hand(scale=0.5), [1 / 2, 3 / 4])
    close(by_hand(is_causal=1), [0, 9 / 10])
    close(by_hand(mask=[[True, False]]), [0, 0])
    close(by_hand(mask=[[False, False], [True, True]]), [0, 9 / 10])
    mask = np.array([[0, 0], [math.log(9), 0]], np.float32)
    close(by_hand(mask=mask), [1 / 2, 1 / 2])
    capped = math.tanh(math.log(9))  # at a cap of 1, the score of the second key
    expected = [1 / 2, math.exp(capped) / (1 + math.exp(capped))]
    close(by_hand(softcap=1.0), expected)


@pytest.mark.parametrize("mode", [0, 3])
def test_scores_and_probabilities_as_an_output(mode: int) -> None:
    arrays = {**QKV, "mask": BLIND}
    options: dict[str, Any] = {"outputs": ("y", "", "", "shown"), "qk_matmul_output_mode": mode}
    model = single("Attention", arrays, 24, **options)
    found, expected = run(written_out(model), arrays), run(model, arrays)
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)


REFUSED: list[tuple[Arrays, dict[str, Any], str]] = [
    (
        {**QKV, "mask": None, "past_key": K, "past_value": V},
        {},
        "past_key is given; expected attention without a cache of keys",
    ),
    (QKV, {"outputs": ("y", "key", "value")}, "present_key or present_value is used"),
    (
        QKV,
        {"outputs": ("y", "", "", "shown"), "qk_matmul_output_mode": 1},
        "its output shown is used",
    ),
    ({**QKV, "mask": floats(5, 3)}, {}, "its mask is for 3 keys; there are 7"),
    ({"q": Q3, "k": K3, "v": V3}, {}, "q_num_heads and kv_num_heads are missing"),
    (
        {"q": Q, "k": K[:, :3], "v": V[:, :3]},
        {},
        "4 query heads do not share 3 key heads evenly",
    ),
]


@pytest.mark.parametrize(("arrays", "options", "found"), REFUSED, ids=[why for *_, why in REFUSED])
def test_what_is_refused(arrays: Arrays, options: dict[str, Any], found: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"^node the_node is ai\.onnx\.Attention"
    ) as raised:
        written_out(single("Attention", arrays, 24, **options))
    assert found in str(raised.value)


X = floats(2, 5, 18)
NEIGHBOURS: dict[str, tuple[str, Arrays, int, dict[str, Any]]] = {
    "rms": ("RMSNormalization", {"x": X, "scale": floats(18)}, 23, {}),
    "rms of two axes": (
        "RMSNormalization",
        {"x": X, "scale": floats(5, 18)},
        23,
        {"axis": 1, "epsilon": 0.1},
    ),
    "swish": ("Swish", {"x": X}, 24, {}),
    "swish, steeper": ("Swish", {"x": X}, 24, {"alpha": 1.7}),
} | {
    f"rotary, {layout}, {'neighbours' if pairs else 'halves'}, {turned or 'all'} of 6": (
        "RotaryEmbedding",
        {
            "x": X if layout == "side by side" else floats(2, 3, 5, 6),
            "cos": floats(*tables, (turned or 6) // 2),
            "sin": floats(*tables, (turned or 6) // 2, seed=1),
            "position_ids": ids,
        },
        23,
        {"interleaved": pairs, "rotary_embedding_dim": turned, "num_heads": 3},
    )
    for layout, tables, ids in (
        ("side by side", (2, 5), None),
        ("by head", (9,), np.arange(10).reshape(2, 5) % 9),
    )
    for pairs in (0, 1)
    for turned in (0, 4)
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_other_operators_that_are_new(name: str) -> None:
    op, arrays, opset, attributes = NEIGHBOURS[name]
    model = single(op, arrays, opset, **attributes)
    (found,) = run(written_out(model), arrays)
    feeds = {name: array for name, array in arrays.items() if array is not None}
    (reference,) = onnx.reference.ReferenceEvaluator(model).run(None, feeds)
    for expected in (reference, *run(model, arrays)):
        close(found, expected)
