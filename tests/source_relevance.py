"""Relevance in files of other exporters against the torch model that they were exported from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from double import run
from source_framework import BATCHES, of_torch
from torch import nn
from torch_relevance import AttnLRP, Attribution, Plain, Program

from onnxplain import graphs
from onnxplain.export.verify import relative_difference
from onnxplain.outputs import (
    INPUT_RELEVANCE,
    INPUT_RELEVANCE_ATTNLRP,
    METHODS,
    attention_relevance_lrp_name,
    attention_relevance_name,
    map_name,
)
from onnxplain.runtime.dispatch import compute

__all__ = ["compare_relevance"]

# In double, relative to the largest value. Most are within 2e-6. Exporters write constants, such as
# the square root of 2 in a GELU, in single precision: deep within plain LRP that comes to 3e-5.
TOLERANCE = 1e-4


def compare_relevance(module: nn.Module, plain: Path, **given: Any) -> None:
    """Explains the file and compares all relevance and all maps in double, in every batch size.

    Args:
        module: What the file was exported from, in evaluation mode. It is in float64 afterwards.
        plain: The file.
        given: Further arguments of `instrument`.
    """
    explained = graphs.explain(graphs.load(plain), **given)
    contract, model = explained.contract, explained.models["single"]
    assert set(contract.methods) == set(METHODS)
    batch = max(BATCHES)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, *contract.input.size, dtype=torch.float64, generator=generator)
    target = (torch.arange(batch) * 3 + 1) % contract.classes
    feeds = {contract.input.name: contract.input.fed(images.numpy()), "target": target.numpy()}
    found = run(model, feeds)

    module = module.double().requires_grad_(False)
    program = Program(module, images)
    attribution, lrp, attnlrp = (
        program.relevance(target, table) for table in (Attribution(), Plain(), AttnLRP())
    )
    last = len(contract.layers) - 1
    tensors = {
        INPUT_RELEVANCE: lrp.pixels,
        INPUT_RELEVANCE_ATTNLRP: attnlrp.pixels,
        attention_relevance_lrp_name(last): lrp.attention[last],
        **{attention_relevance_name(i): attribution.attention[i] for i in range(last + 1)},
    }
    arrays = {name: t.numpy().reshape(found[name].shape) for name, t in tensors.items()}
    arrays |= of_torch(module, images.numpy(), feeds["target"], found, contract)
    bare = dataclasses.replace(contract, maps={})  # made of the arrays, not fetched
    arrays |= {map_name(m): compute(m, arrays, bare, {}) for m in METHODS}
    assert set().union(*contract.methods.values()) <= arrays.keys()
    for size in BATCHES:
        own = found if size == batch else run(model, {k: x[:size] for k, x in feeds.items()})
        for name, array in arrays.items():
            assert array.any() or name.startswith("map."), name  # a relu may leave none of a map
            difference = relative_difference(own[name], array[:size])
            assert difference <= TOLERANCE, f"{name} at batch {size}: {difference:.2g}"
