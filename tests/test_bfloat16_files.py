"""Files in bfloat16, which onnxruntime's CPU cannot compute: explained in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from channels_last import turned
from hand_written import SIZE, HandWritten, to_file
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from small_vits import small_vit
from source_framework import compare, run
from torch import Tensor, nn
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.errors import ModelError, UnsupportedModelError
from onnxplain.export.plain import inference_form
from onnxplain.export.verify import relative_difference
from onnxplain.graphs.normal.bfloat16 import widened
from onnxplain.graphs.randomised import levels, randomise
from onnxplain.outputs import METHODS

# torch rounds every value of the forward pass to 8 bits, 2**-9 of it, some thirty times one after
# another; the roundings are independent, so they add up to the root of thirty times that.
EIGHT_BITS = 2.0**-6
# The same operators on the same numbers, in the order that onnxruntime chooses.
FLOAT32 = 1e-5
EXPORTERS: dict[str, dict[str, Any]] = {
    "TorchScript, 14": {"opset": 14},
    "TorchScript, 17": {"opset": 17},
    "current, 20": {"dynamo": True, "opset": 20},
    "current, 23": {"dynamo": True, "opset": 23},  # with the Attention operator
}
VIT = (32, 32)
MATRICES = 12  # four in each of two blocks, class token, positions, patches, head
Arrays = dict[str, NDArray[Any]]


class Autocast(nn.Module):
    """float32 weights, pixels and logits; products in bfloat16, as mixed precision trains."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = self.inner(x)
        return logits.float()


def vit() -> Any:
    """Heads of 16, so that the root of the scale of the scores is 1/2: the current exporter rounds
    constants to bfloat16 too, which torch does not."""
    return small_vit(embed_dim=64).eval()


def wide_vit() -> Any:
    """The same, wide enough for its weights to be most of a file."""
    return small_vit(embed_dim=256, num_heads=16).eval()


def pixels(batch: int = 3, size: tuple[int, int] = VIT) -> NDArray[np.float32]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, *size, generator=generator).numpy()


def rounded(module: Any, *kinds: type[nn.Module]) -> Any:
    """In float32, the weights of these kinds of layers (of all, if none is named) rounded."""
    for layer in module.modules():
        if not kinds or isinstance(layer, kinds):
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16().float()
    return module.eval()


