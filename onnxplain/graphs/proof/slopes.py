"""The gradients of an explained graph against finite differences, run by onnxruntime.

A gradient says how a score moves with a value. So the value is moved, in the forward pass, and the
score has to move as the gradient says; in float64, for which onnxruntime has most operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.contract import HALF, INT8, Contract
from onnxplain.errors import MissingDependencyError, ModelError
from onnxplain.graphs.proof.shifted import differentiated, shift_name

try:
    import onnxruntime
except ModuleNotFoundError:
    raise MissingDependencyError(
        "verification runs the model, and onnxruntime is not installed; pip install "
        "onnxplain[cpu,graphs], or leave it out (verify=False, --no-verify)"
    ) from None

__all__ = [
    "ROUNDED",
    "RUNTIME",
    "Slopes",
    "ask",
    "opened",
    "unproven",
]

Array = NDArray[Any]

RUNTIME = f"onnxruntime {onnxruntime.__version__}"

GRADIENT = 1e-4  # of float32 gradients; a sharp softmax loses a digit
ROUNDED = 2.0**-8  # where values are rounded to 11 bits, some thirty times one after another
SINGLE = 1e-2  # of finite differences in float32

# Root mean square of a shift, by that of the values. A longer one where the score hardly moves, so
# that its roundings hide the difference; a shorter one, of fewer digits, where a Relu bends within
# the step, which shows as a wrong slope.
SHIFTS = (1e-4, 1e-2, 1e-6)
SHIFTS_IN_SINGLE = (1e-2,)
WEAKEST = 1e-2  # gradients that are smaller than that by the largest count less
TOGETHER = "gradients"
NOISE = 64  # roundings of a score, within which it cannot be told from one that stays


def unproven(contract: Contract) -> str | None:
    """Why the gradients of a graph cannot be compared with finite differences; None: they can."""
    if contract.precision == INT8:
        return "they pass the rounding to 8 bits straight through, which is no derivative"
    if contract.features_gradient is None and not any(layer.gradient for layer in contract.layers):
        return "the file has none"
    if not differentiated(contract):
        return "the file does not hold them together with the values that they are of"
    return None


def opened(path: Path | bytes, *, optimised: bool = False) -> onnxruntime.InferenceSession:
    """A session on the CPU that reads the weights from the file's memory map.

    Args:
        path: An ONNX file, or the bytes of one.
        optimised: Whether onnxruntime may fuse operators, as it does by default.

    Raises:
        ModelError: onnxruntime cannot run it.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has no public base class
        raise ModelError(f"onnxruntime cannot open it: {_one_line(error)}") from error


def ask(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], outputs: Sequence[str] = ()
) -> dict[str, Array]:
    """Outputs by name, all unless some are named; feeds that the graph does not take are left out.

    Raises:
        ModelError: onnxruntime cannot run it.
    """
    values = (*session.get_inputs(), *session.get_overridable_initializers())
    types = {value.name: value.type for value in values}
    given = {
        name: array.astype(np.float16) if types[name] == "tensor(float16)" else array
        for name, array in feeds.items()
        if name in types
    }
    names = list(outputs) or [value.name for value in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, given), strict=True))
    except Exception as error:
        raise ModelError(f"onnxruntime cannot run it: {_one_line(error)}") from error


