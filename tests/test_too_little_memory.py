"""An export that does not fit into memory says so; other errors of torch stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_vits import small_vit

import onnxplain as ox


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("torch_runs", MemoryError()),
        (
            "to_onnx",
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
        ),
    ],
)
def test_too_little_memory_is_said_to_be_it(
    step: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(step, error, monkeypatch)
    with pytest.raises(ox.ModelError, match=r"for 32x32 pixels: cannot allocate memory; a smaller"):
        ox.export(small_vit(), tmp_path / "vit.onnx")
    assert not list(tmp_path.iterdir())


def test_an_error_of_torch_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail("to_onnx", RuntimeError("shapes differ"), monkeypatch)
    with pytest.raises(RuntimeError, match="shapes differ"):
        ox.export(small_vit(), tmp_path / "vit.onnx")


def fail(step: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(f"onnxplain.export.stage.{step}", failing)
