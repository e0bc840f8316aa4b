"""Runs explained files against torch and measures how far they are apart."""

from __future__ import annotations

import contextlib
import decimal
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
import torch.nn.functional as F

from onnxplain.contract import Contract
from onnxplain.errors import ModelError, VerificationError
from onnxplain.export.plain import inference_form, one_line
from onnxplain.export.torch_features import torch_features
from onnxplain.export.torch_taps import TorchTaps, torch_taps
from onnxplain.graphs.builder import TINY
from onnxplain.graphs.interface import drop_outputs
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    INPUT_RELEVANCE,
    POOLING,
    TOKEN_WEIGHTS,
    attention_gradient_name,
    attention_name,
    heatmap_name,
    map_name,
)

__all__ = ["BATCHES", "TOLERANCE", "Run", "relative_difference", "seek", "torch_runs", "verify"]

BATCHES = (1, 2)
TOLERANCE = 1e-4
# What these names begin with; maps are made of what is compared, or of relevance.
UNCOMPARED = ("attention_relevance", INPUT_RELEVANCE, map_name(""), heatmap_name(""))

_Maps = list[tuple[np.ndarray, np.ndarray]]  # what may be the features, and its gradient
# Feed, file of the expected outputs by name, and where those that torch has no name for are sought.
Run = tuple[dict[str, np.ndarray], Path, _Maps]


def torch_runs(module: torch.nn.Module, contract: Contract, folder: Path) -> list[Run]:
    """What torch computes in batches of 1 and of 2, for `verify` to compare.

    Each batch is run once with normal noise and once with smooth pictures within the range of the
    contract's mean and standard deviation; each image has a target of its own. A file for pictures
    of any size is also run with some that are one position higher and two wider.

    Args:
        module: The model as the user has it; left unchanged, and not needed any more afterwards.
        contract: Tells the input size, the names and the number of layers.
        folder: Takes the arrays: those of a large model would fill the memory.

    Raises:
        VerificationError: Layers that torch does not show.
        OSError: `folder` cannot be written to.
    """
    runs = []
    with _one_torch_thread():
        sizes = (_runs(module, contract.at(size)) for size in _sizes(contract))
        for number, (feed, expected, maps) in enumerate(itertools.chain.from_iterable(sizes)):
            path = folder / f"torch{number}.npz"
            np.savez(path, **expected)  # type: ignore[arg-type]
            runs.append((feed, path, maps))
            del expected  # before the next run makes its own
    return runs


def verify(files: Iterable[Path], contract: Contract, runs: Sequence[Run]) -> dict[str, Any]:
    """Compares the outputs of every file with torch.

    The features of a model without attention layers are compared with the nearest of torch's
    tensors that have their rows and columns, and their gradient with the gradient of that one.

    Relevance (`attention_relevance*`, `input_relevance*`) is run once at each size and not
    compared: it is no derivative, so torch's autograd has no counterpart.

    The difference of a quantity is the largest absolute difference divided by the largest absolute
    value in torch, worst over layers and runs.

    Args:
        files: ONNX files that share `contract`'s names.
        contract: Tells the names.
        runs: From `torch_runs`.

    Returns:
        What goes into the contract: `framework`, `version`, `weights` (what torch's were rounded
        to), `batches`, `sizes` where they are free, `tolerance` and `differences`, quantity ->
        difference rounded up to two digits, so that the last bits of arithmetic do not change the
        file.

    Raises:
        VerificationError: A difference above `TOLERANCE`, or an output that torch does not show.
        ModelError: onnxruntime cannot run a file.
    """
    worst: dict[str, float] = {}
    sizes = [feed[contract.input.name].shape[2:] for feed, _, _ in runs]
    first = [sizes.index(size) for size in dict.fromkeys(sizes)]  # run of each size
    order = [*first, *(i for i in range(len(runs)) if i not in first)]
    for path in files:
        session = _open(path)
        for done, (feed, stored, maps) in enumerate((runs[i] for i in order), 1):
            with np.load(stored) as expected:
                outputs = _run(session, feed, path)
                for name, difference in _differences(outputs, expected, maps, contract):
                    quantity = name.partition(".")[0]
                    worst[quantity] = max(worst.get(quantity, 0.0), difference)
            if done == len(first) and any(
                value.name.startswith(UNCOMPARED) for value in session.get_outputs()
            ):  # It takes most of the time and memory, and nothing is compared.
                session = _open(_without_relevance(path))
    return {
        "framework": "torch",
        "version": torch.__version__,
        "weights": contract.precision,
        "batches": list(BATCHES),
        **({} if contract.input.multiple is None else {"sizes": [*map(list, _sizes(contract))]}),
        "tolerance": TOLERANCE,
        "differences": {quantity: _round_up(value) for quantity, value in worst.items()},
    }


