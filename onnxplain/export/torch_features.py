"""Feature maps and their class gradient as torch itself computes them, for comparison.

Nothing here knows our graphs: every tensor that has the rows and columns of the Grad-CAM layer is
caught while the module runs and differentiated by autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["TorchFeatures", "torch_features"]


@dataclass(frozen=True, kw_only=True)
class TorchFeatures:
    """What one forward and backward pass gave.

    Attributes:
        logits: [B, classes].
        maps: Every feature map with the grid asked for, [B, C, h, w], with d logit[target] / d map;
            of a tensor whose axes can be read in two ways, both.
    """

    logits: torch.Tensor
    maps: list[tuple[torch.Tensor, torch.Tensor]]


def torch_features(
    module: torch.nn.Module,
    pixel_values: torch.Tensor,
    target: torch.Tensor,
    grid: tuple[int, int],
) -> TorchFeatures:
    """Runs `module` once forward and once backward.

    Args:
        module: A classifier in `inference_form`.
        pixel_values: [B, 3, H, W].
        target: [B] int64, one class for each image.
        grid: Rows and columns of the feature maps to return.
    """
    recorder = _Recorder(len(pixel_values), grid)
    with torch.enable_grad():
        with recorder:
            logits = module(pixel_values.detach().clone().requires_grad_())
        found = list(recorder.found.values())
        selected = logits.gather(1, target[:, None]).sum()  # images do not mix: per image
        gradients = torch.autograd.grad(selected, found, allow_unused=True) if found else ()
    maps = [
        (read(tensor.detach()), read(gradient))
        for tensor, gradient in zip(found, gradients, strict=True)
        if gradient is not None
        for read in _readings(tensor.shape, grid)
    ]
    return TorchFeatures(logits=logits.detach(), maps=maps)


class _Recorder(TorchFunctionMode):
    """Keeps what any function of torch returns, where it has the shape of a feature map."""

    def __init__(self, batch: int, grid: tuple[int, int]) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}  # by identity: some change in place
        self._batch, self._grid = batch, grid

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.requires_grad
                and tensor.ndim > 2
                and len(tensor) == self._batch
                and _readings(tensor.shape, self._grid)
            ):
                self.found[id(tensor)] = tensor
        return result


def _readings(
    shape: torch.Size, grid: tuple[int, int]
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The ways to read a tensor of this shape as [B, C, rows, columns]."""
    ways: list[Callable[[torch.Tensor], torch.Tensor]] = []
    if len(shape) == 4 and tuple(shape[2:]) == grid:
        ways.append(lambda t: t)
    if len(shape) == 4 and tuple(shape[1:3]) == grid:
        ways.append(lambda t: t.permute(0, 3, 1, 2))
    if len(shape) == 3 and shape[1] == grid[0] * grid[1]:
        ways.append(lambda t: t.unflatten(1, grid).permute(0, 3, 1, 2))
    if len(shape) == 3 and shape[2] == grid[0] * grid[1]:
        ways.append(lambda t: t.unflatten(2, grid))
    return ways
