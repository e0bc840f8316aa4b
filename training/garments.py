"""Train the bundled demo model: a small vision transformer that names the garment in a scene.

    python training/garments.py --output onnxplain/demo/vit_garments.safetensors

Scenes are composed afresh for every step (`onnxplain.demo.scenes`) from the 60,000 training photos
of Fashion-MNIST; accuracy is measured on fixed scenes made from its 10,000 test photos. A share of
the training scenes shows two garments, each labelled one half, so that both logits mean something
there.

Because the composer knows where the garment is, each patch token is also told, through a linear
head that is thrown away afterwards, what it shows (token labelling, Jiang et al., NeurIPS 2021),
which helps the transformer to look past the clutter.

Needs torch, timm, safetensors, numpy and opencv. The weights are written after every epoch, so the
run can be stopped at any time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save
from timm.layers.config import set_fused_attn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from onnxplain.demo.scenes import (
    DISTINCT_PAIRS,
    LABELS,
    SCENE_SIZE,
    garment_scene,
    two_garment_scene,
)

PATCH = 8
ARCHITECTURE: dict[str, Any] = {
    "img_size": SCENE_SIZE,
    "patch_size": PATCH,
    "embed_dim": 128,
    "depth": 4,
    "num_heads": 4,
    "num_classes": len(LABELS),
    "class_token": True,
}
SCENES_PER_EPOCH = 60_000
EVALUATION_SEED = 2017
PAIRS_EVALUATED = 2_000


@dataclass(frozen=True)
class Garments:
    """Fashion-MNIST photos: images uint8 [n, 28, 28], labels uint8 [n]."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Scores:
    """Accuracies in 0..1 on held-out scenes."""

    top1: float
    per_class: dict[str, float]
    both_in_top2: float


def read_garments(folder: Path, split: str) -> Garments:
    """Read one split ("train" or "t10k") of Fashion-MNIST from its gzipped idx files."""

    def read(name: str, header: int) -> npt.NDArray[np.uint8]:
        with gzip.open(folder / f"{split}-{name}-ubyte.gz") as stream:
            return np.frombuffer(stream.read(), np.uint8, offset=header)

    images = read("images-idx3", 16).reshape(-1, 28, 28)
    return Garments(images=images, labels=read("labels-idx1", 8))


def write_pack(path: Path, garments: Garments, per_class: int) -> None:
    """Write the first `per_class` garments of each class as the pack the demo ships."""
    chosen = np.concatenate(
        [np.flatnonzero(garments.labels == label)[:per_class] for label in range(len(LABELS))]
    )
    np.savez_compressed(path, images=garments.images[chosen], labels=garments.labels[chosen])


