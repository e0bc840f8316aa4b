"""Explained files with the weights behind a depth permuted."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from small_vits import CONFIGURATIONS

import onnxplain as ox
from onnxplain.errors import ContractError, InputError, ModelError, UnsupportedModelError
from onnxplain.export.plain import to_onnx
from onnxplain.graphs.randomised import levels, randomise
from onnxplain.graphs.reduced import reduce_to
from onnxplain.outputs import METHODS

GARMENTS = Path(ox.__file__).parent / "demo" / "garments.onnx"
# The same nodes on the same weights: what onnxruntime does to two files of them.
SAME = 1e-6


def permuted(array: NDArray[Any], name: str, seed: int) -> NDArray[Any]:
    """The definition: the values in an order drawn from the seed and the tensor's name."""
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u4").tolist()
    return np.random.default_rng([seed, *words]).permutation(array.ravel()).reshape(array.shape)


def weights(path: Path) -> dict[str, NDArray[Any]]:
    model = onnx.load(path)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def changed(one: Path, other: Path) -> set[str]:
    before, after = weights(one), weights(other)
    return {name for name, array in after.items() if not np.array_equal(array, before[name])}


def at_level(source: Path, folder: Path, level: int, **options: Any) -> Path:
    path = folder / f"level{level}.onnx"
    randomise(source, path, level, **{"seed": 3, **options})
    return path


def opened(path: Path) -> ox.Explainer:
    return ox.Explainer(path, device="cpu", threads=1)


def images(size: int, count: int = 2) -> NDArray[np.float32]:
    return np.random.default_rng(5).normal(size=(count, 3, size, size)).astype(np.float32)


def test_levels_of_a_transformer(tmp_path: Path) -> None:
    names = levels(GARMENTS)
    assert names == [*(f"behind attention {i}" for i in (3, 2, 1, 0)), "all"]
    found = [changed(GARMENTS, at_level(GARMENTS, tmp_path, i + 1)) for i in range(5)]
    for before, after in pairwise(found):
        assert before < after
    assert {"head.weight", "head.bias", "norm.weight", "blocks.3.norm2.weight"} <= found[0]
    assert {"blocks.3.norm1.weight", "blocks.2.norm2.bias"} <= found[1] - found[0]
    assert {"blocks.2.norm1.weight", "blocks.1.norm2.bias"} <= found[2] - found[1]
    assert {"blocks.1.attn.qkv.bias", "blocks.0.norm2.bias"} <= found[3] - found[2]
    assert found[4] - found[3] >= {
        *("blocks.0.norm1.weight", "blocks.0.attn.qkv.bias", "cls_token", "pos_embed"),
        *("patch_embed.proj.weight", "patch_embed.proj.bias"),
    }


def test_nothing_learned_is_left_at_the_last_level(tmp_path: Path) -> None:
    forward, last = tmp_path / "forward.onnx", at_level(GARMENTS, tmp_path, 5)
    reduce_to(GARMENTS, forward, ())
    before, after = weights(GARMENTS), weights(last)
    read = {name for name, array in weights(forward).items() if array.dtype == np.float32}
    alike = {name for name in read if np.array_equal(before[name], after[name])}
    assert {before[name].size for name in alike} == {1}  # the scale of the products
    assert len(read) - len(alike) == 56
    for name in read - alike:
        assert np.array_equal(after[name], permuted(before[name], name, 3))
    for name in set(before) - read:  # of the walks back alone
        assert np.array_equal(before[name], after[name])


def test_a_level_keeps_what_the_one_before_replaced(tmp_path: Path) -> None:
    one, two = (weights(at_level(GARMENTS, tmp_path, i)) for i in (1, 2))
    for name in changed(GARMENTS, tmp_path / "level1.onnx"):
        assert np.array_equal(one[name], two[name])


