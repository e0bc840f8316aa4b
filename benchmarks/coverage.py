"""Which models of timm can be explained: every name, by one representative per architecture.

    python -m benchmarks.coverage                    # what has not run yet, then the page
    python -m benchmarks.coverage --only 'vit_*'     # groups with a name that matches
    python -m benchmarks.coverage --again refused    # what was refused, and what has not run yet
    python -m benchmarks.coverage --page             # docs/coverage.md from the results alone

Names whose models have the same building blocks form a group. The smallest member is built with
random weights, at two layers and a small picture where that changes no building block, exported
with every method, and compared with torch. Each runs in a process of its own and takes about 10 s
of one core, all of them some 80 minutes. Results go to a folder, and a run continues where the last
one stopped: delete `results.jsonl` there to start anew, and after an upgrade of timm `groups.json`
too, which takes 4 minutes to make.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import re
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import timm
import torch

import onnxplain as ox
from benchmarks.architectures import build, group, plan
from onnxplain.contract import Contract
from onnxplain.export import stage
from onnxplain.export.plain import to_onnx
from onnxplain.export.verify import TOLERANCE
from onnxplain.graphs.choice import refusals
from onnxplain.graphs.structure.analysis import analyse
from onnxplain.outputs import METHODS

__all__ = ["PAGE", "arguments", "check", "in_own_process", "main", "page"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "coverage.md"
VERDICTS = ("all methods", "some methods", "refused", "differs", "failed", "not run")
KINDS = ("global", "other", "none", "unknown")
NOT_RUN = {"outcome": "not run", "reason": "not yet", "attention": "unknown"}
INTRODUCTION = """\
# Which models of timm can be explained

Written by `python -m benchmarks.coverage` with timm {timm}, torch {torch}: all {names} names, in
{groups} groups of equal building blocks. For each group its smallest member was built with random
weights, in the size stated, exported with every method, and compared with torch on random input.
"Worst difference" is relative to the largest value in torch; above {tolerance:g} nothing is
written, and the verdict is "differs". "Refused" is an error that says why; "failed" is any other
error, a bug. Attention is "global" where every layer looks at all patches of one grid, from the
same tokens or from class tokens, and nothing else mixes them behind the first layer; "other" is
attention within windows, pooled, over several grids, between channels or beside convolutions;
"none" is a convolutional network or the like; "unknown" has not run. Behind "gradcam alone" stands
why the attention, if there is any, is none of every token to every token, which the methods that
read attention are defined for; lrp and attnlrp have rules for models with such attention only.

