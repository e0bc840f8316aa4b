"""The example page in a real browser: its numbers are those of Python, and it can be used."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from browser import SCENES, Page, build, chromium, served
from numpy.typing import NDArray
from PIL import Image
from small_vits import small_vit

import onnxplain as ox
from onnxplain.contract import KEY, Contract, ImageInput
from onnxplain.demo.scenes import two_garment_scenes
from onnxplain.export.plain import to_onnx
from onnxplain.outputs import METHODS, map_name
from onnxplain.runtime.explanation import upsample
from onnxplain.runtime.pictures import load_picture
from onnxplain.runtime.preprocessing import preprocess

Array = NDArray[Any]

# Both compute in float32, in another order. Relative to the largest value.
TOLERANCE = 1e-4
# Relevance divides by sums that pass through zero, so it is compared as a whole and by rank: largest
# norm of the difference, relative, and lowest correlation. Plain LRP down to the pixels is so badly
# conditioned that on these scenes onnxruntime differs from itself by 0.06 and 0.9989 where its
# optimisations are off.
RELEVANCE = {
    "partial_lrp": (1e-2, 0.999),
    "attnlrp": (1e-2, 0.999),
    "transformer_attribution": (1e-2, 0.999),
    "lrp": (0.1, 0.998),
}
COLOR = 1  # level: the page interpolates between 52 of the 256 colours


@pytest.fixture(scope="module")
def garments() -> Iterator[Path]:
    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as path:
        yield path


@pytest.fixture(scope="module")
def small() -> ir.Model:
    return to_onnx(small_vit(), image_size=(32, 32))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Path]]:
    """The page in a browser, and the folder that it is served from."""
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    profile = tmp_path_factory.mktemp("profile")
    with served(folder) as address, chromium(profile) as driver:
        yield Page(driver, address), folder


@pytest.fixture(scope="module")
def opened(site: tuple[Page, Path]) -> Page:
    return site[0].open()


@pytest.fixture
def page(opened: Page) -> Page:
    """The page with the bundled model, and without an error from before."""
    if opened.find("#model").text != "garments.onnx" or opened.error:
        opened.open()
    return opened


# Numbers


def contract_of(path: Path) -> Contract:
    entries = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    return Contract.from_json(entries[KEY])


def computed(path: Path, picture: Path, target: int) -> dict[str, Array]:
    """Logits and maps as onnxruntime's Python package gives them, by name of the output."""
    contract = contract_of(path)
    rgb, _ = load_picture(picture)
    if contract.input.layout == "HWC":
        pixels: Array = np.array(rgb)
    else:
        pixels = np.stack([preprocess(rgb, contract.input)[0]] * (contract.input.batch or 1))
    more = () if contract.targets == 1 else (contract.targets,)
    feeds = {contract.input.name: pixels, "target": np.full((1, *more), target)}
    names = ["logits", *map(map_name, contract.maps)]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    values = session.run(names, feeds)
    # The first picture's; of several classes the first one's.
    return {k: v[0] if v.ndim < 4 else v[0, 0] for k, v in zip(names, values, strict=True)}


def spearman(a: Array, b: Array) -> float:
    ranks = [x.ravel().argsort().argsort() for x in (a, b)]
    first, second = (rank - rank.mean() for rank in ranks)
    return float(first @ second / np.sqrt((first @ first) * (second @ second)))


def agree(found: Array, expected: Array, what: str) -> None:
    assert found.shape == expected.shape, what
    if what in RELEVANCE:
        norm, ranks = RELEVANCE[what]
        assert np.linalg.norm(found - expected) <= norm * np.linalg.norm(expected), what
        assert spearman(found, expected) >= ranks, what
    else:
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max(), what


def agree_on_everything(page: Page, model: Path, picture: Path, target: int) -> None:
    """Logits, raw maps and heatmaps of every method of the file."""
    shown, expected, contract = page.shown, computed(model, picture, target), contract_of(model)
    assert (shown["target"], Path(shown["picture"]).stem) == (target, picture.stem)
    agree(np.array(shown["logits"]), expected["logits"], "logits")
    powers = np.exp(expected["logits"] - expected["logits"].max())
    agree(np.array(shown["probabilities"]), powers / powers.sum(), "probabilities")
    assert set(shown["maps"]) == set(contract.maps)
    for method, one in shown["maps"].items():
        grid = expected[map_name(method)]
        agree(one["raw"], grid, method)
        drawn = np.maximum(grid, 0) if METHODS[method].pixels else grid
        (heatmap,), (blank,) = upsample(drawn[None], contract.input.size)
        assert (one["heatmap"] is None) == blank, method
        if not blank:
            agree(one["heatmap"], heatmap, method)


