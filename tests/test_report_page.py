"""The report's page in a real browser: phone and desk, light and dark, without network."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from evaluation_results import full, minimal

from onnxplain.evaluation.report import write_report

SIZES = {"phone": (360, 800), "desk": (1280, 900)}
VIEWS = [f"{size}-{scheme}" for size, scheme in product(SIZES, ("light", "dark"))]
READABLE = 4.5  # contrast of text, WCAG 2 AA
VISIBLE = 3.0  # contrast of what is drawn, such as a line of a chart

# Contrast of every element that has text of its own: against the colours of what lies behind it.
_CONTRASTS = """
const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const known = new Map();
const channels = (colour) => {
  if (!known.has(colour)) {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    known.set(colour, [...context.getImageData(0, 0, 1, 1).data]);
  }
  return known.get(colour);
};
const luminance = (colour) => {
  const [r, g, b] = channels(colour).map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = getComputedStyle(at).backgroundColor;
    if (channels(colour)[3] === 255) return colour;
  }
  return "rgb(1, 1, 1)";
};
const contrast = (one, other) => {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
};
const own = (element) =>
  [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
const texts = [...document.querySelectorAll("body *")].filter(own).map((element) => {
  const style = getComputedStyle(element);
  const colour = element instanceof SVGElement ? style.fill : style.color;
  return [contrast(colour, behind(element)), element.outerHTML.slice(0, 120)];
});
const lines = [...document.querySelectorAll(".key path")].map((element) => {
  return [contrast(getComputedStyle(element).stroke, behind(element)), element.outerHTML];
});
return { texts, lines };
"""

_OVERFLOWING = """
const width = document.documentElement.clientWidth;
return [...document.querySelectorAll("body *")]
  .filter((element) => !element.closest(".scroll, pre, .unseen"))
  .filter((element) => element.getBoundingClientRect().right > width + 0.5)
  .map((element) => element.outerHTML.slice(0, 120));
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        driver.execute_cdp_cmd("Network.enable", {})
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield driver


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of the pages."""
    addresses = {}
    for name, made in (("full", full()), ("minimal", minimal())):
        folder = tmp_path_factory.mktemp(name)
        write_report(*made, folder)
        addresses[name] = (folder / "index.html").as_uri()
    return addresses


def show(driver: Any, address: str, view: str) -> Any:
    size, scheme = view.split("-")
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": features})
    driver.get(address)
    return driver


@pytest.fixture(params=VIEWS)
def page(request: pytest.FixtureRequest, driver: Any, reports: dict[str, str]) -> Any:
    return show(driver, reports["full"], request.param)


def test_nothing_is_asked_for_and_nothing_complains(page: Any) -> None:
    assert page.get_log("browser") == []
    asked = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    assert [name for name in page.execute_script(asked) if not name.startswith("data:")] == []


def test_page_does_not_scroll_sideways(page: Any) -> None:
    widths = "const root = document.documentElement; return [root.scrollWidth, root.clientWidth]"
    scroll, client = page.execute_script(widths)
    assert scroll <= client
    assert page.execute_script(_OVERFLOWING) == []


def test_text_and_lines_can_be_seen(page: Any) -> None:
    found = page.execute_script(_CONTRASTS)
    assert len(found["texts"]) > 500
    assert [text for text in found["texts"] if text[0] < READABLE] == []
    assert len(found["lines"]) > 100
    assert [line for line in found["lines"] if line[0] < VISIBLE] == []


def test_pictures_are_decoded(page: Any) -> None:
    widths = page.execute_script("return [...document.images].map((image) => image.naturalWidth)")
    assert len(widths) == len(full()[0]["examples"])
    assert all(width > 0 for width in widths)


def test_charts_follow_the_page(page: Any) -> None:
    """Their text has the page's colour, and no text is cut off or lies outside of the drawing."""
    colours = """
    const page = getComputedStyle(document.body).color;
    const texts = [...document.querySelectorAll(".chart > svg text")];
    return [page, texts.length, [...new Set(texts.map((text) => getComputedStyle(text).fill))]];
    """
    colour, count, found = page.execute_script(colours)
    assert count > 100
    assert found == [colour]
    outside = """
    return [...document.querySelectorAll(".chart > svg text")].filter((text) => {
      const [inner, outer] = [text, text.closest(".chart")].map((e) => e.getBoundingClientRect());
      return inner.left < outer.left || inner.right > outer.right || inner.bottom > outer.bottom;
    }).map((text) => text.textContent);
    """
    assert page.execute_script(outside) == []


def test_colours_differ_in_the_dark(driver: Any, reports: dict[str, str]) -> None:
    script = "const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]"
    light, dark = (
        show(driver, reports["full"], view).execute_script(script)
        for view in ("desk-light", "desk-dark")
    )
    assert len({*light, *dark}) == 4


def test_first_screen_answers_the_question(page: Any) -> None:
    """The verdict, and the method's place in the ranking, without scrolling."""
    bottoms = """
    return ["h1", ".lead", ".ranking tbody tr"].map(
      (which) => document.querySelector(which).getBoundingClientRect().bottom);
    """
    height = page.execute_script("return innerHeight")
    assert all(0 < bottom < height for bottom in page.execute_script(bottoms))


@pytest.mark.parametrize("view", ["phone-light", "phone-dark"])
def test_wide_tables_scroll_and_keep_their_first_column(
    driver: Any, reports: dict[str, str], view: str
) -> None:
    places = """
    const box = document.querySelector("#summary .scroll");
    box.scrollLeft = 200;
    const [head, cell] = box.querySelectorAll("tbody th, tbody td");
    const rooms = box.scrollWidth - box.clientWidth;
    return [rooms, head.getBoundingClientRect().left - box.getBoundingClientRect().left,
      getComputedStyle(head).backgroundColor, cell.getBoundingClientRect().left];
    """
    page = show(driver, reports["full"], view)
    room, left, colour, cell = page.execute_script(places)
    assert room > 200
    assert 0 <= left <= 2  # the border
    assert cell < 0  # has gone below the head, which must hide it
    assert "rgba" not in colour
    height = page.execute_script("return document.querySelector('#summary .scroll').tabIndex")
    assert height == 0


@pytest.mark.parametrize("view", VIEWS)
def test_smallest_report(driver: Any, reports: dict[str, str], view: str) -> None:
    page = show(driver, reports["minimal"], view)
    assert page.get_log("browser") == []
    assert page.execute_script(_OVERFLOWING) == []
    assert "No measure was taken" in page.find_element("css selector", ".verdict").text
    found = page.execute_script(_CONTRASTS)
    assert [text for text in found["texts"] if text[0] < READABLE] == []


def test_prints_light_even_in_the_dark(driver: Any, reports: dict[str, str]) -> None:
    page = show(driver, reports["full"], "desk-dark")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    script = "return getComputedStyle(document.body).getPropertyValue('--text')"
    printed = page.execute_script(script)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": features})
    assert printed != page.execute_script(script)
    show(driver, reports["full"], "desk-light")
    assert printed == page.execute_script(script)


def test_a_request_would_be_refused(driver: Any, reports: dict[str, str], tmp_path: Path) -> None:
    """The policy in the page holds: what was smuggled in neither loads nor runs."""
    text = Path(reports["full"].removeprefix("file://")).read_text(encoding="utf-8")
    smuggled = '<script>document.title = "ran"</script><img id="sent" src="http://127.0.0.1:9/">'
    (tmp_path / "index.html").write_text(text.replace("</main>", smuggled + "</main>"), "utf-8")
    page = show(driver, (tmp_path / "index.html").as_uri(), "desk-light")
    complaints = [entry["message"] for entry in page.get_log("browser")]
    assert page.title != "ran"
    assert len(complaints) == 2
    assert all("Content Security Policy" in complaint for complaint in complaints)