def permuted_plain(model: ir.Model, names: set[str]) -> ir.Model:
    model = model.clone()
    for name, value in model.graph.initializers.items():
        if name in names and value.const_value is not None:
            array = permuted(value.const_value.numpy(), name, 3)
            value.const_value = ir.tensor(array, name=name)
    return model


@pytest.mark.parametrize(
    ("configuration", "precision"),
    [("class token", "fp32"), ("class token", "fp16"), ("swiglu", "fp32"), ("registers", "fp32")],
)
def test_the_maps_are_those_of_the_randomised_model(
    configuration: str, precision: str, tmp_path: Path
) -> None:
    """Randomising an explained file is explaining the randomised file."""
    size = (56, 56) if configuration == "registers" else (32, 32)
    plain = to_onnx(CONFIGURATIONS[configuration](), image_size=size)
    explained, expected = tmp_path / "explained.onnx", tmp_path / "expected.onnx"
    ox.instrument(plain, explained, precision=precision)
    for level in (1, len(levels(explained))):
        path = at_level(explained, tmp_path, level)
        names = changed(explained, path)
        assert names <= set(plain.graph.initializers)
        ox.instrument(permuted_plain(plain, names), expected, precision=precision)
        one, other = opened(path), opened(expected)
        assert one.methods == other.methods == tuple(METHODS)
        for method in METHODS:
            found, wanted = (
                e.explain(images(size[0]), method=method, target=2) for e in (one, other)
            )
            largest = float(np.abs(wanted.grid).max())
            np.testing.assert_allclose(found.grid, wanted.grid, rtol=0, atol=SAME * largest)
            np.testing.assert_allclose(found.logits, wanted.logits, rtol=0, atol=SAME)


