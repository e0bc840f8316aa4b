"""Every runtime that can run an explained file on this machine, behind one function."""

from __future__ import annotations

import base64
import fcntl
import importlib.util
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

from onnxplain.contract import KEY, Contract
from onnxplain.outputs import heatmap_name, map_name

__all__ = ["BUILD", "NODE", "REFERENCE", "RUNTIMES", "Case", "Outputs", "Runtime"]

Array = NDArray[Any]
Outputs = dict[str, Array]

ROOT = Path(__file__).resolve().parent.parent
NODE = ROOT / "benchmarks" / "node"
CPP = ROOT / "examples" / "cpp"
BUILD = ROOT / "build" / "cpp"


@dataclass(frozen=True, eq=False)
class Case:
    """An explained file and what it is asked.

    Attributes:
        path: The file.
        pictures: uint8 [batch, height, width, 3], of the model's size unless the file takes
            pictures of any size.
        target: A class for each picture; None leaves the input out.
    """

    path: Path
    pictures: NDArray[np.uint8]
    target: Sequence[int] | None = None

    @cached_property
    def contract(self) -> Contract:
        model = onnx.load(self.path, load_external_data=False)
        return Contract.from_json(next(p.value for p in model.metadata_props if p.key == KEY))

    @property
    def outputs(self) -> list[str]:
        """Logits, maps, and heatmaps where the file has them."""
        contract = self.contract
        heatmaps = map(heatmap_name, contract.maps if contract.heatmaps else ())
        return [contract.logits, *map(map_name, contract.maps), *heatmaps]

    @property
    def feeds(self) -> dict[str, Array]:
        spec = self.contract.input
        if spec.layout == "HWC":
            (picture,) = self.pictures
            feeds: dict[str, Array] = {spec.name: picture}
        else:
            scaled = (self.pictures / 255 - np.array(spec.mean)) / np.array(spec.std)
            pixels = scaled.astype(np.float32)
            if spec.layout == "NCHW":
                pixels = pixels.transpose(0, 3, 1, 2)
            feeds = {spec.name: np.ascontiguousarray(pixels)}
        if self.target is not None:
            assert self.contract.target is not None
            feeds[self.contract.target] = np.array(self.target, np.int64)
        return feeds


@dataclass(frozen=True)
class Runtime:
    """One of them.

    Attributes:
        missing: What this machine lacks for it; empty if nothing.
        version: Its version.
        run: The case's outputs by name; the C++ examples print no heatmaps.
    """

    missing: Callable[[], str]
    version: Callable[[], str]
    run: Callable[[Case], Outputs]


def _onnxruntime(case: Case) -> Outputs:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = onnxruntime.InferenceSession(case.path, options, providers=["CPUExecutionProvider"])
    return dict(zip(case.outputs, session.run(case.outputs, case.feeds), strict=True))


def _openvino(case: Case) -> Outputs:
    import openvino
    from openvino import opset13

    core = openvino.Core()
    model = core.read_model(case.path)
    for name in case.feeds:  # an input with a default has been read as a constant
        for node in model.get_ordered_ops():
            if node.get_friendly_name() == name and node.get_type_name() == "Constant":
                given = opset13.parameter([-1], np.int64, name=name)
                given.output(0).set_names({name})
                node.output(0).replace(given.output(0))
                model.add_parameters([given])
                model.validate_nodes_and_infer_types()
    # Where the processor has bfloat16, OpenVINO computes in it unless told not to.
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    found = core.compile_model(model, "CPU", settings)(case.feeds)
    return {name: found[name] for name in case.outputs}


def _openvino_missing() -> str:
    return "" if importlib.util.find_spec("openvino") else "needs the Python package openvino"


def _openvino_version() -> str:
    import openvino

    return str(openvino.__version__).partition("-")[0]


def _reference(case: Case) -> Outputs:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(case.path))
    with np.errstate(over="ignore"):  # of its Sigmoid
        found = evaluator.run(case.outputs, case.feeds)
    return dict(zip(case.outputs, found, strict=True))


def _opencv(case: Case) -> Outputs:
    model = onnx.load(case.path)
    feeds = case.feeds
    for default in [i for i in model.graph.initializer if i.name in feeds]:
        model.graph.initializer.remove(default)  # or else OpenCV knows no input of that name
    network = cv2.dnn.readNetFromONNX(np.frombuffer(model.SerializeToString(), np.uint8))
    for name, array in feeds.items():
        network.setInput(array, name)
    names = network.getUnconnectedOutLayersNames()  # some of them it cannot
    found = dict(zip(names, network.forward(names), strict=True))
    return {name: found[name] for name in case.outputs}


