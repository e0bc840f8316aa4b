"""Our measures are those of Quantus on the same maps, wherever both define the same.

Localisation, imputation and the correlation of maps; perturbation is in test_quantus_perturbation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxplain.differences import rank_correlation
from onnxplain.evaluation.imputation import impute
from onnxplain.evaluation.localisation import energy_inside, pointing_game

torch: Any = pytest.importorskip("torch")
quantus: Any = pytest.importorskip("quantus", reason="quantus is not installed (see the Makefile)")

SIZE = 12
MAPS = 200
SHARES = (10, 30, 50, 70, 90)  # percent

FLOAT64 = 1e-12  # the same sums in another order
FLOAT32 = 2.0**-22  # of values up to 4, rounded once

# Maps as they are: Quantus would divide them by the largest value of the batch.
PLAIN = {"abs": False, "normalise": False, "disable_warnings": True}


@pytest.fixture(scope="module")
def heatmaps() -> NDArray[np.float64]:
    return np.random.default_rng(0).random((MAPS, 1, SIZE, SIZE))


@pytest.fixture(scope="module")
def masks() -> NDArray[np.int8]:
    """Each with an object: without one Quantus returns NaN, and we leave the picture out."""
    masks = (np.random.default_rng(1).random((MAPS, 1, SIZE, SIZE)) < 0.3).astype(np.int8)
    masks[:, :, 0, 0] = 1
    return masks


def scores(metric: Any, heatmaps: NDArray[Any], masks: NDArray[np.int8]) -> list[float]:
    pictures = np.zeros((len(heatmaps), 3, SIZE, SIZE), np.float32)
    labels = np.zeros(len(heatmaps), int)
    return list(metric(None, pictures, labels, heatmaps, masks, channel_first=True))


def test_energy_is_relevance_mass_accuracy(
    heatmaps: NDArray[np.float64], masks: NDArray[np.int8]
) -> None:
    # Quantus knows no uncounted pixels, and a blank map gives it 0 / 0 where we say 0.
    found = [energy_inside(*pair) for pair in zip(heatmaps[:, 0], masks[:, 0], strict=True)]
    expected = scores(quantus.RelevanceMassAccuracy(**PLAIN), heatmaps, masks)
    np.testing.assert_allclose(found, expected, rtol=FLOAT64)


def test_pointing_game_where_one_value_is_the_largest(
    heatmaps: NDArray[np.float64], masks: NDArray[np.int8]
) -> None:
    found = [pointing_game(*pair) for pair in zip(heatmaps[:, 0], masks[:, 0], strict=True)]
    assert found == scores(quantus.PointingGame(**PLAIN), heatmaps, masks)
    assert 0 < sum(found) < MAPS


def test_of_several_largest_values_quantus_takes_the_best(masks: NDArray[np.int8]) -> None:
    # The first one in reading order is on the background, the second on the object.
    mask = np.zeros((1, 1, SIZE, SIZE), np.int8)
    mask[..., 3, 3] = 1
    heatmap = np.zeros(mask.shape)
    heatmap[..., 2, 2] = heatmap[..., 3, 3] = 1
    assert scores(quantus.PointingGame(**PLAIN), heatmap, mask) == [True]
    assert not pointing_game(heatmap[0, 0], mask[0, 0])


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("shape", [(3, 20, 20), (3, 18, 25), (3, 25, 18)])
def test_imputation_is_noisy_linear_imputation(
    shape: tuple[int, int, int], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(share)
    pixels = rng.normal(size=shape).astype(np.float32)
    removed = rng.random(shape[1:]) < share / 100
    # Quantus draws from NumPy's global generator: channel by channel, pixels as they are given.
    drawn = np.random.default_rng(7)
    monkeypatch.setattr(np.random, "randn", lambda *size: drawn.standard_normal(size))
    for noise in (0.0, 0.01):
        found = impute(pixels, removed, np.random.default_rng(7), noise=noise)
        drawn = np.random.default_rng(7)
        expected = quantus.noisy_linear_imputation(pixels, np.flatnonzero(removed), noise=noise)
        np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT32)


def test_road_on_a_model(heatmaps: NDArray[np.float64]) -> None:
    # Of one channel: with three, Quantus 0.6 ranks the values of all channels and then takes
    # their places for places of pixels. In one batch: it returns the accuracy of the first.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIZE * SIZE, 4)).eval()
    pictures = np.random.default_rng(2).random((MAPS, 1, SIZE, SIZE)).astype(np.float32)

    def predicted(batch: NDArray[np.float32]) -> NDArray[np.int64]:
        with torch.inference_mode():
            return model(torch.from_numpy(batch)).argmax(-1).numpy()

    labels = predicted(pictures)
    metric = quantus.ROAD(percentages=SHARES, noise=0.0, **PLAIN)
    expected = metric(model, pictures, labels, heatmaps, channel_first=True, batch_size=MAPS)
    order = np.argsort(-heatmaps.reshape(MAPS, -1), axis=1)
    for share in SHARES:
        removed = np.zeros((MAPS, SIZE * SIZE), bool)
        np.put_along_axis(removed, order[:, : SIZE * SIZE * share // 100], True, axis=1)
        filled = [
            impute(picture, out.reshape(SIZE, SIZE), np.random.default_rng(0), noise=0)
            for picture, out in zip(pictures, removed, strict=True)
        ]
        found = float((predicted(np.stack(filled)) == labels).mean())
        assert found == pytest.approx(expected[share], abs=FLOAT64)
        assert 0 < found < 1


@pytest.mark.parametrize("values", [MAPS * SIZE * SIZE, 5])  # without and with equal ones
def test_rank_correlation_is_spearman_similarity(values: int) -> None:
    rng = np.random.default_rng(3)
    a = rng.permutation(MAPS * SIZE * SIZE).reshape(MAPS, SIZE, SIZE) % values
    b = rng.permutation(MAPS * SIZE * SIZE).reshape(MAPS, SIZE, SIZE) % values
    b += a  # some correlate
    found = [rank_correlation(*pair) for pair in zip(a, b, strict=True)]
    flat = a.reshape(MAPS, -1), b.reshape(MAPS, -1)
    expected = [quantus.correlation_spearman(*pair) for pair in zip(*flat, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=FLOAT64)
    assert 0.2 < min(found) < max(found) < 0.95


@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_of_blank_maps_quantus_has_no_correlation() -> None:
    # Of a constant map it returns NaN, where we say 1 if both are and 0 if one is; of a map that is
    # constant up to rounding it correlates the rounding.
    blank, other = np.full(SIZE, 0.5), np.arange(SIZE) / SIZE
    nearly = blank + 1e-7 * other
    for a, b, ours, theirs in (
        (blank, blank, 1, np.nan),
        (blank, other, 0, np.nan),
        (nearly, other, 0, 1),
        (nearly, blank, 1, np.nan),
    ):
        assert rank_correlation(a, b) == ours
        found = quantus.correlation_spearman(a, b)
        np.testing.assert_allclose(found, theirs, rtol=FLOAT64)
