"""The reverse walk: carries a quantity from a seed at the logits back to the taps.

What travels is a *cotangent*: for every value of the graph one tensor of the same shape. Nodes are
visited in reverse order; what arrives at a value from several consumers is summed; a table of rules
says what each operator makes of it. The walk knows nothing of derivatives: other tables carry other
quantities.

A head that reads one token of hundreds leaves the cotangent zero everywhere else. Such a cotangent
is kept as a `Range` of one axis. A node that carries the axis (see `axes`) is then
differentiated for that range alone, with its operands sliced, so the last block costs one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxplain.errors import UnsupportedOperatorError
from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.values.axes import carried, reduced_axes
from onnxplain.graphs.values.facts import Facts, Shape
from onnxplain.graphs.values.uses import is_measured

__all__ = ["Cotangent", "Range", "Rule", "Step", "dense", "walk"]


QUANTISED = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16)


@dataclass(frozen=True, order=True)
class Range:
    """Positions `start` .. `stop` of the `total` positions of `axis`."""

    axis: int
    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class Cotangent:
    """What travels at one value.

    Attributes:
        tensor: The cotangent, or only its `range`.
        range: Where it is not zero; None: anywhere.
        dots: Sum over the last axis of cotangent times value, where a rule has it at less cost
            than by forming the product.
        multiple: Whether it is zero wherever the value is.
    """

    tensor: Tensor
    range: Range | None = None
    dots: Tensor | None = None
    multiple: bool = False


@dataclass
class Step:
    """One node as a rule sees it: its operands, its results and the graph to write into.

    `x[i]` is input i (None where it is left out), `y` the first output. Under a `Range` both are
    slices. `wants[i]` says whether input i leads to a tap. `dots` and `multiple` are those of what
    arrived at a node of one output.
    """

    node: ir.Node
    b: Builder
    x: Sequence[Tensor | None]
    y: Tensor
    wants: Sequence[bool]
    range: Range | None = None
    dots: Tensor | None = None
    multiple: bool = False

    def input(self, index: int) -> Tensor:
        tensor = self.x[index]
        assert tensor is not None
        return tensor

    def has(self, index: int) -> bool:
        return index < len(self.x) and self.x[index] is not None

    def fixed(self, index: int) -> bool:
        """Whether input `index` is the same for every image."""
        value = self.node.inputs[index]
        return value is not None and self.b.is_fixed(value)

    def integer(self, name: str, default: int) -> int:
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_int()

    def integers(self, name: str) -> list[int] | None:
        attribute = self.node.attributes.get(name)
        return None if attribute is None else list(attribute.as_ints())

    def real(self, name: str, default: float) -> float:
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_float()

    def text(self, name: str, default: str) -> str:
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_string()

    def axes(self) -> list[int]:
        return reduced_axes(self.node, self.input(0).rank, self.b.facts)

    def constant(self, index: int) -> Sequence[int] | None:
        """Input `index` as integers known before the graph runs, None where it is left out."""
        if not self.has(index):
            return None
        value = self.input(index).constant
        if value is None:
            raise self.refuse(f"input {index} is computed from the image; expected a constant")
        return [int(v) for v in value.reshape(-1)]

    def output(self, index: int, shape: Shape, dtype: ir.DataType | None = None) -> Tensor:
        """Optional output `index` of the node, of the element type of `y` unless given; made if it
        is not there. `shape` is that under the range."""
        node, facts = self.node, self.b.facts
        r = self.range
        if len(node.outputs) <= index:
            node.resize_outputs(index + 1)
        value = node.outputs[index]
        if not value.name or value not in facts:  # left out by name, or only by their number
            full = tuple(r.total if r and i == r.axis else d for i, d in enumerate(shape))
            self.b.describe(value, f"{node.outputs[0].name}/{index}", full, dtype or self.y.dtype)
        tensor = self.b.of(value)
        return self.b.slice(tensor, r.axis, r.start, r.stop) if r else tensor

    def dense(self, cotangent: Cotangent) -> Tensor:
        return dense(self.b, cotangent)

    def total(self, cotangents: Sequence[Cotangent]) -> Cotangent | None:
        return _total(self.b, cotangents)

    def refuse(self, why: str) -> UnsupportedOperatorError:
        return UnsupportedOperatorError(
            f"node {self.node.name} ({self.node.op_type}) has no gradient here: {why}"
        )


# One tensor per output of the node (None where nothing arrived) to one result per input; inputs
# left off at the end get nothing.
Rule = Callable[[Step, Sequence[Tensor | None]], Sequence[Tensor | Cotangent | None]]


def walk(
    b: Builder,
    seeds: Mapping[ir.Value, Cotangent],
    taps: Iterable[ir.Value],
    rules: Mapping[str, Rule],
) -> dict[ir.Value, Cotangent]:
    """Carries `seeds` back to `taps`.

    Args:
        b: Builder on the graph; the nodes of the rules are appended to it.
        seeds: Cotangent of each value that the walk starts from.
        taps: Values whose cotangents are wanted.
        rules: Rule of each operator of the standard domain.

    Returns:
        The cotangent of each tap that a seed depends on.

    Raises:
        UnsupportedOperatorError: A node between a tap and a seed has no rule.
    """
    taps = set(taps)
    nodes = [node for node in b.graph if all(v in b.facts for v in node.outputs)]
    leading = _leading(nodes, taps, b.facts)
    arrived: dict[ir.Value, list[Cotangent]] = {v: [c] for v, c in seeds.items()}
    found: dict[ir.Value, Cotangent] = {}
    for node in reversed(nodes):
        gathered = [_total(b, arrived.pop(v, [])) for v in node.outputs]
        for value, cotangent in zip(node.outputs, gathered, strict=True):
            if cotangent is not None and value in taps:
                found[value] = cotangent
        wants = [v in leading for v in node.inputs]
        if not any(wants) or all(c is None for c in gathered):
            continue
        results = _apply(b, node, gathered, wants, rules)
        for source, result in zip(node.inputs, results, strict=False):
            if result is not None and source is not None and source in leading:
                arrived.setdefault(source, []).append(result)
    for value in taps & arrived.keys():  # inputs of the graph, which no node computes
        total = _total(b, arrived[value])
        if total is not None:
            found[value] = total
    return found


def dense(b: Builder, cotangent: Cotangent) -> Tensor:
    """The cotangent as a full tensor, zeros written out."""
    r = cotangent.range
    if r is None:
        return cotangent.tensor
    return b.pad(cotangent.tensor, r.axis, r.start, r.total - r.stop)


def _leading(
    nodes: Sequence[ir.Node], taps: set[ir.Value], facts: dict[ir.Value, Facts]
) -> set[ir.Value | None]:
    """The taps and every floating-point value computed from one."""
    leading: set[ir.Value | None] = set(taps)
    for node in nodes:
        if any(v in leading for v in node.inputs):
            outputs = (v for v in node.outputs if not is_measured(v))
            leading.update(v for v in outputs if _is_led_to(node, facts[v].dtype))
    return leading


def _is_led_to(node: ir.Node, dtype: ir.DataType) -> bool:
    """Whether a cotangent passes an output of this type: numbers, and quantised ones."""
    return dtype.is_floating_point() or (dtype in QUANTISED and node.op_type != "Cast")


def _apply(
    b: Builder,
    node: ir.Node,
    gathered: Sequence[Cotangent | None],
    wants: Sequence[bool],
    rules: Mapping[str, Rule],
) -> list[Cotangent | None]:
    """What the node's rule makes of the cotangents of its outputs, for each input."""
    rule = rules.get(node.op_type) if node.domain == "" else None
    if rule is None:
        raise UnsupportedOperatorError(
            f"node {node.name}: operator {node.domain or 'ai.onnx'}.{node.op_type} lies between "
            "the attention and the logits and has no gradient rule"
        )
    only = gathered[0] if all(c is None for c in gathered[1:]) else None
    place = None if only is None else only.range
    source = None if place is None else carried(node, place.axis, b.facts)
    if only is None or place is None or source is None:
        x = [None if v is None else b.of(v) for v in node.inputs]
        dots = None if only is None or only.range is not None else only.dots
        multiple = only is not None and only.multiple
        step = Step(node, b, x, b.of(node.outputs[0]), wants, dots=dots, multiple=multiple)
        results = _results(rule, step, [None if c is None else dense(b, c) for c in gathered])
        return [_wrap(b, result, None, None) for result in results]
    x = [_slice(b, v, axis, place) for v, axis in zip(node.inputs, source, strict=True)]
    y = _slice(b, node.outputs[0], place.axis, place)
    assert y is not None
    step = Step(node, b, x, y, wants, place, only.dots, only.multiple)
    results = _results(rule, step, [only.tensor, *(None for _ in gathered[1:])])
    return [_wrap(b, result, axis, place) for result, axis in zip(results, source, strict=False)]


