"""Finished maps as outputs of the graph: those of the NumPy methods, which are the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from small_vits import small_vit
from timm.models.cait import Cait
from typer.testing import CliRunner

import onnxplain as ox
from onnxplain.cli import app
from onnxplain.contract import Contract
from onnxplain.export.plain import to_onnx
from onnxplain.outputs import METHODS, map_name
from onnxplain.runtime import Explainer

SAME = 1e-5  # of the largest value: the same formulas in another order of sums

VITS: dict[str, Callable[[], Any]] = {
    "class token": small_vit,
    "not square": lambda: small_vit(img_size=(24, 40)),
    "mean": lambda: small_vit(global_pool="avg", class_token=False),
    "maximum": lambda: small_vit(global_pool="max", class_token=False),
    "pooling": lambda: small_vit(global_pool="map", class_token=False),
    "class attention": lambda: small_vit(Cait),
}


@pytest.fixture(scope="module", params=VITS)
def plain(request: Any) -> ir.Model:
    module = VITS[request.param]()
    size = tuple(module.patch_embed.img_size)
    return to_onnx(module, image_size=(size[0], size[1]))


@pytest.fixture(scope="module")
def vit() -> ir.Model:
    return to_onnx(small_vit(), image_size=(32, 32))


def _instrumented(plain: ir.Model, path: Path, **arguments: Any) -> Explainer:
    ox.instrument(plain, path, **arguments)
    return ox.Explainer(path, device="cpu")


def _images(explainer: Explainer) -> NDArray[np.float32]:
    size = explainer.contract.input.size
    return np.random.default_rng(0).normal(size=(3, 3, *size)).astype(np.float32)


def _assert_same(one: NDArray[Any], other: NDArray[Any], what: str) -> None:
    scale = np.abs(other).max()
    assert np.abs(one - other).max() <= SAME * (scale or 1), what


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_fusion": "max", "discard_ratio": 0.5, "start_layer": 1},
        {"head_fusion": "min", "discard_ratio": 0.9},
    ],
)
def test_maps_are_those_of_numpy(plain: ir.Model, options: dict[str, Any], tmp_path: Path) -> None:
    taps = _instrumented(plain, tmp_path / "taps.onnx")
    maps = _instrumented(plain, tmp_path / "maps.onnx", outputs="maps", map_options=options)
    images, target = _images(taps), [1, 2, 3]
    assert maps.methods == taps.methods == tuple(METHODS)
    for method in taps.methods:
        own = maps.contract.maps[method]
        expected = taps.explain(images, method=method, target=target, **own)
        found = maps.explain(images, method=method, target=target, **own)
        _assert_same(found.grid, expected.grid, method)
        np.testing.assert_array_equal(found.logits, expected.logits)


def test_a_file_of_maps_holds_nothing_else(plain: ir.Model, tmp_path: Path) -> None:
    explainer = _instrumented(plain, tmp_path / "maps.onnx", outputs="maps")
    model = ir.load(tmp_path / "maps.onnx")
    names = [value.name for value in model.graph.outputs]
    assert names == [plain.graph.outputs[0].name, *map(map_name, METHODS)]
    with pytest.raises(ox.InputError, match="this file has no attention"):
        explainer.taps(_images(explainer), kinds=["attention"])


def test_other_options_take_the_taps_or_are_refused(plain: ir.Model, tmp_path: Path) -> None:
    both = _instrumented(plain, tmp_path / "both.onnx", outputs="both")
    maps = _instrumented(plain, tmp_path / "maps.onnx", outputs="maps")
    images = _images(both)
    expected = both.explain(images, method="rollout", head_fusion="max")
    usual = both.explain(images, method="rollout")
    assert np.abs(expected.grid - usual.grid).max() > SAME
    with pytest.raises(ox.InputError, match="holds the map of rollout for 'mean'"):
        maps.explain(images, method="rollout", head_fusion="max")
    _assert_same(maps.explain(images, method="rollout").grid, usual.grid, "rollout")


def test_nothing_but_the_map_and_the_logits_is_fetched(
    vit: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU what is fetched is what is copied to the host, and taps are large."""
    both = _instrumented(vit, tmp_path / "both.onnx", outputs="both")
    fetched: list[list[str]] = []
    run = onnxruntime.InferenceSession.run

    def listen(self: Any, names: list[str], feeds: Any) -> Any:
        fetched.append(names)
        return run(self, names, feeds)

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", listen)
    for method in both.methods:
        both.explain(_images(both), method=method)
        assert fetched.pop() == [both.contract.logits, map_name(method)]
    list(both.explain_each(_images(both)))
    assert sorted(fetched.pop()) == sorted([both.contract.logits, *map(map_name, METHODS)])
    assert fetched == []