class SceneBatches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Batches of scenes, composed when asked for; batch i is the same whoever asks.

    An item is (images uint8 [batch, 64, 64, 3], class probabilities float32 [batch, 10], what each
    patch shows float32 [batch, 64, 11], its last column the background's share).
    """

    def __init__(
        self, garments: Garments, *, batch: int, steps: int, pair_share: float, seed: int
    ) -> None:
        self.garments = garments
        self.batch = batch
        self.steps = steps
        self.pair_share = pair_share
        self.seed = seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        rng = np.random.default_rng([self.seed, step])
        grid = SCENE_SIZE // PATCH
        images = np.empty((self.batch, SCENE_SIZE, SCENE_SIZE, 3), np.uint8)
        classes = np.zeros((self.batch, len(LABELS)), np.float32)
        patches = np.zeros((self.batch, grid * grid, len(LABELS) + 1), np.float32)
        for row, first in enumerate(rng.integers(len(self.garments.labels), size=self.batch)):
            if rng.random() < self.pair_share:
                chosen = [int(first), self._partner(rng, first)]
                photos = [self.garments.images[i] for i in chosen]
                images[row], *masks = two_garment_scene(rng, *photos)
            else:
                chosen = [int(first)]
                images[row], *masks = garment_scene(rng, self.garments.images[first])
            for index, mask in zip(chosen, masks, strict=True):
                label = self.garments.labels[index]
                classes[row, label] = 1 / len(chosen)
                shares = mask.reshape(grid, PATCH, grid, PATCH).mean(axis=(1, 3))
                patches[row, :, label] = shares.ravel()
        patches[..., -1] = 1 - patches.sum(axis=-1)
        return torch.from_numpy(images), torch.from_numpy(classes), torch.from_numpy(patches)

    def _partner(self, rng: np.random.Generator, first: int) -> int:
        """Draw a garment of a class that does not look like the first one's."""
        labels = self.garments.labels
        while True:
            other = int(rng.integers(len(labels)))
            a, b = sorted((int(labels[first]), int(labels[other])))
            if (a, b) in DISTINCT_PAIRS:
                return other


def normalise(images: Tensor) -> Tensor:
    """uint8 [batch, h, w, 3] -> float32 [batch, 3, h, w] in -1..1 (mean and std 0.5)."""
    return images.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


class Evaluation:
    """Fixed held-out scenes: one per test garment, and a few thousand with two garments."""

    def __init__(self, garments: Garments) -> None:
        rng = np.random.default_rng(EVALUATION_SEED)
        self.labels = torch.from_numpy(garments.labels.astype(np.int64))
        self.scenes = torch.from_numpy(
            np.stack([garment_scene(rng, image)[0] for image in garments.images])
        )
        pairs = SceneBatches(
            garments, batch=PAIRS_EVALUATED, steps=1, pair_share=1.0, seed=EVALUATION_SEED
        )
        self.pair_scenes, self.pair_classes, _ = pairs[0]

    def __call__(self, model: nn.Module) -> Scores:
        model.eval()
        right = (_logits(model, self.scenes).argmax(1) == self.labels).float()
        top2 = _logits(model, self.pair_scenes).topk(2).indices
        return Scores(
            top1=right.mean().item(),
            per_class={
                name: right[self.labels == label].mean().item() for label, name in enumerate(LABELS)
            },
            both_in_top2=(self.pair_classes.gather(1, top2) > 0).all(1).float().mean().item(),
        )


@torch.inference_mode()
def _logits(model: nn.Module, scenes: Tensor) -> Tensor:
    return torch.cat([model(normalise(chunk)) for chunk in scenes.split(250)])


def write_model(path: Path, model: nn.Module, scores: Scores, run: dict[str, Any]) -> None:
    """Write the weights and, beside them, a JSON file; neither is ever half-written."""
    about = {
        "timm_class": "timm.models.vision_transformer.VisionTransformer",
        "kwargs": ARCHITECTURE,
        "labels": LABELS,
        "preprocessing": {
            "input_size": [3, SCENE_SIZE, SCENE_SIZE],
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "crop_pct": 1.0,
            "interpolation": "bicubic",
        },
        "training": run,
        "accuracy": {
            "top1": round(scores.top1, 4),
            "per_class": {name: round(value, 4) for name, value in scores.per_class.items()},
            "both_of_two_garments_in_top2": round(scores.both_in_top2, 4),
        },
    }
    beside = path.with_name(path.name + ".part")
    weights = {name: tensor.float().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {
        "format": "pt",
        "model": "timm VisionTransformer " + json.dumps(ARCHITECTURE),
        "labels": ", ".join(LABELS),
        "data": "Fashion-MNIST, MIT licence, (c) 2017 Zalando SE",
    }
    beside.write_bytes(save(weights, metadata=metadata))
    os.replace(beside, path)
    beside.write_text(json.dumps(about, indent=2) + "\n")
    os.replace(beside, path.with_suffix(".json"))


def schedule(step: int, *, steps: int, warmup: int) -> float:
    """Share of the peak learning rate: linear warmup, then a cosine down to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def build_optimisers(
    model: VisionTransformer, patch_head: nn.Module, options: argparse.Namespace
) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' weight matrices, AdamW for everything else.

    Muon needs far fewer scenes than AdamW. Embeddings, heads, biases and norms are no linear maps
    between hidden features, so its orthogonal updates do not suit them.
    """
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    taken = set(map(id, matrices))
    others = [
        parameter
        for parameter in nn.ModuleList([model, patch_head]).parameters()
        if id(parameter) not in taken
    ]
    muon = torch.optim.Muon(
        matrices,
        lr=options.matrix_rate,
        weight_decay=options.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, torch.optim.AdamW(others, lr=options.rate, betas=(0.9, 0.98), weight_decay=0)]


def train(options: argparse.Namespace) -> None:
    """Train, and write the averaged weights with their accuracy after every epoch."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    evaluate = Evaluation(read_garments(options.data, "t10k"))
    # On CPUs the backward pass of fused attention in bfloat16 takes longer than all the rest of a
    # step together.
    set_fused_attn(False)
    model = VisionTransformer(**ARCHITECTURE)
    patch_head = nn.Linear(model.embed_dim, len(LABELS) + 1)
    # Five patches in six are background; at full weight they would drown the garments.
    patch_classes = torch.tensor([1.0] * len(LABELS) + [0.25])
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.average))
    optimisers = build_optimisers(model, patch_head, options)

    epoch_steps = SCENES_PER_EPOCH // options.batch
    steps = options.epochs * epoch_steps
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(
            optimiser, partial(schedule, steps=steps, warmup=options.warmup)
        )
        for optimiser in optimisers
    ]
    batches = SceneBatches(
        read_garments(options.data, "train"),
        batch=options.batch,
        steps=steps,
        pair_share=options.pair_share,
        seed=options.seed,
    )
    loader = DataLoader(
        batches,
        batch_size=None,
        num_workers=1,
        prefetch_factor=16,
        # Threads of OpenCV would only take cores away from the training.
        worker_init_fn=lambda _: cv2.setNumThreads(0),
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters, {steps} steps of {options.batch} scenes", flush=True)
    start = time.monotonic()
    losses = []
    for step, (images, classes, patches) in enumerate(loader):
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            tokens = model.forward_features(normalise(images))
            logits, patch_logits = model.forward_head(tokens), patch_head(tokens[:, 1:])
        loss = functional.cross_entropy(
            logits.float(), classes, label_smoothing=options.label_smoothing
        )
        patch_loss = functional.cross_entropy(
            patch_logits.float().flatten(0, 1), patches.flatten(0, 1), weight=patch_classes
        )
        (loss + options.patch_weight * patch_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, scheduler in zip(optimisers, schedulers, strict=True):
            optimiser.step()
            optimiser.zero_grad()
            scheduler.step()
        average.update_parameters(model)
        losses.append((loss.item(), patch_loss.item()))

        done = step + 1
        if done % 50 == 0 or done == steps:
            seconds = time.monotonic() - start
            mean_loss, mean_patch_loss = np.mean(losses, axis=0)
            print(
                f"step {done}/{steps} loss {mean_loss:.3f} patch loss {mean_patch_loss:.3f} "
                f"{done * options.batch / seconds:.0f} scenes/s {seconds / 60:.1f} min",
                flush=True,
            )
            losses.clear()
        if done % epoch_steps == 0:
            scores = evaluate(average.module)
            run = {
                "data": "Fashion-MNIST",
                "seed": options.seed,
                "epochs": done // epoch_steps,
                "scenes": done * options.batch,
                "parameters": parameters,
            }
            write_model(options.output, average.module, scores, run)
            print(
                f"epoch {done // epoch_steps}: top-1 {scores.top1:.4f}, "
                f"both of two garments in the top 2 {scores.both_in_top2:.4f}",
                flush=True,
            )
    print(json.dumps(scores.per_class, indent=2))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    add("--output", type=Path, default=Path("onnxplain/demo/vit_garments.safetensors"))
    add("--pack", type=Path, help="only write the pack of held-out garments to this .npz file")
    add("--seed", type=int, default=1)
    add("--epochs", type=int, default=10, help=f"of {SCENES_PER_EPOCH} scenes each")
    add("--batch", type=int, default=64)
    add("--rate", type=float, default=1e-3, help="peak learning rate")
    add("--matrix-rate", type=float, default=2e-3, help="the same for the blocks' matrices")
    add("--warmup", type=int, default=200, help="steps")
    add("--weight-decay", type=float, default=0.05)
    add("--label-smoothing", type=float, default=0.05)
    add("--patch-weight", type=float, default=2.0, help="weight of the token labelling loss")
    add("--pair-share", type=float, default=0.15, help="share of two-garment training scenes")
    add("--average", type=float, default=0.998, help="decay of the weight average")
    # On a busy machine one thread is faster than two that wait for each other.
    add("--threads", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.pack:
        write_pack(options.pack, read_garments(options.data, "t10k"), per_class=30)
        return 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        train(options)
    except KeyboardInterrupt:
        print(f"stopped; {options.output} holds the last finished epoch, if any", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
