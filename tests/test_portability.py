"""An explained file gives the maps that onnxruntime's Python gives in every other runtime."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from channels_last import turned
from double import run
from small_vits import CONFIGURATIONS, small_vit

import onnxplain as ox
from benchmarks.portability import ILL_CONDITIONED, bundled, compare, real
from benchmarks.runtimes import REFERENCE, RUNTIMES, Case, Outputs, Runtime
from onnxplain.export.plain import to_onnx
from onnxplain.outputs import METHODS, heatmap_name, map_name

# Of the largest value: float32 in another order of sums.
SAME = 1e-4
# A sum that falls on half a grey level is rounded to either side: of noise, one in a thousand.
SAME_RESIZED = 2e-2
# Relevance divides by sums of both signs, which multiplies rounding errors. Its maps may differ by
# this relative L2 norm and rank correlation, where onnxruntime has them right to `DETERMINED`.
SAME_RELEVANCE, SAME_ORDER = 1e-2, 0.999
DETERMINED = 1e-3

SMALL: dict[str, Callable[[], Any]] = {
    **{
        name: CONFIGURATIONS[name]
        for name in ("class token", "mean pooling, no class token", "registers", "qk norm")
    },
    "attention pooling": lambda: small_vit(global_pool="map", class_token=False),
    "maximum": lambda: small_vit(global_pool="max", class_token=False),
    "as many classes as features": lambda: small_vit(num_classes=32),
}


@pytest.fixture(scope="module", params=RUNTIMES)
def runtime(request: Any) -> Runtime:
    found = RUNTIMES[request.param]
    if missing := found.missing():
        pytest.skip(f"{request.param} {missing}")
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Case]]:
    """A small model with random weights: one picture for its prediction, two for given classes."""
    folder = tmp_path_factory.mktemp("small")

    @cache
    def cases(name: str) -> list[Case]:
        path = folder / f"{len(list(folder.iterdir()))}.onnx"
        size = ox.export(SMALL[name](), path, outputs="maps", verify=False).contract.input.size
        pictures = np.random.default_rng(0).integers(0, 256, (2, *size, 3), np.uint8)
        return [Case(path, pictures[:1]), Case(path, pictures, [3, 1])]

    return cases


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shared_real: Path) -> list[Case]:
    return real(tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="module")
def garments() -> list[Case]:
    return bundled()


@pytest.mark.parametrize("name", SMALL)
def test_small_models(runtime: Runtime, small: Callable[[str], list[Case]], name: str) -> None:
    for case in small(name):
        assert tuple(case.contract.maps) == tuple(METHODS)
        check(runtime, case)


def test_pictures_as_they_are(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "image.onnx"
    ox.export(small_vit(), path, outputs="maps", embed_preprocessing=True, verify=False)
    cropped, resized = (36, 50), (50, 70)  # the shorter side becomes 36
    for size, same in ((cropped, SAME), (resized, SAME_RESIZED)):
        pictures = np.random.default_rng(0).integers(0, 256, (1, *size, 3), np.uint8)
        check(runtime, Case(path, pictures, [3]), same)


def test_channels_last(runtime: Runtime, tmp_path: Path) -> None:
    ir.save(to_onnx(small_vit(), image_size=(32, 32)), tmp_path / "first.onnx")
    plain, path = turned(tmp_path / "first.onnx", tmp_path / "plain.onnx"), tmp_path / "last.onnx"
    ox.instrument(plain, path, outputs="maps")
    pictures = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    for case in (Case(path, pictures[:1]), Case(path, pictures, [3, 1])):
        assert case.contract.input.layout == "NHWC"
        check(runtime, case)


def test_the_bundled_model(runtime: Runtime, garments: list[Case]) -> None:
    for case in garments:
        check(runtime, case)


def test_a_trained_model(runtime: Runtime, trained: list[Case]) -> None:
    for case in trained:
        check(runtime, case)


@cache
def expected(case: Case) -> tuple[Outputs, Outputs]:
    """What onnxruntime gives, and the same in float64."""
    feeds = dict(case.feeds)
    if case.target is None:
        assert case.contract.target is not None
        feeds[case.contract.target] = np.array([-1])
    return REFERENCE.run(case), run(ir.load(case.path), feeds)


def check(runtime: Runtime, case: Case, same: float = SAME) -> None:
    theirs, exact = expected(case)
    ours = runtime.run(case)
    assert set(ours) >= {case.contract.logits, *map(map_name, case.contract.maps)}
    relevance = [name(m) for m in ILL_CONDITIONED for name in (map_name, heatmap_name)]
    for name, difference in compare(ours, theirs).items():
        if difference.largest <= same:  # which says more than ranks, of an even map all the more
            continue
        assert name in relevance, (name, difference)
        if compare(theirs, exact)[name].l2 <= DETERMINED:
            assert difference.l2 <= SAME_RELEVANCE, name
            assert difference.spearman >= SAME_ORDER, name
        else:
            assert "attnlrp" not in name, difference
            assert np.isfinite(ours[name]).all(), name
