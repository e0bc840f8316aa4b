"""Masks: what their files may be, which pixels are the object, and where they lie on the input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from onnxplain.contract import ImageInput
from onnxplain.errors import ImageError
from onnxplain.evaluation.datasets.masks import mask_values, read_masks
from onnxplain.evaluation.datasets.samples import MaskFile, Object, Sample
from onnxplain.runtime.preprocessing import Picture, prepare_picture, preprocess

PLAIN: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
VALUES = np.array([[0, 1, 7], [255, 7, 0]], np.uint8)


def saved(path: Path, values: Any, mode: str | None = None) -> Path:
    image = Image.fromarray(np.asarray(values))
    (image if mode is None else image.convert(mode)).save(path)
    return path


def palette(values: NDArray[np.uint8]) -> Image.Image:
    """Of colours that are all alike, so that only the indices tell the values apart."""
    image = Image.fromarray(values).convert("P")
    image.putdata(values.ravel().tolist())
    image.putpalette([90, 120, 30] * 256)
    return image


def read(
    masks: list[Any], size: tuple[int, int] = (2, 3), spec: ImageInput | None = None
) -> list[Any]:
    """The masks of a grey picture of `size` [height, width] whose frame is itself, if no other."""
    objects = tuple(Object(label=0, mask=mask) for mask in masks)
    image = np.full((*size, 3), 128, np.uint8)
    spec = spec or ImageInput(size=size, crop_mode="squash")
    return read_masks(
        Sample(name="cat.jpg", image=image, objects=objects), prepare_picture(image, spec)[1]
    )


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif"])
def test_grey_values_are_kept(suffix: str, tmp_path: Path) -> None:
    np.testing.assert_array_equal(mask_values(saved(tmp_path / f"m.{suffix}", VALUES)), VALUES)


@pytest.mark.parametrize("suffix", ["png", "bmp", "tif"])
def test_of_a_palette_the_indices_count(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m.{suffix}"
    palette(VALUES).save(path)
    np.testing.assert_array_equal(mask_values(path), VALUES)


def test_a_palette_of_few_colours(tmp_path: Path) -> None:
    values = np.array([[0, 1, 3], [2, 0, 1]], np.uint8)
    path = tmp_path / "m.png"
    palette(values).save(path, bits=2)
    np.testing.assert_array_equal(mask_values(path), values)


def test_bilevel_and_sixteen_bit_masks(tmp_path: Path) -> None:
    path = tmp_path / "m.png"
    Image.fromarray(VALUES > 0).save(path)
    np.testing.assert_array_equal(mask_values(path), VALUES > 0)
    deep = np.array([[0, 256, 65535], [1, 300, 255]], np.uint16)
    for suffix in ("png", "tif"):
        np.testing.assert_array_equal(mask_values(saved(tmp_path / f"d.{suffix}", deep)), deep)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_equal_channels_are_grey(mode: str, tmp_path: Path) -> None:
    np.testing.assert_array_equal(mask_values(saved(tmp_path / "m.png", VALUES, mode)), VALUES)


def test_a_mask_is_turned_as_its_exif_orientation_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "m.png"
    Image.fromarray(np.rot90(VALUES)).save(path, exif=exif)
    np.testing.assert_array_equal(mask_values(path), VALUES)


def coloured(path: Path) -> None:
    saved(path, np.arange(18, dtype=np.uint8).reshape(2, 3, 3))


def transparent(path: Path) -> None:
    saved(path, np.full((2, 3, 4), 7, np.uint8))


def damaged(path: Path) -> None:
    saved(path, np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8))
    path.write_bytes(path.read_bytes()[:2000])


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (coloured, "a mask in colours, whose classes are not known; save it with one channel"),
        (transparent, "a mask with transparent pixels; save it without alpha"),
        (lambda path: saved(path.with_suffix(".tif"), np.zeros((2, 3), np.float32)), "of mode F"),
        (
            lambda path: saved(path.with_suffix(".tif"), np.full((2, 3), 65536, np.int32)),
            "mask values beyond 0..65535",
        ),
        (damaged, "the mask cannot be read"),
        (lambda path: path.write_bytes(b""), "the mask cannot be read"),
        (lambda path: path.write_bytes(b"some words"), "the mask cannot be read"),
        (lambda path: path.mkdir(), "the mask cannot be read"),
        (lambda path: None, "no such mask file"),
    ],
)
def test_masks_that_cannot_be_used_are_named(write: Any, words: str, tmp_path: Path) -> None:
    write(tmp_path / "m.png")
    path = next(tmp_path.glob("m.*"), tmp_path / "m.png")
    with pytest.raises(ImageError, match=f"{path.name}: .*{words}|{path.name}: {words}") as caught:
        read([MaskFile(path=path)])
    assert "\n" not in str(caught.value)


def test_the_value_that_is_said_is_the_object_and_255_is_void(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.png", VALUES)
    masks = read([MaskFile(path=path, value=value) for value in (7, 1, 0, 255, 9)])
    expected = [
        [[0, 0, 1], [-1, 1, 0]],
        [[0, 1, 0], [-1, 0, 0]],
        [[1, 0, 0], [-1, 0, 1]],
        [[0, 0, 0], [1, 0, 0]],
        [[0, 0, 0], [-1, 0, 0]],
    ]
    assert [mask.dtype for mask in masks] == [np.int8] * 5
    assert [mask.tolist() for mask in masks] == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[0, 255, 0]], [[0, 1, 0]]),  # black and white
        ([[0, 1, 0]], [[0, 1, 0]]),
        ([[0, 7, 255]], [[0, 1, -1]]),  # an object with a void outline
        ([[0, 0, 0]], [[0, 0, 0]]),
    ],
)
def test_the_one_value_of_a_binary_mask(values: Any, expected: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.png", np.array(values, np.uint8))
    (mask,) = read([MaskFile(path=path)], size=(1, 3))
    assert mask.tolist() == expected


@pytest.mark.parametrize("values", [[7, 7, 7], [255, 255, 255], [7, 255, 7]])
def test_a_mask_without_background_is_taken_where_its_value_is_said(
    values: list[int], tmp_path: Path
) -> None:
    path = saved(tmp_path / "m.png", np.array([values], np.uint8))
    with pytest.raises(
        ImageError, match=rf"m.png: a mask without background, of value {values[0]}"
    ):
        read([MaskFile(path=path)], size=(1, 3))
    (mask,) = read([MaskFile(path=path, value=values[0])], size=(1, 3))
    assert mask.tolist() == [[1 if value == values[0] else -1 for value in values]]


def test_of_several_values_it_must_be_said_which(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.png", VALUES)
    with pytest.raises(
        ImageError, match=r"m.png: a mask of values 1, 7, and .*mask_value.*--mask-labels"
    ):
        read([MaskFile(path=path)])
    many = saved(tmp_path / "many.png", np.arange(20, dtype=np.uint8)[None])
    with pytest.raises(ImageError, match="values 1, 2, 3, 4, 5, 6, 7, 8 and 11 more"):
        read([MaskFile(path=many)], size=(1, 20))


def test_arrays_and_objects_without_mask() -> None:
    one = np.array([[True, False, False], [False, True, False]])
    first, none, second = read([one, None, ~one])
    assert none is None
    assert first.tolist() == [[1, 0, 0], [0, 1, 0]]
    assert second.tolist() == [[0, 1, 1], [1, 0, 1]]
    with pytest.raises(ImageError, match=r"a mask of cat.jpg: 2x3 pixels, but .* has 3x2"):
        read([one.T])


def test_a_mask_of_another_size_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.png", VALUES)
    with pytest.raises(ImageError, match=r"m.png: 3x2 pixels, but the picture has 6x4$"):
        read([MaskFile(path=path)], size=(4, 6))


def test_a_mask_of_the_picture_as_it_is_stored_is_told(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = tmp_path / "cat.jpg"
    Image.new("RGB", (3, 2)).save(photo, exif=exif)
    _, picture = prepare_picture(photo, ImageInput(size=(3, 2)))
    thing = Object(label=0, mask=MaskFile(path=saved(tmp_path / "m.png", VALUES), value=7))
    sample = Sample(name="cat.jpg", image=photo, objects=(thing,))
    with pytest.raises(ImageError, match=r"m.png: 3x2 .* has 2x3 once it is turned as its EXIF"):
        read_masks(sample, picture)
    saved(tmp_path / "m.png", VALUES.T)
    (mask,) = read_masks(sample, picture)
    assert mask is not None and mask.tolist() == [[0, -1], [0, 1], [1, 0]]


def test_a_crop_by_hand() -> None:
    """4x8 pixels, enlarged to 8x16, of which the middle 6x6 are columns 5..10 and rows 1..6."""
    mask = np.zeros((4, 8), np.bool_)
    mask[1, 2] = mask[3, 5] = mask[0, 0] = True
    spec = ImageInput(size=(6, 6), crop_pct=0.75)
    (found,) = read([mask], size=(4, 8), spec=spec)
    expected = np.zeros((6, 6), np.int8)
    expected[1:3, 0] = 1  # pixel (1, 2): rows 2..3, columns 4..5
    expected[5, 5] = 1  # pixel (3, 5): rows 6..7, columns 10..11
    np.testing.assert_array_equal(found, expected)


def test_outside_the_picture_nothing_counts() -> None:
    (found,) = read(
        [np.ones((2, 4), np.bool_)], (2, 4), ImageInput(size=(8, 8), crop_mode="border")
    )
    expected = np.full((8, 8), -1)
    expected[2:6] = 1
    np.testing.assert_array_equal(found, expected)


def test_an_object_that_the_crop_cuts_off_is_left_to_the_caller() -> None:
    mask = np.zeros((4, 12), np.bool_)
    mask[:, 0] = True
    (found,) = read([mask], (4, 12), ImageInput(size=(4, 4)))
    assert found.tolist() == [[0] * 4] * 4


def painted(mask: NDArray[np.bool_], spec: ImageInput) -> tuple[NDArray[np.bool_], Picture]:
    """Where a picture that shows the mask in white is at least half white on the input."""
    colours = np.repeat(255 * mask.astype(np.uint8)[..., None], 3, axis=2)
    pixels, geometry = preprocess(Image.fromarray(colours), spec)
    return pixels[0] >= 0.5, Picture(image=Image.fromarray(colours), geometry=geometry)


@settings(deadline=None)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    size=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    crop_mode=st.sampled_from(["center", "squash", "border"]),
    crop_pct=st.sampled_from([1.0, 0.875, 0.5]),
    seed=st.integers(0, 9),
)
def test_a_mask_goes_where_its_picture_goes(
    height: int, width: int, size: tuple[int, int], crop_mode: str, crop_pct: float, seed: int
) -> None:
    mask = np.random.default_rng(seed).random((height, width)) < 0.5
    spec = ImageInput(
        size=size, crop_mode=crop_mode, crop_pct=crop_pct, interpolation="nearest", **PLAIN
    )
    seen, picture = painted(mask, spec)
    sample = Sample(name="m", image=Path("m"), objects=(Object(label=0, mask=mask),))
    (found,) = read_masks(sample, picture)
    assert found is not None
    np.testing.assert_array_equal(found == 1, seen & (found != -1))
    assert set(np.unique(found).tolist()) <= {-1, 0, 1}
    inside = tuple(
        min(have, want) for have, want in zip(picture.geometry.resized, size, strict=True)
    )
    assert (found != -1).sum() == inside[0] * inside[1]


@settings(deadline=None)
@given(box=st.lists(st.integers(0, 12), min_size=4, max_size=4, unique=True))
def test_a_mask_is_not_shifted_against_a_smoothly_enlarged_picture(box: list[int]) -> None:
    """Twice as large, bilinear: what is in a rectangle keeps 9/16 or more, the rest gets 1/4."""
    mask = np.zeros((12, 12), np.bool_)
    top, bottom, left, right = *sorted(box[:2]), *sorted(box[2:])
    mask[top:bottom, left:right] = True
    seen, picture = painted(mask, ImageInput(size=(24, 24), interpolation="bilinear", **PLAIN))
    sample = Sample(name="m", image=Path("m"), objects=(Object(label=0, mask=mask),))
    (found,) = read_masks(sample, picture)
    np.testing.assert_array_equal(found, seen)