What differs are deep convolutional networks, whose random weights carry rounding from layer to
layer: there torch's own float32 is as far from its float64 as onnxruntime's is (`inception_v4`:
logits 5e-4 and 4e-4, `legacy_senet154`: 2e-4 both, `repvgg_d2se`: 1.1e-4 and 0.7e-4).
"""


def check(name: str, arguments: dict[str, Any], size: int) -> dict[str, Any]:
    """Exports the model with all methods and says what came of it.

    Returns:
        `outcome`: "served", "differs" (from torch), "refused" (with an error that onnxplain
        raises on purpose) or "failed" (with any other); `methods`, `differences` and why other
        methods are `undefined`, or `reason` and for a failure `where`.
    """
    plain: list[ir.Model] = []

    def keep(*arguments: Any, **options: Any) -> ir.Model:
        plain.append(to_onnx(*arguments, **options))
        return plain[0]

    try:
        module = build(name, arguments, size)
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(stage, "to_onnx", keep):
            report = ox.export(module, Path(folder) / "model.onnx", image_size=size)
        verification = report.contract.verification or {}
        return {
            "outcome": "served",
            "methods": list(report.contract.methods),
            "differences": verification["differences"],
            "undefined": _undefined(plain[0], report.contract),
        }
    except ox.OnnxplainError as error:
        outcome = "differs" if isinstance(error, ox.VerificationError) else "refused"
        return {"outcome": outcome, "reason": f"{type(error).__name__}: {error}"}
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = [f for f in frames if "onnxplain" in f.filename] or frames
        where = f"{Path(last[-1].filename).name}:{last[-1].lineno} {last[-1].line}"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"outcome": "failed", "reason": reason, "where": where}


def _undefined(plain: ir.Model, contract: Contract) -> dict[str, str]:
    """Why each of the methods that are not served is not defined for the model."""
    if len(contract.methods) == len(METHODS):
        return {}
    return refusals(analyse(plain, contract.logits), contract.readout)


# The sweep


def _child(name: str, limits: argparse.Namespace, connection: Connection) -> None:
    memory = int(limits.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 5))
    torch.set_num_threads(1)
    planned = plan(name)
    connection.send(planned)
    if planned["parameters"] > limits.limit_params:
        reason = f"{planned['parameters']:.1e} parameters, more than --limit-params"
        outcome = {"outcome": "not run", "reason": reason}
    else:
        outcome = check(name, planned["arguments"], planned["size"])
    if "allocate memory" in outcome.get("reason", ""):
        outcome = {"outcome": "not run", "reason": f"needs more than {limits.memory:g} GiB"}
    connection.send({**outcome, "seconds": round(time.process_time(), 1)})


def in_own_process(name: str, limits: argparse.Namespace) -> dict[str, Any]:
    """What `plan` and `check` found, or why they came to no end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "onnxplain.export.stage", "timm"])
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(name, limits, there))
    child.start()
    there.close()
    record: dict[str, Any] = {"representative": name}
    try:
        while "outcome" not in record:
            if here.poll(10 * limits.seconds):  # processor time is limited in the child
                record |= here.recv()
            else:
                record |= {"outcome": "not run", "reason": "stood still"}
    except EOFError:
        child.join()
        late = child.exitcode == -signal.SIGXCPU
        reason = f"takes more than {limits.seconds} s" if late else f"exit code {child.exitcode}"
        record |= {"outcome": "not run", "reason": reason}
    child.kill()
    child.join()
    return record


def sweep(groups: list[dict[str, Any]], results: Path, limits: argparse.Namespace) -> None:
    with ThreadPoolExecutor(limits.jobs) as pool, results.open("a") as file:
        tasks = [pool.submit(in_own_process, g["representative"], limits) for g in groups]
        for count, task in enumerate(as_completed(tasks), 1):
            record = task.result()
            print(json.dumps(record), file=file, flush=True)
            what = record.get("reason") or f"{len(record['methods'])} methods"
            print(f"{count}/{len(tasks)} {record['representative']}: {record['outcome']}, {what}")


# The page


def page(groups: list[dict[str, Any]], results: dict[str, dict[str, Any]], version: str) -> str:
    """docs/coverage.md, from what `group` and the sweep found."""
    rows = [(g, NOT_RUN | results.get(g["representative"], {})) for g in groups]
    counts: Counter[tuple[str, str]] = Counter()
    for found, record in rows:
        counts[record["attention"], _verdict(record)] += len(found["names"])
    total = sum(counts.values())
    lines = [
        INTRODUCTION.format(
            timm=version,
            torch=torch.__version__,
            names=total,
            groups=len(groups),
            tolerance=TOLERANCE,
        )
    ]
    lines += [
        f"| attention | names | {' | '.join(VERDICTS)} |",
        "|---|" + "---:|" * (1 + len(VERDICTS)),
    ]
    for kind in (*KINDS, "all"):
        of_kind = {
            v: sum(n for (k, w), n in counts.items() if w == v and kind in (k, "all"))
            for v in VERDICTS
        }
        if sum(of_kind.values()):
            figures = " | ".join(str(n) for n in of_kind.values())
            lines.append(f"| {kind} | {sum(of_kind.values())} | {figures} |")
    whole = sum(n for (kind, _), n in counts.items() if kind == "global")
    if whole:
        served = counts["global", VERDICTS[0]]
        lines += [
            "",
            f"Of the {whole} names with global attention, {served} "
            f"({100 * served / whole:.1f} %) are served with all methods.",
        ]
    for name in sorted({g["family"] for g in groups}):
        lines += _section(name, [row for row in rows if row[0]["family"] == name])
    return "\n".join(lines) + "\n"


