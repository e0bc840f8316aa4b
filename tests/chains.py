"""Small models written as text, and the check of a walk through them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from differences import Array, Differentiated, agree, differences, differentiate, evaluate

__all__ = ["check", "outputs_of", "parse", "values"]


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text)


def values(model: onnx.ModelProto, batch: int) -> dict[str, Array]:
    """Random numbers for every input of the model."""
    random = np.random.default_rng(batch)
    feeds = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [d.dim_value or batch for d in dims]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        spread = 1 if value.name == "x" else 0.4
        feeds[value.name] = (spread * random.normal(size=shape)).astype(dtype)
    return feeds


def outputs_of(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """The model with the values `names` as outputs."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    del model.graph.output[:]
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names)
    return model


def from_tap(model: onnx.ModelProto, tap: str) -> onnx.ModelProto:
    """The model cut at the value `tap`, which becomes an input."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    for node in model.graph.node:
        node.output[:] = [f"{name}/unused" if name == tap else name for name in node.output]
    if tap not in {value.name for value in model.graph.input}:
        model.graph.input.append(onnx.helper.make_empty_tensor_value_info(tap))
    return model


def check(
    model: onnx.ModelProto,
    taps: Sequence[str],
    *,
    outputs: Sequence[str] = ("y",),
    batches: Sequence[int] = (2,),
) -> Differentiated:
    """Walks from `outputs` to `taps` and compares every cotangent with finite differences."""
    source = outputs_of(model, [*outputs, *(tap for tap in taps if tap not in outputs)])
    result = differentiate(outputs_of(model, outputs), dict.fromkeys(outputs), taps)
    assert result.found.keys() == set(taps)
    for batch in batches:
        feeds = values(model, batch)
        forward = evaluate(source, feeds)
        random = np.random.default_rng(1)
        weights = {name: random.normal(size=forward[name].shape) for name in outputs}
        found = evaluate(result.model, {**feeds, **{f"seed.{n}": w for n, w in weights.items()}})
        for tap in taps:
            cut = from_tap(outputs_of(model, outputs), tap)
            directions = random.normal(size=(3, *forward[tap].shape))
            directions /= 4 * np.sqrt(np.sum(directions**2) / 3)  # chains bend more than a node
            slopes = differences(cut, {**feeds, tap: forward[tap]}, weights, tap, directions)
            gradient = found[f"cotangent.{tap}"]
            assert gradient.shape == forward[tap].shape
            agree(np.array([np.sum(gradient * d) for d in directions]), slopes)
    return result
