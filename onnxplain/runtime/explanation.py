"""The result of an explanation: maps, their picture, and how they are saved and shown."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onnxplain.errors import InputError
from onnxplain.outputs import DEGENERATE_SPAN
from onnxplain.runtime.preprocessing import Picture
from onnxplain.runtime.writing import write_whole

__all__ = ["COLORMAPS", "Explanation", "is_degenerate", "upsample"]

COLORMAPS: dict[str, int] = {
    name.removeprefix("COLORMAP_").lower(): getattr(cv2, name)
    for name in sorted(dir(cv2))
    if name.startswith("COLORMAP_")
}
"""OpenCV's colormaps by name."""

_SUFFIX = {"overlay": ".png", "heatmap": ".heatmap.png", "npy": ".npy", "npz": ".npz"}
_FILES = {
    "overlay": (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"),
    "heatmap": (".png", ".bmp", ".tif", ".tiff"),
    "npy": (".npy",),
    "npz": (".npz",),
}
_THUMBNAIL = 320


def is_degenerate(values: NDArray[Any]) -> bool:
    """Whether a map is not finite, or constant up to rounding: its span at most `DEGENERATE_SPAN`
    of its largest magnitude."""
    low, high = float(values.min()), float(values.max())
    return not high - low > DEGENERATE_SPAN * max(abs(low), abs(high)) or high - low == np.inf


def upsample(
    grid: NDArray[np.float32], size: tuple[int, int], covered: tuple[int, int] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Maps on the patch grid as heatmaps at model input size.

    Each is enlarged bilinearly between the patches' centres (half-pixel convention), then scaled so
    that its lowest value is 0 and its highest 1.

    Args:
        grid: [B, h, w], raw values.
        size: (H, W) of the model's input.
        covered: Rows and columns of it, from the upper left, that the grid covers; None: all. The
            rest, which the model does not see, is 0.

    Returns:
        float32 [B, H, W] in 0..1, and bool [B]: which maps are degenerate (not finite, or constant
        up to rounding: span at most 1e-5 of the largest magnitude). Degenerate ones become 0.
    """
    heatmap = np.zeros((len(grid), *size), np.float32)
    rows, columns = size if covered is None else covered
    degenerate = np.zeros(len(grid), np.bool_)
    for i, values in enumerate(grid):
        if is_degenerate(values):
            degenerate[i] = True
            continue
        low, high = float(values.min()), float(values.max())
        # In float64 and relative to the span, so that very small and very large maps survive.
        scaled = ((values.astype(np.float64) - low) / (high - low)).astype(np.float32)
        large = cv2.resize(scaled, (columns, rows), interpolation=cv2.INTER_LINEAR)
        floor = large.min()
        heatmap[i, :rows, :columns] = (large - floor) / (large.max() - floor)
    return heatmap, degenerate


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Explanation:
    """Maps of one method for a batch of pictures. Indexing and iterating give one picture each.

    Attributes:
        method: The method that made the maps.
        options: The method's options as given.
        class_weights: float32 [B, classes], the sum of logits that is explained, or None.
        grid: float32 [B, h, w], raw values on the patch grid; [B, H, W] for methods with a value
            per pixel, which may be negative.
        heatmap: float32 [B, H, W] in 0..1 at the model's input size; 0 where degenerate. Of a
            method with a value per pixel it shows the positive part.
        logits: [B, classes], the model's own output.
        target: int64 [B], the class that is explained; of a sum of logits, that of the largest
            weight, whatever its sign.
        labels: The target's label for each picture; its number where the model has no labels. A sum
            of logits in words: `cat - 0.5 dog`.
        degenerate: bool [B], maps that are not finite, blank, or constant up to rounding.
        pictures: The originals, upright, and the way from them to the model's input.
    """

    method: str
    grid: NDArray[np.float32]
    heatmap: NDArray[np.float32]
    logits: NDArray[np.floating[Any]]
    target: NDArray[np.int64]
    labels: tuple[str, ...]
    degenerate: NDArray[np.bool_]
    pictures: tuple[Picture, ...]
    options: dict[str, Any] = field(default_factory=dict)
    class_weights: NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        return f"Explanation(method={self.method!r}, labels={self.labels}, grid={self.grid.shape})"

    def __len__(self) -> int:
        return len(self.grid)

    def __getitem__(self, index: int) -> Explanation:
        i = range(len(self))[index]
        part = slice(i, i + 1)
        return Explanation(
            method=self.method,
            options=self.options,
            grid=self.grid[part],
            heatmap=self.heatmap[part],
            logits=self.logits[part],
            target=self.target[part],
            labels=self.labels[part],
            degenerate=self.degenerate[part],
            pictures=self.pictures[part],
            class_weights=None if self.class_weights is None else self.class_weights[part],
        )

    def __iter__(self) -> Iterator[Explanation]:
        return (self[i] for i in range(len(self)))

    def overlay(self, alpha: float = 0.5, colormap: str = "turbo") -> list[NDArray[np.uint8]]:
        """The heatmaps laid over the original pictures, at the originals' size.

        A map is carried back through crop and resize to where it was computed. What the model did
        not see (outside its crop) keeps its own colours.

        Args:
            alpha: Weight of the heatmap's colour, 0..1; the rest is the picture.
            colormap: Name of an OpenCV colormap, such as "turbo", "jet", "viridis".

        Returns:
            One uint8 RGB array [H, W, 3] per picture.

        Raises:
            InputError: alpha is out of range or the colormap unknown.
        """
        if not 0 <= alpha <= 1:
            raise InputError(f"alpha is {alpha}, expected 0..1")
        if colormap not in COLORMAPS:
            raise InputError(f"unknown colormap {colormap!r}; one of {', '.join(COLORMAPS)}")
        ramp = np.arange(256, dtype=np.uint8)[:, None]
        colors = np.array(cv2.applyColorMap(ramp, COLORMAPS[colormap])[..., ::-1], np.uint8)
        return [
            _blend(picture, heatmap, alpha, colors)
            for picture, heatmap in zip(self.pictures, self.heatmap, strict=True)
        ]

    def save(
        self, folder_or_file: str | os.PathLike[str], kind: str = "overlay", **overlay: Any
    ) -> list[Path]:
        """Writes the result; each file is written beside its place and renamed into it.

        Args:
            folder_or_file: A path with the suffix of a file of this kind is a file: of one
                picture, or of the whole batch for "npy" and "npz". Anything else is a folder,
                made if need be, that gets a file for each picture: the picture's own name without
                its suffix (`image` where it has none), then the method and the kind, and a
                number where two pictures of the batch have the same name: `cat.rollout.png`,
                `cat-2.rollout.png`.
            kind: "overlay", the picture with the map; "heatmap", 8-bit grey at the model's input
                size; "npy", the raw grid, [h, w] of one picture or [B, h, w]; "npz", grid,
                heatmap, logits, target, labels, degenerate and method, all with the batch axis.
            **overlay: `alpha` and `colormap` of `overlay`.

        Returns:
            The paths written, one per picture in order, or the one file.

        Raises:
            InputError: The kind is unknown, does not fit the file's suffix, or one picture file is
                asked for several pictures, or the file is one of the pictures themselves.
        """
        if kind not in _SUFFIX:
            raise InputError(f"unknown kind {kind!r}; one of {', '.join(_SUFFIX)}")
        path = Path(folder_or_file)
        suffix = path.suffix.lower()
        if path.is_dir() or suffix not in {*Image.registered_extensions(), ".npy", ".npz"}:
            path.mkdir(parents=True, exist_ok=True)
            names = (f"{stem}.{self.method}{_SUFFIX[kind]}" for stem in _stems(self.pictures))
            return [
                one._save_as(path / name, kind, overlay)
                for one, name in zip(self, names, strict=True)
            ]
        if suffix not in _FILES[kind]:
            raise InputError(f"{path}: kind {kind!r} is written as {', '.join(_FILES[kind])}")
        if len(self) > 1 and kind in ("overlay", "heatmap"):
            raise InputError(f"{path}: one file for {len(self)} pictures; give a folder")
        return [self._save_as(path, kind, overlay)]

    def _save_as(self, path: Path, kind: str, overlay: dict[str, Any]) -> Path:
        if any(_same_file(path, picture.path) for picture in self.pictures):
            raise InputError(f"{path}: is the picture itself; write somewhere else")
        if kind == "npy":
            grid = self.grid[0] if len(self) == 1 else self.grid
            write_whole(path, lambda file: np.save(file, grid))
        elif kind == "npz":
            arrays: dict[str, Any] = {
                "grid": self.grid,
                "heatmap": self.heatmap,
                "logits": self.logits,
                "target": self.target,
                "labels": np.array(self.labels),
                "degenerate": self.degenerate,
                "method": np.array(self.method),
            }
            write_whole(path, lambda file: np.savez_compressed(file, **arrays))
        else:
            pixels = self.overlay(**overlay)[0] if kind == "overlay" else self._grey()
            form = Image.registered_extensions()[path.suffix.lower()]
            image = Image.fromarray(pixels)
            write_whole(path, lambda file: image.save(file, form, quality=95))
        return path

    def _grey(self) -> NDArray[np.uint8]:
        return np.rint(self.heatmap[0] * 255).astype(np.uint8)

    def _thumbnails(self) -> list[Image.Image]:
        images = [Image.fromarray(array) for array in self.overlay()]
        for image in images:
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
        return images

    def _caption(self, i: int) -> str:
        note = " (degenerate: nothing to show)" if self.degenerate[i] else ""
        return f"{self.labels[i]}, {self.method}{note}"

    def _repr_png_(self) -> bytes:
        images = self._thumbnails()
        strip = Image.new(
            "RGB", (sum(i.width for i in images), max(i.height for i in images)), "white"
        )
        left = 0
        for image in images:
            strip.paste(image, (left, 0))
            left += image.width
        return _png(strip)

    def _repr_html_(self) -> str:
        figures = (
            '<figure style="display:inline-block;margin:4px;text-align:center">'
            f'<img src="data:image/png;base64,{base64.b64encode(_png(image)).decode()}">'
            f"<figcaption>{html.escape(self._caption(i))}</figcaption></figure>"
            for i, image in enumerate(self._thumbnails())
        )
        return f"<div>{''.join(figures)}</div>"


def _blend(
    picture: Picture,
    heatmap: NDArray[np.floating[Any]],
    alpha: float,
    colors: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    rows, columns, seen = picture.geometry.project(heatmap)
    out = picture.rgb
    color = cv2.applyColorMap(np.rint(seen * 255).astype(np.uint8), colors)
    out[rows, columns] = cv2.addWeighted(out[rows, columns], 1 - alpha, color, alpha, 0)
    return out


def _stems(pictures: tuple[Picture, ...]) -> list[str]:
    """A name for each picture, all different (also where case makes no difference)."""
    taken: set[str] = set()
    stems = []
    for picture in pictures:
        stem = base = picture.path.stem if picture.path is not None else "image"
        number = 1
        while stem.casefold() in taken:
            number += 1
            stem = f"{base}-{number}"
        taken.add(stem.casefold())
        stems.append(stem)
    return stems


def _same_file(path: Path, other: Path | None) -> bool:
    return other is not None and path.exists() and other.exists() and path.samefile(other)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
