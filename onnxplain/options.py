"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

__all__ = [
    "Alpha",
    "Colormap",
    "Debug",
    "Device",
    "DiscardRatio",
    "Gamma",
    "HeadFusion",
    "ImageSize",
    "Json",
    "Labels",
    "Methods",
    "Model",
    "ModelOutput",
    "Outputs",
    "Precision",
    "StartLayer",
]

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Explained .onnx file or bundle.")]
ModelOutput = Annotated[
    Path, typer.Option("-o", "--output", help="NAME.onnx: one file. Else a folder: a bundle.")
]
Labels = Annotated[Path | None, typer.Option(help="Text file of class names, one a line.")]
Methods = Annotated[str | None, typer.Option(help="a,b,c: methods to serve. Default: all it can.")]
Outputs = Annotated[
    Literal["taps", "maps", "both"],
    typer.Option(help="maps: finished maps. taps: what they are made of."),
]
HeadFusion = Annotated[str | None, typer.Option(help="rollout: mean, max or min.")]
DiscardRatio = Annotated[
    float | None, typer.Option(help="rollout: share of lowest attention left out.")
]
StartLayer = Annotated[int | None, typer.Option(help="First layer that counts.")]
ImageSize = Annotated[
    str | None,
    typer.Option("--img-size", metavar="N|HxW", help="Input size, 224 or 384x192 (height first)."),
]
Gamma = Annotated[float, typer.Option(min=0, help="attnlrp: gamma rule instead of epsilon rule.")]
Precision = Annotated[
    Literal["fp32", "fp16"], typer.Option(help="fp16: weights of half the size. Computes in fp32.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, tensorrt or openvino.")]
Alpha = Annotated[float | None, typer.Option(help="Weight of the map in an overlay, 0..1.")]
Colormap = Annotated[str | None, typer.Option(help="An OpenCV colormap. Default: turbo.")]
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary to stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
