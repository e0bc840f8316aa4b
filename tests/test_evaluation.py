"""`evaluate` from end to end: numbers that are known, what goes wrong, a run that is killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from linear_model import write_linear_model
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain import InputError, UnsupportedModelError
from onnxplain.cli import app
from onnxplain.demo.scenes import garment_scenes
from onnxplain.evaluation.datasets import Sample
from onnxplain.evaluation.progress import FILE
from onnxplain.evaluation.study import Study

EXACT = 1e-9  # sums of multiples of 1/64 are exact in float32, softmax is taken in float64
SIDE, THRESHOLD = 10, 2000
GRID, STEPS = (5, 5), 5

# On the linear model every pixel of a white picture adds its weight, one of 1..100 by 64, to the
# first logit. `attnlrp` is the ideal map of that, `lrp` is it upside down.


@pytest.fixture(scope="module")
def weights() -> NDArray[np.float32]:
    order = np.random.default_rng(3).permutation(SIDE * SIDE) + 1
    return (order.reshape(SIDE, SIDE) / 64).astype(np.float32)


@pytest.fixture(scope="module")
def linear(weights: NDArray[np.float32], tmp_path_factory: pytest.TempPathFactory) -> ox.Evaluation:
    """Two white pictures: one labelled with what the model predicts, one with the other class."""
    folder = tmp_path_factory.mktemp("linear")
    model = write_linear_model(folder / "linear.onnx", weights, THRESHOLD / 64, GRID)
    for name in ("a", "b"):
        Image.new("RGB", (SIDE, SIDE), "white").save(folder / f"{name}.png")
    (folder / "data.csv").write_text("path,label\na.png,bright\nb.png,dark\n")
    return ox.evaluate(
        model,
        folder / "data.csv",
        measures=["perturbation", "insertion_deletion"],
        steps=STEPS,
        device="cpu",
    )


def trapezoid(y: list[float], width: float) -> float:
    return math.fsum((a + b) / 2 * width for a, b in itertools.pairwise(y))


def bright(total: float) -> float:
    """The probability of the first class where so much is left of 1 + ... + 100."""
    return 1 / (1 + math.exp((THRESHOLD - total) / 64))


def left(*, highest_first: bool) -> list[float]:
    """What is left of 1 + ... + 100 when 0, 10, ..., 90 of them are gone."""
    sums = [m * (m + 1) / 2 for m in range(100, 0, -10)]
    if highest_first:
        return sums
    return [5050 - (100 - m) * (101 - m) / 2 for m in range(100, 0, -10)]


@pytest.mark.parametrize(("method", "ideal"), [("attnlrp", True), ("lrp", False)])
class TestLinearModel:
    @pytest.mark.parametrize("kind", ["positive", "negative"])
    def test_top_1_is_that_of_the_closed_form(
        self, linear: ox.Evaluation, method: str, ideal: bool, kind: str
    ) -> None:
        sums = left(highest_first=ideal == (kind == "positive"))
        right = trapezoid([float(s > THRESHOLD) for s in sums], 0.1)
        # Of the second picture the label is the other class, which is right when the first is not.
        for asked in ("predicted", "target"):
            found = linear.value(method, f"perturbation.zero.{kind}.{asked}")
            assert found.value == pytest.approx((right + 0.9 - right) / 2, abs=EXACT)
            assert found.count == 2

    @pytest.mark.parametrize("asked", ["predicted", "target"])
    def test_difference_is_that_of_the_closed_form(
        self, linear: ox.Evaluation, method: str, ideal: bool, asked: str
    ) -> None:
        least, most = (
            trapezoid([bright(s) for s in left(highest_first=order)], 0.1)
            for order in (not ideal, ideal)
        )
        # The same map of the other class, whose probability is the rest: the differences cancel.
        expected = least - most if asked == "predicted" else 0
        found = linear.value(method, f"perturbation.zero.difference.{asked}").value
        assert found == pytest.approx(expected, abs=EXACT)

    def test_deletion_is_that_of_the_closed_form(
        self, linear: ox.Evaluation, weights: NDArray[np.float32], method: str, ideal: bool
    ) -> None:
        patches = (weights * 64).reshape(5, 2, 5, 2).sum(axis=(1, 3)).reshape(-1)
        ordered = sorted(patches.tolist(), reverse=ideal)
        curve = [bright(sum(ordered[5 * step :])) for step in range(STEPS + 1)]
        found = linear.value(method, "deletion.predicted").value
        assert found == pytest.approx(trapezoid(curve, 1 / STEPS), abs=EXACT)


def test_a_perfect_map_is_best_and_its_opposite_worst(linear: ox.Evaluation) -> None:
    measure = "perturbation.zero.difference.predicted"
    values = {name: linear.value(name, measure).value for name in linear.methods}
    assert sorted(values, key=lambda name: values[name] or 0)[:: len(values) - 1] == [
        "lrp",
        "attnlrp",
    ]
    assert linear.difference("attnlrp", "lrp", measure).value == pytest.approx(
        (values["attnlrp"] or 0) - (values["lrp"] or 0), abs=EXACT
    )


# The bundled model


@pytest.fixture(scope="module")
def garments() -> Iterator[Path]:
    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as path:
        yield path


@pytest.fixture(scope="module")
def pairs(garments: Path) -> ox.Evaluation:
    methods = ["transformer_attribution", "generic_attention", "rollout", "raw_attention"]
    options: dict[str, Any] = {"measures": ["localisation"], "limit": 60, "device": "cpu"}
    return ox.evaluate(garments, "garments-pairs", methods=methods, **options)


def test_everything_is_measured(garments: Path, tmp_path: Path) -> None:
    found = ox.evaluate(
        garments,
        "garments-pairs",
        tmp_path / "report",
        methods=["rollout", "generic_attention"],
        fills=["zero", "mean", "blur", "road"],
        limit=6,
        sanity_pictures=6,
        resamples=50,
        device="cpu",
    )
    values = {(v["method"], v["measure"]): v for v in found.results["values"]}
    measures = [measure["name"] for measure in found.results["measures"]]
    assert {measure["group"] for measure in found.results["measures"]} == {
        "perturbation",
        "insertion_deletion",
        "localisation",
        "sanity",
    }
    assert found.methods == ("rollout", "generic_attention", "random", "center_gaussian")
    for measure in found.results["measures"]:
        low, high = measure["range"]
        for method in found.methods:
            value = values[method, measure["name"]]
            assert low <= value["value"] <= high, (method, measure["name"])
            assert value["low"] <= value["value"] + 1e-12
            assert value["value"] <= value["high"] + 1e-12
    assert len(values) == len(measures) * len(found.methods)
    # rollout does not know the class; random weights do not concern the baselines.
    assert values["rollout", "class_sensitivity"]["value"] == 1
    assert values["random", "randomisation"]["value"] == 1
    assert values["generic_attention", "randomisation"]["value"] < 0.9
    assert values["rollout", "pointing_game"]["count"] == 12
    assert json.loads((tmp_path / "report/results.json").read_text()) == found.results
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        "index.html",
        "results.csv",
        "results.json",
        FILE,
    }


@pytest.mark.parametrize("than", ["rollout", "raw_attention", "random"])
def test_where_the_class_matters_the_order_of_the_papers_holds(
    pairs: ox.Evaluation, than: str
) -> None:
    for better in ("transformer_attribution", "generic_attention"):
        for measure in ("pixel_accuracy", "miou", "map", "pointing_game"):
            difference = pairs.difference(better, than, measure)
            assert difference.low is not None and difference.low > 0, (better, measure)


def test_curves_begin_with_the_whole_picture(garments: Path) -> None:
    found = ox.evaluate(
        garments, "garments", methods=["rollout"], limit=4, measures=["perturbation"], device="cpu"
    )
    accuracy = found.results["dataset"]["accuracy"]
    curves = {(c["method"], c["measure"]): c for c in found.results["curves"]}
    for method in found.methods:
        for kind in ("positive", "negative"):
            curve = curves[method, f"perturbation.zero.{kind}.target"]
            assert curve["y"][0] == accuracy
            assert curve["x"] == [i / 10 for i in range(10)]
            area = trapezoid(curve["y"], 0.1)
            value = found.value(method, f"perturbation.zero.{kind}.target").value
            assert value == pytest.approx(area, abs=1e-12)


def test_a_blank_map_scores_as_the_random_one(
    garments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = Study._maps

    def blank(self: Study, *arguments: object) -> object:
        found = maps(self, *arguments)  # type: ignore[arg-type]
        for key, one in found.items():
            if key[0] == "gradcam":
                zero = np.zeros_like(one.grid), np.zeros_like(one.heatmap)
                found[key] = type(one)(*zero, degenerate=True)
        return found

    monkeypatch.setattr(Study, "_maps", blank)
    found = ox.evaluate(
        garments,
        "garments",
        methods=["gradcam"],
        measures=["perturbation", "insertion_deletion"],
        limit=3,
        device="cpu",
    )
    for measure in found.results["measures"]:
        assert found.difference("gradcam", "random", measure["name"]).value == 0, measure["name"]


def scenes(folder: Path, count: int, broken: int) -> list[str]:
    """A folder for each of two classes, and some files in them that are no pictures."""
    rng = np.random.default_rng(0)
    bad = []
    for i in range(count):
        path = folder / ("bag" if i % 2 else "ankle_boot") / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i % (count // broken) == 3:
            path.write_bytes(b"no picture")
            bad.append(path.relative_to(folder).as_posix())
        else:
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return sorted(bad)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onnxplain", "evaluate", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def complaints(done: subprocess.CompletedProcess[str]) -> list[str]:
    """About pictures; a slow machine has lines that say how it goes on, too."""
    return [line for line in done.stderr.splitlines() if ".png" in line]


def test_broken_pictures_are_named_and_the_rest_counts(garments: Path, tmp_path: Path) -> None:
    bad = scenes(tmp_path / "data", 100, 5)
    asked = ("--methods", "rollout", "--measures", "perturbation", "--device", "cpu")
    done = run(garments, tmp_path / "data", "-o", tmp_path / "report", *asked)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = complaints(done)
    assert len(lines) == len(bad) == 5
    for name, line in zip(bad, lines, strict=True):
        assert name in line
    results = json.loads((tmp_path / "report/results.json").read_text())
    assert sorted(failure["name"] for failure in results["failures"]) == bad
    assert results["dataset"]["pictures"] == 100
    assert results["dataset"]["evaluated"] == 95
    page = (tmp_path / "report/index.html").read_text()
    assert all(name in page for name in bad)
    # Nothing is left to do, but they are still named.
    again = run(garments, tmp_path / "data", "-o", tmp_path / "report", *asked)
    assert (again.returncode, complaints(again)) == (1, lines)


def pictures_in(folder: Path) -> int:
    """How many pictures are finished, read as the run goes on."""
    copy = folder.with_name("peek")
    copy.mkdir(exist_ok=True)
    for path in folder.glob(f"{FILE}*"):
        with contextlib.suppress(FileNotFoundError):  # a journal comes and goes
            (copy / path.name).write_bytes(path.read_bytes())
    try:
        with sqlite3.connect(copy / FILE) as database:
            (count,) = database.execute("SELECT count(*) FROM pictures").fetchone()
    except sqlite3.Error:  # not made yet, or caught in the middle of a change
        return 0
    return int(count)


def test_a_killed_run_goes_on_where_it_was(
    garments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [garments, "garments", "--limit", 12, "--sanity-pictures", 2, "--device", "cpu"]
    asked += ["--methods", "rollout,gradcam", "--threads", 1]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert run(*asked, "-o", undisturbed).returncode == 0
    command = [sys.executable, "-m", "onnxplain", "evaluate", *map(str, asked), "-o", str(killed)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    give_up = time.monotonic() + 120
    while pictures_in(killed) < 3 and time.monotonic() < give_up:
        assert process.poll() is None, "it was too fast to be killed"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = pictures_in(killed)
    assert 3 <= done < 12
    assert not (killed / "index.html").exists()

    measured: list[str] = []
    measure = Study.measure

    def counted(self: Study, sample: object, *rest: object) -> object:
        measured.append(sample.name)  # type: ignore[attr-defined]
        return measure(self, sample, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Study, "measure", counted)
    ox.evaluate(
        garments,
        "garments",
        killed,
        limit=12,
        sanity_pictures=2,
        device="cpu",
        methods=["rollout", "gradcam"],
        threads=1,
    )
    assert measured == [f"garments {i}" for i in range(done + 1, 13)]
    for name in ("results.json", "results.csv", "index.html"):
        assert (killed / name).read_bytes() == (undisturbed / name).read_bytes(), name
    assert not list(killed.glob(".*"))


def test_what_is_of_too_few_pictures_says_so(garments: Path, tmp_path: Path) -> None:
    asked = ["garments", "--limit", "7", "--sanity-pictures", "3", "--methods", "rollout"]
    asked += ["--measures", "localisation,sanity", "-o", str(tmp_path)]
    found = CliRunner().invoke(app, ["evaluate", str(garments), *asked])
    row, note = found.stdout.splitlines()[-3:-1]
    assert row.split() == ["rollout", "1.0", "3", "of", "3", "0", "no", "-", "not", "tested"]
    assert note == "-: not measured, or on fewer than 6 pictures, of which there is no interval"
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    dash = '<td class="absent" title="fewer than 6 pictures">&ndash;'
    (ranking,) = re.findall('<table class="ranking">.*?</table>', page, re.DOTALL)
    assert ranking.count(dash) == page.count(dash) == 1
    assert '<td class="absent">not tested</td>' in ranking
    assert "Trust <code>" not in page
    # Of rollout and the two baselines.
    assert page.count('<small title="fewer than 6 pictures">no interval</small>') == 3
    assert "not measured, or on fewer than 6 pictures" in page


def test_nothing_is_answered_of_too_few_pictures(garments: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"methods": ["rollout"], "measures": ["localisation"], "limit": 5}
    found = ox.evaluate(garments, "garments", tmp_path, device="cpu", **options)
    (verdict,) = found.results["verdicts"]
    assert verdict["doubt"] == "was measured on fewer than 6 pictures, too few to compare"
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    dash = '<td class="absent" title="fewer than 6 pictures">&ndash;'
    assert page.count(dash) == 2  # against random maps, against a centre blob


@pytest.mark.parametrize(
    ("more", "command"),
    [((), "the same command"), (("--restart",), "the same command without --restart")],
)
def test_an_interrupted_run_says_how_it_goes_on(
    more: tuple[str, ...],
    command: str,
    garments: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measure, calls = Study.measure, itertools.count()

    def interrupted(self: Study, *arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, *arguments)

    monkeypatch.setattr(Study, "measure", interrupted)
    asked = ["garments", "--limit", "4", "--methods", "rollout", "--measures", "localisation"]
    arguments = ["evaluate", str(garments), *asked, "-o", str(tmp_path / "report"), *more]
    found = CliRunner().invoke(app, arguments)
    assert (found.exit_code, found.stdout) == (130, "")
    assert found.stderr == f"onnxplain: interrupted; {command} goes on where it stopped\n"
    assert pictures_in(tmp_path / "report") == 2


def test_another_evaluation_is_not_mixed_in(garments: Path, tmp_path: Path) -> None:
    def small(**changes: Any) -> ox.Evaluation:
        options: dict[str, Any] = {"methods": ["rollout"], "measures": ["localisation"], "limit": 2}
        return ox.evaluate(garments, "garments", tmp_path, device="cpu", **{**options, **changes})

    first = small()
    with pytest.raises(InputError, match=r"holds an evaluation with seed 0 \(this one: 1\)"):
        small(seed=1)
    with pytest.raises(InputError) as caught:
        small(limit=None, fills=["zero", "road"], sanity_pictures=64)
    assert str(caught.value) == (
        f"{tmp_path}: holds an evaluation with fills zero (this one: zero,road), sanity_pictures "
        "32 (this one: 64); choose another folder, or start again (--restart)"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ox, "__version__", "9")
        with pytest.raises(InputError, match=r"with onnxplain [\d.]+ \(this one: 9\); choose"):
            small()
    assert small().results == first.results
    assert small(seed=1, restart=True).results != first.results
    # How often pictures are drawn for the intervals changes nothing that is kept.
    assert small(seed=1, resamples=10).results["settings"]["resamples"] == 10
    with contextlib.closing(sqlite3.connect(tmp_path / "progress.sqlite")) as database:
        database.execute("ALTER TABLE pictures DROP COLUMN stamp")  # as an earlier version made it
    assert small(restart=True).results == first.results


@pytest.fixture(scope="module")
def folder_of_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i, scene in enumerate(garment_scenes(15, seed=4)):
        Image.fromarray(scene.image).save(folder / f"{i:02}.png")
    return folder


@pytest.mark.parametrize(
    ("bundled", "before", "limit"),
    [(True, 6, 12), (True, 12, 6), (False, 6, 12), (False, 12, None)],
)
def test_another_limit_takes_over_what_is_known(
    bundled: bool,
    before: int,
    limit: int | None,
    garments: Path,
    folder_of_pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = "garments" if bundled else folder_of_pictures
    measured: list[str] = []
    measure = Study.measure

    def counted(self: Study, sample: Sample, *rest: Any) -> Any:
        measured.append(sample.name)
        return measure(self, sample, *rest)

    def small(output: str, limit: int | None) -> ox.Evaluation:
        options: dict[str, Any] = {"methods": ["gradcam"], "sanity_pictures": 2, "steps": 4}
        return ox.evaluate(
            garments, data, tmp_path / output, limit=limit, device="cpu", threads=1, **options
        )

    fresh = small("fresh", limit)
    monkeypatch.setattr(Study, "measure", counted)
    small("resumed", before)
    assert len(measured) == before
    resumed = small("resumed", limit)
    assert len(measured) == len(set(measured)) == max(before, limit or 15)
    assert resumed.results == fresh.results
    for name in ("results.json", "results.csv", "index.html"):
        expected = (tmp_path / "fresh" / name).read_bytes()
        assert (tmp_path / "resumed" / name).read_bytes() == expected, name


def test_a_limit_is_not_troubled_by_pictures_beyond_it(
    garments: Path, folder_of_pictures: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(folder_of_pictures, data)
    options: dict[str, Any] = {"methods": ["rollout"], "measures": ["perturbation"]}

    def small(limit: int) -> ox.Evaluation:
        return ox.evaluate(
            garments, data, tmp_path / "report", limit=limit, device="cpu", **options
        )

    few = small(4)
    with contextlib.closing(sqlite3.connect(tmp_path / "report" / FILE)) as database:
        known = {name for (name,) in database.execute("SELECT name FROM pictures")}
    broken, changed = sorted({path.name for path in data.iterdir()} - known)[:2]
    whole = (data / broken).read_bytes()
    (data / broken).write_bytes(b"no picture")
    assert [name for name, _ in small(15).failures] == [broken]
    (data / broken).write_bytes(whole)
    os.utime(data / changed, ns=(5, 5))
    assert (small(4).results, small(4).failures) == (few.results, ())
    with pytest.raises(InputError, match=f"of {changed} before its picture or mask changed"):
        small(15)


def test_two_runs_do_not_write_in_one_folder(garments: Path, tmp_path: Path) -> None:
    asked = ("--methods", "rollout", "--measures", "localisation", "--limit", 2, "--device", "cpu")
    assert run(garments, "garments", "-o", tmp_path, *asked).returncode == 0
    with sqlite3.connect(tmp_path / FILE, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        done = run(garments, "garments", "-o", tmp_path, *asked)
    assert done.returncode == 2
    assert "another evaluation is writing here" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["no such"]}, r"'no such' is not a method"),
        ({"methods": "rollout"}, r"methods 'rollout'; expected a list"),
        ({"methods": []}, "no methods; expected some of"),
        ({"measures": ["speed"]}, r"measures 'speed'; expected some of perturbation"),
        ({"fills": ["pink"]}, r"fill 'pink'; expected some of zero"),
        ({"fills": []}, "no fills"),
        ({"steps": 0}, r"steps is 0, expected a whole number from 1"),
        ({"limit": 0}, r"limit is 0"),
        ({"seed": -1}, r"seed is -1"),
        ({"batch_size": 1.5}, r"batch_size is 1.5"),
        ({"threads": 0}, "threads is 0"),
        ({"image_size": 32}, "this file is made for 64x64"),
    ],
)
def test_wrong_arguments(garments: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ox.evaluate(garments, "garments", **options)


class TestFolder:
    def evaluate(self, garments: Path, folder: Path) -> ox.Evaluation:
        return ox.evaluate(
            garments,
            "garments",
            folder,
            methods=["rollout"],
            measures=["localisation"],
            limit=2,
            device="cpu",
        )

    def test_that_is_a_file(self, garments: Path, tmp_path: Path) -> None:
        (tmp_path / "report").write_text("mine")
        with pytest.raises(InputError, match="a file; expected a folder"):
            self.evaluate(garments, tmp_path / "report")
        assert (tmp_path / "report").read_text() == "mine"

    def test_with_a_page_of_somebody_else(self, garments: Path, tmp_path: Path) -> None:
        (tmp_path / "index.html").write_text("mine")
        with pytest.raises(InputError, match=r"holds an index.html that is not of an evaluation"):
            self.evaluate(garments, tmp_path)
        assert (tmp_path / "index.html").read_text() == "mine"

    def test_with_damaged_progress(self, garments: Path, tmp_path: Path) -> None:
        (tmp_path / FILE).write_bytes(b"not a database " * 100)
        with pytest.raises(InputError, match="damaged, or not of an evaluation"):
            self.evaluate(garments, tmp_path)

    def test_that_cannot_be_made(self, garments: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="file/report"):
            self.evaluate(garments, tmp_path / "file/report")


def test_a_file_that_takes_pictures_as_they_are_is_refused(tmp_path: Path) -> None:
    from small_vits import small_vit

    path = tmp_path / "embedded.onnx"
    ox.export(
        small_vit(),
        path,
        image_size=32,
        methods=["rollout"],
        verify=False,
        embed_preprocessing=True,
    )
    with pytest.raises(InputError, match="takes pictures as they are"):
        ox.evaluate(path, tmp_path, device="cpu")


def test_a_model_without_weights_can_be_evaluated_but_for_them(tmp_path: Path) -> None:
    model = write_linear_model(tmp_path / "linear.onnx", np.ones((4, 4), np.float32), 1, (2, 2))
    for i in range(2):
        Image.new("RGB", (4, 4), "white").save(tmp_path / f"{i}.png")
    with pytest.raises(UnsupportedModelError, match=r"no weights to randomise.*--sanity-pictures"):
        ox.evaluate(model, tmp_path, device="cpu")
    found = ox.evaluate(model, tmp_path, sanity_pictures=0, device="cpu")
    assert "class_sensitivity" in {measure["name"] for measure in found.results["measures"]}


def test_no_picture_that_can_be_read(garments: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data/bag"
    folder.mkdir(parents=True)
    (folder / "a.png").write_bytes(b"no picture")
    with pytest.raises(
        InputError, match=r"none of 1 pictures could be evaluated; the first: .*a.png"
    ):
        ox.evaluate(garments, tmp_path / "data", measures=["perturbation"], device="cpu")