@pytest.mark.parametrize("scene", SCENES, ids=lambda path: path.stem)
def test_scenes_give_the_numbers_of_python_and_point_at_the_garment(
    page: Page, garments: Path, scene: Path
) -> None:
    page.find(f"#scenes [data-name='{scene.stem}']").click()
    page.settle()
    pixels = np.array(Image.open(scene))
    drawn = next(s for s in two_garment_scenes(50, seed=0) if (s.image == pixels).all())
    for target, mask in zip(drawn.classes, drawn.masks, strict=True):
        page.choose("class", target)
        agree_on_everything(page, garments, scene, target)
        heatmap = page.shown["maps"]["generic_attention"]["heatmap"]
        assert mask[np.unravel_index(heatmap.argmax(), mask.shape)]


def changed(path: Path, change: Callable[[onnx.ModelProto, dict[str, Any]], None]) -> Path:
    """The file after a change of the graph or of the contract's JSON."""
    model = onnx.load(path)
    (entry,) = (e for e in model.metadata_props if e.key == KEY)
    contract = json.loads(entry.value)
    change(model, contract)
    entry.value = json.dumps(contract)
    onnx.save(model, path)
    return path


VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "heatmaps": ({"heatmaps": True}, None),
    "maps": ({"outputs": "maps"}, None),
    "picture as it is": ({"embed_preprocessing": True, "heatmaps": True}, None),
    "three classes at once": ({"targets": 3}, None),
    "sums of logits": ({"seed": "weights"}, None),
    "pairs of pictures": ({}, lambda _, contract: contract["input"].update(batch=2)),
    "a border and BGR": (
        {"preprocessing": {"crop_mode": "border", "interpolation": "bilinear"}},
        lambda _, contract: contract["input"].update(color_order="BGR"),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_files_give_the_numbers_of_python(
    page: Page, small: ir.Model, photo: Path, tmp_path: Path, variant: str
) -> None:
    options, change = VARIANTS[variant]
    path = tmp_path / "vit.onnx"
    ox.instrument(small, path, **options)
    if change is not None:
        changed(path, change)
    page.model(path).picture(photo)
    assert page.error == ""
    for target in (7, 2):
        page.choose("class", target)
        agree_on_everything(page, path, photo, target)


def test_a_model_from_an_address(
    site: tuple[Page, Path], small: ir.Model, photo: Path, tmp_path: Path
) -> None:
    page, folder = site
    ox.instrument(small, folder / "small.onnx", methods=["gradcam"], labels=list("abcdefghij"))
    page.open("?model=small.onnx").picture(photo).choose("class", 3)
    assert page.find("#model").text == "small.onnx"
    assert page.status.startswith("d, ")
    agree_on_everything(page, folder / "small.onnx", photo, 3)


# Pictures


@pytest.fixture(scope="module")
def photo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Neither square nor regular: blurred noise of all sizes."""
    path = tmp_path_factory.mktemp("photo") / "photo.png"
    rng = np.random.default_rng(11)
    layers = [
        cv2.resize(rng.normal(size=(5 * n, 7 * n, 3)), (211, 157), interpolation=cv2.INTER_CUBIC)
        for n in (1, 3, 10, 30)
    ]
    Image.fromarray((128 + 40 * sum(layers)).clip(0, 255).astype(np.uint8)).save(path)
    return path


SPECS = [
    ImageInput(size=(64, 64), interpolation="bicubic", crop_pct=0.9),
    ImageInput(size=(64, 64), interpolation="bilinear", crop_pct=0.875),
    ImageInput(size=(64, 96), interpolation="lanczos", crop_pct=0.95),
    ImageInput(size=(96, 64), interpolation="box", crop_mode="squash"),
    ImageInput(size=(80, 64), interpolation="hamming", crop_mode="border", color_order="BGR"),
    ImageInput(size=(56, 56), interpolation="nearest", crop_pct=1.1),
    ImageInput(size=(224, 224), interpolation="bicubic", crop_pct=0.9),
    ImageInput(size=(180, 180), interpolation="bilinear", crop_mode="border", crop_pct=1.2),
]


def prepared(page: Page, picture: Path, spec: ImageInput) -> tuple[Array, dict[str, Any]]:
    """The page's own preprocessing: pixel values and geometry."""
    way, pixels = page.run(
        """import("./preprocessing.js").then(async ({ geometry, preprocess, readPicture }) => {
          const picture = await readPicture(new Blob([Uint8Array.from(a)]), "it");
          const way = geometry(picture, b);
          done([way, [...preprocess(picture, b, way)]]);
        });""",
        list(picture.read_bytes()),
        json.loads(json.dumps(dataclasses.asdict(spec))),
    )
    return np.array(pixels, np.float32).reshape(3, *spec.size), way


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.interpolation} {s.crop_mode} {s.size}")
def test_preprocessing_is_that_of_python(page: Page, photo: Path, spec: ImageInput) -> None:
    found, way = prepared(page, photo, spec)
    expected, geometry = preprocess(load_picture(photo)[0], spec)
    assert way == json.loads(json.dumps(dataclasses.asdict(geometry)))
    np.testing.assert_array_equal(found, expected)


