"""Attention and its class gradient as torch itself computes them, for comparison.

Nothing here knows our graphs: the tensors are caught while the module runs and differentiated by
autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["TorchTaps", "torch_taps"]


@dataclass(frozen=True, kw_only=True)
class TorchTaps:
    """What one forward and backward pass gave; shapes as in the explained graph.

    Attributes:
        logits: [B, classes].
        attention: Per layer [B, heads, N, N], what multiplies the value vectors.
        attention_gradient: Per layer, d logit[target] / d attention.
        features: What the last layer projects, [B, N, D]; of attentions side by side, one behind
            the other.
        features_gradient: d logit[target] / d features.
        pooling: Attention of a head that pools by it, [B, heads, queries, N].
    """

    logits: torch.Tensor
    attention: list[torch.Tensor]
    attention_gradient: list[torch.Tensor]
    features: torch.Tensor | None
    features_gradient: torch.Tensor | None
    pooling: torch.Tensor | None


def torch_taps(
    module: torch.nn.Module,
    pixel_values: torch.Tensor,
    target: torch.Tensor,
    heads: Sequence[int] = (),
) -> TorchTaps:
    """Runs `module` once forward and once backward and returns what the graph should give.

    Args:
        module: A classifier in `inference_form`.
        pixel_values: [B, 3, H, W].
        target: [B] int64, one class for each image.
        heads: Number of heads of each layer. Attentions that run side by side are one layer with
            the heads of all; left out, each attention is a layer.
    """
    recorder = _Recorder()
    with torch.enable_grad(), recorder.watching(module):
        logits = module(pixel_values.detach().clone().requires_grad_())
        found = _of_images(recorder.found(), len(pixel_values))
        tensors = [attention for attention, _ in found]
        layers = _layers(tensors, len(pixel_values), heads)
        entering = [t for _, t in found[-len(layers[-1]) :] if t is not None] if layers else []
        features = list({id(t): t for t in entering}.values())
        gradients: tuple[torch.Tensor, ...] = ()
        if tensors:
            selected = logits.gather(1, target[:, None]).sum()  # images do not mix: per image
            gradients = torch.autograd.grad(selected, [*tensors, *features])
    slopes = iter(gradients)
    attention_gradient = [_joined([next(slopes) for _ in layer]) for layer in layers]
    tokens: list[tuple[torch.Tensor, torch.Tensor]] = []
    for value, slope in zip(features, slopes, strict=True):
        if tokens and torch.equal(tokens[-1][0], value):  # computed twice, by norms that are equal
            slope = tokens.pop()[1] + slope
        tokens.append((value.detach(), slope))
    return TorchTaps(
        logits=logits.detach(),
        attention=[_joined([t.detach() for t in layer]) for layer in layers],
        attention_gradient=attention_gradient,
        features=torch.cat([value for value, _ in tokens], -1) if tokens else None,
        features_gradient=torch.cat([slope for _, slope in tokens], -1) if tokens else None,
        pooling=None if recorder.pooling is None else recorder.pooling.detach(),
    )


def _layers(
    tensors: Sequence[torch.Tensor], batch: int, heads: Sequence[int]
) -> list[list[torch.Tensor]]:
    """The attentions, in order, by layer."""
    layers: list[list[torch.Tensor]] = []
    left = list(heads)
    missing = 0
    for tensor in tensors:
        if missing < 1:
            layers.append([])
            missing = left.pop(0) if left else 0
        layers[-1].append(tensor)
        missing -= tensor.numel() // (batch * tensor.shape[-2] * tensor.shape[-1])
    return layers


def _joined(attentions: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other along the heads."""
    if len(attentions) == 1:
        return attentions[0]
    return torch.cat(list(attentions), 1)


def _of_images(found: Sequence[_Found], batch: int) -> Sequence[_Found]:
    """Attention within whole images, without that within their patches, if there is both."""
    return [pair for pair in found if len(pair[0]) == batch] or found


_Found = tuple[torch.Tensor, torch.Tensor | None]  # attention, what it is a projection of


@dataclass
class _Frame:
    """A module that is running: its input, and that of the first linear layer directly in it."""

    input: torch.Tensor | None
    projected: torch.Tensor | None = None

    @property
    def tokens(self) -> torch.Tensor | None:
        """What the attention in the module projects: all its tokens, after a norm of its own."""
        if self.input is None or self.projected is None:
            return self.input
        of_map = self.input.ndim == 4 and self.projected.ndim == 3  # made tokens in the module
        return self.projected if of_map or self.projected.shape == self.input.shape else self.input


class _Recorder(TorchFunctionMode):
    """Catches attention tensors: what `attn_drop` returns, or else the result of a softmax.

    timm passes the attention through a submodule `attn_drop` in every one of its classes.
    Elsewhere the last step before the product with the values is a softmax, or hidden in one of
    torch's two fused functions, which are then computed step by step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._dropped: list[_Found] = []
        self._softmaxed: list[_Found] = []
        self._frames: list[_Frame] = []
        self._open = False  # whether the last attention has not met its values yet
        self.pooling: torch.Tensor | None = None

    def found(self) -> list[_Found]:
        return self._dropped or self._softmaxed

    @contextlib.contextmanager
    def watching(self, module: torch.nn.Module) -> Iterator[None]:
        handles = []
        for name, submodule in module.named_modules():
            handles.append(submodule.register_forward_pre_hook(self._enter, with_kwargs=True))
            if name.rpartition(".")[2] == "attn_drop":
                handles.append(submodule.register_forward_hook(self._drop))
            handles.append(submodule.register_forward_hook(self._leave))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        given = tensors[0] if tensors else None
        if isinstance(module, torch.nn.Linear) and self._frames:
            parent = self._frames[-1]
            parent.projected = given if parent.projected is None else parent.projected
        self._frames.append(_Frame(given))

    def _leave(self, *_: Any) -> None:
        self._frames.pop()

    def _drop(self, module: Any, args: Any, output: torch.Tensor) -> None:
        self._dropped.append((output, self._frames[-2].tokens))
        self._open = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SOFTMAX:
            result = func(*args, **kwargs)
            if result.ndim == 4:
                self._keep(result)
            return result
        if func in _MATMUL and self._open:
            # Differential attention subtracts heads from each other behind `attn_drop`.
            last, tokens = self._dropped[-1]
            if args[0].ndim == last.ndim and args[0].shape[-2:] == last.shape[-2:]:
                self._dropped[-1] = args[0], tokens
                self._open = False
        if func is F.scaled_dot_product_attention:
            result, attention = _attend(*args, **kwargs)
            self._keep(attention)
            return result
        if func is F.multi_head_attention_forward:
            kwargs = {**kwargs, "need_weights": True, "average_attn_weights": False}
            result, weights = func(*args, **kwargs)
            # `weights` is a view made for the caller; the product used what it is a view of.
            self._keep(weights if weights._base is None else weights._base)
            return result, weights
        return func(*args, **kwargs)

    def _keep(self, attention: torch.Tensor) -> None:
        if attention.shape[-1] == attention.shape[-2]:
            self._softmaxed.append((attention, self._frames[-1].tokens))
        else:
            self.pooling = attention


_MATMUL = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.mT
    if is_causal:
        attn_mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    attention = scores.softmax(-1)
    return attention @ value, attention
