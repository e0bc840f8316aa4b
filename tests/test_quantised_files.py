"""Quantised files, in QDQ format and with products of integers, against torch with rounding that is
passed straight through."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import double
import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from hand_written import SIZE, HandWritten, to_file
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from single_nodes import written_out
from torch import Tensor
from torch_relevance import Attribution, Plain, Program, straight_through

import onnxplain as ox
from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.backward.gradient import GRADIENT
from onnxplain.graphs.backward.walk import Cotangent, walk
from onnxplain.graphs.builder import Builder
from onnxplain.graphs.values.shapes import infer
from onnxplain.outputs import (
    INPUT_RELEVANCE,
    INPUT_RELEVANCE_ATTNLRP,
    METHODS,
    attention_relevance_lrp_name,
)

TOLERANCE = 1e-5  # of the largest value, single precision
PLAIN = onnxruntime.SessionOptions()
PLAIN.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
# Some values are beyond what was calibrated, so that they are cut off.
IMAGES = 1.3 * np.random.default_rng(9).normal(size=(3, 3, *SIZE)).astype(np.float32)
TARGET = np.array([1, 4, 2])

Arrays = dict[str, NDArray[Any]]


class Calibration(CalibrationDataReader):
    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        shape = (2, 3, *SIZE)
        self.feeds = [{"image": generator.normal(size=shape).astype(np.float32)} for _ in range(4)]

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        return self.feeds.pop() if self.feeds else None


def quantised(plain: Path, path: Path, kind: QuantFormat, *, per_channel: bool = False) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_static(
            str(plain),
            str(path),
            Calibration(),
            quant_format=kind,
            per_channel=per_channel,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_file(HandWritten(), tmp_path_factory.mktemp("plain") / "plain.onnx")


def rounded_as_it_runs(plain: Path, path: Path, **options: Any) -> Path:
    """Products of integers, with steps measured on what is rounded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Products with weights in int8 overflow on some processors.
        quantize_dynamic(str(plain), str(path), weight_type=QuantType.QUInt8, **options)
    return path


KINDS: dict[str, Callable[[Path, Path], Path]] = {
    "per tensor": partial(quantised, kind=QuantFormat.QDQ),
    "per channel": partial(quantised, kind=QuantFormat.QDQ, per_channel=True),
    "dynamic": rounded_as_it_runs,
    "dynamic, per channel": partial(rounded_as_it_runs, per_channel=True),
    "dynamic, attention too": partial(
        rounded_as_it_runs, extra_options={"MatMulConstBOnly": False}
    ),
}


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest, plain: Path) -> tuple[Path, Path]:
    """A quantised file, and the same explained."""
    path = KINDS[request.param](plain, plain.with_name(f"{request.param}.onnx"))
    made = path.with_name(f"explained {request.param}.onnx")
    contract = ox.instrument(path, made).contract
    assert contract.precision == "int8"
    assert set(contract.methods) == set(METHODS)
    assert contract.tokens.grid == (3, 4)
    return path, made


def run(path: Path | bytes, **feeds: Any) -> Arrays:
    session = onnxruntime.InferenceSession(path, PLAIN, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, {"image": IMAGES, **feeds}), strict=True))


