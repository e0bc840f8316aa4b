"""ONNX to ONNX: gives a vision transformer the outputs that explain it. Needs no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxplain.contract import Source
from onnxplain.errors import InputError, MissingDependencyError, ModelError, VerificationError
from onnxplain.processor import read_processor
from onnxplain.steps import Step, silent

try:
    import onnx_ir as ir

    from onnxplain.graphs.embedding import embed
    from onnxplain.graphs.explained import Explained, explain
    from onnxplain.graphs.files.naming import name_of
    from onnxplain.graphs.files.reading import load
    from onnxplain.graphs.files.sound import blaming
    from onnxplain.graphs.files.writing import Report, check_destination, refuse_itself, save
    from onnxplain.graphs.normal.open_sizes import SizeError
    from onnxplain.graphs.precision import check_precision, narrow
    from onnxplain.graphs.request import Request
except ModuleNotFoundError as missing:
    if missing.name not in ("onnx", "onnx_ir"):
        raise
    raise MissingDependencyError(
        f"{missing.name} is not installed; pip install onnxplain[graphs]"
    ) from None

__all__ = [
    "Explained",
    "Report",
    "Request",
    "embed",
    "explain",
    "instrument",
    "load",
    "narrow",
    "save",
]


def instrument(
    source: str | os.PathLike[str] | ir.Model,
    path: str | os.PathLike[str],
    *,
    methods: Iterable[str] | None = None,
    contract: Mapping[str, Any] | None = None,
    labels: Sequence[str] | str | Path | None = None,
    preprocessing: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    verify: bool = True,
    gamma: float = 0.0,
    precision: str = "fp32",
    outputs: str | None = None,
    map_options: Mapping[str, Any] | None = None,
    heatmaps: bool = False,
    targets: int = 1,
    seed: str = "target",
    score: str = "logit",
    require_target: bool = False,
    embed_preprocessing: bool = False,
    step: Step | None = None,
) -> Report:
    """Makes an ONNX image classifier explain itself.

    Args:
        source: Any ONNX file of a plain ViT with global attention, or, for Grad-CAM alone, of a
            classifier with a last feature map (convolutional, windowed, hierarchical); opset 11 to
            25, as its exporter wrote it or as onnxruntime optimised it; or such a model in memory.
        path: `x.onnx` writes one file with exactly `methods`; a folder, a bundle with one graph per
            kind of method and one file of weights.
        methods: Method names; None: every method that the architecture supports.
        contract: What overrides the findings: `tokens`, such as
            `{"prefix": ["cls"], "grid": [14, 14]}`; `readout`, such as
            `{"kind": "cls", "ranges": [[0, 1]]}`; `logits`, the name of the output to explain
            (left out, what a Softmax or Sigmoid at the end makes probabilities of);
            `input`, as in `preprocessing`, with `size` for a graph that takes pictures of any, and
            `layout`, "NCHW" or "NHWC", for one whose input does not tell where its channels are.
        labels: Class names in order, or a text file with one per line, or a JSON file with
            `id2label` (Hugging Face's `config.json`).
        preprocessing: What the graph does not tell: `mean`, `std` (three numbers each, for pixels
            0..1), `crop_pct`, `crop_mode`, `interpolation`, `color_order`. Or the file that tells
            it: Hugging Face's `preprocessor_config.json` or timm's `config.json`, with the size of
            pictures, where the graph leaves it open; what `contract` has of the input wins over it.
        verify: Run the result on a random image against the source, gradients against finite
            differences, and store the differences in the contract. Needs onnxruntime. Relevance has
            no counterpart.
        gamma: How much more `attnlrp` counts contributions of the sign of the output; 0 is the
            epsilon rule.
        precision: "fp16" stores float32 weights as float16, which halves the file and rounds them
            to 11 bits; inputs, outputs and arithmetic stay float32.
        outputs: "taps": what the methods read (attention, gradients, ...); "maps": their finished
            maps, `map.{method}`, alone; "both". None: both, or the maps of several targets.
        map_options: `head_fusion`, `discard_ratio` and `start_layer` of the maps, as in
            `onnxplain.runtime.methods`; a method takes those that it has.
        heatmaps: Adds `heatmap.{method}` [batch, height, width], each map at the size of the input
            and in 0..1.
        targets: So many classes of each image in one run: the input `target` is [batch, targets],
            by default the likeliest ones, maps are [batch, targets, h, w].
        seed: "weights" adds an input `class_weights` [batch, classes], which explains that sum of
            logits instead of one class (cat rather than dog).
        score: "probability": gradients are those of the probability that a Softmax or Sigmoid at
            the end makes of the logit (of other models, that a Softmax would); relevance stays one
            of logits, so its methods are left out.
        require_target: These inputs have no default (-1 is the prediction, 0 weighs nothing), for
            runtimes that know no optional inputs (onnxruntime-web, OpenVINO).
        embed_preprocessing: The input becomes one picture as it is, `image` uint8
            [height, width, 3] RGB of any size, which the graph resizes, crops and normalises.
        step: Called with what is going on, how much of it is done, and of how much.

    Returns:
        What was written.

    Raises:
        ModelError: The file is missing, damaged or not ONNX, onnxruntime cannot run it, or the
            result cannot be written.
        UnsupportedModelError: The model, or a method on it, cannot be explained, with the reason.
        InputError: An unknown method or field, labels that do not fit, a file of preprocessing that
            cannot be expressed, or whose size is not the model's.
        VerificationError: The result computes something else than the source, or a gradient is not
            what finite differences are.
        MissingDependencyError: onnxruntime is not installed, and `verify` is not False.
    """
    check_precision(precision)
    request = Request(
        outputs=outputs,
        map_options=map_options or {},
        heatmaps=heatmaps,
        targets=targets,
        seed=seed,
        score=score,
        require_target=require_target,
    )
    file_of_size = None
    if isinstance(preprocessing, str | os.PathLike):
        own = dict((contract or {}).get("input") or {})
        read = read_processor(preprocessing, given=own)
        if read.size is not None and "size" not in own:
            file_of_size, own["size"] = preprocessing, read.size
        contract = {**(contract or {}), "input": {**read.fields, **own}}
        preprocessing = None
    bundle = Path(path).suffix != ".onnx"
    check_destination(Path(path), bundle=bundle)
    if not isinstance(source, ir.Model):
        refuse_itself(source, path)
    tell = step or silent
    tell("reading the model", 0, 1)
    model = load(source)
    file = contextlib.nullcontext() if isinstance(source, ir.Model) else blaming(source)

    def made(request: Request) -> Explained:
        explained = explain(
            model,
            bundle=bundle,
            methods=methods,
            contract=contract,
            labels=labels,
            preprocessing=preprocessing,
            source=None if isinstance(source, ir.Model) else Source(name=name_of(model, source)),
            gamma=gamma,
            request=request,
            step=tell,
        )
        return narrow(explained) if precision == "fp16" else explained

    try:
        with file:
            if not verify:
                explained = made(request)
            else:
                from onnxplain.graphs.proof.trial import verified

                # Gradients are checked with the values that they are of, and for one class.
                raw = dataclasses.replace(request, targets=1, outputs="both")
                explained = made(request if request.taps else raw)
                explained = verified(explained, model, Path(path), step=tell)
                if request.targets > 1:
                    differences = explained.contract.verification
                    explained = made(request).with_verification(differences or {})
                elif not request.taps:
                    explained = explained.maps_alone()
            if embed_preprocessing:
                explained = embed(explained)
    except SizeError as error:
        if file_of_size is None:
            raise
        raise InputError(
            f"{os.fspath(file_of_size)}: {error}; --img-size wins over the file"
        ) from None
    except (ModelError, VerificationError) as error:
        if isinstance(source, ir.Model):
            raise
        raise type(error)(f"{os.fspath(source)}: {error}") from None
    tell("writing", 0, 1)
    return save(explained, path)
