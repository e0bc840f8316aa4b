"""Perturbation and deletion are Quantus' pixel flipping and region perturbation on the same maps.

Insertion has no counterpart there.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy.integrate import trapezoid

import onnxplain as ox
from onnxplain.contract import ImageInput
from onnxplain.evaluation.baselines import random_map, seed_of
from onnxplain.evaluation.measures import TENTHS
from onnxplain.evaluation.perturbation import (
    area,
    deleted,
    patch_of_pixel,
    patch_values,
    perturbed,
    ranks_from_highest,
)
from onnxplain.runtime.explanation import upsample

torch: Any = pytest.importorskip("torch")
quantus: Any = pytest.importorskip("quantus", reason="quantus is not installed (see the Makefile)")

PICTURES, SIZE, CLASSES = 16, (12, 10), 4
PIXELS = SIZE[0] * SIZE[1]
PATCH, GRID = 2, (6, 5)
PATCHES = patch_of_pixel(SIZE, GRID, SIZE)
SPEC = ImageInput(size=SIZE, mean=(0, 0, 0), std=(1, 1, 1))  # so that black is 0

FLOAT32 = 1e-6  # probabilities of float32 logits, in batches of another size

# Maps as they are: Quantus would divide them by the largest value of the batch.
PLAIN = {"abs": False, "normalise": False, "disable_warnings": True}

Floats = NDArray[Any]


class Top1(torch.nn.Module):
    """1 for the likeliest class and 0 for the others: Quantus follows only what a model returns."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Any) -> Any:
        logits = self.model(pixels)
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()


def flipped(model: Any, pixels: Floats, labels: Floats, maps: Floats, softmax: bool) -> Floats:
    """Pixel flipping from the highest value on, after each tenth of the pixels: [pictures, 10].

    It counts values, three a pixel, and its steps must divide the number of pixels: it takes a
    thirtieth of the pixels a step. Its order of equal values is not defined, so all must differ.
    """
    count = maps[0].size
    assert all(len(np.unique(one)) == count for one in maps)
    metric = quantus.PixelFlipping(
        features_in_step=3 * (count // 30), perturb_baseline=0.0, **PLAIN
    )
    curves = metric(
        model, pixels, labels, maps[:, None], channel_first=True, softmax=softmax, batch_size=100
    )
    return np.array(curves)[:, 2::3]


def drops(model: Any, pixels: Floats, labels: Floats, maps: Floats, **settings: Any) -> Floats:
    """Region perturbation: what the probability loses, [pictures, regions]."""
    metric = quantus.RegionPerturbation(perturb_baseline=0.0, **PLAIN, **settings)
    return metric(model, pixels, labels, maps[:, None], channel_first=True, batch_size=100)


def output(model: Any, pixels: Floats, labels: Floats, softmax: bool) -> Floats:
    with torch.inference_mode():
        values = model(torch.from_numpy(pixels))
    return (values.softmax(-1) if softmax else values).numpy()[np.arange(len(labels)), labels]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    last = torch.nn.Linear(4 * (SIZE[0] - 2) * (SIZE[1] - 2), CLASSES)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), last
    ).eval()


