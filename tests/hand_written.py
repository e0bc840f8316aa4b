"""A small vision transformer written in plain torch, in the ways in which people write them.

It stands for models whose source nobody here has: the attention has many layouts, the patches many
embeddings, and the head reads the tokens in many ways. Each attention keeps the tensor that it
used, so that torch itself says what the explained graph must give.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ATTENTIONS", "CLASSES", "HEADS", "SIZE", "HandWritten", "to_file"]

SIZE, PATCH, GRID = (24, 32), 8, (3, 4)
DIM, HEADS, LAYERS, CLASSES = 16, 2, 2, 5
MASK = torch.linspace(0.2, 1, 13)

# From queries, keys, values [batch, tokens, heads, d] to the attention as it is used (or several of
# them) and the output [batch, tokens, dim]; beside it, what brings it to [batch, heads, n, m].
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Any, Tensor]]
Canonical = Callable[[Tensor], Tensor]
ATTENTIONS: dict[str, tuple[Attend, Canonical]] = {}
UNSUPPORTED: dict[str, tuple[Attend, Canonical]] = {}


def attention(
    name: str, canonical: Canonical = lambda a: a, table: Any = ATTENTIONS
) -> Callable[[Attend], Attend]:
    def add(attend: Attend) -> Attend:
        table[name] = attend, canonical
        return attend

    return add


def joined(output: Tensor) -> Tensor:
    """[batch, tokens, dim] of [batch, heads, tokens, d]."""
    return output.transpose(1, 2).flatten(2)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """[batch, heads, queries, keys]."""
    return q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * q.shape[-1] ** -0.5


@attention("batch, heads, queries, keys")
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = scores(q, k).softmax(-1)
    return a, joined(a @ v.transpose(1, 2))


@attention("heads, batch, queries, keys", lambda a: a.transpose(0, 1))
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.permute(2, 0, 1, 3) for t in (q, k, v))
    a = (q @ k.transpose(2, 3)).softmax(-1)
    return a, (a @ v).permute(1, 2, 0, 3).flatten(2)


@attention("batch * heads, queries, keys", lambda a: a.unflatten(0, (-1, HEADS)))
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (q, k, v))
    a = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
    return a, joined(torch.bmm(a, v).unflatten(0, (-1, HEADS)))


@attention("heads * batch, queries, keys", lambda a: a.unflatten(0, (HEADS, -1)).transpose(0, 1))
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.permute(2, 0, 1, 3).flatten(0, 1) for t in (q, k, v))
    a = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
    return a, torch.bmm(a, v).unflatten(0, (HEADS, -1)).permute(1, 2, 0, 3).flatten(2)


@attention("keys, queries", lambda a: a.transpose(2, 3))
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = scores(k, q).softmax(2)
    return a, joined(a.transpose(2, 3) @ v.transpose(1, 2))


@attention("values on the left", lambda a: a.transpose(2, 3))
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = scores(k, q).softmax(2)
    return a, (v.permute(0, 2, 3, 1) @ a).permute(0, 3, 1, 2).flatten(2)


@attention("einsum")
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.einsum("bnhd, bmhd -> bhnm", q, k).softmax(-1)
    return a, torch.einsum("bhnm, bmhd -> bnhd", a, v).flatten(2)


@attention("einsum, heads last", lambda a: a.permute(0, 3, 1, 2))
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.einsum("bnhd,bmhd->bnmh", q, k).softmax(2)
    return a, torch.einsum("bmhd,bnmh->bnhd", v, a).flatten(2)


@attention("one head", lambda a: a[:, None])
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (t.flatten(2) for t in (q, k, v))
    a = (q @ k.transpose(1, 2)).softmax(-1)
    return a, a @ v


@attention("in double")
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = scores(q, k).double().softmax(-1).float()
    return a, joined(a @ v.transpose(1, 2))


@attention("talking heads")
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    mixing = torch.tensor([[0.7, 0.4], [-0.3, 1.1]])
    a = F.conv2d(scores(q, k).softmax(-1), mixing[:, :, None, None])
    return a, joined(a @ v.transpose(1, 2))


@attention("masked, renormalised, dropped")
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = scores(q, k).softmax(-1)
    a = a * MASK
    a = a / a.sum(-1, keepdim=True)
    a = F.dropout(torch.where(a.isnan(), torch.zeros_like(a), a), 0.1, training=False)
    return a, joined(a @ v.transpose(1, 2))


@attention("head by head", lambda a: a[:, None])
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[list[Tensor], Tensor]:
    heads = [(q[:, :, i] @ k[:, :, i].transpose(1, 2)).softmax(-1) for i in range(HEADS)]
    return heads, torch.cat([a @ v[:, :, i] for i, a in enumerate(heads)], -1)


@attention("within windows", table=UNSUPPORTED)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    tokens = q.shape[1]
    q, k, v = (t.unflatten(1, (-1, 4)).flatten(0, 1) for t in (q, k, v))
    a = scores(q, k).softmax(-1)
    return a, joined(a @ v.transpose(1, 2)).reshape(-1, tokens, DIM)


@attention("within windows, in one axis with the heads", table=UNSUPPORTED)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    tokens = q.shape[1]
    q, k, v = (t.unflatten(1, (-1, 4)).transpose(2, 3).flatten(0, 2) for t in (q, k, v))
    a = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
    windows = torch.bmm(a, v).unflatten(0, (-1, tokens // 4, HEADS))
    return a, windows.transpose(2, 3).reshape(-1, tokens, DIM)


@attention("between channels", table=UNSUPPORTED)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    a = (q.permute(0, 2, 3, 1) @ k.transpose(1, 2)).softmax(-1)
    return a, joined((a @ v.permute(0, 2, 3, 1)).transpose(2, 3))


@attention("pooled keys", table=UNSUPPORTED)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = k[:, 1:] + k[:, :-1], v[:, 1:] + v[:, :-1]
    a = scores(q, k).softmax(-1)
    return a, joined(a @ v.transpose(1, 2))


@attention("softmax written out", table=UNSUPPORTED)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    e = scores(q, k).exp()
    a = e / e.sum(-1, keepdim=True)
    return a, joined(a @ v.transpose(1, 2))


PATCHES: dict[str, Callable[[HandWritten, Tensor], Tensor]] = {
    "flatten": lambda m, x: m.conv(x).flatten(2).transpose(1, 2),
    "channels last": lambda m, x: m.conv(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, DIM),
    "tokens first": lambda m, x: m.conv(x).flatten(2).permute(2, 0, 1).transpose(0, 1),
    "convolutional stem": lambda m, x: m.stem(x).flatten(2).transpose(1, 2),
    "linear on rearranged pixels": lambda m, x: m.linear(
        x.unflatten(3, (GRID[1], PATCH))
        .unflatten(2, (GRID[0], PATCH))
        .permute(0, 2, 4, 3, 5, 1)
        .reshape(x.shape[0], GRID[0] * GRID[1], -1)
    ),
    "padded": lambda m, x: m.conv(F.pad(x, (0, 5, 0, 3))).flatten(2).transpose(1, 2),
    "column by column": lambda m, x: m.conv(x).transpose(2, 3).flatten(2).transpose(1, 2),
    "last patch first": lambda m, x: m.conv(x).flatten(2).transpose(1, 2).flip(1),
}

# What the head takes of the normalised tokens [batch, tokens, dim].
READS: dict[str, Callable[[HandWritten, Tensor], Tensor]] = {
    "class token": lambda m, x: m.head(x[:, 0]),
    "class token, tokens first": lambda m, x: m.head(x.transpose(0, 1)[0]),
    "class token of a split": lambda m, x: m.head(x.split([1, x.shape[1] - 1], 1)[0][:, 0]),
    "two tokens": lambda m, x: (m.head(x[:, 0]) + m.other(x[:, 1])) / 2,
    "mean": lambda m, x: m.head(x.mean(1)),
    "mean of patches": lambda m, x: m.head(x[:, m.prefix :].mean(1)),
    "mean of patches of a split": lambda m, x: m.head(
        x.split([m.prefix, x.shape[1] - m.prefix], 1)[1].mean(1)
    ),
    "sum of patches": lambda m, x: m.head(x[:, m.prefix :].sum(1) / 12),
    "average pooling": lambda m, x: m.head(F.adaptive_avg_pool1d(x.transpose(1, 2), 1).flatten(1)),
    "class token beside the mean": lambda m, x: m.head(x[:, 0]) + m.other(x[:, 1:].mean(1)),
    "maximum": lambda m, x: m.head(x.amax(1)),
    "maximum beside an earlier layer": lambda m, x: (
        m.head(x.amax(1)) + m.other(m.blocks[0].output[:, 0])
    ),
    "weighted": lambda m, x: m.head((m.score(x).softmax(1) * x).sum(1)),
    "attention pooling": lambda m, x: m.head((m.score(x).transpose(1, 2).softmax(-1) @ x)[:, 0]),
    "token at the end": lambda m, x: m.head(x[:, -1]),
}


class Block(nn.Module):
    def __init__(self, attention: str, style: str) -> None:
        super().__init__()
        self.attend, self.canonical = {**ATTENTIONS, **UNSUPPORTED}[attention]
        self.style = style
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.project = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.used: list[Tensor] = []

    def attention(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, 3, HEADS, DIM // HEADS)
        used, output = self.attend(*heads.unbind(2))
        self.used += used if isinstance(used, list) else [used]
        return self.project(output)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y)
        if self.style == "two attentions side by side":
            x = x + self.attention(-y)
        if self.style == "two attentions of other tokens side by side":
            x = x + self.attention(y.roll(1, 1))
        self.output = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.output


class HandWritten(nn.Module):
    """A classifier of pictures of `SIZE`; each option names an entry of a table above."""

    conv: nn.Module
    stem: nn.Module
    linear: nn.Module
    head: nn.Module
    other: nn.Module
    score: nn.Module
    blocks: Any
    prefix: int

    def __init__(
        self,
        *,
        attention: str = "batch, heads, queries, keys",
        patches: str = "flatten",
        read: str = "class token",
        prefix: int = 1,
        style: str = "",
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.patches, self.read, self.prefix = PATCHES[patches], READS[read], prefix
        self.last = read == "token at the end"
        self.style = style
        tokens = prefix + GRID[0] * GRID[1]
        self.conv = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.linear = nn.Linear(3 * PATCH * PATCH, DIM)
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, DIM, 4, 4)
        )
        self.tokens = nn.Parameter(torch.randn(1, prefix, DIM))
        self.positions = nn.Parameter(torch.randn(1, tokens, DIM))
        self.registers = nn.Parameter(torch.randn(1, 2, DIM))
        self.blocks = nn.ModuleList(Block(attention, style) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head, self.other = nn.Linear(DIM, CLASSES), nn.Linear(DIM, CLASSES)
        self.score = nn.Linear(DIM, 1)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1 or name.startswith(("head", "conv", "blocks")):
                    parameter.add_(0.2 * torch.randn_like(parameter))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(self, x)
        if self.prefix:
            tokens = self.tokens.expand(x.shape[0], -1, -1)
            x = torch.cat([x, tokens] if self.last else [tokens, x], 1)
        x = x + self.positions
        if self.style == "registers put in between":
            registers = self.registers.expand(x.shape[0], -1, -1)
            x = torch.cat([x[:, :1], registers, x[:, 1:]], 1)
        beside = -x
        for block in self.blocks:
            x = block(x)
            if self.style == "two streams":
                beside = block(beside)
        if self.style == "two streams":
            x = x + beside
        logits: Tensor = self.read(self, self.norm(x))
        return logits

    def expected(self, images: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Logits, attention and its gradient for the targets, per layer [batch, heads, n, n].

        Attentions side by side are one layer, with the heads of all."""
        blocks: list[Any] = list(self.blocks)
        for block in blocks:
            block.used.clear()
        logits = self(images)
        used = [block.used for block in blocks]
        selected = logits.gather(1, target[:, None]).sum()
        gradients = [torch.autograd.grad(selected, u, retain_graph=True) for u in used]
        canonical = blocks[0].canonical
        return (
            logits.detach(),
            [torch.cat([canonical(t).detach() for t in layer], 1) for layer in used],
            [torch.cat([canonical(t).detach() for t in layer], 1) for layer in gradients],
        )


def to_file(
    module: nn.Module,
    path: Path,
    *,
    dynamo: bool = False,
    opset: int = 17,
    batch: int | None = None,
    size: tuple[int, int] = SIZE,
) -> Path:
    """Exports as users do, not as onnxplain does: names, opset and batch are what they are."""
    dtype = next(module.parameters()).dtype
    example = torch.randn(batch or 2, 3, *size, dtype=dtype)
    options: dict[str, Any] = {"input_names": ["image"], "output_names": ["output"]}
    if batch is None and dynamo:
        options["dynamic_shapes"] = ({0: torch.export.Dim("n")},)
    elif batch is None:
        options["dynamic_axes"] = {"image": {0: "n"}, "output": {0: "n"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (example,),
            path,
            dynamo=dynamo,
            opset_version=opset,
            verbose=False,
            external_data=False,
            **options,
        )
    return path
