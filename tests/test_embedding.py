"""Preprocessing inside the graph: that of the runtime, which is Pillow's, to one grey level."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image
from small_vits import small_vit
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.contract import Contract, ImageInput, Tokens
from onnxplain.export.plain import to_onnx
from onnxplain.graphs import Explained, embed
from onnxplain.runtime.preprocessing import denormalise, preprocess

SIZE = (32, 48)
PICTURES = [
    (32, 48),
    (33, 49),
    (100, 60),
    (60, 100),
    (500, 333),
    (7, 5),
    (1, 1),
    (3, 300),
    (301, 2),
]
SPEC = ImageInput(size=SIZE, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
LOGITS = 1e-3

Picture = NDArray[np.uint8]


def identity(spec: ImageInput) -> onnxruntime.InferenceSession:
    """A graph of the preprocessing alone."""
    pixels, out = (
        ir.Value(
            name=name,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape(["batch", 3, *spec.size]),
        )
        for name in (spec.name, "out")
    )
    node = ir.node("Identity", [pixels], outputs=[out])
    graph = ir.Graph([pixels], [out], nodes=[node], opset_imports={"": 17}, name="identity")
    model = ir.Model(graph, ir_version=8)
    contract = Contract(
        input=spec,
        tokens=Tokens(prefix=(), grid=(1, 1)),
        readout=None,
        layers=(),
        classes=1,
        methods={},
        logits="out",
        target=None,
    )
    model.metadata_props["onnxplain"] = contract.to_json()
    embedded = embed(Explained(contract, {"single": model}, 0)).models["single"]
    return onnxruntime.InferenceSession(ir.to_proto(embedded).SerializeToString())


def noise(size: tuple[int, int]) -> Picture:
    """Hard edges, which overshoot most. Not in black and white alone: half of both is half of a
    grey level, which Pillow's fixed-point arithmetic rounds as it falls."""
    random = np.random.default_rng(sum(size))
    values = random.integers(0, 256, (*size, 3))
    return np.where(values < 200, values // 2 + 156 * (values % 2), values).astype(np.uint8)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"size": (32, 32)},
        {"size": (32, 32), "crop_pct": 0.875},
        {"crop_pct": 0.9},
        {"crop_pct": 0.8, "crop_rounding": "down"},
        {"size": (32, 32), "crop_pct": 0.89, "crop_rounding": "down"},
        {"interpolation": "bilinear"},
        {"interpolation": "bilinear", "crop_pct": 0.9, "size": (32, 32)},
        {"crop_mode": "border", "crop_pct": 0.8},
        {"crop_mode": "border"},
        {"size": (32, 32), "crop_pct": 1.25},
        {"color_order": "BGR", "crop_mode": "border"},
    ],
)
def test_within_one_grey_level(change: Mapping[str, Any]) -> None:
    spec = dataclasses.replace(SPEC, **change)
    session = identity(spec)
    for size in PICTURES:
        picture = noise(size)
        (found,) = session.run(None, {"image": picture})
        expected, _ = preprocess(Image.fromarray(picture), spec)
        grey = [denormalise(pixels, spec).astype(int) for pixels in (found[0], expected)]
        assert found.shape == (1, 3, *spec.size)
        assert np.abs(grey[0] - grey[1]).max() <= 1, size
        # Beyond grey levels: where both have the same one, it is the same number.
        same = (grey[0] == grey[1]).transpose(2, 0, 1)
        if spec.color_order == "BGR":
            same = same[::-1]
        assert same.mean() > 0.9, size  # bilinear shares are often exact halves
        np.testing.assert_allclose(found[0][same], expected[same], rtol=0, atol=1e-5)


def test_a_squashed_picture_within_one_grey_level() -> None:
    """Of hard edges the rows first, as Pillow does it before version 13; of soft ones in any."""
    spec = dataclasses.replace(SPEC, crop_mode="squash")
    session = identity(spec)
    height, width = spec.size
    for size in PICTURES:
        hard = Image.fromarray(noise(size))
        steps = hard.resize((width, size[0]), Image.Resampling.BICUBIC)
        steps = steps.resize((width, height), Image.Resampling.BICUBIC)
        soft = Image.fromarray(noise((3, 4))).resize(size[::-1], Image.Resampling.BICUBIC)
        for picture, expected in ((hard, steps), (soft, None)):
            (found,) = session.run(None, {"image": np.array(picture)})
            whole = denormalise(preprocess(expected or picture, spec)[0], spec)
            difference = denormalise(found[0], spec).astype(int) - whole
            assert np.abs(difference).max() <= 1, size


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("embedded")
    plain = to_onnx(small_vit(), image_size=(32, 32))
    options: Any = {"preprocessing": {"crop_pct": 0.9}, "heatmaps": True}
    ox.instrument(plain, folder / "pixels.onnx", **options)
    ox.instrument(plain, folder / "image.onnx", embed_preprocessing=True, **options)
    return folder / "pixels.onnx", folder / "image.onnx"


def test_maps_of_pictures_are_the_same(files: tuple[Path, Path]) -> None:
    usual, embedded = (ox.Explainer(path, device="cpu") for path in files)
    assert embedded.contract.input.name == "image"
    pictures = [
        np.random.default_rng(i).integers(0, 256, s, np.uint8)
        for i, s in enumerate([(32, 32, 3), (50, 70, 3), (200, 90, 3)])
    ]
    for method in usual.methods:
        one = usual.explain(pictures, method=method, target=[1, 2, 3])
        other = embedded.explain(pictures, method=method, target=[1, 2, 3])
        np.testing.assert_allclose(other.logits, one.logits, rtol=0, atol=LOGITS)
        # The geometry leads back to the original just so.
        for ours, theirs in zip(other.pictures, one.pictures, strict=True):
            assert ours.geometry == theirs.geometry
        assert [o.shape for o in other.overlay()] == [p.shape for p in pictures]
    taps = embedded.taps(pictures, target=1)
    assert taps.attention is not None and taps.attention[0] is not None
    assert len(taps.attention[0]) == 3


