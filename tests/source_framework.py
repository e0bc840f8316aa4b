"""Explained files against the torch model that they were exported from.

torch's side is eager: hooks catch the attention, autograd gives its gradient, and the maps are made
of these by the NumPy methods. So nothing on that side has seen a graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import onnxplain as ox
from onnxplain.contract import Contract
from onnxplain.export.torch_features import torch_features
from onnxplain.export.torch_taps import torch_taps
from onnxplain.export.verify import relative_difference, seek
from onnxplain.graphs import Report
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    GRAPH_KINDS,
    POOLING,
    TOKEN_WEIGHTS,
    attention_gradient_name,
    attention_name,
    map_name,
)
from onnxplain.runtime.dispatch import compute

__all__ = [
    "BATCHES",
    "COMPARED",
    "TOLERANCE",
    "UNCHANGED",
    "Output",
    "compare",
    "compare_with",
    "lively",
    "of_torch",
    "run",
    "torchscript",
    "with_dynamo",
]

BATCHES = (1, 3)
# Single precision on both sides, relative to the largest value. Most are within 2e-6; a sharp
# softmax, and heads weighed by sums of gradients that cancel, lose a digit.
TOLERANCE = 1e-4
# What the plain file computes, it computes still; onnxruntime may fuse it otherwise.
UNCHANGED = 1e-6
# Relevance is ill-conditioned in single precision: the tests of relevance compare in double.
COMPARED = GRAPH_KINDS["gradient"]

Arrays = dict[str, np.ndarray]
Size = tuple[int, int]
Source = Callable[[np.ndarray, np.ndarray, Arrays, Contract], Arrays]


def lively(module: Any) -> Any:
    """In evaluation mode, with random values everywhere: fresh biases, scales, tokens and
    statistics hide errors."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in module.eval().named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 2 and name.endswith("weight"):
                tensor.copy_(noise * tensor.shape[1] ** -0.5)
            else:
                tensor.add_((0.1 if tensor.ndim == 1 else 0.3) * noise)
        for name, tensor in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.add_(noise.abs() if name.endswith("var") else 0.3 * noise)
    return module


class Output(nn.Module):
    """A model whose outputs are what its own output has under these names; one is itself."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.eval()  # an exporter that finds it in training mode puts the model into it

    def forward(self, images: Tensor) -> Any:
        output = self.model(images)
        tensors = tuple(getattr(output, name) for name in self.names)
        return tensors if len(tensors) > 1 else tensors[0]


def torchscript(
    module: nn.Module,
    path: Path,
    opset: int,
    size: Size,
    outputs: Sequence[str] = ("scores",),
    *,
    channels_last: bool = False,
    open_sizes: bool = False,
) -> Path:
    """Exports by torch's older exporter, which records a TorchScript graph. With `open_sizes` the
    input states no size at all, which is how optimum exports."""
    axes = {name: {0: "n"} for name in ("image", *outputs)}
    if open_sizes:
        axes["image"] = dict(enumerate(("n", "channels", "height", "width")))
    options = {"dynamo": False, "opset_version": opset, "dynamic_axes": axes}
    return _export(module, path, _shape(size, channels_last), outputs, **options)


def with_dynamo(
    module: nn.Module,
    path: Path,
    opset: int,
    size: Size,
    outputs: Sequence[str] = ("scores",),
    *,
    channels_last: bool = False,
) -> Path:
    """Exports by torch's current exporter."""
    return _export(
        module,
        path,
        _shape(size, channels_last),
        outputs,
        dynamo=True,
        opset_version=opset,
        dynamic_shapes=({0: torch.export.Dim("n")},),
        external_data=False,
        verbose=False,
    )


def _shape(size: Size, channels_last: bool) -> tuple[int, ...]:
    return (2, *size, 3) if channels_last else (2, 3, *size)


def _export(
    module: nn.Module,
    path: Path,
    shape: tuple[int, ...],
    outputs: Sequence[str],
    **options: Any,
) -> Path:
    logging.disable(logging.ERROR)  # both exporters tell of their own internals
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                (torch.zeros(shape),),
                str(path),
                input_names=["image"],
                output_names=list(outputs),
                **options,
            )
    finally:
        logging.disable(logging.NOTSET)
    return path


def compare(module: nn.Module, plain: Path, **given: Any) -> Report:
    """Explains the file and compares attention, gradients, logits and maps, in every batch size.

    Args:
        module: What the file was exported from, in evaluation mode.
        plain: The file. The explained one is written beside it.
        given: Further arguments of `instrument`.

    Returns:
        The report of the explained file.
    """
    module.requires_grad_(False)
    return compare_with(functools.partial(of_torch, module), plain, **given)


def compare_with(source: Source, plain: Path, *, runs: bool = True, **given: Any) -> Report:
    """As `compare`, with any framework.

    Args:
        source: From images, targets, what the explained file gave and its contract to what the
            framework has for the outputs of that file, maps left out.
        plain: The file, with the input `image`. The explained one is written beside it.
        runs: Whether onnxruntime can compute the file as it is; else its outputs are the source's
            alone.
        given: Further arguments of `instrument`.
    """
    path = plain.with_name("explained.onnx")
    report = ox.instrument(plain, path, methods=COMPARED, outputs="both", **given)
    contract = report.contract
    bare = dataclasses.replace(contract, maps={})  # made of the arrays, not fetched
    for batch in BATCHES:
        generator = torch.Generator().manual_seed(batch)
        images = torch.randn(batch, 3, *contract.input.size, generator=generator).numpy()
        target = (np.arange(batch) * 3 + batch) % contract.classes
        pictures = contract.input.fed(images)
        found = run(path, {contract.input.name: pictures, "target": target})
        own = run(plain, {contract.input.name: pictures}) if runs else {}
        arrays = source(images, target, found, contract)
        maps = {map_name(m): compute(m, arrays, bare, {}) for m in contract.methods}
        expected = {**arrays, **maps}
        assert found.keys() == expected.keys() | own.keys()
        for name, array in {**own, **expected}.items():
            tolerance = TOLERANCE if name in expected else UNCHANGED
            difference = relative_difference(found[name], array)
            assert difference <= tolerance, f"{name} at batch {batch}: {difference:.2g}"
    return report


def run(path: Path, feed: Arrays) -> Arrays:
    """Every output by name, computed by onnxruntime on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # it warns that `target` has a default, which is meant
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def of_torch(
    module: nn.Module, images: np.ndarray, target: np.ndarray, found: Arrays, contract: Contract
) -> Arrays:
    """What torch has for the outputs of the explained file, by hooks and autograd."""
    pixels, classes = torch.from_numpy(images), torch.from_numpy(target)
    taps = torch_taps(module, pixels, classes, [layer.heads for layer in contract.layers])
    tensors: dict[str, Any] = {contract.logits: taps.logits}
    for i, attention in enumerate(taps.attention):
        tensors[attention_name(i)] = attention
        tensors[attention_gradient_name(i)] = taps.attention_gradient[i]
    for name, value in (
        (FEATURES, taps.features),
        (FEATURES_GRADIENT, taps.features_gradient),
        (POOLING, taps.pooling),
    ):
        if value is not None:
            tensors[name] = value if len(value) == len(images) else value.transpose(0, 1)
    arrays = {name: tensor.numpy().reshape(found[name].shape) for name, tensor in tensors.items()}
    if TOKEN_WEIGHTS in found:
        every = (1, contract.tokens.count)
        maps = [
            (v.numpy(), g.numpy()) for v, g in torch_features(module, pixels, classes, every).maps
        ]
        arrays |= seek(found, maps, contract)
    return arrays
