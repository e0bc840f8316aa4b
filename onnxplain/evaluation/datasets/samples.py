"""What a dataset consists of: pictures, the objects asked about, and where their masks are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MaskFile", "Object", "Sample"]


@dataclass(frozen=True, kw_only=True)
class MaskFile:
    """A picture of pixel values, of which one is the object.

    Attributes:
        path: the file.
        value: the object's pixel value; None where the mask has only one, beside 0 and void.
    """

    path: Path
    value: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Object:
    """Something on a picture that the model is asked about.

    Attributes:
        label: the model's class index, or None for the prediction.
        mask: its mask as a file, or as bool [height, width] of the picture, or None.
    """

    label: int | None
    mask: MaskFile | NDArray[np.bool_] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A picture and its objects.

    Attributes:
        name: unique in the dataset.
        image: what `onnxplain.runtime.preprocessing.prepare_picture` takes: a path, or uint8
            [height, width, 3].
        objects: at least one.
    """

    name: str
    image: Path | NDArray[Any]
    objects: tuple[Object, ...]