def test_grey_transparent_and_rotated_pictures(files: tuple[Path, Path], tmp_path: Path) -> None:
    usual, embedded = (ox.Explainer(path, device="cpu") for path in files)
    random = np.random.default_rng(0)
    for name, mode in (("grey.png", "L"), ("alpha.png", "RGBA"), ("cmyk.jpg", "CMYK")):
        channels = () if mode == "L" else (len(mode),)
        array = random.integers(0, 256, (40, 60, *channels), dtype=np.uint8)
        Image.fromarray(array, mode).save(tmp_path / name)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right
    Image.fromarray(random.integers(0, 256, (40, 60, 3), np.uint8)).save(
        tmp_path / "turned.png", exif=exif
    )
    for path in tmp_path.iterdir():
        one, other = (e.explain(path, method="gradcam", target=1) for e in (usual, embedded))
        np.testing.assert_allclose(other.logits, one.logits, rtol=0, atol=LOGITS)


def test_a_picture_as_it_is_in_onnxruntime(files: tuple[Path, Path]) -> None:
    session = onnxruntime.InferenceSession(files[1], providers=["CPUExecutionProvider"])
    (image,) = [value for value in session.get_inputs() if value.name == "image"]
    assert (image.type, image.shape) == ("tensor(uint8)", ["height", "width", 3])
    picture = noise((77, 55))
    names = ["logits", "map.rollout", "heatmap.generic_attention"]
    logits, grid, heatmap = session.run(names, {"image": picture})
    assert (logits.shape, grid.shape, heatmap.shape) == ((1, 10), (1, 4, 4), (1, 32, 32))


def test_real_model_and_photos(shared_real: Path, tmp_path: Path) -> None:
    explainers = []
    for embedded in (False, True):
        path = tmp_path / f"{embedded}.onnx"
        ox.export(
            "vit_tiny_patch16_224",
            path,
            checkpoint=shared_real / "vit_tiny_tinyimagenet200.safetensors",
            num_classes=200,
            methods=["gradcam"],
            verify=False,
            embed_preprocessing=embedded,
        )
        explainers.append(ox.Explainer(path, device="cpu"))
    photos = sorted([*shared_real.glob("*.jpg"), *shared_real.glob("*.png")])
    assert photos
    usual, embedded_ = explainers
    for photo in photos:
        one, other = (e.explain(photo) for e in (usual, embedded_))
        shares = [np.exp(x.logits - x.logits.max()) for x in (one, other)]
        shares = [share / share.sum() for share in shares]
        assert np.abs(shares[0] - shares[1]).max() < LOGITS, photo


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"preprocessing": {"interpolation": "lanczos"}},
            "'lanczos'; expected bicubic or bilinear",
        ),
        ({"preprocessing": {"crop_mode": "corner"}}, "crop_mode 'corner'; expected"),
    ],
)
def test_what_cannot_be_embedded(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain = to_onnx(small_vit(), image_size=(32, 32))
    with pytest.raises(ox.InputError, match=message):
        ox.instrument(plain, tmp_path / "x.onnx", embed_preprocessing=True, **arguments)
    assert not any(tmp_path.iterdir())


def test_names_that_the_model_has_already(files: tuple[Path, Path], tmp_path: Path) -> None:
    plain = to_onnx(small_vit(), image_size=(32, 32))
    for node, name in zip(list(plain.graph)[5:], ("image", "preprocess/1"), strict=False):
        node.outputs[0].name = name
    weight = next(iter(plain.graph.initializers.values()))
    weight.name = "preprocess/0"
    ox.instrument(
        plain,
        tmp_path / "x.onnx",
        methods=["gradcam"],
        embed_preprocessing=True,
        preprocessing={"crop_pct": 0.9},
    )
    picture = noise((50, 60))
    found, expected = (
        ox.Explainer(path, device="cpu").explain(picture, method="gradcam").logits
        for path in (tmp_path / "x.onnx", files[1])
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS)


def test_not_with_any_size_nor_a_frozen_batch(tmp_path: Path) -> None:
    with pytest.raises(ox.InputError, match="without a dynamic size"):
        ox.export(small_vit(dynamic_img_size=True), tmp_path / "x.onnx", embed_preprocessing=True)


def test_pixel_values_are_refused(files: tuple[Path, Path]) -> None:
    explainer = ox.Explainer(files[1], device="cpu")
    with pytest.raises(ox.InputError, match="takes pictures as they are"):
        explainer.explain(np.zeros((1, 3, 32, 32), np.float32))
    with pytest.raises(ox.InputError, match="made for 32x32"):
        ox.Explainer(files[1], device="cpu", image_size=64)


def test_command_line(tmp_path: Path) -> None:
    arguments = ["export", "test_vit", "--num-classes", "3", "-o", str(tmp_path / "x.onnx")]
    flags = ["--embed-preprocessing", "--heatmap", "--outputs", "maps", "--methods", "gradcam"]
    result = CliRunner().invoke(app, [*arguments, *flags])
    assert result.exit_code == 0, result.output
    contract = ox.Explainer(tmp_path / "x.onnx", device="cpu").contract
    assert (contract.input.name, contract.input.layout, contract.input.batch) == ("image", "HWC", 1)
    assert contract.heatmaps and contract.verification is not None
