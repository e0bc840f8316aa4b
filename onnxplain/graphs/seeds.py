"""What is asked of an explained graph: a class of each image, several, or a sum of logits."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.values.facts import Shape

__all__ = ["CLASS_WEIGHTS", "TARGET", "of_probabilities", "seeds"]

TARGET = "target"
CLASS_WEIGHTS = "class_weights"


def seeds(
    b: Builder, logits: Tensor, *, targets: int, weighted: bool, required: bool
) -> list[Tensor]:
    """Adds the inputs that say what to explain, and what the walks back start from.

    `TARGET` is int64 [batch], or [batch, targets] if that is more than one: a class, or -1 for the
    likeliest one, -2 for the next, as many as there are targets. Left out, it is these in order.
    `CLASS_WEIGHTS` is float32 [batch, classes] or [batch, targets, classes]: explains that sum of
    the logits; where all weights are 0, as they are when it is left out, the target.

    Args:
        b: Builder on the graph.
        logits: [batch, classes].
        targets: How many classes of each image.
        weighted: Whether there is `CLASS_WEIGHTS`.
        required: Whether neither can be left out.

    Returns:
        For each target the weights of the logits, [batch, classes].
    """
    batch, classes = logits.shape
    assert isinstance(classes, int)
    more = () if targets == 1 else (targets,)
    ranks = -1 - np.arange(targets).reshape(1, *more)
    target = _input(b, TARGET, "targets", ranks, required)
    likeliest = _likeliest(b, logits, targets)
    if targets > 1:
        # As many rows as images: GatherElements does not repeat its indices.
        rank = b.sub(b.mul(likeliest, 0), b.add(target, 1))
        rank = b.op("Clip", [rank, b.scalar(0, rank), b.scalar(targets - 1, rank)], rank.shape)
        likeliest = b.op("GatherElements", [likeliest, rank], likeliest.shape, axis=1)
    chosen = b.where(b.compare("Less", target, 0), likeliest, target)
    numbers = b.constant(np.arange(classes, dtype=np.int64))
    hot = b.cast(b.compare("Equal", b.unsqueeze(chosen, chosen.rank), numbers), logits.dtype)
    if weighted:
        zeros = np.zeros((1, *more, classes), logits.dtype.numpy())
        weights = _input(b, CLASS_WEIGHTS, "weights", zeros, required)
        largest = b.reduce("ReduceMax", b.unary("Abs", weights), [-1], keepdims=True)
        hot = b.where(b.compare("Greater", largest, 0.0), weights, hot)
    if targets == 1:
        return [hot]
    return [b.reshape(b.slice(hot, 1, i, i + 1), (batch, classes)) for i in range(targets)]


def of_probabilities(b: Builder, logits: Tensor, weights: Tensor, score: str) -> Tensor:
    """Gradient of a weighted sum of probabilities p at the logits, [batch, classes].

    Of a Softmax p (w - sum(w p)), of a Sigmoid w p (1 - p).

    Args:
        b: Builder on the graph.
        logits: [batch, classes].
        weights: w, [batch, classes].
        score: "softmax" or "sigmoid".
    """
    if score == "sigmoid":
        # 1 - p is 0 in float32 from a logit of 17 on, where p of the negative logit is not.
        against = b.unary("Sigmoid", b.neg(logits))
        return b.mul(weights, b.mul(b.unary("Sigmoid", logits), against))
    p = b.unary("Softmax", logits, axis=-1)
    return b.mul(p, b.sub(weights, b.sum(b.mul(weights, p), [-1])))


def _likeliest(b: Builder, logits: Tensor, count: int) -> Tensor:
    """Numbers of the likeliest classes in order, [batch] of one or [batch, count]."""
    integer = ir.DataType.INT64
    if count == 1:
        return b.op("ArgMax", [logits], logits.shape[:1], integer, axis=1, keepdims=0)
    shape: Shape = (logits.shape[0], count)
    return b.op("TopK", [logits, b.ints([count])], shape, integer, output=1, axis=1)


def _input(b: Builder, name: str, rows: str, default: np.ndarray, required: bool) -> Tensor:
    """An input with a row per image, or one for all: an initializer of its name is its default."""
    value = ir.Value(
        name=name,
        type=ir.TensorType(ir.DataType.from_numpy(default.dtype)),
        shape=ir.Shape([rows, *default.shape[1:]]),
    )
    b.graph.inputs.append(value)
    if not required:
        value.const_value = ir.tensor(default, name=name)
        b.graph.register_initializer(value)
    return Tensor(value, default.shape, ir.DataType.from_numpy(default.dtype))
