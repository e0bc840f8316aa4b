"""The memory of an export follows the weights: no more than three times their size."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.export_memory import measure

# One wide block on four patches: 200 MB of weights and next to nothing of anything else.
WIDE: dict[str, Any] = {
    "embed_dim": 2048,
    "depth": 1,
    "num_heads": 8,
    "img_size": 32,
    "num_classes": 10,
}
LIMIT = 3.0


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_of_an_export(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    methods = ["generic_attention", "transformer_attribution"]
    found = measure("vit_tiny_patch16_224", path, methods=methods, threads=1, **WIDE)
    assert found["weights"] > 2e8
    assert found["file"] < 1.01 * found["weights"]
    grown = (found["peak"] - found["imported"]) / found["weights"]
    assert 1 < grown < LIMIT  # torch's own weights are in it
