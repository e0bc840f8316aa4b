"""Curves as SVG inside the page, in the page's own colours."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.errors import MissingDependencyError
from onnxplain.evaluation.report.reading import RANDOM, Reading
from onnxplain.evaluation.report.tables import number

__all__ = ["Look", "chart", "looks", "quiet_matplotlib"]

# Drawn in these colours, which nothing else has, and then given those of the page.
_TEXT, _LINE = "#fe0001", "#fe0002"
_HUES = 5  # of style/page.css: told apart with any kind of colour vision, and on both backgrounds
_SERIES = [f"#fe01{index:02x}" for index in range(_HUES + 1)]  # the last one is grey
_CSS = {_TEXT: "currentColor", _LINE: "var(--line)"} | {
    colour: f"var(--series-{index})" for index, colour in enumerate(_SERIES)
}
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.2, 1.6), (7, 1.5, 1.2, 1.5))
_SIZE = (4.2, 2.7)  # inches of 72 units; a phone shows it at 4/5, a desk a little larger
_MOST_NAMES = 14  # along an axis
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "onnxplain",
    "font.size": 10,
    "text.parse_math": False,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _LINE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.5,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
}


@dataclass(frozen=True)
class Look:
    """How a method's line is drawn, the same in every chart."""

    series: int
    dashes: tuple[float, ...]
    width: float


def looks(reading: Reading) -> dict[str, Look]:
    """The best methods get solid lines of different colours, the next ones dashes; baselines grey.

    Methods beyond the last kind of dashes repeat it.
    """
    found: dict[str, Look] = {}
    methods = [name for name, about in reading.methods.items() if not about["baseline"]]
    for index, name in enumerate(methods):
        dashes = _DASHES[min(index // _HUES, len(_DASHES) - 1)]
        found[name] = Look(index % _HUES, dashes, 1.7 if index < _HUES else 1.4)
    baselines = [name for name in reading.methods if name not in found]
    for index, name in enumerate(baselines):
        found[name] = Look(_HUES, _DASHES[1 + index % 2], 1.7)
    return found


@contextmanager
def quiet_matplotlib() -> Iterator[None]:
    """No word about font caches and folders for them, which are no concern of the user."""
    logger = logging.getLogger("matplotlib")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def chart(
    reading: Reading, curves: Sequence[Mapping[str, Any]], look: Mapping[str, Look], prefix: str
) -> str:
    """A figure of HTML with all curves of one measure, and a key that gives each one's value.

    Args:
        reading: The results.
        curves: Of one measure, one per method.
        look: By method.
        prefix: Unique in the page; all ids begin with it.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    measure = reading.measures[curves[0]["measure"]]
    title = ", ".join(filter(None, (measure["title"], measure["detail"])))
    order = list(reading.methods)
    ordered = sorted(curves, key=lambda curve: order.index(curve["method"]))
    banded = _banded(ordered)
    drawn = _inline(_svg(ordered, look, banded), title, prefix)
    key = "\n".join(_key(reading, curve, look[curve["method"]]) for curve in ordered)
    note = ""
    if banded:
        share = reading.results["settings"]["confidence"]
        whose = " and ".join(f"<code>{escape(method)}</code>" for method in banded)
        note = f'<p class="quiet">Bands: {share:.0%} intervals of {whose}.</p>'
    return f"""<figure class="chart">
<figcaption>{escape(title)}</figcaption>
{drawn}
<ul class="key">
{key}
</ul>
{note}
</figure>"""


def _banded(curves: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the best method and of random maps: bands of all would hide each other."""
    having = [curve["method"] for curve in curves if curve["low"] and curve["high"]]
    return list(dict.fromkeys([*having[:1], *(name for name in having if name == RANDOM)]))


def _key(reading: Reading, curve: Mapping[str, Any], look: Look) -> str:
    method = curve["method"]
    value = reading.values.get((method, curve["measure"]))
    dashes = f' stroke-dasharray="{" ".join(map(str, look.dashes))}"' if look.dashes else ""
    sample = (
        '<svg viewBox="0 0 26 8" aria-hidden="true"><path d="M1 4H25" fill="none" '
        f'stroke-width="2"{dashes} style="stroke: var(--series-{look.series})"/></svg>'
    )
    shown = f"<span>{number(value['value'])}</span>" if value else ""
    return f"<li>{sample}<b>{escape(method)}</b>{shown}</li>"


def _svg(
    curves: Sequence[Mapping[str, Any]], look: Mapping[str, Look], banded: Sequence[str]
) -> str:
    with quiet_matplotlib():
        try:
            import matplotlib.style
            from matplotlib.backends.backend_svg import FigureCanvasSVG
            from matplotlib.figure import Figure
        except ModuleNotFoundError as missing:
            raise MissingDependencyError(
                f"the report needs matplotlib ({missing}); pip install onnxplain[evaluate]"
            ) from None
        with matplotlib.style.context(["default", _STYLE]):
            figure = Figure(figsize=_SIZE, layout="constrained")
            FigureCanvasSVG(figure)
            axes = figure.add_subplot()
            for curve in reversed(curves):  # the best on top
                method, drawn = curve["method"], look[curve["method"]]
                x, y = _floats(curve["x"]), _floats(curve["y"])
                colour = _SERIES[drawn.series]
                style: Any = (0, drawn.dashes) if drawn.dashes else "-"
                axes.plot(x, y, color=colour, linewidth=drawn.width, linestyle=style)
                if method in banded:
                    low, high = _floats(curve["low"]), _floats(curve["high"])
                    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            axes.set_xlabel(curves[0]["x_title"])
            axes.set_ylabel(curves[0]["y_title"])
            axes.margins(x=0.02)
            if names := curves[0]["x_names"]:
                every = -(-len(names) // _MOST_NAMES)
                ticks = _floats(curves[0]["x"])[::every]
                axes.set_xticks(ticks, names[::every], rotation=40, ha="right", size=8.5)
            file = io.StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return file.getvalue()


def _floats(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array(values, np.float64)  # None becomes NaN, a gap in the line


def _inline(svg: str, title: str, prefix: str) -> str:
    """The drawing as an element of the page: scalable, its ids unique, its colours the page's."""
    inside = svg[svg.index(">", svg.index("<svg")) + 1 :]
    inside = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", inside, flags=re.S
    )
    inside = re.sub(r'\bid="', f'id="{prefix}-', inside)
    inside = re.sub(r'url\(#|href="#', lambda found: f"{found[0]}{prefix}-", inside)
    inside = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", inside)
    for colour, css in _CSS.items():
        inside = inside.replace(colour, css)
    width, height = (round(72 * side, 1) for side in _SIZE)
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return head + re.sub(r"\n\s*", "\n", inside)
