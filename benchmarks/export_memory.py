"""What an export takes: peak resident memory relative to the weights, and seconds (Linux).

Each export is a process of its own, with random weights, verified against torch:

    python benchmarks/export_memory.py --models vit_large_patch16_224 --threads 2

Then a process that explains with the result, once as onnxruntime loads it: "explain" is its peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["main", "measure"]

MODELS = ("vit_base_patch16_224", "vit_large_patch16_224", "vit_huge_patch14_224")
EXPORT = """
import json, sys, time
import timm, torch
import onnxplain
name, path, kwargs, methods, threads = json.loads(sys.argv[1])
torch.set_num_threads(threads)
imported = peak()
start = time.perf_counter()
report = onnxplain.export(name, path, methods=methods, **kwargs)
took = time.perf_counter() - start
print(json.dumps([imported, peak(), took, sum(report.files.values()), report.source_bytes]))
"""
EXPLAIN = """
import json, sys, time
import numpy
import onnxplain
path, method, threads = json.loads(sys.argv[1])
explainer = onnxplain.Explainer(path, device="cpu", threads=threads)
size = explainer.contract.input.size
explainer.explain(numpy.zeros((1, 3, *size), numpy.float32), method=method)
print(json.dumps(peak()))
"""
PEAK = """
def peak():  # ru_maxrss counts the process that started this one
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
"""


def measure(
    name: str,
    path: Path,
    *,
    methods: list[str] | None = None,
    threads: int = 2,
    **model_kwargs: Any,
) -> dict[str, float]:
    """Exports a timm model in a process of its own.

    Returns:
        Bytes: `imported`, peak before the export; `peak`; `file`; `weights`. And `seconds`.
    """
    numbers = _run(EXPORT, [name, str(path), model_kwargs, methods, threads])
    return dict(zip(("imported", "peak", "seconds", "file", "weights"), numbers, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--method", default="generic_attention", help="to explain with")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--folder", help="where there is room for the files; default: temporary")
    arguments = parser.parse_args()
    heads = ("weights", "imports", "peak", "x weights", "seconds", "explain", "x weights")
    print(f"{'GB':<32}" + "".join(f"{head:>11}" for head in heads))
    for name in arguments.models:
        for form in ("model.onnx", "bundle"):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                path = Path(folder) / form
                found = measure(name, path, methods=arguments.methods, threads=arguments.threads)
                explain = _run(EXPLAIN, [str(path), arguments.method, arguments.threads])
            weights = found["weights"]
            columns = [
                *(f"{found[key] / 1e9:.2f}" for key in ("weights", "imported", "peak")),
                f"{found['peak'] / weights:.2f}",
                f"{found['seconds']:.0f}",
                f"{explain / 1e9:.2f}",
                f"{explain / weights:.2f}",
            ]
            row = "".join(f"{column:>11}" for column in columns)
            print(f"{name + ', ' + form:<32}{row}", flush=True)


def _run(program: str, arguments: list[Any]) -> Any:
    command = [sys.executable, "-c", PEAK + program, json.dumps(arguments)]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


if __name__ == "__main__":
    main()
