"""Which methods tell two classes apart: the pointing game on 200 bundled scenes of two garments."""

from __future__ import annotations

from importlib.resources import as_file, files

import numpy as np
import pytest

from onnxplain import Explainer
from onnxplain.demo.scenes import two_garment_scenes

SCENES = 200


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    with as_file(files("onnxplain.demo").joinpath("garments.onnx")) as path:
        return Explainer(path, device="cpu")


@pytest.fixture(scope="module")
def pointed(explainer: Explainer) -> dict[str, tuple[int, int]]:
    """How many of the 2 * SCENES maps are largest on the garment asked for, and on the other."""
    hits = {method: (0, 0) for method in explainer.methods}
    for scene in two_garment_scenes(SCENES, 0):
        for result in explainer.explain_each([scene.image] * 2, target=scene.classes):
            asked, other = hits[result.method]
            for i, heatmap in enumerate(result.heatmap):
                place = np.unravel_index(heatmap.argmax(), heatmap.shape)
                asked += bool(scene.masks[i][place])
                other += bool(scene.masks[1 - i][place])
            hits[result.method] = asked, other
    return hits


@pytest.mark.parametrize("method", ["transformer_attribution", "generic_attention", "attnlrp"])
def test_class_specific_methods_point_at_what_is_asked_for(
    method: str, pointed: dict[str, tuple[int, int]]
) -> None:
    asked, other = pointed[method]
    assert asked > 0.7 * 2 * SCENES
    assert asked > 8 * other


@pytest.mark.parametrize("method", ["raw_attention", "rollout"])
def test_methods_that_know_no_class_hit_one_for_each_miss(
    method: str, pointed: dict[str, tuple[int, int]]
) -> None:
    # The same map twice, and the garments do not overlap.
    asked, other = pointed[method]
    assert asked == other > 0
