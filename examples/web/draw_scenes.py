"""Writes the page's example pictures: scenes of two garments that the bundled model knows well.

    python examples/web/draw_scenes.py

Of the scenes that `onnxplain demo` shows, in their order, the first six where the model's two
likeliest classes are the two garments and the `generic_attention` map of each is largest on it.
They are committed, so that building the page takes no Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from PIL import Image

from onnxplain import Explainer
from onnxplain.demo.scenes import LABELS, TwoGarmentScene, two_garment_scenes
from onnxplain.panel import peak

__all__ = ["FOLDER", "SEED", "known_scenes", "main"]

FOLDER = Path(__file__).resolve().parent / "scenes"
COUNT, SEED = 6, 0


def known_scenes(explainer: Explainer) -> Iterator[TwoGarmentScene]:
    """The scenes whose garments the model tells apart, without end."""
    for scene in two_garment_scenes(1000, SEED):
        result = explainer.explain(
            [scene.image] * 2, method="generic_attention", target=scene.classes
        )
        likeliest = np.argsort(result.logits[0])[-2:]
        places = [peak(one) for one in result]
        if set(likeliest.tolist()) == set(scene.classes) and all(
            place is not None and mask[place]
            for place, mask in zip(places, scene.masks, strict=True)
        ):
            yield scene


def main() -> None:
    """Writes the pictures, named after their garments."""
    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as path:
        explainer = Explainer(path, device="cpu")
    FOLDER.mkdir(exist_ok=True)
    for number, scene in zip(range(1, COUNT + 1), known_scenes(explainer), strict=False):
        names = "-".join(LABELS[index].lower().replace(" ", "-") for index in scene.classes)
        Image.fromarray(scene.image).save(FOLDER / f"{number}-{names}.png", optimize=True)


if __name__ == "__main__":
    main()
