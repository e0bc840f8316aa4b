"""A timm model as what an explained file is compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxplain.contract import Contract
from onnxplain.errors import InputError, VerificationError
from onnxplain.export import timm_models
from onnxplain.export.plain import one_line
from onnxplain.export.verify import Run, seek, torch_runs
from onnxplain.outputs import (
    FEATURES,
    FEATURES_GRADIENT,
    METHODS,
    TOKEN_WEIGHTS,
    attention_gradient_name,
    attention_name,
)

__all__ = ["reference_contract", "reference_outputs", "reference_runs", "reference_values"]


def reference_runs(
    name: str,
    contract: Contract,
    folder: Path,
    *,
    checkpoint: Path | None,
    model_kwargs: Mapping[str, Any],
) -> list[Run]:
    """What the timm model computes in the runs of `torch_runs`.

    Args:
        name: timm's name of the model.
        contract: Of the file that is compared; tells the size and the layers.
        folder: Takes torch's arrays.
        checkpoint, model_kwargs: As in `onnxplain.export`.

    Raises:
        InputError: timm does not build it, its weights would be random, or it is of another kind
            than the file.
        ModelError: The checkpoint does not fit.
    """
    if checkpoint is None and not model_kwargs.get("pretrained"):
        raise InputError(
            f"timm:{name} would have random weights; give those of the file (checkpoint=, "
            "--checkpoint), or pretrained=True, --pretrained"
        )
    if contract.input.multiple is not None:
        model_kwargs = timm_models.dynamic_arguments(name, model_kwargs)
    size = contract.input.size
    module = timm_models.build(
        name, checkpoint=checkpoint, image_size=size, model_kwargs=model_kwargs
    )
    if (classes := getattr(module, "num_classes", contract.classes)) != contract.classes:
        raise InputError(
            f"timm:{name} has {classes} classes and the file {contract.classes}; pass "
            f"num_classes={contract.classes} (--num-classes {contract.classes})"
        )
    try:
        return torch_runs(module, contract, folder)
    except VerificationError as error:
        reason, _, _ = str(error).partition(";")  # then comes what to do at an export
        raise InputError(f"timm:{name} is not the model of the file: {reason}") from None
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"torch cannot run timm:{name} on {size[0]}x{size[1]} pixels: {one_line(error)}"
        ) from error


def reference_outputs(run: Run, contract: Contract, outputs: Collection[str]) -> frozenset[str]:
    """Names of the file's outputs that torch shows, or that something in torch stands for.

    Args:
        run: From `reference_runs`.
        contract: Of the file.
        outputs: Of the file.
    """
    with np.load(run[1]) as arrays:
        shown = set(arrays) - {contract.logits}
    sought = {TOKEN_WEIGHTS} if contract.layers else {FEATURES, FEATURES_GRADIENT}
    return frozenset(shown | sought.intersection(outputs))


def reference_values(
    run: Run, found: dict[str, np.ndarray], contract: Contract
) -> dict[str, np.ndarray]:
    """torch's arrays of one run by the names of the file's outputs.

    Args:
        run: From `reference_runs`.
        found: What the file has in this run, by name; changed as by `seek`.
        contract: Of the file.
    """
    _, stored, maps = run
    with np.load(stored) as arrays:
        return dict(arrays) | seek(found, maps, contract)


def reference_contract(contract: Contract, outputs: Collection[str]) -> Contract:
    """The contract of torch's arrays: that of the file, with the outputs that torch shows.

    Args:
        contract: Of the file.
        outputs: Names of the arrays.
    """

    def shown(name: str | None) -> str | None:
        return name if name in outputs else None

    layers = (
        dataclasses.replace(
            layer,
            attention=shown(attention_name(i)),
            gradient=shown(attention_gradient_name(i)),
            relevance=None,
            relevance_lrp=None,
        )
        for i, layer in enumerate(contract.layers)
    )
    reads = {
        m: needs.outputs(len(contract.layers), contract.readout) for m, needs in METHODS.items()
    }
    return dataclasses.replace(
        contract,
        layers=tuple(layers),
        methods={m: names for m, names in reads.items() if names and set(names) <= set(outputs)},
        maps={},
        features=shown(FEATURES),
        features_gradient=shown(FEATURES_GRADIENT),
        input_relevance=None,
        input_relevance_attnlrp=None,
    )
