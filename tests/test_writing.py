"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from PIL import Image

import onnxplain as ox
from onnxplain.runtime.writing import write_whole


def _full(file: BinaryIO) -> None:
    file.write(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def _unfit(file: BinaryIO) -> None:
    raise ValueError("encoding error 5: Image size exceeds WebP limit")


def _unlucky(file: BinaryIO) -> None:
    raise OSError("encoder error -2")


@pytest.mark.parametrize("before", [None, b"older"])
@pytest.mark.parametrize(
    ("write", "kind", "message"),
    [
        (_full, OSError, "No space left on device: '{path}'"),
        (_unfit, ox.InputError, "{path}: cannot be written (encoding error 5"),
        (_unlucky, ox.InputError, "{path}: cannot be written (encoder error -2)"),
    ],
)
def test_a_failure_names_the_file_and_leaves_what_was_there(
    write: Callable[[BinaryIO], None],
    kind: type[Exception],
    message: str,
    before: bytes | None,
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.webp"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(kind) as raised:
        write_whole(path, write)
    assert message.format(path=path) in str(raised.value)
    assert list(tmp_path.iterdir()) == ([path] if before is not None else [])
    if before is not None:
        assert path.read_bytes() == before


def test_a_place_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.png"
    with pytest.raises(OSError, match=r"x\.png"):
        write_whole(path, lambda file: file.write(b""))


def test_a_picture_too_large_for_its_format(explainer: ox.Explainer, tmp_path: Path) -> None:
    long = Image.fromarray(np.zeros((8, 20_000, 3), np.uint8))
    result = explainer.explain(long, method="gradcam", target=0)
    with pytest.raises(ox.InputError, match=r"x\.webp: cannot be written"):
        result.save(tmp_path / "x.webp")
    assert not list(tmp_path.glob("*.webp*"))
