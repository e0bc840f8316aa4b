"""Results of evaluations as the report takes them: one as large as they get, and the smallest."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from onnxplain.demo.scenes import LABELS, two_garment_scenes

__all__ = ["BASELINES", "METHODS", "full", "minimal"]

# How good each is made to look, 1 best; and whether its map depends on class and on weights.
METHODS: dict[str, tuple[float, bool, bool]] = {
    "transformer_attribution": (0.95, True, True),
    "generic_attention": (0.9, True, True),
    "attnlrp": (0.8, True, True),
    "gradient_rollout": (0.75, True, True),
    "gradcam": (0.7, True, True),
    "attention_gradcam": (0.55, True, True),
    "raw_attention": (0.5, False, True),
    "rollout": (0.4, False, False),
    "partial_lrp": (0.2, True, True),
    "lrp": (-0.1, True, False),
}
BASELINES = {"random": 0.0, "center_gaussian": 0.45}
_COUNT, _OBJECTS = 497, 500
_DEPTHS = ["original", "head", *(f"layer {i}" for i in reversed(range(6)))]


def _measures() -> list[dict[str, Any]]:
    def measure(
        name: str, title: str, detail: str, better: str, headline: bool = False, top: float = 1.0
    ) -> dict[str, Any]:
        return {
            "name": name,
            "group": name.split(".")[0],
            "title": title,
            "detail": detail,
            "better": better,
            "range": [-1.0 if better == "none" else 0.0, top],
            "headline": headline,
            "definition": f"Area below the curve of {title} by the trapezoid rule. The first point "
            "is the undisturbed picture; ties go by position. Pictures are weighted alike.",
        }

    return [
        *(
            measure(
                f"perturbation.{fill}.{order}.{kind}",
                f"{order} perturbation",
                f"{fill}, {kind} class",
                "lower" if order == "positive" else "higher",
                headline=fill == "zero",
                top=0.9,
            )
            for fill in ("zero", "blur")
            for order in ("positive", "negative")
            for kind in ("predicted", "target")
        ),
        measure("insertion_deletion.insertion", "insertion", "blurred start", "higher", True),
        measure("insertion_deletion.deletion", "deletion", "zero", "lower", True),
        measure("localisation.pixel_accuracy", "segmentation", "pixel accuracy", "higher"),
        measure("localisation.miou", "segmentation", "mIoU", "higher", True),
        measure("localisation.map", "segmentation", "mAP", "higher"),
        measure("localisation.energy", "energy inside", "", "higher"),
        measure("localisation.pointing", "pointing game", "", "higher", True),
        measure("sanity.randomisation", "cascading randomisation", "rank correlation", "none"),
        measure("sanity.classes", "class sensitivity", "rank correlation", "none"),
    ]


def _curve(measure: dict[str, Any], method: str, skill: float) -> dict[str, Any]:
    curve: dict[str, Any] = {"measure": measure["name"], "method": method, "x_names": None}
    if measure["group"] == "sanity":
        x = np.arange(float(len(_DEPTHS)))
        y = np.exp(-x * (0.2 + skill)) if skill > 0 else np.ones_like(x)
        names = {"x_title": "weights replaced up to", "y_title": "rank correlation"}
        return curve | names | {
            "x": x.tolist(), "y": y.tolist(), "low": None, "high": None, "x_names": _DEPTHS
        }  # fmt: skip
    x = np.linspace(0, 0.9, 10)
    speed = 1 + skill * (2 if measure["better"] == "lower" else -0.8)
    y = 0.91 - 0.8 * x ** (1 / speed) if speed > 0.3 else 0.91 - 0.2 * x
    curve |= {"x": x.tolist(), "y": y.tolist(), "x_title": "share of pixels removed"}
    return curve | {"y_title": "top-1", "low": (y - 0.03).tolist(), "high": (y + 0.03).tolist()}


def full() -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """Twelve methods, every group of measures, failures, and six pictures a method."""
    rng = np.random.default_rng(0)
    skills = {name: skill for name, (skill, _, _) in METHODS.items()} | BASELINES
    measures = _measures()
    values = []
    for measure in measures:
        noise = {name: rng.normal(scale=0.02) for name in skills}
        sign = {"lower": -1, "higher": 1, "none": 1}[measure["better"]]
        level = {name: 0.45 + sign * 0.25 * skills[name] + noise[name] for name in skills}
        for name in skills:
            value: dict[str, Any] = {"method": name, "measure": measure["name"], "count": _COUNT}
            ends = {"low": level[name] - 0.02, "high": level[name] + 0.02}
            value |= {"value": level[name], **ends}
            if name not in BASELINES:
                value["versus"] = {
                    base: {
                        "difference": level[name] - level[base],
                        "low": level[name] - level[base] - 0.03,
                        "high": level[name] - level[base] + 0.03,
                    }
                    for base in BASELINES
                }
            values.append(value)
    pictures = _overlays(6 * len(skills))
    headlines = [measure for measure in measures if measure["headline"]]
    results = {
        "format": 1,
        "model": {
            "name": "garments.onnx",
            "file": "garments.onnx",
            "sha256": "8c1f6a9d" * 8,
            "classes": 10,
            "image_size": [64, 64],
        },
        "dataset": {
            "name": "garments",
            "pictures": 500,
            "evaluated": _COUNT,
            "objects": _OBJECTS,
            "with_masks": _COUNT,
            "accuracy": 0.912,
        },
        "failures": [
            {"name": f"broken/{i}.png", "error": "damaged or truncated (image file is truncated)"}
            for i in range(3)
        ],
        "settings": {
            "methods": list(METHODS),
            "measures": ["perturbation", "insertion_deletion", "localisation", "sanity"],
            "fills": ["zero", "blur"],
            "steps": 16,
            "seed": 0,
            "limit": None,
            "batch_size": 32,
            "device": "cpu",
            "threads": None,
            "resamples": 1000,
            "confidence": 0.95,
        },
        "versions": {"onnxplain": "0.1.0", "onnxruntime": "1.32.0", "numpy": "2.3.5"},
        "methods": [
            {"name": name, "baseline": name in BASELINES, "class_specific": _about(name)[1]}
            for name in skills
        ],
        "measures": measures,
        "values": values,
        "curves": [
            _curve(measure, name, skill)
            for measure in measures
            if measure["group"] in {"perturbation", "insertion_deletion"}
            or measure["name"] == "sanity.randomisation"
            for name, skill in skills.items()
        ],
        "verdicts": [
            {
                "method": name,
                "mean_rank": 1.3 + index,
                "better_than_random": len(headlines) - (index > 6) * (index - 5),
                "worse_than_random": int(index == 9),
                "compared": len(headlines),
                "class_sensitive": telling,
                "weight_sensitive": depending,
            }
            for index, (name, (_, telling, depending)) in enumerate(METHODS.items())
        ],
        "examples": [
            {
                "method": name,
                "measure": "localisation.energy",
                "rank": "best" if place < 3 else "worst",
                "sample": f"garments {37 * index + place}",
                "label": LABELS[(index + place) % len(LABELS)],
                "value": 0.97 - 0.15 * place,
                "picture": 6 * index + place,
            }
            for index, name in enumerate(skills)
            for place in range(6)
        ],
    }
    return results, pictures


def _about(method: str) -> tuple[float, bool, bool]:
    return METHODS.get(method, (0.0, False, False))


def _overlays(count: int) -> list[NDArray[np.uint8]]:
    """Scenes with a map in colours over them, as an explanation draws them."""
    overlays = []
    rng = np.random.default_rng(1)
    for scene in two_garment_scenes(count, seed=5):
        heat = cv2.resize(rng.random((8, 8)) ** 3 * 255, (64, 64)).astype(np.uint8)
        colours = cv2.applyColorMap(heat, cv2.COLORMAP_TURBO)[..., ::-1]
        overlays.append(np.asarray(cv2.addWeighted(scene.image, 0.5, colours, 0.5, 0), np.uint8))
    return overlays


def minimal() -> tuple[dict[str, Any], list[NDArray[np.uint8]]]:
    """One method and one measure over twelve pictures without masks; no baseline, no curve."""
    return {
        "format": 1,
        "model": {
            "name": "toy",
            "file": "toy.onnx",
            "sha256": "00" * 32,
            "classes": 3,
            "image_size": [8, 16],
        },
        "dataset": {
            "name": "pets",
            "pictures": 12,
            "evaluated": 12,
            "objects": 12,
            "with_masks": 0,
            "accuracy": None,
        },
        "failures": [],
        "settings": {"methods": ["rollout"], "resamples": 1000, "confidence": 0.95},
        "versions": {"onnxplain": "0.1.0"},
        "methods": [{"name": "rollout", "baseline": False, "class_specific": False}],
        "measures": [_measures()[0]],
        "values": [
            {
                "method": "rollout",
                "measure": "perturbation.zero.positive.predicted",
                "value": None,
                "low": None,
                "high": None,
                "count": 0,
            }
        ],
        "curves": [],
        "verdicts": [],
        "examples": [],
    }, []