def test_a_bundle_of_maps(tmp_path: Path) -> None:
    module = small_vit(dynamic_img_size=True)
    ox.export(module, tmp_path / "maps", outputs="maps")
    ox.export(module, tmp_path / "taps", verify=False)
    maps, taps = (ox.Explainer(tmp_path / name, device="cpu") for name in ("maps", "taps"))
    assert maps.contract.verification is not None
    images = np.random.default_rng(0).normal(size=(2, 3, 24, 40)).astype(np.float32)
    for found, expected in zip(maps.explain_each(images), taps.explain_each(images), strict=True):
        _assert_same(found.grid, expected.grid, found.method)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": "all"}, "outputs 'all'; expected one of taps, maps, both"),
        ({"outputs": "maps", "map_options": {"head_fusion": "sum"}}, "unknown head_fusion 'sum'"),
        ({"outputs": "maps", "map_options": {"discard_ratio": 1}}, "expected 0 <= ratio < 1"),
        ({"outputs": "maps", "map_options": {"start_layer": 2}}, "expected 0..1"),
        ({"gamma": "1"}, "gamma '1'; expected a number"),
        ({"gamma": 1, "methods": ["gradcam"]}, "gamma is of the method attnlrp"),
        ({"outputs": "maps", "map_options": {"colour": 2}}, "unknown map option 'colour'"),
        (
            {"outputs": "taps", "map_options": {"start_layer": 1}},
            "start_layer without maps",
        ),
    ],
)
def test_wrong_arguments(
    vit: ir.Model, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ox.InputError, match=message.replace("(", r"\(")):
        ox.instrument(vit, tmp_path / "x.onnx", **arguments)
    assert not any(tmp_path.iterdir())


def test_a_damaged_target_is_named(vit: ir.Model, tmp_path: Path) -> None:
    ox.instrument(vit, tmp_path / "maps", outputs="maps", methods=["generic_attention"])
    document = tmp_path / "maps" / "contract.json"
    document.write_text(json.dumps({**json.loads(document.read_text()), "target": "class"}))
    with pytest.raises(ox.ContractError, match="names the input 'class'"):
        ox.Explainer(tmp_path / "maps", device="cpu").explain(np.zeros((1, 3, 32, 32), np.float32))


def test_damaged_maps_are_named(plain: ir.Model, tmp_path: Path) -> None:
    contract = _instrumented(plain, tmp_path / "m.onnx", outputs="maps").contract
    text = json.loads(contract.to_json())
    damaged: tuple[dict[str, Any], ...] = ({"rollout": 3}, {"nothing": {}})
    for maps in damaged:
        with pytest.raises(ox.ContractError, match="damaged"):
            Contract.from_json(json.dumps({**text, "maps": maps}))


def test_command_line(vit: ir.Model, tmp_path: Path) -> None:
    ir.save(vit, tmp_path / "plain.onnx")
    words = ["instrument", tmp_path / "plain.onnx", "-o", tmp_path / "maps.onnx"]
    words += ["--outputs", "maps", "--head-fusion", "max", "--methods", "rollout"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    contract = ox.Explainer(tmp_path / "maps.onnx", device="cpu").contract
    assert contract.maps == {
        "rollout": {"head_fusion": "max", "discard_ratio": 0.0, "start_layer": 0}
    }
