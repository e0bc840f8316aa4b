"""`explain_many`: order, bad pictures, bounded reading, threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import assert_same, picture
from numpy.typing import NDArray
from PIL import Image

import onnxplain as ox
from onnxplain.runtime.streaming import ahead


@pytest.fixture
def folder(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{i}.png" for i in range(7)]
    for i, path in enumerate(paths):
        Image.fromarray(picture(i)).save(path)
    return paths


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_stream_gives_each_picture_in_order(
    batch_size: int, folder: list[Path], explainer: ox.Explainer
) -> None:
    results = list(explainer.explain_many(folder, batch_size=batch_size, workers=2, target=1))
    assert [result.pictures[0].path for result in results] == folder
    for path, result in zip(folder, results, strict=True):
        assert len(result) == 1
        assert_same(result, explainer.explain(path, target=1))


def test_a_stream_goes_on_after_a_bad_picture(folder: list[Path], explainer: ox.Explainer) -> None:
    folder[2].write_bytes(b"")
    folder[5].unlink()
    good = [path for i, path in enumerate(folder) if i not in (2, 5)]
    failed: list[tuple[Any, str]] = []
    results = list(
        explainer.explain_many(
            map(str, folder), on_error=lambda path, error: failed.append((path, str(error)))
        )
    )
    assert [result.pictures[0].path for result in results] == good
    assert failed == [
        (str(folder[2]), f"{folder[2]}: the file is empty"),
        (str(folder[5]), f"{folder[5]}: no such file"),
    ]
    with pytest.warns(UserWarning, match="empty|no such file") as warned:
        assert len(list(explainer.explain_many(folder, on_error="skip"))) == 5
    assert len(warned) == 2


def test_a_stream_stops_at_a_bad_picture_after_the_ones_before_it(
    folder: list[Path], explainer: ox.Explainer
) -> None:
    folder[2].write_bytes(b"")
    stream = explainer.explain_many(folder, batch_size=8)
    assert [next(stream).pictures[0].path for _ in range(2)] == folder[:2]
    with pytest.raises(ox.ImageError, match=r"2.png: the file is empty"):
        next(stream)
    assert threads_of_streams() == []


def threads_of_streams() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("onnxplain")]


def test_an_endless_stream_is_read_no_further_than_needed(explainer: ox.Explainer) -> None:
    read = 0

    def endless() -> Iterator[NDArray[np.uint8]]:
        nonlocal read
        while True:
            read += 1
            yield picture(read)

    stream = explainer.explain_many(endless(), batch_size=4, workers=2)
    for _ in range(9):
        next(stream)
    assert read <= 9 + 4 + 4 + 2
    stream.close()  # type: ignore[attr-defined]
    gc.collect()
    assert threads_of_streams() == []


def test_work_in_a_stream_is_done_in_threads() -> None:
    both = threading.Barrier(2, timeout=10)
    results = ahead(range(4), lambda i: (both.wait(), i)[1], workers=2, count=2)
    assert list(results) == [(i, i) for i in range(4)]


def test_unexpected_errors_in_a_stream_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(ahead([1, 0], lambda i: 1 / i, workers=1, count=2))


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"workers": 0},
        {"on_error": "ignore"},
        {"method": "nothing"},
        {"target": "nothing"},
        {"head_fusion": "max"},
    ],
)
def test_a_stream_refuses_wrong_arguments_at_the_call(
    arguments: dict[str, Any], explainer: ox.Explainer
) -> None:
    with pytest.raises(ox.InputError):
        explainer.explain_many([], **arguments)


def test_a_stream_of_one_path_is_a_mistake(explainer: ox.Explainer) -> None:
    with pytest.raises(ox.InputError, match="for one picture use explain"):
        explainer.explain_many("cat.png")


def test_an_empty_stream(explainer: ox.Explainer) -> None:
    assert list(explainer.explain_many([])) == []
