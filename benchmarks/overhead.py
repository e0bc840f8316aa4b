"""What explanations cost: the same model plain, with the outputs of each method, and in torch.

One process, the variants in turn within each round, medians over the rounds, random weights:

    python benchmarks/overhead.py --models vit_base_patch16_224 --batches 1 --repeats 7

The column "memory" is the peak resident size of a process of its own that runs one variant once.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import timm
import torch

from onnxplain import graphs
from onnxplain.export.plain import inference_form, to_onnx

__all__ = ["main"]

MODELS = ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224")
METHODS = {
    "+ attention": ("rollout",),
    "+ attention, gradient": ("gradient_rollout", "generic_attention"),
    "gradcam": ("gradcam",),
    "attention_gradcam": ("attention_gradcam",),
    "partial_lrp": ("partial_lrp",),
    "attnlrp": ("attnlrp",),
    "transformer_attribution": ("transformer_attribution",),
    "lrp": ("lrp",),
}
PAUSE = 0.05  # lets the other library's worker threads stop spinning

Run = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 8), metavar="N")
    parser.add_argument("--repeats", type=int, default=15, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"onnxruntime {onnxruntime.__version__}, torch {torch.__version__}, ", end="")
    print(f"{arguments.threads} threads, median of {arguments.repeats} rounds")
    for name in arguments.models:
        torch.manual_seed(0)
        module: Any = timm.create_model(name).eval().requires_grad_(False)
        with tempfile.TemporaryDirectory() as folder:
            files = write_files(module, Path(folder))
            sizes = {variant: path.stat().st_size for variant, path in files.items()}
            sessions = {v: open_session(path, arguments.threads) for v, path in files.items()}
            batches = arguments.batches
            memory = {b: {v: peak_memory(p, b) for v, p in files.items()} for b in batches}
        for batch in batches:
            with inference_form(copy.deepcopy(module)) as unfused:
                runs = runs_of(module, unfused, sessions, batch)
                times = measure(runs, arguments.repeats)
            print_table(f"{name}, batch {batch}", times, sizes, memory[batch])


def write_files(module: Any, folder: Path) -> dict[str, Path]:
    size = module.patch_embed.img_size
    files = {"plain ONNX": folder / "plain.onnx"}
    ir.save(to_onnx(module, image_size=size), files["plain ONNX"])
    for variant, methods in METHODS.items():
        files[variant] = folder / f"{len(files)}.onnx"
        graphs.instrument(files["plain ONNX"], files[variant], methods=methods, verify=False)
    return files


def open_session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def peak_memory(path: Path, batch: int) -> float:
    """Peak resident MiB of a process that loads the file and runs it once (Linux)."""
    program = f"""
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 2, 3
session = onnxruntime.InferenceSession({str(path)!r}, options)
size = session.get_inputs()[0].shape[2:]
session.run(None, {{"pixel_values": numpy.zeros(({batch}, 3, *size), numpy.float32)}})
status = open("/proc/self/status").read()  # ru_maxrss counts the process that started this one
print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
"""
    return float(subprocess.check_output([sys.executable, "-c", program], text=True))


def runs_of(
    module: Any,
    unfused: torch.nn.Module,
    sessions: dict[str, onnxruntime.InferenceSession],
    batch: int,
) -> dict[str, Run]:
    height, width = module.patch_embed.img_size
    image = torch.randn(batch, 3, height, width)
    feeds = {"pixel_values": image.numpy(), "target": np.arange(batch, dtype=np.int64)}

    def onnx_run(session: onnxruntime.InferenceSession) -> Run:
        taken = {v.name for v in (*session.get_inputs(), *session.get_overridable_initializers())}
        feed = {name: array for name, array in feeds.items() if name in taken}
        return lambda: session.run(None, feed)

    def torch_forward() -> object:
        with torch.inference_mode():
            return module(image)

    def torch_hooks() -> object:
        return with_hooks(unfused, image, torch.from_numpy(feeds["target"]))

    return {
        **{variant: onnx_run(session) for variant, session in sessions.items()},
        "torch forward": torch_forward,
        "torch, hooks and autograd": torch_hooks,
    }


def with_hooks(
    module: torch.nn.Module, image: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Attention and its gradient the usual way, the least work that torch can do for it."""
    attention: list[torch.Tensor] = []

    def keep(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        if not output.requires_grad:  # the first layer: nothing before it needs a gradient
            output.requires_grad_()
        attention.append(output)
        return output

    handles = [
        submodule.register_forward_hook(keep)
        for name, submodule in module.named_modules()
        if name.endswith("attn_drop")
    ]
    try:
        logits = module(image)
    finally:
        for handle in handles:
            handle.remove()
    selected = logits.gather(1, target[:, None]).sum()
    return logits, *attention, *torch.autograd.grad(selected, attention)


def measure(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {variant: [] for variant in runs}
    for _ in range(repeats):
        for variant, run in runs.items():
            time.sleep(PAUSE)
            start = time.perf_counter()
            run()
            times[variant].append(time.perf_counter() - start)
    return {variant: statistics.median(values) for variant, values in times.items()}


def print_table(
    title: str, times: dict[str, float], sizes: dict[str, int], memory: dict[str, float]
) -> None:
    print(f"\n{title:<36}{'ms':>10}{'x plain':>10}{'size':>10}{'memory':>10}")
    plain = "plain ONNX"
    for variant, seconds in times.items():
        own = ("-", "-")
        if variant in sizes:
            ratio = memory[variant] / memory[plain]
            own = (f"{sizes[variant] / sizes[plain]:.4f}", f"{ratio:.2f}")
        cost = f"{seconds * 1e3:>10.1f}{seconds / times[plain]:>10.2f}"
        print(f"{variant:<36}{cost}{own[0]:>10}{own[1]:>10}")


if __name__ == "__main__":
    main()
