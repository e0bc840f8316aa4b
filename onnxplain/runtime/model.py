"""Explained models on disk: one file or a bundle, its contract, and the sessions that run it."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.contract import BUNDLE_FILE, KEY, Contract
from onnxplain.errors import ContractError, InputError, ModelError
from onnxplain.outputs import GRAPH_KINDS, depends_on_class, heatmap_name, map_name
from onnxplain.runtime.devices import Device, candidates, open_session
from onnxplain.runtime.targets import Question

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

__all__ = ["Model", "NotInstrumentedError"]

_LAYOUTS = ("NCHW", "NHWC", "HWC")
_ORDINARY = 1e6  # normalised pixel values beyond it may overflow in a sound model


class NotInstrumentedError(ContractError):
    """A sound ONNX file that has no contract."""


class _Graph:
    """One ONNX file, opened when it is first run."""

    def __init__(self, path: Path, outputs: Collection[str] = ()) -> None:
        self.path = path
        self.outputs = set(outputs)
        self.session: InferenceSession | None = None
        self.takes: set[str] = set()
        self.requires: set[str] = set()
        self.shapes: dict[str, list[int | str | None]] = {}
        self.types: dict[str, str] = {}

    def open(self, devices: Sequence[Device], threads: int | None) -> Device:
        self.session, device = open_session(self.path, devices, threads=threads)
        inputs = self.session.get_inputs()
        optional = self.session.get_overridable_initializers()
        self.requires = {value.name for value in inputs}
        self.takes = self.requires | {value.name for value in optional}
        self.shapes = {value.name: list(value.shape) for value in (*inputs, *optional)}
        self.types = {value.name: value.type for value in inputs}
        return device

    def check(self, contract: Contract) -> None:
        """Refuses a graph that does not have what the contract says it has."""
        assert self.session is not None
        present = {value.name for value in self.session.get_outputs()}
        missing = sorted({contract.logits, *self.outputs} - present)
        if missing:
            raise ContractError(
                f"{self.path}: the contract names {_some(missing)}, which the graph does not have; "
                "make the file again"
            )
        if contract.input.name not in self.takes:
            raise ContractError(
                f"{self.path}: the contract names the input {contract.input.name!r}, the graph has "
                f"{_some(sorted(self.takes))}; make the file again"
            )
        asked = [contract.target, *([contract.class_weights] if contract.class_weights else [])]
        for name in asked if any(map(depends_on_class, self.outputs)) else ():
            if name not in self.takes:
                raise ContractError(
                    f"{self.path}: the contract names the input {name!r}, the graph has "
                    f"{_some(sorted(self.takes))}; make the file again"
                )
        self._check_shapes(contract)

    def _check_shapes(self, contract: Contract) -> None:
        names = [contract.input.name, contract.target, contract.class_weights]
        if len(set(names) - {None}) < len(names) - names.count(None):
            raise ContractError(
                f"{self.path}: the contract gives one name to two inputs; make the file again"
            )
        several = [contract.targets] if contract.targets > 1 else []
        expected: dict[str | None, list[int | None]] = {
            contract.input.name: [3 if axis == "C" else None for axis in contract.input.layout],
            contract.target: [None, *several],
            contract.class_weights: [None, *several, contract.classes],
        }
        for name, shape in self.shapes.items():
            sizes = expected.get(name)
            if sizes is None:
                continue
            if len(sizes) != len(shape) or any(
                isinstance(size, int) and wanted is not None and size != wanted
                for size, wanted in zip(shape, sizes, strict=True)
            ):
                raise ContractError(
                    f"{self.path}: the input {name!r} has shape {shape}, the contract says "
                    f"{[size or 'any' for size in sizes]}; make the file again"
                )


class Model:
    """An explained ONNX file or bundle folder, ready to run.

    Args:
        path: The file or folder.
        device, threads, provider_options: See `Explainer`.

    Raises:
        ModelError: The file is missing, empty, not ONNX, or its weights are missing.
        ContractError: It has no contract, one of a newer format, or one that its graph breaks.
        DeviceError: The device cannot be had.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | Sequence[Any] = "auto",
        threads: int | None = None,
        provider_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        self._threads = threads
        self._lock = threading.Lock()
        devices = candidates(device, provider_options)
        if not self.path.exists():
            raise ModelError(f"{self.path}: no such file or folder")
        if self.path.is_dir():
            self.contract, self._graphs = _read_bundle(self.path)
            self._devices = devices
            # On the CPU there is no doubt about the device, so nothing need be loaded yet.
            if [d.name for d in devices] != ["cpu"]:
                self._devices = [self._open(self._graphs[0])]
        else:
            _refuse_empty(self.path)
            graph = _Graph(self.path)
            self._devices = [graph.open(devices, threads)]
            self.contract = _contract_of(graph)
            graph.outputs = _declared(self.contract)
            graph.check(self.contract)
            self._graphs = [graph]

    @property
    def device(self) -> str:
        return self._devices[0].name

    @property
    def files(self) -> list[Path]:
        """The file of each graph, cheapest first."""
        return [graph.path for graph in self._graphs]

    @property
    def outputs(self) -> set[str]:
        """Names of every output that some graph has, besides the logits."""
        return set().union(*(graph.outputs for graph in self._graphs))

    def run(
        self,
        images: Sequence[NDArray[Any]] | NDArray[Any],
        asked: Question,
        outputs: Iterable[str],
        *,
        finite: bool = True,
    ) -> dict[str, NDArray[Any]]:
        """Runs the cheapest graph that has the outputs, or those that have them together.

        Args:
            images: B arrays: float32 [3, H, W], normalised and all of one size, whether channels
                are first or last in the graph; or uint8 [H, W, 3] where it does the preprocessing;
                or one array of them.
            asked: What to explain about them.
            outputs: Names from `outputs`; the logits always come along.
            finite: Whether logits of which none are finite are an error.

        Returns:
            Arrays by name, first axis B.

        Raises:
            InputError: No graph has one of the outputs.
            ModelError: onnxruntime failed while running, or no logits are finite.
        """
        values: dict[str, NDArray[Any]] = {}
        for graph, names in self._plan(set(outputs)):
            with self._lock:
                if graph.session is None:
                    self._open(graph)
            values.update(self._run_in_batches(graph, images, asked, names))
        shape = values[self.contract.logits].shape
        if shape != (len(images), self.contract.classes):
            raise ContractError(
                f"{self.path}: {self.contract.logits} has shape {shape}, the contract says "
                f"{len(images)} images and {self.contract.classes} classes; make the file again"
            )
        sound = not finite or np.isfinite(values[self.contract.logits]).all(axis=-1).any()
        if not sound and any(np.abs(image).max() < _ORDINARY for image in images):
            raise ModelError(
                f"{self.path}: the logits are not finite; a weight of the model, or mean and std "
                "in its contract, must be damaged"
            )
        return values

    def _plan(self, wanted: set[str]) -> list[tuple[_Graph, list[str]]]:
        """The cheapest graph with all outputs; where none has them, several that do together."""
        plan = []
        while True:
            most = max(len(wanted & graph.outputs) for graph in self._graphs)
            graph = next(g for g in self._graphs if len(wanted & g.outputs) == most)
            if wanted and not most:
                raise InputError(f"{self.path} has no graph with {_some(sorted(wanted))}")
            plan.append((graph, [self.contract.logits, *sorted(wanted & graph.outputs)]))
            wanted = wanted - graph.outputs
            if not wanted:
                return plan

    def _run_in_batches(
        self,
        graph: _Graph,
        images: Sequence[NDArray[Any]] | NDArray[Any],
        asked: Question,
        names: list[str],
    ) -> dict[str, NDArray[Any]]:
        """Runs a graph whose batch may be fixed on any number of images."""
        size = self.contract.input.batch or len(images)
        parts = []
        questions = asked.feeds(self.contract)
        for start in range(0, len(images), size):
            # A fixed batch is filled up with copies of the last image.
            chosen = [min(start + i, len(images) - 1) for i in range(size)]
            feeds = {name: array[chosen] for name, array in questions.items()}
            if self.contract.input.layout == "HWC":
                pixels = images[start]
            elif isinstance(images, np.ndarray) and size == len(images):
                pixels = images
            else:
                pixels = np.stack([images[i] for i in chosen])
            pixels = self.contract.input.fed(pixels)
            if graph.types.get(self.contract.input.name) == "tensor(float16)":
                pixels = pixels.astype(np.float16)
            feeds[self.contract.input.name] = pixels
            values = [_at_least_float32(value) for value in self._run(graph, feeds, names)]
            parts.append([value[: len(images) - start] for value in values])
        whole = (p[0] if len(p) == 1 else np.concatenate(p) for p in zip(*parts, strict=True))
        return dict(zip(names, whole, strict=True))

    def _run(
        self, graph: _Graph, feeds: Mapping[str, NDArray[Any]], names: list[str]
    ) -> list[NDArray[Any]]:
        assert graph.session is not None
        target = feeds.get(self.contract.target or "")
        taken = {name: array for name, array in feeds.items() if name in graph.takes}
        if target is not None and self.contract.target not in graph.requires and (target < 0).all():
            taken.pop(str(self.contract.target), None)  # the default
        weights = self.contract.class_weights
        if weights in graph.requires and weights not in taken:
            assert target is not None
            zeros = np.zeros((*target.shape, self.contract.classes), np.float32)
            taken[str(weights)] = zeros  # so the target is explained
        try:
            return list(graph.session.run(names, taken))
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ModelError(f"{graph.path}: onnxruntime failed to run it ({reason})") from None

    def _open(self, graph: _Graph) -> Device:
        device = graph.open(self._devices, self._threads)
        graph.check(self.contract)
        return device


