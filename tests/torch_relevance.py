"""Relevance of a torch module, to check our graphs against.

Written from the papers' formulas, not from our graphs: torch.fx records what the module
computes, in the few operators of core ATen, and relevance itself (not relevance over value) goes
back over these by the rules of one of three tables: `Attribution` (Chefer et al., CVPR 2021),
`Plain` (the LRP baseline of that paper) and `AttnLRP` (Achtibat et al., ICML 2024). Linear rules
are written with W+ and W-, one product for each; what a rule calls a VJP comes from torch's
autograd.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["AttnLRP", "Attribution", "Plain", "Program", "Relevance", "Table", "straight_through"]

Function = Callable[..., Any]
Node = Any  # Node of torch.fx, whose types fit no operator
aten = torch.ops.aten

# Elements are picked, joined to others, or reordered.
MOVES = {
    aten._to_copy.default,
    aten.alias.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.expand.default,
    aten.max_pool2d_with_indices.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view.default,
    aten.where.self,
}
POINTWISE = {
    aten.erf.default,
    aten.gelu.default,
    aten.relu.default,
    aten.sigmoid.default,
    aten.tanh.default,
}
SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor}
FACTORS = {  # where the two factors of a product are
    aten.addmm.default: (1, 2),
    aten.bmm.default: (0, 1),
    aten.convolution.default: (0, 1),
    aten.mm.default: (0, 1),
}


@dataclass(frozen=True)
class Relevance:
    """Relevance of the probabilities of every softmax, from input to output, and of the pixels."""

    logits: Tensor
    attention: list[Tensor]
    pixels: Tensor


def vjp(f: Function, x: Tensor, g: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, g)[0]


@torch.library.custom_op("tests::straight_through", mutates_args=())
def straight_through(x: Tensor, rounded: Tensor, inside: Tensor) -> Tensor:
    """What x was rounded to; where it is not `inside` the range of the integers it was cut off."""
    return rounded.clone()


straight_through.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[0], None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[2]),
)
STRAIGHT = torch.ops.tests.straight_through.default


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

    def norm(self, r: Tensor, x: Tensor, y: Tensor, linear: Function) -> Tensor:
        """`linear` is the normalisation with its deviation as a constant, without its shift."""
        return r

    def bias(self, r: Tensor, x: Tensor, b: Tensor) -> Tensor:
        return r

    def mean(self, r: Tensor, x: Tensor, y: Tensor, f: Function) -> Tensor:
        return x * vjp(f, x, self.divide(r, y))

    def straight(self, r: Tensor, inside: Tensor) -> Tensor:
        return r * inside


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

    def norm(self, r: Tensor, x: Tensor, y: Tensor, linear: Function) -> Tensor:
        return x * vjp(linear, x, r / y)

    def bias(self, r: Tensor, x: Tensor, b: Tensor) -> Tensor:
        """One number for all elements, as in a GELU written out, belongs to a nonlinearity."""
        return r if b.numel() == 1 else self.add(r, x, b)[0]


class Program(fx.Interpreter):
    """What a module computes for some images, operator by operator, everything in float64.

    Args:
        module: From images to logits, in evaluation mode and float64.
        images: [B, 3, H, W].
    """

    def __init__(self, module: Function, images: Tensor) -> None:
        core: Any = torch._decomp.core_aten_decompositions()
        with torch.no_grad():
            recorded = make_fx(lambda x: module(x), core)(images)
        super().__init__(recorded)
        self.values: dict[Node, Any] = {}
        with torch.no_grad():
            self.logits = self.run(images)
        graph = self.graph
        (self.image,) = graph.find_nodes(op="placeholder")
        self.live = {self.image}  # what varies with the images, step by step
        for node in graph.nodes:
            value, constant = self.values[node], node.target is aten.full_like.default
            comparison = isinstance(value, Tensor) and not value.is_floating_point()
            if not constant | comparison and any(x in self.live for x in node.all_input_nodes):
                self.live.add(node)
        softmaxes = graph.find_nodes(op="call_function", target=aten._softmax.default)
        self.attention = [self.used(node) for node in softmaxes if node in self.live]

    def relevance(self, target: Tensor, table: Table) -> Relevance:
        """Relevance of one class per image.

        Args:
            target: [B] class indices.
            table: The rules.

        Raises:
            KeyError: The module has an operator that no rule is known for.
        """
        one_hot = F.one_hot(target, self.logits.shape[1]).double()
        with torch.no_grad():
            found = self.back(table, table.seed(one_hot, self.logits))
        attention = [found[node] for node in self.attention]
        return Relevance(self.logits, attention, found[self.image])

    def used(self, softmax: Node) -> Node:
        """What the values are multiplied by: the probabilities, or what they are rounded to."""
        rounded = [node for node in softmax.users if node.target is STRAIGHT]
        return rounded[0] if rounded else softmax

    def run_node(self, n: Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]

    def back(self, table: Table, seed: Tensor) -> dict[Node, Tensor]:
        """Relevance of every value, the sum over its consumers."""
        (output,) = self.graph.find_nodes(op="output")
        (result,) = output.all_input_nodes
        found = {result: seed}
        for node in reversed(self.graph.nodes):
            if node in found and node is not self.image:
                for source, part in self.parts(table, node, found[node]):
                    found[source] = found.get(source, 0) + part
        return found

    def parts(self, table: Table, node: Node, r: Tensor) -> Iterator[tuple[Node, Tensor]]:
        """What the inputs of one operator get that depend on the images."""
        kind, y = node.target, self.values[node]
        y = y[0] if isinstance(y, tuple) and kind is not aten.split_with_sizes.default else y
        live = [x for x in node.all_input_nodes if x in self.live]
        x = self.values[live[0]]
        if kind is operator.getitem:
            whole = self.values[live[0]]
            if live[0].target is aten.split_with_sizes.default:  # a part among zeros
                own = [r if i == node.args[1] else torch.zeros_like(t) for i, t in enumerate(whole)]
                yield live[0], torch.cat(own, live[0].args[2])
            else:
                assert node.args[1] == 0
                yield live[0], r
        elif kind is aten.split_with_sizes.default:
            yield live[0], r
        elif kind in MOVES:
            for source in live:
                yield source, vjp(self.of(node, source), self.values[source], r)
        elif kind in POINTWISE:
            yield live[0], r
        elif kind is aten.mean.dim:
            yield live[0], table.mean(r, x, y, self.of(node, live[0]))
        elif kind is aten.sum.dim_IntList:  # of a stack of branches, a residual sum
            (axis,) = node.args[1]
            yield live[0], torch.stack(table.add(r, *x.unbind(axis)), axis)
        elif kind is aten._softmax.default:
            yield live[0], table.softmax(r, x, y)
        elif kind in NORMS:
            yield live[0], table.norm(r, x, y, NORMS[kind](*self.arguments(node)))
        elif kind is STRAIGHT:
            yield live[0], table.straight(r, self.arguments(node)[2])
        elif kind in SCALES:
            shares = [r] if len(live) == 1 else table.gate(r)
            for source, part in zip(live, shares, strict=True):
                yield source, part.sum_to_size(self.values[source].shape)
        elif kind is aten.add.Tensor:
            yield from self.sum(table, node, r)
        else:
            yield from self.product(table, node, r, FACTORS[kind])

    def sum(self, table: Table, node: Node, r: Tensor) -> Iterator[tuple[Node, Tensor]]:
        sources, terms = node.args, self.arguments(node)
        for i, term in enumerate(terms):
            if sources[i] not in self.live and sum(d != 1 for d in term.shape) <= 1:
                yield sources[1 - i], table.bias(r, terms[1 - i], term)
                return
        axis = r.shape.index(len(self.logits))  # of the images; the rules want it first
        shares = table.add(*(t.expand_as(r).movedim(axis, 0) for t in (r, *terms)))
        for source, part in zip(sources, shares, strict=True):
            if source in self.live:
                yield source, part.movedim(0, axis).sum_to_size(self.values[source].shape)

    def product(
        self, table: Table, node: Node, r: Tensor, factors: tuple[int, int]
    ) -> Iterator[tuple[Node, Tensor]]:
        arguments = self.arguments(node)
        sources = [node.args[i] for i in factors]
        values = [arguments[i] for i in factors]
        y, live = self.values[node], [source in self.live for source in sources]
        if all(live):
            yield from zip(sources, table.product(r, values[0], values[1], y), strict=True)
            return

        def multiply(x: Tensor, weight: Tensor) -> Tensor:
            pair = (x, weight) if live[0] else (weight, x)
            if node.target is aten.convolution.default:
                return node.target(*pair, None, *arguments[3:])
            return pair[0] @ pair[1]

        x, weight = values if live[0] else values[::-1]
        source = sources[live.index(True)]
        if source.target is not aten.constant_pad_nd.default:
            rule = table.patches if source is self.image else table.linear
            yield source, rule(r, x, y, weight, multiply)
            return
        inner, pad = source.args[0], self.of(source, source.args[0])
        rule = table.patches if inner is self.image else table.linear
        yield inner, rule(r, self.values[inner], y, weight, lambda x, w: multiply(pad(x), w))

    def arguments(self, node: Node) -> list[Any]:
        return [fx.map_arg(argument, self.values.__getitem__) for argument in node.args]

    def of(self, node: Node, source: Node) -> Function:
        """The operator as a function of one of its inputs."""

        def f(x: Tensor) -> Tensor:
            values = {**self.values, source: x}
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            result = node.target(*args, **kwargs)
            return result[0] if isinstance(result, tuple) else result

        return f


def of_layers(x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float) -> Function:
    deviation = (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()
    return lambda x: (x - x.mean(-1, keepdim=True)) / deviation * weight


def of_groups(
    x: Tensor, weight: Tensor, bias: Tensor, n: int, c: int, area: int, groups: int, eps: float
) -> Function:
    def grouped(x: Tensor) -> Tensor:
        return x.reshape(n, groups, -1)

    deviation = (grouped(x).var(-1, unbiased=False, keepdim=True) + eps).sqrt()

    def linear(x: Tensor) -> Tensor:
        values = grouped(x)
        values = (values - values.mean(-1, keepdim=True)) / deviation
        return values.reshape(x.shape) * weight[:, None, None]

    return linear


def of_batches(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, *options: Any
) -> Function:
    training, _, eps = options
    assert not training
    scale = (weight / (var + eps).sqrt()).reshape(-1, *[1] * (x.ndim - 2))
    return lambda x: x * scale


NORMS: dict[Any, Function] = {
    aten.native_layer_norm.default: of_layers,
    aten.native_group_norm.default: of_groups,
    aten.native_batch_norm.default: of_batches,
}
