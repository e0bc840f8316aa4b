"""Strict choice of the execution provider."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
from conftest import ToyFile

import onnxplain as ox
from onnxplain.runtime import devices

# What this machine lacks is acted out by a stand-in for onnxruntime's session.


class Session:
    """Accepts any provider and, like onnxruntime, drops those that do not load in silence."""

    loadable: tuple[str, ...] = ("CPUExecutionProvider",)
    error: Exception | None = None
    asked: list[Any]

    def __init__(self, path: str, options: Any, providers: list[Any], **_: Any) -> None:
        type(self).asked = providers
        self._providers = [name for name, _ in providers if name in self.loadable]
        if self.error is not None and len(self._providers) < len(providers):
            raise self.error

    def get_providers(self) -> list[str]:
        return self._providers


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Session]]:
    """onnxruntime as built for GPUs, on a machine where only the CPU loads."""
    names = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(Session, "loadable", Session.loadable)
    monkeypatch.setattr(Session, "error", None)
    yield Session


def opened(device: Any, **options: Any) -> str:
    chosen = devices.candidates(device, options or None)
    return devices.open_session(Path("m.onnx"), chosen)[1].name


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="this onnxruntime has CUDA",
)
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tensorrt"])
def test_a_provider_that_is_not_built_in_is_refused(device: str, toy_file: ToyFile) -> None:
    if (
        device == "openvino"
        and "OpenVINOExecutionProvider" in onnxruntime.get_available_providers()
    ):
        pytest.skip("this onnxruntime has OpenVINO")
    with pytest.raises(ox.DeviceError, match=f"device '{device}'.* has no .*; install "):
        ox.Explainer(toy_file(), device=device)


@pytest.mark.parametrize(
    "device", ["gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "", [], ["Nothing"], [("a",)], 5]
)
def test_unknown_devices(device: Any, toy_file: ToyFile) -> None:
    with pytest.raises(ox.DeviceError):
        ox.Explainer(toy_file(), device=device)


def test_provider_options_need_one_provider(toy_file: ToyFile) -> None:
    for device in ("auto", ["CPUExecutionProvider"]):
        with pytest.raises(ox.DeviceError, match="options"):
            ox.Explainer(toy_file(), device=device, provider_options={"a": 1})


def test_an_explicit_list(toy_file: ToyFile) -> None:
    assert ox.Explainer(toy_file(), device=["CPUExecutionProvider"]).device == "cpu"
    assert ox.Explainer(toy_file(), device=[("CPUExecutionProvider", {})]).device == "cpu"


def test_auto_reports_what_it_took(gpu_build: type[Session]) -> None:
    assert opened("auto") == "cpu"
    gpu_build.loadable = ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert opened("auto") == "cuda:0"


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "tensorrt", ["CUDAExecutionProvider"]])
def test_no_silent_fallback(device: Any, gpu_build: type[Session]) -> None:
    with pytest.raises(ox.DeviceError, match=r"not be loaded: .*missing.*; install the NVIDIA"):
        opened(device)
    gpu_build.error = RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 100")
    with pytest.raises(ox.DeviceError, match=r"cannot run m.onnx: CUDA failure 100"):
        opened(device)


def test_a_device_by_number_and_with_options(gpu_build: type[Session]) -> None:
    gpu_build.loadable = ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert opened("cuda:1", arena_extend_strategy="kSameAsRequested") == "cuda:1"
    assert gpu_build.asked[0] == (
        "CUDAExecutionProvider",
        {"arena_extend_strategy": "kSameAsRequested", "device_id": 1, "use_tf32": 0},
    )
    assert opened("cuda", device_id=2) == "cuda:2"
    assert opened([("CUDAExecutionProvider", {"device_id": 3})]) == "cuda:3"


def test_cuda_computes_in_full_float32_unless_asked_otherwise(gpu_build: type[Session]) -> None:
    gpu_build.loadable = (
        "TensorrtExecutionProvider",
        "CUDAExecutionProvider",
        "CPUExecutionProvider",
    )
    opened("cuda")
    assert gpu_build.asked[0] == ("CUDAExecutionProvider", {"device_id": 0, "use_tf32": 0})
    opened("cuda", use_tf32=1)
    assert gpu_build.asked[0] == ("CUDAExecutionProvider", {"device_id": 0, "use_tf32": 1})
    opened("tensorrt:1")  # which has no such option
    assert gpu_build.asked == [
        ("TensorrtExecutionProvider", {"device_id": 1}),
        ("CUDAExecutionProvider", {"device_id": 1, "use_tf32": 0}),
        ("CPUExecutionProvider", {}),
    ]
