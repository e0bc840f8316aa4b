"""The export stage: build, export to plain ONNX, explain, verify, write."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onnxplain import graphs
from onnxplain.errors import InputError, ModelError
from onnxplain.export import timm_models
from onnxplain.export.plain import LOGITS, to_onnx
from onnxplain.export.rounding import round_weights
from onnxplain.export.verify import verify as verify_files
from onnxplain.graphs.precision import check_precision
from onnxplain.graphs.storage import check_destination

__all__ = ["export_model"]


def export_model(
    model: str | torch.nn.Module,
    path: Path,
    *,
    checkpoint: Path | None,
    methods: Iterable[str] | None,
    labels: Sequence[str] | str | os.PathLike[str] | None,
    image_size: int | tuple[int, int] | None,
    verify: bool,
    gamma: float,
    precision: str,
    model_kwargs: Mapping[str, Any],
) -> graphs.Report:
    """`onnxplain.export`, whose docstring is the documentation."""
    check_precision(precision)
    requested = _pixels(image_size)
    bundle = path.suffix != ".onnx"
    check_destination(path, bundle=bundle)
    module = timm_models.build(
        model, checkpoint=checkpoint, image_size=requested, model_kwargs=model_kwargs
    )
    size = timm_models.image_size_of(module, requested)
    tokens = timm_models.token_layout(module, size)
    name = model if isinstance(model, str) else type(model).__name__
    source = timm_models.describe_source(name, module)
    if precision == "fp16":
        if module is model:
            module = copy.deepcopy(module)
        round_weights(module)
    explained = graphs.explain(
        to_onnx(module, image_size=size),
        bundle=bundle,
        methods=methods,
        contract={"logits": LOGITS} | ({} if tokens is None else {"tokens": tokens}),
        labels=os.fspath(labels) if isinstance(labels, os.PathLike) else labels,
        preprocessing=timm_models.preprocessing_of(
            module, size, model_kwargs.get("pretrained_cfg_overlay") or {}
        ),
        source=source,
        gamma=gamma,
    )
    if precision == "fp16":
        explained = graphs.narrow(explained, lossless=True)
    if verify:
        explained = explained.with_verification(_verify(module, explained, path))
    return graphs.save(explained, path)


def _pixels(image_size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(size) != 2 or not all(isinstance(v, int) and v > 0 for v in size):
        raise InputError(f"image_size {image_size!r}: expected pixels or (height, width)")
    return size


def _verify(module: torch.nn.Module, explained: graphs.Explained, path: Path) -> dict[str, Any]:
    """Writes the files beside `path`, runs them, and removes them again."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            draft = Path(folder) / path.name
            graphs.save(explained, draft)
            files = sorted(draft.glob("*.onnx")) if draft.is_dir() else [draft]
            return verify_files(module, files, explained.contract)
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {error.strerror or error}") from None
