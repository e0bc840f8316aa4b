"""The command line. Every command is a thin reading of its arguments round a public function.

Importing this module is cheap: what a command needs (onnxruntime, onnx, torch) loads when it runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import onnxplain
from onnxplain.console import (
    SOME_FAILED,
    Commands,
    complain,
    print_json,
    progress,
    stages,
)
from onnxplain.errors import ContractError, InputError, ModelError, OnnxplainError
from onnxplain.evaluating import evaluate
from onnxplain.making import export, instrument
from onnxplain.options import (
    Alpha,
    Checkpoint,
    Colormap,
    Debug,
    Device,
    DiscardRatio,
    HeadFusion,
    ImageSize,
    Json,
    Model,
    NumClasses,
    Pretrained,
    StartLayer,
    given,
    read_size,
    read_weights,
    sized,
)
from onnxplain.reporting import (
    print_contract,
    print_demo,
    print_explanation,
    print_findings,
    print_verification,
    summary_of,
)

if TYPE_CHECKING:
    from onnxplain.graphs.findings import Findings
    from onnxplain.runtime import Explanation

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    add_completion=False,
    help="Explain ONNX vision transformers. PyTorch is needed to export one, never to explain it.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"onnxplain {onnxplain.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


app.command("export")(export)
app.command("instrument")(instrument)


@app.command("explain")
def _explain(
    model: Model,
    inputs: Annotated[
        list[Path], typer.Argument(metavar="INPUTS", help="Pictures and folders of pictures.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder; or a file, for one picture.")
    ],
    method: Annotated[
        str, typer.Option(help="A method, such as rollout; auto: the best of the file.")
    ] = "auto",
    target: Annotated[
        str | None, typer.Option(help="Label or number. Default: each picture's prediction.")
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS=NUMBER",
            help="Instead of a class a sum of logits: cat=1, and again dog=-1. Default: none.",
        ),
    ] = None,
    kind: Annotated[
        Literal["overlay", "heatmap", "npy"], typer.Option(help="What to write.")
    ] = "overlay",
    device: Device = "auto",
    img_size: ImageSize = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures computed at once.")] = 8,
    recursive: Annotated[bool, typer.Option("--recursive", help="Folders in folders too.")] = False,
    head_fusion: HeadFusion = None,
    discard_ratio: DiscardRatio = None,
    start_layer: StartLayer = None,
    alpha: Alpha = None,
    colormap: Colormap = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain pictures: one map each."""
    from onnxplain.inputs import find_pictures, place_results
    from onnxplain.runtime import dispatch

    explainer = onnxplain.Explainer(model, device=device, **sized(img_size))
    method = dispatch.choose(method, explainer.contract)
    options = given(head_fusion=head_fusion, discard_ratio=discard_ratio, start_layer=start_layer)
    pictures, failures = find_pictures(inputs, recursive=recursive)
    places = place_results(pictures, output, method=method, kind=kind)
    for message in failures.values():
        complain(message)
    done: list[dict[str, Any]] = []
    with progress("explaining", len(places)) as step:

        def fail(source: Path, error: OnnxplainError) -> None:
            complain(str(error))
            failures[source] = str(error)
            step()

        for result in explainer.explain_many(
            places,
            batch_size=batch_size,
            on_error=fail,
            method=method,
            target=target,
            class_weights=read_weights(weight),
            **options,
        ):
            source = result.pictures[0].path
            assert source is not None  # every input is a file
            result.save(places[source], kind, **given(alpha=alpha, colormap=colormap))
            done.append(
                {"input": str(source), "output": str(places[source])}
                | summary_of(result)
                | {"degenerate": bool(result.degenerate[0])}
            )
            if not as_json:
                print_explanation(done[-1])
            step()
    if as_json:
        print_json(
            model=str(model),
            device=explainer.device,
            method=method,
            kind=kind,
            results=done,
            failed=[{"input": str(path), "error": error} for path, error in failures.items()],
        )
    raise typer.Exit(SOME_FAILED if failures else 0)