@pytest.fixture(scope="module")
def pixels() -> NDArray[np.float32]:
    shape = (PICTURES, 3, *SIZE)
    return np.random.default_rng(0).normal(scale=3, size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def labels(model: Any, pixels: NDArray[np.float32]) -> NDArray[np.intp]:
    with torch.inference_mode():
        return model(torch.from_numpy(pixels)).argmax(-1).numpy()


@pytest.fixture(scope="module")
def maps() -> Floats:
    return np.random.default_rng(1).random((PICTURES, *SIZE))


@pytest.mark.parametrize("order", ["most", "least"])
@pytest.mark.parametrize("kind", ["probability", "top-1"])
def test_perturbation_is_pixel_flipping(
    model: Any, pixels: Floats, labels: Floats, maps: Floats, kind: str, order: str
) -> None:
    softmax = kind == "probability"
    followed = model if softmax else Top1(model).eval()
    chosen = slice(9) if order == "most" else slice(9, 18)
    # Quantus knows one order; the least relevant first is that of the map upside down.
    from_first = maps if order == "most" else 1 - maps
    theirs = flipped(followed, pixels, labels, from_first, softmax)
    clean = output(followed, pixels, labels, softmax)
    for i in range(PICTURES):
        ranks = ranks_from_highest(maps[i], np.zeros(SIZE))
        pictures = [p.copy() for p in perturbed(pixels[i], ranks, "zero", SPEC, [0])][chosen]
        ours = output(followed, np.stack(pictures), labels[[i] * 9], softmax)
        np.testing.assert_allclose(ours, theirs[i, :9], rtol=0, atol=FLOAT32)
        # Their curve has no clean point, and goes on to the black picture.
        whole = np.array([clean[i], *theirs[i, :9]], np.float64)
        found = area(np.array([clean[i], *ours], np.float64), np.array(TENTHS) / 10)
        assert found == pytest.approx(trapezoid(whole, dx=0.1), abs=FLOAT32)
    black = output(followed, np.zeros_like(pixels), labels, softmax)
    np.testing.assert_allclose(theirs[:, 9], black, rtol=0, atol=FLOAT32)
    assert 0.1 < theirs[:, :9].mean() < 0.9


def test_area_of_quantus_counts_steps_and_has_no_clean_point(
    model: Any, pixels: Floats, labels: Floats, maps: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np, "trapz", trapezoid, raising=False)  # which NumPy 2.4 has no longer
    settings = {"features_in_step": PIXELS, "perturb_baseline": 0.0, **PLAIN}  # a third a step
    asked = model, pixels, labels, maps[:, None]
    curves = np.array(quantus.PixelFlipping(**settings)(*asked, channel_first=True))
    metric = quantus.PixelFlipping(return_auc_per_sample=True, **settings)
    found = np.array(metric(*asked, channel_first=True))
    assert curves.shape == (PICTURES, 3)
    np.testing.assert_allclose(found, area(curves, np.arange(3.0)), rtol=0, atol=FLOAT32)


def watched() -> tuple[Any, list[Floats]]:
    """A model, and the batches that it has been asked for."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * PIXELS, CLASSES)).eval()
    batches: list[Floats] = []
    model.register_forward_pre_hook(lambda _, given: batches.append(given[0].numpy().copy()))
    return model, batches


def test_pixel_flipping_removes_values_where_we_remove_pixels(
    pixels: Floats, labels: Floats, maps: Floats
) -> None:
    linear, batches = watched()
    # 20 values are six pixels, and two of the three of another.
    metric = quantus.PixelFlipping(features_in_step=20, perturb_baseline=0.0, **PLAIN)
    metric(linear, pixels, labels, maps[:, None], channel_first=True)
    for picture in batches[0]:
        gone = (picture == 0).sum(axis=0)
        assert sorted(gone[gone > 0].tolist()) == [2, 3, 3, 3, 3, 3, 3]
    ranks = ranks_from_highest(maps[0], np.zeros(SIZE))
    for picture in perturbed(pixels[0], ranks, "zero", SPEC, [0]):
        assert set(np.unique((picture == 0).sum(axis=0))) == {0, 3}


def test_mean_and_black_of_quantus_are_of_what_is_left(
    pixels: Floats, labels: Floats, maps: Floats
) -> None:
    # Mean and lowest of all values, after the steps before. Ours: the mean of each channel of the
    # whole picture, and black.
    for baseline, of in (("mean", np.mean), ("black", np.min)):
        linear, batches = watched()
        metric = quantus.PixelFlipping(features_in_step=60, perturb_baseline=baseline, **PLAIN)
        metric(linear, pixels, labels, maps[:, None], channel_first=True)
        for before, after in itertools.pairwise([pixels, *batches[:3]]):
            fill = of(before[0])
            changed = after[0] != before[0]
            assert changed.any()
            np.testing.assert_allclose(after[0][changed], fill, rtol=0, atol=FLOAT32)
    ranks = ranks_from_highest(maps[0], np.zeros(SIZE))
    picture = [p.copy() for p in perturbed(pixels[0], ranks, "mean", SPEC, [0])][8]
    found = picture[:, ranks < 9 * PIXELS // 10]
    means = pixels[0].mean(axis=(1, 2))[:, None]
    np.testing.assert_allclose(found, np.broadcast_to(means, found.shape), rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("order", ["morf", "lerf"])
def test_deletion_is_region_perturbation(
    model: Any, pixels: Floats, labels: Floats, maps: Floats, order: str
) -> None:
    count = GRID[0] * GRID[1]
    theirs = drops(
        model, pixels, labels, maps, patch_size=PATCH, order=order, regions_evaluation=count
    )
    clean = output(model, pixels, labels, softmax=True)
    for i in range(PICTURES):
        ranks = ranks_from_highest(patch_values(maps[i], PATCHES), np.zeros(count))
        if order == "lerf":
            ranks = count - 1 - ranks
        pictures = [p.copy() for p in deleted(pixels[i], ranks, PATCHES, count)]
        ours = output(model, np.stack(pictures), labels[[i] * count], softmax=True)
        np.testing.assert_allclose(clean[i] - ours, theirs[i], rtol=0, atol=FLOAT32)
    assert np.ptp(theirs, axis=1).min() > 0.1


def test_regions_of_quantus_stand_in_the_middle_where_ours_start_at_the_corner(
    pixels: Floats, labels: Floats
) -> None:
    # Ten columns in patches of 4: Quantus has regions of 3, 4 and 3 columns; a model has two
    # patches, and the columns that it does not see go with the second.
    linear, batches = watched()
    to_the_right = (np.arange(10.0, 0, -1) + np.arange(SIZE[0])[:, None] / 1000).astype(np.float32)
    drops(linear, pixels[:1], labels[:1], to_the_right[None], patch_size=4, regions_evaluation=9)
    clean, *theirs = [columns_removed(batch[0]) for batch in batches]
    assert clean == 0
    patches = patch_of_pixel(SIZE, (3, 2), (12, 8))
    ranks = ranks_from_highest(patch_values(to_the_right, patches), np.zeros(6))
    ours = [columns_removed(picture) for picture in deleted(pixels[0], ranks, patches, 6)]
    assert theirs == [3, 3, 3, 7, 7, 7, 10, 10, 10]
    assert ours == [4, 4, 4, 10, 10, 10]


def columns_removed(picture: Floats) -> int:
    """How many columns something is removed from."""
    return int((picture == 0).all(axis=0).any(axis=0).sum())


# The whole of `evaluate`, on a file that Quantus runs through onnxruntime. Its pictures are those
# before normalisation where black is removed, and normalised ones where the mean colour is.

VIT_SIZE, VIT_PATCH, VIT_GRID = (48, 40), 8, (6, 5)
REGIONS = VIT_GRID[0] * VIT_GRID[1]
MEAN = np.array([0.4, 0.5, 0.6], np.float32)[:, None, None]
STD = np.array([0.2, 0.25, 0.3], np.float32)[:, None, None]
METHODS = ("rollout", "transformer_attribution", "attnlrp")
NAMES = ("a.png", "b.png", "c.png", "d.png")


class Exported(torch.nn.Module):
    """An ONNX file, whose input is made of pixels by subtracting `mean` and dividing by `std`."""

    def __init__(self, path: Path, mean: Any = 0, std: Any = 1) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # that a target can be given is no news
        self.session = onnxruntime.InferenceSession(path, options)
        self.mean, self.std = mean, std

    def forward(self, pixels: Any) -> Any:
        values = ((pixels.numpy() - self.mean) / self.std).astype(np.float32)
        return torch.from_numpy(self.session.run(["logits"], {"pixel_values": values})[0])


def raw_pixels(folder: Path) -> NDArray[np.float32]:
    pictures = [Image.open(folder / "pictures" / name) for name in NAMES]
    return np.stack([np.asarray(p, np.float32).transpose(2, 0, 1) / 255 for p in pictures])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer whose prediction hangs on the pictures, and four of these without labels."""
    from small_vits import small_vit

    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "pictures").mkdir()
    rng = np.random.default_rng(5)
    for name in NAMES:
        patches = rng.integers(0, 256, (*VIT_GRID, 3), dtype=np.uint8)
        picture = patches.repeat(VIT_PATCH, axis=0).repeat(VIT_PATCH, axis=1)
        Image.fromarray(picture).save(folder / "pictures" / name)
    vit = small_vit(img_size=VIT_SIZE).eval()
    vit.pretrained_cfg = {
        "num_classes": 10,
        "mean": tuple(MEAN.flat),
        "std": tuple(STD.flat),
        "crop_pct": 1.0,
    }
    with torch.no_grad():
        vit.head.weight.mul_(10)
        vit.head.bias.sub_(vit(torch.from_numpy((raw_pixels(folder) - MEAN) / STD)).mean(0))
    ox.export(vit, folder / "vit.onnx", methods=METHODS, verify=False)
    return folder


