"""The colours of the report's lines can be told apart, whatever kind of colour vision one has."""

from __future__ import annotations

import re
from importlib.resources import files
from itertools import combinations

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

# From linear RGB to what is left of it at full severity: Machado, Oliveira and Fernandes, "A
# Physiologically-based Model for Simulation of Color Vision Deficiency", 2009, table of matrices.
VISIONS = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
APART = 20.0  # distance in CIE L*a*b*, where 2 is just seen side by side


def palettes() -> list[NDArray[np.float32]]:
    """Linear RGB of the lines' colours, [6, 3], in light and in dark."""
    style = files("onnxplain.evaluation.report").joinpath("style", "page.css")
    found = re.findall(r"--series-(\d): #(\w{6});", style.read_text(encoding="utf-8"))
    assert [int(index) for index, _ in found] == [*range(6), *range(6)]
    share = np.array([list(bytes.fromhex(code)) for _, code in found], np.float32) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    return list(linear.astype(np.float32).reshape(2, 6, 3))


@pytest.mark.parametrize("vision", VISIONS)
def test_lines_can_be_told_apart(vision: str) -> None:
    for palette in palettes():
        seen = (palette @ VISIONS[vision].T).clip(0, 1).astype(np.float32)
        lab = cv2.cvtColor(seen[np.newaxis], cv2.COLOR_LRGB2Lab)[0]
        distances = [float(np.linalg.norm(a - b)) for a, b in combinations(lab, 2)]
        assert min(distances) > APART
