"""Datasets as CSV tables: their columns, several objects of a picture, errors with their lines."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LABELS, toy_contract
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from onnxplain.errors import InputError
from onnxplain.evaluation.datasets import Dataset, open_dataset
from onnxplain.evaluation.datasets.samples import MaskFile

TABBY, EGYPTIAN_CAT, ESPRESSO = range(3)


def table(folder: Path, text: str | bytes) -> Path:
    path = folder / "data.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def opened(source: Path, **settings: Any) -> Dataset:
    return open_dataset(source, toy_contract(), **settings)


def refused(source: Path, **settings: Any) -> str:
    with pytest.raises(InputError) as caught:
        opened(source, **settings)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(source.parent))
    return message.removeprefix(f"{source.parent}/")


def labels(dataset: Dataset) -> dict[str, list[int | None]]:
    return {sample.name: [thing.label for thing in sample.objects] for sample in dataset}


@pytest.mark.parametrize(
    "text",
    [
        "path,label\nb.png,tabby\na/c.png,2\nd.png,\n",
        "path,label\r\nb.png,tabby\r\n\r\na/c.png,espresso\r\nd.png,\r\n",
        '\ufeffLabel , note, Path\nTABBY, "x, y", b.png\n espresso ,,./a//c.png\n,,d.png',
        'path,label,mask,mask_value\nb.png,"tabby",,\n"a/c.png",2,,\nd.png,,,\n',
    ],
)
def test_the_same_table_written_in_several_ways(text: str, tmp_path: Path) -> None:
    dataset = opened(table(tmp_path, text))
    assert labels(dataset) == {"b.png": [TABBY], "a/c.png": [ESPRESSO], "d.png": [None]}
    assert list(labels(dataset)) == ["b.png", "a/c.png", "d.png"]  # as in the table
    assert [sample.image for sample in dataset] == [tmp_path / name for name in labels(dataset)]
    assert (dataset.name, len(dataset)) == ("data.csv", 3)


def test_rows_of_one_path_are_objects_of_one_picture(tmp_path: Path) -> None:
    text = (
        "path,label,mask,mask_value\n"
        "a.png,espresso,masks/a.png,7\n"
        "b.png,tabby,masks/b.TIFF,\n"
        "./a.png,tabby,masks/a.png,0\n"
        "a.png,,,\n"
    )
    first, second = opened(table(tmp_path, text))
    assert [thing.label for thing in first.objects] == [ESPRESSO, TABBY, None]
    assert [thing.mask for thing in first.objects] == [
        MaskFile(path=tmp_path / "masks/a.png", value=7),
        MaskFile(path=tmp_path / "masks/a.png", value=0),
        None,
    ]
    assert second.objects[0].mask == MaskFile(path=tmp_path / "masks/b.TIFF")


def test_names_of_values_apply_where_no_value_is_said(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("0\nespresso\ntabby\n")
    Image.fromarray(np.array([[1, 2, 5]], np.uint8)).save(tmp_path / "m.png")
    text = "path,label,mask,mask_value\na.png,tabby,m.png,\na.png,2,m.png,5\nb.png,,m.png,\n"
    first, second = opened(table(tmp_path, text), mask_labels=tmp_path / "names.txt")
    mask = tmp_path / "m.png"
    assert [thing.mask for thing in first.objects] == [
        MaskFile(path=mask, value=2),
        MaskFile(path=mask, value=5),
    ]
    assert [(thing.label, thing.mask) for thing in second.objects] == [
        (TABBY, MaskFile(path=mask, value=2)),
        (ESPRESSO, MaskFile(path=mask, value=1)),
    ]


def test_masks_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "masks"
    (folder / "a").mkdir(parents=True)
    Image.new("L", (8, 8)).save(folder / "a/c.png")
    text = "path,label,mask_value\na/c.jpg,tabby,3\nb.jpg,2,\n"
    first, second = opened(table(tmp_path, text), masks=folder)
    assert first.objects[0].mask == MaskFile(path=folder / "a/c.png", value=3)
    assert second.objects[0].mask is None
    both = table(tmp_path, "path,label,mask\na/c.jpg,tabby,\n")
    assert "data.csv: masks both in column 'mask' and in the folder" in refused(both, masks=folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "data.csv: the file is empty; expected a header, path,label[,mask]"),
        (b"\n\n", "data.csv: the file is empty"),
        (b"path,label\n\n", "data.csv: no rows below the header"),
        (b"path;label\na.png;tabby\n", "data.csv, line 1: no column 'path'; expected a header pa"),
        (b"path,class\na.png,tabby\n", "with commas, found 'path', 'class'"),
        (b"a.png,tabby\n", "data.csv, line 1: no column 'path'"),
        (b"path,label,label\na,0,1\n", "data.csv, line 1: two columns 'label'; remove one"),
        (b"path,label\na.png,0\nb.png\n", "data.csv, line 3: 1 fields, but the header has 2"),
        (b"path,label\na.png,Egyptian cat, old\n", "data.csv, line 2: 3 fields, but the header"),
        (b"path,label\n,tabby\n", "data.csv, line 2: path ''; expected the path of a picture"),
        (b"path,label\n..,tabby\n", "data.csv, line 2: path '..'; expected the path"),
        (
            b"path,label\na.png,0\nb.png,espreso\n",
            "data.csv, line 3: no label 'espreso' in this model; close ones: 'espresso'",
        ),
        (b"path,label\na.png,3\n", "data.csv, line 2: target 3 is not in 0..2"),
        (
            b"path,label\na.png,tabby\nb.png,0\n./a.png,0\n",
            "data.csv, line 4: a.png comes a second time with '0'",
        ),
        (b"path,label\na.png,\na.png,\n", "line 3: a.png comes a second time with no label"),
        (b"path,label\na.png,0\nb\xe4.png,0\n", "data.csv, line 3: not text in UTF-8"),
        ("path,label\na.png,0\n".encode("utf-16"), "data.csv, line 1: not text in UTF-8"),
        (
            b"path,label,mask,mask_value\na.png,0,m.png,65536\n",
            "data.csv, line 2: mask_value '65536'; expected an integer in 0..255, or in 0..65535",
        ),
        (b"path,label,mask,mask_value\na.png,0,m.png,-1\n", "line 2: mask_value '-1'; expected"),
        (b"path,label,mask,mask_value\na.png,0,m.png,1.0\n", "line 2: mask_value '1.0'; expected"),
        (b"path,label,mask,mask_value\na.png,0,,7\n", "line 2: a mask_value, but no mask"),
        (
            b"path,label,mask\na.png,0,m.jpg\n",
            "data.csv, line 2: mask 'm.jpg' is not of a kind that surely keeps pixel values; save "
            "it as one of .png, .bmp, .tif, .tiff",
        ),
        (b"path,label\n" + b"a" * 200_000, "data.csv, line 2: not CSV (field larger than"),
    ],
)
def test_errors_name_the_file_and_the_line(text: bytes, message: str, tmp_path: Path) -> None:
    assert message in refused(table(tmp_path, text))


def test_files_that_are_missing_are_found_out_when_they_are_read(tmp_path: Path) -> None:
    (sample,) = opened(table(tmp_path, "path,label,mask\na.png,0,m.png\n"))
    assert sample.image == tmp_path / "a.png"
    before = opened(tmp_path / "data.csv")
    Image.new("L", (8, 8)).save(tmp_path / "m.png")
    after = opened(tmp_path / "data.csv")
    assert after.identity == before.identity
    assert after.stamps != before.stamps


def test_identity_changes_with_the_table(tmp_path: Path) -> None:
    rows = ["a.png,0,m.png,1", "a.png,1,m.png,1", "a.png,1,m.png,2", "b.png,1,m.png,2", "a.png,,,"]
    found = {
        opened(table(tmp_path, f"path,label,mask,mask_value\n{row}\n")).identity for row in rows
    }
    assert len(found) == len(rows)


@settings(max_examples=100, deadline=None)
@given(
    body=st.one_of(
        st.binary(max_size=60), st.text(alphabet='a0,"\n\r \0./;é', max_size=60).map(str.encode)
    ),
    header=st.sampled_from([b"", b"path,label\n", b"path,label,mask_value\n"]),
)
@example(body=b"/,0,\n", header=b"path,label,mask_value\n")
@example(body=b'"a\0b",0\n', header=b"path,label\n")
def test_whatever_a_table_holds_is_a_dataset_or_an_error(
    body: bytes, header: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    (folder / "masks").mkdir(parents=True, exist_ok=True)
    source = table(folder, header + body)
    for masks in (None, folder / "masks"):
        try:
            dataset = opened(source, masks=masks)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert len(dataset) == len(labels(dataset)) > 0


@settings(max_examples=50, deadline=None)
@given(
    rows=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0/\r\n\\"), min_size=1).filter(
            lambda name: name == name.strip() and name not in (".", "..") and '"' not in name[:1]
        ),
        st.sampled_from(["", *LABELS]),
        min_size=1,
        max_size=5,
    )
)
def test_what_a_csv_writer_writes_is_read(
    rows: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([("path", "label"), *rows.items()])
    expected = {name: [LABELS.index(label) if label else None] for name, label in rows.items()}
    assert labels(opened(table(tmp_path_factory.getbasetemp(), text.getvalue()))) == expected
