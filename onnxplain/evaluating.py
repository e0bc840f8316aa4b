"""The command `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import onnxplain
from onnxplain.console import SOME_FAILED, complain, resumable, stages
from onnxplain.options import Debug, Device, ImageSize, Json, Model, read_names, sized
from onnxplain.reporting import print_evaluation

__all__ = ["evaluate"]


def evaluate(
    model: Model,
    dataset: Annotated[
        str,
        typer.Argument(
            metavar="DATASET",
            help="Folder per class, CSV of path,label[,mask], garments or garments-pairs.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", help="Folder of the report; a run goes on in it."),
    ],
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Methods to compare, such as rollout,gradcam. Default: all it has."
        ),
    ] = None,
    measures: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Some of perturbation,insertion_deletion,localisation,sanity. Default: all.",
        ),
    ] = None,
    fill: Annotated[
        str, typer.Option(metavar="A,B", help="Perturbed pixels: some of zero,mean,blur,road.")
    ] = "zero",
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of insertion and deletion, at most one a patch.")
    ] = 16,
    masks: Annotated[
        Path | None,
        typer.Option(help="Folder: its cat/1.png is the mask of DATASET/cat/1.jpg. Default: none."),
    ] = None,
    mask_labels: Annotated[
        Path | None,
        typer.Option(
            help="For masks of several values: text file, line i (from 0) the class of value i. "
            "Default: one value is the object."
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="So many pictures, drawn at random. Default: all; 500 bundled."),
    ] = None,
    sanity_pictures: Annotated[
        int, typer.Option(min=0, help="Pictures for random weights; under 6 tell nothing.")
    ] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures in a run of the model.")] = 32,
    device: Device = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of onnxruntime. Default: as many as there are cores.")
    ] = None,
    img_size: ImageSize = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Forget what an earlier run left in the folder.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find out which map can be trusted: every method on a dataset. Needs the extra `evaluate`.

    Example: onnxplain evaluate vit.onnx photos/ --methods rollout,gradcam --limit 200 -o report/
    """
    same = "the same command without --restart" if restart else "the same command"
    with resumable(f"{same} goes on where it stopped"), stages() as tell:
        found = onnxplain.evaluate(
            model,
            dataset,
            output,
            methods=read_names(methods),
            measures=read_names(measures),
            fills=read_names(fill) or (),
            steps=steps,
            masks=masks,
            mask_labels=mask_labels,
            limit=limit,
            sanity_pictures=sanity_pictures,
            seed=seed,
            batch_size=batch_size,
            device=device,
            threads=threads,
            **sized(img_size),
            restart=restart,
            on_error=lambda name, error: complain(f"{name}: {error}"),
            step=tell,
        )
    print_evaluation(found, as_json)
    raise typer.Exit(SOME_FAILED if found.failures else 0)
