"""Garment scenes: small RGB pictures with one or two garments whose places are known.

A scene is a 64x64 picture of a cluttered background (colour gradient, distractor shapes, noise)
onto which one or two 28x28 grey garment photos of Fashion-MNIST are pasted, each with its own size,
place and tint. Because every garment's mask is known, two-garment scenes show which explanation
methods tell the classes of one picture apart.

All randomness comes from the generator or seed passed in. NumPy and OpenCV only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import combinations

import cv2
import numpy as np
import numpy.typing as npt

__all__ = [
    "DISTINCT_PAIRS",
    "LABELS",
    "SCENE_SIZE",
    "GarmentScene",
    "TwoGarmentScene",
    "background",
    "garment_scene",
    "garment_scenes",
    "load_garments",
    "paste",
    "two_garment_scene",
    "two_garment_scenes",
]

UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]

SCENE_SIZE = 64
"""Height and width of a scene in pixels."""

LABELS = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
"""Garment classes in the order of the dataset's and the model's class numbers."""

_LOOKALIKES = (
    {"T-shirt", "pullover", "dress", "coat", "shirt"},
    {"sandal", "sneaker", "ankle boot"},
)

DISTINCT_PAIRS = tuple(
    (a, b)
    for a, b in combinations(range(len(LABELS)), 2)
    if not any({LABELS[a], LABELS[b]} <= group for group in _LOOKALIKES)
)
"""The 32 pairs (a < b) of classes that look different: not two tops, not two shoes."""

_SINGLE_SIZES = (24, 44)
_PAIR_SIZES = (24, 32)  # two of them fit beside or above each other


@dataclass(frozen=True, eq=False)
class GarmentScene:
    """A picture of one garment.

    Attributes:
        image: uint8 [64, 64, 3], RGB.
        label: the class number, an index into `LABELS`.
        mask: bool [64, 64], true on the garment.
    """

    image: UInt8Array
    label: int
    mask: BoolArray


@dataclass(frozen=True, eq=False)
class TwoGarmentScene:
    """A picture of two garments of different classes.

    Attributes:
        image: uint8 [64, 64, 3], RGB.
        classes: the class numbers (a, b), indices into `LABELS`.
        masks: for each class in the same order, bool [64, 64], true on its garment. Disjoint.
    """

    image: UInt8Array
    classes: tuple[int, int]
    masks: tuple[BoolArray, BoolArray]


def load_garments() -> tuple[UInt8Array, npt.NDArray[np.int64]]:
    """Read the bundled garments, held out from training (Fashion-MNIST's test split).

    Returns:
        images: uint8 [n, 28, 28], 0 is background.
        labels: int64 [n], indices into `LABELS`; every class is equally frequent.
    """
    with files(__package__).joinpath("garments.npz").open("rb") as stream, np.load(stream) as pack:
        return pack["images"], pack["labels"].astype(np.int64)


def background(rng: np.random.Generator) -> UInt8Array:
    """Draw a cluttered background: a colour gradient, distractor shapes and noise.

    Returns:
        uint8 [64, 64, 3], RGB.
    """
    corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    gradient = cv2.resize(corners, (SCENE_SIZE, SCENE_SIZE), interpolation=cv2.INTER_LINEAR)
    canvas = np.asarray(gradient, dtype=np.uint8)
    for _ in range(rng.integers(3, 9)):
        _draw_distractor(rng, canvas)
    noise: UInt8Array = rng.integers(0, 256, (SCENE_SIZE, SCENE_SIZE, 3), dtype=np.uint8)
    strength = rng.uniform(0, 0.3)
    # OpenCV saturates, where NumPy would wrap around.
    noisy = cv2.addWeighted(canvas, 1, noise, strength, -127.5 * strength)
    return np.asarray(noisy, dtype=np.uint8)


def _draw_distractor(rng: np.random.Generator, canvas: UInt8Array) -> None:
    colour = tuple(map(int, rng.integers(0, 256, 3)))
    (x0, y0), (x1, y1), (x2, y2) = rng.integers(0, SCENE_SIZE, (3, 2)).tolist()
    match rng.integers(4):
        case 0:
            width, height = 4 + x1 // 3, 4 + y1 // 3
            cv2.rectangle(canvas, (x0, y0), (x0 + width, y0 + height), colour, cv2.FILLED)
        case 1:
            axes = (2 + x1 // 6, 2 + y1 // 6)
            cv2.ellipse(canvas, (x0, y0), axes, 3 * x2, 0, 360, colour, cv2.FILLED)
        case 2:
            cv2.line(canvas, (x0, y0), (x1, y1), colour, 1 + x2 // 16)
        case _:
            corner_b = (x0 + x1 // 3 - 10, y0 + y1 // 3 - 10)
            corner_c = (x0 + x2 // 3 - 10, y0 + y2 // 3 - 10)
            cv2.fillConvexPoly(canvas, np.array([(x0, y0), corner_b, corner_c]), colour)


def paste(
    canvas: UInt8Array, garment: UInt8Array, *, top: int, left: int, size: int, tint: npt.ArrayLike
) -> BoolArray:
    """Paste one garment photo onto `canvas`, in place.

    The photo's pixel value is both how opaque the garment is (fully so from 48 on, so that only its
    outline blends) and how bright it is.

    Args:
        canvas: uint8 [height, width, 3], changed in place.
        garment: uint8 [28, 28], 0 is background.
        top, left: the place of the photo's upper left corner in pixels.
        size: edge of the pasted photo in pixels; it must lie inside the canvas.
        tint: the garment's colour where it is brightest, three values in 0..255.

    Returns:
        bool [height, width], true where the garment is at least half opaque.
    """
    enlarged = cv2.resize(garment, (size, size), interpolation=cv2.INTER_LINEAR)
    grey = enlarged.astype(np.float32)[..., np.newaxis]
    alpha = np.minimum(grey / 48, 1)
    colour = (0.3 + 0.7 / 255 * grey) * np.asarray(tint, dtype=np.float32)
    region = canvas[top : top + size, left : left + size]
    region[:] = np.rint(region + alpha * (colour - region)).astype(np.uint8)
    mask = np.zeros(canvas.shape[:2], dtype=np.bool_)
    mask[top : top + size, left : left + size] = alpha[..., 0] >= 0.5
    return mask


def _paste_at_random(
    rng: np.random.Generator,
    canvas: UInt8Array,
    garment: UInt8Array,
    *,
    top: int,
    left: int,
    size: int,
) -> BoolArray:
    behind = canvas[top : top + size, left : left + size].mean(axis=(0, 1))
    tints = rng.integers(40, 256, (4, 3))
    # Of four tints the one that stands out most, or else some garments could not be seen at all.
    tint = tints[np.abs(tints - behind).sum(axis=1).argmax()]
    mirrored = garment[:, ::-1] if rng.integers(2) else garment
    return paste(canvas, mirrored, top=top, left=left, size=size, tint=tint)


def garment_scene(rng: np.random.Generator, garment: UInt8Array) -> tuple[UInt8Array, BoolArray]:
    """Compose a scene of one garment, 24 to 44 pixels large, possibly mirrored.

    Args:
        rng: source of the background and of the garment's place, size and tint.
        garment: uint8 [28, 28], 0 is background.

    Returns:
        image: uint8 [64, 64, 3], RGB.
        mask: bool [64, 64], true on the garment.
    """
    image = background(rng)
    size = int(rng.integers(*_SINGLE_SIZES, endpoint=True))
    top, left = map(int, rng.integers(0, SCENE_SIZE - size, 2, endpoint=True))
    mask = _paste_at_random(rng, image, garment, top=top, left=left, size=size)
    return image, mask


def two_garment_scene(
    rng: np.random.Generator, a: UInt8Array, b: UInt8Array
) -> tuple[UInt8Array, BoolArray, BoolArray]:
    """Compose a scene of two garments that do not overlap, each 24 to 32 pixels large.

    Args:
        rng: source of the background and of the garments' places, sizes and tints.
        a: uint8 [28, 28], 0 is background.
        b: the other garment, likewise.

    Returns:
        image: uint8 [64, 64, 3], RGB.
        mask_a: bool [64, 64], true on garment a.
        mask_b: bool [64, 64], true on garment b; nowhere together with mask_a.
    """
    image = background(rng)
    sizes = rng.integers(*_PAIR_SIZES, size=2, endpoint=True)
    # Along one axis the two lie one after the other, so that they cannot overlap.
    first = int(rng.integers(2))
    second = 1 - first
    free = SCENE_SIZE - int(sizes.sum())
    gaps = np.sort(rng.integers(0, free, 2, endpoint=True))
    along = np.empty(2, dtype=np.int64)
    along[first] = gaps[0]
    along[second] = gaps[1] + sizes[first]
    across = rng.integers(0, SCENE_SIZE - sizes, endpoint=True)
    tops, lefts = (along, across) if rng.integers(2) else (across, along)
    mask_a, mask_b = (
        _paste_at_random(
            rng, image, garment, top=int(tops[i]), left=int(lefts[i]), size=int(sizes[i])
        )
        for i, garment in enumerate((a, b))
    )
    return image, mask_a, mask_b


def garment_scenes(count: int, seed: int) -> Iterator[GarmentScene]:
    """Draw scenes of one bundled garment: a class drawn evenly, then a garment of that class.

    Args:
        count: how many scenes.
        seed: the same seed gives the same scenes, and a larger count only continues them.

    Yields:
        The scenes, one by one.
    """
    images, labels = load_garments()
    rng = np.random.default_rng(seed)
    for _ in range(count):
        label = int(rng.integers(len(LABELS)))
        image, mask = garment_scene(rng, images[rng.choice(np.flatnonzero(labels == label))])
        yield GarmentScene(image=image, label=label, mask=mask)


def two_garment_scenes(count: int, seed: int) -> Iterator[TwoGarmentScene]:
    """Draw scenes of two bundled garments of classes that the eye can tell apart.

    Each scene's pair of classes is drawn evenly from `DISTINCT_PAIRS`, in either order. Lookalikes
    never share a scene, neither two of T-shirt, pullover, dress, coat and shirt nor two of sandal,
    sneaker and ankle boot: where classes are near-duplicates, evidence for one is evidence for the
    other, and a map that marks both garments would not be wrong.

    Args:
        count: how many scenes.
        seed: the same seed gives the same scenes, and a larger count only continues them.

    Yields:
        The scenes, one by one.
    """
    images, labels = load_garments()
    rng = np.random.default_rng(seed)
    for _ in range(count):
        a, b = rng.permutation(DISTINCT_PAIRS[rng.integers(len(DISTINCT_PAIRS))]).tolist()
        garments = [images[rng.choice(np.flatnonzero(labels == label))] for label in (a, b)]
        image, mask_a, mask_b = two_garment_scene(rng, *garments)
        yield TwoGarmentScene(image=image, classes=(a, b), masks=(mask_a, mask_b))
