"""The runtime works where torch, timm and onnx cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest
from conftest import ROOT, ToyFile

BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    names = {"torch", "torchvision", "timm", "onnx", "onnx_ir", "onnxscript"}

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
"""


def run(code: str, *arguments: str, without: Iterable[str] = ()) -> str:
    """Runs code in a fresh interpreter that cannot import the heavy packages."""
    more = f"Block.names |= {set(without)!r}" if without else ""
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + more + textwrap.dedent(code), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_the_block_blocks() -> None:
    with pytest.raises(AssertionError, match="onnx is blocked"):
        run("import onnx")


def test_importing_onnxplain_loads_neither_numpy_nor_onnxruntime() -> None:
    code = """
    import onnxplain
    print(sorted({"numpy", "onnxruntime", "PIL", "cv2"} & set(sys.modules)))
    """
    assert run(code) == "[]"


def test_methods_need_numpy_only() -> None:
    code = """
    import numpy as np
    from onnxplain.runtime import methods
    print(methods.rollout([np.full((1, 5, 5), 0.2)]).round(6).tolist())
    """
    assert run(code, without=["onnxruntime", "PIL", "cv2"]) == "[[0.1, 0.1], [0.1, 0.1]]"


def test_without_onnxruntime_the_error_says_what_to_install() -> None:
    code = """
    import onnxplain as ox
    try:
        ox.Explainer("vit.onnx")
    except ox.MissingDependencyError as error:
        print(error)
    """
    assert run(code, without=["onnxruntime"]).endswith("install onnxplain[cpu] or onnxplain[gpu]")


def test_the_whole_runtime(toy_file: ToyFile, toy_bundle: Path, tmp_path: Path) -> None:
    code = """
    import numpy as np
    import onnxplain as ox
    single, bundle, out = sys.argv[1:]
    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    for path in (single, bundle):
        explainer = ox.Explainer(path)
        for method in explainer.methods:
            result = explainer.explain(picture, method=method, target="tabby")
            result.save(out)
        explainer.taps([picture, picture])
        assert len(list(explainer.explain_many([picture] * 3, batch_size=2))) == 3
    print(*explainer.methods)
    """
    out = tmp_path / "out"
    methods = run(code, str(toy_file()), str(toy_bundle), str(out)).split()
    assert sorted(path.name for path in out.iterdir()) == sorted(f"image.{m}.png" for m in methods)
    assert "generic_attention" in methods
