"""The pictures with the best and the worst maps, inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onnxplain.evaluation.report.reading import Reading
from onnxplain.evaluation.report.tables import number

__all__ = ["data_uri", "examples"]

_LONGEST = 160  # pixels; shown at up to 8.5rem
_SHORTEST = 128  # a picture of fewer is enlarged
_QUALITY = 72  # of JPEG: an overlay of 160 x 160 takes 5 kB


def examples(reading: Reading, pictures: Sequence[NDArray[np.uint8]]) -> str:
    """Per measure and method a row of pictures, best before worst."""
    found = reading.results["examples"]
    methods = list(reading.methods)
    parts = []
    for name, measure in reading.measures.items():
        mine = [one for one in found if one["measure"] == name]
        mine.sort(key=lambda one: methods.index(one["method"]))
        if mine:
            title = ", ".join(filter(None, (measure["title"], measure["detail"])))
            parts.append(f"<h3>By {escape(title)}</h3>")
            parts += [
                _of_method(method, list(its), pictures)
                for method, its in groupby(mine, lambda one: one["method"])
            ]
    return "\n".join(parts)


def _of_method(
    method: str, found: Sequence[Mapping[str, Any]], pictures: Sequence[NDArray[np.uint8]]
) -> str:
    ranks = ((rank, [one for one in found if one["rank"] == rank]) for rank in ("best", "worst"))
    rows = "\n".join(_row(method, rank, its, pictures) for rank, its in ranks if its)
    return f'<section class="example">\n<h4><code>{escape(method)}</code></h4>\n{rows}\n</section>'


def _row(
    method: str,
    rank: str,
    found: Iterable[Mapping[str, Any]],
    pictures: Sequence[NDArray[np.uint8]],
) -> str:
    figures = "\n".join(_figure(method, one, pictures[one["picture"]]) for one in found)
    return f'<div class="row"><h5>{rank}</h5>\n{figures}\n</div>'


def _figure(method: str, example: Mapping[str, Any], picture: NDArray[np.uint8]) -> str:
    address, width, height = data_uri(picture)
    label, sample = escape(str(example["label"])), escape(example["sample"])
    alternative = f"Map of {escape(method)} for {label} over {sample}"
    return f"""<figure><img src="{address}" width="{width}" height="{height}" alt="{alternative}">
<figcaption><b>{number(example["value"])}</b> {label}<small><bdi>{sample}</bdi></small></figcaption>
</figure>"""


def data_uri(picture: NDArray[np.uint8]) -> tuple[str, int, int]:
    """A picture as the address of an image, and the image's width and height.

    Args:
        picture: uint8 [H, W, 3], RGB. Small ones are enlarged, large ones reduced, by Lanczos.
    """
    image = Image.fromarray(picture)
    longest = max(image.size)
    wanted = min(max(longest, _SHORTEST), _LONGEST)
    if wanted != longest:
        width, height = (max(1, round(side * wanted / longest)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=_QUALITY, optimize=True)
    code = base64.b64encode(file.getvalue()).decode("ascii")
    return f"data:image/jpeg;base64,{code}", image.width, image.height
