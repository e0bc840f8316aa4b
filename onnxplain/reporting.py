"""What commands print: of an export, an explanation, a contract, a file without one,
a verification, an evaluation, the demo."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplain.console import complain, print_json

if TYPE_CHECKING:
    from onnxplain.contract import Contract
    from onnxplain.demo.show import Shown
    from onnxplain.evaluation import Evaluation
    from onnxplain.graphs import Report
    from onnxplain.graphs.findings import Findings
    from onnxplain.runtime import Explanation
    from onnxplain.verification import Verification

__all__ = [
    "print_contract",
    "print_demo",
    "print_evaluation",
    "print_explanation",
    "print_findings",
    "print_report",
    "print_verification",
    "summary_of",
]

_BOUNDS = {"relative": "relative <=", "relative_l2": "L2 <=", "spearman": "Spearman >="}
_PIPE_WIDTH = 160  # characters, where there is no terminal to tell


def print_report(report: Report, as_json: bool) -> None:
    from onnxplain.inspection import describe_verification

    size = sum(report.files.values())
    if kept := report.kept_float32:
        complain(f"kept in float32: {', '.join(kept[:3])}{' ...' if len(kept) > 3 else ''}")
    if as_json:
        print_json(
            path=str(report.path),
            files=dict(report.files),
            source_bytes=report.source_bytes,
            opset=report.opset,
            methods=list(report.methods),
            precision=report.contract.precision,
            kept_float32=list(report.kept_float32),
            verification=report.verification,
        )
        return
    print(f"{report.path}: {size / 1e6:.1f} MB, opset {report.opset}")
    print(f"methods: {', '.join(report.methods)}")
    print(f"verified: {describe_verification(report.verification)}")


def summary_of(one: Explanation) -> dict[str, Any]:
    from onnxplain.panel import probability

    one_class = one.class_weights is None  # a sum of logits has no probability
    return {
        "target": int(one.target[0]) if one_class else None,
        "label": one.labels[0],
        "probability": float(probability(one)[0]) if one_class else None,
    }


def print_explanation(one: dict[str, Any]) -> None:
    note = " (blank map)" if one["degenerate"] else ""
    share = "" if one["probability"] is None else f" {one['probability']:.1%}"
    print(f"{one['input']}: {one['label']}{share}{note} -> {one['output']}", flush=True)


def print_contract(model: Path, contract: Contract, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json.loads(contract.to_json()), indent=2))
        return
    from onnxplain.inspection import describe

    _print_pairs(model, describe(contract))


def print_findings(found: Findings, as_json: bool) -> None:
    if as_json:
        methods: dict[str, Any] = {method: {"cost": cost} for method, cost in found.cost.items()}
        methods |= {method: {"refused": why} for method, why in found.refused.items()}
        contract = found.contract
        print_json(
            model=str(found.path),
            instrumented=False,
            name=found.name,
            opset=found.opset,
            nodes=found.nodes,
            weights=found.weights,
            inputs=list(found.inputs),
            outputs=list(found.outputs),
            layers=[{"heads": heads, "tokens": tokens} for heads, tokens in found.layers],
            features=list(found.features),
            no_attention=found.no_attention,
            assumed=found.assumed if contract is not None else None,
            contract=None if contract is None else json.loads(contract.to_json()),
            methods=methods,
            reason=found.reason,
        )
        return
    from onnxplain.inspection import describe_findings

    _print_pairs(found.path, describe_findings(found))


def _print_pairs(title: Path, pairs: Iterable[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=str(title), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, Text(value))  # brackets are no markup
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def print_demo(shown: Shown, as_json: bool) -> None:
    if as_json:
        print_json(
            device=shown.device,
            asked=shown.asked,
            hits=shown.hits,
            pictures=[str(path) for path in shown.pictures],
            combined=str(shown.combined),
        )
        return
    print(f"{len(shown.pictures)} pictures of two garments, each garment asked for in turn.")
    print("How often is a method's map largest on the garment that was asked for?")
    width = max(map(len, shown.hits))
    for method, hits in shown.hits.items():
        print(f"  {method:{width}} {hits:3} of {shown.asked}")
    print(f"-> {shown.combined}, and one picture for each scene beside it")


def print_verification(report: Verification, as_json: bool) -> None:
    if as_json:
        print_json(
            model=str(report.path),
            device=report.device,
            against=report.against,
            tolerance=report.tolerance,
            within=report.within,
            outputs=[_in_json(dataclasses.asdict(one)) for one in report.differences],
            notes=list(report.notes),
        )
        return
    from rich.console import Console
    from rich.table import Table

    from onnxplain.inspection import describe_outputs

    print(f"{report.path} on {report.device} against {report.against}")
    table = Table(box=None, padding=(0, 1, 0, 0))  # 78 columns with the longest name of ours
    table.add_column("output", overflow="fold")
    for name in ("largest", "absolute", "relative", "L2", "Spearman", "ok"):
        table.add_column(name, justify="right", no_wrap=True)
    held: dict[str, list[str]] = {}
    for one in report.differences:
        numbers = (one.largest, one.absolute, one.relative, one.relative_l2)
        spearman = "" if one.spearman is None else f"{one.spearman:.5f}"
        within = "yes" if one.within else "no"
        table.add_row(one.output, *(f"{n:.1e}" for n in numbers), spearman, within)
        bounds = ", ".join(f"{_BOUNDS[name]} {bound:g}" for name, bound in one.bounds.items())
        held.setdefault(bounds, []).append(one.output)
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
    for bounds, outputs in held.items():
        print(f"held to {bounds}: {describe_outputs(outputs)}")
    for note in report.notes:
        print(note)
    off = [one.output for one in report.differences if not one.within]
    print(f"differ: {', '.join(off)}" if off else "the same within tolerance")


def print_evaluation(found: Evaluation, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.results, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    from onnxplain.evaluation.report.tables import FEW

    data = found.results["dataset"]
    print(f"{data['name']}: {data['evaluated']} of {data['pictures']} pictures")
    table = Table(box=None, padding=(0, 1, 0, 0))  # 80 columns with the longest name
    table.add_column("method", no_wrap=True)
    heads = (
        "mean rank",
        "better than random",
        "worse",
        "tells classes apart",
        "depends on weights",
        "trusted",
    )
    for name in heads:
        table.add_column(name, justify="right")
    trust = {True: "yes", None: "not tested"}  # of whether it depends on weights
    answers = {True: "yes", False: "no", None: "-"}
    unanswered = False
    doubts: dict[str, list[str]] = {}
    for one in found.results["verdicts"]:
        rank = "-" if one["mean_rank"] is None else f"{one['mean_rank']:.1f}"
        compared = one["compared"]
        unanswered |= not compared or None in (one["class_sensitive"], one["weight_sensitive"])
        if one["doubt"]:
            doubts.setdefault(one["doubt"], []).append(one["method"])
        table.add_row(
            one["method"],
            rank,
            f"{one['better_than_random']} of {compared}" if compared else "-",
            str(one["worse_than_random"]) if compared else "-",
            answers[one["class_sensitive"]],
            answers[one["weight_sensitive"]],
            "no" if one["doubt"] else trust[one["weight_sensitive"]],
        )
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)
    for why, methods in doubts.items():
        print(f"not trusted, it {why}: {', '.join(methods)}")
    if unanswered:
        print(f"-: not measured, or on {FEW}, of which there is no interval")
    print(f"-> {found.folder}/index.html")


def _in_json(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinite numbers."""
    return {k: None if v in (math.inf, -math.inf) else v for k, v in values.items()}
