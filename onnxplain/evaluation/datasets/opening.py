"""Labelled pictures: the bundled scenes, a folder per class, a CSV table; with masks or without."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.contract import Contract
from onnxplain.demo.scenes import LABELS, garment_scenes, two_garment_scenes
from onnxplain.errors import InputError
from onnxplain.evaluation.datasets.class_names import ClassNames
from onnxplain.evaluation.datasets.files import files_below
from onnxplain.evaluation.datasets.mask_files import MASK_SUFFIXES, MaskFiles
from onnxplain.evaluation.datasets.samples import MaskFile, Object, Sample
from onnxplain.evaluation.datasets.table import read_table
from onnxplain.inputs import PICTURE_SUFFIXES
from onnxplain.runtime.targets import GIVE_LABELS

__all__ = ["BUNDLED", "Dataset", "open_dataset"]

BUNDLED = ("garments", "garments-pairs")
"""Names of the bundled sets: scenes of one garment, and of two that do not look alike."""

_SCENES = 500
_Scene = tuple[NDArray[np.uint8], tuple[int, ...], tuple[NDArray[np.bool_], ...]]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Samples in a fixed order, made one by one.

    Attributes:
        name: what the report calls it.
        identity: changes when anything does that results depend on: which pictures, labels and
            masks the samples are drawn from. Not when a file changes:
        stamps: of each sample, changes when its picture or masks do.
        numbers: of each sample, its place among those that they are drawn from; that of another
            limit is the same.
        count: how many samples there are.
        draw: makes them, from the first on.
    """

    name: str
    identity: str
    stamps: Sequence[str]
    numbers: Sequence[int]
    count: int
    draw: Callable[[], Iterator[Sample]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Sample]:
        return self.draw()

    def numbered(self) -> Iterator[tuple[int, Sample]]:
        """The samples, each with its number."""
        return zip(self.numbers, self, strict=True)


def open_dataset(
    source: str | Path,
    contract: Contract,
    *,
    masks: Path | None = None,
    mask_labels: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Finds the pictures of a dataset, the model's class of each, and their masks.

    Pictures and masks themselves are read later, one by one, so that a broken one does not stop a
    run over the rest.

    Args:
        source: One of these.

            - A name in `BUNDLED`, as a string.
            - A folder with a folder per class, named after it (by label as written; else whatever
              its capitals, spaces, `_` and `-`; else by class number), with pictures at any depth.
            - A folder of pictures only: these have no label but the model's prediction.
            - A CSV file, as `read_table` takes it.
        contract: The model's contract.
        masks: A folder, in which `a/b/cat.png` is the mask of picture `a/b/cat.jpg`. 0 is the
            background and 255 not counted; one value more is the object.
        mask_labels: A text file that names the values of masks with several, line i value i
            (counted from 0). A picture without label then has an object for each class of the
            model on its mask.
        limit: Take only so many pictures, drawn with the seed and kept in order; those of a smaller
            limit are among those of a larger one. Of a bundled set the first; None for 500.
        seed: Of the drawing of pictures, or of the bundled scenes.

    Raises:
        InputError: There is no such dataset, it names classes that the model does not have, or
            files of it cannot be read.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}; expected 1 picture or more")
    if seed < 0:
        raise InputError(f"seed {seed}; expected 0 or more")
    names = ClassNames(contract)
    if isinstance(source, str) and source in BUNDLED:
        if masks is not None or mask_labels is not None:
            raise InputError(f"{source} has masks of its own; give none (--masks, --mask-labels)")
        return _bundled(source, names, _SCENES if limit is None else limit, seed)
    mask_files = MaskFiles(masks, mask_labels, names)
    samples = _samples(Path(source), names, mask_files)
    _check_masks(samples, mask_files, mask_labels)
    identity = _identity([_described(sample) for sample in samples], mask_files.values)
    numbers = list(range(len(samples)))
    if limit is not None and limit < len(samples):
        chosen = np.random.default_rng(seed).permutation(len(samples))[:limit]
        numbers = sorted(chosen.tolist())
        samples = [samples[i] for i in numbers]
    return Dataset(
        name=Path(source).resolve().name,
        identity=identity,
        stamps=[_stamps(sample) for sample in samples],
        numbers=numbers,
        count=len(samples),
        draw=lambda: map(mask_files.resolved, samples),
    )