@pytest.fixture(scope="module")
def evaluation(folder: Path) -> ox.Evaluation:
    return ox.evaluate(
        folder / "vit.onnx",
        folder / "pictures",
        measures=["perturbation", "insertion_deletion"],
        fills=["zero"],
        steps=REGIONS,
        device="cpu",
    )


@pytest.mark.parametrize("method", [*METHODS, "random"])
def test_evaluate_is_quantus(folder: Path, evaluation: ox.Evaluation, method: str) -> None:
    raw = raw_pixels(folder)
    model = Exported(folder / "vit.onnx", MEAN, STD).eval()
    labels = model(torch.from_numpy(raw)).numpy().argmax(-1)
    heatmaps, regions = maps_for_quantus(folder, method, labels)

    def value(measure: str) -> Any:
        return evaluation.value(method, f"{measure}.predicted").value

    areas = {}
    for order, ordered in (("most", heatmaps), ("least", heatmaps.max() - heatmaps)):
        for softmax, followed in ((True, model), (False, Top1(model).eval())):
            clean = output(followed, raw, labels, softmax)
            curves = flipped(followed, raw, labels, ordered, softmax)[:, :9]
            whole = np.concatenate([clean[:, None], curves], axis=1, dtype=np.float64)
            areas[order, softmax] = trapezoid(whole, dx=0.1).mean()
    difference = areas["least", True] - areas["most", True]
    assert value("perturbation.zero.difference") == pytest.approx(difference, abs=FLOAT32)
    assert abs(difference) > 1000 * FLOAT32
    for name, order in (("positive", "most"), ("negative", "least")):
        expected = areas[order, False]
        assert value(f"perturbation.zero.{name}") == pytest.approx(expected, abs=FLOAT32)
        assert expected < 0.85  # of 0.9: some predictions change

    normalised = (raw - MEAN) / STD
    unchanged = Exported(folder / "vit.onnx").eval()
    lost = drops(
        unchanged, normalised, labels, regions, patch_size=VIT_PATCH, regions_evaluation=REGIONS
    )
    clean = output(unchanged, normalised, labels, softmax=True)
    whole = clean[:, None] - np.concatenate([np.zeros((4, 1)), lost], axis=1)
    expected = trapezoid(whole, dx=1 / REGIONS).mean()
    assert value("deletion") == pytest.approx(expected, abs=FLOAT32)
    assert abs(expected - clean.mean()) > 1000 * FLOAT32