def _differences(
    outputs: dict[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    maps: _Maps,
    contract: Contract,
) -> Iterator[tuple[str, float]]:
    """Each output by name with its relative difference; `expected` is read one at a time."""
    sought = seek(outputs, maps, contract)
    for name, found in outputs.items():
        if name.startswith(UNCOMPARED):
            continue
        if name not in sought and name not in expected:
            raise VerificationError(
                f"torch shows no {name} to compare with; export without verification (verify=False)"
            )
        reference = (sought if name in sought else expected)[name]
        if not np.isfinite(reference).all():
            raise VerificationError(
                f"{name} is not finite in torch: a weight must be NaN, infinite or far too large; "
                "nothing was written"
            )
        difference = relative_difference(found, reference)
        if not difference <= TOLERANCE:  # NaN too
            raise VerificationError(
                f"{name} differs from torch by {difference:.2g} of its largest value, "
                f"allowed is {TOLERANCE:g}; nothing was written"
            )
        yield name, difference


def seek(outputs: dict[str, np.ndarray], maps: _Maps, contract: Contract) -> dict[str, np.ndarray]:
    """What torch has for outputs that it has no name for, by the output's name.

    Args:
        outputs: Of the file, by name. The gradient of a feature map is evened out as in `maps`.
        maps: The last part of a `Run`.
        contract: Of the file.
    """
    sought: dict[str, np.ndarray] = {}
    if TOKEN_WEIGHTS in outputs:
        sought[TOKEN_WEIGHTS] = _nearest(outputs[TOKEN_WEIGHTS], maps)
    if not contract.layers and FEATURES in outputs:
        features, gradient = outputs[FEATURES], outputs[FEATURES_GRADIENT]
        outputs[FEATURES_GRADIENT] = gradient = _levelled(features, gradient)
        sought |= _counterpart(features, gradient, maps)
    return sought


def relative_difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference over the largest absolute expected value (1 if all are zero)."""
    if found.size != expected.size:
        return math.inf
    scale = float(np.abs(expected).max()) or 1.0
    return float(np.abs(found.reshape(expected.shape) - expected).max()) / scale


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """More threads sum in another order on every machine, and stall on a busy one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _sizes(contract: Contract) -> list[tuple[int, int]]:
    """The size of the contract, and another one where sizes are free."""
    (height, width), multiple = contract.input.size, contract.input.multiple
    if multiple is None:
        return [(height, width)]
    return [(height, width), (height + multiple[0], width + 2 * multiple[1])]


def _runs(
    module: torch.nn.Module, contract: Contract
) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray], _Maps]]:
    """Feed, expected outputs, and the maps that those without a name are looked for in."""
    generator = torch.Generator().manual_seed(0)
    with inference_form(module) as frozen:
        for number, batch in enumerate(BATCHES):
            for kind, draw in enumerate((_noise, _pictures)):
                image = draw(batch, contract, generator)
                with torch.inference_mode():
                    prediction = frozen(image).argmax(1)
                # The prediction first, then classes that nothing points to.
                offsets = torch.arange(batch) + 2 * number + kind
                target = (prediction + offsets) % contract.classes
                feed = {contract.input.name: image.numpy()}
                if contract.target is not None:
                    feed[contract.target] = target.numpy()
                if contract.class_weights is not None:  # 0: the target is explained
                    zeros = np.zeros((len(target), contract.classes), np.float32)
                    feed[contract.class_weights] = zeros
                grid = contract.tokens.grid
                if contract.layers:
                    heads = [layer.heads for layer in contract.layers]
                    taps = torch_taps(frozen, image, target, heads)
                    maps = []
                    if contract.readout is not None and contract.readout.kind == "gradient":
                        if contract.tokens.prefix:
                            grid = 1, contract.tokens.count
                        found = torch_features(frozen, image, target, grid)
                        maps = [(v.numpy(), slope.numpy()) for v, slope in found.maps]
                    yield feed, _named(taps, contract), maps
                else:
                    found = torch_features(frozen, image, target, grid)
                    pairs = ((value.numpy(), slope.numpy()) for value, slope in found.maps)
                    maps = [(value, _levelled(value, slope)) for value, slope in pairs]
                    yield feed, {contract.logits: found.logits.numpy()}, maps


