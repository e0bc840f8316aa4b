"""What the demo shows: scenes of two garments, each asked for, every method side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from onnxplain.demo.scenes import BoolArray, two_garment_scenes
from onnxplain.panel import draw_panel, peak, save_picture, stack_panels
from onnxplain.runtime import Explainer, Explanation

__all__ = ["Shown", "show"]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What the demo wrote and counted.

    Attributes:
        pictures: one panel for each scene.
        combined: all panels in one picture.
        asked: how many maps each method made, one for each garment of each scene.
        hits: for each method, how many of these maps are largest on the garment that was asked for.
        device: what computed them.
    """

    pictures: list[Path]
    combined: Path
    asked: int
    hits: dict[str, int]
    device: str


def show(folder: Path, *, scenes: int, seed: int, step: Callable[[], None] = lambda: None) -> Shown:
    """Explains scenes of two garments with the bundled model and writes a panel for each.

    Args:
        folder: where the pictures go; made if need be.
        scenes: how many, at least 1.
        seed: which ones.
        step: called after each scene.

    Returns:
        The pictures' paths and, for each method, how often its map is largest on the garment that
        was asked for. (The pointing game of Zhang et al., *Top-down Neural Attention by Excitation
        Backprop*, ECCV 2016. A blank map points nowhere and misses.)
    """
    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as model:
        explainer = Explainer(model, device="cpu")
    panels, pictures = [], []
    hits = dict.fromkeys(explainer.methods, 0)
    for number, scene in enumerate(two_garment_scenes(scenes, seed), start=1):
        maps = list(explainer.explain_each([scene.image, scene.image], target=scene.classes))
        found = {
            one.method: [_on(mask, of) for mask, of in zip(scene.masks, one, strict=True)]
            for one in maps
        }
        for method, outcomes in found.items():
            hits[method] += sum(outcomes)
        panels.append(
            draw_panel(maps, title=f"scene {number}: " + " and ".join(maps[0].labels), hits=found)
        )
        pictures.append(folder / f"scene-{number}.png")
        save_picture(panels[-1], pictures[-1])
        step()
    combined = folder / "demo.png"
    save_picture(stack_panels(panels), combined)
    return Shown(
        pictures=pictures, combined=combined, asked=2 * scenes, hits=hits, device=explainer.device
    )


def _on(mask: BoolArray, explanation: Explanation) -> bool:
    place = peak(explanation)
    return place is not None and bool(mask[place])
