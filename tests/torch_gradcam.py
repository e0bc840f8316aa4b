"""Grad-CAM of a torch model by hooks and autograd alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

__all__ = ["TOLERANCE", "Family", "lively", "torch_gradcam"]

# Single precision on both sides, relative to the largest value of the map.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Family:
    """A small model, where torch has its Grad-CAM layer, and what a refusal must say.

    `layer` names the module whose input, or with "->" whose output, is the layer; `nchw` brings
    that to [batch, channels, rows, columns].
    """

    build: Callable[[], nn.Module]
    size: tuple[int, int]
    grid: tuple[int, int]
    layer: str
    reason: str
    nchw: Callable[[Tensor], Tensor] = lambda t: t


def lively(build: Callable[[], nn.Module]) -> nn.Module:
    """The model with random biases, scales and statistics: fresh ones hide errors."""
    torch.manual_seed(3)
    module = build().eval()
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
                noise = torch.randn(tensor.shape)
                tensor.add_(noise.abs() if name.endswith("running_var") else 0.1 * noise)
    return module


def torch_gradcam(
    module: nn.Module, family: Family, images: Tensor, target: Tensor
) -> NDArray[np.float32]:
    """The map by hooks and autograd alone, float32 [batch, rows, columns]."""
    seen: list[Tensor] = []
    name = family.layer.removesuffix("->")
    layer = module.get_submodule(name)
    if isinstance(layer, nn.Sequential | nn.ModuleList):  # its last part, however it is called
        layer = list(layer)[-1]
    if family.layer.endswith("->"):
        handle = layer.register_forward_hook(lambda m, args, output: seen.append(output))
    else:
        handle = layer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    logits = module(images.clone().requires_grad_())
    handle.remove()
    (features,) = seen
    (gradient,) = torch.autograd.grad(logits.gather(1, target[:, None]).sum(), features)
    features, gradient = family.nchw(features.detach()), family.nchw(gradient)
    weights = gradient.mean((2, 3), keepdim=True)
    return F.relu((weights * features).sum(1)).numpy()
