"""timm's setting for fused attention, read when it is imported, is nothing to us."""

from __future__ import annotations

import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from conftest import ROOT

EXPORT = """
import sys
import torch
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
import onnxplain as ox

torch.manual_seed(0)
vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2)
swin = SwinTransformer(img_size=16, patch_size=2, embed_dim=8, depths=(1,), num_heads=(2,))
print(vit.blocks[0].attn.fused_attn, swin.layers[0].blocks[0].attn.fused_attn)
for name, model in (("vit", vit), ("swin", swin)):
    ox.export(model, f"{sys.argv[1]}/{name}.onnx", image_size=16)
"""


def test_the_files_are_the_same(tmp_path: Path) -> None:
    running = {}
    for setting in "012":
        (tmp_path / setting).mkdir()
        environment = os.environ | {"TIMM_FUSED_ATTN": setting, "PYTHONPATH": str(ROOT)}
        running[setting] = subprocess.Popen(
            [sys.executable, "-c", EXPORT, str(tmp_path / setting)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
    said = {setting: process.communicate()[0] for setting, process in running.items()}
    assert said == {"0": "False False\n", "1": "True False\n", "2": "True True\n"}  # timm heeds it
    for name in ("vit.onnx", "swin.onnx"):
        files = [tmp_path / setting / name for setting in "012"]
        assert len({sha256(file.read_bytes()).digest() for file in files}) == 1, name