def _counterpart(features: np.ndarray, gradient: np.ndarray, maps: _Maps) -> dict[str, np.ndarray]:
    """The feature map of torch that is nearest; of several copies of one, by its gradient too.

    A model may hold the same tensor again as a part of another, with a part of the gradient.
    """

    def distance(pair: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
        apart = max(relative_difference(features, pair[0]), TOLERANCE)
        return apart, relative_difference(gradient, pair[1])

    value, slope = min(maps, key=distance)
    return {FEATURES: value, FEATURES_GRADIENT: slope}


def _nearest(weights: np.ndarray, maps: _Maps) -> np.ndarray:
    """Of the tensors in torch that have all tokens, the weights of those that are nearest."""
    sizes = [np.abs(slope).sum(1).reshape(weights.shape) for _, slope in maps]
    shares = [size / np.maximum(size.sum(1, keepdims=True), TINY) for size in sizes]
    return min(shares, key=lambda share: relative_difference(weights, share))


def _levelled(features: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """The gradient, evened out in channels that are the same at every position.

    The maximum over such a channel lies anywhere: torch gives its gradient to the first position,
    our graph may share it out. Grad-CAM reads no more than the mean.
    """
    level = np.ptp(features, axis=(2, 3), keepdims=True) == 0
    return np.where(level, gradient.mean(axis=(2, 3), keepdims=True), gradient)


def _noise(batch: int, contract: Contract, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(batch, 3, *contract.input.size, generator=generator)


def _pictures(batch: int, contract: Contract, generator: torch.Generator) -> torch.Tensor:
    """Smooth colours in 0..1, normalised as a photo would be."""
    coarse = torch.rand(batch, 3, 4, 4, generator=generator)
    picture = F.interpolate(coarse, contract.input.size, mode="bilinear")
    mean = torch.tensor(contract.input.mean)[:, None, None]
    std = torch.tensor(contract.input.std)[:, None, None]
    return (picture - mean) / std


def _named(taps: TorchTaps, contract: Contract) -> dict[str, np.ndarray]:
    if len(taps.attention) != len(contract.layers):
        raise VerificationError(
            f"the graph has {len(contract.layers)} attention layers and torch shows "
            f"{len(taps.attention)}; export without verification (verify=False)"
        )
    tensors = {contract.logits: taps.logits}
    for layer, (attention, gradient) in enumerate(
        zip(taps.attention, taps.attention_gradient, strict=True)
    ):
        tensors[attention_name(layer)] = attention
        tensors[attention_gradient_name(layer)] = gradient
    if taps.features is not None and taps.features_gradient is not None:
        tensors[FEATURES] = taps.features
        tensors[FEATURES_GRADIENT] = taps.features_gradient
    if taps.pooling is not None:
        tensors[POOLING] = taps.pooling
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def _without_relevance(path: Path) -> Path:
    """The file with the same graph for everything else, beside it."""
    model = ir.load(path)
    drop_outputs(model, lambda name: name.startswith(UNCOMPARED))
    rest = path.with_stem(f"{path.stem}-compared")
    ir.save(model, rest)
    return rest


def _open(path: Path) -> onnxruntime.InferenceSession:
    """A session that reads the weights from the file's memory map and makes no copy of them.

    To be fast, onnxruntime would keep them repacked, and transposed once more for the gradient.
    """
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.log_severity_level = 3  # it warns that `target` has a default, which is meant
    try:
        return onnxruntime.InferenceSession(
            path,
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["ConstantFolding"],
        )
    except Exception as error:  # onnxruntime has no public base class
        raise ModelError(f"onnxruntime cannot open {path.name}: {one_line(error)}") from error


def _run(
    session: onnxruntime.InferenceSession, feed: Mapping[str, np.ndarray], path: Path
) -> dict[str, np.ndarray]:
    taken = {v.name for v in (*session.get_inputs(), *session.get_overridable_initializers())}
    given = {name: array for name, array in feed.items() if name in taken}
    names = [value.name for value in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, given), strict=True))
    except Exception as error:
        raise ModelError(f"onnxruntime cannot run {path.name}: {one_line(error)}") from error


def _round_up(value: float) -> float:
    return float(_TWO_DIGITS_UP.create_decimal(value))


_TWO_DIGITS_UP = decimal.Context(prec=2, rounding=decimal.ROUND_UP)