def narrow_matrices(path: Path) -> int:
    tensors = onnx.load(path).graph.initializer
    return sum(t.data_type == TensorProto.BFLOAT16 and len(t.dims) > 1 for t in tensors)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module = wide_vit().bfloat16()
    path = tmp_path_factory.mktemp("plain") / "plain.onnx"
    return to_file(module, path, size=VIT, **EXPORTERS["current, 20"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in float32."""
    path = tmp_path_factory.mktemp("whole") / "plain.onnx"
    return to_file(rounded(wide_vit()), path, size=VIT, **EXPORTERS["current, 20"])


@pytest.fixture(scope="module")
def explained(plain: Path) -> Path:
    path = plain.with_name("explained.onnx")
    report = ox.instrument(plain, path)
    assert report.contract.precision == "bfloat16"
    assert set(report.methods) == set(METHODS)
    return path


# Against torch


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_all_in_bfloat16(exporter: str, tmp_path: Path) -> None:
    module = vit().bfloat16()
    path = to_file(module, tmp_path / "plain.onnx", size=VIT, **EXPORTERS[exporter])
    with inference_form(rounded(vit())) as frozen:
        report = compare(frozen, path, runs=False)
    assert report.contract.precision == "bfloat16"
    with torch.inference_mode():
        expected = module(torch.from_numpy(pixels()).bfloat16()).float().numpy()
    found = run(tmp_path / "explained.onnx", {"image": pixels()})["output"]
    assert relative_difference(found, expected) <= EIGHT_BITS


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_products_in_bfloat16(exporter: str, tmp_path: Path) -> None:
    module = Autocast(vit())
    path = to_file(module, tmp_path / "plain.onnx", size=VIT, **EXPORTERS[exporter])
    with inference_form(rounded(vit(), nn.Linear, nn.Conv2d)) as frozen:
        report = compare(frozen, path, runs=False)
    assert report.contract.precision == "bfloat16"
    with torch.inference_mode():
        expected = module(torch.from_numpy(pixels())).numpy()
    found = run(tmp_path / "explained.onnx", {"image": pixels()})["output"]
    assert relative_difference(found, expected) <= EIGHT_BITS


def test_all_outputs_are_those_of_the_float32_file(
    explained: Path, whole: Path, tmp_path: Path
) -> None:
    ox.instrument(whole, tmp_path / "explained.onnx")
    found, expected = all_of(explained), all_of(tmp_path / "explained.onnx")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def all_of(path: Path) -> Arrays:
    return run(path, {"image": pixels(), "target": np.array([1, 4, 2])})


def same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert relative_difference(found[name], array) <= FLOAT32, name


# What a file is


def test_weights_stay_half_as_large(
    plain: Path, explained: Path, whole: Path, tmp_path: Path
) -> None:
    assert narrow_matrices(explained) == MATRICES
    ox.instrument(whole, tmp_path / "whole.onnx")
    assert 0.5 < explained.stat().st_size / (tmp_path / "whole.onnx").stat().st_size < 0.6
    half = ox.instrument(plain, tmp_path / "half").files
    both = ox.instrument(whole, tmp_path / "both").files
    assert 0.5 < half["weights.bin"] / both["weights.bin"] < 0.51
    bundle, single = (ox.Explainer(p, device="cpu") for p in (tmp_path / "half", explained))
    assert bundle.contract.precision == "bfloat16"
    picture = np.random.default_rng(3).integers(0, 256, (50, 70, 3), dtype=np.uint8)
    for method in METHODS:
        one, other = (e.explain(picture, method=method) for e in (single, bundle))
        assert relative_difference(other.grid, one.grid) <= FLOAT32, method


def test_inputs_and_outputs_are_float32(explained: Path) -> None:
    graph = onnx.load(explained).graph
    (image, _), outputs = graph.input, graph.output
    assert image.name == "image"
    kinds = {value.type.tensor_type.elem_type for value in (image, *outputs)}
    assert kinds == {TensorProto.FLOAT}


def test_it_is_explained_once_more(plain: Path, explained: Path, tmp_path: Path) -> None:
    """From the plain graph of a bundle, which has the weights and their Casts."""
    ox.instrument(plain, tmp_path / "bundle")
    report = ox.instrument(tmp_path / "bundle" / "plain.onnx", tmp_path / "again.onnx")
    assert report.contract.precision == "bfloat16"
    assert narrow_matrices(tmp_path / "again.onnx") == MATRICES
    count = [node.op_type for node in onnx.load(explained).graph.node].count("Cast")
    again = [node.op_type for node in onnx.load(tmp_path / "again.onnx").graph.node].count("Cast")
    assert again == count
    same(all_of(tmp_path / "again.onnx"), all_of(explained))


def outside(model: onnx.ModelProto) -> None:
    onnx.external_data_helper.convert_model_to_external_data(model, location="weights.data")


def packed(model: onnx.ModelProto) -> None:
    """Weights as 32-bit integers, as exporters write that know no raw data."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.BFLOAT16:
            tensor.int32_data.extend(np.frombuffer(tensor.raw_data, np.uint16).tolist())
            tensor.ClearField("raw_data")


def in_nodes(model: onnx.ModelProto) -> None:
    for i, tensor in enumerate(list(model.graph.initializer)):
        node = helper.make_node("Constant", [], [tensor.name], f"constant.{i}", value=tensor)
        model.graph.node.insert(i, node)
    del model.graph.initializer[:]


@pytest.mark.parametrize("change", [outside, packed, in_nodes])
def test_wherever_weights_are(change: Any, plain: Path, explained: Path, tmp_path: Path) -> None:
    model = onnx.load(plain)
    change(model)
    onnx.save(model, tmp_path / "changed.onnx")
    report = ox.instrument(tmp_path / "changed.onnx", tmp_path / "explained.onnx")
    assert report.contract.precision == "bfloat16"
    same(all_of(tmp_path / "explained.onnx"), all_of(explained))


def test_an_optional_input(plain: Path, explained: Path, tmp_path: Path) -> None:
    model = onnx.load(plain)
    (bias,) = (t for t in model.graph.initializer if t.name == "head.bias")
    value = helper.make_tensor_value_info(bias.name, bias.data_type, bias.dims)
    model.graph.input.append(value)
    onnx.save(model, tmp_path / "changed.onnx")
    ox.instrument(tmp_path / "changed.onnx", tmp_path / "explained.onnx", outputs="taps")
    feeds: Arrays = {"image": pixels()}
    before = run(explained, feeds)["output"]
    default = run(tmp_path / "explained.onnx", feeds)["output"]
    assert relative_difference(default, before) <= FLOAT32
    own = numpy_helper.to_array(bias).astype(np.float32)
    given = run(tmp_path / "explained.onnx", {**feeds, bias.name: own + 1})["output"]
    assert relative_difference(given, before + 1) <= FLOAT32


def test_weights_that_are_rounded_in_the_graph(tmp_path: Path) -> None:
    """The current exporter leaves the Casts of large weights; they are rounded here."""
    path = to_file(
        Autocast(wide_vit()), tmp_path / "plain.onnx", size=VIT, **EXPORTERS["current, 20"]
    )
    assert narrow_matrices(path) < MATRICES - 2
    ox.instrument(path, tmp_path / "explained.onnx", outputs="taps")
    assert narrow_matrices(tmp_path / "explained.onnx") == MATRICES - 2  # token and positions
    with torch.inference_mode():
        expected = rounded(wide_vit(), nn.Linear, nn.Conv2d)(torch.from_numpy(pixels())).numpy()
    found = run(tmp_path / "explained.onnx", {"image": pixels()})["output"]
    assert relative_difference(found, expected) <= FLOAT32


def test_a_batch_that_the_exporter_fixed(explained: Path, tmp_path: Path) -> None:
    """It folded the class token for all images into one bfloat16 tensor."""
    options = EXPORTERS["current, 20"]
    path = to_file(wide_vit().bfloat16(), tmp_path / "plain.onnx", size=VIT, batch=20, **options)
    report = ox.instrument(path, tmp_path / "explained.onnx")
    assert report.contract.input.batch is None
    same(all_of(tmp_path / "explained.onnx"), all_of(explained))


def test_channels_last(plain: Path, explained: Path, tmp_path: Path) -> None:
    ox.instrument(turned(plain, tmp_path / "turned.onnx"), tmp_path / "explained.onnx")
    feeds = {"image": pixels().transpose(0, 2, 3, 1), "target": np.array([1, 4, 2])}
    expected = all_of(explained)
    same(run(tmp_path / "explained.onnx", feeds), expected)


def test_an_island(tmp_path: Path) -> None:
    """A float32 file that rounds one value to bfloat16 and back."""
    plain = to_file(HandWritten(), tmp_path / "plain.onnx")
    model = onnx.load(plain)
    (last,) = (node for node in model.graph.node if "output" in node.output)
    last.output[:] = ["inner"]
    model.graph.node.append(helper.make_node("Cast", ["inner"], ["half"], to=TensorProto.BFLOAT16))
    model.graph.node.append(helper.make_node("Cast", ["half"], ["output"], to=TensorProto.FLOAT))
    onnx.save(model, tmp_path / "island.onnx")
    reports = [
        ox.instrument(path, path.with_suffix(".explained.onnx"))
        for path in (plain, tmp_path / "island.onnx")
    ]
    assert [r.contract.precision for r in reports] == ["fp32", "bfloat16"]
    feeds = {"image": pixels(size=SIZE), "target": np.array([1, 4, 2])}
    expected, found = (run(r.path, feeds) for r in reports)
    same(found, expected)


def test_weights_as_float16(plain: Path, explained: Path, tmp_path: Path) -> None:
    """Those in bfloat16 are as small; those in float32 become float16."""
    report = ox.instrument(plain, tmp_path / "all.onnx", precision="fp16")
    assert report.contract.precision == "bfloat16"
    assert (tmp_path / "all.onnx").read_bytes() == explained.read_bytes()
    mixed = to_file(Autocast(wide_vit()), tmp_path / "mixed.onnx", size=VIT, opset=17)
    report = ox.instrument(mixed, tmp_path / "explained.onnx", precision="fp16", outputs="taps")
    assert (report.contract.precision, report.kept_float32) == ("bfloat16", ())
    kinds = [t.data_type for t in onnx.load(tmp_path / "explained.onnx").graph.initializer]
    assert kinds.count(TensorProto.BFLOAT16) == MATRICES - 2
    assert kinds.count(TensorProto.FLOAT16) == 2


def test_weights_are_randomised(explained: Path, tmp_path: Path) -> None:
    names = levels(explained)
    assert names[-1] == "all"
    randomise(explained, tmp_path / "random.onnx", level=len(names), seed=0, methods=["rollout"])
    feeds: Arrays = {"image": pixels()}
    found, before = (run(p, feeds)["output"] for p in (tmp_path / "random.onnx", explained))
    assert relative_difference(found, before) > 0.1
    assert narrow_matrices(tmp_path / "random.onnx") == MATRICES


def test_inspect_says_what_is_computed(plain: Path, explained: Path) -> None:
    for path in (plain, explained):
        told = CliRunner().invoke(app, ["inspect", str(path)])
        assert told.exit_code == 0
        assert "bfloat16 of the model is computed in float32" in " ".join(told.stdout.split())
    told = CliRunner().invoke(app, ["inspect", str(plain), "--json"])
    assert json.loads(told.stdout)["contract"]["precision"] == "bfloat16"
    assert "image BFLOAT16" in told.stdout


def test_an_explained_file_that_cannot_be_loaded_is_not_looked_into(
    explained: Path, tmp_path: Path
) -> None:
    model = onnx.load(explained)
    model.graph.node.append(helper.make_node("Cast", ["output"], ["half"], to=TensorProto.BFLOAT16))
    model.graph.node.append(helper.make_node("Exp", ["half"], ["more"]))
    model.graph.output.append(helper.make_empty_tensor_value_info("more"))
    onnx.save(model, tmp_path / "broken.onnx")
    told = CliRunner().invoke(app, ["inspect", str(tmp_path / "broken.onnx")])
    assert told.exit_code == 2
    assert "onnxruntime cannot load it" in told.stderr


def test_the_model_is_left_as_it_is(plain: Path) -> None:
    model = ir.load(plain)
    before = ir.to_proto(model)
    widened(model)
    assert ir.to_proto(model) == before


# What is refused


def test_what_the_exporter_got_wrong(tmp_path: Path) -> None:
    """torch's older exporter casts a scalar made of sizes to complex numbers."""
    path = to_file(HandWritten().bfloat16(), tmp_path / "plain.onnx")
    with pytest.raises(ModelError, match=r"Cast_1 \(Cast\) is not valid ONNX: .*complex128"):
        ox.instrument(path, tmp_path / "explained.onnx")


def test_a_branch(plain: Path, tmp_path: Path) -> None:
    model = onnx.load(plain)
    (last,) = (n for n in model.graph.node if "output" in n.output)
    last.output[:] = ["inner"]
    kind = TensorProto.BFLOAT16
    branch = helper.make_graph(
        [helper.make_node("Add", ["inner", "one"], ["taken"])],
        "branch",
        [],
        [helper.make_tensor_value_info("taken", kind, ["n", 10])],
        [helper.make_tensor("one", kind, [], [1])],
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    chosen = helper.make_node("If", ["yes"], ["output"], then_branch=branch, else_branch=branch)
    model.graph.node.append(chosen)
    onnx.save(model, tmp_path / "branch.onnx")
    with pytest.raises(UnsupportedModelError, match=r"\(If\) holds a subgraph"):
        ox.instrument(tmp_path / "branch.onnx", tmp_path / "explained.onnx")
