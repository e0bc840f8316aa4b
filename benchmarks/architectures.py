"""timm's names in groups of equal architecture, and a small model for each group."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers.drop import DropPath
from torch.overrides import TorchFunctionMode

__all__ = ["attention_kind", "blocks", "build", "family", "group", "plan"]

CLASSES = 10
GRID = 8  # rows and columns of patches where the model takes an img_size
LARGE = 288  # pixels: larger pictures are tried last
FIRST = (
    *("vision_transformer", "deit", "beit", "eva", "cait", "naflexvit", "xcit", "crossvit"),
    *("vision_transformer_relpos", "vision_transformer_hybrid", "convit", "deepseek_vit"),
    *("qwen3_vit", "gemma4_vit", "vision_transformer_sam", "vitamin", "tnt", "volo"),
)


def family(name: str) -> str:
    """The file of timm that defines the name."""
    return str(timm.models.model_entrypoint(name).__module__).rpartition(".")[2]


def blocks(module: torch.nn.Module) -> frozenset[str]:
    """The building blocks of a model, whatever their number and sizes.

    One for each kind of submodule: its name without digits, its class, its options, and the names
    of its parameters and buffers.
    """
    kinds = (torch.nn.Identity, torch.nn.Dropout, DropPath)
    return frozenset(
        f"{_plain(name)}: {type(submodule).__name__}({', '.join(_options(submodule))})"
        for name, submodule in module.named_modules()
        if not isinstance(submodule, kinds)
    )


def _plain(name: str) -> str:
    return re.sub(r"\d+", "", name.rpartition(".")[2])


def _options(module: torch.nn.Module) -> Iterator[str]:
    for name, value in vars(module).items():
        if not name.startswith("_") and name not in _NO_OPTIONS:
            if isinstance(value, bool | str) and value:
                yield f"{name}={value}"
            elif isinstance(value, FunctionType):
                yield f"{name}={value.__name__}"
    if isinstance(module, torch.nn.Conv2d) and module.groups > 1:
        yield "depthwise" if module.groups == module.in_channels else "grouped"
    yield from module._parameters
    yield from module._buffers


_NO_OPTIONS = {"training", "fused_attn", "inplace", "has_skip", "ceil_mode", "padding_mode"}


def group() -> list[dict[str, Any]]:
    """Every name of timm, in groups of the same family, class and building blocks."""
    found: dict[tuple[str, str, frozenset[str]], list[tuple[int, str]]] = {}
    for name in timm.list_models():
        module = _on_meta(name, {})
        key = family(name), type(module).__name__, blocks(module)
        found.setdefault(key, []).append((_parameters(module), name))
    groups = [
        {
            "family": key[0],
            "class": key[1],
            "representative": min(members)[1],
            "parameters": min(members)[0],
            "names": sorted(name for _, name in members),
        }
        for key, members in found.items()
    ]
    order = {name: position for position, name in enumerate(FIRST)}
    return sorted(
        groups,
        key=lambda g: (
            order.get(g["family"], len(FIRST) + (re.search("vi|former", g["family"]) is None)),
            g["family"],
            g["parameters"],
        ),
    )


_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv_transpose2d)


class _Mixing(TorchFunctionMode):
    """What mixes tokens: shapes of what softmax gives along the last axis, also within fused
    attention, and kernels of the convolutions behind the first of these."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []
        self.kernels: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.softmax, torch.Tensor.softmax, F.softmax) and result.ndim > 3:
            self.shapes.append(tuple(result.shape))
        elif func is F.scaled_dot_product_attention:
            query, key = args[:2]
            self.shapes.append((*query.shape[:-1], key.shape[-2]))
        elif func in _CONVOLUTIONS and self.shapes:
            weight = args[1] if len(args) > 1 else (kwargs or {})["weight"]
            self.kernels.append(tuple(weight.shape[2:]))
        return result


