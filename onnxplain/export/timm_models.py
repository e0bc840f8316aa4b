"""What timm knows about a model: how to build it, load it, feed it and name its tokens."""

from __future__ import annotations

import copy
import difflib
import hashlib
import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
from timm.data.config import resolve_data_config

import onnxplain
from onnxplain.contract import Source
from onnxplain.errors import InputError, ModelError
from onnxplain.export.plain import one_line

__all__ = [
    "build",
    "describe_source",
    "dynamic_arguments",
    "image_size_of",
    "multiple_of",
    "preprocessing_of",
    "token_layout",
]


def build(
    model: str | torch.nn.Module,
    *,
    checkpoint: Path | None,
    image_size: tuple[int, int] | None,
    model_kwargs: Mapping[str, Any],
) -> Any:
    """The module to export, with its weights.

    Raises:
        InputError: An unknown name, an argument that timm refuses, or a checkpoint that is not a
            file.
        ModelError: Weights that cannot be read or do not fit.
    """
    if isinstance(model, torch.nn.Module):
        if model_kwargs:
            raise InputError(
                f"{', '.join(sorted(model_kwargs))}: model arguments go with a timm name, and "
                f"this {type(model).__name__} is built already"
            )
        module = model if checkpoint is None else copy.deepcopy(model)
    else:
        module = _create(model, image_size, dict(model_kwargs))
    if checkpoint is not None:
        _load(module, checkpoint)
    return module