@app.command("compare")
def _compare(
    model: Model,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="A picture.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The picture to write: panel.png.")
    ],
    top: Annotated[
        int, typer.Option(min=1, max=10, help="So many likeliest classes, a row each.")
    ] = 2,
    target: Annotated[
        list[str] | None,
        typer.Option(
            help="Label or number instead; may be repeated. Default: the --top likeliest."
        ),
    ] = None,
    device: Device = "auto",
    img_size: ImageSize = None,
    alpha: Alpha = None,
    colormap: Colormap = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Draw every method for some classes of one picture, side by side."""
    from onnxplain.panel import draw_panel, save_picture
    from onnxplain.runtime.targets import likeliest_first

    if output.resolve() == image.resolve():
        raise InputError(f"{output} is the input and would be overwritten; give another --output")
    explainer = onnxplain.Explainer(model, device=device, **sized(img_size))
    classes: list[Any] = list(target or ())
    if not classes:
        (logits,) = explainer.taps(image, kinds=()).logits
        classes = likeliest_first(logits)[:top].tolist()
    rows: list[dict[str, Any]] = []
    with progress("explaining", len(explainer.methods)) as step:

        def explained() -> Iterator[Explanation]:
            for result in explainer.explain_each([image] * len(classes), target=classes):
                rows[:] = rows or [summary_of(one) | {"degenerate": []} for one in result]
                for row, degenerate in zip(rows, result.degenerate, strict=True):
                    row["degenerate"] += [result.method] if degenerate else []
                yield result
                step()

        title = f"{explainer.contract.source.name}: {image.name}"
        panel = draw_panel(explained(), title=title, **given(alpha=alpha, colormap=colormap))
    save_picture(panel, output)
    if as_json:
        print_json(
            model=str(model),
            device=explainer.device,
            input=str(image),
            output=str(output),
            methods=list(explainer.methods),
            classes=rows,
        )
    else:
        for row in rows:
            blank = f" (blank maps: {', '.join(row['degenerate'])})" if row["degenerate"] else ""
            print(f"{image}: {row['label']} {row['probability']:.1%}{blank}")
        print(f"-> {output}")


@app.command("inspect")
def _inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Any .onnx file, or a bundle.")],
    img_size: ImageSize = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print what an explained file says of itself, or what could be explained of another file.

    The latter needs the extra `graphs`.
    """
    from onnxplain.runtime.model import NotInstrumentedError

    def look() -> Findings:
        from onnxplain.graphs.findings import find

        with stages() as tell:
            size = None if img_size is None else read_size(img_size)
            return find(model, image_size=size, step=tell)

    try:
        contract = onnxplain.Explainer(model, device="cpu", **sized(img_size)).contract
    except NotInstrumentedError:
        print_findings(look(), as_json)
    except ContractError:
        raise
    except ModelError as error:  # onnxruntime loads no model in bfloat16, say
        try:
            found = look()
        except OnnxplainError:
            raise error from None
        print_findings(found, as_json)
    else:
        print_contract(model, contract, as_json)


@app.command("verify")
def _verify(
    model: Model,
    against: Annotated[
        str | None,
        typer.Option(metavar="OTHER", help="Other file, bundle or timm:NAME. Default: MODEL."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="What runs MODEL; OTHER, or MODEL itself, is run on the CPU.")
    ] = "cpu",
    image: Annotated[
        list[Path] | None,
        typer.Option(help="A picture, beside random ones; may be repeated. Default: none."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Random pictures. Default: 2.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Which random pictures. Default: 0.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Largest difference by an output's largest value.")
    ] = 1e-4,
    img_size: ImageSize = None,
    checkpoint: Checkpoint = None,
    num_classes: NumClasses = None,
    pretrained: Pretrained = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare two files output by output, or one on two devices, or one with a timm model."""
    # stdout is for the table
    with contextlib.redirect_stdout(sys.stderr), stages() as tell:
        report = onnxplain.verify(
            model,
            against=against,
            device=device,
            images=image or (),
            batch=batch,
            seed=seed,
            tolerance=tolerance,
            checkpoint=checkpoint,
            step=tell,
            **sized(img_size),
            **given(num_classes=num_classes, pretrained=pretrained or None),
        )
    print_verification(report, as_json)
    raise typer.Exit(0 if report.within else SOME_FAILED)


app.command("evaluate")(evaluate)


@app.command("demo")
def _demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder.")] = Path("demo-out"),
    scenes: Annotated[int, typer.Option(min=1, help="Pictures of two garments.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Which pictures.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain bundled pictures of two garments with the bundled model; downloads nothing."""
    from onnxplain.demo.show import show

    with progress("explaining", scenes) as step:
        shown = show(output, scenes=scenes, seed=seed, step=step)
    print_demo(shown, as_json)
