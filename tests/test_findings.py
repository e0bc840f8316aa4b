"""`onnxplain inspect` on files that are not instrumented."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from hand_written import HandWritten, to_file
from onnx import helper
from torch import nn
from typer.testing import CliRunner

from onnxplain import console
from onnxplain.cli import app
from onnxplain.graphs.findings import find
from onnxplain.outputs import METHODS


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (folder := tmp_path_factory.mktemp("findings") / "transformer").mkdir()
    return to_file(HandWritten(), folder / "model.onnx")


@pytest.fixture(scope="module")
def convolutional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 5),
    )
    return to_file(network.eval(), tmp_path_factory.mktemp("convolutional") / "model.onnx")


def run(*arguments: object, status: int = 0) -> str:
    ran = CliRunner().invoke(app, list(map(str, arguments)))
    assert ran.exit_code == status, ran.output
    return ran.output


def told(path: Path) -> dict[str, str]:
    """The table, by its first column; what goes on in the next line is joined.

    The title is the file's path and may take two lines.
    """
    rows: dict[str, str] = {}
    for line in run("inspect", path).splitlines():
        if not line.startswith("│"):
            continue
        name, value = (part.strip() for part in line.strip("│").split("│"))
        name = name or list(rows)[-1]
        rows[name] = f"{rows.get(name, '')} {value}".strip()
    return rows


def test_a_transformer(transformer: Path) -> None:
    rows = told(transformer)
    assert rows["model"] == "transformer, not instrumented"
    assert rows["graph"].startswith("opset 17, ")
    assert rows["input"] == "image FLOAT [n,3,24,32]"
    assert rows["output"] == "output FLOAT [n,5]"
    assert rows["pictures"] == "NCHW, 24 x 32 (height x width), any batch"
    assert rows["tokens"] == "13: cls; then 3 x 4 patches, row by row"
    assert rows["readout"] == "cls: token 0"
    assert rows["attention"] == "2 layers of 2 heads, global"
    assert rows["Grad-CAM reads"].endswith(" [batch, 13, 16]")
    assert rows["assumed"].startswith("mean 0.485 0.456 0.406, std 0.229 0.224 0.225, crop_pct 1")
    assert rows["method rollout"] == "1.00 forward passes"
    assert {name for name in rows if name.startswith("method ")} == {f"method {m}" for m in METHODS}


def test_what_each_method_costs_beside_the_others(transformer: Path) -> None:
    found = json.loads(run("inspect", transformer, "--json"))
    assert not found["instrumented"]
    assert found["reason"] is None
    assert found["contract"]["source"]["name"] == "transformer"
    cost = {method: entry["cost"] for method, entry in found["methods"].items()}
    assert cost["raw_attention"] == cost["rollout"] == 1  # nothing is added to the graph
    assert cost["generic_attention"] == cost["gradient_rollout"]
    assert 1 < cost["attention_gradcam"] < cost["gradcam"] < cost["generic_attention"] < 2
    assert 2 < cost["transformer_attribution"] < cost["lrp"] < 6
    assert found["contract"]["methods"].keys() == cost.keys()


def test_it_tells_what_is_going_on(
    transformer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    find(transformer, step=lambda *what: told.append(what))
    stages = ["reading the model", "finding the attention", "counting what methods cost"]
    assert told == [(stage, 0, 1) for stage in stages]
    monkeypatch.setattr(console, "_LEAST_QUIET", 0)
    ran = CliRunner().invoke(app, ["inspect", str(transformer), "--json"])
    assert json.loads(ran.stdout)["instrumented"] is False
    assert ran.stderr.splitlines() == [f"onnxplain: {stage}" for stage in stages]


def test_multiply_adds_by_hand(convolutional: Path) -> None:
    """Grad-CAM takes the gradient at the pooled features, one product with the head's weights, and
    spreads it over the positions without a product."""
    found = json.loads(run("inspect", convolutional, "--json"))
    convolution, head = 11 * 15 * 8 * 27, 8 * 5
    expected = (convolution + 2 * head) / (convolution + head)
    assert found["methods"]["gradcam"]["cost"] == pytest.approx(expected, rel=1e-12)


def test_why_a_method_is_not_available(convolutional: Path) -> None:
    rows = told(convolutional)
    assert rows["features"] == "11 x 15 positions of the last feature map"
    assert rows["method gradcam"] == "1.00 forward passes"
    assert rows["method rollout"].startswith(
        "not available: no attention found: expected a Softmax"
    )
    assert "its rules are for transformers" in rows["method lrp"]
    complaint = run("instrument", convolutional, "--methods", "rollout", "-o", "x.onnx", status=2)
    why = json.loads(run("inspect", convolutional, "--json"))["methods"]["rollout"]["refused"]
    assert why in complaint


def test_an_operator_without_a_rule(transformer: Path, tmp_path: Path) -> None:
    model = onnx.load(transformer)
    model.graph.node[-1].output[0] = "inner"
    model.graph.node.append(helper.make_node("Celu", ["inner"], ["output"]))
    onnx.save(model, tmp_path / "celu.onnx")
    found = json.loads(run("inspect", tmp_path / "celu.onnx", "--json"))["methods"]
    assert {m for m in found if "cost" in found[m]} == {"raw_attention", "rollout"}
    assert "Celu lies between the attention and the logits" in found["generic_attention"]["refused"]


@pytest.mark.parametrize(
    ("opset", "reason"), [(10, "opset 10; expected 11 to "), (17, "outputs: output [batch, 5, 2]")]
)
def test_a_model_that_cannot_be_explained(
    opset: int, reason: str, transformer: Path, tmp_path: Path
) -> None:
    """It was looked into, which is what was asked for."""
    model = onnx.load(transformer)
    if opset == 17:
        two = helper.make_node("Constant", [], ["two"], value_ints=[1, 1, 2])
        model.graph.node[-1].output[0] = "inner"
        last = onnx.NodeProto()
        last.CopyFrom(model.graph.node[-1])
        axis = helper.make_node("Constant", [], ["axis"], value_ints=[2])
        nodes = [
            helper.make_node("Unsqueeze", ["inner", "axis"], ["wide"]),
            helper.make_node("Expand", ["wide", "two"], ["output"]),
        ]
        model.graph.node.extend([two, axis, *nodes])
        model.graph.output[0].type.tensor_type.shape.dim.add(dim_value=2)
    else:
        simple = helper.make_node("Flatten", ["image"], ["output"])
        del model.graph.node[:], model.graph.initializer[:]
        model.graph.node.append(simple)
        model.opset_import[0].version = opset
    path = tmp_path / "other.onnx"
    onnx.save(model, path)
    rows = told(path)
    assert reason in rows["not explained"]
    assert rows["input"] == "image FLOAT [n,3,24,32]"
    found = json.loads(run("inspect", path, "--json"))
    assert reason in found["reason"]
    assert found["methods"] == {}


def test_what_is_not_onnx(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("hello\n" * 99)
    assert "model.onnx: " in run("inspect", tmp_path / "model.onnx", status=2)


def test_the_extra_that_it_takes(transformer: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['onnx', 'onnx_ir']));"
        "from onnxplain.__main__ import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "inspect", transformer], capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert ran.stderr == "onnxplain: onnx_ir is not installed; pip install onnxplain[graphs]\n"
