"""The comparison picture: one row for each class, one column for each method."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from onnxplain.errors import InputError
from onnxplain.outputs import METHODS

if TYPE_CHECKING:
    from onnxplain.runtime import Explanation

__all__ = ["draw_panel", "peak", "probability", "save_picture", "stack_panels"]

_CELL = 192
_GAP = 8
_TEXT = 15
_SMALL = 12
_LINE = 20
_HEAD = _GAP + 2 * _LINE
_NARROWEST = 150  # of a column, so that the methods' names fit over tall pictures
_INK = (32, 32, 32)
_FAINT = (120, 120, 120)
_RED = (200, 30, 30)
_GREEN = (20, 140, 50)
_PAPER = (255, 255, 255)
_ROUNDING = 1e-5  # of the largest value


def probability(explanation: Explanation) -> npt.NDArray[np.float64]:
    """The softmax of each picture's logits at its target, float64 [B] in 0..1."""
    logits = explanation.logits.astype(np.float64)
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = shares[np.arange(len(shares)), explanation.target]
    return np.asarray(chosen / shares.sum(axis=1))


def peak(explanation: Explanation) -> tuple[int, int] | None:
    """Where the map is largest on the original picture: (row, column) in pixels.

    Args:
        explanation: of one picture.

    Returns:
        The place, or None where the map is degenerate and so points nowhere.
    """
    if explanation.degenerate[0]:
        return None
    rows, columns, seen = explanation.pictures[0].geometry.project(explanation.heatmap[0])
    row, column = np.unravel_index(seen.argmax(), seen.shape)
    return rows.start + int(row), columns.start + int(column)


def draw_panel(
    explanations: Iterable[Explanation],
    *,
    title: str = "",
    hits: Mapping[str, Sequence[bool]] | None = None,
    **overlay: Any,
) -> Image.Image:
    """Draws one picture, and its maps for some classes by some methods.

    Args:
        explanations: one for each method, each of the same picture repeated, once for each class
            and in the same order of classes. Only one is held at a time.
        title: one line on top; none where empty.
        hits: for each method and class, whether the map is largest where it should be; a ring,
            green or red, then marks where that is.
        **overlay: `alpha` and `colormap` of `Explanation.overlay`.

    Returns:
        An RGB picture. Degenerate maps are struck through and said to be blank.

    Raises:
        ValueError: there is no explanation.
    """
    columns: list[Image.Image] = []
    captions: list[str] = []
    for explanation in explanations:
        if not columns:
            originals = [picture.image for picture in explanation.pictures]
            columns.append(_column("input", "", originals)[0])
            shares = probability(explanation)
            captions = [
                f"{label} {_percent(share)}"
                for label, share in zip(explanation.labels, shares, strict=True)
            ]
        columns.append(_method_column(explanation, hits, overlay))
    if not columns:
        raise ValueError("no explanations to draw")
    top = _LINE + _GAP if title else 0
    canvas = Image.new(
        "RGB",
        (_GAP + sum(c.width + _GAP for c in columns), top + columns[0].height + _GAP),
        _PAPER,
    )
    left = _GAP
    for column in columns:
        canvas.paste(column, (left, top))
        left += column.width + _GAP
    draw = ImageDraw.Draw(canvas)
    room = canvas.width - 2 * _GAP
    _write(draw, (_GAP, _GAP), title, room)
    pitch = (columns[0].height - _HEAD) // len(captions)
    for row, caption in enumerate(captions, start=1):
        _write(draw, (_GAP, top + _HEAD + row * pitch - _LINE - _GAP + 3), caption, room)
    return canvas


def _column(
    name: str, remark: str, pictures: Sequence[Image.Image]
) -> tuple[Image.Image, ImageDraw.ImageDraw, float]:
    """Pictures below each other under a heading, with room for a caption under each.

    Returns:
        The column, what draws on it, and how much larger its pictures are than the originals.
    """
    width, height = pictures[0].size
    scale = _CELL / max(width, height)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    pitch = size[1] + _LINE + _GAP
    column = Image.new("RGB", (max(size[0], _NARROWEST), _HEAD + pitch * len(pictures)), _PAPER)
    draw = ImageDraw.Draw(column)
    _write(draw, (0, _GAP), name, column.width)
    _write(draw, (0, _GAP + _LINE), remark, column.width, size=_SMALL, ink=_FAINT)
    for row, picture in enumerate(pictures):
        column.paste(picture.resize(size), (0, _HEAD + row * pitch))
    return column, draw, scale