def _results(
    rule: Rule, step: Step, cotangents: Sequence[Tensor | None]
) -> Sequence[Tensor | Cotangent | None]:
    results = rule(step, cotangents)
    for i, wanted in enumerate(step.wants[len(results) :], len(results)):
        if wanted:
            raise step.refuse(f"its input {i} depends on the attention")
    return results


def _slice(b: Builder, value: ir.Value | None, axis: int | None, place: Range) -> Tensor | None:
    if value is None:
        return None
    tensor = b.of(value)
    return tensor if axis is None else b.slice(tensor, axis, place.start, place.stop)


def _wrap(
    b: Builder, result: Tensor | Cotangent | None, axis: int | None, place: Range | None
) -> Cotangent | None:
    """The result of a rule; of one that saw slices, as a range of the whole input."""
    if result is None:
        return None
    if isinstance(result, Tensor):
        result = Cotangent(result)
    if place is None or axis is None:
        return result
    outer = Range(axis, place.start, place.stop, place.total)
    if result.range is None:
        return replace(result, range=outer)
    # One range at a time: keep that of the selection, which its siblings will complete.
    written = dense(b, Cotangent(result.tensor, outer))
    return replace(result, tensor=written, dots=None)


def _total(b: Builder, cotangents: Sequence[Cotangent]) -> Cotangent | None:
    """Sum of what arrived. Ranges that tile an axis are joined, which is cheaper than padding."""
    if len(cotangents) <= 1:
        return cotangents[0] if cotangents else None
    multiple = all(c.multiple for c in cotangents)
    sums: dict[Range | None, Tensor] = {}
    for cotangent in cotangents:
        other = sums.get(cotangent.range)
        tensor = cotangent.tensor
        sums[cotangent.range] = tensor if other is None else b.add(other, tensor)
    if len(sums) == 1:
        ((place, tensor),) = sums.items()
        return Cotangent(tensor, place, multiple=multiple)
    whole = sums.pop(None, None)
    parts = sorted(((r, t) for r, t in sums.items() if r is not None), key=lambda p: p[0])
    if _tiles([r for r, _ in parts]):
        pieces = [b.concat([t for _, t in parts], parts[0][0].axis)]
    else:
        pieces = [dense(b, Cotangent(t, r)) for r, t in parts]
    total = pieces[0] if whole is None else b.add(whole, pieces[0])
    for piece in pieces[1:]:
        total = b.add(total, piece)
    return Cotangent(total, multiple=multiple)


def _tiles(ranges: Sequence[Range]) -> bool:
    """Whether sorted ranges cover one axis without gap or overlap."""
    if len({r.axis for r in ranges}) != 1:
        return False
    starts = [r.start for r in ranges]
    return [0, *(r.stop for r in ranges)] == [*starts, ranges[0].total]
