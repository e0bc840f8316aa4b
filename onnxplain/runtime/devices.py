"""Which execution provider runs a model. What was asked for is what runs, or an error says why."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxplain.errors import DeviceError, MissingDependencyError, ModelError, OnnxplainError

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingDependencyError(
        f"onnxruntime cannot be imported ({error}); install onnxplain[cpu] or onnxplain[gpu]"
    ) from error

__all__ = ["Device", "candidates", "open_session"]

Provider = str | tuple[str, Mapping[str, Any]]

_CPU = "CPUExecutionProvider"
_PROVIDERS = {
    "cpu": _CPU,
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
_INSTALL = {
    "cuda": "install onnxplain[gpu] in an environment without onnxruntime",
    "tensorrt": "install onnxplain[gpu] in an environment without onnxruntime, and TensorRT",
    "openvino": "install onnxruntime-openvino in place of onnxruntime",
}
# TensorRT is left out: it spends minutes on building an engine, which nobody asked for.
_AUTO = ("cuda", "openvino", "cpu")
_LIBRARIES = {
    "CUDAExecutionProvider": "install the NVIDIA driver and onnxruntime-gpu[cuda,cudnn]",
    "TensorrtExecutionProvider": "install the NVIDIA driver, onnxruntime-gpu[cuda,cudnn], TensorRT",
    "OpenVINOExecutionProvider": "install openvino",
}
# By default CUDA rounds the factors of products to 11 bits, and maps were not those of the CPU.
_PRECISE = {"use_tf32": 0}
_WARNINGS = 2  # onnxruntime's default
_FATAL_ONLY = 4  # every failure comes back as an exception; onnxruntime need not print it as well


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device and the providers that make it, in onnxruntime's order of preference."""

    name: str
    required: tuple[str, ...]
    providers: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def candidates(
    device: str | Sequence[Provider], options: Mapping[str, Any] | None = None
) -> list[Device]:
    """The devices to try, best first; one unless `device` is "auto".

    Args:
        device: "auto", "cpu", "cuda", "cuda:1", "tensorrt", "openvino", or onnxruntime's own list
            of provider names or (name, options) pairs.
        options: Options for the first provider of the device; not with "auto" or a list.

    Raises:
        DeviceError: The name is unknown, or onnxruntime was built without the provider.
    """
    available = ort.get_available_providers()
    if not isinstance(device, str):
        return [_listed(device, options, available)]
    if device == "auto":
        if options:
            raise DeviceError('provider_options need a device by name, not "auto"')
        return [_named(name, {}) for name in _AUTO if _PROVIDERS[name] in available]
    found = _named(device, dict(options or {}))
    if found.required[0] not in available:
        kind = device.partition(":")[0]
        raise DeviceError(
            f"device {device!r}: this onnxruntime {ort.__version__} has no {found.required[0]} "
            f"(it has {', '.join(available)}); {_INSTALL[kind]}"
        )
    return [found]


def _named(device: str, options: dict[str, Any]) -> Device:
    kind, colon, number = device.partition(":")
    indexed = kind in ("cuda", "tensorrt")
    if kind not in _PROVIDERS or (colon and not (indexed and number.isdecimal())):
        raise DeviceError(
            f"unknown device {device!r}; one of auto, {', '.join(_PROVIDERS)}, cuda:N, tensorrt:N, "
            "or a list of onnxruntime providers"
        )
    index = {"device_id": int(number or options.get("device_id", 0))} if indexed else {}
    precise = _PRECISE if kind == "cuda" else {}
    providers = [(_PROVIDERS[kind], {**precise, **options, **index})]
    if kind == "tensorrt":  # it leaves the operators it does not know to CUDA
        providers.append((_PROVIDERS["cuda"], {**_PRECISE, **index}))
    if kind != "cpu":
        providers.append((_CPU, {}))
    name = f"{kind}:{index['device_id']}" if indexed else kind
    return Device(name=name, required=(_PROVIDERS[kind],), providers=providers)