# A convolutional network by hand: preprocessing, four products, two normalisations.
def convolutional(path: Path) -> Path:
    rng = np.random.default_rng(2)
    node = helper.make_node
    shapes = {"first": (6, 3, 3, 3), "second": (8, 6, 3, 3), "third": (8, 8, 1, 1), "head": (8, 5)}
    tensors = {name: rng.normal(size=shape) * 0.3 for name, shape in shapes.items()}
    for i, count in enumerate((6, 8)):
        tensors |= {f"{name}{i}": rng.normal(size=count) for name in ("scale", "shift", "mean")}
        tensors[f"variance{i}"] = np.exp(rng.normal(size=count) * 3)
    tensors |= {"bias": rng.normal(size=5), "even": np.full(8, 0.5)}
    tensors |= {"pixel_mean": rng.normal(size=(1, 3, 1, 1)), "mask": np.array([0.0, 1] * 4)}
    nodes = [
        node("Sub", ["image", "pixel_mean"], ["centred"]),
        node("Conv", ["centred", "first"], ["a0"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["a0", "scale0", "shift0", "mean0", "variance0"], ["b0"]),
        node("Relu", ["b0"], ["c0"]),
        node("Conv", ["c0", "second"], ["a1"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["a1", "scale1", "shift1", "mean1", "variance1"], ["b1"]),
        node("Relu", ["b1"], ["c1"]),
        node("Conv", ["c1", "third"], ["a2"]),
        node("Add", ["a2", "c1"], ["sum"]),
        node("GlobalAveragePool", ["sum"], ["pooled"]),
        node("Flatten", ["pooled"], ["flat"]),
        node("Mul", ["flat", "even"], ["halved"]),
        node("Mul", ["halved", "mask"], ["masked"]),
        node("MatMul", ["masked", "head"], ["product"]),
        node("Add", ["product", "bias"], ["logits"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "convolutional",
        [value("image", TensorProto.FLOAT, ["batch", 3, 12, 12])],
        [value("logits", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(a.astype(np.float32), name) for name, a in tensors.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path
    )
    explained = path.with_name("explained.onnx")
    ox.instrument(path, explained)
    return explained


def test_levels_of_a_convolutional_network(tmp_path: Path) -> None:
    """What is not part of a product counts as the next one; what is no weight stays."""
    explained = convolutional(tmp_path / "plain.onnx")
    assert levels(explained) == [f"last {i} of 4 products" for i in (1, 2, 3)] + ["all"]
    found = [changed(explained, at_level(explained, tmp_path, i + 1)) for i in range(4)]
    assert found[0] == {"bias", "head"}
    # The second normalisation goes on to the third product, and past it to the sum.
    assert found[1] - found[0] == {"third", "scale1", "shift1", "mean1", "variance1"}
    assert found[2] - found[1] == {"second", "scale0", "shift0", "mean0", "variance0"}
    assert found[3] - found[2] == {"first"}
    after = weights(tmp_path / "level4.onnx")
    assert min(after["variance0"].min(), after["variance1"].min()) > 0
    result = opened(tmp_path / "level4.onnx").explain(images(12), method="gradcam")
    assert np.isfinite(result.logits).all()
    assert np.isfinite(result.grid).all()
    assert not np.allclose(result.logits, opened(explained).taps(images(12)).logits, atol=0.1)


def test_of_many_products_a_level_has_several(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    nodes, tensors, value = [], {}, "image"
    for i in range(18):
        tensors[f"kernel{i:02}"] = rng.normal(size=(3, 3, 1, 1))
        nodes.append(helper.make_node("Conv", [value, f"kernel{i:02}"], [f"x{i}"]))
        value = f"x{i}"
    tensors["head"] = rng.normal(size=(3, 4))
    nodes += [
        helper.make_node("GlobalAveragePool", [value], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "head"], ["logits"]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "chain",
        [info("image", TensorProto.FLOAT, ["batch", 3, 6, 6])],
        [info("logits", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(a.astype(np.float32), name) for name, a in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, tmp_path / "plain.onnx")
    explained = tmp_path / "explained.onnx"
    ox.instrument(tmp_path / "plain.onnx", explained)
    names = levels(explained)
    assert names[:3] == [f"last {i} of 19 products" for i in (2, 4, 7)]
    assert (len(names), names[-1]) == (8, "all")
    assert changed(explained, at_level(explained, tmp_path, 1)) == {"head", "kernel17"}
    assert changed(explained, at_level(explained, tmp_path, 8)) == set(tensors)


def test_weights_in_nodes_are_weights(tmp_path: Path) -> None:
    explained = convolutional(tmp_path / "plain.onnx")
    model = onnx.load(explained)
    moved = [tensor for tensor in model.graph.initializer if tensor.name in ("head", "bias")]
    for tensor in moved:
        model.graph.initializer.remove(tensor)
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    onnx.save(model, tmp_path / "nodes.onnx")
    path = at_level(tmp_path / "nodes.onnx", tmp_path, 1)
    for tensor in moved:
        array = numpy_helper.to_array(tensor)
        assert np.array_equal(weights(path)[tensor.name], permuted(array, tensor.name, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"methods": ["transformer_attribution"], "outputs": "maps"},
        {"methods": ["rollout"], "embed_preprocessing": True},
        {"methods": ["rollout"], "precision": "fp16"},
    ],
    ids=str,
)
def test_the_levels_do_not_depend_on_what_a_file_holds(
    options: dict[str, Any], small: Any, tmp_path: Path
) -> None:
    whole, part = tmp_path / "whole.onnx", tmp_path / "part.onnx"
    preprocessing = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    ox.instrument(small, whole, preprocessing=preprocessing)
    ox.instrument(small, part, preprocessing=preprocessing, **options)
    assert levels(part) == levels(whole)
    for level in range(1, len(levels(whole)) + 1):
        expected = changed(whole, at_level(whole, tmp_path, level))
        assert changed(part, at_level(part, tmp_path, level)) == expected


def test_pictures_of_any_size(tmp_path: Path) -> None:
    path = tmp_path / "any.onnx"
    ox.export(
        "vit_tiny_patch16_224", path, methods=["rollout"], image_size=32, dynamic_size=True,
        verify=False, embed_dim=32, depth=2, num_heads=2, num_classes=5,
    )  # fmt: skip
    assert levels(path) == ["behind attention 1", "behind attention 0", "all"]
    last = at_level(path, tmp_path, 3)
    before = weights(path)
    shapes = {before[name].shape for name in changed(path, last)}
    assert (1, 32, 2, 2) in shapes  # the positions of the patches, which are resized
    assert (32, 3, 16, 16) in shapes
    assert opened(last).explain(images(48)).grid.shape == (2, 3, 3)


def test_the_graphs_of_a_bundle_share_the_weights(small: Any, tmp_path: Path) -> None:
    bundle, single = tmp_path / "bundle", tmp_path / "single.onnx"
    ox.instrument(small, bundle)
    ox.instrument(small, single)
    assert levels(bundle) == levels(single)
    folder, last = tmp_path / "randomised", at_level(single, tmp_path, 3)
    randomise(bundle, folder, 3, seed=3, methods=["generic_attention", "lrp"])
    names = changed(single, last)
    graphs = [weights(folder / name) for name in ("gradient.onnx", "lrp.onnx")]
    for name in names:
        for graph in graphs:
            assert np.array_equal(graph[name], weights(last)[name])
    size = (folder / "weights.bin").stat().st_size
    assert size <= (bundle / "weights.bin").stat().st_size
    result = opened(folder).explain(images(32), method="generic_attention")
    expected = opened(last).explain(images(32), method="generic_attention")
    np.testing.assert_allclose(result.grid, expected.grid, atol=1e-5)


def test_the_same_in_another_process(tmp_path: Path) -> None:
    here, there = at_level(GARMENTS, tmp_path, 5, methods=["gradcam"]), tmp_path / "there.onnx"
    code = (
        "import sys; from onnxplain.graphs.randomised import randomise;"
        "randomise(sys.argv[1], sys.argv[2], 5, seed=3, methods=['gradcam'])"
    )
    subprocess.run([sys.executable, "-c", code, GARMENTS, there], check=True)
    assert here.read_bytes() == there.read_bytes()
    assert here.read_bytes() != at_level(GARMENTS, tmp_path, 5, seed=4).read_bytes()


def test_the_file_says_what_it_is(tmp_path: Path) -> None:
    contract = opened(at_level(GARMENTS, tmp_path, 2, methods=())).contract
    assert contract.source.name.endswith(", randomised: behind attention 2, seed 3")
    assert (contract.source.weights_sha256, contract.verification) == ("", None)
    assert contract.methods == {}


def test_what_cannot_be_randomised(small: Any, tmp_path: Path) -> None:
    path, plain = tmp_path / "x.onnx", tmp_path / "plain.onnx"
    ir.save(small, plain)
    for act in (levels, lambda source: randomise(source, path, 1, seed=0)):
        with pytest.raises(ContractError, match="not made by onnxplain"):
            act(plain)
        with pytest.raises(ModelError, match="no such file"):
            act(tmp_path / "none.onnx")
    for level in (0, 6):
        with pytest.raises(InputError, match=f"level {level}; expected 1 to 5"):
            randomise(GARMENTS, path, level, seed=0)
    with pytest.raises(InputError, match="seed -1; expected a whole number from 0 on"):
        randomise(GARMENTS, path, 1, seed=-1)
    with pytest.raises(InputError, match="no method 'saliency'"):
        randomise(GARMENTS, path, 1, seed=0, methods=["saliency"])
    copy = at_level(GARMENTS, tmp_path, 1, methods=["gradcam"])
    with pytest.raises(InputError, match="is the model itself"):
        randomise(copy, copy, 1, seed=0)
    model = onnx.load(copy)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            zeros = np.zeros(tuple(tensor.dims), np.float32)
            tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))
    onnx.save(model, copy)
    with pytest.raises(UnsupportedModelError, match="no weights to randomise"):
        levels(copy)
    assert not path.exists()
