"""A contract, or what was found in a file without one, in words for a person to read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from onnxplain.contract import Contract, Readout
from onnxplain.outputs import METHODS, heatmap_name, map_name

if TYPE_CHECKING:
    from onnxplain.graphs.findings import Findings

__all__ = ["describe", "describe_findings", "describe_outputs", "describe_verification"]

_SHOWN_LABELS = 5
_OF_THE_GRAPH = ("precision", "tokens", "readout", "features", "attention", "classes", "logits")


def describe(contract: Contract) -> Iterator[tuple[str, str]]:
    """Pairs of a heading and what the contract says under it, in reading order."""
    source, image, tokens = contract.source, contract.input, contract.tokens
    yield "model", f"{source.name} ({source.framework})"
    if source.weights_sha256:
        yield "weights", f"sha256 {source.weights_sha256}"
    if contract.score != "logit":
        yield "gradients of", f"the probability, by {contract.score}"
    if contract.precision == "int8":
        yield "precision", "8 bits; gradients pass the rounding unchanged, 0 where it cuts off"
    if contract.precision == "half":
        yield "precision", "the model computes in float16, what explains it in float32"
    if contract.precision == "bfloat16":
        yield (
            "precision",
            "bfloat16 of the model is computed in float32, with its weights stored as they were",
        )
    if contract.precision == "fp16":
        yield "precision", "weights stored as float16; computes in float32"
    if source.versions:
        yield "made with", ", ".join(f"{name} {v}" for name, v in source.versions.items())
    batch = "any batch" if image.batch is None else f"batch {image.batch}"
    height, width = image.size
    free = "" if image.multiple is None else ", or any multiples of {} x {}".format(*image.multiple)
    size = f"{height} x {width} (height x width){free}"
    if image.layout == "HWC":
        picture = "one picture of any size, uint8 [height, width, 3]"
        yield "input", f"{image.name}: {picture}, which the graph brings to {size}"
    else:
        yield "input", f"{image.name}: {image.layout}, {size}, {batch}"
    rounding = ", its corner rounded down" if image.crop_rounding == "down" else ""
    yield (
        "pictures",
        f"resized {image.interpolation}, crop {image.crop_mode} {image.crop_pct:g}{rounding}, "
        f"{image.color_order}, mean {_numbers(image.mean)}, std {_numbers(image.std)}",
    )
    rows, columns = tokens.grid
    if contract.layers:
        prefix = ", ".join(tokens.prefix) or "no prefix tokens"
        yield "tokens", f"{tokens.count}: {prefix}; then {rows} x {columns} patches, row by row"
        yield "readout", _readout(contract.readout)
        heads = sorted({layer.heads for layer in contract.layers})
        yield (
            "attention",
            f"{len(contract.layers)} layers of {' or '.join(map(str, heads))} heads, "
            f"{', '.join(sorted({layer.kind for layer in contract.layers}))}",
        )
    else:
        yield "features", f"{rows} x {columns} positions of the last feature map"
        yield "attention", "none of every token to every token"
    yield "classes", f"{contract.classes}{_labels(contract)}"
    yield "logits", contract.logits
    yield "target", _target(contract)
    if contract.class_weights is not None:
        yield "sums of logits", contract.class_weights
    for method, outputs in contract.methods.items():
        yield f"method {method}", describe_outputs(outputs)
    for method, options in contract.maps.items():
        fixed = ", ".join(f"{name} {value}" for name, value in options.items())
        names = (
            f"{map_name(method)}, {heatmap_name(method)}"
            if contract.heatmaps
            else (map_name(method))
        )
        yield f"map {method}", f"{names}{fixed and f': {fixed}'}"
    for kind, file in (contract.graphs or {}).items():
        yield f"graph {kind}", file
    yield "verified", describe_verification(contract.verification)


def describe_findings(found: Findings) -> Iterator[tuple[str, str]]:
    """The same of a file that is not instrumented, with what each method would cost, or why it
    cannot be had."""
    yield "model", f"{found.name}, not instrumented"
    opset = "without an opset" if found.opset is None else f"opset {found.opset}"
    yield "graph", f"{opset}, {found.nodes} nodes, {found.weights} weights"
    yield "input", ", ".join(found.inputs) or "none"
    yield "output", ", ".join(found.outputs) or "none"
    if found.contract is not None:
        told = dict(describe(found.contract))
        yield "pictures", told["input"].partition(": ")[2]
        yield from ((name, told[name]) for name in _OF_THE_GRAPH if name in told)
    elif found.layers:
        heads, tokens = ({layer[i] for layer in found.layers} for i in range(2))
        yield (
            "attention",
            f"{len(found.layers)} layers of {' or '.join(map(str, sorted(heads)))} heads over "
            f"{' or '.join(map(str, sorted(tokens)))} tokens",
        )
    if found.no_attention is not None:
        yield "no attention", found.no_attention
    if found.features:
        yield "Grad-CAM reads", ", ".join(found.features)
    if found.reason is not None:
        yield "not explained", found.reason
    if found.contract is not None:
        assumed = ", ".join(
            f"{name} {_numbers(value) if isinstance(value, tuple) else value}"
            for name, value in found.assumed.items()
        )
        yield (
            "assumed",
            f"{assumed}: the graph does not tell; give the model's own to instrument",
        )
        yield "cost", "in forward passes, by multiply-adds of products and convolutions"
    for method in METHODS:
        if method in found.cost:
            yield f"method {method}", f"{found.cost[method]:.2f} forward passes"
        elif method in found.refused:
            yield f"method {method}", f"not available: {found.refused[method]}"


def describe_verification(verification: Mapping[str, Any] | None) -> str:
    """How far the file differs from what it came from, in one line."""
    if verification is None:
        return "no"
    differences = ", ".join(
        f"{name} {value:.2g}" for name, value in verification.get("differences", {}).items()
    )
    framework, version = verification.get("framework"), verification.get("version")
    if framework == "source":
        against = f"against the source file in {version}"
        unlike = verification.get("outputs")
        told = "" if unlike is None else f"; outputs not compared: {unlike}"
        return (
            f"{against}, largest relative differences: {differences or 'none measured'}{told}; "
            f"gradients: {verification.get('gradients')}"
        )
    against = f"{framework} {version}"
    if verification.get("weights") == "fp16":
        against += " with its weights rounded to float16"
    return f"against {against}, largest relative differences: {differences}"


def _target(contract: Contract) -> str:
    if contract.target is None:
        return "none: no output depends on the class"
    count = contract.targets
    return contract.target if count == 1 else f"{contract.target}: {count} classes at once"


def _readout(readout: Readout | None) -> str:
    if readout is None:
        return "none: no token stands for the head"
    if readout.kind == "attention":
        return "attention: each token as much as the head's pooling attention says"
    if readout.kind == "gradient":
        return "gradient: each token as much as the logit of the class changes with it"
    spans = (
        str(start) if stop == start + 1 else f"{start}..{stop - 1}"
        for start, stop in readout.ranges
    )
    shown = list(spans)
    if len(shown) == 1 and ".." not in shown[0]:
        return f"{readout.kind}: token {shown[0]}"
    return f"{readout.kind}: the mean of tokens {', '.join(shown)}"


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


def _labels(contract: Contract) -> str:
    if contract.labels is None:
        return ", without labels"
    more = contract.classes - _SHOWN_LABELS
    shown = ", ".join(contract.labels[:_SHOWN_LABELS])
    return f": {shown}" + (f" and {more} more" if more > 0 else "")


def describe_outputs(names: Iterable[str]) -> str:
    """The names, those that differ by a layer's number alone put together: attention.0..11."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem, _, number = name.rpartition(".")
        if stem and number.isdecimal():
            groups.setdefault(stem, []).append(number)
        else:
            groups[name] = []
    return ", ".join(
        stem
        if not numbers
        else f"{stem}.{numbers[0]}" + (f"..{numbers[-1]}" if len(numbers) > 1 else "")
        for stem, numbers in groups.items()
    )