def _create(
    name: str, image_size: tuple[int, int] | None, model_kwargs: dict[str, Any]
) -> torch.nn.Module:
    remote = name.startswith(_SOURCES)
    architecture = name.partition(".")[0]
    if not remote and not timm.is_model(architecture):
        close = difflib.get_close_matches(architecture, timm.list_models(), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() names them all"
        raise InputError(f"timm has no model {name!r}; {hint}")
    try:
        if image_size is None:
            return timm.create_model(name, **model_kwargs)
        try:
            return timm.create_model(name, img_size=image_size, **model_kwargs)
        except TypeError as error:
            if not _does_not_know("img_size", error):
                raise
            return timm.create_model(name, **model_kwargs)  # it takes pictures of any size
    except Exception as error:  # constructors, configurations and downloads raise anything
        kind = ModelError if remote or model_kwargs.get("pretrained") else InputError
        raise kind(f"timm cannot build {name}: {one_line(error)}") from error


def _does_not_know(argument: str, error: Exception) -> bool:
    words = re.findall(r"'(\w+)'", str(error))
    return isinstance(error, TypeError) and "unexpected keyword" in str(error) and argument in words


_SOURCES = ("hf-hub:", "hf_hub:", "local-dir:")


def _load(module: torch.nn.Module, checkpoint: Path) -> None:
    if not checkpoint.is_file():
        raise InputError(f"checkpoint {checkpoint}: no such file")
    try:
        state = timm.models.load_state_dict(str(checkpoint))
    except Exception as error:  # pickle, zip and safetensors each have their own
        raise ModelError(
            f"checkpoint {checkpoint} cannot be read ({type(error).__name__}); expected a state "
            "dict in a .safetensors file or saved by torch.save"
        ) from error
    if mismatch := _mismatch(module, state):
        # Published checkpoints of other layouts or sizes: the architecture's own conversion.
        convert = getattr(_home(module), "checkpoint_filter_fn", None)
        converted = None
        if convert is not None:
            try:
                converted = convert(dict(state), module)
            except Exception:  # it is written for checkpoints that fit; then the mismatch stands
                converted = None
        if converted is None or _mismatch(module, converted):
            raise ModelError(f"checkpoint {checkpoint.name} does not fit: {mismatch}")
        state = converted
    module.load_state_dict(state, strict=True)


def _mismatch(module: torch.nn.Module, state: Mapping[str, Any]) -> str | None:
    """The first tensor that does not fit, or None."""
    expected = module.state_dict()
    for name, tensor in expected.items():
        found = state.get(name)
        if found is None:
            return f"it has no {name} {list(tensor.shape)}; {_ARGUMENTS}"
        if found.shape != tensor.shape:
            hint = _ARGUMENTS
            if name.startswith("head") and tensor.ndim <= 2 and found.ndim:
                count = found.shape[0]
                hint = f"pass num_classes={count} (--num-classes {count})"
            elif name == "pos_embed":
                hint = "pass the image size it was trained with (image_size=, --img-size)"
            return f"its {name} is {list(found.shape)}, the model's {list(tensor.shape)}; {hint}"
    unexpected = [name for name in state if name not in expected]
    if unexpected:
        return f"the model has no {unexpected[0]}; {_ARGUMENTS}"
    return None


_ARGUMENTS = "name the model it was trained as, with the same arguments"


def image_size_of(module: torch.nn.Module, requested: tuple[int, int] | None) -> tuple[int, int]:
    """Height and width to export for: as requested, or what the module says.

    Raises:
        InputError: Nothing requested, and the module does not say.
    """
    if requested is not None:
        return requested
    stated = getattr(getattr(module, "patch_embed", None), "img_size", None)
    if stated is None:
        stated = getattr(module, "image_size", None)  # torchvision
    if stated is None and "input_size" in _config(module):
        stated = _config(module)["input_size"][1:]
    if stated is None:
        raise InputError(f"{type(module).__name__} does not tell its input size; pass image_size=")
    return (stated, stated) if isinstance(stated, int) else (int(stated[0]), int(stated[1]))


def dynamic_arguments(name: str, model_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with what makes timm's vision transformers take pictures of any size.

    Convolutional networks, which take them anyway, do not know the argument.
    """
    wider = {**model_kwargs, "dynamic_img_size": True}
    try:
        with torch.device("meta"):
            timm.create_model(name, **{**wider, "pretrained": False})
    except Exception as error:
        # What else is wrong, `build` says.
        return dict(model_kwargs) if _does_not_know("dynamic_img_size", error) else wider
    return wider


_ROUND = 2**9 * 3 * 5 * 7


def multiple_of(module: torch.nn.Module, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a patch, of which the sizes of all pictures are multiples; of a network
    of other kind, of the pixels that it makes one position of in the end.

    Raises:
        InputError: `size` is no such multiple.
    """
    tokens, stages = token_layout(module, size), getattr(module, "feature_info", None)
    if tokens is not None:  # at a size that patches of any size divide
        patches: Any = module.patch_embed
        rows, columns = patches.dynamic_feat_size((_ROUND, _ROUND))
        high, wide = _ROUND // int(rows), _ROUND // int(columns)
    else:
        high = wide = int(stages[-1]["reduction"]) if stages else 32
    if size[0] % high or size[1] % wide:
        raise InputError(
            f"image_size {size[0]}x{size[1]}: for pictures of any size, expected a multiple of "
            f"{high}x{wide}"
        )
    return high, wide


def preprocessing_of(
    module: torch.nn.Module, size: tuple[int, int], overlay: Mapping[str, Any]
) -> dict[str, Any]:
    """Mean, standard deviation, crop and interpolation as timm resolves them for this model.

    timm's configuration describes published weights. A model with another head was trained on
    from them: it keeps their mean and standard deviation, but the crop that was tuned for them
    says nothing about it, so the crop is then timm's default unless `overlay` has one.

    Args:
        module: The model; one that timm does not know gets timm's defaults.
        size: Height and width of the input.
        overlay: What the user set in `pretrained_cfg_overlay`.
    """
    config = dict(_config(module))
    classes = getattr(module, "num_classes", None)
    if config.get("num_classes") != classes and "crop_pct" not in overlay:
        config.pop("crop_pct", None)
        config.pop("test_crop_pct", None)
    test_size = config.get("test_input_size")
    resolved = resolve_data_config(
        {"input_size": (3, *size)},
        pretrained_cfg=config,
        use_test_size=test_size is not None and tuple(test_size[1:]) == size,
    )
    return {
        "mean": tuple(float(v) for v in resolved["mean"]),
        "std": tuple(float(v) for v in resolved["std"]),
        "crop_pct": float(resolved["crop_pct"]),
        "crop_mode": resolved["crop_mode"],
        "interpolation": resolved["interpolation"],
    }


def token_layout(module: torch.nn.Module, size: tuple[int, int]) -> dict[str, Any] | None:
    """`prefix`, names of the tokens before the patches, and `grid`, rows and columns of patches.

    None where the module is not laid out as timm's vision transformers are; the graph then has to
    tell.
    """
    count = getattr(module, "num_prefix_tokens", None)
    grid_of = getattr(getattr(module, "patch_embed", None), "dynamic_feat_size", None)
    if count is None or grid_of is None:
        return None
    names = [name for name in ("cls", "dist") if getattr(module, f"{name}_token", None) is not None]
    names += [f"reg{i}" for i in range(count - len(names))]
    rows, columns = grid_of(size)
    return {"prefix": tuple(names), "grid": (int(rows), int(columns))}


def describe_source(name: str, module: torch.nn.Module) -> Source:
    """Name, weight digest and tool versions.

    The digest is SHA-256 over the tensors of the state dict in the order of their names: the name
    in UTF-8, then the values as little-endian bytes.
    """
    digest = hashlib.sha256()
    for key, tensor in sorted(module.state_dict().items()):
        digest.update(key.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    from_timm = type(module).__module__.startswith("timm.")
    packages = ("torch", *(("timm",) if from_timm else ()), "onnx")
    return Source(
        name=name,
        framework="timm" if from_timm else "torch",
        weights_sha256=digest.hexdigest(),
        versions={
            "onnxplain": onnxplain.__version__,
            **{package: version(package) for package in packages},
        },
    )


def _config(module: torch.nn.Module) -> Mapping[str, Any]:
    config = getattr(module, "pretrained_cfg", None)
    return config if isinstance(config, Mapping) else {}


def _home(module: torch.nn.Module) -> Any:
    return sys.modules.get(type(module).__module__)
