"""Several classes of each image in one run, and sums of logits instead of a class."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image
from small_vits import small_vit
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.contract import Contract
from onnxplain.export.plain import to_onnx
from onnxplain.outputs import METHODS, heatmap_name, map_name

SAME = 1e-5  # of the largest value: the same nodes on other values side by side
TARGETS = 3
IMAGES = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype(np.float32)
CLASS_METHODS = [method for method, needs in METHODS.items() if needs.class_specific]

Values = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def vit() -> ir.Model:
    return to_onnx(small_vit(), image_size=(32, 32))


@pytest.fixture(scope="module")
def one(vit: ir.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one") / "one.onnx"
    ox.instrument(vit, path, heatmaps=True, seed="weights")
    return path


@pytest.fixture(scope="module")
def several(vit: ir.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several") / "several.onnx"
    ox.instrument(vit, path, targets=TARGETS, heatmaps=True, seed="weights")
    return path


def run(path: Path, **feeds: Any) -> Values:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {"pixel_values": IMAGES, **feeds}), strict=True))


def assert_same(found: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    # Some maps have no positive part, and are 0.
    assert np.abs(found - expected).max() <= SAME * np.abs(expected).max(), what


def names(methods: Iterable[str]) -> list[str]:
    return [name(method) for method in methods for name in (map_name, heatmap_name)]


@pytest.mark.parametrize("classes", [None, [[7, 2, 5], [0, 9, 9]]])
def test_each_class_has_the_maps_of_a_run_of_its_own(
    one: Path, several: Path, classes: list[list[int]] | None
) -> None:
    found = run(several, **({} if classes is None else {"target": np.array(classes)}))
    if classes is None:
        classes = (-found["logits"]).argsort(axis=1, kind="stable")[:, :TARGETS].tolist()
    for i, target in enumerate(zip(*classes, strict=True)):
        expected = run(one, target=np.array(target))
        for name in names(METHODS):
            maps = found[name][:, i] if name in names(CLASS_METHODS) else found[name]
            assert_same(maps, expected[name], f"{name} of class {i}")
    assert len([name for name in names(METHODS) if np.abs(found[name]).max() > 0]) > 15


def test_ranks_and_classes_side_by_side(several: Path) -> None:
    logits = run(several)["logits"]
    order = (-logits).argsort(axis=1, kind="stable")
    found = run(several, target=np.array([[-2, 4, -1], [-3, -3, 0]]))
    expected = run(
        several,
        target=np.array(
            [[order[0, 1], 4, order[0, 0]], [order[1, 2], order[1, 2], 0]],
        ),
    )
    for name in names(CLASS_METHODS):
        np.testing.assert_array_equal(found[name], expected[name], name)
    everyone = run(several, target=np.array([[1, 2, 3]]))  # one row is for all images
    for name in names(CLASS_METHODS):
        expected = run(several, target=np.array([[1, 2, 3]] * 2))
        np.testing.assert_array_equal(everyone[name], expected[name], name)


def test_weights_that_pick_a_class_are_that_class(one: Path, several: Path) -> None:
    weights = np.eye(10, dtype=np.float32)[[4, 0]]
    for name, array in run(one, target=np.array([4, 0])).items():
        np.testing.assert_array_equal(run(one, class_weights=weights)[name], array, name)
    more = np.zeros((2, TARGETS, 10), np.float32)
    more[:, 1] = weights  # the others are asked for as classes
    found = run(several, target=np.array([[1, 9, 2]] * 2), class_weights=more)
    for i, target in enumerate(([1, 1], [4, 0], [2, 2])):
        expected = run(one, target=np.array(target))
        for name in names(CLASS_METHODS):
            assert_same(found[name][:, i], expected[name], f"{name} of class {i}")


def test_gradients_of_a_sum_are_the_sum_of_gradients(one: Path) -> None:
    weights = np.zeros((1, 10), np.float32)
    weights[0, [3, 5]] = 1, -0.5
    found = run(one, class_weights=weights)
    plus, minus = (run(one, target=np.array([c])) for c in (3, 5))
    checked = 0
    for name in found:
        if "gradient" in name and not name.startswith(("map", "heatmap")):
            assert_same(found[name], plus[name] - 0.5 * minus[name], name)
            checked += 1
    assert checked == 3  # two layers and the features


def test_explain_classes_of_any_file(one: Path, several: Path, tmp_path: Path) -> None:
    single, multiple = (ox.Explainer(path, device="cpu") for path in (one, several))
    assert multiple.contract.targets == TARGETS
    assert multiple.methods == tuple(METHODS)
    asked: list[list[Any] | None] = [None, [8, "1", None, 3, 0]]
    for classes in asked:
        some: dict[str, Any] = {"top": 5} if classes is None else {"classes": classes}
        found = multiple.explain_classes(IMAGES, method="generic_attention", **some)
        expected = single.explain_classes(IMAGES, method="generic_attention", **some)
        assert len(found) == len(expected) == 5
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_array_equal(ours.target, theirs.target)
            assert ours.labels == theirs.labels
            assert_same(ours.grid, theirs.grid, str(ours.labels))
    order = (-found[0].logits).argsort(axis=1)
    likeliest = multiple.explain_classes(IMAGES)
    assert [one.target.tolist() for one in likeliest] == order[:, :TARGETS].T.tolist()
    assert len(multiple.explain_classes(IMAGES, top=1)) == 1
    assert len(multiple.explain_classes(IMAGES, top=99, method="gradcam")) == 10
    rollouts = multiple.explain_classes(IMAGES, method="rollout", classes=[0, 1])
    np.testing.assert_array_equal(rollouts[0].grid, rollouts[1].grid)


def test_one_class_of_a_file_that_takes_several(one: Path, several: Path) -> None:
    single, multiple = (ox.Explainer(path, device="cpu") for path in (one, several))
    for target in (None, 4, [4, 7]):
        for found in multiple.explain_each(IMAGES, target=target):
            expected = single.explain(IMAGES, method=found.method, target=target)
            np.testing.assert_array_equal(found.target, expected.target)
            assert_same(found.grid, expected.grid, found.method)


def test_sums_by_label(vit: ir.Model, tmp_path: Path) -> None:
    labels = [f"class {i}" for i in range(10)]
    for targets in (1, 2):
        path = tmp_path / f"{targets}.onnx"
        ox.instrument(vit, path, labels=labels, seed="weights", targets=targets)
        explainer = ox.Explainer(path, device="cpu")
        row = np.zeros(10, np.float32)
        row[[3, 5]] = 1, -0.5
        by_label = explainer.explain(IMAGES, class_weights={"class 3": 1, 5: -0.5})
        assert by_label.labels == ("class 3 - 0.5 class 5",) * 2
        assert by_label.target.tolist() == [3, 3]
        assert by_label.class_weights is not None
        for weights in (row, np.stack([row, row]), row.tolist()):
            found = explainer.explain(IMAGES, class_weights=weights)
            np.testing.assert_array_equal(found.grid, by_label.grid)
        (first, *_) = explainer.explain_many([IMAGES_AS_PICTURE], class_weights={3: 1, 5: -0.5})
        assert first.labels == ("class 3 - 0.5 class 5",)
        (each, *_) = explainer.explain_each(IMAGES, methods=["gradcam"], class_weights=row)
        expected = explainer.explain(IMAGES, method="gradcam", class_weights=row)
        np.testing.assert_array_equal(each.grid, expected.grid)


IMAGES_AS_PICTURE = np.random.default_rng(1).integers(0, 256, (40, 50, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"nobody": 1}, "'nobody'"),
        ({3: "much"}, "'much'; expected a number"),
        ({None: 1}, "a weight for None"),
        ([1, 2], r"of shape \[2\]; expected \[10\] or \[2, 10\]"),
        (np.zeros(10), "all 0"),
        (np.full(10, np.nan), "nan for class 0; not finite"),
        ("cat", "'cat'; expected weights by class"),
        (np.ones(10, complex), "expected weights by class"),
        ([[1] * 10, [1] * 9], "expected weights by class"),
        ({3: 1, "3": 2}, "'3' is class 3, which has a weight"),
        ({3: 10**400}, "expected a number"),
        ({3: 1e39}, "inf for class 3; not finite"),
        ({}, "all 0"),
    ],
)
def test_wrong_weights(one: Path, weights: Any, message: str) -> None:
    explainer = ox.Explainer(one, device="cpu")
    with pytest.raises(ox.InputError, match=message):
        explainer.explain(IMAGES, class_weights=weights)


def test_weights_where_there_are_none(vit: ir.Model, one: Path, tmp_path: Path) -> None:
    ox.instrument(vit, tmp_path / "x.onnx", methods=["gradcam"])
    with pytest.raises(ox.InputError, match="--seed weights"):
        ox.Explainer(tmp_path / "x.onnx", device="cpu").explain(IMAGES, class_weights={1: 1})
    with pytest.raises(ox.InputError, match="both target and class_weights"):
        ox.Explainer(one, device="cpu").explain(IMAGES, target=1, class_weights={1: 1})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"targets": 0}, "targets 0; expected how many classes"),
        ({"targets": 11}, "11 targets; the model has 10 classes"),
        ({"targets": 2, "outputs": "both"}, "expected maps"),
        ({"targets": 2, "outputs": "taps"}, "expected maps"),
        ({"heatmaps": True, "outputs": "taps"}, "heatmaps without maps"),
        ({"seed": "label"}, "seed 'label'; expected one of target, weights"),
    ],
)
def test_wrong_requests(
    vit: ir.Model, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ox.InputError, match=message):
        ox.instrument(vit, tmp_path / "x.onnx", **arguments)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [{"targets": 1}, {"targets": TARGETS}])
def test_inputs_without_defaults(
    vit: ir.Model, one: Path, arguments: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "x.onnx"
    ox.instrument(vit, path, seed="weights", require_target=True, **arguments)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = [value.name for value in session.get_inputs()]
    assert inputs == ["pixel_values", "target", "class_weights"]
    assert not session.get_overridable_initializers()
    explainer, usual = (ox.Explainer(p, device="cpu") for p in (path, one))
    questions: list[dict[str, Any]] = [{}, {"target": 4}, {"class_weights": {4: 1, 2: -1}}]
    for asked in questions:
        for method in ("generic_attention", "rollout"):
            found = explainer.explain(IMAGES, method=method, **asked)
            expected = usual.explain(IMAGES, method=method, **asked)
            assert found.labels == expected.labels
            assert_same(found.grid, expected.grid, method)


def test_export_with_inputs_without_defaults(tmp_path: Path) -> None:
    report = ox.export(
        small_vit(),
        tmp_path / "x.onnx",
        methods=["gradcam"],
        seed="weights",
        require_target=True,
    )
    assert report.verification is not None


def test_export_and_bundle_of_several_targets(one: Path, tmp_path: Path) -> None:
    ox.export(small_vit(), tmp_path / "bundle", targets=2)
    bundle = ox.Explainer(tmp_path / "bundle", device="cpu")
    assert bundle.contract.verification is not None
    single = ox.Explainer(one, device="cpu")
    for method in METHODS:
        found = bundle.explain_classes(IMAGES, method=method, classes=[1, 2])
        for ours, target in zip(found, (1, 2), strict=True):
            expected = single.explain(IMAGES, method=method, target=target)
            assert_same(ours.grid, expected.grid, method)


def test_a_contract_with_too_many_targets_is_damaged(several: Path) -> None:
    contract = ox.Explainer(several, device="cpu").contract
    for change in (
        {"targets": 11},
        {"targets": 0},
        {"targets": True},
        {"class_weights": 3},
        {"class_weights": ""},
        {"heatmaps": 1},
    ):
        text = json.dumps({**json.loads(contract.to_json()), **change})
        with pytest.raises(ox.ContractError, match="damaged"):
            Contract.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"targets": 2},
        {"targets": 4},
        {"classes": 11},
        {"input.layout": "HWC"},
        {"class_weights": "target"},
        {"class_weights": "pixel_values"},
    ],
)
def test_a_contract_that_its_graph_does_not_keep(
    several: Path, change: dict[str, Any], tmp_path: Path
) -> None:
    model = ir.load(several)
    contract = json.loads(model.metadata_props["onnxplain"])
    for name, value in change.items():
        *parents, last = name.split(".")
        inner = contract
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    model.metadata_props["onnxplain"] = json.dumps(contract)
    ir.save(model, tmp_path / "x.onnx")
    with pytest.raises(ox.ContractError, match=r"the contract (says|gives)"):
        ox.Explainer(tmp_path / "x.onnx", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classes": 5}, "classes 5; expected a list"),
        ({"classes": "12"}, "classes '12'; expected a list"),
        ({"classes": [1], "top": 1}, "both classes and top"),
        ({"top": 0}, "top is 0"),
    ],
)
def test_wrong_classes(one: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ox.InputError, match=message):
        ox.Explainer(one, device="cpu").explain_classes(IMAGES, **arguments)


def test_a_sum_of_what_speaks_against_a_class(one: Path) -> None:
    result = ox.Explainer(one, device="cpu").explain(IMAGES, class_weights={3: -1})
    assert result.target.tolist() == [3, 3]
    assert result.labels == ("-3", "-3")


def test_command_line(one: Path, several: Path, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    Image.fromarray(IMAGES_AS_PICTURE).save(picture)
    runner = CliRunner()

    def explain(*arguments: str) -> Any:
        return runner.invoke(
            app, ["explain", str(one), str(picture), "-o", str(tmp_path / "out"), *arguments]
        )

    result = explain("--weight", "3=1", "--weight", "5=-0.5", "--json")
    assert result.exit_code == 0, result.output
    (summary,) = json.loads(result.stdout)["results"]
    assert (summary["label"], summary["target"], summary["probability"]) == (
        "3 - 0.5 5",
        None,
        None,
    )
    told = explain("--weight", "3=1")
    assert told.stdout.startswith(f"{picture}: 3 -> ")
    assert explain("--weight", "3").exit_code == 2
    assert explain("--weight", "3=1", "--weight", "3=2").exit_code == 2
    panel = ["compare", str(several), str(picture), "-o", str(tmp_path / "panel.png")]
    assert runner.invoke(app, panel).exit_code == 0
