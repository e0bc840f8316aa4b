"""Paths of shared material, and a tiny explained model built by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from browser import Page, build, chromium, serve
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from onnxplain import console
from onnxplain.contract import KEY, AttentionLayer, Contract, ImageInput, Readout, Source, Tokens
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    GRAPH_KINDS,
    INPUT_RELEVANCE,
    INPUT_RELEVANCE_ATTNLRP,
    METHODS,
    attention_gradient_name,
    attention_name,
    attention_relevance_lrp_name,
    attention_relevance_name,
)
from onnxplain.runtime import Explainer, Explanation

ROOT = Path(__file__).resolve().parent.parent
PATCH, DIM, HEADS, LAYERS = 4, 4, 2, 2
LABELS = ("tabby", "Egyptian cat", "espresso")
TAPS = (
    attention_name,
    attention_gradient_name,
    attention_relevance_name,
    attention_relevance_lrp_name,
)


def shared(folder: str) -> Path:
    path = ROOT.parent / "shared" / folder
    if not path.is_dir():
        pytest.skip(f"needs ../shared/{folder}, which is not beside this checkout")
    return path


@pytest.fixture(scope="session", autouse=True)
def _no_lines_of_progress() -> Iterator[None]:
    """However slow the machine, what a command says on stderr is the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "_LEAST_QUIET", math.inf)
        yield


@pytest.fixture(scope="session")
def shared_golden() -> Path:
    """Golden values of both models; `vit_wide` and `small` are also in tests/golden."""
    return shared("golden")


@pytest.fixture(scope="session")
def shared_real() -> Path:
    """A real classifier and photos, which are not ours to ship."""
    return shared("real")


@pytest.fixture(scope="session")
def golden() -> Path:
    return ROOT / "tests" / "golden"


