"""The report of an evaluation as files: what is in them, and what cannot get into them."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from evaluation_results import BASELINES, METHODS, full, minimal

from onnxplain.errors import MissingDependencyError
from onnxplain.evaluation.report import write_report
from onnxplain.evaluation.report.copies import as_latex, as_markdown
from onnxplain.evaluation.report.examples import data_uri
from onnxplain.evaluation.report.reading import read
from onnxplain.evaluation.report.tables import number

FILES = ["index.html", "results.csv", "results.json"]
LARGEST = 1_000_000  # bytes of a page with 12 methods and six pictures of each
VOID = {"br", "hr", "img", "input", "link", "meta", "wbr"}
SELF_CLOSING = {"path", "use", "rect", "defs", "g"}  # of SVG, where this is written `<path/>`


class Document(HTMLParser):
    """Elements, ids, links and visible text; fails where elements do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), "an attribute twice"
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SELF_CLOSING | VOID
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def attributes(self, name: str) -> list[str]:
        return [value for _, found in self.elements for key, value in found.items()
                if key == name and value is not None]  # fmt: skip


def tables_only() -> tuple[dict[str, Any], list[Any]]:
    """As `full`, without what takes long to draw."""
    results, _ = full()
    return results | {"curves": [], "examples": []}, []


def document(folder: Path) -> Document:
    return Document((folder / "index.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "made" / "for it"
    write_report(*full(), folder)
    return folder


def test_three_files_and_nothing_else(written: Path) -> None:
    assert sorted(path.name for path in written.iterdir()) == FILES
    assert (written / "index.html").stat().st_size < LARGEST


def test_photos_keep_the_page_small(written: Path) -> None:
    """As large as they come out of a model, and with detail of all sizes."""
    rng = np.random.default_rng(0)
    layers = [
        cv2.resize(rng.normal(size=(size, size, 3)), (224, 224), interpolation=cv2.INTER_CUBIC)
        for size in (4, 16, 64)
    ]
    photo = (128 + 30 * np.sum(layers, axis=0)).clip(0, 255).astype(np.uint8)
    results, pictures = full()
    page = written / "index.html"
    drawn = page.stat().st_size - sum(len(data_uri(picture)[0]) for picture in pictures)
    assert drawn + len(results["examples"]) * len(data_uri(photo)[0]) < LARGEST


def test_the_same_results_give_the_same_bytes(written: Path, tmp_path: Path) -> None:
    """In another process too, where sets and hashes come in another order."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'tests');"
        "from evaluation_results import full; from onnxplain.evaluation.report import write_report;"
        "write_report(*full(), Path(sys.argv[1]))"
    )
    root = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, cwd=root, env=environment
    )
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()


def test_json_is_what_came(written: Path) -> None:
    text = (written / "results.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    assert json.loads(text) == full()[0]


def test_csv_has_every_value_in_full(written: Path) -> None:
    with open(written / "results.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values = full()[0]["values"]
    measures = {measure["name"]: measure for measure in full()[0]["measures"]}
    assert len(rows) == len(values)
    for row, value in zip(rows, values, strict=True):
        assert (row["method"], row["measure"]) == (value["method"], value["measure"])
        assert row["group"] == measures[value["measure"]]["group"]
        assert row["better"] == measures[value["measure"]]["better"]
        assert int(row["count"]) == value["count"]
        assert [float(row[name]) for name in ("value", "low", "high")] == [
            value[name] for name in ("value", "low", "high")
        ]
        for baseline in BASELINES:
            versus = value.get("versus", {}).get(baseline)
            cells = [row[f"versus_{baseline}{end}"] for end in ("", "_low", "_high")]
            if versus is None:
                assert cells == ["", "", ""]
            else:
                assert [float(cell) for cell in cells] == list(versus.values())


def test_numbers_that_are_none_are_null_empty_and_a_dash(tmp_path: Path) -> None:
    results, pictures = full()
    first = results["values"][0]
    first |= {"value": math.nan, "low": math.nan, "high": math.inf}
    results["curves"][0]["y"][3] = math.nan
    write_report(results, pictures, tmp_path)
    text = (tmp_path / "results.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert json.loads(text)["values"][0]["value"] is None
    with open(tmp_path / "results.csv", newline="") as file:
        row = next(csv.DictReader(file))
    assert (row["value"], row["low"], row["high"]) == ("", "", "")
    page = (tmp_path / "index.html").read_text()
    assert "not measured" in page
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)


# The page


def test_page_is_whole_by_itself(written: Path) -> None:
    page = document(written)
    addresses = page.attributes("src") + page.attributes("href") + page.attributes("xlink:href")
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert page.all("script") == []
    (policy,) = (m["content"] for m in page.all("meta") if "http-equiv" in m)
    assert policy is not None and policy.startswith("default-src 'none';")
    text = (written / "index.html").read_text(encoding="utf-8")
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert page.all("html") == [{"lang": "en"}]


def test_ids_are_unique_and_links_lead_to_them(written: Path) -> None:
    page = document(written)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    links = page.attributes("href") + page.attributes("xlink:href")
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    clips = re.findall(r"url\(#([^)]+)\)", (written / "index.html").read_text())
    assert clips and set(clips) <= set(ids)


def test_every_method_measure_and_setting_is_there(written: Path) -> None:
    results, _ = full()
    page = document(written)
    codes = page.texts["code"]
    assert {*METHODS, *BASELINES} <= set(codes)
    assert {measure["name"] for measure in results["measures"]} <= set(codes)
    cells = page.texts["td"]
    assert {*results["versions"].values(), results["model"]["sha256"]} <= set(cells)
    assert len(page.all("img")) == len(results["examples"])
    assert all(image["alt"] for image in page.all("img"))
    assert [item for item in page.texts["li"] if "broken/1.png" in item]
    assert all({"scope"} <= set(cell) for cell in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))


def cell(written: Path, method: str, column: int) -> str:
    """Of the table of headline measures, as it is written."""
    text = (written / "index.html").read_text(encoding="utf-8")
    table = text[text.index('<section id="summary">') :]
    broken = method.replace("_", "_<wbr>")
    row = re.search(rf"<tr[^>]*><th[^>]*><code>{broken}</code></th>(.*?)</tr>", table, re.DOTALL)
    assert row
    return re.findall(r"<td.*?</td>", row[1])[column]


def test_signs_say_on_which_side_of_random_the_interval_lies(tmp_path: Path) -> None:
    results, pictures = tables_only()
    first = results["measures"][0]["name"]  # lower is better
    for method, (low, high) in {
        "rollout": (-0.2, -0.1),
        "gradcam": (0.1, 0.2),
        "lrp": (-0.1, 0.1),
        "attnlrp": (-0.1, 0.0),
    }.items():
        (value,) = (v for v in results["values"] if (v["method"], v["measure"]) == (method, first))
        value["versus"]["random"] |= {"low": low, "high": high}
    write_report(results, pictures, tmp_path)
    for method, sign in {"rollout": "▲", "gradcam": "▼", "lrp": "=", "attnlrp": "="}.items():
        assert f">{sign}</span>" in cell(tmp_path, method, 0)
    for baseline in BASELINES:
        assert 'class="sign"' not in cell(tmp_path, baseline, 0)


def test_best_of_a_column_is_bold_and_ties_are_all_bold(tmp_path: Path) -> None:
    results, pictures = tables_only()
    first = results["measures"][0]["name"]
    for value in results["values"]:
        if value["measure"] == first:
            value["value"] = 0.1 if value["method"] in {"lrp", "rollout", "random"} else 0.5
    write_report(results, pictures, tmp_path)
    bold = [name for name in (*METHODS, *BASELINES) if "<strong>" in cell(tmp_path, name, 0)]
    assert sorted(bold) == ["lrp", "rollout"]  # a baseline is not among the methods


@pytest.mark.parametrize("measures", [[], ["perturbation"]])
def test_sections_without_content_are_left_out(tmp_path: Path, measures: list[str]) -> None:
    results, pictures = minimal()
    results["measures"] = results["measures"] if measures else []
    results["values"] = results["values"] if measures else []
    write_report(results, pictures, tmp_path)
    sections = set(document(tmp_path).attributes("id"))
    assert sections & {"localisation", "sanity", "curves", "examples", "failures"} == set()
    assert ("perturbation" in sections) == bool(measures)


HOSTILE = "<img src=x onerror=alert(1)>\"'&$model</script>.png"


def test_names_are_text_and_nothing_more(tmp_path: Path) -> None:
    plain = document_of(*named("plain"), tmp_path / "plain")
    page = document_of(*named(HOSTILE), tmp_path / "hostile")
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.texts["h1"][0].count(HOSTILE) == 2
    assert page.texts["text"].count(HOSTILE) == 2  # the titles of both axes
    assert page.attributes("aria-label").count(f"{HOSTILE}, {HOSTILE}") == 1  # the chart


def named(name: str) -> tuple[dict[str, Any], list[Any]]:
    """Results with one curve and with this in place of all that can be named."""
    results, pictures = full()
    results["model"]["name"] = results["model"]["file"] = results["dataset"]["name"] = name
    results["failures"][0] |= {"name": name, "error": name}
    results["examples"][0] |= {"sample": name, "label": name}
    results["settings"]["device"] = results["versions"]["numpy"] = name
    results["measures"][0] |= {"title": name, "detail": name, "definition": name}
    results["curves"] = [results["curves"][0] | {"x_title": name, "y_title": name}]
    return results, pictures


def document_of(results: dict[str, Any], pictures: list[Any], folder: Path) -> Document:
    write_report(results, pictures, folder)
    return document(folder)


def test_a_name_that_is_not_utf8_is_shown_by_its_bytes(tmp_path: Path) -> None:
    results, pictures = tables_only()
    results["failures"][0]["name"] = os.fsdecode(b"caf\xe9.png")
    page = document_of(results, pictures, tmp_path)
    assert any("caf\\udce9.png" in item for item in page.texts["li"])
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    assert os.fsencode(json.loads(text)["failures"][0]["name"]) == b"caf\xe9.png"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_missing_the_page_is_whole(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    results, pictures = tables_only()
    results["values"] = [value for value in results["values"] if rng.random() < 0.7]
    for value in results["values"]:
        if rng.random() < 0.3:
            value |= {"low": None, "high": None}
        for versus in value.get("versus", {}).values():
            if rng.random() < 0.3:
                versus |= {"difference": None, "low": None, "high": None}
        if rng.random() < 0.3:
            value.pop("versus", None)
    for one in results["verdicts"]:
        for field in ("mean_rank", "class_sensitive", "weight_sensitive"):
            if rng.random() < 0.5:
                one[field] = None
    page = document_of(results, pictures, tmp_path)
    assert not any("None" in text for text in (*page.texts["td"], *page.texts["p"]))
    assert any("not measured" in text for text in page.texts["td"])


# Parts


@pytest.mark.parametrize(
    "value, text",
    [(0.12345, "0.123"), (-0.5, "−0.500"), (-0.0001, "0.000"), (None, "–"), (1, "1.000")],  # noqa: RUF001
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_tables_to_copy() -> None:
    results, _ = full()
    results["measures"] = results["measures"][:2]
    results["measures"][1] |= {"title": "50 % | rest", "detail": ""}
    reading = read(results)
    markdown = as_markdown(reading, results["measures"]).splitlines()
    assert markdown[0] == (
        "| method | positive perturbation, zero, predicted class ↓ | 50 % \\| rest ↓ |"
    )
    assert markdown[1] == "| --- | ---: | ---: |"
    best = min(
        v["value"] for v in results["values"] if v["measure"] == reading.headlines[0]["name"]
    )
    assert markdown[2].startswith(f"| transformer\\_attribution | **{best:.3f}** | ")
    latex = as_latex(reading, results["measures"]).splitlines()
    assert latex[0] == r"\begin{tabular}{lrr}" and latex[-1] == r"\end{tabular}"
    assert r"50 \% | rest $\downarrow$ \\" in latex[2]
    assert latex[4].startswith(rf"transformer\_attribution & \textbf{{{best:.3f}}} & ")
    assert len(latex) == len(METHODS) + len(BASELINES) + 6


@pytest.mark.parametrize(
    "shape, size",
    [
        ((64, 64), (128, 128)),
        ((600, 300), (80, 160)),
        ((150, 150), (150, 150)),
        ((1, 4000), (160, 1)),
    ],
)
def test_pictures_are_brought_to_a_sensible_size(
    shape: tuple[int, int], size: tuple[int, int]
) -> None:
    picture = np.full((*shape, 3), 200, np.uint8)
    address, width, height = data_uri(picture)
    assert address.startswith("data:image/jpeg;base64,")
    assert (width, height) == size


def test_matplotlib_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"matplotlib .* onnxplain\[evaluate\]"):
        write_report(*full(), tmp_path / "report")
    assert not (tmp_path / "report").exists()


def test_import_is_cheap_and_drawing_says_nothing(tmp_path: Path) -> None:
    """Without a font cache, and without a place to write one."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, 'tests');"
        "from onnxplain.evaluation.report import write_report;"
        "assert 'matplotlib' not in sys.modules;"
        "from evaluation_results import full; write_report(*full(), Path(sys.argv[1]));"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    (tmp_path / "file").touch()
    environment = os.environ | {"MPLCONFIGDIR": str(tmp_path / "file" / "none")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "report")],
        cwd=Path(__file__).resolve().parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_disk_error_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(*minimal(), tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}

    def full_disk(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full_disk)
        with pytest.raises(OSError, match=re.escape(str(tmp_path / "results.json"))):
            write_report(*tables_only(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_results_that_cannot_be_shown_leave_the_last_report(tmp_path: Path) -> None:
    write_report(*minimal(), tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    results = full()[0] | {"curves": []}
    with pytest.raises(IndexError):
        write_report(results, [], tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
