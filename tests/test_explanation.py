"""`Explanation`: heatmaps, overlays at the right place, files, notebooks."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import PATCH, ToyFile, pixels, toy_contract
from numpy.typing import NDArray
from PIL import Image

import onnxplain as ox
from onnxplain.runtime.explanation import COLORMAPS, upsample

PIXELS = np.random.default_rng(3).integers(0, 256, (11, 17, 3), dtype=np.uint8)


def half_pixel(grid: NDArray[np.floating[Any]], size: tuple[int, int]) -> NDArray[np.float64]:
    """Bilinear enlargement between centres, one axis after the other."""
    out = grid.astype(np.float64)
    for axis, length in enumerate(size):
        count = grid.shape[axis]
        at = (np.arange(length) + 0.5) * count / length - 0.5
        lines = np.moveaxis(out, axis, 0).reshape(count, -1)
        columns = [np.interp(at, np.arange(count), column) for column in lines.T]
        shape = (length, *np.moveaxis(out, axis, 0).shape[1:])
        out = np.moveaxis(np.array(columns).T.reshape(shape), 0, axis)
    return out


# Heatmaps


@pytest.mark.parametrize("size", [(32, 64), (30, 50), (4, 8)])
def test_heatmaps_are_half_pixel_bilinear_and_span_0_to_1(size: tuple[int, int]) -> None:
    grid = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
    heatmap, degenerate = upsample(grid, size)
    assert heatmap.dtype == np.float32 and heatmap.shape == (2, *size)
    assert not degenerate.any()
    for values, found in zip(grid, heatmap, strict=True):
        large = half_pixel(values, size)
        expected = (large - large.min()) / (large.max() - large.min())
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        assert (found.min(), found.max()) == (0, 1)


def test_scale_does_not_matter() -> None:
    grid = np.random.default_rng(0).random((1, 3, 3)).astype(np.float32)
    expected, _ = upsample(grid, (12, 12))
    for scale in (1e-30, 1e30):
        found, degenerate = upsample((grid * scale).astype(np.float32), (12, 12))
        assert not degenerate[0]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_maps_without_evidence_are_flagged_not_amplified() -> None:
    noise = np.random.default_rng(0).random((3, 3))
    maps = {
        "zero": np.zeros((3, 3)),
        "constant": np.full((3, 3), 0.7),
        "rounding": 0.7 + 1e-6 * noise,
        "negative rounding": -0.7 + 1e-6 * noise,
        "one nan": np.where(noise == noise.max(), np.nan, noise),
        "one inf": np.where(noise == noise.max(), np.inf, noise),
        "all inf": np.full((3, 3), -np.inf),
    }
    heatmap, degenerate = upsample(np.array(list(maps.values()), np.float32), (12, 12))
    assert dict(zip(maps, degenerate.tolist(), strict=True)) == dict.fromkeys(maps, True)
    assert not heatmap.any()
    faint, degenerate = upsample((0.7 + 1e-4 * noise).astype(np.float32)[None], (12, 12))
    assert not degenerate[0] and faint.max() == 1


# Places


def bright(height: int, width: int, row: int, column: int, side: int) -> NDArray[np.uint8]:
    """A dark picture with one bright square."""
    picture = np.zeros((height, width, 3), np.uint8)
    picture[row : row + side, column : column + side] = 255
    return picture


def hottest(overlay: NDArray[np.uint8]) -> tuple[float, float]:
    """The middle of the brightest pixels of a grey overlay."""
    level = overlay[..., 0].astype(int)
    rows, columns = np.nonzero(level == level.max())
    return rows.mean(), columns.mean()


@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 0), (0, 3), (1, 2), (0, 1)])
def test_the_hot_patch_is_where_the_bright_one_is(row: int, column: int, toy_file: ToyFile) -> None:
    """8 x 16 pixels, 2 x 4 patches: rows and columns must not change places."""
    explainer = ox.Explainer(toy_file(size=(8, 16)), device="cpu")
    picture = bright(8, 16, row * PATCH, column * PATCH, PATCH)
    result = explainer.explain(picture, method="raw_attention")
    assert result.grid.shape == (1, 2, 4) and result.heatmap.shape == (1, 8, 16)
    assert result.grid[0].argmax() == 4 * row + column
    (overlay,) = result.overlay(alpha=1, colormap="bone")
    for large in (result.heatmap[0], overlay[..., 0]):
        y, x = divmod(int(large.argmax()), 16)
        assert (y // PATCH, x // PATCH) == (row, column)


@pytest.mark.parametrize(("crop_mode", "left"), [("center", 100), ("squash", 0), ("border", 0)])
@pytest.mark.parametrize("turned", [False, True])
def test_the_map_lies_on_the_original_where_it_was_computed(
    crop_mode: str, left: int, turned: bool, toy_file: ToyFile, tmp_path: Path
) -> None:
    """A 400 x 200 photo, whole, cropped or padded, upright or stored on its side."""
    spec = replace(toy_contract().input, size=(32, 32), crop_mode=crop_mode)
    explainer = ox.Explainer(toy_file(size=(32, 32), input=spec), device="cpu")
    # The patch of the third row and sixth column of the grid of 8 x 8, on the original.
    high, wide = {"center": (25, 25), "squash": (25, 50), "border": (50, 50)}[crop_mode]
    top = -100 if crop_mode == "border" else 0
    row, column = 3 * high + top, left + 5 * wide
    picture = np.zeros((200, 400, 3), np.uint8)
    picture[row : row + high, column : column + wide] = 255
    image, path = Image.fromarray(picture), tmp_path / "photo.png"
    if turned:
        exif = Image.Exif()
        exif[0x0112] = 6
        image.rotate(90, expand=True).save(path, exif=exif)
    else:
        image.save(path)
    result = explainer.explain(path, method="raw_attention")
    assert result.grid[0].argmax() == 8 * 3 + 5
    (overlay,) = result.overlay(alpha=1, colormap="bone")
    assert overlay.shape == (200, 400, 3)
    y, x = hottest(overlay)
    assert abs(y - (row + high / 2)) < high / 3 and abs(x - (column + wide / 2)) < wide / 3


def test_what_the_model_did_not_see_keeps_its_colours(toy_file: ToyFile) -> None:
    spec = replace(toy_contract().input, crop_pct=0.5)
    explainer = ox.Explainer(toy_file(input=spec), device="cpu")
    picture = np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8)
    (overlay,) = explainer.explain(picture, method="rollout").overlay(alpha=1)
    changed = (overlay != picture).any(axis=-1)
    assert changed[10:30, 30:50].mean() > 0.99
    changed[10:30, 30:50] = False
    assert not changed.any()


# Overlays


def test_alpha_mixes_picture_and_colour(explainer: ox.Explainer) -> None:
    result = explainer.explain(PIXELS, method="raw_attention")
    (bare,), (full,) = result.overlay(alpha=0), result.overlay(alpha=1)
    np.testing.assert_array_equal(bare, PIXELS)
    (mixed,) = result.overlay(alpha=0.3)
    expected = 0.7 * bare.astype(float) + 0.3 * full
    seen = (full != bare).any(axis=-1)
    np.testing.assert_allclose(mixed[seen], expected[seen], atol=1)
    np.testing.assert_array_equal(result.overlay()[0], result.overlay(0.5, "turbo")[0])


def test_colours_are_rgb(explainer: ox.Explainer) -> None:
    result = explainer.explain(PIXELS[:8, :8], method="raw_attention")
    (overlay,) = result.overlay(alpha=1, colormap="jet")
    y, x = np.unravel_index(result.heatmap[0].argmax(), (8, 8))
    assert overlay[y, x].tolist() == [128, 0, 0]  # jet ends in dark red


@pytest.mark.parametrize("colormap", COLORMAPS)
def test_every_colormap_of_opencv(colormap: str, explainer: ox.Explainer) -> None:
    (overlay,) = explainer.explain(PIXELS).overlay(colormap=colormap)
    assert overlay.shape == PIXELS.shape and overlay.dtype == np.uint8


def test_the_colormaps_are_opencvs() -> None:
    assert COLORMAPS["viridis"] == cv2.COLORMAP_VIRIDIS
    assert len(COLORMAPS) > 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"colormap": "rainbows"}, "unknown colormap 'rainbows'; one of autumn, "),
        ({"alpha": 1.5}, r"expected 0\.\.1"),
        ({"alpha": float("nan")}, r"expected 0\.\.1"),
    ],
)
def test_wrong_overlays(arguments: Any, words: str, explainer: ox.Explainer) -> None:
    with pytest.raises(ox.InputError, match=words):
        explainer.explain(PIXELS).overlay(**arguments)


def test_pixel_values_are_their_own_background(explainer: ox.Explainer) -> None:
    picture = PIXELS[:8, :8]
    spec = explainer.contract.input
    normalised = (picture / 255 - 0.5) / 0.5
    values = normalised.transpose(2, 0, 1)[None].astype(np.float32)
    result = explainer.explain(values)
    np.testing.assert_array_equal(result.overlay(alpha=0)[0], picture)
    assert result.pictures[0].geometry.size == spec.size


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 2), (500, 700)])
def test_pictures_of_any_size(shape: tuple[int, int], explainer: ox.Explainer) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    (overlay,) = explainer.explain(picture, method="raw_attention").overlay()
    assert overlay.shape == picture.shape


# A batch


def test_a_result_is_a_sequence_of_single_ones(explainer: ox.Explainer) -> None:
    result = explainer.explain([PIXELS, PIXELS[:5]], target=[0, 2], method="gradcam")
    assert len(result) == 2
    last = result[-1]
    assert len(last) == 1
    assert last.labels == ("espresso",) and last.target.tolist() == [2]
    np.testing.assert_array_equal(last.grid[0], result.grid[1])
    assert [one.overlay()[0].shape for one in result] == [(11, 17, 3), (5, 17, 3)]
    with pytest.raises(IndexError):
        result[2]


# Files


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    names = ["a/cat.png", "b/cat.jpg", "b/Cat.bmp", "b/two.dots.png"]
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(PIXELS).save(path)
    return paths


def test_a_folder_gets_a_file_per_picture(
    photos: list[Path], tmp_path: Path, explainer: ox.Explainer
) -> None:
    result = explainer.explain([*photos, PIXELS], method="rollout")
    out = tmp_path / "new" / "out"
    written = result.save(out)
    assert [path.name for path in written] == [
        "cat.rollout.png",
        "cat-2.rollout.png",
        "Cat-3.rollout.png",
        "two.dots.rollout.png",
        "image.rollout.png",
    ]
    for path, overlay in zip(written, result.overlay(), strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(path)), overlay)
    again = result.save(out, alpha=0.2, colormap="jet")
    assert again == written
    np.testing.assert_array_equal(
        np.asarray(Image.open(again[0])), result.overlay(alpha=0.2, colormap="jet")[0]
    )
    assert sorted(os.listdir(out)) == sorted(path.name for path in written)


def test_each_kind_of_file(photos: list[Path], tmp_path: Path, explainer: ox.Explainer) -> None:
    result = explainer.explain(photos[:2], method="rollout", target=1)
    out = tmp_path / "out"
    grey = np.asarray(Image.open(result.save(out, kind="heatmap")[0]))
    np.testing.assert_array_equal(grey, np.rint(result.heatmap[0] * 255))
    npy = result.save(out, kind="npy")
    assert [path.name for path in npy] == ["cat.rollout.npy", "cat-2.rollout.npy"]
    np.testing.assert_array_equal(np.load(npy[1]), result.grid[1])
    npz = np.load(result.save(out, kind="npz")[1])
    for name in ("grid", "heatmap", "logits", "target", "degenerate"):
        np.testing.assert_array_equal(npz[name], getattr(result[1], name))
    assert npz["labels"].tolist() == ["Egyptian cat"] and str(npz["method"]) == "rollout"


def test_one_file(photos: list[Path], tmp_path: Path, explainer: ox.Explainer) -> None:
    one = explainer.explain(photos[0])
    for name in ("x.png", "new/x.JPG", "x.webp"):
        (path,) = one.save(tmp_path / name)
        assert path == tmp_path / name
        assert Image.open(path).size == (17, 11)
    np.testing.assert_array_equal(np.load(one.save(tmp_path / "x.npy", "npy")[0]), one.grid[0])
    batch = explainer.explain(photos)
    (path,) = batch.save(str(tmp_path / "all.npy"), kind="npy")
    np.testing.assert_array_equal(np.load(path), batch.grid)
    (path,) = batch.save(tmp_path / "all.npz", kind="npz")
    np.testing.assert_array_equal(np.load(path)["heatmap"], batch.heatmap)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("x.png", {}, "one file for 2 pictures; give a folder"),
        ("x.npy", {}, r"kind 'overlay' is written as .png"),
        ("x.jpg", {"kind": "heatmap"}, r"kind 'heatmap' is written as .png"),
        ("x.pdf", {}, r"kind 'overlay' is written as .png"),
        ("out", {"kind": "svg"}, "unknown kind 'svg'; one of overlay, heatmap, npy, npz"),
        ("out", {"colormap": "none"}, "unknown colormap"),
    ],
)
def test_wrong_files(
    name: str, arguments: Any, words: str, tmp_path: Path, explainer: ox.Explainer
) -> None:
    with pytest.raises(ox.InputError, match=words):
        explainer.explain([PIXELS, PIXELS]).save(tmp_path / name, **arguments)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".onnx"]


def test_the_picture_itself_is_never_overwritten(
    photos: list[Path], explainer: ox.Explainer
) -> None:
    before = photos[0].read_bytes()
    with pytest.raises(ox.InputError, match="is the picture itself"):
        explainer.explain(photos[0]).save(photos[0])
    explainer.explain(photos[0]).save(photos[0].parent)
    assert photos[0].read_bytes() == before


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, explainer: ox.Explainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = explainer.explain(PIXELS)
    (path,) = result.save(tmp_path / "out" / "x.png")
    before = path.read_bytes()

    def interrupted(self: Image.Image, file: io.BytesIO, *_: Any, **__: Any) -> None:
        file.write(b"half a picture")
        raise KeyboardInterrupt

    monkeypatch.setattr(Image.Image, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        result.save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["x.png"]


# Notebooks


def test_notebook_display(explainer: ox.Explainer, toy_file: ToyFile) -> None:
    result = explainer.explain([PIXELS, np.zeros((500, 1000, 3), np.uint8)])
    png = Image.open(io.BytesIO(result._repr_png_()))
    assert png.format == "PNG" and png.size == (17 + 320, 160)
    page = result._repr_html_()
    assert page.count("<img ") == 2
    odd = ox.Explainer(toy_file("odd.onnx", labels=("<b>", "c", "d")), device="cpu")
    assert "&lt;b&gt;, transformer_attribution" in odd.explain(PIXELS, target="<b>")._repr_html_()


def test_the_display_says_when_there_is_nothing_to_show(explainer: ox.Explainer) -> None:
    values = pixels(1)
    values[:] = 3e38
    assert "degenerate" in explainer.explain(values)._repr_html_()
    assert "degenerate" not in explainer.explain(PIXELS, method="rollout")._repr_html_()


def test_results_print_on_one_line(explainer: ox.Explainer) -> None:
    result = explainer.explain(PIXELS, method="gradcam", target=1)
    assert repr(result) == (
        "Explanation(method='gradcam', labels=('Egyptian cat',), grid=(1, 2, 2))"
    )
    taps = explainer.taps(PIXELS, target=1, kinds=["features"])
    assert repr(taps) == "Taps(target=[1], with logits, features)"