@dataclass(frozen=True)
class Slopes:
    """Finite differences of one graph.

    Attributes:
        contract: Of the graph, for pictures of the size that is run.
        moved: A session of what `shifted` makes of it.
        feeds: The image, and what is explained of it: the class of each image, [batch], and the
            sum of logits if it takes one, [batch, classes], where 0 everywhere is the class.
        found: What the graph has found for that, by name.
    """

    contract: Contract
    moved: onnxruntime.InferenceSession
    feeds: Mapping[str, Array]
    found: Mapping[str, Array]

    @cached_property
    def double(self) -> bool:
        """Whether they are computed in float64."""
        (logits,) = self.moved.get_outputs()
        return bool(logits.type == "tensor(double)")

    @property
    def kind(self) -> str:
        """What they are, in words."""
        return f"finite differences in {'float64' if self.double else 'float32'}"

    @property
    def tolerance(self) -> float:
        """What a difference may be."""
        if not self.double:
            return SINGLE
        return ROUNDED if self.contract.precision == HALF else GRADIENT

    def differences(self, *, each: bool) -> Iterator[tuple[str, float]]:
        """The name of each gradient, and how far it is from the finite differences.

        The direction D is random, so the slope that is predicted, the product of gradient and D, is
        a normal number times the norm of the gradient, and is off by another one times the norm of
        what is wrong in it. The difference by the norm estimates the relative L2 error.

        Args:
            each: Whether every output is moved by itself. Else all are at once, each so far that it
                changes the score as much as the others, and there is one difference, `TOGETHER`.
        """
        pairs = differentiated(self.contract)
        if not each:
            yield TOGETHER, self._difference(list(pairs))
            return
        for output, gradient in pairs.items():
            yield gradient, self._difference([output])

    def _difference(self, outputs: Sequence[str]) -> float:
        smallest = np.inf
        for shift in SHIFTS if self.double else SHIFTS_IN_SINGLE:
            difference, told = self._difference_at(outputs, shift)
            smallest = min(smallest, max(difference, min(told, self.tolerance)))
            if max(smallest, told) <= self.tolerance:
                break
        return smallest

    def _difference_at(self, outputs: Sequence[str], shift: float) -> tuple[float, float]:
        """The difference for a shift, and the smallest that can be told from rounding."""
        pairs = differentiated(self.contract)
        squares = {n: np.square(self.found[pairs[n]], dtype=np.float64) for n in outputs}
        norms = {name: np.sqrt(_per_image(square)) for name, square in squares.items()}
        peaks = {name: float(norm.max()) for name, norm in norms.items()}
        weakest = WEAKEST * max(peaks.values()) or 1.0
        steps = {name: 1 / max(peak, weakest) for name, peak in peaks.items()}
        room = min(shift * _size(self.found[name]) / step for name, step in steps.items())
        moves, images = {}, len(next(iter(squares.values())))
        predicted, norm = np.zeros(images), np.zeros(images)
        for name, gradient in pairs.items():
            moves[name] = np.float32(room * steps.get(name, 0.0)) * self.directions[name]
            if name in steps:
                product = moves[name].astype(np.float64) * self.found[gradient]
                predicted += _per_image(product)
                norm = np.hypot(norm, room * steps[name] * norms[name])
        ahead, behind = self._scores(moves)
        slope = (ahead - behind) / 2
        apart = np.abs(slope - predicted)
        noise = NOISE * np.finfo(ahead.dtype).eps * np.maximum(np.abs(ahead), np.abs(behind))
        scale = np.maximum.reduce([norm, np.abs(slope), np.abs(predicted)])
        scale = np.where(scale > 0, scale, np.inf)  # nothing moves, as predicted
        apart = np.where(apart <= noise, 0, apart)  # NaN stays
        return float((apart / scale).max()), float((noise / scale).max())

    @cached_property
    def directions(self) -> dict[str, Array]:
        """A random direction for each output, float32, of mean square 1.

        In float32 the score has to move far to be told from its rounding, so there the direction
        leads half along the gradient.
        """
        random = np.random.default_rng(0)
        directions = {}
        for name, gradient in differentiated(self.contract).items():
            along = self.found[gradient]
            directions[name] = random.standard_normal(along.shape, np.float32)
            if not self.double and (size := _size(along)):
                directions[name] += along / size
        return directions

    def _scores(self, moves: Mapping[str, Array]) -> tuple[Array, Array]:
        """What the gradients are of, for each image: ahead by `moves`, and behind."""
        there = {shift_name(name): move for name, move in moves.items()}
        back = {name: -move for name, move in there.items()}
        image = {self.contract.input.name: self.feeds[self.contract.input.name]}
        if self.contract.input.batch is not None:
            (ahead,), (behind,) = (
                ask(self.moved, {**image, **shifts}).values() for shifts in (there, back)
            )
        else:  # in one run, which casts the weights once
            one, other = {**image, **there}, {**image, **back}
            (both,) = ask(self.moved, {n: np.concatenate([one[n], other[n]]) for n in one}).values()
            ahead, behind = np.split(both, 2)
        return self._score(ahead), self._score(behind)

    def _score(self, logits: Array) -> Array:
        contract = self.contract
        if contract.score == "softmax":
            logits = np.exp(logits - logits.max(axis=-1, keepdims=True))
            logits /= logits.sum(axis=-1, keepdims=True)
        elif contract.score == "sigmoid":
            logits = 1 / (1 + np.exp(-logits))
        weights = self.feeds.get(contract.class_weights or "")
        if weights is None or not weights.any():
            weights = np.eye(contract.classes)[self.feeds[str(contract.target)]]
        return np.asarray((logits * weights).sum(axis=-1))


def _per_image(values: Array) -> Array:
    return np.asarray(values.reshape(len(values), -1).sum(axis=1, dtype=np.float64))


def _size(values: Array) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
