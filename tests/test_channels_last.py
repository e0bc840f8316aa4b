"""Files that take pictures with channels last: explained as their twins with channels first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from channels_last import turned
from hand_written import CLASSES, GRID, PATCH, SIZE, HandWritten, to_file
from numpy.typing import NDArray
from onnx import TensorProto, helper
from PIL import Image
from small_vits import small_vit
from source_framework import COMPARED, compare, torchscript, with_dynamo
from torch import nn
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.contract import Contract
from onnxplain.export.plain import to_onnx
from onnxplain.graphs.findings import find
from onnxplain.graphs.randomised import levels, randomise
from onnxplain.outputs import METHODS

# Where onnxruntime optimises, it moves transposes, and sums run in another order.
ROUNDING = 1e-5
PLAIN = onnxruntime.SessionOptions()
PLAIN.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
PLAIN.log_severity_level = 3  # it warns of inputs with a default, which is meant

Arrays = dict[str, NDArray[Any]]


def computed(path: Path, images: NDArray[Any], **given: NDArray[Any]) -> Arrays:
    """Every output by name, without optimisations; inputs that the file has not are left out."""
    session = onnxruntime.InferenceSession(path, PLAIN, providers=["CPUExecutionProvider"])
    inputs = [*session.get_inputs(), *session.get_overridable_initializers()]
    image = inputs[0]
    feeds = {value.name: given[value.name] for value in inputs if value.name in given}
    if len(image.shape) == 4 and image.shape[3] == 3:
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    feeds[image.name] = images.astype(np.float16) if "float16" in image.type else images
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def noise(count: int, size: tuple[int, int] = SIZE) -> NDArray[np.float32]:
    return np.random.default_rng(count).normal(size=(count, 3, *size)).astype(np.float32)


def photo(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, 50, 70, 3), np.uint8)


def assert_equal(first: Path, last: Path, images: NDArray[Any], **given: NDArray[Any]) -> set[str]:
    """To the last bit. Returns the names of the outputs."""
    expected, found = (computed(path, images, **given) for path in (first, last))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    return set(found)


class ChannelsLast(nn.Module):
    """A model that takes pictures [batch, height, width, 3]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, images: torch.Tensor) -> Any:
        return self.model(images.permute(0, 3, 1, 2))


class Rearranged(HandWritten):
    """Patches cut out of pictures with channels last by reshaping, as one does in JAX."""

    def __init__(self) -> None:
        super().__init__(patches="linear on rearranged pixels")
        self.patches = lambda model, x: model.linear(
            x.unflatten(2, (GRID[1], PATCH))
            .unflatten(1, (GRID[0], PATCH))
            .transpose(2, 3)
            .reshape(x.shape[0], GRID[0] * GRID[1], -1)
        )


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()


