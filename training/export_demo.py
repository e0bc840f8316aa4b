"""Export the bundled demo model: its trained weights become the explained ONNX file of the package.

    python training/export_demo.py

Reads `vit_garments.safetensors` and `.json` in `onnxplain/demo/`, as `training/garments.py` wrote
them, and writes `garments.onnx` beside them. Needs torch, timm and onnx.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

import onnxplain

__all__ = ["main"]

DEMO = Path(__file__).resolve().parents[1] / "onnxplain" / "demo"


def main() -> None:
    """Exports with every method, its map and its heatmap, and verifies the file against torch."""
    trained = json.loads((DEMO / "vit_garments.json").read_text(encoding="utf-8"))
    module = VisionTransformer(**trained["kwargs"])
    module.load_state_dict(load_file(DEMO / "vit_garments.safetensors"))
    # Where timm, and so the export, looks for the preprocessing.
    vars(module)["pretrained_cfg"] = {
        **trained["preprocessing"],
        "num_classes": trained["kwargs"]["num_classes"],
    }
    report = onnxplain.export(
        module, DEMO / "garments.onnx", labels=trained["labels"], heatmaps=True
    )
    print(report.files, report.verification)


if __name__ == "__main__":
    main()
