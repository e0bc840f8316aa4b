"""What a hostile user gives `evaluate`: odd files, folders of others, models that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import sqlite3
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from linear_model import write_linear_model
from numpy.typing import NDArray
from PIL import Image
from scipy.integrate import trapezoid

import onnxplain as ox
from onnxplain import ImageError, InputError
from onnxplain.evaluation import run
from onnxplain.evaluation.progress import FILE, Progress
from onnxplain.evaluation.report import write_report
from onnxplain.runtime.model import Model
from onnxplain.runtime.preprocessing import prepare_picture

REPORT = ("index.html", "results.csv", "results.json")


@pytest.fixture(scope="module")
def garments() -> Iterator[Path]:
    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as path:
        yield path


def evaluate(model: Path, dataset: str | Path, folder: Path | None, **changes: Any) -> Any:
    options: dict[str, Any] = {"methods": ["rollout"], "device": "cpu", "threads": 1}
    options |= {"measures": ["insertion_deletion"], "steps": 1, "resamples": 10}
    return ox.evaluate(model, dataset, folder, **{**options, **changes})


def picture(path: str | bytes | Path, grey: int = 128) -> None:
    with open(path, "wb") as file:
        Image.new("RGB", (64, 64), (grey, grey, grey)).save(file, "PNG")


def test_file_names_that_are_not_utf_8(garments: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data" / "bag"
    folder.mkdir(parents=True)
    try:
        picture(os.fsencode(folder) + b"/\xff.png")
    except OSError:
        pytest.skip("this file system refuses such names")
    (folder / os.fsdecode(b"\xfe.png")).write_bytes(b"no picture")
    for _ in range(2):  # the second time from what is kept
        found = evaluate(garments, tmp_path / "data", tmp_path / "report")
        assert found.results["dataset"]["evaluated"] == 1
        assert [name for name, _ in found.failures] == [os.fsdecode(b"bag/\xfe.png")]


def test_localisation_without_masks_is_an_error(garments: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    picture(tmp_path / "data/a.png")
    with pytest.raises(InputError, match="localisation can be measured without masks; give them"):
        evaluate(garments, tmp_path / "data", None, measures=["localisation"])


def test_localisation_of_masks_without_objects_is_an_error(garments: Path, tmp_path: Path) -> None:
    for name in ("data", "masks"):
        (tmp_path / name).mkdir()
        picture(tmp_path / f"{name}/a.png", grey=0)
    folders = {"dataset": tmp_path / "data", "masks": tmp_path / "masks"}
    with pytest.raises(InputError, match="as no mask shows an object and a background in what the"):
        evaluate(garments, folder=None, measures=["localisation"], **folders)


def test_an_object_that_is_all_that_the_model_sees_is_not_localised(
    garments: Path, tmp_path: Path
) -> None:
    rows = ["path,label,mask,mask_value"]
    for name, background in (("all", 7), ("half", 0)):
        picture(tmp_path / f"{name}.png")
        mask = np.full((64, 64), 7, np.uint8)
        mask[:32] = background
        Image.fromarray(mask).save(tmp_path / f"mask-{name}.png")
        rows.append(f"{name}.png,bag,mask-{name}.png,7")
    (tmp_path / "data.csv").write_text("\n".join(rows))
    found = evaluate(garments, tmp_path / "data.csv", None, measures=["localisation"])
    assert found.value("rollout", "pointing_game").count == 1


def test_a_link_as_the_folder(garments: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("folder")
    with pytest.raises(InputError, match="a link to nothing; expected a folder for the report"):
        evaluate(garments, "garments", tmp_path / "link", limit=1)
    (tmp_path / "folder").mkdir()
    evaluate(garments, "garments", tmp_path / "link", limit=1)
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == sorted([FILE, *REPORT])


def test_a_folder_that_cannot_be_written(garments: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("whoever runs this may write anywhere")
    with pytest.raises(InputError, match="cannot be written to; choose another folder"):
        evaluate(garments, "garments", tmp_path, limit=1)


def test_a_report_among_the_pictures_is_none_of_them(garments: Path, tmp_path: Path) -> None:
    (tmp_path / "bag").mkdir()
    picture(tmp_path / "bag/a.png")
    for folder in (tmp_path, tmp_path / "bag/report"):
        for _ in range(2):
            assert evaluate(garments, tmp_path, folder).results["dataset"]["pictures"] == 1


def test_a_picture_without_finite_logits_is_named(
    garments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(3):
        (tmp_path / "data").mkdir(exist_ok=True)
        picture(tmp_path / f"data/{i}.png", grey=100 * i)
    answer = Model._run

    def broken(self: Model, graph: Any, feeds: Any, names: list[str]) -> list[NDArray[Any]]:
        found = answer(self, graph, feeds, names)
        bright: NDArray[np.bool_] = feeds["pixel_values"].mean(axis=(1, 2, 3)) > 0.5
        found[0][bright, 0] = np.nan
        return found

    monkeypatch.setattr(Model, "_run", broken)
    found = evaluate(garments, tmp_path / "data", None)
    ((name, error),) = found.failures
    assert name == "2.png"
    assert "logits are not finite" in error
    assert found.results["dataset"]["evaluated"] == 2
    assert all(value["value"] is not None for value in found.results["values"])


@pytest.mark.parametrize("name", REPORT)
def test_files_of_others_are_kept(garments: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"holds an? {name} that is not of an evaluation"):
        evaluate(garments, "garments", tmp_path, limit=1)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("application", [0, 7])
@pytest.mark.parametrize("restart", [False, True])
def test_a_database_of_others_is_kept(
    garments: Path, tmp_path: Path, application: int, restart: bool
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as database:
        # One with an id of its own may even have a table as ours.
        columns = "number INTEGER PRIMARY KEY, record BLOB" if application else "title TEXT"
        database.execute(f"CREATE TABLE levels ({columns})")
        database.execute(f"PRAGMA application_id = {application}")
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(InputError, match="a database that is not of an evaluation"):
        evaluate(garments, "garments", tmp_path, limit=1, restart=restart)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).read_bytes() == before


def test_progress_of_an_early_version_goes_on(garments: Path, tmp_path: Path) -> None:
    evaluate(garments, "garments", tmp_path, limit=1)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE)) as database:
        assert database.execute("PRAGMA application_id").fetchone()[0]
        database.execute("PRAGMA application_id = 0")  # as it was
    told: list[tuple[str, int, int]] = []
    evaluate(garments, "garments", tmp_path, limit=1, step=lambda *what: told.append(what))
    assert told[0] == ("evaluating", 1, 1)


def test_an_error_of_the_disk_says_what_it_is(tmp_path: Path) -> None:
    progress = Progress(tmp_path, {}, {0: ""}, restart=False)
    with contextlib.closing(progress):
        progress._database.execute("PRAGMA max_page_count = 1")
        with pytest.raises(OSError, match=rf"^\[Errno {errno.ENOSPC}\] database or disk is full"):
            progress.add_level(1, np.zeros(10_000))
        progress._database.execute("PRAGMA query_only = 1")
        with pytest.raises(OSError, match=rf"^\[Errno {errno.EIO}\] attempt to write a readonly"):
            progress.add_level(1, np.zeros(1))


def test_a_dataset_in_the_folder_of_the_report_is_not_overwritten(
    garments: Path, tmp_path: Path
) -> None:
    picture(tmp_path / "a.png")
    table = tmp_path / "results.csv"
    table.write_text("path,label\na.png,bag\n")
    with pytest.raises(InputError, match=r"holds a results\.csv"):
        evaluate(garments, table, tmp_path)
    assert table.read_text() == "path,label\na.png,bag\n"


def test_no_half_of_a_report_is_left(
    garments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(results: Any, pictures: Any, folder: Path) -> None:
        write_report(results, pictures, folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "write_report", killed)
    with pytest.raises(OSError, match="No space"):
        evaluate(garments, "garments", tmp_path, limit=2)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    monkeypatch.undo()
    evaluate(garments, "garments", tmp_path, limit=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([FILE, *REPORT])


def test_curves_have_the_areas_that_are_reported(garments: Path) -> None:
    found = evaluate(garments, "garments", None, limit=2, steps=7)  # does not divide 64 patches
    for curve in found.results["curves"]:
        value = found.value(curve["method"], curve["measure"]).value
        assert trapezoid(curve["y"], curve["x"]) == pytest.approx(value, abs=1e-12)


def test_weights_in_a_file_of_any_name_count_as_the_model(garments: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    loaded = onnx.load(garments)
    onnx.save(loaded, model, save_as_external_data=True, location="other")
    evaluate(model, "garments", tmp_path / "report", limit=1)
    weights = bytearray((tmp_path / "other").read_bytes())
    weights[-4096:] = bytes(4096)
    (tmp_path / "other").write_bytes(weights)
    with pytest.raises(InputError, match="another model, or of this one before its files changed"):
        evaluate(model, "garments", tmp_path / "report", limit=1)


def test_a_report_in_the_folder_of_the_bundle(garments: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    shutil.copy(garments, bundle / "maps.onnx")
    before = run._digest(bundle)
    for name in (*REPORT, FILE, f"{FILE}-wal"):
        (bundle / name).write_text("of the report")
    assert run._digest(bundle) == before
    (bundle / "maps.onnx").write_bytes(b"another model")
    assert run._digest(bundle) != before


def test_a_picture_that_changed(garments: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    picture(tmp_path / "data/a.png")
    evaluate(garments, tmp_path / "data", tmp_path / "report")
    picture(tmp_path / "data/a.png", grey=1)
    with pytest.raises(InputError, match=r"of a\.png before its picture or mask changed; choose"):
        evaluate(garments, tmp_path / "data", tmp_path / "report")
    evaluate(garments, tmp_path / "data", tmp_path / "report", restart=True)
    picture(tmp_path / "data/b.png")
    with pytest.raises(InputError, match="or of this one with other pictures, labels or masks"):
        evaluate(garments, tmp_path / "data", tmp_path / "report")


def test_a_picture_that_was_repaired(garments: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in "abc":
        picture(tmp_path / f"data/{name}.png", grey=ord(name))
    evaluate(garments, tmp_path / "data", tmp_path / "undisturbed")
    (tmp_path / "data/b.png").write_bytes(b"no picture")
    first = evaluate(garments, tmp_path / "data", tmp_path / "report")
    assert [name for name, _ in first.failures] == ["b.png"]
    picture(tmp_path / "data/b.png", grey=ord("b"))
    assert evaluate(garments, tmp_path / "data", tmp_path / "report").failures == ()
    for name in REPORT:
        expected = (tmp_path / "undisturbed" / name).read_bytes()
        assert (tmp_path / "report" / name).read_bytes() == expected


def test_a_picture_that_failed_is_tried_again(
    garments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"measures": ["insertion_deletion", "sanity"], "limit": 3}
    evaluate(garments, "garments", tmp_path / "undisturbed", **asked)
    calls = iter(range(99))

    def failing_once(*arguments: Any) -> Any:
        if next(calls) == 1:
            raise ImageError("permission denied")
        return prepare_picture(*arguments)

    monkeypatch.setattr("onnxplain.evaluation.work.prepare_picture", failing_once)
    first = evaluate(garments, "garments", tmp_path / "report", **asked)
    assert len(first.failures) == 1
    again = evaluate(garments, "garments", tmp_path / "report", **asked)
    assert again.failures == ()
    for name in REPORT:
        expected = (tmp_path / "undisturbed" / name).read_bytes()
        assert (tmp_path / "report" / name).read_bytes() == expected


def test_a_model_with_one_class(tmp_path: Path) -> None:
    weights = np.ones((4, 4), np.float32)
    model = write_linear_model(tmp_path / "linear.onnx", weights, 1, (2, 2))
    contract = dataclasses.replace(ox.Explainer(model, device="cpu").contract, classes=1)
    assert run._groups(None, contract) == ["localisation"]
    with pytest.raises(InputError, match="one class, which is always predicted; expected local"):
        run._groups(["sanity"], contract)