def _opencv_missing() -> str:
    return "" if cv2.__version__ >= "5" else f"needs OpenCV 5, this is {cv2.__version__}"


def _node_missing() -> str:
    if not shutil.which("node"):
        return "needs node"
    installed = (NODE / "node_modules" / "onnxruntime-node").is_dir()
    return "" if installed else "needs `npm ci --ignore-scripts` in benchmarks/node"


def _node(case: Case) -> Outputs:
    encoded = {
        name: {
            "type": str(array.dtype),
            "dims": array.shape,
            "data": base64.b64encode(array.tobytes()).decode(),
        }
        for name, array in case.feeds.items()
    }
    request = json.dumps({"path": str(case.path), "feeds": encoded})
    outputs = _run(["node", NODE / "run.mjs"], given=request)
    return {
        name: np.frombuffer(base64.b64decode(t["data"]), t["type"]).reshape(t["dims"])
        for name, t in json.loads(outputs)["outputs"].items()
        if name in case.outputs
    }


def _node_version() -> str:
    package = NODE / "node_modules" / "onnxruntime-node" / "package.json"
    return str(json.loads(package.read_text(encoding="utf-8"))["version"])


@cache
def _examples() -> Path | str:
    """The folder of the built C++ examples; or why there is none."""
    for tool in ("cmake", "c++"):
        if not shutil.which(tool):
            return f"needs {tool}"
    options = []
    if spec := importlib.util.find_spec("openvino"):
        options.append(f"-DOpenVINO_DIR={Path(str(spec.origin)).parent / 'cmake'}")
    for library in (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"):
        options.append(f"-DONNXRUNTIME_LIBRARY={library}")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests that run side by side build it once
        try:
            _run(["cmake", "-S", CPP, "-B", BUILD, *options])
        except RuntimeError as error:
            if "neither OpenVINO" in str(error):
                return "needs OpenVINO or onnxruntime's C++ headers (examples/cpp/README.md)"
            raise
        _run(["cmake", "--build", BUILD])
    return BUILD


def _example(runtime: str, needs: str) -> Runtime:
    program = BUILD / f"explain_{runtime}"

    def missing() -> str:
        folder = _examples()
        if isinstance(folder, str):
            return folder
        return "" if program.is_file() else f"needs {needs}"

    def run(case: Case) -> Outputs:
        each = [_explain(program, case, i) for i in range(len(case.pictures))]
        return {name: np.concatenate([one[name] for one in each]) for name in each[0]}

    def version() -> str:
        return _run([program, "--version"]).split()[1].partition("-")[0]

    return Runtime(missing, version, run)


def _explain(program: Path, case: Case, number: int) -> Outputs:
    """What the example prints of one picture."""
    contract = case.contract
    with tempfile.TemporaryDirectory() as folder:
        picture = Path(folder) / "picture.ppm"
        Image.fromarray(case.pictures[number]).save(picture)
        words = [program, case.path, picture, "--top", contract.classes]
        words += [word for method in contract.maps for word in ("--method", method)]
        words += [] if case.target is None else ["--target", case.target[number]]
        lines = iter(_run(words).splitlines())
    next(lines)  # "share  logit  class"
    logits = np.zeros((1, contract.classes), np.float32)
    for _ in range(contract.classes):
        _, logit, index, *_ = next(lines).split(maxsplit=3)
        logits[0, int(index)] = float(logit)
    outputs: Outputs = {contract.logits: logits}
    for line in lines:  # "map.gradcam, 14 rows of 14"
        title, rows = line.split(", ")[0], int(line.split()[1])
        outputs[title] = np.array([[next(lines).split() for _ in range(rows)]], np.float32)
    return outputs


def _run(words: Sequence[Any], given: str | None = None) -> str:
    done = subprocess.run(list(map(str, words)), input=given, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


REFERENCE = Runtime(lambda: "", lambda: str(onnxruntime.__version__), _onnxruntime)
"""onnxruntime from Python."""

RUNTIMES: Mapping[str, Runtime] = {
    "onnxruntime-node": Runtime(_node_missing, _node_version, _node),
    "OpenVINO, Python": Runtime(_openvino_missing, _openvino_version, _openvino),
    "OpenVINO, C++": _example("openvino", "OpenVINO"),
    "onnxruntime, C++": _example(
        "onnxruntime", "onnxruntime's C++ headers (examples/cpp/README.md)"
    ),
    "onnx's reference evaluator": Runtime(lambda: "", lambda: str(onnx.__version__), _reference),
    "OpenCV dnn": Runtime(_opencv_missing, lambda: str(cv2.__version__), _opencv),
}
"""The others."""