def _refuse_empty(path: Path) -> None:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    if size == 0:
        raise ModelError(f"{path}: the file is empty")


def _refuse_layout(contract: Contract, path: Path) -> None:
    if contract.input.layout not in _LAYOUTS:
        raise ContractError(
            f"{path}: image layout {contract.input.layout!r}, this version of onnxplain runs "
            f"{', '.join(_LAYOUTS)}"
        )


def _contract_of(graph: _Graph) -> Contract:
    assert graph.session is not None
    text = graph.session.get_modelmeta().custom_metadata_map.get(KEY)
    if text is None:
        raise NotInstrumentedError(
            f"{graph.path}: ONNX, but not made by onnxplain; run: onnxplain instrument "
            f"{graph.path} -o explained.onnx"
        )
    contract = Contract.from_json(text, where=str(graph.path))
    _refuse_layout(contract, graph.path)
    return contract


def _read_bundle(folder: Path) -> tuple[Contract, list[_Graph]]:
    """The contract of a bundle and its graphs, cheapest first."""
    document = folder / BUNDLE_FILE
    contract = Contract.of_bundle(folder)
    _refuse_layout(contract, document)
    if not isinstance(contract.graphs, dict) or not contract.graphs:
        raise ContractError(f"{document}: names no graphs; make the bundle again")
    unknown = sorted(set(contract.graphs) - set(GRAPH_KINDS))
    if unknown:
        raise ContractError(f"{document}: graph kind {unknown[0]!r} is unknown; upgrade onnxplain")
    graphs = []
    for kind, served in GRAPH_KINDS.items():
        if kind not in contract.graphs:
            continue
        path = folder / Path(contract.graphs[kind]).name
        if not path.is_file():
            raise ModelError(f"{path}: no such file, though {document} names it")
        _refuse_empty(path)
        outputs = {o for method in served for o in contract.methods.get(method, ())}
        outputs |= set(_map_names(contract, served))
        graphs.append(_Graph(path, outputs))
    return contract, graphs


def _declared(contract: Contract) -> set[str]:
    names = {name for outputs in contract.methods.values() for name in outputs}
    for layer in contract.layers:
        own = (layer.attention, layer.gradient, layer.relevance, layer.relevance_lrp)
        names.update(name for name in own if name)
    features = (contract.features, contract.features_gradient)
    pixels = (contract.input_relevance, contract.input_relevance_attnlrp)
    names.update(name for name in (*features, *pixels) if name)
    names.update(_map_names(contract, contract.maps))
    return names


def _map_names(contract: Contract, methods: Iterable[str]) -> Iterator[str]:
    for method in methods:
        if method in contract.maps:
            yield map_name(method)
            if contract.heatmaps:
                yield heatmap_name(method)


def _at_least_float32(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
