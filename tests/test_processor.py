"""What is read of the file beside a model, what is refused, and where a size comes from."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bad_input import complaint
from test_cli import onnxplain_command
from test_open_sizes import hand_made

import onnxplain as ox
from onnxplain.errors import InputError
from onnxplain.processor import LARGEST_FILE, read_processor

VIT: dict[str, Any] = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_processor_type": "ViTImageProcessor",
    "image_std": [0.1, 0.2, 0.3],
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": 32, "width": 32},
}
CLIP = {**VIT, "image_processor_type": "CLIPImageProcessor", "do_center_crop": True}
CLIP |= {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}
CONVNEXT = {**VIT, "image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}}
TIMM: dict[str, Any] = {
    "architecture": "vit_tiny_patch16_224",
    "pretrained_cfg": {"input_size": [3, 224, 224], "mean": [0.5, 0.5, 0.5], "std": [0.5] * 3},
}


def written(folder: Path, document: Any, name: str = "preprocessor_config.json") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return path


def model(folder: Path, height: object, width: object) -> Path:
    """A classifier with a last feature map, of pictures of a size or of any."""
    made = onnx.parser.parse_model(
        f"""
        <ir_version: 9, opset_import: ["": 17]>
        g (float[n, 3, {height}, {width}] image) => (float[n, 4] logits)
        <float[6, 3, 8, 8] kernel, float[6, 4] head> {{
            features = Conv <kernel_shape = [8, 8], strides = [8, 8]> (image, kernel)
            active = Relu (features)
            pooled = GlobalAveragePool (active)
            flat = Flatten (pooled)
            logits = MatMul (flat, head)
        }}
        """
    )
    random = np.random.default_rng(0)
    for name, shape in {"kernel": (6, 3, 8, 8), "head": (6, 4)}.items():
        array = random.normal(size=shape).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(made, folder / "model.onnx")
    return folder / "model.onnx"


def test_the_fields(tmp_path: Path) -> None:
    read = read_processor(written(tmp_path, VIT))
    assert read.size == (32, 32)
    assert read.fields == {
        "mean": (0.5, 0.4, 0.3),
        "std": (0.1, 0.2, 0.3),
        "crop_pct": 1.0,
        "crop_mode": "squash",
        "interpolation": "bilinear",
        "color_order": "RGB",
        "crop_rounding": "down",
    }


@pytest.mark.parametrize("crop", [196, 224])
def test_a_share_leads_back_to_the_size(crop: int, tmp_path: Path) -> None:
    for resized in range(224, 400):
        config = {**CLIP, "size": {"shortest_edge": resized}, "crop_size": crop}
        read = read_processor(written(tmp_path, config))
        assert (read.size, read.fields["crop_mode"]) == ((crop, crop), "center")
        assert math.floor(crop / read.fields["crop_pct"]) == resized


@pytest.mark.parametrize(
    ("config", "size", "expected"),
    [
        ({**VIT, "size": 32}, (32, 32), {"crop_mode": "squash"}),
        ({**VIT, "size": [32, 48]}, (32, 48), {"crop_mode": "squash"}),
        ({**CLIP, "size": 256}, (224, 224), {"crop_mode": "center", "crop_pct": 0.875}),
        (
            {**CLIP, "size": {"height": 256, "width": 128}, "crop_size": [224, 112]},
            (224, 112),
            {"crop_mode": "squash", "crop_pct": 0.875},
        ),
        ({**CONVNEXT, "size": 224}, (224, 224), {"crop_mode": "center", "crop_pct": 0.875}),
        ({**CONVNEXT, "size": 384}, (384, 384), {"crop_mode": "squash", "crop_pct": 1.0}),
        ({**VIT, "resample": "Lanczos"}, (32, 32), {"interpolation": "lanczos"}),
        ({**VIT, "image_mean": 0.5}, (32, 32), {"mean": (0.5, 0.5, 0.5)}),
        ({**VIT, "crop_size": None, "do_pad": False, "crop_pct": None}, (32, 32), {}),
        ({"image_processor": VIT, "processor_class": "CLIPProcessor"}, (32, 32), {}),
        # what feature extractors wrote
        (
            {"feature_extractor_type": "ViTFeatureExtractor", "size": 224},
            (224, 224),
            {"mean": (0.5, 0.5, 0.5), "interpolation": "bilinear", "crop_mode": "squash"},
        ),
        (
            {"feature_extractor_type": "DeiTFeatureExtractor"},
            (224, 224),
            {"crop_pct": 0.875, "interpolation": "bicubic", "crop_mode": "squash"},
        ),
        (TIMM, (224, 224), {"crop_mode": "center", "crop_pct": 0.875, "std": (0.5, 0.5, 0.5)}),
        ({"architecture": "vit", **TIMM["pretrained_cfg"]}, (224, 224), {"mean": (0.5,) * 3}),
    ],
)
def test_what_else_is_read(
    config: dict[str, Any], size: tuple[int, int], expected: dict[str, Any], tmp_path: Path
) -> None:
    read = read_processor(written(tmp_path, config))
    assert read.size == size
    assert {field: read.fields[field] for field in expected} == expected


def test_the_model_beside_it_names_the_class(tmp_path: Path) -> None:
    unnamed = {field: VIT[field] for field in ("do_resize", "image_mean", "image_std")}
    path = written(tmp_path, {**unnamed, "size": 224})
    with pytest.raises(InputError, match="neither image_processor_type in it nor model_type in a"):
        read_processor(path)
    written(tmp_path, {"model_type": "swin"}, "config.json")
    assert read_processor(path).fields["interpolation"] == "bilinear"
    written(tmp_path, {"model_type": "detr"}, "config.json")
    with pytest.raises(InputError, match="image processor 'detr' is not known; expected Beit, Bit"):
        read_processor(path)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("", "empty; expected Hugging Face's preprocessor_config.json, or timm's config.json"),
        (" \n", "empty; expected"),
        ("mean: 0.5", "not JSON; expected"),
        ('{"size": NaN', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "JSON, but not an object"),
        ("3", "JSON, but not an object"),
        ({"a": "x" * LARGEST_FILE}, f"more than {LARGEST_FILE} bytes"),
        ({}, "nothing about pictures in it"),
        ({"processor_class": "CLIPProcessor"}, "nothing about pictures in it"),
        (
            {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32},
            "the model's configuration, which says nothing of preprocessing; preprocessor_config",
        ),
        ({**VIT, "image_processor_type": ["a"]}, "image processor \"['a']\" is not known"),
        (
            {**VIT, "image_processor_type": "DetrImageProcessor"},
            "'DetrImageProcessor' is not known",
        ),
        ({**VIT, "auto_map": {"AutoImageProcessor": "own.Own"}}, "auto_map {'AutoImageProcessor"),
        ({**VIT, "do_resize": "yes"}, "do_resize 'yes': expected true or false"),
        ({**VIT, "do_resize": False}, "do_resize False: pictures of any size cannot be taken"),
        ({**VIT, "do_pad": True}, "do_pad True: padding cannot be expressed"),
        ({**VIT, "crop_pct": 0.9}, "crop_pct 0.9: not known of ViTImageProcessor; take it out"),
        ({**VIT, "do_flip_channel_order": True}, "do_flip_channel_order True: not known"),
        (
            {"image_processor_type": "MobileViTImageProcessor", "do_normalize": True},
            "do_normalize True: MobileViTImageProcessor does not do it; expected false",
        ),
        ({**VIT, "default_to_square": 1, "size": 2}, "default_to_square 1: expected true or false"),
        ({**VIT, "default_to_square": False, "size": 2}, "size 2: without do_center_crop the long"),
        ({**VIT, "size": {"longest_edge": 224}}, "size {'longest_edge': 224}: expected height and"),
        (
            {**VIT, "size": {"shortest_edge": 224, "longest_edge": 400}},
            "expected height and width, or shortest_edge alone; --crop-mode and --crop-pct say",
        ),
        ({**VIT, "size": {"shortest_edge": 224}}, "without do_center_crop the longer side is left"),
        ({**VIT, "size": "224"}, "size '224': expected height and width, up to 32768"),
        ({**VIT, "size": 0}, "size 0: expected height and width"),
        ({**VIT, "size": True}, "size True: expected height and width"),
        ({**VIT, "size": [224]}, "size [224]: expected height and width"),
        ({**VIT, "size": {"height": 1e9, "width": 2}}, "expected height and width"),
        ({**VIT, "size": 10**9}, "expected height and width, up to 32768"),
        ({**CLIP, "crop_size": {"height": 200, "width": 224}}, "expected a square"),
        ({**CLIP, "crop_size": 288}, "crop_size 288: more than size, padding cannot be expressed"),
        (
            {**CLIP, "size": {"height": 256, "width": 300}},
            "crop_size {'height': 224, 'width': 224}: not one share of height and width of [256, 3",
        ),
        ({**CLIP, "crop_size": {"shortest_edge": 2}}, "crop_size {'shortest_edge': 2}: expected"),
        ({**CONVNEXT, "size": [224, 224]}, "size [224, 224]: expected shortest_edge"),
        (
            {**CONVNEXT, "do_center_crop": True, "crop_size": 2},
            "do_center_crop True: cropped twice",
        ),
        ({**CONVNEXT, "crop_pct": 0}, "crop_pct 0: expected a number above 0"),
        ({**CONVNEXT, "crop_pct": 1.5}, "crop_pct 1.5: expected at most 1"),
        (
            {**CONVNEXT, "resample": None},
            "resample is left out, and transformers has no one default",
        ),
        ({"image_processor_type": "BeitImageProcessor"}, "size is left out"),
        ({**VIT, "resample": 6}, "resample 6: expected one of 0 (nearest), 1 (lanczos), 2 (bilin"),
        ({**VIT, "resample": True}, "resample True: expected one of"),
        ({**VIT, "resample": "cubic"}, "resample 'cubic': expected one of"),
        ({**VIT, "image_mean": [0.5, 0.5]}, "image_mean [0.5, 0.5]: expected three numbers"),
        ({**VIT, "image_mean": ["a", 0, 0]}, "image_mean ['a', 0, 0]: expected three numbers"),
        (
            '{"image_processor_type": "ViTImageProcessor", "image_mean": [NaN, 0, 0]}',
            "[nan, 0, 0]:",
        ),
        ('{"image_processor_type": "ViTImageProcessor", "image_std": 1e999}', "image_std inf: exp"),
        ({**VIT, "image_std": [0.5, 0, 0.5]}, "image_std [0.5, 0, 0.5]: expected numbers above 0"),
        ({**VIT, "image_std": 10**400}, "expected three numbers"),
        ({**VIT, "rescale_factor": 0}, "rescale_factor 0: expected a number above 0"),
        ({**VIT, "rescale_factor": "1/255"}, "rescale_factor '1/255': expected a number above 0"),
        ({**VIT, "image_mean": [120, 110, 100]}, "image_mean [120.0, 110.0, 100.0] and image_std"),
        ({"pretrained_cfg": {"input_size": [1, 28, 28]}}, "input_size [1, 28, 28]: expected [3, h"),
        ({"pretrained_cfg": {"input_size": 224}}, "input_size 224: expected [3, height, width]"),
        ({"pretrained_cfg": {"crop_pct": 2}}, "crop_pct 2: expected at most 1.15"),
        ({"pretrained_cfg": {"crop_mode": "x"}}, "crop_mode 'x': expected one of center, border"),
        (
            {"pretrained_cfg": {"interpolation": "random"}},
            "interpolation 'random': expected one of",
        ),
        ({"pretrained_cfg": {"mean": [0.5]}}, "mean [0.5]: expected three numbers"),
        (
            {"pretrained_cfg": {"crop_border_pixels": 4}},
            "crop_border_pixels 4: cannot be expressed",
        ),
    ],
)
def test_what_is_refused(document: Any, expected: str, tmp_path: Path) -> None:
    path = written(tmp_path, document)
    with pytest.raises(InputError) as raised:
        read_processor(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert expected in message
    assert len(message.splitlines()) == 1
    assert len(message) < len(str(path)) + 350


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="; expected Hugging Face's"):
        read_processor(tmp_path / name)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not JSON"):
        read_processor(tmp_path / "x")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["height", "width", "shortest_edge"]), inner)
    ),
    max_leaves=4,
)
FIELDS = sorted({*CLIP, "crop_pct", "auto_map", "do_pad", "default_to_square", "pretrained_cfg"})
CHANGES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3)


@given(st.sampled_from([VIT, CLIP, CONVNEXT]), CHANGES)
@settings(max_examples=300, deadline=None)
def test_whatever_it_says_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    path = written(tmp_path_factory.getbasetemp(), {**config, **changes})
    try:
        read = read_processor(path)
    except InputError:
        return
    assert read.size is not None
    numbers = (*read.fields["mean"], *read.fields["std"], read.fields["crop_pct"])
    assert all(0 <= number <= 1 for number in numbers)
    assert min(read.fields["std"]) > 0


def test_what_is_given_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, {**VIT, "resample": 9, "image_std": 0, "do_resize": False})
    read = read_processor(path, given=["interpolation", "mean", "std", "crop_pct", "crop_mode"])
    assert read.fields == {"color_order": "RGB", "crop_rounding": "down"}
    assert read.size is None


def test_instrument_takes_the_file(tmp_path: Path) -> None:
    plain, path = model(tmp_path, 32, 32), written(tmp_path, VIT)
    report = ox.instrument(plain, tmp_path / "x.onnx", preprocessing=path)
    image = report.contract.input
    assert (image.mean, image.std, image.size) == ((0.5, 0.4, 0.3), (0.1, 0.2, 0.3), (32, 32))
    assert (image.crop_mode, image.interpolation) == ("squash", "bilinear")


def test_what_the_contract_says_of_the_input_wins(tmp_path: Path) -> None:
    plain, path = model(tmp_path, 32, 32), written(tmp_path, {**VIT, "resample": 9})
    contract = {"input": {"mean": [0.1, 0.2, 0.3], "interpolation": "box"}}
    out = tmp_path / "x.onnx"
    image = ox.instrument(plain, out, preprocessing=str(path), contract=contract).contract.input
    assert (image.mean, image.std) == ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
    assert (image.interpolation, image.crop_mode) == ("box", "squash")


def test_a_size_that_the_model_does_not_take(tmp_path: Path) -> None:
    path = written(tmp_path, VIT)
    plain, out = model(tmp_path, 48, 32), tmp_path / "x.onnx"
    with pytest.raises(InputError) as raised:
        ox.instrument(plain, out, preprocessing=path)
    expected = "input size (32, 32); the graph's own is (48, 32); --img-size wins over the file"
    assert str(raised.value) == f"{path}: {expected}"
    assert not out.exists()
    contract = {"input": {"size": (48, 32)}}
    image = ox.instrument(plain, out, preprocessing=path, contract=contract).contract.input
    assert (image.size, image.mean) == ((48, 32), (0.5, 0.4, 0.3))


def test_a_size_that_the_positions_do_not_take(tmp_path: Path) -> None:
    plain = hand_made(tmp_path / "plain.onnx", "n, c, h, w")
    path = written(tmp_path, {**VIT, "size": 48})
    with pytest.raises(InputError) as raised:
        ox.instrument(plain, tmp_path / "x.onnx", preprocessing=path)
    assert str(raised.value).startswith(f"{path}: input size [48, 48]; the positions of the model")
    written(tmp_path, VIT)
    report = ox.instrument(plain, tmp_path / "x.onnx", preprocessing=path)
    assert report.contract.input.size == (32, 32)


def test_an_open_size_is_that_of_the_file(tmp_path: Path) -> None:
    plain, path = model(tmp_path, "h", "w"), written(tmp_path, VIT)
    image = ox.instrument(plain, tmp_path / "x.onnx", preprocessing=path).contract.input
    assert (image.size, image.multiple) == ((32, 32), (8, 8))
    contract = {"input": {"size": [64, 48]}}
    out = tmp_path / "y.onnx"
    image = ox.instrument(plain, out, preprocessing=path, contract=contract).contract.input
    assert (image.size, image.mean) == ((64, 48), (0.5, 0.4, 0.3))


def test_the_command_line(tmp_path: Path) -> None:
    plain, path = model(tmp_path, "h", "w"), written(tmp_path, VIT)
    rest = ("instrument", plain, "-o", tmp_path / "x.onnx", "--no-verify")
    ran = onnxplain_command(*rest, "--preprocessing", path)
    assert (ran.exit_code, ran.stderr) == (0, "")
    options = ("--mean", "0.1,0.2,0.3", "--crop-mode", "center", "--img-size", "40x48")
    ran = onnxplain_command(*rest, "--preprocessing", path, *options)
    assert (ran.exit_code, ran.stderr) == (0, "")
    image = ox.Explainer(tmp_path / "x.onnx").contract.input
    assert (image.mean, image.std) == ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
    assert (image.crop_mode, image.size) == ("center", (40, 48))
    path.write_text("[]")
    assert f"{path}: JSON, but not an object" in complaint(*rest, "--preprocessing", path)


def test_the_plain_graph_of_a_bundle_keeps_what_is_not_said(tmp_path: Path) -> None:
    plain, path = model(tmp_path, "h", "w"), written(tmp_path, VIT)
    ox.instrument(plain, tmp_path / "bundle", preprocessing=path, verify=False)
    rest = ("instrument", tmp_path / "bundle" / "plain.onnx", "-o", tmp_path / "x.onnx")
    onnxplain_command(*rest, "--no-verify", "--mean", "0.1,0.2,0.3", "--img-size", "40")
    image = ox.Explainer(tmp_path / "x.onnx").contract.input
    assert (image.mean, image.std) == ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3))
    assert (image.crop_mode, image.size) == ("squash", (40, 40))


def test_the_file_is_not_taken_unasked(tmp_path: Path) -> None:
    plain = model(tmp_path, 32, 32)
    rest = ("instrument", plain, "-o", tmp_path / "x.onnx", "--no-verify")
    assert "--preprocessing" not in onnxplain_command(*rest).stderr
    path = written(tmp_path, VIT)
    ran = onnxplain_command(*rest)
    assert "assumed mean (0.485, 0.456, 0.406)" in ran.stderr
    assert f"does not tell; --preprocessing {path} takes it from there" in ran.stderr
    assert "--preprocessing" not in onnxplain_command(*rest, "--mean", "0,0,0").stderr


def test_names_of_fields_are_shown_safely(tmp_path: Path) -> None:
    for name in ("\x1b[31mred\n", "long" * 2000):
        with pytest.raises(InputError) as raised:
            read_processor(written(tmp_path, {**VIT, name: 1}))
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 400 + len(str(tmp_path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(InputError, match=r"pipe\.json: not a file; expected"):
        read_processor(tmp_path / "pipe.json")
