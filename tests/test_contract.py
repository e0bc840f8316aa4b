"""The contract: what a reader relies on is checked, so that a damaged one is said to be one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import toy_contract, toy_model

import onnxplain as ox
from onnxplain.contract import KEY, Contract

DAMAGE: dict[str, tuple[str, Any]] = {
    "a multiple that is infinite": ("input.multiple", [float("1e308") * 10, 16]),
    "a multiple that does not fit": ("input.multiple", [3, 3]),
    "a batch of -1": ("input.batch", -1),
    "a batch in words": ("input.batch", "two"),
    "half an image": ("input.batch", 2.5),
    "a list for a name": ("input.name", ["image"]),
    "a number for an interpolation": ("input.interpolation", 1),
    "colours in no order": ("input.color_order", "XYZ"),
    "no crop at all": ("input.crop_pct", 1e-300),
    "a crop beyond all pictures": ("input.crop_pct", 1e12),
    "labels that are numbers": ("labels", [1, 2, 3]),
    "classes in words": ("classes", "3"),
    "no classes": ("classes", 0),
    "graphs without names": ("graphs", {"plain": 5}),
    "rules that are a number": ("rules", 5),
    "a verification that is a number": ("verification", 5),
    "a name that is a number": ("source.name", 5),
    "versions that are a number": ("source.versions", 5),
    "no target for gradients": ("target", None),
    "a target that is a number": ("target", 5),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(case: str) -> None:
    path, value = DAMAGE[case]
    document = json.loads(toy_contract().to_json())
    *parents, field = path.split(".")
    record = document
    for parent in parents:
        record = record[parent]
    record[field] = value
    with pytest.raises(ox.ContractError, match="the contract is damaged"):
        Contract.from_json(json.dumps(document))


def test_patches_that_leave_a_strip_have_one_size() -> None:
    document = json.loads(toy_contract().to_json())
    document["input"]["multiple"], document["tokens"]["patch"] = [4, 4], [4, 4]
    with pytest.raises(ox.ContractError, match=r"damaged .*pictures of any size"):
        Contract.from_json(json.dumps(document))


def test_a_target_that_the_graph_does_not_have(tmp_path: Path) -> None:
    """Without it the class would be left out in silence."""
    model = toy_model(toy_contract())
    onnx.helper.set_model_props(model, {KEY: toy_contract(target="class").to_json()})
    onnx.save(model, tmp_path / "toy.onnx")
    with pytest.raises(ox.ContractError, match="names the input 'class', the graph has"):
        ox.Explainer(tmp_path / "toy.onnx", device="cpu")


def test_pixel_values_beyond_float32(toy_file: Callable[..., Path]) -> None:
    explainer = ox.Explainer(toy_file(), device="cpu")
    with pytest.raises(ox.InputError, match="NaN or infinite"):
        explainer.explain(np.full((1, 3, 8, 8), 1e300))
