"""How far each runtime's maps are from those of onnxruntime, for docs/portability.md.

    python -m benchmarks.portability                 # measures and writes the table into the page

The bundled model explains two garment scenes. Where `../shared/real` is beside the checkout, a
trained ViT-Ti/16 explains two photos as well.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import onnxplain as ox
from benchmarks.runtimes import REFERENCE, RUNTIMES, Case, Runtime
from onnxplain.demo.scenes import two_garment_scenes
from onnxplain.differences import rank_correlation
from onnxplain.outputs import map_name

__all__ = ["BUNDLED", "ILL_CONDITIONED", "PAGE", "Difference", "bundled", "compare", "main", "real"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "portability.md"
BUNDLED = ROOT / "onnxplain" / "demo" / "garments.onnx"
REAL = ROOT.parent / "shared" / "real"
START, END = "<!-- measured -->\n", "<!-- end of what was measured -->\n"
ILL_CONDITIONED = ("attnlrp", "partial_lrp", "transformer_attribution", "lrp")
"""Methods that divide by sums of both signs: float32 alone moves their maps."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Difference:
    """Of one output: the largest difference over the largest value, the relative L2 norm, and the
    rank correlation."""

    largest: float
    l2: float
    spearman: float

    @classmethod
    def between(cls, found: Array, expected: Array) -> Difference:
        if found.shape != expected.shape:
            raise ValueError(f"shape {found.shape}; expected {expected.shape}")
        ours, theirs = found.astype(np.float64).ravel(), expected.astype(np.float64).ravel()
        apart = ours - theirs
        return cls(
            largest=float(np.abs(apart).max() / (np.abs(theirs).max() or 1)),
            l2=float(np.linalg.norm(apart) / (np.linalg.norm(theirs) or 1)),
            spearman=rank_correlation(ours, theirs),
        )


def compare(found: Mapping[str, Array], expected: Mapping[str, Array]) -> dict[str, Difference]:
    """Differences by output.

    Raises:
        ValueError: An output has another shape.
    """
    return {name: Difference.between(found[name], expected[name]) for name in found}


def bundled() -> list[Case]:
    """Two scenes together, each for its prediction and for another class."""
    scenes = list(two_garment_scenes(2, seed=0))
    pictures = np.stack([scene.image for scene in scenes])
    return [
        Case(BUNDLED, pictures),
        Case(BUNDLED, pictures, [scene.classes[1] for scene in scenes]),
    ]


def real(folder: Path) -> list[Case]:
    """A trained ViT-Ti/16, made in the folder, for the prediction and for a class; without `lrp`,
    whose rules multiply rounding errors beyond all bounds in a model of this depth."""
    path = folder / "real.onnx"
    methods = [m for m in ox.Explainer(BUNDLED, device="cpu").methods if m != "lrp"]
    ox.export(
        "vit_tiny_patch16_224",
        path,
        checkpoint=REAL / "vit_tiny_tinyimagenet200.safetensors",
        labels=REAL / "labels.txt",
        methods=methods,
        outputs="maps",
        verify=False,
        num_classes=200,
    )
    photos = np.stack(
        [
            np.asarray(Image.open(REAL / name).convert("RGB").resize((224, 224)))
            for name in ("chelsea.png", "coffee.png")
        ]
    )
    labels = (REAL / "labels.txt").read_text(encoding="utf-8").splitlines()
    return [Case(path, photos), Case(path, photos, [labels.index(n) for n in ("tabby", "snail")])]


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    lines = [*_table("The bundled model, a ViT of 64x64 pixels, on two scenes", bundled())]
    if REAL.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            lines += ["", *_table("A trained ViT-Ti/16 on two photos", real(Path(folder)))]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(START)[0], text.partition(END)[2]
    measured = "\n".join(lines) + "\n"
    PAGE.write_text(f"{before}{START}{measured}{END}{after}", encoding="utf-8")


def _table(title: str, cases: list[Case]) -> Iterator[str]:
    expected = [REFERENCE.run(case) for case in cases]
    yield f"{title}; against onnxruntime {REFERENCE.version()} from Python:\n"
    columns = ["runtime", "version", "logits", "six other maps", *ILL_CONDITIONED]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for name, runtime in RUNTIMES.items():
        cells = [name, *_cells(runtime, cases, expected)]
        yield f"| {' | '.join(cells)} |"


def _cells(runtime: Runtime, cases: list[Case], expected: list[dict[str, Array]]) -> Iterator[str]:
    if missing := runtime.missing():
        yield from ("-", f"not measured: {missing}", *[""] * (1 + len(ILL_CONDITIONED)))
        return
    found = [compare(runtime.run(c), e) for c, e in zip(cases, expected, strict=True)]
    contract = cases[0].contract
    others = [map_name(m) for m in contract.maps if m not in ILL_CONDITIONED]
    yield runtime.version()
    yield f"{max(case[contract.logits].largest for case in found):.0e}"
    yield f"{max(case[name].largest for case in found for name in others):.0e}"
    for method in ILL_CONDITIONED:
        if method in contract.maps:
            of_method = [case[map_name(method)] for case in found]
            rank = min(d.spearman for d in of_method)
            yield f"{max(d.l2 for d in of_method):.0e} ({math.floor(rank * 1e4) / 1e4:.4f})"
        else:
            yield "-"


if __name__ == "__main__":
    main()
