"""The results of an evaluation as a page, as JSON and as CSV.

`page.html` and `style/` are the page; `page.py` fills it from `reading.py` (how the results are
read), `verdict.py` (in words), `tables.py`, `charts.py` (curves) and `examples.py` (pictures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.evaluation.report.data import as_csv, as_json, without_nan
from onnxplain.evaluation.report.page import page
from onnxplain.runtime.writing import write_whole

__all__ = ["write_report"]


def write_report(
    results: Mapping[str, Any], pictures: Sequence[NDArray[np.uint8]], folder: Path
) -> None:
    """Writes `index.html`, `results.json` and `results.csv` into a folder.

    The page needs no network, no script and no other file. The same results give the same bytes.
    All three are made before the first is written, and each is written whole or not at all.

    Args:
        results: What an evaluation gives, format 1: numbers, text, lists and mappings of these. A
            number that is not finite is written as null.
        pictures: uint8 [H, W, 3] RGB each; what the examples in `results` point to.
        folder: Made if need be. Files of these names in it are replaced.

    Raises:
        MissingDependencyError: matplotlib is not installed.
        OSError: With the path: a file cannot be written.
    """
    finite = without_nan(results)
    files = {
        "results.json": as_json(finite),
        "results.csv": as_csv(finite),
        "index.html": page(finite, pictures),
    }
    for name, text in files.items():
        # A file name that is not UTF-8 has lone surrogates, which show as \udcXX.
        content = text.encode("utf-8", "backslashreplace")
        write_whole(Path(folder) / name, methodcaller("write", content))