def toy_contract(
    size: tuple[int, int] = (8, 8), methods: Iterable[str] = tuple(METHODS), **changes: Any
) -> Contract:
    """The contract of a toy model that serves these methods, with some fields changed."""
    reads = {name: METHODS[name].outputs(LAYERS) for name in methods}
    has = {output for outputs in reads.values() for output in outputs}

    def present(name: str) -> str | None:
        return name if name in has else None

    contract = Contract(
        input=ImageInput(size=size, mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear"),
        tokens=Tokens(prefix=("cls",), grid=(size[0] // PATCH, size[1] // PATCH)),
        readout=Readout(kind="cls", ranges=((0, 1),)),
        layers=tuple(
            AttentionLayer(
                heads=HEADS,
                attention=present(attention_name(i)),
                gradient=present(attention_gradient_name(i)),
                relevance=present(attention_relevance_name(i)),
                relevance_lrp=present(attention_relevance_lrp_name(i)),
            )
            for i in range(LAYERS)
        ),
        classes=len(LABELS),
        labels=LABELS,
        methods=reads,
        source=Source(name="toy"),
        features=present(FEATURES),
        features_gradient=present(FEATURES_GRADIENT),
        input_relevance=present(INPUT_RELEVANCE),
        input_relevance_attnlrp=present(INPUT_RELEVANCE_ATTNLRP),
    )
    return replace(contract, **changes)


def toy_model(contract: Contract) -> onnx.ModelProto:
    """A two-layer, two-head transformer whose class token attends to bright patches.

    Every "gradient" and "relevance" is the tap itself times the target's logit: what matters here
    is that outputs depend on the image and on the class, not that they differentiate anything.
    """
    rng = np.random.default_rng(0)
    (height, width), batch = contract.input.size, contract.input.batch or "batch"
    tokens = contract.tokens.count
    weights: dict[str, NDArray[np.generic]] = {
        "patch.weight": np.concatenate(
            [np.ones((1, 3, PATCH, PATCH)), rng.normal(size=(DIM - 1, 3, PATCH, PATCH)) * 0.2]
        ).astype(np.float32)
        / (3 * PATCH * PATCH),
        "cls": np.array([[[0, 4, 0, 0]]], np.float32),
        "head": rng.normal(size=(DIM, contract.classes)).astype(np.float32),
        "query": np.zeros((HEADS, DIM, 2), np.float32),
        "key": np.zeros((HEADS, DIM, 2), np.float32),
        "value": rng.normal(size=(HEADS, DIM, 2)).astype(np.float32),
        "output": rng.normal(size=(DIM, DIM)).astype(np.float32),
        "flat": np.array([0, DIM, -1], np.int64),
        "joined": np.array([0, 0, DIM], np.int64),
        "zero": np.array(0, np.int64),
        "column": np.array([1], np.int64),
        "deep": np.array([1, 2, 3], np.int64),
        "bias": np.array(0.05, np.float32),
    }
    weights["query"][:, 1, 0], weights["key"][:, 0, 0] = 1, 1
    weights["query"][1, 1, 1], weights["key"][1, 2, 1] = 1, 1
    node = helper.make_node
    nodes = [
        node("Conv", ["pixel_values", "patch.weight"], ["maps"], strides=[PATCH, PATCH]),
        node("Reshape", ["maps", "flat"], ["columns"]),
        node("Transpose", ["columns"], ["patches"], perm=[0, 2, 1]),
        node("Shape", ["pixel_values"], ["count"], start=0, end=1),
        node("Concat", ["count", "column", "column"], ["cls.shape"], axis=0),
        node("Expand", ["cls", "cls.shape"], ["cls.batch"]),
        node("Concat", ["cls.batch", "patches"], ["x0"], axis=1),
    ]
    for i in range(LAYERS):
        if i == LAYERS - 1:
            nodes.append(node("Identity", [f"x{i}"], [FEATURES]))
        nodes += [
            node("Unsqueeze", [f"x{i}", "column"], [f"u{i}"]),
            node("MatMul", [f"u{i}", "query"], [f"q{i}"]),
            node("MatMul", [f"u{i}", "key"], [f"k{i}"]),
            node("MatMul", [f"u{i}", "value"], [f"v{i}"]),
            node("Transpose", [f"k{i}"], [f"kt{i}"], perm=[0, 1, 3, 2]),
            node("MatMul", [f"q{i}", f"kt{i}"], [f"s{i}"]),
            node("Softmax", [f"s{i}"], [attention_name(i)], axis=-1),
            node("MatMul", [attention_name(i), f"v{i}"], [f"o{i}"]),
            node("Transpose", [f"o{i}"], [f"ot{i}"], perm=[0, 2, 1, 3]),
            node("Reshape", [f"ot{i}", "joined"], [f"oj{i}"]),
            node("MatMul", [f"oj{i}", "output"], [f"p{i}"]),
            node("Add", [f"x{i}", f"p{i}"], [f"x{i + 1}"]),
        ]
    nodes += [
        node("Gather", [f"x{LAYERS}", "zero"], ["read"], axis=1),
        node("MatMul", ["read", "head"], ["logits"]),
        node("ArgMax", ["logits"], ["predicted"], axis=1, keepdims=0),
        node("Less", ["target", "zero"], ["open"]),
        node("Where", ["open", "predicted", "target"], ["class"]),
        node("Unsqueeze", ["class", "column"], ["class.column"]),
        node("GatherElements", ["logits", "class.column"], ["chosen"], axis=1),
        node("Unsqueeze", ["chosen", "column"], ["chosen.3"]),
        node("Mul", [FEATURES, "chosen.3"], [FEATURES_GRADIENT]),
        node("Unsqueeze", ["chosen.3", "column"], ["chosen.4"]),
    ]
    for i in range(LAYERS):
        nodes += [
            node("Sub", [attention_name(i), "bias"], [f"centred{i}"]),
            node("Mul", [f"centred{i}", "chosen.4"], [attention_gradient_name(i)]),
            node("Mul", [attention_name(i), "chosen.4"], [attention_relevance_name(i)]),
            node("Neg", [f"centred{i}"], [attention_relevance_lrp_name(i)]),
        ]
    nodes += [
        node("Mul", ["pixel_values", "chosen.4"], [INPUT_RELEVANCE]),
        node("Mul", [INPUT_RELEVANCE, "chosen.4"], [INPUT_RELEVANCE_ATTNLRP]),
    ]
    weights["target"] = np.array([-1], np.int64)
    shapes: dict[str, list[int | str]] = {
        "logits": [batch, contract.classes],
        FEATURES: [batch, tokens, DIM],
        FEATURES_GRADIENT: [batch, tokens, DIM],
        INPUT_RELEVANCE: [batch, 3, height, width],
        INPUT_RELEVANCE_ATTNLRP: [batch, 3, height, width],
    }
    for i in range(LAYERS):
        for tap in TAPS:
            shapes[tap(i)] = [batch, HEADS, tokens, tokens]
    wanted = {"logits", *(o for outputs in contract.methods.values() for o in outputs)}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "toy",
        [
            value("pixel_values", TensorProto.FLOAT, [batch, 3, height, width]),
            value("target", TensorProto.INT64, ["targets"]),
        ],
        [value(name, TensorProto.FLOAT, shape) for name, shape in shapes.items() if name in wanted],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    helper.set_model_props(model, {KEY: contract.to_json()})
    return model


ToyFile = Callable[..., Path]


@pytest.fixture
def toy_file(tmp_path: Path) -> ToyFile:
    """Writes a toy model: `toy_file(size=(8, 16), ...)` with changes to its contract."""

    def make(name: str = "toy.onnx", **changes: Any) -> Path:
        path = tmp_path / name
        onnx.save(toy_model(toy_contract(**changes)), path)
        return path

    return make


@pytest.fixture
def toy_bundle(tmp_path: Path) -> Path:
    """The toy model as a bundle folder: a graph per kind of method, and a contract of them all."""
    folder = tmp_path / "bundle"
    folder.mkdir()
    whole = toy_contract()
    for kind, served in GRAPH_KINDS.items():
        onnx.save(toy_model(toy_contract(methods=served)), folder / f"{kind}.onnx")
    graphs = {kind: f"{kind}.onnx" for kind in GRAPH_KINDS}
    document = json.dumps(json.loads(replace(whole, graphs=graphs).to_json()), indent=1)
    (folder / "contract.json").write_text(document)
    return folder


@pytest.fixture
def explainer(toy_file: ToyFile) -> Explainer:
    """The toy model with every method, for 8x8 pictures of any number."""
    return Explainer(toy_file(), device="cpu", threads=1)


def pixels(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def picture(seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (11, 17, 3), dtype=np.uint8)


def assert_same(
    one: Explanation, other: Explanation, *, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    for name in ("grid", "heatmap", "logits"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=rtol, atol=atol)


# The example page in a browser


@pytest.fixture(scope="module")
def small() -> Any:
    """A small vision transformer as plain ONNX, an `onnx_ir.Model`."""
    from small_vits import small_vit

    from onnxplain.export.plain import to_onnx

    return to_onnx(small_vit(), image_size=(32, 32))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path]]:
    """The page in a browser, and the folder that it is served from."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    profile = tmp_path_factory.mktemp("profile")
    with serve(folder) as address, chromium(profile) as driver:
        yield Page(driver, address), folder


@pytest.fixture(scope="module")
def opened(site: tuple[Page, Path]) -> Page:
    return site[0].open()


@pytest.fixture
def page(opened: Page) -> Page:
    """The page with the bundled model, and without an error from before."""
    if opened.find("#model").text != "garments.onnx" or opened.error:
        opened.open()
    return opened


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Neither square nor regular: blurred noise of all sizes."""
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    rng = np.random.default_rng(11)
    layers = [
        cv2.resize(rng.normal(size=(5 * n, 7 * n, 3)), (211, 157), interpolation=cv2.INTER_CUBIC)
        for n in (1, 3, 10, 30)
    ]
    Image.fromarray((128 + 40 * np.sum(layers, axis=0)).clip(0, 255).astype(np.uint8)).save(path)
    return path
