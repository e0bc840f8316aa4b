"""Arguments and options that several commands share, and how their text is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from onnxplain.errors import InputError

__all__ = [
    "Alpha",
    "Checkpoint",
    "Colormap",
    "CropMode",
    "Debug",
    "Device",
    "DiscardRatio",
    "EmbedPreprocessing",
    "Gamma",
    "HeadFusion",
    "Heatmap",
    "ImageSize",
    "Json",
    "Labels",
    "Logits",
    "Methods",
    "Model",
    "ModelOutput",
    "NumClasses",
    "Outputs",
    "Precision",
    "Pretrained",
    "RequireTarget",
    "Score",
    "Seed",
    "StartLayer",
    "Targets",
    "given",
    "read_names",
    "read_size",
    "read_triple",
    "read_weights",
    "sized",
]

Checkpoint = Annotated[
    Path | None, typer.Option(help="Weights, .safetensors or .pth. Default: none (random).")
]
NumClasses = Annotated[
    int | None, typer.Option(min=1, help="Classes of the weights. Default: the model's own.")
]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download timm's weights.")]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Explained .onnx file or bundle.")]
ModelOutput = Annotated[
    Path, typer.Option("-o", "--output", help="NAME.onnx: one file. Else a folder: a bundle.")
]
Labels = Annotated[
    Path | None,
    typer.Option(
        help="Class names: a text file, one a line, from class 0 on; or a JSON file with id2label "
        "(Hugging Face's config.json). Default: numbers."
    ),
]
CropMode = Annotated[
    Literal["center", "border", "squash"] | None,
    typer.Option(
        help="center: resize the shorter side, crop. border: resize the longer side, pad. squash: "
        "resize height and width to the input's, whatever the aspect ratio. Default: center."
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="Methods to serve, such as rollout,gradcam. Default: all it can."
    ),
]
Outputs = Annotated[
    Literal["taps", "maps", "both"] | None,
    typer.Option(
        help="maps: finished maps. taps: what they are made of. Default: both; with several "
        "--targets maps."
    ),
]
Heatmap = Annotated[
    bool, typer.Option("--heatmap", help="Maps also in 0..1 at the size of the input.")
]
Targets = Annotated[int, typer.Option(min=1, help="So many classes of each image in one run.")]
Seed = Annotated[
    Literal["target", "weights"],
    typer.Option(help="weights: an input asks for any sum of logits, too."),
]
Score = Annotated[
    Literal["logit", "probability"],
    typer.Option(help="probability: gradients of it, not of the logit."),
]
Logits = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Output to explain, where there are several. Default: the only one."
    ),
]
RequireTarget = Annotated[
    bool,
    typer.Option(
        "--require-target", help="target without a default (-1), which some runtimes refuse."
    ),
]
EmbedPreprocessing = Annotated[
    bool, typer.Option("--embed-preprocessing", help="Input: one uint8 picture of any size.")
]
HeadFusion = Annotated[
    str | None, typer.Option(help="rollout: mean, max or min of the heads. Default: mean.")
]
DiscardRatio = Annotated[
    float | None,
    typer.Option(help="Rollouts: share of lowest attention left out, such as 0.9. Default: 0."),
]
StartLayer = Annotated[
    int | None,
    typer.Option(help="Rollouts, transformer_attribution: first layer that counts. Default: 0."),
]
ImageSize = Annotated[
    str | None,
    typer.Option(
        "--img-size",
        metavar="N|HxW",
        help="Input size, 224 or 384x192 (height first). Default: the model's own.",
    ),
]
Gamma = Annotated[
    float, typer.Option(min=0, help="attnlrp: gamma rule, such as 0.25; 0 is the epsilon rule.")
]
Precision = Annotated[
    Literal["fp32", "fp16"], typer.Option(help="fp16: weights of half the size. Computes in fp32.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, tensorrt or openvino.")]
Alpha = Annotated[
    float | None, typer.Option(help="Weight of the map in an overlay, 0..1. Default: 0.5.")
]
Colormap = Annotated[
    str | None, typer.Option(help="An OpenCV colormap, such as viridis. Default: turbo.")
]
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary to stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


def given(**options: Any) -> dict[str, Any]:
    """The options that were given; the others keep the defaults of the function they go to."""
    return {name: value for name, value in options.items() if value is not None}


def read_names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def sized(text: str | None) -> dict[str, Any]:
    return {} if text is None else {"image_size": read_size(text)}


def read_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,4})(?:[xX]([1-9]\d{0,4}))?", text, re.ASCII)
    if match is None:
        raise InputError(
            f"--img-size {text[:20]!r}: expected pixels, 224, or height x width, 384x192"
        )
    return int(match[1]), int(match[2] or match[1])


def read_triple(text: str, option: str) -> tuple[float, float, float]:
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"{option} {text!r}: expected three numbers, such as 0.5,0.5,0.5"
        ) from None
    return red, green, blue


def read_weights(texts: list[str] | None) -> dict[str, float] | None:
    """The weights by class, each given as CLASS=NUMBER; a label may hold an = itself."""
    if not texts:
        return None
    weights: dict[str, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            name = ""
        if not name:
            raise InputError(f"--weight {text!r}: expected CLASS=NUMBER, such as cat=1 or dog=-0.5")
        if name in weights:
            raise InputError(f"--weight {text!r}: {name} has a weight already")
        weights[name] = weight
    return weights
