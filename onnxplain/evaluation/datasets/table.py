"""A dataset as a CSV table of pictures, their labels and their masks."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from onnxplain.errors import InputError
from onnxplain.evaluation.datasets.class_names import ClassNames
from onnxplain.evaluation.datasets.files import read_text
from onnxplain.evaluation.datasets.mask_files import MASK_SUFFIXES, MaskFiles
from onnxplain.evaluation.datasets.samples import Object, Sample

__all__ = ["read_table"]

_COLUMNS = ("path", "label", "mask", "mask_value")
_LARGEST_VALUE = 65535  # of a mask's pixel


def read_table(table: Path, names: ClassNames, masks: MaskFiles) -> list[Sample]:
    """The samples of a CSV file with the header `path,label[,mask[,mask_value]]`.

    Columns may come in any order, others beside them. Paths are relative to the file's folder. Rows
    of the same path are objects of one picture. An empty label stands for the prediction.

    Args:
        table: The file, in UTF-8.
        names: The model's classes.
        masks: The masks, where they are in a folder.

    Raises:
        InputError: The file, or a line of it, is not as above; the message names the line.
    """
    pictures: dict[str, list[Object]] = {}
    for where, row in _rows(table):
        picture = Path(row["path"])
        if picture.name in ("", ".."):
            raise InputError(f"{where}: path {row['path']!r}; expected the path of a picture")
        name = picture.as_posix()
        label = _label(row["label"], names, where)
        objects = pictures.setdefault(name, [])
        if any(label == known.label for known in objects):
            label_name = repr(row["label"]) if row["label"] else "no label"
            raise InputError(f"{where}: {name} comes a second time with {label_name}")
        mask, value = _mask(row, table.parent, where), _mask_value(row, where)
        if masks.folder is not None:
            if "mask" in row:
                raise InputError(
                    f"{table}: masks both in column 'mask' and in the folder {masks.folder}; give "
                    "one of them"
                )
            mask = masks.find(name)
        elif value is not None and mask is None:
            raise InputError(f"{where}: a mask_value, but no mask")
        objects.append(masks.object(label, mask, value))
    if not pictures:
        raise InputError(f"{table}: no rows below the header")
    return [
        Sample(name=name, image=table.parent / name, objects=tuple(objects))
        for name, objects in pictures.items()
    ]


def _rows(table: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """For each row the file and line, and what it says, by those of `_COLUMNS` that are there."""
    reader = csv.reader(io.StringIO(read_text(table), newline=""), skipinitialspace=True)
    try:
        header = [column.strip().casefold() for column in next(reader, [])]
        _check_header(header, table)
        for fields in reader:
            where = f"{table}, line {reader.line_num}"
            if not fields:
                continue
            if len(fields) != len(header):
                raise InputError(
                    f"{where}: {len(fields)} fields, but the header has {len(header)}; put values "
                    "with commas in double quotes"
                )
            row = zip(header, fields, strict=True)
            yield where, {column: field.strip() for column, field in row if column in _COLUMNS}
    except csv.Error as error:
        raise InputError(f"{table}, line {reader.line_num}: not CSV ({error})") from None


def _check_header(header: list[str], table: Path) -> None:
    if not any(header):
        raise InputError(f"{table}: the file is empty; expected a header, path,label[,mask]")
    for column in ("path", "label"):
        if column not in header:
            found = ", ".join(map(repr, header[:8]))
            raise InputError(
                f"{table}, line 1: no column {column!r}; expected a header "
                f"path,label[,mask[,mask_value]] with commas, found {found}"
            )
    for column in _COLUMNS:
        if header.count(column) > 1:
            raise InputError(f"{table}, line 1: two columns {column!r}; remove one")


def _label(text: str, names: ClassNames, where: str) -> int | None:
    if not text:
        return None
    try:
        return names.index(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _mask(row: dict[str, str], folder: Path, where: str) -> Path | None:
    if not row.get("mask"):
        return None
    mask = folder / row["mask"]
    if mask.suffix.lower() not in MASK_SUFFIXES:
        raise InputError(
            f"{where}: mask {row['mask']!r} is not of a kind that surely keeps pixel values; save "
            f"it as one of {', '.join(MASK_SUFFIXES)}"
        )
    return mask


def _mask_value(row: dict[str, str], where: str) -> int | None:
    text = row.get("mask_value")
    if not text:
        return None
    # No more than five digits: Python refuses to read numbers of thousands of them.
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= _LARGEST_VALUE):
        raise InputError(
            f"{where}: mask_value {text[:40]!r}; expected an integer in 0..255, or in "
            f"0..{_LARGEST_VALUE} for masks of 16 bits"
        )
    return int(text)
