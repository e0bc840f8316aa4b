"""Garment scenes: determinism, shapes, and that the masks tell the truth."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from onnxplain.demo.scenes import (
    DISTINCT_PAIRS,
    LABELS,
    background,
    garment_scene,
    garment_scenes,
    load_garments,
    paste,
    two_garment_scene,
    two_garment_scenes,
)


def test_pack_holds_every_class_equally_often() -> None:
    images, labels = load_garments()

    assert len(LABELS) == len(set(LABELS)) == 10
    assert images.dtype == np.uint8
    assert images.shape == (len(labels), 28, 28)
    assert np.bincount(labels).tolist() == [len(labels) // 10] * 10


def test_garment_scene_is_reproducible() -> None:
    garment = load_garments()[0][0]

    image, mask = garment_scene(np.random.default_rng(3), garment)
    again, mask_again = garment_scene(np.random.default_rng(3), garment)
    other, _ = garment_scene(np.random.default_rng(4), garment)

    assert image.shape == (64, 64, 3)
    assert image.dtype == np.uint8
    assert mask.shape == (64, 64)
    assert mask.dtype == np.bool_
    np.testing.assert_array_equal(image, again)
    np.testing.assert_array_equal(mask, mask_again)
    assert (image != other).any()


def test_garment_scenes_are_reproducible_and_continue() -> None:
    few = list(garment_scenes(3, seed=5))
    more = list(garment_scenes(6, seed=5))

    for scene, same in zip(few, more, strict=False):
        assert scene.label == same.label
        np.testing.assert_array_equal(scene.image, same.image)
        np.testing.assert_array_equal(scene.mask, same.mask)
    other = next(garment_scenes(1, seed=6))
    assert (other.image != few[0].image).any()


def test_garment_scenes_show_every_class_evenly_and_its_own_garments() -> None:
    scenes = list(garment_scenes(400, seed=0))

    counts = np.bincount([scene.label for scene in scenes], minlength=len(LABELS))
    assert counts.sum() == 400
    assert counts.min() > 20
    assert counts.max() < 65
    # Outlines tell trousers (upright) from sneakers (flat), so a scene's label is its garment's.
    shapes = [np.ptp(np.argwhere(scene.mask), axis=0) + 1 for scene in scenes]
    tall = {
        name: [h / w for (h, w), s in zip(shapes, scenes, strict=True) if LABELS[s.label] == name]
        for name in ("trouser", "sneaker")
    }
    assert np.median(tall["trouser"]) > 1.5
    assert np.median(tall["sneaker"]) < 0.7


def test_two_garment_scenes_are_reproducible_and_continue() -> None:
    few = list(two_garment_scenes(3, seed=5))
    more = list(two_garment_scenes(6, seed=5))

    for scene, same in zip(few, more, strict=False):
        assert scene.classes == same.classes
        np.testing.assert_array_equal(scene.image, same.image)
        np.testing.assert_array_equal(scene.masks, same.masks)
    other = next(two_garment_scenes(1, seed=6))
    assert (other.image != few[0].image).any()


def test_mask_is_where_the_garment_changed_the_canvas() -> None:
    garment = np.zeros((28, 28), np.uint8)
    garment[7:21, 10:18] = 200
    canvas = np.full((64, 64, 3), 120, np.uint8)

    mask = paste(canvas, garment, top=5, left=30, size=28, tint=(255, 0, 0))

    expected = np.zeros((64, 64), np.bool_)
    expected[5 + 7 : 5 + 21, 30 + 10 : 30 + 18] = True
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal((canvas != 120).any(axis=-1), expected)
    brightness = 0.3 + 0.7 * 200 / 255
    np.testing.assert_allclose(canvas[20, 45], [255 * brightness, 0, 0], atol=0.51)


@pytest.mark.parametrize("seed", range(20))
def test_masks_of_two_garments_are_where_the_scene_differs_from_its_background(seed: int) -> None:
    images, _ = load_garments()
    chosen = np.random.default_rng(seed).integers(len(images), size=2)

    image, mask_a, mask_b = two_garment_scene(np.random.default_rng(seed), *images[chosen])

    # The background is the first thing a scene draws, so the same seed gives it without garments.
    behind = background(np.random.default_rng(seed)).astype(int)
    changed = np.abs(image - behind).max(axis=-1) > 0
    assert mask_a.sum() > 30
    assert mask_b.sum() > 30
    assert not (mask_a & mask_b).any()
    assert changed[mask_a | mask_b].mean() > 0.98
    # What changed outside the masks is the garments' soft edge, and their darkest parts.
    assert (changed & ~(mask_a | mask_b)).sum() < 0.6 * (mask_a | mask_b).sum()


def test_two_garment_scenes_show_distinct_pairs_evenly() -> None:
    scenes = list(two_garment_scenes(640, seed=0))

    pairs = [tuple(sorted(scene.classes)) for scene in scenes]
    counts = [pairs.count(pair) for pair in DISTINCT_PAIRS]
    assert len(DISTINCT_PAIRS) == 32
    assert sum(counts) == len(scenes)
    assert min(counts) > 5
    assert max(counts) < 45
    first_is_smaller = np.mean([a < b for a, b in (scene.classes for scene in scenes)])
    assert 0.4 < first_is_smaller < 0.6


def test_two_garment_scene_has_the_documented_types() -> None:
    (scene,) = islice(two_garment_scenes(5, seed=1), 1)

    assert scene.image.shape == (64, 64, 3)
    assert scene.image.dtype == np.uint8
    assert all(isinstance(label, int) for label in scene.classes)
    assert all(mask.shape == (64, 64) and mask.dtype == np.bool_ for mask in scene.masks)