def _listed(
    device: Sequence[Provider], options: Mapping[str, Any] | None, available: list[str]
) -> Device:
    if options:
        raise DeviceError("give a provider's options in the list: [(name, options), ...]")
    try:
        providers = [(p, {}) if isinstance(p, str) else (str(p[0]), dict(p[1])) for p in device]
    except (TypeError, ValueError, IndexError):
        raise DeviceError(f"{device!r} is not a list of provider names or pairs") from None
    if not providers:
        raise DeviceError("the list of providers is empty")
    for provider, _ in providers:
        if provider not in available:
            raise DeviceError(
                f"this onnxruntime {ort.__version__} has no {provider}; "
                f"it has {', '.join(available)}"
            )
    first, its_options = providers[0]
    kind = next((k for k, p in _PROVIDERS.items() if p == first), None)
    if kind in ("cuda", "tensorrt"):
        name = f"{kind}:{its_options.get('device_id', 0)}"
    else:
        name = kind or first.removesuffix("ExecutionProvider").lower()
    return Device(name=name, required=tuple(p for p, _ in providers), providers=providers)


def open_session(
    path: Path, devices: Sequence[Device], *, threads: int | None = None
) -> tuple[ort.InferenceSession, Device]:
    """Opens a model on the first of the devices that really loads.

    Args:
        path: An ONNX file.
        devices: From `candidates`.
        threads: Threads within an operator; None leaves the choice to onnxruntime.

    Raises:
        DeviceError: None of the devices could be had.
        ModelError: The file is not a model that onnxruntime can run.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    if threads is not None:
        options.intra_op_num_threads = threads
    failure: OnnxplainError | None = None
    for device in devices:
        try:
            with _quiet(device):
                if _PROVIDERS["cuda"] in dict(device.providers) and hasattr(ort, "preload_dlls"):
                    ort.preload_dlls()  # finds CUDA and cuDNN where pip has put them
                session = ort.InferenceSession(
                    os.fspath(path), options, providers=device.providers, enable_fallback=0
                )
        except Exception as error:
            failure = _failure(path, device, error)
            continue
        missing = [p for p in device.required if p not in session.get_providers()]
        if not missing:
            return session, device
        failure = DeviceError(
            f"device {device.name!r}: {missing[0]} could not be loaded: {_why(missing[0])}; "
            + _LIBRARIES.get(missing[0], "install the libraries that it needs")
        )
    raise failure or DeviceError("no device to run on")


@contextlib.contextmanager
def _quiet(device: Device) -> Iterator[None]:
    """Keeps what onnxruntime prints about a provider that fails to load off the terminal."""
    if device.name == "cpu":
        yield
        return
    ort.set_default_logger_severity(_FATAL_ONLY)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        ort.set_default_logger_severity(_WARNINGS)


def _why(provider: str) -> str:
    """What keeps a provider from loading, as the dynamic linker says it."""
    name = provider.removesuffix("ExecutionProvider").lower()
    library = Path(ort.__file__).parent / "capi" / f"libonnxruntime_providers_{name}.so"
    try:
        ctypes.CDLL(os.fspath(library))
    except OSError as error:
        if "cannot open shared object file" in str(error):
            return f"{Path(str(error).partition(':')[0]).name} is missing"
    return "its libraries or the driver are missing or of another version"


_MODEL_FAULTS = ("InvalidProtobuf", "InvalidGraph", "InvalidArgument", "NoSuchFile", "NoModel")


def _failure(path: Path, device: Device, error: Exception) -> OnnxplainError:
    """onnxruntime's exception as one of ours, in one line."""
    reason = " ".join(str(error).split())
    reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", reason)
    reason = re.sub(r"^\S+\.(?:cc|h):\d+ [^)]*\)\s*", "", reason)  # where in its C++ it failed
    reason = reason.removeprefix(f"Load model from {path} failed:")
    missing = re.search(r'External data path does not exist: "(.+?)"', reason)
    if missing:
        return ModelError(
            f"{path}: its weights are missing; expected the file {Path(missing[1]).name} beside it"
        )
    if "External initializer" in reason:
        return ModelError(f"{path}: its external weight file is truncated or of another model")
    if type(error).__name__ == "InvalidProtobuf":
        return ModelError(f"{path}: not an ONNX file, or a truncated one")
    if device.name != "cpu" and type(error).__name__ not in _MODEL_FAULTS:
        return DeviceError(f"device {device.name!r} cannot run {path}: {reason}")
    return ModelError(f"{path}: onnxruntime cannot load it ({reason})")
