"""`Explainer`: taps, methods, options, targets and batches."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import LABELS, LAYERS, ToyFile, assert_same, pixels, toy_contract

import onnxplain as ox
from onnxplain.contract import Contract
from onnxplain.outputs import METHODS
from onnxplain.runtime import methods

# What the file says, and what comes out of it


def test_the_file_describes_itself(explainer: ox.Explainer) -> None:
    assert explainer.contract == toy_contract()
    assert explainer.methods == tuple(METHODS)
    assert explainer.device == "cpu"


def test_taps_have_the_shapes_of_the_contract(explainer: ox.Explainer) -> None:
    taps = explainer.taps(pixels(3))
    assert taps.logits.shape == (3, 3)
    for layers in (taps.attention, taps.attention_gradient, taps.attention_relevance):
        assert layers is not None
        assert [a.shape for a in layers if a is not None] == [(3, 2, 5, 5)] * LAYERS
    assert taps.features is not None and taps.features.shape == (3, 5, 4)
    assert taps.features_gradient is not None and taps.features_gradient.shape == (3, 5, 4)
    for pixel_values in (taps.input_relevance, taps.input_relevance_attnlrp):
        assert pixel_values is not None and pixel_values.shape == (3, 3, 8, 8)
    lrp = taps.attention_relevance_lrp
    assert lrp is not None and lrp[0] is None and lrp[1] is not None
    assert lrp[1].shape == (3, 2, 5, 5)
    assert taps.input_gradient is None


def test_taps_of_chosen_kinds(explainer: ox.Explainer) -> None:
    taps = explainer.taps(pixels(1), kinds=["attention_gradient"])
    assert taps.attention is None and taps.features is None
    assert taps.attention_gradient is not None
    none = explainer.taps(pixels(1), kinds=())
    assert none.logits.shape == (1, 3) and none.attention_gradient is None


def test_taps_of_a_file_that_has_one_layer_of_them(toy_file: ToyFile) -> None:
    last = ox.Explainer(toy_file(methods=["raw_attention"]), device="cpu")
    attention = last.taps(pixels(1)).attention
    assert attention is not None
    assert attention[0] is None and attention[1] is not None
    with pytest.raises(ox.InputError, match="has no features; it has attention"):
        last.taps(pixels(1), kinds=["features"])
    with pytest.raises(ox.InputError, match="unknown kind of tap 'heads'"):
        last.taps(pixels(1), kinds=["heads"])


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_its_function_on_the_taps(method: str, explainer: ox.Explainer) -> None:
    images = pixels(2)
    taps = explainer.taps(images, target=[1, 2])
    a: Any = taps.attention
    g: Any = taps.attention_gradient
    r: Any = taps.attention_relevance
    lrp: Any = taps.attention_relevance_lrp
    expected = {
        "raw_attention": lambda: methods.raw_attention(a),
        "rollout": lambda: methods.rollout(a),
        "gradcam": lambda: methods.gradcam(taps.features, taps.features_gradient),  # type: ignore[arg-type]
        "attention_gradcam": lambda: methods.attention_gradcam(a, g),
        "gradient_rollout": lambda: methods.gradient_rollout(a, g),
        "generic_attention": lambda: methods.generic_attention(a, g),
        "transformer_attribution": lambda: methods.transformer_attribution(g, r),
        "partial_lrp": lambda: methods.partial_lrp(lrp[-1:]),
        "lrp": lambda: methods.lrp(taps.input_relevance),  # type: ignore[arg-type]
        "attnlrp": lambda: methods.attnlrp(taps.input_relevance_attnlrp),  # type: ignore[arg-type]
    }[method]()
    result = explainer.explain(images, method=method, target=[1, 2])
    assert result.method == method
    size = (8, 8) if METHODS[method].pixels else (2, 2)
    assert result.grid.shape == (2, *size) and result.grid.dtype == np.float32
    np.testing.assert_array_equal(result.grid, expected)
    np.testing.assert_array_equal(result.logits, taps.logits)


def test_options_reach_the_method(explainer: ox.Explainer) -> None:
    images = pixels(1)
    options: dict[str, Any] = {"head_fusion": "max", "discard_ratio": 0.5, "start_layer": 1}
    attention: Any = explainer.taps(images).attention
    result = explainer.explain(images, method="rollout", **options)
    np.testing.assert_array_equal(result.grid, methods.rollout(attention, **options))
    assert result.options == options


def test_the_readout_of_the_contract_is_used(toy_file: ToyFile) -> None:
    contract = toy_contract()
    assert contract.readout is not None
    mean = replace(contract.readout, kind="mean", ranges=((1, 5),))
    explainer = ox.Explainer(toy_file(readout=mean), device="cpu")
    attention: Any = explainer.taps(pixels(1)).attention
    expected = attention[-1].mean(axis=1)[:, 1:].mean(axis=1)[:, 1:].reshape(1, 2, 2)
    found = explainer.explain(pixels(1), method="raw_attention").grid
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_auto_takes_the_best_method_of_the_file(toy_file: ToyFile) -> None:
    for have, best in (
        (tuple(METHODS), "transformer_attribution"),
        (("rollout", "generic_attention", "lrp"), "generic_attention"),
        (("raw_attention", "rollout", "gradcam"), "gradcam"),
        (("raw_attention", "rollout"), "rollout"),
    ):
        explainer = ox.Explainer(toy_file(methods=have), device="cpu")
        assert explainer.explain(pixels(1)).method == best
    with pytest.raises(ox.InputError, match="serves no method"):
        ox.Explainer(toy_file(methods=()), device="cpu").explain(pixels(1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "grad_cam"}, "'grad_cam' is not a method of onnxplain; it has raw_attention"),
        ({"method": "generic_attention", "head_fusion": "max"}, "no option 'head_fusion'.* none"),
        ({"method": "rollout", "heads": 1}, "head_fusion, discard_ratio, start_layer"),
        ({"method": "rollout", "prefix_tokens": 1}, "no option 'prefix_tokens'"),
        ({"method": "rollout", "head_fusion": "sum"}, "unknown head_fusion 'sum'"),
    ],
)
def test_wrong_methods_and_options(
    arguments: dict[str, Any], words: str, explainer: ox.Explainer
) -> None:
    with pytest.raises(ox.InputError, match=words):
        explainer.explain(pixels(1), **arguments)


def test_a_method_that_the_file_lacks(toy_file: ToyFile) -> None:
    explainer = ox.Explainer(toy_file(methods=["rollout"]), device="cpu")
    with pytest.raises(ox.InputError, match="'gradcam' is not in this file; it has rollout"):
        explainer.explain(pixels(1), method="gradcam")


# Targets


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (2, [2, 2]),
        (np.int32(1), [1, 1]),
        ("tabby", [0, 0]),
        ("egyptian CAT", [1, 1]),
        ("2", [2, 2]),
        ([0, "espresso"], [0, 2]),
        ((1,), [1, 1]),
        (np.array([2, 0]), [2, 0]),
    ],
)
def test_targets(target: Any, expected: list[int], explainer: ox.Explainer) -> None:
    result = explainer.explain(pixels(2), target=target)
    assert result.target.dtype == np.int64
    assert result.target.tolist() == expected
    assert result.labels == tuple(LABELS[i] for i in expected)
    assert explainer.taps(pixels(2), target=target).target.tolist() == expected


def test_the_prediction_is_explained_by_default(explainer: ox.Explainer) -> None:
    images = 9 * pixels(4)
    taps = explainer.taps(images)
    predicted = taps.logits.argmax(axis=1)
    assert len(set(predicted.tolist())) > 1
    np.testing.assert_array_equal(taps.target, predicted)
    told = explainer.taps(images, target=predicted.tolist())
    np.testing.assert_array_equal(taps.features_gradient, told.features_gradient)
    mixed = explainer.taps(images, target=[None, 0, None, 1])
    assert mixed.target.tolist() == [predicted[0], 0, predicted[2], 1]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (3, r"target 3 is not in 0\.\.2"),
        (-1, r"not in 0\.\.2"),
        ("9", r"not in 0\.\.2"),
        (True, "is a bool"),
        (np.bool_(True), "is a bool"),
        (1.0, "is a float"),
        ("expresso", "no label 'expresso' in this model; close ones: 'espresso'"),
        ("zzz", "no label 'zzz' in this model; it has 3 labels"),
        ([0, 1, 2], "3 targets for 2 images"),
        ([], "0 targets for 2 images"),
        ([[0, 1]], "is a list"),
    ],
)
def test_wrong_targets(target: Any, words: str, explainer: ox.Explainer) -> None:
    with pytest.raises(ox.InputError, match=words):
        explainer.explain(pixels(2), target=target)


def test_without_labels_classes_have_numbers(toy_file: ToyFile) -> None:
    explainer = ox.Explainer(toy_file(labels=None), device="cpu")
    assert explainer.explain(pixels(1), target=1).labels == ("1",)
    with pytest.raises(ox.InputError, match="no labels; give a class index"):
        explainer.explain(pixels(1), target="tabby")


# Batches


@pytest.mark.parametrize("method", ["generic_attention", "gradcam"])
def test_batches_agree_and_leave_no_state(method: str, explainer: ox.Explainer) -> None:
    images = pixels(8)
    whole = explainer.explain(images, method=method)
    for size in (1, 2):
        for start in range(0, 8, size):
            part = explainer.explain(images[start : start + size], method=method)
            for i, one in enumerate(part):
                assert_same(one, whole[start + i])
    first, _, again = (explainer.explain(images[i : i + 1], method=method) for i in (1, 2, 1))
    assert_same(first, again, rtol=0, atol=0)


def test_more_images_than_go_through_the_model_at_once(explainer: ox.Explainer) -> None:
    images = pixels(37)
    result = explainer.explain(images, target=list(itertools.islice(itertools.cycle(range(3)), 37)))
    assert result.grid.shape == (37, 2, 2)
    assert result.target.tolist() == [i % 3 for i in range(37)]
    assert_same(explainer.explain(images[36:], target=0), result[36])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_fixed_batch_is_filled_and_joined(batch: int, toy_file: ToyFile) -> None:
    spec = replace(toy_contract().input, batch=batch)
    fixed = ox.Explainer(toy_file("fixed.onnx", input=spec), device="cpu")
    free = ox.Explainer(toy_file(), device="cpu")
    images, target = pixels(5), [0, 1, 2, None, 1]
    assert_same(
        fixed.explain(images, target=target), free.explain(images, target=target), rtol=1e-5
    )
    assert fixed.taps(images).logits.shape == (5, 3)


def test_an_image_with_overflow_does_not_take_its_batch_along(explainer: ox.Explainer) -> None:
    images = pixels(3)
    images[1] = 3e38
    result = explainer.explain(images)
    assert result.degenerate.tolist() == [False, True, False]
    assert np.isnan(result.grid[1]).all()
    assert not result.heatmap[1].any()
    assert_same(explainer.explain(images[2:]), result[2])


def test_concurrent_calls(explainer: ox.Explainer) -> None:
    images = [pixels(2, seed) for seed in range(8)]
    expected = [explainer.explain(image).grid for image in images]
    found: list[Any] = [None] * 8

    def call(i: int) -> None:
        found[i] = explainer.explain(images[i]).grid

    threads = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(found, expected)


def test_a_contract_survives_the_file(toy_file: ToyFile) -> None:
    labels = ("café", "日本", 'quo"te')
    explainer = ox.Explainer(toy_file(labels=labels), device="cpu")
    assert isinstance(explainer.contract, Contract)
    assert explainer.explain(pixels(1), target="CAFÉ").labels == ("café",)


def test_explain_each_is_explain_for_every_method(explainer: ox.Explainer) -> None:
    images = pixels(2)
    found = {one.method: one for one in explainer.explain_each(images, target=[0, 1])}
    assert tuple(found) == explainer.methods
    for method, one in found.items():
        alone = explainer.explain(images, method=method, target=[0, 1])
        np.testing.assert_array_equal(one.heatmap, alone.heatmap)
        np.testing.assert_array_equal(one.target, alone.target)
    assert [one.method for one in explainer.explain_each(images, methods=["rollout"])] == [
        "rollout"
    ]
