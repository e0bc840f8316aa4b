"""Files of image processors that transformers and timm write, against what these make of pictures.

The processors of Pillow are compared, which an image processor was before torchvision's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
from numpy.typing import NDArray
from PIL import Image
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from timm.models._hub import save_config_for_hf

from onnxplain.contract import ImageInput
from onnxplain.processor import read_processor
from onnxplain.processor.classes import MODELS, PROCESSORS, processor_of
from onnxplain.runtime.pictures import load_picture
from onnxplain.runtime.preprocessing import preprocess

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

ROUNDING = 1e-6  # of float32: both scale, subtract and divide; of the largest value
GREY_LEVELS = 0.5  # on average: torchvision resizes in other arithmetic than Pillow
SIZES = [(64, 64), (83, 61), (61, 83), (301, 97), (97, 300), (40, 31), (127, 255)]  # height, width
SMALL = {"height": 48, "width": 48}
# What real files say that differs from the defaults, with small sizes.
FILES: dict[str, list[dict[str, Any]]] = {
    "Beit": [
        {"size": SMALL, "do_center_crop": False},
        {"size": {"height": 56, "width": 56}, "crop_size": SMALL, "do_center_crop": True},
    ],
    "Bit": [{"size": {"shortest_edge": 55}, "crop_size": SMALL}],
    "Blip": [{"size": {"height": 40, "width": 56}}],
    "CLIP": [
        {"size": {"shortest_edge": 48}, "crop_size": SMALL},
        {"size": SMALL, "crop_size": SMALL, "do_rescale": False, "do_normalize": False},
    ],
    "ConvNext": [{"size": {"shortest_edge": 48}}, {"size": {"shortest_edge": 48}, "crop_pct": 0.9}],
    "DeiT": [{"size": {"height": 55, "width": 55}, "crop_size": SMALL}, {}],
    "EfficientNet": [
        {"size": SMALL},
        {"size": SMALL, "rescale_factor": 1 / 127.5, "rescale_offset": True, "include_top": False},
    ],
    "MobileNetV1": [{"size": {"shortest_edge": 50}, "crop_size": SMALL}],
    "MobileNetV2": [{"size": {"shortest_edge": 50}, "crop_size": SMALL, "resample": 0}],
    "MobileViT": [{"size": {"shortest_edge": 54}, "crop_size": SMALL}],
    "Pvt": [{"size": SMALL, "resample": 4}],
    "Segformer": [{"size": SMALL, "image_mean": 0.25, "image_std": 0.5}],
    "Siglip": [{"size": SMALL, "resample": 1}],
    "ViT": [
        {"size": SMALL},
        {"size": SMALL, "resample": 5, "do_normalize": False},
        {"size": SMALL, "do_rescale": False, "image_mean": [120, 110, 100], "image_std": 60.0},
        {"size": SMALL, "rescale_factor": 1 / 250, "image_mean": [0.3, 0.4, 0.5]},
    ],
}
CASES = [(name, settings) for name, several in FILES.items() for settings in several]


def pictures() -> list[Image.Image]:
    """RGB pictures of colours that change slowly and quickly, grey and transparent ones."""
    random = np.random.default_rng(5)
    made = []
    for height, width in SIZES:
        rough = random.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
        made.append(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC))
    noise = random.integers(0, 256, (70, 90, 4), np.uint8)
    return [*made, Image.fromarray(noise[..., :3]), Image.fromarray(noise[..., 0])]


def ours(path: Path, picture: Image.Image) -> NDArray[np.float32]:
    read = read_processor(path)
    assert read.size is not None
    pixels, _ = preprocess(picture, ImageInput(size=read.size, **read.fields))
    return pixels


def assert_equal(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


def of_pillow(name: str) -> Any:
    """The class that works with Pillow, whose name depends on the version."""
    plain = f"{name}ImageProcessor"
    return getattr(transformers, f"{plain}Pil", None) or getattr(transformers, plain)


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[f"{n}-{list(s)}" for n, s in CASES])
def test_pixel_values(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    processor = of_pillow(name)(**settings)
    processor.save_pretrained(tmp_path)
    for picture in pictures():
        picture = picture.convert("RGB")  # only some of the processors do it
        found = ours(tmp_path / "preprocessor_config.json", picture)
        assert_equal(found, processor(picture, return_tensors="np")["pixel_values"][0])


def test_every_class_is_compared() -> None:
    assert {*FILES, "DINOv3ViT"} == set(PROCESSORS)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_pictures_that_are_not_rgb(mode: str, tmp_path: Path) -> None:
    processor = of_pillow("CLIP")(size={"shortest_edge": 48}, crop_size=SMALL)
    processor.save_pretrained(tmp_path)
    for picture in pictures():
        picture = picture.convert("RGB").convert(mode)
        if mode == "RGBA":
            picture.putalpha(picture.getchannel(0))
        found = ours(tmp_path / "preprocessor_config.json", load_picture(picture)[0])
        assert_equal(found, processor(picture, return_tensors="np")["pixel_values"][0])


@pytest.mark.parametrize("name", PROCESSORS)
def test_defaults(name: str, tmp_path: Path) -> None:
    """What a file leaves out is what its class does, or is refused."""
    processor = of_pillow(name)()
    processor.save_pretrained(tmp_path)
    whole = json.loads((tmp_path / "preprocessor_config.json").read_text("utf-8"))
    for field, value in PROCESSORS[name].defaults.items():
        if value is None:
            continue
        said = whole.get(field)
        if field in ("size", "crop_size"):
            edge = {"shortest_edge": value} if not PROCESSORS[name].square else None
            square = [value, value] if isinstance(value, int) else value
            plain = {"height": square[0], "width": square[1]}
            assert said == (edge if field == "size" and edge and isinstance(value, int) else plain)
        elif isinstance(value, float) and isinstance(said, list):
            assert said == [value] * 3
        else:
            assert said == value or (value is False and said is None), field


@pytest.mark.parametrize("model", MODELS)
def test_models_of_files_that_name_no_class(model: str) -> None:
    auto = transformers.models.auto.image_processing_auto
    names = auto.IMAGE_PROCESSOR_MAPPING_NAMES[model].values()
    assert all(processor_of(name) is processor_of(model) for name in names if name)


@pytest.mark.parametrize("name", ["ViT", "CLIP", "ConvNext", "DINOv3ViT"])
def test_torchvision_differs_by_less_than_a_grey_level(name: str, tmp_path: Path) -> None:
    settings = FILES.get(name, [{"size": SMALL}])[0]
    processor = getattr(transformers, f"{name}ImageProcessor")(**settings)
    processor.save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    levels = 255 * np.reshape(read_processor(path).fields["std"], (3, 1, 1))
    for picture in pictures():
        picture = picture.convert("RGB")
        expected = processor(picture, return_tensors="pt")["pixel_values"][0].numpy()
        found = ours(path, picture)
        assert found.shape == expected.shape
        assert np.mean(np.abs(found - expected) * levels) < GREY_LEVELS


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"crop_pct": 0.9, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
        {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bilinear"},
        {"crop_mode": "border", "input_size": (3, 48, 64)},
        {"interpolation": "lanczos", "input_size": (3, 56, 48)},
    ],
    ids=lambda settings: "-".join(settings) or "defaults",
)
def test_timm(settings: dict[str, Any], tmp_path: Path) -> None:
    overlay = {"input_size": (3, 48, 48), **settings}
    model = timm.create_model("test_vit", img_size=48, pretrained_cfg_overlay=overlay)
    path = tmp_path / "config.json"
    save_config_for_hf(model, str(path))
    written = json.loads(path.read_text("utf-8"))["pretrained_cfg"]
    transform = create_transform(**resolve_data_config(pretrained_cfg=written))
    for picture in pictures():
        picture = picture.convert("RGB")
        found = ours(path, picture)
        expected = transform(picture).numpy()
        assert_equal(found, expected)
