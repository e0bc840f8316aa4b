"""The model randomisation test: rank correlations, and maps along the cascade."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

import onnxplain as ox
from onnxplain.demo.scenes import two_garment_scenes
from onnxplain.differences import rank_correlation
from onnxplain.errors import ContractError, InputError, ModelError
from onnxplain.evaluation import sanity
from onnxplain.evaluation.sanity import PREDICTION_CHANGED, randomisation
from onnxplain.graphs.randomised import levels, randomise
from onnxplain.runtime.preprocessing import prepare

GARMENTS = Path(ox.__file__).parent / "demo" / "garments.onnx"
EXACT = 1e-12  # a few operations in float64
# Two neighbours of n ranks that rounding exchanges cost 12 / (n^3 - n), 4.6e-5 of 64 patches.
SWAPS = 2e-4


def grid(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32).reshape(2, 2)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (grid(1, 2, 3, 4), grid(10, 20, 40, 30), 0.8),  # 1 - 6 * 2 / (4 * 15)
        (grid(1, 2, 3, 4), grid(-1, -2, -3, -4), -1),
        (grid(1, 2, 3, 4), grid(1e-9, 5e-9, 3e3, 4e30), 1),
        # Ranks 1.5, 1.5, 3, 4: 4.5 / sqrt(4.5 * 5).
        (grid(0, 0, 2, 3), grid(1, 2, 3, 4), 4.5 / np.sqrt(22.5)),
        (grid(0, 0, 0, 3), grid(0, 0, 7, 0), -1 / 3),
    ],
)
def test_rank_correlation(a: NDArray[Any], b: NDArray[Any], expected: float) -> None:
    assert rank_correlation(a, b) == pytest.approx(expected, abs=EXACT)
    assert rank_correlation(b, a) == pytest.approx(expected, abs=EXACT)


BLANK = {
    "zero": grid(0, 0, 0, 0),
    "constant": grid(7, 7, 7, 7),
    "constant up to rounding": grid(7, 7.00005, 7, 7),
    "NaN": grid(1, 2, np.nan, 4),
    "infinite": grid(1, 2, np.inf, 4),
    "all infinite": grid(*[np.inf] * 4),
}


@pytest.mark.parametrize("a", BLANK)
@pytest.mark.parametrize("b", BLANK)
def test_rank_correlation_of_degenerate_maps(a: str, b: str) -> None:
    assert rank_correlation(BLANK[a], BLANK[b]) == 1
    assert rank_correlation(BLANK[a], grid(1, 2, 3, 4)) == 0
    assert rank_correlation(grid(7, 7.0005, 7, 7), BLANK[b]) == 0


def test_rank_correlation_of_maps_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"shapes \[2, 2\] and \[4\]; expected the same"):
        rank_correlation(grid(1, 2, 3, 4), np.arange(4.0))


@pytest.fixture(scope="module")
def scenes() -> tuple[list[NDArray[np.float32]], list[int]]:
    """20 scenes, each asked for the garment that the model need not predict."""
    drawn = list(two_garment_scenes(20, 6))
    spec = ox.Explainer(GARMENTS, device="cpu").contract.input
    images = [image for image, _ in prepare([scene.image for scene in drawn], spec)]
    return images, [scene.classes[1] for scene in drawn]


def run(
    images: list[NDArray[Any]], classes: list[int], scratch: Path, **options: Any
) -> dict[str, dict[str, NDArray[np.float64]]]:
    given: dict[str, Any] = {"methods": ["raw_attention", "gradcam", "generic_attention"]}
    given |= {"seed": 1, "device": "cpu", "threads": 1, "source": GARMENTS, **options}
    return dict(randomisation(images=images, classes=classes, scratch=scratch, **given))


def test_the_cascade(scenes: Any, tmp_path: Path) -> None:
    images, classes = scenes
    found = run(images, classes, tmp_path)
    assert list(found) == levels(GARMENTS)
    for values in found.values():
        assert list(values) == ["raw_attention", "gradcam", "generic_attention", PREDICTION_CHANGED]
        assert {(v.dtype, v.shape) for v in values.values()} == {(np.dtype(np.float64), (20,))}
    first, last = found["behind attention 3"], found["all"]
    # The last attention does not depend on what is behind it; the other maps do.
    np.testing.assert_allclose(first["raw_attention"], 1, atol=EXACT)
    assert first["gradcam"].mean() < 0.5
    for method in ("raw_attention", "gradcam", "generic_attention"):
        assert abs(last[method].mean()) < 0.3
    assert last[PREDICTION_CHANGED].mean() > 0.5
    assert set(np.unique(last[PREDICTION_CHANGED])) <= {0, 1}
    assert not list(tmp_path.iterdir())


def test_a_level_by_hand(scenes: Any, tmp_path: Path) -> None:
    """The same class is asked of both models; a relevance of pixels keeps its sign."""
    images, classes = scenes
    path, x = tmp_path / "level.onnx", np.stack(images)
    randomise(GARMENTS, path, 1, seed=1)
    before, after = (ox.Explainer(p, device="cpu", threads=1) for p in (GARMENTS, path))
    found = run(
        images, classes, tmp_path, methods=["gradcam", "relevance", "attnlrp"], batch_size=3
    )
    for method in ("gradcam", "attnlrp"):
        one, other = (e.explain(x, method=method, target=classes) for e in (before, after))
        expected = [rank_correlation(a, b) for a, b in zip(one.grid, other.grid, strict=True)]
        np.testing.assert_allclose(found["behind attention 3"][method], expected, atol=SWAPS)
        assert method != "attnlrp" or one.grid.min() < 0
    changed = one.logits.argmax(axis=1) != other.logits.argmax(axis=1)
    assert np.array_equal(found["behind attention 3"][PREDICTION_CHANGED], changed)
    assert "relevance" in found["all"]


def test_levels_that_are_done_are_left_out(
    scenes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, classes = scenes[0][:4], scenes[1][:4]
    whole = run(images, classes, tmp_path)
    names = levels(GARMENTS)
    rest = run(images, classes, tmp_path, done=names[:3])
    assert list(rest) == names[3:]
    for name, values in rest.items():
        for method, correlations in values.items():
            assert np.array_equal(correlations, whole[name][method])

    def opened(*_: Any, **__: Any) -> None:
        raise AssertionError("opened a model for nothing")

    monkeypatch.setattr(sanity, "Model", opened)
    assert run(images, classes, tmp_path, done=names) == {}


def test_a_bundle(small: Any, tmp_path: Path) -> None:
    bundle, single = tmp_path / "bundle", tmp_path / "single.onnx"
    ox.instrument(small, bundle)
    ox.instrument(small, single)
    rng = np.random.default_rng(0)
    images = list(rng.normal(size=(3, 3, 32, 32)).astype(np.float32))
    methods = ["generic_attention", "partial_lrp"]  # of two graphs
    one, other = (
        run(images, [1, 2, 3], tmp_path, source=source, methods=methods)
        for source in (bundle, single)
    )
    assert list(one) == list(other) == ["behind attention 1", "behind attention 0", "all"]
    for name, values in one.items():
        for method, correlations in values.items():
            np.testing.assert_allclose(correlations, other[name][method], atol=12 / (16**3 - 16))


def test_a_picture_as_it_is(small: Any, tmp_path: Path) -> None:
    path = tmp_path / "pictures.onnx"
    ox.instrument(small, path, methods=["rollout"], embed_preprocessing=True)
    rng = np.random.default_rng(0)
    pictures: list[NDArray[Any]] = [
        rng.integers(0, 256, (40, 30 + i, 3), dtype=np.uint8) for i in range(3)
    ]
    found = run(pictures, [0, 0, 0], tmp_path, source=path, methods=["rollout"])
    assert found["behind attention 1"]["rollout"] == pytest.approx(np.ones(3), abs=EXACT)
    assert found["all"]["rollout"].max() < 1


def test_a_model_that_overflows_has_degenerate_maps(scenes: Any, tmp_path: Path) -> None:
    model, path = onnx.load(GARMENTS), tmp_path / "overflow.onnx"
    (head,) = (tensor for tensor in model.graph.initializer if tensor.name == "head.weight")
    infinite = np.full(tuple(head.dims), np.inf, np.float32)
    head.CopyFrom(numpy_helper.from_array(infinite, head.name))
    onnx.save(model, path)
    found = run(scenes[0][:2], [0, 1], tmp_path, source=path, methods=["gradcam", "rollout"])
    assert found["all"]["gradcam"].tolist() == [1, 1]
    assert found["all"]["rollout"].max() < 1
    assert found["all"][PREDICTION_CHANGED].tolist() == [0, 0]


def test_what_cannot_be_run(scenes: Any, small: Any, tmp_path: Path) -> None:
    images, classes = scenes
    with pytest.raises(InputError, match="19 classes for 20 images; expected one for each"):
        run(images, classes[1:], tmp_path)
    with pytest.raises(InputError, match="0 classes for 0 images"):
        run([], [], tmp_path)
    with pytest.raises(InputError, match="no method 'saliency'"):
        run(images, classes, tmp_path, methods=["saliency"])
    with pytest.raises(ModelError, match="no such file"):
        run(images, classes, tmp_path, source=tmp_path / "none.onnx")
    plain = tmp_path / "plain.onnx"
    onnx.save(onnx.load(GARMENTS), plain)
    model = onnx.load(plain)
    del model.metadata_props[:]
    onnx.save(model, plain)
    with pytest.raises(ContractError, match="not made by onnxplain"):
        run(images, classes, tmp_path, source=plain)
