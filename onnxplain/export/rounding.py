"""Rounds a module's weights to what float16 holds, so that torch computes what the file does."""

from __future__ import annotations

import torch

from onnxplain.graphs.precision import halved

__all__ = ["round_weights"]


def round_weights(module: torch.nn.Module) -> None:
    """Gives every weight that the file will store as float16 its nearest such values, in place."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                half = halved(tensor.detach().to("cpu", torch.float32).numpy())
                if half is not None:
                    tensor.copy_(torch.from_numpy(half))
