"""The example page as it is used: what it says of wrong files, by keyboard, on every screen."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from browser import SCENES, Page, changed
from PIL import Image

import onnxplain as ox

# What is said


def test_dropped_pictures_and_models_are_taken(
    page: Page, small: ir.Model, photo: Path, tmp_path: Path
) -> None:
    page.drop("other.png", photo.read_bytes())
    assert (page.error, page.shown["picture"]) == ("", "other.png")
    ox.instrument(small, tmp_path / "x.onnx", methods=["rollout"])
    page.drop("dropped.onnx", (tmp_path / "x.onnx").read_bytes())
    assert (page.error, page.shown["model"]) == ("", "dropped.onnx")
    assert page.find("#any-class").is_displayed()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("notes.txt", b"not a picture"),
        ("empty.png", b""),
        ("damaged.png", SCENES[0].read_bytes()[:60]),
        ("drawing.svg", b"<svg"),
    ],
)
def test_what_is_no_picture_is_said_to_be_none(page: Page, name: str, content: bytes) -> None:
    shown = page.shown
    page.drop(name, content)
    assert page.error == f"{name} is not a picture that this browser can read."
    assert page.shown["picture"] == shown["picture"]
    assert page.status  # still that of the picture on display
    page.find("#scenes button").click()
    assert page.settle().error == ""


def plain(path: Path) -> None:
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)


def rewritten(**fields: Any) -> Callable[[Path], Any]:
    return lambda path: changed(path, lambda _, contract: contract.update(fields))


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def without_logits(model: onnx.ModelProto, contract: dict[str, Any]) -> None:
    del model.graph.output[[output.name for output in model.graph.output].index("logits")]


def unknown_operator(model: onnx.ModelProto, contract: dict[str, Any]) -> None:
    model.graph.node[0].op_type = "Unheard"


NO_MODEL = "x.onnx is not an ONNX file, or it is damaged."

WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "plain": (plain, "x.onnx is an ONNX model, but not an explained one"),
    "empty": (lambda path: path.write_bytes(b""), NO_MODEL),
    "text": (lambda path: path.write_bytes(b"hello, world"), NO_MODEL),
    "picture": (lambda path: path.write_bytes(SCENES[0].read_bytes()), NO_MODEL),
    "cut": (cut, NO_MODEL),
    "newer": (rewritten(format=2), "x.onnx has a contract of format 2"),
    "odd": (rewritten(input=None), "x.onnx has a damaged contract: make the file again."),
    "logits": (lambda path: changed(path, without_logits), 'lacks the output "logits"'),
    "operator": (
        lambda path: changed(path, unknown_operator),
        "x.onnx is damaged, or more than onnxruntime-web can run (",
    ),
    "crop": (
        lambda path: changed(path, lambda _, contract: contract["input"].update(crop_mode="round")),
        'The model wants the crop mode "round", which this page does not know.',
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_models_that_cannot_be_used_are_refused_in_a_sentence(
    page: Page, small: ir.Model, tmp_path: Path, wrong: str
) -> None:
    damage, message = WRONG[wrong]
    path = tmp_path / "x.onnx"
    ox.instrument(small, path, methods=["rollout"])
    damage(path)
    page.model(path)
    assert message in page.error
    assert "\n" not in page.error


def test_a_file_without_maps_is_sent_back_for_them(
    page: Page, small: ir.Model, tmp_path: Path
) -> None:
    ox.instrument(small, tmp_path / "taps.onnx", outputs="taps")
    page.model(tmp_path / "taps.onnx")
    assert "export it with --outputs maps or --outputs both" in page.error
    assert page.find("#model").text == "garments.onnx"


def test_a_file_whose_weights_are_elsewhere_is_refused(
    page: Page, small: ir.Model, tmp_path: Path
) -> None:
    ox.instrument(small, tmp_path / "bundle", methods=["rollout"])
    (graph,) = tmp_path.glob("bundle/attention*.onnx")
    page.model(graph)
    assert "keeps its weights in a second file" in page.error


def test_an_address_without_a_model_is_named(site: tuple[Page, Path]) -> None:
    page = site[0].open("?model=nothing.onnx")
    assert page.error == "nothing.onnx cannot be fetched: status 404."
    assert page.status == "No model"


@pytest.mark.parametrize("output", ["map.rollout", "heatmap.rollout"])
def test_a_blank_map_is_said_to_be_blank(
    page: Page, small: ir.Model, photo: Path, tmp_path: Path, output: str
) -> None:
    path = tmp_path / "blank.onnx"
    ox.instrument(small, path, methods=["rollout"], heatmaps=output.startswith("heatmap"))

    def blank(model: onnx.ModelProto, contract: dict[str, Any]) -> None:
        (node,) = (node for node in model.graph.node if output in node.output)
        node.output[list(node.output).index(output)] = "unblanked"
        zero = onnx.helper.make_tensor("zero", onnx.TensorProto.FLOAT, [], [0])
        model.graph.initializer.append(zero)
        model.graph.node.append(onnx.helper.make_node("Mul", ["unblanked", "zero"], [output]))

    changed(path, blank)
    page.model(path).picture(photo)
    assert "The map of rollout is blank" in page.status
    assert not page.overlay().any()
    assert "map" not in str(page.find("#picture").get_attribute("aria-label"))


# How it is used


def focused(page: Page) -> Any:
    return page.driver.switch_to.active_element


def named(element: Any) -> str:
    """Its id, the name of its group, or what a screen reader calls it."""
    known = (element.get_attribute(key) for key in ("id", "name"))
    name = next(filter(None, known), None) or element.accessible_name or element.tag_name
    return str(name)


# A file picker is out of sight; the button after it shows that it has the focus.
OUTLINE = """
const shown = arguments[0].matches(".file input") ? arguments[0].nextSibling : arguments[0];
return getComputedStyle(shown).outlineStyle;
"""


def press(page: Page, *keys: str) -> Page:
    focused(page).send_keys(*keys)
    return page.settle()


def test_everything_can_be_done_with_the_keyboard(site: tuple[Page, Path]) -> None:
    page = site[0].open()
    keys = pytest.importorskip("selenium.webdriver.common.keys").Keys
    actions = pytest.importorskip("selenium.webdriver.common.action_chains").ActionChains
    page.driver.execute_script("document.activeElement.blur()")

    def tab() -> None:
        # To the page, not to an element: a file picker takes what it is sent for a file's path.
        actions(page.driver).send_keys(keys.TAB).perform()

    met: dict[str, Any] = {}
    tab()
    while (name := named(focused(page))) not in met and name != "body":
        met[name] = one = focused(page)
        assert one.accessible_name, name
        assert page.driver.execute_script(OUTLINE, one) != "none", name
        tab()
    scenes = [image.get_attribute("alt") for image in page.all("#scenes img")]
    others = {"picture-file", "likeliest", "class", "method", "opacity", "model-file", "save"}
    assert len(scenes) == len(SCENES)
    assert set(met) == {*scenes, *others}

    met[scenes[2]].send_keys(keys.ENTER)
    page.settle()
    assert page.shown["picture"] == SCENES[2].stem
    assert met[scenes[2]].get_attribute("aria-pressed") == "true"
    first, second = np.argsort(page.shown["probabilities"])[::-1][:2]
    assert page.shown["target"] == first
    page.find("#likeliest input:checked").send_keys(keys.ARROW_DOWN)
    page.settle()
    assert page.shown["target"] == second
    press(page, keys.ARROW_UP)  # the focus has stayed where it was
    assert page.shown["target"] == first
    before = page.shown["method"]
    met["method"].send_keys(keys.ARROW_DOWN)
    assert page.settle().shown["method"] != before
    met["opacity"].send_keys(keys.HOME, keys.ARROW_RIGHT)
    assert page.find("#overlay").value_of_css_property("opacity") == "0.01"


def test_the_picture_can_be_saved(page: Page, tmp_path: Path) -> None:
    page.find("#scenes button").click()
    page.settle()
    page.driver.execute_script(
        "const slider = document.getElementById('opacity'); slider.value = 40;"
        "slider.dispatchEvent(new Event('input'));"
        "document.getElementById('save').addEventListener('click', (e) => e.preventDefault());"
    )
    page.find("#save").click()
    data = str(page.find("#save").get_attribute("href")).partition("base64,")[2]
    saved = np.array(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
    blended = 0.6 * np.array(Image.open(SCENES[0])) + 0.4 * page.overlay()[..., :3]
    assert np.abs(saved - blended).max() <= 1.5  # browsers blend in 8 bits


# From the numbers in "rgb(1, 2, 3)" to relative luminance, and the contrast of every text with what
# is behind it: WCAG 2.1, success criterion 1.4.3.
CONTRASTS = """
const luminance = (color) => {
  const [r, g, b] = color.match(/[\\d.]+/g).map((v) => v / 255).map((v) =>
    v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  const color = getComputedStyle(element).backgroundColor;
  return color === "rgba(0, 0, 0, 0)" ? behind(element.parentElement) : color;
};
const texts = [...document.body.querySelectorAll("*")].filter((element) =>
  element.checkVisibility() &&
  [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
return texts.map((element) => {
  const [a, b] = [getComputedStyle(element).color, behind(element)].map(luminance);
  return [element.outerHTML, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
});
"""
READABLE = 4.5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(320, 640), (390, 844), (844, 390), (1280, 800)], ids=str)
def test_looks_right_at_every_size_and_scheme(
    page: Page, tmp_path: Path, size: tuple[int, int], scheme: str
) -> None:
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 1000}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    page.drop("notes.txt", b"")  # so that an error is there to be read
    page.driver.save_screenshot(str(tmp_path / f"{scheme}-{width}x{height}.png"))
    told = page.driver.execute_script(CONTRASTS)
    assert len(told) > 20
    assert min(contrast for _, contrast in told) >= READABLE, min(told, key=lambda t: t[1])
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    picture, overlay = (page.find(f"#{name}").rect for name in ("picture", "overlay"))
    assert picture == overlay
    assert picture["width"] >= 0.35 * min(width, height)
    assert picture["height"] <= 0.8 * height


def test_the_page_says_nothing_to_the_console(site: tuple[Page, Path]) -> None:
    page = site[0]
    page.complaints  # noqa: B018  those of the tests before
    page.open().choose("class", 4).choose("method", "lrp")
    assert page.complaints == []
