"""Datasets of pictures: bundled scenes, folders, masks beside them, the part that is drawn."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import toy_contract
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from onnxplain.contract import Contract
from onnxplain.demo.scenes import LABELS, garment_scenes, two_garment_scenes
from onnxplain.errors import ImageError, InputError
from onnxplain.evaluation.datasets import Dataset, open_dataset
from onnxplain.evaluation.datasets.masks import read_masks
from onnxplain.evaluation.datasets.samples import MaskFile, Sample
from onnxplain.runtime.preprocessing import prepare_picture

TABBY, EGYPTIAN_CAT, ESPRESSO = range(3)  # of the toy model
GARMENTS = toy_contract(classes=10, labels=LABELS)


def pictures(folder: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    return folder


def masks(folder: Path, **values: int | list[int]) -> Path:
    """A mask for each name: the value, or a row of them, on a part of it."""
    for name, inside in values.items():
        mask = np.zeros((8, 8), np.uint8)
        row = [inside] if isinstance(inside, int) else inside
        mask[2:4, 1 : 1 + len(row)] = row
        path = folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(path)
    return folder


def opened(source: Any, contract: Contract | None = None, **settings: Any) -> Dataset:
    return open_dataset(source, contract or toy_contract(), **settings)


def labels(dataset: Dataset) -> dict[str, list[int | None]]:
    return {sample.name: [thing.label for thing in sample.objects] for sample in dataset}


def refused(source: Any, contract: Contract | None = None, **settings: Any) -> str:
    with pytest.raises(InputError) as caught:
        opened(source, contract, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bundled_scenes_have_the_models_classes_and_their_masks() -> None:
    names = ("hat", *reversed(LABELS))
    dataset = opened("garments", toy_contract(classes=11, labels=names), limit=4, seed=3)
    assert (dataset.name, len(dataset)) == ("garments", 4)
    found = list(dataset)
    assert [sample.name for sample in found] == [f"garments {i}" for i in range(1, 5)]
    for sample, scene in zip(found, garment_scenes(4, 3), strict=True):
        (thing,) = sample.objects
        assert thing.label is not None and names[thing.label] == LABELS[scene.label]
        np.testing.assert_array_equal(sample.image, scene.image)
        np.testing.assert_array_equal(thing.mask, scene.mask)


def test_bundled_pairs_have_two_objects() -> None:
    dataset = opened("garments-pairs", GARMENTS, seed=1)
    assert len(dataset) == 500
    for sample, scene in zip(islice(dataset, 3), two_garment_scenes(3, 1), strict=True):
        assert tuple(thing.label for thing in sample.objects) == scene.classes
        assert isinstance(sample.image, np.ndarray)
        np.testing.assert_array_equal(sample.image, scene.image)
        np.testing.assert_array_equal([thing.mask for thing in sample.objects], scene.masks)
    assert [sample.name for sample in islice(dataset, 2)] == [
        "garments-pairs 1",
        "garments-pairs 2",
    ]


def test_bundled_scenes_need_the_labels_of_garments() -> None:
    message = refused("garments", toy_contract(labels=None))
    assert "no labels to match; make the file again with labels (export or ins" in message
    message = refused("garments-pairs")
    assert "garments that name no class of the model, 10 of 10" in message
    assert "no label 'T-shirt'" in message and "And 7 more" in message
    assert "masks of its own" in refused("garments", GARMENTS, masks=Path("masks"))
    assert "masks of its own" in refused("garments", GARMENTS, mask_labels=Path("names.txt"))


def test_a_path_is_never_a_bundled_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures(tmp_path / "garments", "tabby/a.png")
    monkeypatch.chdir(tmp_path)
    for source in ("./garments", Path("garments")):
        assert labels(opened(source)) == {"tabby/a.png": [TABBY]}


def test_a_folder_per_class(tmp_path: Path) -> None:
    pictures(
        tmp_path,
        *("tabby/b.PNG", "tabby/a.png", "tabby/deep/er/c.jpg", "egyptian_Cat/a.png", "2/d.webp"),
        *("Egyptian cat/e.gif", ".hidden/a.png", "tabby/.hidden.png", "tabby/.deep/a.png"),
    )
    (tmp_path / "tabby/notes.txt").write_text("not a picture")
    (tmp_path / "labels.txt").write_text("not a picture")
    (tmp_path / "empty").mkdir()
    dataset = opened(str(tmp_path))
    assert labels(dataset) == {
        "2/d.webp": [ESPRESSO],
        "Egyptian cat/e.gif": [EGYPTIAN_CAT],
        "egyptian_Cat/a.png": [EGYPTIAN_CAT],
        "tabby/a.png": [TABBY],
        "tabby/b.PNG": [TABBY],
        "tabby/deep/er/c.jpg": [TABBY],
    }
    assert (dataset.name, len(dataset)) == (tmp_path.name, 6)
    for sample in dataset:
        assert sample.image == tmp_path / sample.name
        assert sample.objects[0].mask is None
    assert list(labels(dataset)) == sorted(labels(dataset))


def test_links_to_class_folders_are_followed(tmp_path: Path) -> None:
    pictures(tmp_path / "cats", "a.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tabby").symlink_to(tmp_path / "cats", target_is_directory=True)
    assert labels(opened(tmp_path / "data")) == {"tabby/a.png": [TABBY]}


def test_links_that_lead_back_are_not(tmp_path: Path) -> None:
    pictures(tmp_path, "tabby/a.png", "espresso/a.png")
    for link, to in (("tabby/up", "."), ("tabby/over", "espresso"), ("espresso/over", "tabby")):
        (tmp_path / link).symlink_to(tmp_path / to, target_is_directory=True)
    assert set(labels(opened(tmp_path))) == {
        *("tabby/a.png", "tabby/over/a.png", "espresso/a.png", "espresso/over/a.png")
    }


@pytest.mark.parametrize(
    ("labels_of_model", "name", "index"),
    [
        (("T-shirt", "t_shirt", "x"), "T-shirt", 0),
        (("T-shirt", "t_shirt", "x"), "t_shirt", 1),
        (("T-shirt", "t_shirt", "x"), "t-SHIRT", 0),
        (("trouser", "t_shirt", "x"), "T SHIRT", 1),
        (("trouser", "shirt", "1"), "1", 2),
        (("trouser", "shirt", "0-1"), "01", 2),
        (("trouser", "shirt", "coat"), "01", 1),
    ],
)
def test_a_label_as_written_comes_first_then_loosely_then_by_number(
    labels_of_model: tuple[str, ...], name: str, index: int, tmp_path: Path
) -> None:
    pictures(tmp_path, f"{name}/a.png")
    dataset = opened(tmp_path, toy_contract(labels=labels_of_model))
    assert labels(dataset) == {f"{name}/a.png": [index]}


def test_of_two_labels_that_are_alike_neither_is_guessed(tmp_path: Path) -> None:
    contract = toy_contract(labels=("T-shirt", "t_shirt", "x"))
    message = refused(pictures(tmp_path, "T SHIRT/a.png"), contract)
    assert "no label 'T SHIRT' in this model; close ones: 't_shirt', 'T-shirt'" in message


def test_a_model_without_labels_takes_class_numbers(tmp_path: Path) -> None:
    contract = toy_contract(labels=None)
    assert labels(opened(pictures(tmp_path, "0/a.png", "02/a.png"), contract)) == {
        "0/a.png": [TABBY],
        "02/a.png": [ESPRESSO],
    }
    pictures(tmp_path, "3/a.png", "cat/a.png")
    message = refused(tmp_path, contract)
    assert message.endswith(
        "2 of 4 (3, cat): it has no labels; name classes by number, 0 to 2, or make the file again "
        "with labels (export or instrument --labels FILE)"
    )
    (tmp_path / "names.txt").write_text("background\ncat\n")
    message = refused(pictures(tmp_path, "0/a.png"), contract, mask_labels=tmp_path / "names.txt")
    assert "the model has no labels, so make the file again with labels" in message


def test_folders_that_name_no_class_come_in_one_error(tmp_path: Path) -> None:
    pictures(tmp_path, *(f"{name}/a.png" for name in ("tabbi", "espresso", "u", "v", "w", "x")))
    message = refused(tmp_path)
    assert message.startswith(f"{tmp_path}: expected a folder per class")
    assert "5 of 6: no label 'tabbi' in this model; close ones: 'tabby'. no label 'u'" in message
    assert message.endswith(". And 2 more")


def test_a_label_of_two_classes_must_be_told_by_number(tmp_path: Path) -> None:
    contract = toy_contract(labels=("crane", "crane", "cat"))
    assert "'crane' names classes 0, 1" in refused(pictures(tmp_path, "crane/a.png"), contract)


def test_folders_without_pictures_or_with_loose_ones(tmp_path: Path) -> None:
    (tmp_path / "tabby").mkdir()
    assert "no pictures in this folder (.bmp, " in refused(tmp_path)
    pictures(tmp_path, "a.png")
    assert labels(opened(tmp_path)) == {"a.png": [None]}
    pictures(tmp_path, "b.png", "c.png", "d.png", "tabby/a.png")
    message = refused(tmp_path)
    assert "(a.png, b.png, c.png and 1 more) beside folders of pictures (tabby)" in message


def test_what_is_no_dataset_says_what_is(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("path,label\n")
    for source, found in ((note, "not a dataset"), ("garmets", "no such file or folder")):
        message = refused(source)
        assert message.startswith(f"{source}: {found}; expected a folder with a folder per class")
        assert message.endswith("bundled set: garments, garments-pairs")
    assert "no such file" in refused(tmp_path / "missing.csv")
    assert "limit 0" in refused("garments", GARMENTS, limit=0)
    assert "seed -1" in refused("garments", GARMENTS, seed=-1)


def test_masks_lie_where_their_pictures_lie(tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", "tabby/a.png", "tabby/deep/a.jpg", "espresso/a.png")
    folder = masks(tmp_path / "masks", **{"tabby/a": 255, "tabby/deep/a": 9})
    (folder / "tabby/a.png").rename(folder / "tabby/a.TIF")
    found = {sample.name: sample.objects[0].mask for sample in opened(source, masks=folder)}
    assert found == {
        "espresso/a.png": None,
        "tabby/a.png": MaskFile(path=folder / "tabby/a.TIF"),
        "tabby/deep/a.jpg": MaskFile(path=folder / "tabby/deep/a.png"),
    }


def test_masks_that_fit_no_picture_or_one_twice(tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", "tabby/a.png")
    folder = masks(tmp_path / "masks", **{"a": 1})
    message = refused(source, masks=folder)
    assert "no mask of any picture" in message and "of tabby/a.png would be tabby/a.png" in message
    masks(folder, **{"tabby/a": 1})
    Image.open(folder / "tabby/a.png").save(folder / "tabby/a.tif")
    assert "two masks of one picture, a.png and a.tif in tabby" in refused(source, masks=folder)
    missing = tmp_path / "missing"
    assert f"{missing}: the folder cannot be read" in refused(source, masks=missing)
    assert "pictures and masks in one folder" in refused(source, masks=source)


NAMES = "background\nespresso\n\ndog\nEGYPTIAN_CAT\n"


def test_named_values_say_which_is_the_object(tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", "espresso/a.png", "1/a.png")
    folder = masks(tmp_path / "masks", **{"espresso/a": [1, 3], "1/a": [3, 4]})
    names = tmp_path / "names.txt"
    names.write_text(NAMES)
    found = {s.name: s.objects[0] for s in opened(source, masks=folder, mask_labels=names)}
    assert found["espresso/a.png"].mask == MaskFile(path=folder / "espresso/a.png", value=1)
    assert found["1/a.png"].mask == MaskFile(path=folder / "1/a.png", value=4)
    assert found["1/a.png"].label == EGYPTIAN_CAT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"background\nespresso\n", "names no pixel value after class 0, 'tabby', which has masks"),
        (b"tabby\ndog\n", "no line from the second on names a class"),
        (b"", "no line from the second on names a class"),
        (b"0\ntabby\n\nTabby\n", "values 1 and 3 (lines counted from 0) both name class 0"),
        (b"0\nt\xe4bby\n", "line 2: not text in UTF-8"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_names_of_values_that_cannot_be_used(text: Any, words: str, tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", "tabby/a.png")
    folder = masks(tmp_path / "masks", **{"tabby/a": 1})
    names = tmp_path / "names.txt"
    if text is not None:
        names.write_bytes(text)
    message = refused(source, masks=folder, mask_labels=names)
    assert message.startswith(str(names)) and words in message


def test_names_of_values_without_masks(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text(NAMES)
    message = refused(pictures(tmp_path / "data", "tabby/a.png"), mask_labels=names)
    assert "names.txt: names the values of masks, but there are no masks" in message


def test_unlabelled_pictures_have_the_objects_on_their_masks(tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", *(f"{name}.png" for name in "abcde"))
    folder = masks(tmp_path / "masks", a=[4, 3, 1], b=[3, 255], c=1, d=1)
    (folder / "d.png").write_bytes(b"broken")
    names = tmp_path / "names.txt"
    names.write_text(NAMES)
    dataset = opened(source, masks=folder, mask_labels=names)
    assert labels(dataset) == {
        "a.png": [EGYPTIAN_CAT, ESPRESSO],
        "b.png": [None],  # a dog and void
        "c.png": [ESPRESSO],
        "d.png": [None],
        "e.png": [None],
    }
    found = {sample.name: sample for sample in dataset}
    assert found["b.png"].objects[0].mask is found["e.png"].objects[0].mask is None

    def read(sample: Sample) -> list[Any]:
        return read_masks(sample, prepare_picture(sample.image, toy_contract().input)[1])

    cat, espresso = read(found["a.png"])
    assert np.argwhere(cat == 1).tolist() == [[2, 1], [3, 1]]
    assert np.argwhere(espresso == 1).tolist() == [[2, 3], [3, 3]]
    with pytest.raises(ImageError, match=r"d.png: the mask cannot be read"):
        read(found["d.png"])


def test_unlabelled_pictures_with_binary_masks(tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", "a.png", "b.png")
    folder = masks(tmp_path / "masks", a=255)
    first, second = opened(source, masks=folder)
    assert [first.objects[0].label, second.objects[0].label] == [None, None]
    assert first.objects[0].mask == MaskFile(path=folder / "a.png")
    assert second.objects[0].mask is None


@settings(max_examples=40, deadline=None)
@given(limit=st.integers(1, 30), seed=st.integers(0, 2**40))
def test_a_limit_draws_pictures_and_keeps_their_order(limit: int, seed: int) -> None:
    source = Path(__file__).parent / "golden"  # any folder will do for what is not read
    every = [f"{number:02}.png" for number in range(20)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "onnxplain.evaluation.datasets.opening.files_below",
            lambda *_: [Path(name) for name in every],
        )
        found = list(labels(opened(source, limit=limit, seed=seed)))
        more = list(labels(opened(source, limit=limit + 1, seed=seed)))
        dataset = opened(source, limit=limit, seed=seed)
        assert found == [every[number] for number in dataset.numbers]
        assert dataset.identity == opened(source, seed=seed).identity
    assert found == sorted(set(found))
    assert len(found) == min(limit, 20)
    assert set(found) <= set(more) <= set(every)


def test_other_seeds_draw_other_pictures(tmp_path: Path) -> None:
    pictures(tmp_path, *(f"{number}.png" for number in range(20)))
    drawn = {tuple(labels(opened(tmp_path, limit=5, seed=seed))) for seed in range(5)}
    assert len(drawn) == 5
    assert labels(opened(tmp_path, limit=5)) == labels(opened(tmp_path, limit=5, seed=0))


def test_identity_changes_with_all_that_results_depend_on(tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", "tabby/a.png", "tabby/b.png", "espresso/a.png")
    folder = masks(tmp_path / "masks", **{"tabby/a": 1, "espresso/a": 2})
    names = tmp_path / "names.txt"
    names.write_text("0\ntabby\nespresso\n")
    settings: dict[str, Any] = {"masks": folder, "mask_labels": names}
    identities = []

    def note(source: Any = source, contract: Contract | None = None, **given: Any) -> None:
        first, second = (opened(source, contract, **given) for _ in range(2))
        assert (first.identity, first.stamps) == (second.identity, second.stamps)
        identities.append((first.identity, tuple(first.stamps)))

    note()
    note(masks=folder)
    note(**settings)
    note(contract=toy_contract(labels=("espresso", "cat", "tabby")))
    names.write_text("0\nespresso\ntabby\n")
    note(**settings)
    Image.new("RGB", (9, 9)).save(source / "tabby/a.png")
    note()
    note(**settings)
    os.utime(source / "tabby/b.png", ns=(5, 5))
    note()
    os.utime(folder / "tabby/a.png", ns=(5, 5))
    note(**settings)
    (source / "espresso/a.png").rename(source / "espresso/c.png")
    note()
    for setting in ({}, {"seed": 1}):
        note("garments", GARMENTS, **setting)
        note("garments-pairs", GARMENTS, **setting)
    note("garments", toy_contract(classes=10, labels=LABELS[::-1]))
    assert len(set(identities)) == len(identities)


def test_identity_changes_with_the_names_that_tell_the_objects(tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", "a.png")
    settings: dict[str, Any] = {"masks": masks(tmp_path / "masks", a=[1, 2])}
    identities = {opened(source, **settings).identity}
    names = tmp_path / "names.txt"
    for text in ("0\ntabby\n", "0\nespresso\n", "0\n\ntabby\n"):
        names.write_text(text)
        identities.add(opened(source, mask_labels=names, **settings).identity)
    assert len(identities) == 4


def test_identity_stays_where_the_folder_is_moved(tmp_path: Path) -> None:
    source = pictures(tmp_path / "data", "tabby/a.png")
    before = opened(source)
    source.rename(tmp_path / "moved")
    moved = opened(tmp_path / "moved")
    assert (moved.identity, moved.stamps) == (before.identity, before.stamps)
