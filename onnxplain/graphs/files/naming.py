"""What a model is called: as its graph is, or, where every graph is called so, as its file is."""

from __future__ import annotations

import os
import re
from pathlib import Path

import onnx_ir as ir

from onnxplain.contract import KEY, Contract

__all__ = ["name_of"]

# Names that exporters and tools give every graph, with - for _ and in small letters.
_OF_ANY_GRAPH = re.compile(
    r"g|graph|main|main-graph|(onnx-|jax-)?model|unknown|mxnet-converted-model"
    r"|(torch-jit|tf2onnx|jax2onnx|onnx-graphsurgeon).*"
)
# Folders between the one of a model and model.onnx: Hugging Face's own, and those of its cache.
_OF_ANY_MODEL = re.compile(r"onnx|snapshots|[0-9a-f]{40}")


def name_of(model: ir.Model, path: str | os.PathLike[str]) -> str:
    """The name of a model that was read from a file.

    Args:
        model: The model. If it has a contract (the plain graph of a bundle), it has its name there.
        path: The file. One that is called `model` is named after its folder, as in
            `vit-base/model.onnx` or `vit-base/onnx/model.onnx`.
    """
    if KEY in model.metadata_props:
        return Contract.from_json(model.metadata_props[KEY]).source.name
    name = (model.graph.name or "").strip()
    if name and not _OF_ANY_GRAPH.fullmatch(name.lower().replace("_", "-")):
        return name
    # Not resolved: what Hugging Face's cache links to is called by its digest.
    place = Path(os.path.abspath(path))
    if place.stem.lower() != "model":
        return place.stem
    folders = (folder.name for folder in place.parents)
    telling = next((name for name in folders if not _OF_ANY_MODEL.fullmatch(name)), "")
    return telling.rpartition("--")[2] or place.stem
