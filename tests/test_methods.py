"""The methods against numbers worked out by hand and against golden values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxplain.errors import InputError
from onnxplain.runtime import methods

Map = Callable[..., NDArray[Any]]

# One head, a class token and two patches; every sum below can be followed on paper.
FIRST = np.array([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.0, 0.5, 0.5]]])
LAST = np.array([[[0.2, 0.2, 0.6], [0.5, 0.5, 0.0], [0.25, 0.25, 0.5]]])
SIGNS = np.array([[[1.0, -1.0, 2.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]])
PAIR: dict[str, Any] = {"grid": (1, 2)}


def test_raw_attention_is_the_class_row_of_the_last_layer() -> None:
    np.testing.assert_allclose(methods.raw_attention([FIRST, LAST], **PAIR), [[0.2, 0.6]])


def test_rollout_by_hand() -> None:
    # r M_1 = (1.2, .2, .6) / 2 = (.6, .1, .3);  M_0 = (FIRST + I) / 2, so
    # patch 1: (.6 * .25 + .1 * 1.5 + .3 * .5) / 2 = .225; patch 2: (.15 + .025 + .45) / 2 = .3125
    np.testing.assert_allclose(methods.rollout([FIRST, LAST], **PAIR), [[0.225, 0.3125]])


def test_start_layer_leaves_out_the_first_layers() -> None:
    np.testing.assert_allclose(methods.rollout([FIRST, LAST], start_layer=1, **PAIR), [[0.1, 0.3]])


def test_rows_are_normalised_not_columns() -> None:
    # max fusion makes rows that do not sum to 1: (1.5, .5, .5) / 2.5
    heads = np.array([[[0.5, 0.5, 0.0]] * 3, [[0.5, 0.0, 0.5]] * 3])
    found = methods.rollout([heads], head_fusion="max", **PAIR)
    np.testing.assert_allclose(found, [[0.2, 0.2]])


def test_discard_takes_the_lowest_and_of_equal_ones_the_first() -> None:
    # int(.5 * 9) = 4 of LAST: 0, then the 0.2s at positions 0 (kept: class to class) and 1, then
    # the first of the two 0.25s. Row 0 becomes (.2, 0, .6) + e_0 over 1.8.
    found = methods.rollout([LAST], discard_ratio=0.5, **PAIR)
    np.testing.assert_allclose(found, [[0.0, 0.6 / 1.8]])


def test_without_a_class_token_no_entry_is_protected() -> None:
    flat = np.full((1, 4, 4), 0.25)
    found = methods.rollout([flat], prefix_tokens=0, discard_ratio=0.25, grid=(2, 2))
    # The first row is discarded; the mean over rows of (F + I) / rowsum is then:
    # column 0: (1 + 3 * .125) / 4; the others: (.125 + .125 + .625) / 4
    np.testing.assert_allclose(found, [[0.34375, 0.21875], [0.21875, 0.21875]])


def test_gradient_rollout_by_hand() -> None:
    # relu(LAST * SIGNS) = (.2, 0, 1.2), so row 0 is (1.2, 0, 1.2) / 2.4
    found = methods.gradient_rollout([LAST], [SIGNS], **PAIR)
    np.testing.assert_allclose(found, [[0.0, 0.5]])


def test_gradient_rollout_rectifies_after_the_mean_over_heads() -> None:
    heads = np.concatenate([LAST, LAST])
    gradient = np.concatenate([SIGNS, -SIGNS])
    np.testing.assert_array_equal(methods.gradient_rollout([heads], [gradient], **PAIR), [[0, 0]])
    # generic attention rectifies each head: (0, .1, .6)
    found = methods.generic_attention([heads], [gradient], **PAIR)
    np.testing.assert_allclose(found, [[0.1, 0.6]])


def test_generic_attention_by_hand() -> None:
    # r (I + E_1) = (1.2, 0, 1.2) with E_1 = relu(LAST * SIGNS);
    # E_0 = relu(FIRST * SIGNS) = [[.5, 0, .5], [0, .5, 0], [0, 0, 0]], so the patches are
    # (0, 1.2) + (0, 1.2 * .5)
    found = methods.generic_attention([FIRST, LAST], [SIGNS, SIGNS], **PAIR)
    np.testing.assert_allclose(found, [[0.0, 1.8]])


def test_attention_gradcam_by_hand() -> None:
    # a = (-1 + 2) / 2; the map is relu(.5 * (.2, .6))
    found = methods.attention_gradcam([FIRST, LAST], [FIRST, SIGNS], **PAIR)
    np.testing.assert_allclose(found, [[0.1, 0.3]])
    np.testing.assert_array_equal(methods.attention_gradcam([LAST], [-SIGNS], **PAIR), [[0, 0]])


def test_gradcam_by_hand() -> None:
    features = np.array([[9.0, 9.0], [1.0, 2.0], [3.0, -1.0]])
    gradient = np.array([[9.0, 9.0], [1.0, 0.0], [3.0, -4.0]])
    # a = (2, -2); patches: 2 - 4 -> 0 and 6 + 2
    np.testing.assert_allclose(methods.gradcam(features, gradient, **PAIR), [[0.0, 8.0]])
    planes = features[1:].T[None, :, None]
    steep = gradient[1:].T[None, :, None]
    np.testing.assert_allclose(methods.gradcam(planes, steep), [[[0.0, 8.0]]])


def test_readout_ranges_and_weights() -> None:
    both = methods.raw_attention([LAST], readout=[(0, 1), (2, 3)], **PAIR)
    np.testing.assert_allclose(both, [[0.225, 0.55]])
    weighted = methods.raw_attention([LAST], readout=[0.5, 0.0, 0.5], **PAIR)
    np.testing.assert_allclose(weighted, both)
    mean = methods.raw_attention([LAST], prefix_tokens=0, grid=(1, 3))
    np.testing.assert_allclose(mean, [LAST[0].mean(axis=0)])


def golden_maps(folder: Path, name: str) -> tuple[Any, dict[str, NDArray[Any]]]:
    values = np.load(folder / f"{name}.npz")
    a, g, c = (
        np.moveaxis(values[f"attention{suffix}"], 1, 0)
        for suffix in ("", "_gradient", "_relevance")
    )
    grid = values["rollout"].shape[1:]
    m = methods
    return values, {
        "raw_attention": m.raw_attention(a, grid=grid),
        "rollout": m.rollout(a, grid=grid),
        "rollout_from_block1": m.rollout(a, start_layer=1, grid=grid),
        "rollout_max_discard09": m.rollout(a, head_fusion="max", discard_ratio=0.9, grid=grid),
        "rollout_mean_discard05": m.rollout(a, discard_ratio=0.5, grid=grid),
        "grad_rollout": m.gradient_rollout(a, g, grid=grid),
        "gradcam_attention": m.attention_gradcam(a, g, grid=grid),
        "attention_relevance_generic": m.generic_attention(a, g, grid=grid),
        "relevance": m.transformer_attribution(g, c, grid=grid),
        "relevance_from_block1": m.transformer_attribution(g, c, start_layer=1, grid=grid),
    }


def assert_golden(folder: Path, name: str) -> None:
    values, maps = golden_maps(folder, name)
    for key, found in maps.items():
        assert found.dtype == np.float64
        largest = np.abs(values[key]).max()
        np.testing.assert_allclose(found, values[key], rtol=0, atol=1e-12 * largest, err_msg=key)


def test_golden_wide(golden: Path) -> None:
    assert_golden(golden, "vit_wide")


def test_golden_square(shared_golden: Path) -> None:
    assert_golden(shared_golden, "vit_square")


def test_golden_small(golden: Path) -> None:
    small = json.loads((golden / "small.json").read_text())
    a, g = small["attention"], small["attention_gradient"]
    layout = {"prefix_tokens": small["prefix_tokens"], "grid": tuple(small["grid"])}
    found = {
        "raw_attention": methods.raw_attention(a, **layout),
        "rollout_mean": methods.rollout(a, **layout),
        "rollout_max": methods.rollout(a, head_fusion="max", **layout),
        "rollout_min": methods.rollout(a, head_fusion="min", **layout),
        "gradient_rollout": methods.gradient_rollout(a, g, **layout),
        "generic_attention": methods.generic_attention(a, g, **layout),
        "attention_gradcam": methods.attention_gradcam(a, g, **layout),
    }
    assert found.keys() == small["expected"].keys()
    for key, values in small["expected"].items():
        np.testing.assert_allclose(found[key].ravel(), values, rtol=0, atol=1e-12, err_msg=key)


LAYERED: list[tuple[Map, int]] = [
    (methods.raw_attention, 1),
    (methods.rollout, 1),
    (methods.gradient_rollout, 2),
    (methods.generic_attention, 2),
    (methods.transformer_attribution, 2),
    (methods.attention_gradcam, 2),
]


@pytest.mark.parametrize(("method", "arrays"), LAYERED)
def test_precision_and_batch_axis(method: Map, arrays: int) -> None:
    rng = np.random.default_rng(1)
    layers = [rng.random((3, 2, 5, 5)) for _ in range(2)]
    double = method(*[layers] * arrays)
    assert double.dtype == np.float64
    assert double.shape == (3, 2, 2)
    single = method(*[[layer.astype(np.float32) for layer in layers]] * arrays)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, double, rtol=1e-5)
    one = method(*[[layer[1] for layer in layers]] * arrays)
    np.testing.assert_allclose(one, double[1], rtol=1e-14)


@pytest.mark.parametrize(("method", "arrays"), LAYERED)
def test_arguments_are_left_as_they_were(method: Map, arrays: int) -> None:
    layers = [np.random.default_rng(2).normal(size=(1, 2, 5, 5)) for _ in range(2)]
    before = [layer.copy() for layer in layers]
    method(*[layers] * arrays)
    for layer, original in zip(layers, before, strict=True):
        np.testing.assert_array_equal(layer, original)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: methods.rollout([np.ones((1, 5, 4))]), "expected .B, heads, N, N."),
        (lambda: methods.rollout([np.ones((5, 5))]), "expected .B, heads, N, N."),
        (lambda: methods.rollout([]), "no layers"),
        (lambda: methods.rollout([np.ones((1, 5, 5)), np.ones((1, 4, 4))]), "layer 1"),
        (lambda: methods.rollout([LAST], head_fusion="sum"), "mean, max, min"),
        (lambda: methods.rollout([LAST], discard_ratio=1.0, **PAIR), "0 <= ratio < 1"),
        (lambda: methods.rollout([LAST], discard_ratio=-0.1, **PAIR), "0 <= ratio < 1"),
        (lambda: methods.rollout([LAST], discard_ratio=float("nan"), **PAIR), "ratio"),
        (lambda: methods.rollout([LAST], start_layer=1, **PAIR), r"expected 0\.\.0"),
        (lambda: methods.rollout([LAST], start_layer=-1, **PAIR), r"expected 0\.\.0"),
        (lambda: methods.rollout([LAST]), "give grid="),
        (lambda: methods.rollout([LAST], grid=(2, 2)), "2x2 does not hold 2"),
        (lambda: methods.rollout([LAST], grid=(-1, -2)), "does not hold"),
        (lambda: methods.rollout([LAST], prefix_tokens=3), "prefix_tokens"),
        (lambda: methods.rollout([LAST * np.nan], **PAIR), "NaN"),
        (lambda: methods.rollout([["a"]]), "not an array of numbers"),
        (lambda: methods.rollout([LAST], readout=[(0, 4)], **PAIR), "range 0..4"),
        (lambda: methods.rollout([LAST], readout=[1.0, 0.0], **PAIR), "3 weights"),
        (lambda: methods.generic_attention([LAST, LAST], [LAST]), "2 layers .* 1"),
        (lambda: methods.gradient_rollout([LAST], [np.ones((2, 3, 3))]), "shapes"),
        (lambda: methods.generic_attention([LAST], [LAST / 0], **PAIR), "infinite"),
        (lambda: methods.gradcam(np.ones((3, 2)), np.ones((3, 1))), "shape"),
        (lambda: methods.gradcam(np.ones(3), np.ones(3)), "shape"),
        (lambda: methods.gradcam(np.ones((3, 2)), np.ones((3, 2)), prefix_tokens=3), "prefix"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_misfits_are_refused_in_one_line(call: Map, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)
