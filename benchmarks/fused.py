"""What finished maps in the graph cost, beside the taps that they are made of and the plain model.

One process, the variants in turn within each round, medians over the rounds, random weights:

    python benchmarks/fused.py --model vit_base_patch16_224 --batch 8 --repeats 7

"memory" is by how much the resident size of a process of its own grows when it runs the variant for
the first time, after loading it: activations, without weights. The last table is of several classes
of each image: in one run of a file that takes so many, and in runs of a file that takes one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import timm
import torch

from benchmarks.overhead import measure, open_session
from onnxplain import graphs
from onnxplain.export.plain import to_onnx

__all__ = ["main"]

METHODS = ("rollout", "generic_attention", "transformer_attribution")
SEVERAL = "generic_attention"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="vit_base_patch16_224", metavar="NAME")
    parser.add_argument("--batch", type=int, default=8, metavar="N")
    parser.add_argument("--targets", type=int, default=5, metavar="K")
    parser.add_argument("--repeats", type=int, default=7, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    module: Any = timm.create_model(arguments.model).eval()
    size, count = module.patch_embed.img_size, arguments.targets
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name) / "plain.onnx"
        ir.save(to_onnx(module, image_size=size), plain)
        del module
        files = {"plain": plain}
        for method in METHODS:
            for outputs in ("taps", "maps"):
                files[f"{method}, {outputs}"] = path = Path(name) / f"{len(files)}.onnx"
                graphs.instrument(plain, path, methods=[method], outputs=outputs, verify=False)
        several = Path(name) / "several.onnx"
        graphs.instrument(plain, several, methods=[SEVERAL], targets=count, verify=False)
        one = files[f"{SEVERAL}, maps"]

        pixels = np.random.default_rng(0).normal(size=(arguments.batch, 3, *size))
        feeds = {"pixel_values": pixels.astype(np.float32)}
        memory = {
            variant: growth(path, arguments.batch, arguments.threads)
            for variant, path in {**files, "several": several}.items()
        }
        times: dict[str, float] = {}
        for method in METHODS:  # not all at once: each holds the weights several times
            variants = [v for v in files if v == "plain" or v.startswith(method)]
            runs = {v: runner(files[v], arguments.threads, feeds) for v in variants}
            found = measure(runs, arguments.repeats)
            times |= {v: t / found["plain"] for v, t in found.items()}
        print(f"{arguments.model}, batch {arguments.batch}, {arguments.threads} threads")
        print(f"{'':<36}{'x plain':>10}{'memory':>10}{'of taps':>10}")
        for variant in files:
            taps = memory.get(variant.replace("maps", "taps"), memory[variant])
            share = f"{memory[variant] / taps:.2f}"
            print(f"{variant:<36}{times[variant]:>10.2f}{memory[variant]:>10.0f}{share:>10}")

        single = runner(one, arguments.threads, feeds)
        together = runner(several, arguments.threads, feeds)
        found = measure({"one class": single, "together": together}, arguments.repeats)
        ratio = found["together"] / (count * found["one class"])
        bound = 1.1 * (1 + count) / (2 * count)
        print(f"\n{SEVERAL}, {count} classes of each image")
        print(f"one run, of {count} runs for one class: {ratio:.3f} (at most {bound:.3f} is asked)")
        print(
            f"memory {memory['several'] / memory[f'{SEVERAL}, maps']:.2f} times that of one class"
        )


def runner(path: Path, threads: int, feeds: dict[str, np.ndarray]) -> Callable[[], object]:
    session = open_session(path, threads)
    return lambda: session.run(None, feeds)


def growth(path: Path, batch: int, threads: int) -> float:
    """MiB by which a process grows at its first run (Linux)."""
    program = f"""
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = {threads}, 3
session = onnxruntime.InferenceSession({str(path)!r}, options)
pixels = numpy.zeros(({batch}, 3, *session.get_inputs()[0].shape[2:]), numpy.float32)
def status(field):
    return int(open("/proc/self/status").read().split(field + ":")[1].split()[0])
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # loading may have taken more than is left of it
outputs = session.run(None, {{"pixel_values": pixels}})
print((status("VmHWM") - before) / 1024)
"""
    return float(subprocess.check_output([sys.executable, "-c", program], text=True))


if __name__ == "__main__":
    main()