def _method_column(
    explanation: Explanation,
    hits: Mapping[str, Sequence[bool]] | None,
    overlay: Mapping[str, Any],
) -> Image.Image:
    method = explanation.method
    # Maps of one picture may differ by rounding where the class makes no difference.
    differ = np.ptp(explanation.grid, axis=0).max() > _ROUNDING * np.abs(explanation.grid).max()
    apart = METHODS[method].class_specific or differ
    remark = "" if apart else "same for every class"
    maps = [Image.fromarray(array) for array in _greyed(explanation).overlay(**overlay)]
    column, draw, scale = _column(method, remark, maps)
    pitch = (column.height - _HEAD) // len(explanation)
    width, height = (round(side * scale) for side in explanation.pictures[0].image.size)
    for row, one in enumerate(explanation):
        top = _HEAD + row * pitch
        if one.degenerate[0]:
            _strike(draw, (0, top, width - 1, top + height - 1))
        elif hits is not None and (place := peak(one)) is not None:
            centre = (place[1] + 0.5) * scale, top + (place[0] + 0.5) * scale
            _ring(draw, centre, _GREEN if hits[method][row] else _RED)
    return column


def _greyed(explanation: Explanation) -> Explanation:
    """The same maps over grey pictures, so that every colour in an overlay is the map's."""
    pictures = [
        dataclasses.replace(picture, image=picture.image.convert("L").convert("RGB"))
        for picture in explanation.pictures
    ]
    return dataclasses.replace(explanation, pictures=tuple(pictures))


def stack_panels(panels: Sequence[Image.Image]) -> Image.Image:
    """Puts panels below each other, left-aligned."""
    canvas = Image.new(
        "RGB",
        (max(panel.width for panel in panels), sum(panel.height for panel in panels)),
        _PAPER,
    )
    y = 0
    for panel in panels:
        canvas.paste(panel, (0, y))
        y += panel.height
    return canvas


def save_picture(picture: Image.Image, path: Path) -> None:
    """Writes a picture beside its place and renames it into it, so that no half of one is left.

    Raises:
        InputError: the suffix is not that of a kind of picture that can be written.
        OSError: the folder cannot be made or written, or the disk is full.
    """
    from onnxplain.runtime.writing import write_whole

    form = Image.registered_extensions().get(path.suffix.lower())
    if form not in Image.SAVE:
        raise InputError(f"{path}: not the name of a picture that can be written; try .png")
    write_whole(path, lambda file: picture.save(file, form))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "< 0.1 %"


def _write(
    draw: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    width: int,
    *,
    size: int = _TEXT,
    ink: tuple[int, int, int] = _INK,
) -> None:
    """Writes one line, cut with an ellipsis where it is longer than `width` pixels."""
    font = ImageFont.load_default(size)
    line = " ".join(text.split())
    kept = len(line)
    while kept and draw.textlength(line, font=font) > width:
        kept -= 1
        line = line[:kept].rstrip(". ") + "..."
    draw.text(place, line, font=font, fill=ink)


def _strike(draw: ImageDraw.ImageDraw, box: tuple[int, int, int, int]) -> None:
    left, top, right, bottom = box
    draw.line((left, top, right, bottom - _LINE), fill=_RED, width=2)
    draw.rectangle((left, bottom - _LINE, right, bottom), fill=_PAPER)
    place = (left + 4, bottom - _LINE + 3)
    _write(draw, place, "blank map", right - left - 4, size=_SMALL, ink=_RED)


def _ring(
    draw: ImageDraw.ImageDraw, centre: tuple[float, float], ink: tuple[int, int, int]
) -> None:
    x, y = centre
    for radius, colour in ((9, _PAPER), (7, ink)):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=3)
