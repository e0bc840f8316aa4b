"""The comparison picture: one row a class, one column a method. Pillow only; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

__all__ = ["Cell", "Column", "Row", "draw_panel", "stack_panels"]

UInt8Array = npt.NDArray[np.uint8]

_GAP = 8
_TEXT = 15
_SMALL = 12
_LINE = 20
_INK = (32, 32, 32)
_FAINT = (120, 120, 120)
_RED = (200, 30, 30)
_GREEN = (20, 140, 50)
_PAPER = (255, 255, 255)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column's heading, and a remark in smaller type below it."""

    name: str
    remark: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One map as drawn.

    Attributes:
        picture: uint8 [height, width, 3], RGB: the overlay.
        degenerate: the map is blank or constant; the cell is struck through and says so.
        peak: where the map is largest, (y, x) as shares of height and width; drawn as a ring.
        hit: whether the peak is where it should be: a green or a red ring.
    """

    picture: UInt8Array
    degenerate: bool = False
    peak: tuple[float, float] | None = None
    hit: bool | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A class, its probability (0..1) and its cells, one for each column."""

    label: str
    probability: float
    cells: tuple[Cell, ...]


def draw_panel(
    picture: UInt8Array,
    columns: Sequence[Column],
    rows: Sequence[Row],
    *,
    title: str = "",
    cell_size: int = 192,
) -> Image.Image:
    """Draws the input and every map, one row a class.

    Args:
        picture: uint8 [height, width, 3], RGB: the input, drawn first in every row.
        columns: the headings of the maps, in the order of each row's cells.
        rows: the classes.
        title: one line on top; none where empty.
        cell_size: the longer side of a drawn picture in pixels.

    Returns:
        An RGB picture.

    Raises:
        ValueError: a row has more or fewer cells than there are columns.
    """
    height, width = picture.shape[:2]
    scale = cell_size / max(height, width)
    size = (max(1, round(width * scale)), max(1, round(height * scale)))  # Pillow's order
    top = _GAP + (_LINE + _GAP if title else 0)
    heading = 2 * _LINE if any(column.remark for column in columns) else _LINE
    pitch = (max(size[0], 96) + _GAP, size[1] + _LINE + _GAP)
    canvas = Image.new(
        "RGB",
        (_GAP + pitch[0] * (1 + len(columns)), top + heading + pitch[1] * len(rows)),
        _PAPER,
    )
    draw = ImageDraw.Draw(canvas)
    text_width = pitch[0] - _GAP
    if title:
        _write(draw, (_GAP, _GAP), title, canvas.width - 2 * _GAP, size=_TEXT)
    for index, column in enumerate((Column(name="input"), *columns)):
        left = _GAP + index * pitch[0]
        _write(draw, (left, top), column.name, text_width, size=_TEXT)
        _write(draw, (left, top + _LINE), column.remark, text_width, size=_SMALL, ink=_FAINT)
    for number, row in enumerate(rows):
        if len(row.cells) != len(columns):
            raise ValueError(f"row {row.label!r}: {len(row.cells)} cells, {len(columns)} columns")
        y = top + heading + number * pitch[1]
        for index, cell in enumerate((Cell(picture=picture), *row.cells)):
            x = _GAP + index * pitch[0]
            canvas.paste(_fit(cell.picture, size), (x, y))
            _annotate(draw, cell, (x, y), size)
        caption = f"{row.label} {_percent(row.probability)}"
        _write(draw, (_GAP, y + size[1] + 2), caption, canvas.width - 2 * _GAP, size=_TEXT)
    return canvas


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


def _percent(probability: float) -> str:
    return f"{100 * probability:.1f} %" if probability >= 0.0005 else "< 0.1 %"


def _fit(picture: UInt8Array, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC)


def _write(
    draw: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    width: int,
    *,
    size: int,
    ink: tuple[int, int, int] = _INK,
) -> None:
    """Writes one line, cut with an ellipsis where it is longer than `width` pixels."""
    font = ImageFont.load_default(size)
    line = text.replace("\n", " ")
    while line and draw.textlength(line, font=font) > width:
        line = line.removesuffix("...")[:-1].rstrip() + "..." if line != "..." else ""
    draw.text(place, line, font=font, fill=ink)


def _annotate(
    draw: ImageDraw.ImageDraw, cell: Cell, place: tuple[int, int], size: tuple[int, int]
) -> None:
    left, top = place
    right, bottom = left + size[0] - 1, top + size[1] - 1
    if cell.degenerate:
        draw.line((left, top, right, bottom - _LINE), fill=_RED, width=2)
        draw.rectangle((left, bottom - _LINE, right, bottom), fill=_PAPER)
        _write(
            draw, (left + 4, bottom - _LINE + 3), "blank map", size[0] - 4, size=_SMALL, ink=_RED
        )
    elif cell.peak is not None:
        y, x = top + cell.peak[0] * size[1], left + cell.peak[1] * size[0]
        ring = _INK if cell.hit is None else _GREEN if cell.hit else _RED
        for radius, colour in ((9, _PAPER), (7, ring)):
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour, width=3)
