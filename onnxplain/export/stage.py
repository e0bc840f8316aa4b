"""The export stage: build, export to plain ONNX, explain, verify, write."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onnxplain import graphs
from onnxplain.contract import height_and_width
from onnxplain.errors import ModelError
from onnxplain.export import timm_models
from onnxplain.export.plain import LOGITS, to_onnx
from onnxplain.export.rounding import round_weights
from onnxplain.export.verify import torch_runs
from onnxplain.export.verify import verify as verify_files
from onnxplain.graphs.choice import named
from onnxplain.graphs.files.writing import check_destination, drafted
from onnxplain.graphs.precision import check_precision
from onnxplain.steps import Step

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
    dynamic_size: bool | None,
    precision: str,
    request: graphs.Request,
    embed_preprocessing: bool,
    step: Step,
    model_kwargs: Mapping[str, Any],
) -> graphs.Report:
    """`onnxplain.export`, whose docstring is the documentation."""
    check_precision(precision)
    if methods is not None:
        methods = named(methods)  # before the model is built, which takes its time
    requested = None if image_size is None else height_and_width(image_size)
    bundle = path.suffix != ".onnx"
    check_destination(path, bundle=bundle)
    if dynamic_size and isinstance(model, str):
        model_kwargs = timm_models.dynamic_arguments(model, model_kwargs)
    step("building the model", 0, 1)
    module = timm_models.build(
        model, checkpoint=checkpoint, image_size=requested, model_kwargs=model_kwargs
    )
    size = timm_models.image_size_of(module, requested)
    multiple = None
    if _is_dynamic(dynamic_size, model, model_kwargs):
        multiple = timm_models.multiple_of(module, size)
    tokens = timm_models.token_layout(module, size)
    name = model if isinstance(model, str) else type(model).__name__
    source = timm_models.describe_source(name, module)
    if precision == "fp16":
        if module is model:
            module = copy.deepcopy(module)
        round_weights(module)
    explain = functools.partial(
        graphs.explain,
        bundle=bundle,
        methods=methods,
        contract={"logits": LOGITS, "input": {"size": size}}
        | ({} if tokens is None else {"tokens": tokens}),
        labels=os.fspath(labels) if isinstance(labels, os.PathLike) else labels,
        preprocessing=timm_models.preprocessing_of(
            module, size, model_kwargs.get("pretrained_cfg_overlay") or {}
        ),
        source=source,
        gamma=gamma,
    )

    def narrowed(explained: graphs.Explained) -> graphs.Explained:
        return graphs.narrow(explained, lossless=True) if precision == "fp16" else explained

    def embedded(explained: graphs.Explained) -> graphs.Explained:
        return graphs.embed(explained) if embed_preprocessing else explained

    with _enough_memory(name, size):
        step("torch exports it", 0, 1)
        plain = to_onnx(module, image_size=size, multiple=multiple)
        step("explaining the graph", 0, 1)
        several = None
        if request.targets > 1 or not verify:
            several = embedded(narrowed(explain(plain, request=request)))
        if not verify:
            assert several is not None
            return graphs.save(several, path)
        # torch has no maps to compare with, but what they are made of, for one class.
        with_taps = (
            request if request.taps else dataclasses.replace(request, targets=1, outputs="both")
        )
        explained = narrowed(explain(plain, request=with_taps))
        del plain
        with drafted(explained, path) as (files, explained):
            step("comparing with torch", 0, 1)
            runs = torch_runs(module, explained.contract, files[0].parent)
            del module
            _give_back()  # the weights are in a file now
            verification = verify_files(files, explained.contract, runs)
            if several is not None:
                explained = several
            else:
                explained = embedded(explained if request.taps else explained.maps_alone())
            return graphs.save(explained.with_verification(verification), path)


@contextlib.contextmanager
def _enough_memory(name: str, size: tuple[int, int]) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise ModelError(
            f"{name} for {size[0]}x{size[1]} pixels: cannot allocate memory; a smaller image_size, "
            "or no verification (verify=False), needs less"
        ) from error


def _is_dynamic(
    asked: bool | None, model: str | torch.nn.Module, model_kwargs: Mapping[str, Any]
) -> bool:
    """Whether the graph is to take pictures of any size: as asked, else as the model was made."""
    if asked is not None:
        return asked
    made = model_kwargs if isinstance(model, str) else vars(model)
    return bool(made.get("dynamic_img_size"))


def _give_back() -> None:
    """Gives memory back to the system: that of what torch traced, which is cyclic, and the large
    blocks that the C library of Linux keeps for its own use."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not everywhere
        ctypes.CDLL(None).malloc_trim(0)
