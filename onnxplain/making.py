"""The commands that make explained files: `export` and `instrument`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

import onnxplain
from onnxplain.console import complain, stages
from onnxplain.contract import PREPROCESSING
from onnxplain.options import (
    Checkpoint,
    CropMode,
    Debug,
    DiscardRatio,
    EmbedPreprocessing,
    Gamma,
    HeadFusion,
    Heatmap,
    ImageSize,
    Json,
    Labels,
    Logits,
    Methods,
    ModelOutput,
    NumClasses,
    Outputs,
    Precision,
    Pretrained,
    RequireTarget,
    Score,
    Seed,
    StartLayer,
    Targets,
    given,
    read_names,
    read_size,
    read_triple,
    sized,
)
from onnxplain.processor import PROCESSOR_FILE
from onnxplain.reporting import print_report

__all__ = ["export", "instrument"]


def export(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="timm name, such as vit_base_patch16_224.")
    ],
    output: ModelOutput,
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    img_size: ImageSize = None,
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="One file for pictures of any size.")
    ] = False,
    labels: Labels = None,
    methods: Methods = None,
    pretrained: Pretrained = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare the result with torch.")
    ] = False,
    gamma: Gamma = 0.0,
    outputs: Outputs = None,
    heatmap: Heatmap = False,
    targets: Targets = 1,
    seed: Seed = "target",
    require_target: RequireTarget = False,
    head_fusion: HeadFusion = None,
    discard_ratio: DiscardRatio = None,
    start_layer: StartLayer = None,
    embed_preprocessing: EmbedPreprocessing = False,
    precision: Precision = "fp32",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a timm model to an explained ONNX file. Needs the extra `export`."""
    maps = given(head_fusion=head_fusion, discard_ratio=discard_ratio, start_layer=start_layer)
    options = given(num_classes=num_classes, pretrained=pretrained or None)
    # stdout is for the summary
    with contextlib.redirect_stdout(sys.stderr), stages() as tell:
        report = onnxplain.export(
            name,
            output,
            checkpoint=checkpoint,
            methods=read_names(methods),
            labels=labels,
            **sized(img_size),
            verify=not no_verify,
            gamma=gamma,
            dynamic_size=dynamic_size or None,
            outputs=outputs,
            map_options=maps,
            heatmaps=heatmap,
            targets=targets,
            seed=seed,
            require_target=require_target,
            embed_preprocessing=embed_preprocessing,
            precision=precision,
            step=tell,
            **options,
        )
    print_report(report, as_json)


def instrument(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="Any ONNX vision transformer.")],
    output: ModelOutput,
    preprocessing: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Hugging Face's {PROCESSOR_FILE} or timm's config.json: what the next five "
            "options and --img-size say. Of these, those that are given win. Default: none.",
        ),
    ] = None,
    mean: Annotated[
        str | None,
        typer.Option(
            metavar="R,G,B",
            help="Subtracted from pixels in 0..1, such as 0.5,0.5,0.5. Default: ImageNet's.",
        ),
    ] = None,
    std: Annotated[
        str | None,
        typer.Option(
            metavar="R,G,B",
            help="Divides the rest, such as 0.5,0.5,0.5. Default: ImageNet's.",
        ),
    ] = None,
    crop_pct: Annotated[
        float | None,
        typer.Option(help="Crop's share of the resized side, such as 0.9. Default: 1."),
    ] = None,
    crop_mode: CropMode = None,
    interpolation: Annotated[
        str | None, typer.Option(help="bicubic, bilinear, nearest, ... Default: bicubic.")
    ] = None,
    img_size: ImageSize = None,
    labels: Labels = None,
    logits: Logits = None,
    methods: Methods = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare the result with MODEL.")
    ] = False,
    gamma: Gamma = 0.0,
    outputs: Outputs = None,
    heatmap: Heatmap = False,
    targets: Targets = 1,
    seed: Seed = "target",
    score: Score = "logit",
    require_target: RequireTarget = False,
    head_fusion: HeadFusion = None,
    discard_ratio: DiscardRatio = None,
    start_layer: StartLayer = None,
    embed_preprocessing: EmbedPreprocessing = False,
    precision: Precision = "fp32",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Make an ONNX file explain itself, whoever exported it. Needs the extra `graphs`."""
    image = given(
        mean=None if mean is None else read_triple(mean, "--mean"),
        std=None if std is None else read_triple(std, "--std"),
        crop_pct=crop_pct,
        crop_mode=crop_mode,
        interpolation=interpolation,
    )
    size = given(size=None if img_size is None else read_size(img_size))
    maps = given(head_fusion=head_fusion, discard_ratio=discard_ratio, start_layer=start_layer)
    with stages() as tell:
        report = onnxplain.instrument(
            source,
            output,
            methods=read_names(methods),
            contract=given(logits=logits, input={**image, **size} or None),
            labels=labels,
            preprocessing=preprocessing,
            verify=not no_verify,
            gamma=gamma,
            outputs=outputs,
            map_options=maps,
            heatmaps=heatmap,
            targets=targets,
            seed=seed,
            score=score,
            require_target=require_target,
            embed_preprocessing=embed_preprocessing,
            precision=precision,
            step=tell,
        )
    assumed = [name for name in PREPROCESSING if name not in image]
    if assumed and preprocessing is None:
        told = ", ".join(f"{name} {getattr(report.contract.input, name)}" for name in assumed)
        beside = source.parent / PROCESSOR_FILE
        known = not image and beside.is_file()
        hint = f"; --preprocessing {beside} takes it from there" if known else ""
        complain(f"assumed {told}, which the graph does not tell{hint}")
    print_report(report, as_json)
