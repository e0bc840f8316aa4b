"""What is explained: one of several heads, a probability, an embedding or a direction of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hand_written import CLASSES, DIM, SIZE, HandWritten, to_file
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import Tensor
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.errors import InputError, UnsupportedModelError
from onnxplain.outputs import GRAPH_KINDS, METHODS

TOLERANCE = 1e-5  # of the largest value, single precision
RELEVANCE = {"transformer_attribution", "partial_lrp", "attnlrp", "lrp"}
IMAGES = np.random.default_rng(2).normal(size=(3, 3, *SIZE)).astype(np.float32)
TARGET = [4, 0, 2]

Ends = Callable[[Tensor], Tensor]
Change = Callable[[onnx.ModelProto], None]


class Embedding(HandWritten):
    """The normalised class token, without a head: [batch, dim], or [batch, 1, dim]."""

    def __init__(self, one_token: bool) -> None:
        super().__init__()
        self.read = lambda m, x: x[:, :1] if one_token else x[:, 0]


@pytest.fixture(scope="module")
def module() -> HandWritten:
    return HandWritten()


@pytest.fixture(scope="module")
def plain(module: HandWritten, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_file(module, tmp_path_factory.mktemp("plain") / "plain.onnx")


def run(path: Path, *, plainly: bool = False, **feeds: Any) -> dict[str, NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    if plainly:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {"image": IMAGES, **feeds}), strict=True))


def close(found: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    assert np.abs(expected).max() > 0, what
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max(), what


def altered(plain: Path, path: Path, *nodes: onnx.NodeProto, output: str = "output") -> Path:
    """The file with nodes behind what was the output, now called `scores`."""
    model = onnx.load(plain)
    for node in model.graph.node:
        node.output[:] = ["scores" if name == "output" else name for name in node.output]
    model.graph.node.extend(nodes)
    names = {name for node in nodes for name in node.output}
    kept = ["scores"] if "scores" in output.split() else []
    del model.graph.output[:]
    for name in [*kept, *sorted(names & set(output.split()))]:
        model.graph.output.append(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", CLASSES])
        )
    onnx.save(model, path)
    return path


def torch_gradients(module: HandWritten, score: Ends) -> list[NDArray[np.float32]]:
    """The gradient of the sum of the scores of all images at the attention of each layer."""
    for block in module.blocks:
        block.used.clear()
    total = score(module(torch.from_numpy(IMAGES))).sum()
    used = [block.used[0] for block in module.blocks]
    return [gradient.numpy() for gradient in torch.autograd.grad(total, used)]


def assert_gradients(found: dict[str, NDArray[Any]], expected: list[NDArray[np.float32]]) -> None:
    for i, gradient in enumerate(expected):
        close(found[f"attention_gradient.{i}"], gradient, f"layer {i}")


def chosen(logits: Tensor) -> Tensor:
    return logits.gather(1, torch.tensor(TARGET)[:, None])


# One of several heads


def two_heads(plain: Path, path: Path) -> Path:
    node = helper.make_node("Neg", ["scores"], ["age"])
    return altered(plain, path, node, output="scores age")


def test_one_of_several_heads(plain: Path, module: HandWritten, tmp_path: Path) -> None:
    path = two_heads(plain, tmp_path / "two.onnx")
    with pytest.raises(UnsupportedModelError, match=r"outputs: scores .*, age .*--logits age"):
        ox.instrument(path, tmp_path / "explained.onnx")
    made = tmp_path / "made.onnx"
    arguments = ["instrument", str(path), "-o", str(made), "--logits", "age"]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert ox.Explainer(made, device="cpu").contract.logits == "age"
    found = run(made, plainly=True, target=np.array(TARGET))
    for name, array in run(path, plainly=True).items():
        np.testing.assert_array_equal(found[name], array)
    assert_gradients(found, torch_gradients(module, lambda logits: -chosen(logits)))


def test_a_head_that_is_not_there(plain: Path, tmp_path: Path) -> None:
    path = two_heads(plain, tmp_path / "two.onnx")
    arguments = ["instrument", str(path), "-o", str(tmp_path / "made.onnx"), "--logits", "sex"]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 2
    assert "--logits age" in " ".join(outcome.stderr.split())


# A probability

SOFTMAX = helper.make_node("Softmax", ["scores"], ["output"])
PROBABILITIES: dict[str, tuple[tuple[onnx.NodeProto, ...], str, Ends]] = {
    "plain logits": ((), "softmax", lambda logits: logits.softmax(1)),
    "softmax": ((SOFTMAX,), "softmax", lambda logits: logits.softmax(1)),
    "log softmax": (
        (helper.make_node("LogSoftmax", ["scores"], ["output"]),),
        "softmax",
        lambda logits: logits.softmax(1),
    ),
    "sigmoid": ((helper.make_node("Sigmoid", ["scores"], ["output"]),), "sigmoid", torch.sigmoid),
}


@pytest.mark.parametrize("end", PROBABILITIES)
def test_the_gradient_of_a_probability(
    end: str, plain: Path, module: HandWritten, tmp_path: Path
) -> None:
    nodes, score, probabilities = PROBABILITIES[end]
    path = altered(plain, tmp_path / "plain.onnx", *nodes) if nodes else plain
    made = tmp_path / "made.onnx"
    report = ox.instrument(path, made, score="probability", seed="weights")
    assert report.contract.score == score
    assert set(report.methods) == set(METHODS) - RELEVANCE
    found = run(made, plainly=True, target=np.array(TARGET))
    for name, array in run(path, plainly=True).items():
        np.testing.assert_array_equal(found[name], array)
    assert_gradients(found, torch_gradients(module, lambda x: chosen(probabilities(x))))
    weights = np.random.default_rng(3).normal(size=(3, CLASSES)).astype(np.float32)
    found = run(made, class_weights=weights)
    expected = torch_gradients(module, lambda x: torch.from_numpy(weights) * probabilities(x))
    assert_gradients(found, expected)


def test_the_probability_of_an_output_beside_the_logits(plain: Path, tmp_path: Path) -> None:
    node = helper.make_node("Sigmoid", ["scores"], ["output"])
    path = altered(plain, tmp_path / "plain.onnx", node, output="scores output")
    for name in ("scores", "output"):
        report = ox.instrument(
            path,
            tmp_path / f"{name}.onnx",
            contract={"logits": name},
            score="probability",
            methods=["generic_attention"],
        )
        assert (report.contract.logits, report.contract.score) == ("scores", "sigmoid")


def test_probabilities_of_several_classes_at_once(plain: Path, tmp_path: Path) -> None:
    made = [tmp_path / "several.onnx", tmp_path / "one.onnx"]
    method = "generic_attention"
    for path, targets in zip(made, (2, 1), strict=True):
        ox.instrument(plain, path, score="probability", targets=targets, methods=[method])
    several = run(made[0], target=np.array([[4, 1]]))[f"map.{method}"]
    for i, target in enumerate((4, 1)):
        one = run(made[1], target=np.array([target]))[f"map.{method}"]
        close(several[:, i], one, f"class {target}")


def test_relevance_is_of_logits(plain: Path, tmp_path: Path) -> None:
    for method in sorted(RELEVANCE):
        with pytest.raises(UnsupportedModelError, match="shared out from a logit"):
            ox.instrument(plain, tmp_path / "a.onnx", score="probability", methods=[method])
    with pytest.raises(InputError, match="score 'odds'; expected one of logit, probability"):
        ox.instrument(plain, tmp_path / "a.onnx", score="odds")
    made = tmp_path / "made.onnx"
    arguments = ["instrument", str(plain), "-o", str(made), "--score", "probability"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert ox.Explainer(made, device="cpu").contract.score == "softmax"


# An embedding


@pytest.mark.parametrize("one_token", [False, True], ids=["[batch, dim]", "[batch, 1, dim]"])
def test_an_embedding(one_token: bool, tmp_path: Path) -> None:
    module = Embedding(one_token)
    path = to_file(module, tmp_path / "plain.onnx")
    made = tmp_path / "made.onnx"
    contract = ox.instrument(path, made, seed="weights").contract
    assert contract.classes == DIM
    assert set(contract.methods) == set(METHODS)
    found = run(made, plainly=True, target=np.array(TARGET))
    np.testing.assert_array_equal(found["output"], run(path, plainly=True)["output"])
    np.testing.assert_array_equal(found[contract.logits], found["output"].reshape(3, DIM))
    assert_gradients(found, torch_gradients(module, lambda x: chosen(x.flatten(1))))
    direction = np.random.default_rng(4).normal(size=DIM).astype(np.float32)
    along = torch.from_numpy(direction)
    expected = torch_gradients(module, lambda x: x.flatten(1) @ along)
    assert_gradients(run(made, class_weights=direction[None]), expected)
    explainer = ox.Explainer(made, device="cpu", threads=1)
    by_index = explainer.explain(IMAGES, method="generic_attention", target=DIM - 1)
    assert by_index.grid.shape == (3, 3, 4)
    for method in GRAPH_KINDS["gradient"]:
        assert np.isfinite(explainer.explain(IMAGES, method=method).grid).all()
    towards = explainer.explain(IMAGES, method="attention_gradcam", class_weights=direction)
    away = explainer.explain(IMAGES, method="attention_gradcam", class_weights=-direction)
    assert not np.allclose(towards.grid, away.grid)


# More inputs


def scaled(plain: Path, path: Path, *, default: bool) -> Path:
    """A file that multiplies the picture by one more input, whose default is 2."""
    model = onnx.load(plain)
    for node in model.graph.node:
        node.input[:] = ["scaled" if name == "image" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Mul", ["image", "scale"], ["scaled"]))
    model.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, [1]))
    if default:
        tensor = onnx.numpy_helper.from_array(np.array([2], np.float32), "scale")
        model.graph.initializer.append(tensor)
    onnx.save(model, path)
    return path


def test_an_input_with_a_default_stays_one(
    plain: Path, module: HandWritten, tmp_path: Path
) -> None:
    path, made = scaled(plain, tmp_path / "plain.onnx", default=True), tmp_path / "made.onnx"
    ox.instrument(path, made)
    for feeds, scale in (({}, 2), ({"scale": np.array([3], np.float32)}, 3)):
        found = run(made, plainly=True, target=np.array(TARGET), **feeds)
        np.testing.assert_array_equal(
            found["output"], run(path, plainly=True, **feeds)["output"], str(scale)
        )
        for block in module.blocks:
            block.used.clear()
        total = chosen(module(scale * torch.from_numpy(IMAGES))).sum()
        used = [block.used[0] for block in module.blocks]
        assert_gradients(found, [g.numpy() for g in torch.autograd.grad(total, used)])
    explainer = ox.Explainer(made, device="cpu", threads=1)
    logits = explainer.explain(IMAGES, method="rollout").logits
    close(logits, run(path)["output"], "the default")


def test_an_input_without_a_default_is_refused(plain: Path, tmp_path: Path) -> None:
    path = scaled(plain, tmp_path / "plain.onnx", default=False)
    with pytest.raises(UnsupportedModelError, match=r"scale \[1\]; .* others only with a default"):
        ox.instrument(path, tmp_path / "made.onnx")
