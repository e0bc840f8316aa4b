"""Which file holds the mask of a picture, and which of its pixel values is which object."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from onnxplain.errors import ImageError, InputError
from onnxplain.evaluation.datasets.class_names import ClassNames, read_mask_labels
from onnxplain.evaluation.datasets.files import files_below
from onnxplain.evaluation.datasets.masks import mask_values
from onnxplain.evaluation.datasets.samples import MaskFile, Object, Sample

__all__ = ["MASK_SUFFIXES", "MaskFiles"]

MASK_SUFFIXES = (".png", ".bmp", ".tif", ".tiff")
"""Kinds of files that keep the pixel values of a mask. JPEG smears them, and writers of GIF count
the values that occur anew from 0."""


class MaskFiles:
    """The masks of a dataset.

    Args:
        folder: Its `a/b/cat.png` is the mask of the picture `a/b/cat.jpg`; None: there is no such
            folder.
        labels: A text file that names the masks' pixel values, as `read_mask_labels` takes it.
        names: The model's classes.

    Raises:
        InputError: The folder or the file cannot be read, the folder has two masks for a picture.
    """

    def __init__(self, folder: Path | None, labels: Path | None, names: ClassNames) -> None:
        self.folder = folder
        self.values = None if labels is None else read_mask_labels(labels, names)
        self._labels = labels
        self._names = names
        self._by_stem: dict[str, Path] = {}
        for below in [] if folder is None else files_below(folder, MASK_SUFFIXES):
            stem = below.with_suffix("").as_posix()
            if stem in self._by_stem:
                raise InputError(
                    f"{folder}: two masks of one picture, {self._by_stem[stem].name} and "
                    f"{below.name} in {below.parent}; remove one"
                )
            self._by_stem[stem] = below

    def find(self, picture: str) -> Path | None:
        """The mask of a picture, given by its path below the dataset's folder."""
        below = self._by_stem.get(Path(picture).with_suffix("").as_posix())
        return None if below is None or self.folder is None else self.folder / below

    def object(self, label: int | None, mask: Path | None, value: int | None = None) -> Object:
        """An object of a class, with its mask.

        Args:
            label: The model's class, or None.
            mask: Its mask, or None.
            value: Its pixel value, where that is known.

        Raises:
            InputError: The pixel values are named, but none after this class.
        """
        if mask is None:
            return Object(label=label)
        if value is None and self.values is not None and label is not None:
            if label not in self.values:
                raise InputError(
                    f"{self._labels}: names no pixel value after {self._names.label(label)} which "
                    f"has masks ({mask.name}); add it"
                )
            value = self.values[label]
        return Object(label=label, mask=MaskFile(path=mask, value=value))

    def resolved(self, sample: Sample) -> Sample:
        """The sample with an object for each class on a mask, where none is said but values are
        named.

        A mask that cannot be read stays as it is, so that whoever reads it is told. A mask without
        a class of the model leaves the prediction, without mask.
        """
        if self.values is None:
            return sample
        objects: list[Object] = []
        for thing in sample.objects:
            mask = thing.mask
            if thing.label is None and isinstance(mask, MaskFile) and mask.value is None:
                objects += _on_mask(mask, self.values)
            else:
                objects.append(thing)
        return dataclasses.replace(sample, objects=tuple(objects))


def _on_mask(mask: MaskFile, values: dict[int, int]) -> list[Object]:
    try:
        present = set(np.unique(mask_values(mask.path)).tolist())
    except ImageError:
        return [Object(label=None, mask=mask)]
    found = [
        Object(label=label, mask=MaskFile(path=mask.path, value=value))
        for label, value in sorted(values.items())
        if value in present
    ]
    return found or [Object(label=None)]
