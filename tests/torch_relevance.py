"""Relevance of a timm vision transformer in torch, to check our graphs against.

Written from the papers' formulas, not from our graphs: the forward pass is spelled out step by step
on a `Tape`, which plays relevance itself (not relevance over value) back by the rules of one of
three tables: `Attribution` (Chefer et al., CVPR 2021), `Plain` (the LRP baseline of that paper) and
`AttnLRP` (Achtibat et al., ICML 2024). Linear rules are written with W+ and W-, one product for
each; what a rule calls a VJP comes from torch's autograd.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.hybrid_embed import HybridEmbed
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from timm.layers.padding import pad_same
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import ParallelThingsBlock
from torch import Tensor, nn

__all__ = ["AttnLRP", "Attribution", "Plain", "Relevance", "Table", "relevance"]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Relevance:
    """Relevance per layer: of the attention, of the tokens that enter the block; of the pixels."""

    logits: Tensor
    attention: list[Tensor]
    stream: list[Tensor]
    pixels: Tensor


def relevance(module: nn.Module, images: Tensor, target: Tensor, table: Table) -> Relevance:
    """Relevance of one class per image, everything in float64.

    Args:
        module: A VisionTransformer of timm in evaluation mode and float64.
        images: [B, 3, H, W].
        target: [B] class indices.
        table: The rules.
    """
    tape = Tape(table)
    logits = forward(tape, module, images)
    one_hot = F.one_hot(target, logits.shape[1]).double()
    found = tape.back(logits, table.seed(one_hot, logits))
    return Relevance(
        logits,
        [found[id(x)] for x in tape.attention],
        [found[id(x)] for x in tape.stream],
        found[id(images)],
    )


def vjp(f: Function, x: Tensor, g: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, g)[0]


class Table(ABC):
    """What the tables of Chefer et al. share: one-hot seed, half for each factor of a product,
    everything that is not named passes relevance unchanged."""

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.where(b == 0, torch.zeros_like(a), a / b)

    def seed(self, one_hot: Tensor, logits: Tensor) -> Tensor:
        return one_hot

    @abstractmethod
    def linear(self, r: Tensor, x: Tensor, y: Tensor, weight: Tensor, map: Function) -> Tensor:
        """Relevance of x."""

    def patches(self, r: Tensor, x: Tensor, y: Tensor, weight: Tensor, map: Function) -> Tensor:
        return self.linear(r, x, y, weight, map)

    def add(self, r: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        share = self.divide(r, a + b)
        return a * share, b * share

    def product(self, r: Tensor, a: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        share = self.divide(r, y)
        return a * (share @ b.mT) / 2, b * (a.mT @ share) / 2

    def gate(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return r / 2, r / 2

    def softmax(self, r: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return r

    def norm(self, r: Tensor, x: Tensor, y: Tensor, module: Any) -> Tensor:
        return r

    def mean(self, r: Tensor, x: Tensor, y: Tensor, f: Function) -> Tensor:
        return x * vjp(f, x, self.divide(r, y))


class Attribution(Table):
    """x+ W+ and x- W- under one denominator; a residual sum keeps the total relevance."""

    def linear(self, r: Tensor, x: Tensor, y: Tensor, weight: Tensor, map: Function) -> Tensor:
        high, low = x.clamp(min=0), x.clamp(max=0)
        up, down = weight.clamp(min=0), weight.clamp(max=0)
        share = r / (map(high, up) + map(low, down) + 1e-9)
        return high * vjp(lambda x: map(x, up), x, share) + low * vjp(
            lambda x: map(x, down), x, share
        )

    def add(self, r: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        parts = super().add(r, a, b)

        def total(t: Tensor) -> Tensor:
            return t.flatten(1).sum(1).reshape(-1, *[1] * (t.ndim - 1))

        sums = [total(part) for part in parts]
        whole = sums[0].abs() + sums[1].abs()
        first, second = (
            part * self.divide(self.divide(own.abs(), whole) * total(r), own)
            for part, own in zip(parts, sums, strict=True)
        )
        return first, second


class Plain(Table):
    """x+ W+ and x- W-, a denominator each; the patch embedding by the z-B rule."""

    def linear(self, r: Tensor, x: Tensor, y: Tensor, weight: Tensor, map: Function) -> Tensor:
        result = torch.zeros_like(x)
        for low, high in ((0, None), (None, 0)):
            part, w = x.clamp(low, high), weight.clamp(low, high)
            share = r / (map(part, w) + 1e-9)
            result += part * vjp(lambda x, w=w: map(x, w), x, share)
        return result

    def patches(self, r: Tensor, x: Tensor, y: Tensor, weight: Tensor, map: Function) -> Tensor:
        low = x.amin((1, 2, 3), keepdim=True).expand_as(x)
        high = x.amax((1, 2, 3), keepdim=True).expand_as(x)
        up, down = weight.clamp(min=0), weight.clamp(max=0)
        share = self.divide(r, map(x, weight) - map(low, up) - map(high, down))
        terms = [(x, weight, 1), (low, up, -1), (high, down, -1)]
        return sum(s * t * vjp(lambda x, w=w: map(x, w), x, share) for t, w, s in terms)  # type: ignore[return-value]


class AttnLRP(Table):
    """Epsilon rule with epsilon 0 (or the gamma rule) for what is linear, the bias included in the
    denominator; the softmax by its Taylor expansion; the deviation of a LayerNorm is a constant."""

    def __init__(self, gamma: float = 0.0) -> None:
        self.gamma = gamma

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        return a / b

    def seed(self, one_hot: Tensor, logits: Tensor) -> Tensor:
        return one_hot * logits

    def linear(self, r: Tensor, x: Tensor, y: Tensor, weight: Tensor, map: Function) -> Tensor:
        product = map(x, weight)
        r = r * product / y  # the bias takes the rest
        if not self.gamma:
            return x * vjp(lambda x: map(x, weight), x, r / product)
        # Contributions x_j w_jk of the sign of their sum count 1 + gamma times.
        parts = [
            (half, w, sign * sign_w)
            for half, sign in ((x.clamp(min=0), 1), (x.clamp(max=0), -1))
            for w, sign_w in ((weight.clamp(min=0), 1), (weight.clamp(max=0), -1))
        ]
        counts = [1 + self.gamma * (product.sign() == sign) for _, _, sign in parts]
        total = sum(n * map(half, w) for n, (half, w, _) in zip(counts, parts, strict=True))
        result = torch.zeros_like(x)
        for n, (half, w, _) in zip(counts, parts, strict=True):
            result += half * vjp(lambda x, w=w: map(x, w), x, n * r / total)
        return result

    def softmax(self, r: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return x * (r - y * r.sum(-1, keepdim=True))

    def norm(self, r: Tensor, x: Tensor, y: Tensor, module: Any) -> Tensor:
        grouped = isinstance(module, nn.GroupNorm)
        shape = (len(x), module.num_groups, -1) if grouped else x.shape
        weight = module.weight[:, None, None] if grouped else module.weight
        values = x.reshape(shape)
        deviation = (values.var(-1, unbiased=False, keepdim=True) + module.eps).sqrt()

        def linear(x: Tensor) -> Tensor:
            values = x.reshape(shape)
            return ((values - values.mean(-1, keepdim=True)) / deviation).reshape(x.shape) * weight

        return x * vjp(linear, x, r / y)


class Tape:
    """Computes a step and keeps how its relevance goes back."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.attention: list[Tensor] = []
        self.stream: list[Tensor] = []
        self._steps: list[tuple[Tensor, Sequence[Tensor], Function]] = []

    def _step(self, y: Tensor, sources: Sequence[Tensor], back: Function) -> Tensor:
        self._steps.append((y, sources, back))
        return y

    def back(self, y: Tensor, seed: Tensor) -> dict[int, Tensor]:
        """Relevance of every tensor on the tape, by its id; the sum over its consumers."""
        found = {id(y): seed}
        for result, sources, back in reversed(self._steps):
            parts = back(found[id(result)])
            gone = [parts] if isinstance(parts, Tensor) else parts
            for source, part in zip(sources, gone, strict=False):
                found[id(source)] = found.get(id(source), 0) + part
        return found

    def linear(self, x: Tensor, layer: Any) -> Tensor:
        y = layer(x)
        return self._step(y, [x], lambda r: self.table.linear(r, x, y, layer.weight, F.linear))

    def convolution(self, x: Tensor, layer: Any) -> Tensor:
        """The table has a rule of its own for one of the picture."""

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            if isinstance(layer, Conv2dSame):
                x = pad_same(x, list(layer.kernel_size), list(layer.stride))
            return F.conv2d(x, weight, stride=layer.stride)

        y = layer(x)
        rule = self.table.linear if self._steps else self.table.patches
        return self._step(y, [x], lambda r: rule(r, x, y, layer.weight, convolve))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._step(a + b, [a, b], lambda r: self.table.add(r, a, b))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        return self._step(y, [a, b], lambda r: self.table.product(r, a, b, y))

    def gate(self, a: Tensor, b: Tensor) -> Tensor:
        return self._step(a * b, [a, b], self.table.gate)

    def softmax(self, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        return self._step(y, [x], lambda r: self.table.softmax(r, x, y))

    def norm(self, x: Tensor, module: Any) -> Tensor:
        if isinstance(module, nn.Identity):
            return x
        if isinstance(module, nn.GroupNorm):  # timm's have an activation in them
            y = F.group_norm(x, module.num_groups, module.weight, module.bias, module.eps)
        else:
            assert isinstance(module, nn.LayerNorm)
            y = module(x)
        return self._step(y, [x], lambda r: self.table.norm(r, x, y, module))

    def mean(self, x: Tensor) -> Tensor:
        y = x.mean(1)
        return self._step(y, [x], lambda r: self.table.mean(r, x, y, lambda x: x.mean(1)))

    def unchanged(self, x: Tensor, f: Function) -> Tensor:
        """A pointwise nonlinearity or a constant scale."""
        return self._step(f(x), [x], lambda r: r)

    def move(self, x: Tensor, f: Function) -> Tensor:
        """Elements are picked, joined to others, or reordered."""
        return self._step(f(x), [x], lambda r: vjp(f, x, r))


@torch.no_grad()
def forward(tape: Tape, m: Any, images: Tensor) -> Tensor:
    """Logits of timm's VisionTransformer, with and without its options."""
    hybrid = isinstance(m.patch_embed, HybridEmbed)
    x = tape.convolution(
        backbone(tape, m.patch_embed.backbone, images) if hybrid else images, m.patch_embed.proj
    )
    x = tape.move(x, lambda x: x.flatten(2).mT)
    tokens = [getattr(m, name, None) for name in ("cls_token", "dist_token", "reg_token")]
    prefix = [t.expand(len(images), -1, -1) for t in tokens if t is not None]

    def join(x: Tensor) -> Tensor:
        return torch.cat([*prefix, x], 1)

    if m.no_embed_class:
        x = tape.add(x, m.pos_embed.expand_as(x))
        x = tape.move(x, join)
    else:
        x = tape.move(x, join)
        x = tape.add(x, m.pos_embed.expand_as(x))
    x = tape.norm(x, m.norm_pre)
    for block in m.blocks:
        tape.stream.append(x)
        if isinstance(block, ParallelThingsBlock):
            attns = [(b.norm, b.attn, b.ls) for b in block.attns]
            mlps = [(b.norm, b.mlp, b.ls) for b in block.ffns]
        else:
            attns = [(block.norm1, block.attn, block.ls1)]
            mlps = [(block.norm2, block.mlp, block.ls2)]
        for compute, branches in ((attend, attns), (mlp, mlps)):
            results = [scaled(tape, compute(tape, m, tape.norm(x, n)), ls) for n, m, ls in branches]
            x = tape.add(x, results[0] if len(results) == 1 else tape.add(*results))
    x = tape.norm(x, m.norm)
    if isinstance(m, VisionTransformerDistilled):
        heads = [
            tape.linear(tape.move(x, lambda x, i=i: x[:, i]), head)
            for i, head in enumerate((m.head, m.head_dist))
        ]
        return tape.unchanged(tape.add(*heads), lambda y: y / 2)
    if m.global_pool == "avg":
        x = tape.mean(tape.move(x, lambda x: x[:, m.num_prefix_tokens :]))
    else:
        x = tape.move(x, lambda x: x[:, 0])
    return tape.linear(tape.norm(x, m.fc_norm), m.head)


def backbone(tape: Tape, m: Any, x: Tensor) -> Tensor:
    """The convolutional stem and stages of a hybrid."""
    x = tape.unchanged(tape.norm(tape.convolution(x, m.stem.conv), m.stem.norm), F.relu)
    x = tape.move(x, m.stem.pool)
    for stage in m.stages:
        for block in stage.blocks:
            short = x
            if block.downsample is not None:
                short = tape.convolution(x, block.downsample.conv)
                short = tape.norm(short, block.downsample.norm)
            for conv, norm in ((block.conv1, block.norm1), (block.conv2, block.norm2)):
                x = tape.unchanged(tape.norm(tape.convolution(x, conv), norm), F.relu)
            x = tape.norm(tape.convolution(x, block.conv3), block.norm3)
            x = tape.unchanged(tape.add(x, short), F.relu)
    return x


def scaled(tape: Tape, x: Tensor, layer_scale: Any) -> Tensor:
    if isinstance(layer_scale, nn.Identity):
        return x
    return tape.unchanged(x, lambda x: x * layer_scale.gamma)


def attend(tape: Tape, m: Any, x: Tensor) -> Tensor:
    assert isinstance(m.norm, nn.Identity) and m.gate is None
    qkv = tape.linear(x, m.qkv)
    q, k, v = (
        tape.move(
            qkv,
            lambda t, i=i: t.unflatten(2, (3, m.num_heads, m.head_dim))[:, :, i].transpose(1, 2),
        )
        for i in range(3)
    )
    q = tape.unchanged(tape.norm(q, m.q_norm), lambda q: q * m.scale)
    k = tape.move(tape.norm(k, m.k_norm), lambda k: k.mT)
    attention = tape.softmax(tape.product(q, k))
    tape.attention.append(attention)
    out = tape.move(tape.product(attention, v), lambda t: t.transpose(1, 2).flatten(2))
    return tape.linear(out, m.proj)


def mlp(tape: Tape, m: Any, x: Tensor) -> Tensor:
    assert isinstance(m.norm, nn.Identity)
    if isinstance(m, Mlp):
        x = tape.unchanged(tape.linear(x, m.fc1), m.act)
    elif isinstance(m, SwiGLU):
        x = tape.gate(tape.unchanged(tape.linear(x, m.fc1_g), m.act), tape.linear(x, m.fc1_x))
    else:
        assert isinstance(m, GluMlp)
        both = tape.linear(x, m.fc1)
        first, second = (tape.move(both, lambda t, i=i: t.chunk(2, -1)[i]) for i in (0, 1))
        if m.gate_last:
            x = tape.gate(first, tape.unchanged(second, m.act))
        else:
            x = tape.gate(tape.unchanged(first, m.act), second)
    return tape.linear(x, m.fc2)