def close(found: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    assert np.abs(expected).max() > 0, what
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max(), what


# The quantised file in torch, node by node


@dataclass(frozen=True)
class Rounded:
    """What a QuantizeLinear makes integers of."""

    x: Tensor
    name: str
    scale: float
    zero: int


class StraightThrough:
    """Runs a quantised graph in torch, for the images that its integers were computed for. These
    are given, since a last bit before the rounding is a whole step behind it; gradients pass them
    as if they had not been rounded, where they are not at an end of the range for being beyond it.
    """

    def __init__(self, model: onnx.ModelProto, integers: Arrays) -> None:
        self.model, self.integers = model, integers
        self.weights = {w.name: numpy_helper.to_array(w) for w in model.graph.initializer}
        self.cut_off: list[Tensor] = []

    def __call__(self, images: Tensor) -> Tensor:
        self.images = images
        # Integers stay in NumPy: they are sizes, places, or rounded weights.
        self.tensors: dict[str, Any] = {"image": images}
        self.tensors |= {name: self.known(array) for name, array in self.weights.items()}
        for node in self.model.graph.node:
            inputs = [self.tensors[name] if name else None for name in node.input]
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            results = self.node(node, inputs, attributes)
            results = results if isinstance(results, list | tuple) else [results]
            self.tensors.update(zip(node.output, results, strict=True))
        logits: Tensor = self.tensors["output"]
        return logits

    def known(self, array: Any) -> Any:
        dtype = self.tensors["image"].dtype
        return torch.tensor(array, dtype=dtype) if array.dtype.kind == "f" else array

    def node(self, node: onnx.NodeProto, x: list[Any], a: dict[str, Any]) -> Any:
        kind = node.op_type
        if kind == "QuantizeLinear":
            scale, zero = (self.weights[name].item() for name in node.input[1:])
            return Rounded(x[0], node.output[0], scale, zero)
        if kind == "DynamicQuantizeLinear":
            scale, zero = (self.integers[name] for name in node.output[1:])
            rounded = Rounded(x[0], node.output[0], scale.item(), zero.item())
            return rounded, self.known(scale), zero
        if kind in ("MatMulInteger", "ConvInteger"):
            operands = [self.steps(*pair) for pair in zip(x[:2], x[2:], strict=True)]
            return self.operators([*operands, None], a, 1)[kind.removesuffix("Integer")]()
        if kind == "DequantizeLinear" and isinstance(x[0], Rounded):
            return self.through(x[0])
        if kind == "DequantizeLinear":
            shape = [1] * x[0].ndim
            if x[1].numel() > 1:
                shape[a.get("axis", 1) if x[0].ndim > 1 else 0] = -1
            steps = torch.tensor(x[0].astype(np.float32) - x[2].reshape(shape)).to(x[1])
            return steps * x[1].reshape(shape)
        if not any(isinstance(t, Tensor) for t in x):
            opsets = {"": self.model.opset_import[0].version}
            names = dict(zip(node.input, x, strict=True))
            return [self.known(y) for y in ReferenceEvaluator(node, opsets=opsets).run(None, names)]
        return self.operators(x, a, len(node.output))[kind]()

    def operators(self, x: list[Any], a: dict[str, Any], outputs: int) -> dict[str, Any]:
        return {
            "Add": lambda: x[0] + x[1],
            "Cast": lambda: x[0],
            "Concat": lambda: torch.cat(x, a.get("axis", 0)),
            "Conv": lambda: F.conv2d(x[0], x[1], x[2], stride=a["strides"]),
            "Div": lambda: x[0] / x[1],
            "Erf": lambda: x[0].erf(),
            "Expand": lambda: x[0] * torch.ones(x[1].tolist()),
            "Gather": lambda: x[0].select(a.get("axis", 0), int(x[1])),
            "Gemm": lambda: x[0] @ (x[1].T if a.get("transB") else x[1]) + x[2],
            "LayerNormalization": lambda: F.layer_norm(
                x[0], x[1].shape, x[1], x[2], a.get("epsilon", 1e-5)
            ),
            "MatMul": lambda: x[0] @ x[1],
            "Mul": lambda: x[0] * x[1],
            "Pow": lambda: x[0] ** x[1],
            "Reshape": lambda: x[0].reshape(x[1].tolist()),
            "Shape": lambda: np.array(x[0].shape)[a.get("start", 0) : a.get("end")],
            "Softmax": lambda: x[0].softmax(a.get("axis", -1)),
            "Split": lambda: x[0].split(
                x[1].tolist() if len(x) > 1 else x[0].shape[a["axis"]] // outputs,
                a.get("axis", 0),
            ),
            "Sqrt": lambda: x[0].sqrt(),
            "Squeeze": lambda: x[0].squeeze(x[1].tolist()),
            "Transpose": lambda: x[0].permute(a["perm"]),
            "Unsqueeze": lambda: x[0].unsqueeze(int(x[1])),
        }

    def through(self, source: Rounded) -> Tensor:
        steps = (source.x / source.scale + source.zero).round()
        inside = (steps >= 0) & (steps <= 255)
        self.cut_off.append(~inside)
        integers = torch.tensor(self.integers[source.name]).to(source.x)
        return straight_through(source.x, (integers - source.zero) * source.scale, inside)

    def steps(self, value: Any, zero: NDArray[Any]) -> Tensor:
        """An operand of a product of integers, less its zero point."""
        if isinstance(value, Rounded):
            return self.through(value) / value.scale
        per_channel = zero.reshape(-1, 1, 1, 1) if value.ndim == 4 else zero
        return torch.tensor(value.astype(np.float32) - per_channel).to(self.images)

    def attention(self) -> list[Tensor]:
        """What multiplies the values: the probabilities as they are rounded; before it, where the
        file takes how many steps they are."""
        found = []
        for node in self.model.graph.node:
            if node.op_type == "Softmax":
                used = next(n for n in self.model.graph.node if node.output[0] in n.input)
                if used.op_type == "QuantizeLinear":
                    used = next(n for n in self.model.graph.node if used.output[0] in n.input)
                    found.append(self.tensors[used.output[0]])
                else:
                    found.append(self.tensors[node.output[0]])
        return found


class Linearised(StraightThrough):
    """The same numbers, from a graph in which the pixels times their gradient are AttnLRP: what its
    rules hold constant is detached. Relevance over value is then defined where a value is rounded
    to 0, too."""

    def operators(self, x: list[Any], a: dict[str, Any], outputs: int) -> dict[str, Any]:
        table = super().operators(x, a, outputs)

        def halves(f: Callable[[Any, Any], Any]) -> Tensor:
            if not (x[0].requires_grad and x[1].requires_grad):
                return f(x[0], x[1])
            return (f(x[0], x[1].detach()) + f(x[0].detach(), x[1])) / 2

        def scaled(y: Tensor, t: Tensor) -> Tensor:
            return t * torch.where(t == 0, 0, y / t).detach()

        def normalised() -> Tensor:
            centred = x[0] - x[0].mean(-1, keepdim=True)
            variance = centred.square().mean(-1, keepdim=True) + a.get("epsilon", 1e-5)
            return centred / variance.sqrt().detach() * x[1] + x[2]

        def added() -> Tensor:
            for one, other in (x, x[::-1]):
                if one.numel() == 1:  # of a GELU written out
                    return scaled(one + other, other)
            return x[0] + x[1]

        table["Add"] = added
        table["Erf"] = lambda: scaled(x[0].erf(), x[0])
        table["LayerNormalization"] = normalised
        table["MatMul"] = lambda: halves(operator.matmul)
        table["Mul"] = lambda: halves(operator.mul)
        return table


def with_integers(path: Path) -> onnx.ModelProto:
    """The model with all that it rounds to as further outputs."""
    model = onnx.load(path)
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear"):
            types = (onnx.TensorProto.UINT8, onnx.TensorProto.FLOAT, onnx.TensorProto.UINT8)
            for name, kind in zip(node.output, types, strict=False):
                model.graph.output.append(helper.make_tensor_value_info(name, kind, None))
    return model


def test_attention_and_gradients_equal_torch(pair: tuple[Path, Path]) -> None:
    path, made = pair
    model = with_integers(path)
    reference = StraightThrough(model, run(model.SerializeToString()))
    logits = reference(torch.tensor(IMAGES, requires_grad=True))
    taps = reference.attention()
    selected = logits.gather(1, torch.from_numpy(TARGET)[:, None]).sum()
    gradients = torch.autograd.grad(selected, taps)
    cut_off = sum(int(places.sum()) for places in reference.cut_off)
    assert cut_off == 0 if "dynamic" in path.name else cut_off > 20
    found = run(made, target=TARGET)
    close(found["output"], logits.detach().numpy(), "logits")
    assert len(taps) == 2
    for i, (tap, gradient) in enumerate(zip(taps, gradients, strict=True)):
        close(found[f"attention.{i}"], tap.detach().numpy(), f"attention {i}")
        close(found[f"attention_gradient.{i}"], gradient.numpy(), f"gradient {i}")


def test_relevance_equals_torch(pair: tuple[Path, Path]) -> None:
    """In double. What is rounded passes relevance where it passes gradients."""
    path, made = pair
    feeds = {"image": IMAGES, "target": TARGET}
    model = with_integers(path)
    integers = double.run(ir.from_proto(model), feeds)
    pixels, target = torch.from_numpy(IMAGES).double(), torch.from_numpy(TARGET)
    program = Program(StraightThrough(model, integers), pixels)
    attribution, lrp = (program.relevance(target, table) for table in (Attribution(), Plain()))
    logits = Linearised(model, integers)(pixels.requires_grad_())
    (slope,) = torch.autograd.grad(logits.gather(1, target[:, None]).sum(), pixels)
    expected = {
        "attention_relevance.0": attribution.attention[0],
        "attention_relevance.1": attribution.attention[1],
        attention_relevance_lrp_name(1): lrp.attention[1],
        INPUT_RELEVANCE: lrp.pixels,
        INPUT_RELEVANCE_ATTNLRP: (pixels * slope).detach(),
    }
    found = double.run(ir.load(made), feeds)
    for name, relevance in expected.items():
        close(found[name], relevance.numpy(), name)


def test_the_model_computes_what_it_did(pair: tuple[Path, Path]) -> None:
    path, made = pair
    np.testing.assert_array_equal(run(made)["output"], run(path)["output"])


def test_maps_are_near_those_of_the_float_model(pair: tuple[Path, Path], plain: Path) -> None:
    _, made = pair
    ox.instrument(plain, plain.with_name("float.onnx"))
    explainers = [
        ox.Explainer(path, device="cpu", threads=1)
        for path in (made, plain.with_name("float.onnx"))
    ]
    for method in METHODS:
        one, other = (
            e.explain(IMAGES, method=method, target=TARGET.tolist()).grid for e in explainers
        )
        assert np.isfinite(one).all(), method
        # Those of the plain rules divide by what is near 0, which rounding to 8 bits moves far.
        if method not in ("partial_lrp", "lrp", "attnlrp") and other.any():
            assert np.corrcoef(one.ravel(), other.ravel())[0, 1] > 0.8, method


# What is cut off


def test_the_range_of_a_rounding() -> None:
    """round(x / 0.5) + 3 in 0..255: 252 steps up, 3 down."""
    proto = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 17]>
        g (float[batch, 6] x) => (float[batch, 6] y)
        <float scale = {0.5}, uint8 zero = {3}> {
            q = QuantizeLinear(x, scale, zero)
            y = DequantizeLinear(q, scale, zero)
        }
        """
    )
    model = ir.from_proto(proto)
    graph = model.graph
    image, result = graph.inputs[0], graph.outputs[0]
    b = Builder(graph, infer(model, image))
    seed = b.constant(np.full((1, 6), 2, np.float32))
    found = walk(b, {result: Cotangent(seed)}, [image], GRADIENT)[image]
    b.rename(found.tensor, "gradient")
    graph.outputs.append(found.tensor.value)
    x = np.array([[-1.76, -1.74, 0, 0.2, 126.24, 126.26]], np.float32)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), PLAIN)
    gradient = session.run(["gradient"], {"x": x})[0]
    np.testing.assert_array_equal(gradient, [[0, 2, 2, 2, 2, 0]])


# Arithmetic on integers


def test_types_that_the_file_states(plain: Path, tmp_path: Path) -> None:
    path = rounded_as_it_runs(plain, tmp_path / "dynamic.onnx")
    onnx.shape_inference.infer_shapes_path(path, path)
    stated = {value.type.tensor_type.elem_type for value in onnx.load(path).graph.value_info}
    assert onnx.TensorProto.INT32 in stated
    made = ox.instrument(path, tmp_path / "made.onnx")
    np.testing.assert_array_equal(run(made.path)["output"], run(path)["output"])


def test_one_picture_does_not_change_what_is_said_of_another(plain: Path, tmp_path: Path) -> None:
    """The steps are measured on all that a run is given."""
    path = rounded_as_it_runs(plain, tmp_path / "dynamic.onnx")
    made = ox.instrument(path, tmp_path / "made.onnx")
    explainer = ox.Explainer(made.path, device="cpu", threads=1)
    alone = [explainer.explain(IMAGES[i : i + 1]).grid[0] for i in range(3)]
    np.testing.assert_array_equal(explainer.explain(IMAGES).grid, alone)
    assert not np.array_equal(run(path)["output"][:1], run(path, image=IMAGES[:1])["output"])


@pytest.mark.parametrize(
    ("operands", "output", "words"),
    [
        ("q, w, zero", "int32[2, 4] z", "its integers go to Abs; expected a Cast to float32"),
        ("q, w, zero", "int32[2, 4] whole", "its integers whole are an output of the model"),
        ("static, w", "float[2, 4] y", "it takes static of QuantizeLinear; expected Dynamic"),
        ("q, w, zeros", "float[2, 4] y", r"the zero point of q has shape \[2\]; expected one"),
    ],
)
def test_integers_that_are_refused(operands: str, output: str, words: str) -> None:
    proto = onnx.parser.parse_model(
        f"""
        <ir_version: 10, opset_import: ["" : 17]>
        g (float[2, 6] x, uint8[6, 4] w) => ({output})
        <float scale = {{0.5}}, uint8[2] zeros = {{1, 2}}> {{
            q, step, zero = DynamicQuantizeLinear(x)
            static = QuantizeLinear(x, scale)
            whole = MatMulInteger({operands})
            y = Cast <to = 1> (whole)
            {"z = Abs(whole)" if output.endswith("z") else ""}
        }}
        """
    )
    with pytest.raises(UnsupportedModelError, match=words):
        written_out(proto)


def test_results_that_are_rounded_too_are_refused(plain: Path, tmp_path: Path) -> None:
    path = quantised(plain, tmp_path / "operators.onnx", QuantFormat.QOperator)
    with pytest.raises(UnsupportedModelError, match=r"is (QLinear\w+|com\.microsoft)"):
        ox.instrument(path, tmp_path / "made.onnx")