def maps_for_quantus(folder: Path, method: str, labels: Floats) -> tuple[Floats, Floats]:
    """Maps for the order of pixels and for that of patches, both [pictures, H, W].

    Enlarged maps are flat at the border, and that of a method with a value per pixel where it is
    not positive: pixels of equal value go by the random map, then in reading order. A map of
    patches orders these as it is, and not by the mean of the enlarged one.
    """
    explainer = ox.Explainer(folder / "vit.onnx", device="cpu")
    heatmaps, regions = [], []
    for name, label in zip(NAMES, labels.tolist(), strict=True):
        grid = random_map(seed_of(0, name), VIT_GRID)
        chance = heatmap = upsample(grid[None], VIT_SIZE)[0][0]
        if method != "random":
            found = explainer.explain(folder / "pictures" / name, method=method, target=label)
            grid, heatmap = found.grid[0], found.heatmap[0]
        assert len(np.unique(heatmap)) < heatmap.size
        order = np.lexsort((-chance.reshape(-1), -heatmap.reshape(-1)))
        places = np.empty(heatmap.size)
        places[order] = np.arange(heatmap.size, 0, -1)
        heatmaps.append(places.reshape(VIT_SIZE))
        if grid.shape == VIT_GRID:
            regions.append(grid.repeat(VIT_PATCH, axis=0).repeat(VIT_PATCH, axis=1))
        else:
            regions.append(heatmap)
    return np.stack(heatmaps), np.stack(regions).astype(np.float64)
