"""Which pictures the inputs of a command name, and what the result of each is called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from onnxplain.errors import InputError

__all__ = ["PICTURE_SUFFIXES", "find_pictures", "place_results"]

PICTURE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
"""What counts as a picture in a folder. A file named by itself may have any suffix."""

_FILE_SUFFIXES = PICTURE_SUFFIXES | {".npy"}
_ENDINGS = {"overlay": ".png", "heatmap": ".heatmap.png", "npy": ".npy"}


def find_pictures(
    inputs: Iterable[Path], *, recursive: bool = False
) -> tuple[dict[Path, Path], dict[Path, str]]:
    """Lists the pictures that files and folders name.

    Args:
        inputs: files, taken as they are, and folders, of which the pictures are taken by name.
        recursive: search the folders in the folders too.

    Returns:
        For each picture its place below the output folder, without suffix: `cat` for a file, and
        `holiday/cat` for one in a folder's folder; a number is added where two would be the same. A
        picture named twice comes once. And for each folder that gives none, why.
    """
    pictures: dict[Path, Path] = {}
    failures: dict[Path, str] = {}
    seen: set[Path] = set()
    taken: set[str] = set()
    for source in inputs:
        try:
            found = _in_folder(source, recursive) if source.is_dir() else [source]
        except OSError as error:
            failures[source] = f"{source}: the folder cannot be read ({error.strerror})"
            continue
        if not found:
            hint = "" if recursive else "; --recursive searches the folders in it"
            failures[source] = f"{source}: no pictures in this folder{hint}"
        for path in found:
            if (identity := path.resolve()) in seen:
                continue
            seen.add(identity)
            below = path.relative_to(source) if source.is_dir() else Path(path.name)
            pictures[path] = _untaken(below.with_suffix(""), taken)
    return pictures, failures


def place_results(
    pictures: dict[Path, Path], output: Path, *, method: str, kind: str
) -> dict[Path, Path]:
    """Says which file holds the result of each picture.

    Args:
        pictures: from `find_pictures`.
        output: a folder; or, for a single picture, a file, told by its suffix.
        method: the method that makes the results, part of their names in a folder.
        kind: "overlay", "heatmap" or "npy".

    Raises:
        InputError: one file for several pictures, or a file that is itself an input.
    """
    if output.suffix.lower() not in _FILE_SUFFIXES or output.is_dir():
        ending = f".{method}{_ENDINGS[kind]}"
        places = {path: output / f"{below}{ending}" for path, below in pictures.items()}
    elif len(pictures) > 1:
        raise InputError(f"{output}: one file for {len(pictures)} pictures; give a folder")
    else:
        places = dict.fromkeys(pictures, output)
    sources = {path.resolve() for path in pictures}
    for place in places.values():
        if place.resolve() in sources:
            raise InputError(f"{place} is an input and would be overwritten; give another --output")
    return places


def _in_folder(folder: Path, recursive: bool) -> list[Path]:
    found: Iterator[Path] = folder.rglob("*") if recursive else folder.iterdir()
    return sorted(p for p in found if p.suffix.lower() in PICTURE_SUFFIXES and not p.is_dir())


def _untaken(below: Path, taken: set[str]) -> Path:
    """The place itself or a numbered one; capitals make no difference, as on some file systems."""
    free, number = below, 1
    while str(free).casefold() in taken:
        number += 1
        free = below.with_name(f"{below.name}-{number}")
    taken.add(str(free).casefold())
    return free