FILES: dict[str, Callable[[Path], Path]] = {
    "older exporter": lambda path: to_file(HandWritten(), path),
    "current exporter": lambda path: to_file(HandWritten(), path, dynamo=True, opset=20),
    "float16": lambda path: to_file(HandWritten().half(), path),
    "batch of 3": lambda path: to_file(HandWritten(), path, batch=3),
    "convolutions": lambda path: to_file(network(), path),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Of a key of `FILES` the plain file with channels first and the one with channels last."""
    folder = tmp_path_factory.mktemp("plain")

    def made(name: str) -> tuple[Path, Path]:
        first, last = folder / f"{name}.onnx", folder / f"{name}, last.onnx"
        return (first if first.exists() else FILES[name](first)), (
            last if last.exists() else turned(first, last)
        )

    return made


@pytest.fixture(scope="module")
def explained(files: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A transformer explained with channels first and with channels last."""
    folder = tmp_path_factory.mktemp("explained")
    for path, name in zip(files("older exporter"), ("first", "last"), strict=True):
        ox.instrument(path, folder / f"{name}.onnx", outputs="both")
    return folder / "first.onnx", folder / "last.onnx"


# The graph


@pytest.mark.parametrize(
    ("export", "opset"), [(torchscript, 17), (with_dynamo, 20)], ids=["older", "current"]
)
def test_a_model_equals_torch(export: Any, opset: int, tmp_path: Path) -> None:
    module = small_vit(img_size=(24, 40)).eval()
    plain = tmp_path / "plain.onnx"
    export(ChannelsLast(module), plain, opset, (24, 40), channels_last=True)
    report = compare(module, plain)
    assert report.methods == COMPARED
    assert (report.contract.input.layout, report.contract.input.size) == ("NHWC", (24, 40))


@pytest.mark.parametrize("name", FILES)
def test_every_output_is_that_of_the_twin(name: str, files: Any, tmp_path: Path) -> None:
    paths = (tmp_path / "first.onnx", tmp_path / "last.onnx")
    first, last = (
        ox.instrument(plain, path, outputs="both").contract
        for plain, path in zip(files(name), paths, strict=True)
    )
    assert last.input.layout == "NHWC"
    assert set(last.methods) == ({"gradcam"} if name == "convolutions" else set(METHODS))
    for key in ("tokens", "readout", "layers", "methods", "precision", "classes", "logits"):
        assert getattr(last, key) == getattr(first, key)
    for batch in (1, 3):
        target = np.arange(batch) % CLASSES
        outputs = assert_equal(*paths, noise(batch), target=target)
        assert outputs >= {name for names in last.methods.values() for name in names}


def test_patches_without_a_convolution(tmp_path: Path) -> None:
    plain = {"first": HandWritten(patches="linear on rearranged pixels"), "last": Rearranged()}
    torchscript(plain["last"], tmp_path / "last.onnx", 17, SIZE, channels_last=True)
    torchscript(plain["first"], tmp_path / "first.onnx", 17, SIZE)
    for name in plain:
        ox.instrument(tmp_path / f"{name}.onnx", tmp_path / f"{name}.x.onnx", outputs="both")
    paths = (tmp_path / "first.x.onnx", tmp_path / "last.x.onnx")
    assert "input_relevance" in assert_equal(*paths, noise(3), target=np.array([1, 4, 2]))


def test_the_model_is_left_as_it_was(files: Any, explained: tuple[Path, Path]) -> None:
    (_, plain), (_, path) = files("older exporter"), explained
    before, after = onnx.load(plain), onnx.load(path)
    own, given = before.graph.input[0], after.graph.input[0]
    assert given.name == own.name
    assert [d.dim_value for d in given.type.tensor_type.shape.dim] == [0, *SIZE, 3]
    (theirs,) = (node for node in before.graph.node if "image" in node.input)
    readers = [node for node in after.graph.node if "image" in node.input]
    assert theirs in readers
    assert [node.op_type for node in readers] == ["Transpose"] * 2  # and one for what was added
    np.testing.assert_array_equal(
        computed(path, noise(3))["output"], computed(plain, noise(3))["output"]
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "heatmaps": {"outputs": "maps", "heatmaps": True},
    "three classes at once": {"targets": 3},
    "a sum of logits": {"seed": "weights"},
    "of the probability": {"score": "probability"},
    "float16 weights": {"precision": "fp16"},
    "a class must be given": {"require_target": True},
    "the picture as it is": {"embed_preprocessing": True},
    "the picture as it is, and the class": {"embed_preprocessing": True, "require_target": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, files: Any, tmp_path: Path) -> None:
    paths = (tmp_path / "first.onnx", tmp_path / "last.onnx")
    for plain, path in zip(files("older exporter"), paths, strict=True):
        ox.instrument(plain, path, **OPTIONS[name])
    embedded = "embed_preprocessing" in OPTIONS[name]
    images: NDArray[Any] = photo(1)[0] if embedded else noise(2)
    count = 1 if embedded else 2
    several = (3,) if "targets" in OPTIONS[name] else ()
    target = np.arange(count * 3)[: count * (3 if several else 1)].reshape(count, *several)
    weights = np.random.default_rng(0).normal(size=(count, CLASSES)).astype(np.float32)
    assert_equal(*paths, images, target=target % CLASSES, class_weights=weights)


def test_bundle(files: Any, tmp_path: Path) -> None:
    for plain, name in zip(files("older exporter"), ("first", "last"), strict=True):
        ox.instrument(plain, tmp_path / name)
    graphs = sorted(path.name for path in (tmp_path / "first").glob("*.onnx"))
    assert len(graphs) > 3
    for name in graphs:
        paths = (tmp_path / "first" / name, tmp_path / "last" / name)
        assert_equal(*paths, noise(2), target=np.array([3, 1]))
    found = ox.Explainer(tmp_path / "last", device="cpu", threads=1)
    assert found.contract.input.layout == "NHWC"
    assert set(found.methods) == set(METHODS)


def test_any_size(tmp_path: Path) -> None:
    plain = tmp_path / "first.onnx"
    module = small_vit(dynamic_img_size=True)
    ir.save(to_onnx(module, image_size=(32, 32), multiple=(8, 8)), plain)
    turned(plain, tmp_path / "last.onnx")
    paths = (tmp_path / "first.x.onnx", tmp_path / "last.x.onnx")
    with pytest.raises(
        ox.UnsupportedModelError, match="does not state the size of pictures; give the size"
    ):
        ox.instrument(tmp_path / "last.onnx", paths[1])
    given = {"input": {"size": [32, 32]}}
    for name, path in zip(("first", "last"), paths, strict=True):
        ox.instrument(tmp_path / f"{name}.onnx", path, contract=given, outputs="both")
    for size in ((32, 32), (24, 40)):
        assert_equal(*paths, noise(2, size), target=np.array([3, 1]))
    one, other = (ox.Explainer(path, device="cpu", image_size=(24, 40)) for path in paths)
    result = other.explain(photo(1)[0], method="rollout")
    assert result.grid.shape == (1, 3, 5)
    close(result.grid, one.explain(photo(1)[0], method="rollout").grid)
    free = onnx.load(tmp_path / "last.onnx")
    free.graph.input[0].type.tensor_type.shape.dim[3].dim_param = "channels"
    onnx.save(free, plain)
    said = {"input": {"size": [32, 32], "layout": "NHWC"}}
    ox.instrument(plain, tmp_path / "free.onnx", contract=said, outputs="both")
    assert_equal(paths[0], tmp_path / "free.onnx", noise(2, (24, 40)), target=np.array([3, 1]))
    half_free = onnx.load(tmp_path / "last.onnx")
    half_free.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 32
    onnx.save(half_free, plain)
    with pytest.raises(ox.UnsupportedModelError, match=r"has height 32 and width .* both free"):
        ox.instrument(plain, paths[0], contract=given)


# What tells the layout


def with_dims(files: Any, path: Path, dims: list[Any]) -> Path:
    """The transformer with channels last that says this of its input's shape."""
    model = onnx.load(files("older exporter")[1])
    shape = helper.make_tensor_value_info("image", TensorProto.FLOAT, dims)
    model.graph.input[0].CopyFrom(shape)
    onnx.save(model, path)
    return path


def test_a_shape_that_does_not_tell(files: Any, tmp_path: Path) -> None:
    path = tmp_path / "explained.onnx"
    first, _ = files("older exporter")
    plain = with_dims(files, tmp_path / "plain.onnx", ["n", *SIZE, "c"])
    ox.instrument(plain, path, contract={"input": {"layout": "NHWC"}}, outputs="both")
    shape = onnx.load(path).graph.input[0].type.tensor_type.shape.dim
    assert [dim.dim_value for dim in shape] == [0, *SIZE, 3]
    ox.instrument(first, tmp_path / "first.onnx", outputs="both")
    assert_equal(tmp_path / "first.onnx", path, noise(2), target=np.array([3, 1]))


def test_channels_first_where_the_shape_does_not_tell(files: Any, tmp_path: Path) -> None:
    model = onnx.load(files("older exporter")[0])
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "channels"
    onnx.save(model, tmp_path / "plain.onnx")
    given = {"input": {"layout": "NCHW"}}
    report = ox.instrument(tmp_path / "plain.onnx", tmp_path / "x.onnx", contract=given)
    assert report.contract.input.layout == "NCHW"


def narrow(channels_last: bool) -> nn.Module:
    """Of pictures 3 pixels wide, or high and wide, that anything might be."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv, self.head = nn.Conv2d(3, 4, 2), nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.permute(0, 3, 1, 2) if channels_last else x
            return self.head(self.conv(x).relu().mean((2, 3)))

    return Model().eval()


@pytest.mark.parametrize("size", [(3, 3), (7, 3)])
def test_channels_are_first_where_both_could_be(size: tuple[int, int], tmp_path: Path) -> None:
    plain = to_file(narrow(channels_last=False), tmp_path / "plain.onnx", size=size)
    contract = ox.instrument(plain, tmp_path / "x.onnx").contract
    assert (contract.input.layout, contract.input.size) == ("NCHW", size)


def test_channels_are_last_where_the_caller_says_so(tmp_path: Path) -> None:
    # [n, 3, 3, 3] as exported, and last all the same.
    plain = to_file(narrow(channels_last=True), tmp_path / "plain.onnx", size=(3, 3))
    given = {"input": {"layout": "NHWC"}}
    ox.instrument(plain, tmp_path / "last.onnx", contract=given, outputs="both")
    first = to_file(narrow(channels_last=False), tmp_path / "first.onnx", size=(3, 3))
    ox.instrument(first, tmp_path / "first.x.onnx", outputs="both")
    images = noise(2, (3, 3))
    expected = computed(tmp_path / "first.x.onnx", images.transpose(0, 3, 1, 2))  # turned back
    found = computed(tmp_path / "last.onnx", images)
    assert expected["map.gradcam"].any()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("dims", "layout", "words"),
    [
        (["n", *SIZE, 1], None, r"\[n,24,32,1\]; expected \[batch, 3, height, width\] or \[batch"),
        (["n", *SIZE, 3], "NCHW", r"layout 'NCHW'; input image has shape \[n,24,32,3\], expected"),
        (["n", 3, *SIZE], "NHWC", r"layout 'NHWC'; input image has shape \[n,3,24,32\], expected"),
        (["n", *SIZE, 3], "HWC", "input layout 'HWC'; expected NCHW or NHWC"),
        (["n", *SIZE, 3], 7, "input layout 7; expected NCHW or NHWC"),
    ],
)
def test_refusals(files: Any, tmp_path: Path, dims: list[Any], layout: Any, words: str) -> None:
    plain = with_dims(files, tmp_path / "plain.onnx", dims)
    given = {} if layout is None else {"input": {"layout": layout}}
    with pytest.raises((ox.InputError, ox.UnsupportedModelError), match=words):
        ox.instrument(plain, tmp_path / "x.onnx", contract=given)
    assert not (tmp_path / "x.onnx").exists()


def test_another_input(files: Any, tmp_path: Path) -> None:
    """What is refused has the shapes of the file."""
    model = onnx.load(files("older exporter")[1])
    model.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1]))
    onnx.save(model, tmp_path / "plain.onnx")
    with pytest.raises(
        ox.UnsupportedModelError, match=r"image \[n,24,32,3\], scale \[1\]; expected"
    ):
        ox.instrument(tmp_path / "plain.onnx", tmp_path / "x.onnx")


def test_names_that_are_taken(files: Any, tmp_path: Path) -> None:
    """Values of the model may bear the names of ours, and an output may be the input itself."""
    plain = onnx.load(files("older exporter")[1])
    for node in plain.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = "image/channels_last" if name == "turned" else name
        for i, name in enumerate(node.output):
            node.output[i] = "image/channels_last" if name == "turned" else name
    plain.graph.node.append(helper.make_node("Neg", ["image"], ["image/channels_first"]))
    output = helper.make_tensor_value_info
    plain.graph.output.append(output("image/channels_first", TensorProto.FLOAT, ["n", *SIZE, 3]))
    onnx.save(plain, tmp_path / "plain.onnx")
    path = tmp_path / "explained.onnx"
    ox.instrument(tmp_path / "plain.onnx", path, methods=["attnlrp"], outputs="both")
    images = noise(2)
    found, own = computed(path, images), computed(tmp_path / "plain.onnx", images)
    np.testing.assert_array_equal(found["image/channels_first"], -images.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(found["output"], own["output"])
    assert found["map.attnlrp"].any()


# The runtime and what is made of it


def close(found: NDArray[Any], expected: NDArray[Any]) -> None:
    assert np.abs(found - expected).max() <= ROUNDING * np.abs(expected).max()


def test_the_explainer_takes_what_it_always_takes(explained: tuple[Path, Path]) -> None:
    one, other = (ox.Explainer(path, device="cpu", threads=1) for path in explained)
    pixels = noise(3)
    for images in (photo(1)[0], list(photo(3)), pixels):
        for method in COMPARED:
            found = other.explain(images, method=method)
            expected = one.explain(images, method=method)
            assert expected.grid.any() or method == "attention_gradcam"
            close(found.logits, expected.logits)
            close(found.grid, expected.grid)
            assert found.heatmap.shape == expected.heatmap.shape
    taps = other.taps(pixels)
    assert taps.input_relevance is not None
    assert taps.input_relevance.shape == pixels.shape
    close(taps.logits, one.taps(pixels).logits)
    (streamed,) = other.explain_many(photo(1), method="rollout")
    np.testing.assert_array_equal(streamed.grid, other.explain(photo(1)[0], method="rollout").grid)
    with pytest.raises(ox.InputError, match=r"\[3, 24, 32, 3\], expected \[B, 3, 24, 32\] .*last"):
        other.explain(pixels.transpose(0, 2, 3, 1))


def test_one_image_at_a_time(files: Any, tmp_path: Path) -> None:
    """A batch that cannot be freed is filled up, in float16 too."""
    model = onnx.load(files("float16")[1])
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    # What mixes the images: their mean is taken off.
    mean = helper.make_node("ReduceMean", ["image"], ["mean"], axes=[0])
    model.graph.node[0].input[0] = "apart"
    model.graph.node.insert(0, helper.make_node("Sub", ["image", "mean"], ["apart"]))
    model.graph.node.insert(0, mean)
    onnx.save(model, tmp_path / "plain.onnx")
    path = tmp_path / "x.onnx"
    contract = ox.instrument(tmp_path / "plain.onnx", path, methods=["rollout"]).contract
    assert (contract.input.batch, contract.input.layout) == (2, "NHWC")
    pictures = photo(3)
    found = ox.Explainer(path, device="cpu", threads=1).taps(pictures)
    assert found.logits.shape == (3, CLASSES)


def test_verify_against_the_twin(explained: tuple[Path, Path], tmp_path: Path) -> None:
    first, last = explained
    report = ox.verify(last, against=first, images=[photo(1)[0]])
    assert report.within
    assert report.notes == ()
    assert {one.output for one in report.differences} >= {"logits", "attention.0", "map.gradcam"}


def test_inspect(files: Any, explained: tuple[Path, Path]) -> None:
    first, last = (find(path) for path in files("older exporter"))
    assert last.inputs == ("image FLOAT [n,24,32,3]",)
    assert (last.cost, last.layers, last.features) == (first.cost, first.layers, first.features)
    assert last.contract is not None and last.contract.input.layout == "NHWC"
    told = CliRunner().invoke(app, ["inspect", str(explained[1])]).stdout
    assert "image: NHWC, 24 x 32 (height x width)" in told
    told = CliRunner().invoke(app, ["inspect", str(explained[1]), "--json"]).stdout
    assert json.loads(told)["input"]["layout"] == "NHWC"


def test_compare_and_explain(explained: tuple[Path, Path], tmp_path: Path) -> None:
    picture = tmp_path / "photo.png"
    Image.fromarray(photo(1)[0]).save(picture)
    panel = tmp_path / "panel.png"
    for words in (
        ["compare", explained[1], picture, "-o", panel],
        ["explain", explained[1], picture, "-o", tmp_path / "out.png"],
    ):
        ran = CliRunner().invoke(app, list(map(str, words)))
        assert ran.exit_code == 0, ran.output
    assert panel.is_file()


@pytest.mark.parametrize("embedded", [False, True])
def test_random_weights(embedded: bool, files: Any, tmp_path: Path) -> None:
    paths = (tmp_path / "first.onnx", tmp_path / "last.onnx")
    for plain, path in zip(files("older exporter"), paths, strict=True):
        ox.instrument(plain, path, embed_preprocessing=embedded, methods=["gradcam", "attnlrp"])
    assert (
        levels(paths[1]) == levels(paths[0]) == ["behind attention 1", "behind attention 0", "all"]
    )
    for level in (1, 3):
        changed = tmp_path / f"first.{level}.onnx", tmp_path / f"last.{level}.onnx"
        for path, to in zip(paths, changed, strict=True):
            randomise(path, to, level, seed=3)
        assert_equal(*changed, photo(1)[0] if embedded else noise(2))


def test_evaluation_is_that_of_the_twin(tmp_path: Path) -> None:
    """Pictures are perturbed, and weights made random, as of the twin."""
    plain = {"first": tmp_path / "first.onnx", "last": tmp_path / "last.onnx"}
    turned(to_file(HandWritten(), plain["first"]), plain["last"])
    (tmp_path / "data.csv").write_text("path,label\na.png,1\nb.png,3\n")
    for name, picture in zip("ab", photo(2), strict=True):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    reports = []
    for path in plain.values():
        own = path.with_suffix(".x.onnx")
        ox.instrument(path, own, methods=["rollout", "gradcam"])
        reports.append(
            ox.evaluate(
                own,
                tmp_path / "data.csv",
                measures=["perturbation", "insertion_deletion", "sanity"],
                fills=["zero", "road"],
                steps=4,
                sanity_pictures=2,
                device="cpu",
                threads=1,
            ).results
        )
    expected, found = (
        np.array([one["value"] for one in report["values"]], np.float64) for report in reports
    )
    assert len(expected) > 20
    np.testing.assert_allclose(found, expected, rtol=ROUNDING, atol=ROUNDING)


def test_a_contract_says_so(explained: tuple[Path, Path]) -> None:
    (entry,) = (p for p in onnx.load(explained[1]).metadata_props if p.key == "onnxplain")
    assert Contract.from_json(entry.value).input.layout == "NHWC"