def _section(name: str, rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    names = sum(len(found["names"]) for found, _ in rows)
    lines = ["", f"## {name}", "", f"Groups: {len(rows)}, names: {names}.", ""]
    lines += ["| representative | names | attention | methods, or why not | worst difference |"]
    lines += ["|---|---:|---|---|---|"]
    for found, record in rows:
        changes = {k: v for k, v in record.get("arguments", {}).items() if k != "num_classes"}
        built = ", ".join(
            [
                *(f"{k}={v}" for k, v in changes.items() if k != "img_size"),
                *([f"{record['size']} px"] if "size" in record else []),
            ]
        )
        label = f"`{found['representative']}`" + (f" ({built})" if built else "")
        lines.append(
            f"| {label} | {len(found['names'])} | {record['attention']} "
            f"| {_what(record)} | {_worst(record)} |"
        )
    lines += ["", "<details><summary>names</summary>", ""]
    lines += [f"- {', '.join(found['names'])}" for found, _ in rows]
    return [*lines, "", "</details>"]


def _verdict(record: dict[str, Any]) -> str:
    if record["outcome"] == "served":
        return VERDICTS[0] if len(record["methods"]) == len(METHODS) else VERDICTS[1]
    return str(record["outcome"])


def _what(record: dict[str, Any]) -> str:
    if record["outcome"] != "served":
        kinds = "UnsupportedModelError|ModelError|VerificationError|UnsupportedOperatorError"
        reason = re.sub(f"^({kinds}): ", "", record["reason"])  # of a failure it is the news
        return f"{record['outcome']}: {_finding(reason)}".replace("|", "\\|")
    if _verdict(record) == VERDICTS[0]:
        return "all"
    reasons: dict[str, list[str]] = {}
    for method, reason in record.get("undefined", {}).items():
        reasons.setdefault(_finding(reason), []).append(method)
    if record["methods"] == ["gradcam"]:
        others = [f"gradcam alone: {max(reasons, key=lambda reason: len(reasons[reason]))}"]
    else:
        others = [", ".join(record["methods"])]
        others += [f"not {', '.join(methods)}: {reason}" for reason, methods in reasons.items()]
    return "; ".join(others).replace("|", "\\|")


def _finding(reason: str) -> str:
    """What was found, without what was expected instead."""
    return re.sub(r"[;:] expected [^;]*", "", reason)


def _worst(record: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.1e}" for k, v in record.get("differences", {}).items())


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each representative."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["representative"]: record for record in map(json.loads, lines)}


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--again", nargs="+", default=[], metavar="OUTCOME", choices=VERDICTS[2:])
    parser.add_argument("--limit-params", type=float, default=1e9, metavar="N")
    parser.add_argument("--seconds", type=int, default=180, metavar="N", help="processor time")
    parser.add_argument("--memory", type=float, default=8, metavar="GIB")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--results", type=Path, default=ROOT / "build/coverage", metavar="FOLDER")
    parser.add_argument("--page", action="store_true", help="only write the page")
    return parser.parse_args(words)


def main() -> None:
    options = arguments()
    options.results.mkdir(parents=True, exist_ok=True)
    cache, results = options.results / "groups.json", options.results / "results.jsonl"
    if not cache.exists():
        cache.write_text(json.dumps({"timm": timm.__version__, "groups": group()}, indent=1))
    known = json.loads(cache.read_text())
    if not options.page:
        done = {n for n, r in read(results).items() if r["outcome"] not in options.again}
        left = [g for g in known["groups"] if g["representative"] not in done]
        sweep([g for g in left if fnmatch.filter(g["names"], options.only)], results, options)
    PAGE.write_text(page(known["groups"], read(results), known["timm"]))


if __name__ == "__main__":
    main()
