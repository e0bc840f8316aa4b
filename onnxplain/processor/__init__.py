"""Preprocessing from the file that lies beside a published model.

Hugging Face's `preprocessor_config.json` and `processor_config.json`, and timm's `config.json`, say
how pictures become pixel values. They are read as their own library reads them; what `ImageInput`
cannot say exactly is refused by the name of its field.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from onnxplain.errors import InputError
from onnxplain.processor.hugging_face import from_hugging_face
from onnxplain.processor.settings import Preprocessing, Settings
from onnxplain.processor.timm_config import from_timm

__all__ = ["PROCESSOR_FILE", "Preprocessing", "read_processor"]

PROCESSOR_FILE = "preprocessor_config.json"
LARGEST_FILE = 2**24  # bytes; a config.json with the names of 21 thousand classes has 2 million
FILES = f"expected Hugging Face's {PROCESSOR_FILE}, or timm's config.json"


def read_processor(path: str | os.PathLike[str], *, given: Collection[str] = ()) -> Preprocessing:
    """Reads how pictures become pixel values.

    Args:
        path: Hugging Face's `preprocessor_config.json` (or its older form, of a feature extractor,
            or a `processor_config.json` with an `image_processor`), or timm's `config.json`. A
            `config.json` in the folder of a file that names no class says which it is.
        given: Fields that the caller knows better. What only they depend on is not read, so that
            nothing about it is refused.

    Raises:
        InputError: The file is missing, not one of these, or says something that is not known or
            cannot be expressed; the message names the field.
    """
    where = Path(path)
    data = _document(where)
    if isinstance(inner := data.get("image_processor"), dict):
        data = inner
    if isinstance(inner := data.get("pretrained_cfg"), dict):
        return from_timm(Settings(inner, where), given)
    named = data.get("image_processor_type") or data.get("feature_extractor_type")
    if named is None and "architecture" in data and "input_size" in data:
        return from_timm(Settings(data, where), given)  # as timm wrote it before 0.9
    if named is None and ("model_type" in data or "architectures" in data):
        raise InputError(
            f"{where}: the model's configuration, which says nothing of preprocessing; "
            f"{PROCESSOR_FILE} is the file that does"
        )
    if named is None and not data.keys() & {"image_mean", "image_std", "do_resize", "size"}:
        raise InputError(f"{where}: nothing about pictures in it; {FILES}")
    return from_hugging_face(Settings(data, where), named or _model_type(where), given)


def _document(where: Path) -> dict[str, Any]:
    if where.exists() and not where.is_file():
        raise InputError(f"{where}: not a file; {FILES}")
    try:
        with open(where, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise InputError(f"{where}: {error.strerror}; {FILES}") from None
    if len(content) > LARGEST_FILE:
        raise InputError(f"{where}: more than {LARGEST_FILE} bytes; {FILES}")
    try:
        data = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError):
        what = "not JSON" if content.strip() else "empty"
        raise InputError(f"{where}: {what}; {FILES}") from None
    if not isinstance(data, dict):
        raise InputError(f"{where}: JSON, but not an object with fields; {FILES}")
    return data


def _model_type(where: Path) -> str | None:
    """What transformers goes by where a file names no class: the model beside it."""
    try:
        return str(_document(where.with_name("config.json"))["model_type"])
    except (InputError, KeyError):
        return None
