"""Finds the token layout: the patch grid, the prefix tokens, and the tokens that the head reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from onnxplain.contract import Readout
from onnxplain.errors import UnsupportedModelError
from onnxplain.graphs.structure.taps import Tap
from onnxplain.graphs.values.axes import PER_IMAGE, SHAPE_ONLY, Place, follow, reduced_axes, volume
from onnxplain.graphs.values.facts import Facts, Shape
from onnxplain.graphs.values.positions import COLUMN, ROW, Axes
from onnxplain.graphs.values.uses import is_measured, sources

__all__ = ["TokenLayout", "find_readout", "find_tokens", "prefix_names"]

KINDS = {
    ("attention",): "attention",
    ("mean",): "mean",
    ("token",): "cls",
    ("token", "token"): "cls+dist",
}
SPATIAL = PER_IMAGE | {"Pad"}  # from a picture [batch, channels, rows, columns] to another


@dataclass(frozen=True)
class TokenLayout:
    """What was found of the tokens: the patch `grid` (rows, columns), for each layer how many
    tokens stand before the patches among its keys, and the size of a patch where the patches leave
    a strip of the picture out."""

    grid: tuple[int, int]
    before: tuple[int, ...]
    patch: tuple[int, int] | None = None

    @property
    def prefix(self) -> int:
        """Number of prefix tokens, of which some may come in only behind the first layers."""
        return max(self.before)


def find_tokens(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    image: ir.Value,
    taps: Sequence[Tap],
    places: Mapping[ir.Value, Axes],
) -> TokenLayout | None:
    """The token layout.

    The grid is where the two spatial axes of the picture are merged into a token axis that can be
    followed to the keys of every attention; a Concat on the way counts the prefix tokens. None
    where there is no such place.

    Raises:
        UnsupportedModelError: The patches are numbered column by column.
    """
    merges = chain(_merges(graph, facts, image), _unfolded(graph, places))
    for value, axis, grid, by_rows in merges:
        before = _prefix(graph, facts, value, axis, taps)
        if before is None:
            continue
        if not by_rows:
            raise UnsupportedModelError(
                f"{value.name} numbers the patches column by column; expected row by row"
            )
        return TokenLayout(grid, before, _patch(facts, image, grid))
    return None


def _patch(
    facts: dict[ir.Value, Facts], image: ir.Value, grid: tuple[int, int]
) -> tuple[int, int] | None:
    """Height and width of patches that do not cover the picture; None where they do."""
    for node in image.consumers():
        out = facts[node.outputs[0]].shape if node.outputs else ()
        strides = node.attributes.get("strides")
        if node.op_type != "Conv" or strides is None or tuple(out[2:]) != grid:
            continue
        high, wide = strides.as_ints()
        kernel, pads = facts[node.inputs[1]].shape[2:], node.attributes.get("pads")  # type: ignore[index]
        padded = pads is not None and any(pads.as_ints())
        covered = (grid[0] * high, grid[1] * wide)
        if tuple(kernel) == (high, wide) and not padded and covered != facts[image].shape[2:]:
            return high, wide
    return None


def _merges(
    graph: ir.Graph, facts: dict[ir.Value, Facts], image: ir.Value
) -> Iterator[tuple[ir.Value, int, tuple[int, int], bool]]:
    """Axes that join rows and columns: value, axis, (rows, columns), whether row by row."""
    pictures = _pictures(graph, facts, image)
    for node in graph:
        source = node.inputs[0] if node.inputs else None
        if node.op_type not in SHAPE_ONLY or source is None or source not in pictures:
            continue
        rows, columns = pictures[source]
        shape, out = facts[source].shape, facts[node.outputs[0]].shape
        first = min(rows, columns)
        for axis in range(len(out)) if abs(rows - columns) == 1 else ():
            same_place = volume(out[:axis]) == volume(shape[:first])
            if same_place and volume([out[axis]]) == volume(shape[first : first + 2]):
                grid = volume([shape[rows]]), volume([shape[columns]])
                yield node.outputs[0], axis, grid, rows < columns


def _unfolded(
    graph: ir.Graph, places: Mapping[ir.Value, Axes]
) -> Iterator[tuple[ir.Value, int, tuple[int, int], bool]]:
    """The same for pictures that were unfolded into patches, which have no two axes any more."""
    for node in graph:
        if node.op_type not in SHAPE_ONLY:
            continue
        before = places.get(node.inputs[0], ()) if node.inputs[0] is not None else ()
        for axis, digits in enumerate(places.get(node.outputs[0], ())):
            kinds = [digit.kind if digit.whole else "" for digit in digits]
            if kinds == [ROW, COLUMN] and digits not in before:
                yield node.outputs[0], axis, (digits[0].count, digits[1].count), True


def _pictures(
    graph: ir.Graph, facts: dict[ir.Value, Facts], image: ir.Value
) -> dict[ir.Value, tuple[int, int]]:
    """The axes of rows and columns in every value that has both."""
    axes = {image: (2, 3)}
    for node in graph:
        for source in dict.fromkeys(node.inputs):
            if source is None or not node.outputs:
                continue
            shape, out = facts[source].shape, facts[node.outputs[0]].shape
            moved: list[int | None]
            if node.op_type in SPATIAL and source is node.inputs[0] and len(out) == 4:
                moved = list(axes.get(source, (2, 3)))  # after operators that hide them, as usual
                if set(moved) != {2, 3}:
                    continue
            elif source not in axes:
                continue
            elif node.op_type in SHAPE_ONLY:
                moved = [_outermost(shape, axis, out) for axis in axes[source]]
            else:
                places = [Place(axis, volume([shape[axis]])) for axis in axes[source]]
                found = [follow(node, source, place, facts) for place in places]
                moved = [None if place is None else place.axis for place in found]
            rows, columns = moved
            if rows is not None and columns is not None:
                axes.setdefault(node.outputs[0], (rows, columns))
    return axes


def _outermost(shape: Shape, axis: int, out: Shape) -> int | None:
    """Axis of a reshaped value that `axis` becomes, or its outermost part: patches, not pixels."""
    size = shape[axis]
    for new in reversed(range(len(out))):
        part = out[new]
        same = volume(out[:new]) == volume(shape[:axis])
        if not same or not isinstance(size, int) or not isinstance(part, int):
            continue
        if size % part == 0 and (part > 1 or size == 1):
            return new
    return None


def _prefix(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    value: ir.Value,
    axis: int,
    taps: Sequence[Tap],
) -> tuple[int, ...] | None:
    """How many tokens stand before the patches among the keys of each attention."""
    patches = volume(facts[value].shape[axis : axis + 1])
    reached = {value: (Place(axis, patches), 0)}  # where the tokens lie, and the first patch
    for node in graph:
        for source in dict.fromkeys(node.inputs):
            if source is None or source not in reached:
                continue
            place, first = reached[source]
            found = follow(node, source, place, facts)
            if found is not None:
                for output in node.outputs:
                    reached.setdefault(output, (found, first))
            elif node.op_type == "Concat" and place.whole(facts[source].shape):
                total = volume([facts[node.outputs[0]].shape[place.axis]])
                before = _before(node, source, place.axis, facts)
                reached.setdefault(node.outputs[0], (Place(place.axis, total), first + before))
            for output, lower, upper in _cuts(node, source, place, facts):
                if lower <= first and first + patches <= upper:
                    part = Place(place.axis, upper - lower)
                    reached.setdefault(output, (part, first - lower))
    starts = []
    for tap in taps:
        place, first = reached.get(tap.values, (Place(-1, 0), 0))
        if (place.axis, place.count) != (tap.contracted, tap.keys):
            return None
        starts.append(first)
    joined = len({tap.keys for tap in taps}) > 1  # tokens come in on the way, before the patches
    if len({tap.keys - first for tap, first in zip(taps, starts, strict=True)}) != 1:
        return None
    return tuple(starts) if joined or len(set(starts)) == 1 else None


def _before(node: ir.Node, value: ir.Value, axis: int, facts: dict[ir.Value, Facts]) -> int:
    """Size of what a Concat puts before `value`."""
    others = node.inputs[: node.inputs.index(value)]
    return sum(volume(facts[v].shape[axis : axis + 1]) for v in others if v is not None)


def _cuts(
    node: ir.Node, value: ir.Value, place: Place, facts: dict[ir.Value, Facts]
) -> Iterator[tuple[ir.Value, int, int]]:
    """Outputs of a Slice or Split along a whole token axis: value, first token, end."""
    shape = facts[value].shape
    if node.domain != "" or value is not node.inputs[0] or not place.whole(shape):
        return
    if node.op_type == "Slice":
        bounds = [None if v is None else facts[v].constant for v in node.inputs[1:]]
        starts, stops, axes, steps = (*bounds, None, None)[:4]
        if starts is None or stops is None or (steps is not None and (steps != 1).any()):
            return
        sliced = range(len(starts)) if axes is None else [int(a) % len(shape) for a in axes]
        for axis, start, stop in zip(sliced, starts, stops, strict=True):
            if axis == place.axis:
                lower, upper, _ = slice(int(start), int(stop)).indices(place.count)
                yield node.outputs[0], lower, upper
    elif node.op_type == "Split" and _axis(node, shape) == place.axis:
        lower = 0
        for output in node.outputs:
            upper = lower + volume(facts[output].shape[place.axis : place.axis + 1])
            yield output, lower, upper
            lower = upper


def _axis(node: ir.Node, shape: Shape) -> int:
    attribute = node.attributes.get("axis")
    return (attribute.as_int() if attribute else 0) % len(shape)


def find_readout(
    graph: ir.Graph,
    facts: dict[ir.Value, Facts],
    layers: Sequence[Sequence[Tap]],
    pool: Tap | None,
    logits: ir.Value,
) -> Readout | None:
    """How the head reads the tokens which the last attention writes.

    The token axis is followed from the last attention of every token to where nodes pick tokens or
    average over them, past class attention, or to the product of the pooling attention `pool` with
    its values. None where the head does nothing of the kind, or several of these.
    """
    last = [layer for layer in layers if layer[0].queries == layer[0].keys][-1]
    of_class = [tap.product for layer in layers for tap in layer if tap.queries < tap.keys]
    leading = sources(logits, of_class)
    if pool is not None:  # its keys are tokens too, but lead to the weights, not to what is read
        leading -= sources(pool.value) - sources(pool.values)
    reads: set[tuple[str, int, int]] = set()
    # Where the tokens lie, and the first of them: those that come in later stand before.
    later = layers[-1][0].keys - last[0].keys
    reached = {tap.product.outputs[0]: (Place(tap.rows, tap.queries), later) for tap in last}
    for node in graph:
        outputs = [v for v in node.outputs if v in leading and not is_measured(v)]
        for source in dict.fromkeys(node.inputs):
            if not outputs or source is None or source not in reached or node.op_type == "Shape":
                continue
            place, first = reached[source]
            if pool is not None and node is pool.product:
                reads.add(("attention", first, first + place.count))
                continue
            found = follow(node, source, place, facts)
            parts = [(v, lower, upper) for v, lower, upper in _cuts(node, source, place, facts)]
            if found is not None:
                arrived = [(v, found, first) for v in outputs]
            elif parts:
                arrived = [
                    (v, Place(place.axis, upper - lower), first + lower)
                    for v, lower, upper in parts
                    if v in outputs
                ]
            elif node.op_type == "Concat" and first and place.whole(facts[source].shape):
                before = _before(node, source, place.axis, facts)
                whole = Place(place.axis, place.count + before)
                if not whole.whole(facts[node.outputs[0]].shape):
                    return None
                arrived = [(v, whole, first - before) for v in outputs]
            elif (read := _read(node, source, place, facts)) is not None:
                what, lower, upper = read
                reads.add((what, first + lower, first + upper))
                continue
            else:
                return None
            for output, where, start in arrived:
                if where.count == 1:
                    reads.add(("token", start, start + 1))
                elif reached.setdefault(output, (where, start)) != (where, start):
                    return None
    if of_class and not reads:  # nothing but what class attention wrote
        reads.add(("token", 0, 1))
    kind = KINDS.get(tuple(kind for kind, _, _ in sorted(reads)))
    if kind is None:
        return None
    return Readout(kind=kind, ranges=tuple(sorted((first, last) for _, first, last in reads)))


def _read(
    node: ir.Node, value: ir.Value, place: Place, facts: dict[ir.Value, Facts]
) -> tuple[str, int, int] | None:
    """What a node that ends the token axis takes of it: one token, or the mean of all."""
    shape, op = facts[value].shape, node.op_type
    if node.domain != "" or not place.whole(shape):
        return None
    if op == "Gather" and _axis(node, shape) == place.axis and node.inputs[1] is not None:
        index = facts[node.inputs[1]].constant
        if index is not None and index.size == 1:
            position = int(index.reshape(-1)[0]) % place.count
            return "token", position, position + 1
    reduced: Sequence[int] = ()
    if op in ("ReduceMean", "ReduceSum"):  # a sum differs by a factor that no map keeps
        reduced = reduced_axes(node, len(shape), facts)
    elif op == "GlobalAveragePool":
        reduced = range(2, len(shape))
    return ("mean", 0, place.count) if place.axis in reduced else None


def prefix_names(count: int, readout: Readout | None) -> tuple[str, ...]:
    """Names of the prefix tokens as far as the head tells: those it reads, then the others."""
    names = [f"prefix{i}" for i in range(count)]
    if readout is not None and readout.kind in ("cls", "cls+dist"):
        read = [start for start, _ in readout.ranges]
        registers = iter(range(count))
        names = [f"reg{next(registers)}" if i not in read else "" for i in range(count)]
        for name, position in zip(("cls", "dist"), read, strict=False):
            if position < count:
                names[position] = name
    return tuple(names)