def _bundled(source: str, names: ClassNames, count: int, seed: int) -> Dataset:
    if not names.labelled:
        raise InputError(f"{source}: the model has no labels to match; {GIVE_LABELS}")
    classes = list(names.indices(LABELS, what=f"{source}: garments").values())

    def draw() -> Iterator[Sample]:
        for number, (image, labels, masks) in enumerate(_scenes(source, count, seed), start=1):
            objects = (
                Object(label=classes[label], mask=mask)
                for label, mask in zip(labels, masks, strict=True)
            )
            yield Sample(name=f"{source} {number}", image=image, objects=tuple(objects))

    return Dataset(
        name=source,
        identity=_identity(source, classes, seed),
        stamps=[""] * count,
        numbers=range(count),
        count=count,
        draw=draw,
    )


def _scenes(source: str, count: int, seed: int) -> Iterator[_Scene]:
    if source == "garments":
        for one in garment_scenes(count, seed):
            yield one.image, (one.label,), (one.mask,)
    else:
        for two in two_garment_scenes(count, seed):
            yield two.image, two.classes, two.masks


def _samples(source: Path, names: ClassNames, masks: MaskFiles) -> list[Sample]:
    if source.is_dir():
        return _read_folder(source, names, masks)
    if source.suffix.lower() == ".csv" and source.exists():
        return read_table(source, names, masks)
    found = "not a dataset" if source.exists() else "no such file or folder"
    raise InputError(
        f"{source}: {found}; expected a folder with a folder per class, a .csv file with the "
        f"header path,label, or a bundled set: {', '.join(BUNDLED)}"
    )


def _read_folder(source: Path, names: ClassNames, masks: MaskFiles) -> list[Sample]:
    if masks.folder is not None and masks.folder.resolve() == source.resolve():
        raise InputError(
            f"{source}: pictures and masks in one folder; give the masks one of theirs"
        )
    pictures = files_below(source, PICTURE_SUFFIXES)
    if not pictures:
        raise InputError(
            f"{source}: no pictures in this folder ({', '.join(sorted(PICTURE_SUFFIXES))})"
        )
    loose = [picture for picture in pictures if len(picture.parts) == 1]
    folders = dict.fromkeys(p.parts[0] for p in pictures if len(p.parts) > 1)
    if loose and folders:
        raise InputError(
            f"{source}: pictures without a class ({_first(map(str, loose))}) beside folders of "
            f"pictures ({_first(folders)}); move the pictures into the folders of their classes"
        )
    classes = names.indices(folders, what=f"{source}: expected a folder per class, found folders")
    samples = []
    for picture in pictures:
        name = picture.as_posix()
        thing = masks.object(classes.get(picture.parts[0]), masks.find(name))
        samples.append(Sample(name=name, image=source / picture, objects=(thing,)))
    return samples


def _first(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:3]) + (f" and {len(every) - 3} more" if len(every) > 3 else "")


def _check_masks(samples: list[Sample], masks: MaskFiles, mask_labels: Path | None) -> None:
    if any(thing.mask is not None for sample in samples for thing in sample.objects):
        return
    if masks.folder is not None:
        expected = Path(samples[0].name).with_suffix(".png").as_posix()
        raise InputError(
            f"{masks.folder}: no mask of any picture of the dataset; that of {samples[0].name} "
            f"would be {expected} (or {', '.join(MASK_SUFFIXES[1:])})"
        )
    if mask_labels is not None:
        raise InputError(f"{mask_labels}: names the values of masks, but there are no masks")


def _described(sample: Sample) -> list[Any]:
    """What results of the sample depend on, as far as it is known without reading its files."""
    objects: list[Any] = []
    for thing in sample.objects:
        objects.append(thing.label)
        if isinstance(thing.mask, MaskFile):
            objects += [thing.mask.path.name, thing.mask.value]
    return [sample.name, objects]


def _stamps(sample: Sample) -> str:
    """Those of the files that it is made of."""
    masks = [thing.mask.path for thing in sample.objects if isinstance(thing.mask, MaskFile)]
    return json.dumps([_stamp(path) for path in (sample.image, *masks)])


def _stamp(file: Any) -> list[int] | None:
    """Size and time of the last change; None for a file that is missing, which is said later."""
    try:
        status = Path(file).stat()
    except (OSError, ValueError):  # a CSV may hold characters that no path can
        return None
    return [status.st_size, status.st_mtime_ns]


def _identity(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
