"""timm or torch model -> explained ONNX file.

The module is callable and is the public function: `onnxplain.export(...)` works whether `export`
was imported as a function or as this subpackage.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from onnxplain.errors import MissingDependencyError
from onnxplain.steps import Step, silent

if TYPE_CHECKING:
    import os

    import torch

    from onnxplain.graphs import Report

__all__ = ["export", "require_packages"]


def export(
    model: str | torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    methods: Iterable[str] | None = None,
    labels: Sequence[str] | str | os.PathLike[str] | None = None,
    image_size: int | tuple[int, int] | None = None,
    verify: bool = True,
    gamma: float = 0.0,
    dynamic_size: bool | None = None,
    precision: str = "fp32",
    outputs: str | None = None,
    map_options: Mapping[str, Any] | None = None,
    heatmaps: bool = False,
    targets: int = 1,
    seed: str = "target",
    require_target: bool = False,
    embed_preprocessing: bool = False,
    step: Step | None = None,
    **model_kwargs: Any,
) -> Report:
    """Exports an image classifier to ONNX files that explain themselves.

    A vision transformer with global attention is served with every method, another network with
    Grad-CAM on its last feature map.

    Nothing appears at `path` before the result is complete and verified, and two exports of the
    same model are the same bytes.

    The preprocessing in the contract is what timm resolves for the model. One exception: timm's
    crop ratio belongs to the published weights, so a model whose head has another number of
    classes gets timm's default of 0.875, unless `pretrained_cfg_overlay={"crop_pct": ...}` is
    given.

    Args:
        model: A timm name ("vit_tiny_patch16_224", "hf-hub:owner/name") or a module that maps
            [batch, 3, height, width] to logits [batch, classes]. It is exported in evaluation mode,
            and left as it was: in training mode, say, on its device, in its precision.
        path: `NAME.onnx` for one file with exactly `methods`, anything else for a folder with one
            graph per kind of method that share their weights.
        checkpoint: Weights in .safetensors or as saved by torch.save, which must fit.
        methods: Names of methods; None means every one that the architecture supports.
        labels: Class names in index order, or a text file with one a line, or a JSON file
            with `id2label` (Hugging Face's `config.json`).
        image_size: Pixels, or height and width. A model given by name is built for this size; the
            default is the model's own.
        verify: Run the result against torch (logits, attention, features and gradients, in batches
            of 1 and 2, with `dynamic_size` at a second size too), and store the differences in the
            contract. Relevance has no counterpart in torch.
        gamma: How much more `attnlrp` counts contributions of the sign of the output; 0 is the
            epsilon rule.
        dynamic_size: One file for pictures of every height and width that are multiples of the
            patch (of the last feature map's stride, for other networks): position embeddings are
            interpolated in the graph, and the grid follows. `image_size` is then what pictures are
            brought to unless another size is asked for. None: as `dynamic_img_size`, with which
            timm builds such models, says.
        precision: "fp16" stores the weights as float16, which halves the file and rounds them to 11
            bits; inputs, outputs and arithmetic stay float32. torch is then
            compared with its weights rounded in the same way.
        outputs, map_options, heatmaps, targets, seed, require_target,
            embed_preprocessing: As in `instrument`.
        step: Called with what is going on, how much of it is done, and of how much.
        **model_kwargs: For timm.create_model: num_classes=, pretrained=True (downloads), ...

    Returns:
        Sizes, opset, methods, the contract and the measured differences.

    Raises:
        InputError: An argument is wrong: unknown name, method, label count, path.
        ModelError: The checkpoint does not fit, or torch cannot export the model.
        UnsupportedModelError: Not a model, or not a method on it, that can be explained.
        VerificationError: The result differs from torch by more than 1e-4 of the largest value.
        MissingDependencyError: The extra `export` is not installed.
    """
    require_packages()
    from onnxplain.export.stage import export_model
    from onnxplain.graphs import Request

    return export_model(
        model,
        Path(path),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        methods=methods,
        labels=labels,
        image_size=image_size,
        verify=verify,
        gamma=gamma,
        dynamic_size=dynamic_size,
        precision=precision,
        request=Request(
            outputs=outputs,
            map_options=map_options or {},
            heatmaps=heatmaps,
            targets=targets,
            seed=seed,
            require_target=require_target,
        ),
        embed_preprocessing=embed_preprocessing,
        step=step or silent,
        model_kwargs=model_kwargs,
    )


def require_packages() -> None:
    """Imports the packages of the extra `export`.

    Raises:
        MissingDependencyError: One of them is not installed.
    """
    for package in ("torch", "timm", "onnx", "onnx_ir", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingDependencyError(
                f"export needs {package}, which cannot be imported ({error}); "
                "pip install onnxplain[cpu,export]"
            ) from error


class _Callable(ModuleType):
    __call__ = staticmethod(export)


sys.modules[__name__].__class__ = _Callable