AS_IT_IS = ImageInput(size=(31, 47), mean=(0, 0, 0), std=(1, 1, 1), crop_mode="squash")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(page: Page, tmp_path: Path, orientation: int) -> None:
    path, exif = tmp_path / "turned.png", Image.Exif()
    exif[0x0112] = orientation
    sides = AS_IT_IS.size if orientation < 5 else AS_IT_IS.size[::-1]
    pixels = np.random.default_rng(orientation).integers(0, 256, (*sides, 3), np.uint8)
    Image.fromarray(pixels).save(path, exif=exif)
    np.testing.assert_array_equal(
        prepared(page, path, AS_IT_IS)[0], preprocess(load_picture(path)[0], AS_IT_IS)[0]
    )


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1"])
def test_other_kinds_of_pictures(page: Page, tmp_path: Path, mode: str) -> None:
    """Transparent ones lie on white. One level: the browser rounds while it blends."""
    path = tmp_path / "other.png"
    pixels = np.random.default_rng(5).integers(0, 256, (*AS_IT_IS.size, 4), np.uint8)
    Image.fromarray(pixels, "RGBA").convert(mode).save(path)
    found, expected = (
        prepared(page, path, AS_IT_IS)[0],
        preprocess(load_picture(path)[0], AS_IT_IS)[0],
    )
    assert np.abs(found - expected).max() <= 1.01 / 255


@pytest.mark.parametrize("crop", [{"crop_pct": 0.8}, {"crop_mode": "border", "crop_pct": 1.3}])
def test_the_map_lies_where_python_lays_it(
    page: Page, small: ir.Model, photo: Path, tmp_path: Path, crop: dict[str, Any]
) -> None:
    path = tmp_path / "vit.onnx"
    ox.instrument(small, path, methods=["generic_attention"], preprocessing=crop)
    overlay = page.model(path).picture(photo).choose("class", 4).overlay()
    result = ox.Explainer(path, device="cpu").explain(photo, target=4)
    colors = result.overlay(alpha=1)[0]
    rows, columns, _ = result.pictures[0].geometry.project(result.heatmap[0])
    seen = np.zeros(overlay.shape[:2], np.bool_)
    seen[rows, columns] = True
    assert seen.sum() > 0 and (seen.all() == (crop.get("crop_mode") == "border"))
    np.testing.assert_array_equal(overlay[..., 3], np.where(seen, 255, 0))
    difference = np.abs(overlay[..., :3].astype(int) - colors)[seen]
    # Where a value is on the border between two colours, either is right.
    ramp = cv2.applyColorMap(np.arange(256, dtype=np.uint8)[:, None], cv2.COLORMAP_TURBO)
    step = np.abs(np.diff(ramp.astype(int), axis=0)).max()
    assert (difference > COLOR).mean() < 0.01
    assert difference.max() <= COLOR + step


def test_long_thin_pictures_keep_their_sides_in_memory(page: Page, tmp_path: Path) -> None:
    Image.new("RGB", (30000, 1)).save(tmp_path / "thin.png")
    shown = page.shown["picture"]
    page.picture(tmp_path / "thin.png")
    assert page.error == "thin.png is too elongated: 30000x1 pixels."
    assert page.choose("class", 1).error == ""
    assert page.shown["picture"] == shown


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
