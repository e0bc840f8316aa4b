"""Pictures of every kind become the numbers that timm makes of them, or a clear error."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from onnxplain.contract import ImageInput
from onnxplain.errors import ContractError, ImageError, InputError
from onnxplain.runtime.pictures import load_picture
from onnxplain.runtime.preprocessing import Geometry, denormalise, prepare, preprocess

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def loaded(source: Any) -> NDArray[np.uint8]:
    return np.asarray(load_picture(source)[0])


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(
    ("size", "crop_pct"),
    [((32, 32), 0.875), ((32, 32), 1.0), ((24, 40), 0.9), ((40, 24), 1.0), ((33, 33), 0.95)],
)
def test_same_numbers_as_timm(size: tuple[int, int], crop_pct: float, crop_mode: str) -> None:
    pytest.importorskip("torch", reason="needs torch to compare with")
    data = pytest.importorskip("timm.data", reason="needs timm to compare with")
    shapes = [(50, 50), (37, 91), (200, 41), (9, 7), (1, 1), (32, 32), (45, 36), (61, 300), (3, 80)]
    for interpolation in ("bicubic", "bilinear", "nearest", "lanczos"):
        spec = ImageInput(
            size=size,
            crop_pct=crop_pct,
            crop_mode=crop_mode,
            interpolation=interpolation,
            **IMAGENET,
        )
        transform = data.create_transform(
            (3, *size),
            is_training=False,
            crop_pct=crop_pct,
            crop_mode=crop_mode,
            interpolation=interpolation,
            **IMAGENET,
        )
        for i, (height, width) in enumerate(shapes):
            image = Image.fromarray(noise(height, width, seed=i))
            found, _ = preprocess(image, spec)
            expected = transform(image).numpy()
            assert found.dtype == np.float32
            np.testing.assert_allclose(
                found, expected, rtol=0, atol=1e-6, err_msg=f"{interpolation} {height}x{width}"
            )


def test_border_keeps_a_pixel_of_a_very_thin_picture() -> None:
    spec = ImageInput(size=(32, 32), crop_mode="border")
    pixels, geometry = preprocess(Image.new("RGB", (500, 1), "red"), spec)
    assert geometry.resized == (1, 32)
    assert np.isfinite(pixels).all()


def test_mean_and_std_are_in_the_order_of_the_colours() -> None:
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    spec = ImageInput(size=(4, 4), mean=(0.1, 0.2, 0.3), std=(1, 1, 1), color_order="BGR")
    pixels, _ = preprocess(red, spec)
    np.testing.assert_allclose(pixels[:, 0, 0], [-0.1, -0.2, 0.7], atol=1e-6)
    np.testing.assert_array_equal(denormalise(pixels, spec)[0, 0], [255, 0, 0])


@pytest.mark.parametrize(("rounding", "first"), [("even", 2), ("down", 1)])
def test_half_of_an_odd_rest(rounding: str, first: int) -> None:
    """Of 35 pixels 32 stay, so 1.5 are cut off on each side."""
    columns = np.broadcast_to(np.arange(35, dtype=np.uint8)[:, None], (35, 35, 3))
    spec = ImageInput(
        size=(32, 32), crop_pct=32 / 35, crop_rounding=rounding, mean=(0, 0, 0), std=(1, 1, 1)
    )
    pixels, geometry = preprocess(Image.fromarray(columns), spec)
    assert geometry.offset == (first, first)
    np.testing.assert_array_equal(np.rint(255 * pixels[0, 0]), np.arange(first, first + 32))


@pytest.mark.parametrize("field", ["interpolation", "crop_mode"])
def test_unknown_preprocessing_is_refused(field: str) -> None:
    spec = ImageInput(size=(4, 4), **{field: "fancy"})  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="fancy"):
        preprocess(Image.new("RGB", (4, 4)), spec)


def test_too_elongated_pictures_are_refused_before_they_fill_memory() -> None:
    with pytest.raises(ImageError, match="200000x1 pixels is too elongated"):
        preprocess(Image.new("RGB", (200_000, 1)), ImageInput(size=(224, 224)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int, tmp_path: Path) -> None:
    upright = noise(5, 8)
    stored = {  # how a camera held that way stores the upright picture
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif)
    np.testing.assert_array_equal(loaded(path), upright)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(noise(6, 7)).save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert loaded(path).shape == (6, 7, 3)


def test_grey_becomes_three_equal_channels() -> None:
    grey = noise(4, 5, 1)
    expected = np.repeat(grey[..., None], 3, axis=2)
    for source in (Image.fromarray(grey), grey, grey[..., None]):
        np.testing.assert_array_equal(loaded(source), expected)


def test_transparent_pixels_are_white_whatever_they_hide(tmp_path: Path) -> None:
    rgba = noise(2, 2, 4)
    rgba[..., 3] = [[0, 255], [128, 0]]
    found = loaded(rgba)
    np.testing.assert_array_equal(found[0, 0], [255, 255, 255])
    np.testing.assert_array_equal(found[0, 1], rgba[0, 1, :3])
    half = 255 + (rgba[1, 0, :3].astype(float) - 255) * 128 / 255
    np.testing.assert_allclose(found[1, 0], half, atol=1)
    for mode in ("LA", "La", "RGBa"):
        clear = Image.fromarray(rgba).convert("RGBA" if mode == "RGBa" else "LA")
        np.testing.assert_array_equal(loaded(clear.convert(mode))[0, 0], [255, 255, 255])
    keyed = tmp_path / "keyed.png"
    Image.new("RGB", (3, 3), (1, 2, 3)).save(keyed, transparency=(1, 2, 3))
    np.testing.assert_array_equal(loaded(keyed), np.full((3, 3, 3), 255))


def test_palette_pictures(tmp_path: Path) -> None:
    image = Image.fromarray(noise(6, 6)).quantize(8)
    np.testing.assert_array_equal(loaded(image), np.asarray(image.convert("RGB")))
    clear = tmp_path / "clear.gif"
    image.save(clear, transparency=int(np.asarray(image)[0, 0]))
    np.testing.assert_array_equal(loaded(clear)[0, 0], [255, 255, 255])


def test_cmyk_and_bilevel(tmp_path: Path) -> None:
    cmyk = tmp_path / "print.jpg"
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(cmyk)
    red = loaded(cmyk)[4, 4].astype(int)
    assert red[0] > 200 > 50 > red[1:].max()
    np.testing.assert_array_equal(loaded(Image.new("1", (1, 1), 1)), [[[255, 255, 255]]])


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path: Path) -> None:
    deep = np.array([[0, 128, 257], [32768, 65407, 65535]], np.uint16)
    expected = [[0, 0, 1], [128, 255, 255]]
    png, tiff, pgm = tmp_path / "deep.png", tmp_path / "deep.tif", tmp_path / "deep.pgm"
    Image.fromarray(deep).save(png)
    Image.fromarray(deep).save(tiff)
    pgm.write_bytes(b"P5 3 2 65535\n" + deep.astype(">u2").tobytes())
    for source in (png, tiff, pgm, Image.fromarray(deep.astype(">u2"))):
        np.testing.assert_array_equal(loaded(source)[..., 0], expected)


def test_pictures_of_no_known_range() -> None:
    for wide in (
        Image.new("F", (3, 3)),
        Image.fromarray(np.full((3, 3), 2**16, np.int32)),
        Image.fromarray(np.full((3, 3), -1, np.int32)),
    ):
        with pytest.raises(ImageError, match="convert to 8 bit"):
            load_picture(wide)


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    path = tmp_path / "moving.gif"
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(loaded(path)[0, 0], [255, 0, 0])


def bomb() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(64, 64)).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file is empty"),
        (b"just some words\n" * 9, "not a picture"),
        (encoded("PNG")[:2000], "damaged or truncated"),
        (encoded("JPEG")[:1500], "damaged or truncated"),
        (encoded("GIF")[:900], "damaged or truncated"),
        (encoded("PNG")[:20], "not a picture"),
        (bomb(), "too large"),
        (None, "no such file"),
    ],
)
def test_bad_files_are_named(data: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.png"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ImageError, match=f"broken.png: {words}") as caught:
        load_picture(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_not_a_picture(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="a folder, not a picture"):
        load_picture(tmp_path)


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((0, 8, 3), np.uint8),
        np.zeros((8, 8, 3), np.uint16),
        np.zeros((8, 8, 3), bool),
        np.zeros((8, 8, 3), np.float32),
        np.zeros((3, 8, 8), np.float32),
        np.zeros((0, 3, 8, 8), np.float32),
        np.zeros((1, 3, 8, 9), np.float32),
        np.zeros((1, 8, 8, 3), np.float32),
        np.full((1, 3, 8, 8), np.nan, np.float32),
        np.full((1, 3, 8, 8), np.inf),
        [],
        [np.zeros((1, 3, 8, 8), np.float32)],
        [None],
        None,
        5,
        {"a": 1},
        b"bytes",
    ],
)
def test_what_is_not_a_picture_is_refused(images: Any) -> None:
    with pytest.raises(InputError) as caught:
        prepare(images, ImageInput(size=(8, 8)))
    assert "\n" not in str(caught.value)


def test_every_kind_of_source_gives_the_same(tmp_path: Path) -> None:
    spec = ImageInput(size=(8, 8))
    array = noise(20, 30)
    path = tmp_path / "a.png"
    Image.fromarray(array).save(path)
    sources = [array, Image.fromarray(array), path, str(path), [path], array[None], (array,)]
    for source in sources:
        ((pixels, picture),) = prepare(source, spec)
        np.testing.assert_array_equal(pixels, prepare(array, spec)[0][0])
        np.testing.assert_array_equal(picture.rgb, array)
    assert [p.path for _, p in prepare([path, array], spec)] == [path, None]
    pixels = prepare(array, spec)[0][0]
    for given in (pixels[None], pixels[None].astype(np.float64)):
        np.testing.assert_array_equal(prepare(given, spec)[0][0], pixels)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_project_inverts_resize_and_crop(crop_mode: str) -> None:
    """A picture that spells its own coordinates comes back to where it was."""
    height, width = 90, 160
    y, x = np.mgrid[:height, :width]
    ramps = np.stack([y, x, 0 * x], axis=-1).astype(np.uint8)
    spec = ImageInput(
        size=(48, 64), crop_mode=crop_mode, crop_pct=0.9, mean=(0, 0, 0), std=(1, 1, 1)
    )
    pixels, geometry = preprocess(Image.fromarray(ramps), spec)
    for channel, expected in ((0, y), (1, x)):
        rows, columns, seen = geometry.project(pixels[channel] * 255)
        inner = (slice(3, -3), slice(3, -3))  # at its edges the resize has fewer pixels to weigh
        np.testing.assert_allclose(seen[inner], expected[rows, columns][inner], atol=1)


def test_project_leaves_out_what_the_crop_cut_off() -> None:
    geometry = Geometry(original=(100, 200), resized=(50, 100), offset=(0, 25), size=(50, 50))
    rows, columns, seen = geometry.project(np.ones((50, 50), np.float32))
    assert (rows, columns) == (slice(0, 100), slice(50, 150))
    assert seen.shape == (100, 100)


def test_project_leaves_out_the_padding() -> None:
    geometry = Geometry(original=(20, 40), resized=(25, 50), offset=(-12, 0), size=(50, 50))
    heatmap = np.zeros((50, 50), np.float32)
    heatmap[:12] = heatmap[37:] = 9
    rows, columns, seen = geometry.project(heatmap)
    assert (rows, columns) == (slice(0, 20), slice(0, 40))
    assert seen[2:-2].max() == 0


def test_project_onto_a_single_pixel() -> None:
    geometry = Geometry(original=(1, 1), resized=(64, 64), offset=(8, 8), size=(48, 48))
    rows, columns, seen = geometry.project(np.ones((48, 48), np.float32))
    assert (rows, columns, seen.tolist()) == (slice(0, 1), slice(0, 1), [[1.0]])