def attention_kind(module: torch.nn.Module, size: int) -> str:
    """Kind "global", "other" or "none", from one forward pass of a model on the meta device.

    Global: in every layer the keys are all patches of the last feature map and at most 16 more
    tokens, and the queries are the same tokens, or at most 16 (class tokens, pooling), and behind
    the first layer nothing else mixes tokens. Anything else - windows, pooled keys, several
    resolutions, attention between channels, convolutions of more than one position - is "other". No
    model of timm 1.0.31 adds positions to otherwise global attention by a convolution.
    """
    batch = 3
    with _Mixing() as seen, torch.no_grad():
        module.eval()(torch.zeros(batch, 3, size, size, device="meta"))
    if not seen.shapes:
        return "none"
    if any(max(kernel) > 1 for kernel in seen.kernels):
        return "other"
    patches = (size // _stride(module)) ** 2
    layers = [
        len(shape) == 4
        and shape[0] == batch
        and 0 <= shape[3] - patches <= 16
        and (shape[2] == shape[3] or shape[2] <= 16)
        for shape in seen.shapes
    ]
    return "global" if all(layers) and any(s[2] == s[3] for s in seen.shapes) else "other"


def _stride(module: Any) -> int:
    stages = getattr(module, "feature_info", None)
    return int(stages[-1]["reduction"]) if stages else int(module.patch_embed.patch_size[0])


def _is_column(module: Any) -> bool:
    """Whether all layers have the same resolution, so that a picture of any size will do."""
    stages = getattr(module, "feature_info", None) or []
    one = isinstance(stages, list) and len({stage["reduction"] for stage in stages}) == 1
    return hasattr(module, "num_prefix_tokens") or one


def _native_size(module: Any) -> int:
    config = module.pretrained_cfg
    stated = getattr(getattr(module, "patch_embed", None), "img_size", None)
    return int((stated or config["input_size"][1:])[0])


def plan(name: str) -> dict[str, Any]:
    """How to build a small model with the same building blocks.

    Returns:
        `arguments` for timm, `size` of the picture, `parameters`, and `attention` as in
        `attention_kind`, "unknown" where the model does not run on the meta device.
    """
    whole = _on_meta(name, {"num_classes": CLASSES})
    expected, native = blocks(whole), _native_size(whole)
    small = GRID * _stride(whole) if _is_column(whole) else native
    pictures: list[tuple[dict[str, Any], int]] = [({}, native)]
    if native > LARGE:  # memory for attention grows with the fourth power
        pictures = [({"img_size": LARGE}, LARGE), ({}, LARGE), *pictures]
    if small < native:
        pictures = [({"img_size": small}, small), *pictures]
    depths: list[dict[str, Any]] = [
        {"depth": 2},
        {"depth": 3},
        {"depths": (2, 2, 2, 2)},
        {"depths": (2, 2, 2)},
        {},
    ]
    for depth, (picture, size) in itertools.product(depths, pictures):
        arguments = {"num_classes": CLASSES, **depth, **picture}
        try:
            module = _on_meta(name, arguments)
            if blocks(module) != expected:
                continue
            kind = attention_kind(module, size)
        except Exception:  # refused arguments, in as many ways as there are models
            continue
        enough = min(size, max(128, _window(module)))
        if kind == "none" and _runs(module, enough):  # most convolutional networks do
            size = enough
        return {
            "arguments": arguments,
            "size": size,
            "parameters": _parameters(module),
            "attention": kind,
        }
    arguments = {"num_classes": CLASSES}
    found = {"arguments": arguments, "size": native, "parameters": _parameters(whole)}
    return {**found, "attention": "unknown"}


def _window(module: torch.nn.Module) -> int:
    """Pixels below which a head that is a convolution enlarges what it reads, as that of VGG."""
    positions = max(getattr(m, "input_kernel_size", 1) for m in module.modules())
    return positions * _stride(module) if positions > 1 else 1


def _runs(module: torch.nn.Module, size: int) -> bool:
    try:
        attention_kind(module, size)
    except Exception:  # as many ways to refuse a size
        return False
    return True


def _on_meta(name: str, arguments: dict[str, Any]) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, **arguments)


def _parameters(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def build(name: str, arguments: dict[str, Any], size: int) -> Any:
    """The model with random values everywhere, and normalisation that fits them."""
    torch.manual_seed(0)
    module: Any = timm.create_model(name, **arguments).eval().requires_grad_(False)
    for key, parameter in module.named_parameters():
        # Fresh models have zero biases, unit scales and gates next to zero: they hide errors.
        constant = parameter.ndim < 2 or bool((parameter == parameter.flatten()[0]).all())
        if constant or key.endswith(("token", "embed")):
            parameter.add_(0.1 * torch.randn(parameter.shape))
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.train()
        norm.momentum = None  # the mean over what was seen: here of one batch
    for convolution in module.modules():
        # Rounding grows from one random ReLU with BatchNorm to the next, unless most of it is > 0.
        if norms and isinstance(convolution, torch.nn.Conv2d) and convolution.bias is not None:
            convolution.bias.add_(1)
    if norms:
        # Both kinds of input that the export is verified with. Normalised for one of them alone,
        # the other grows from layer to layer, and with it the rounding.
        module(torch.cat([torch.randn(4, 3, size, size), _pictures(4, size)]))
    return module.eval()


def _pictures(count: int, size: int) -> torch.Tensor:
    """Smooth colours, spread as those of normalised photos."""
    return F.interpolate(4 * torch.rand(count, 3, 4, 4) - 2, (size, size), mode="bilinear")
