"""What is found in models that nobody here exported, against torch and by construction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from hand_written import ATTENTIONS, HEADS, SIZE, HandWritten, to_file

import onnxplain as ox
from onnxplain import graphs
from onnxplain.contract import Contract, Readout
from onnxplain.errors import UnsupportedModelError
from onnxplain.outputs import METHODS

# Single precision, two layers: both sides are this far from the exact value.
TOLERANCE = 1e-5
GRID = (3, 4)
SIDE_BY_SIDE = "two attentions side by side"


@pytest.mark.parametrize("layout", [*ATTENTIONS, SIDE_BY_SIDE])
@pytest.mark.parametrize("batch", [None, 3])
def test_attention_in_every_layout_equals_torch(
    layout: str, batch: int | None, tmp_path: Path
) -> None:
    twice = layout == SIDE_BY_SIDE
    module = HandWritten(style=layout) if twice else HandWritten(attention=layout)
    plain = to_file(module, tmp_path / "plain.onnx", batch=batch)
    contract = ox.instrument(plain, tmp_path / "explained.onnx").contract
    assert contract.tokens.grid == GRID
    assert contract.tokens.prefix == ("cls",)
    assert contract.readout == Readout(kind="cls", ranges=((0, 1),))
    # A fixed one is made free, but behind nodes that are not proven to keep images apart.
    assert contract.input.batch == (batch if layout == "masked, renormalised, dropped" else None)
    heads = {"one head": 1, SIDE_BY_SIDE: 2 * HEADS}.get(layout, HEADS)
    assert [layer.heads for layer in contract.layers] == [heads] * 2
    session = onnxruntime.InferenceSession(tmp_path / "explained.onnx")
    names = [value.name for value in session.get_outputs()]
    for images in (1, 3) if contract.input.batch is None else (contract.input.batch,):
        pixels = torch.randn(images, 3, *SIZE)
        target = torch.arange(images) + 1
        feeds = {"image": pixels.numpy(), "target": target.numpy()}
        found = dict(zip(names, session.run(None, feeds), strict=True))
        logits, attention, gradient = module.expected(pixels, target)
        pairs = [(found["output"], logits)]
        for i in range(2):
            pairs.append((found[f"attention.{i}"], attention[i]))
            pairs.append((found[f"attention_gradient.{i}"], gradient[i]))
        for ours, theirs in pairs:
            largest = float(theirs.abs().max())
            assert largest > 0
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=0, atol=TOLERANCE * largest)


def contract_of(folder: Path, **options: Any) -> Contract:
    """The contract of a hand-written model with these options."""
    plain = to_file(HandWritten(**options), folder / "plain.onnx")
    return graphs.explain(graphs.load(plain), methods=["gradcam"]).contract


@pytest.mark.parametrize(
    "patches",
    [
        "flatten",
        "channels last",
        "tokens first",
        "convolutional stem",
        "linear on rearranged pixels",
        "padded",
    ],
)
@pytest.mark.parametrize("prefix", [0, 3])
def test_grid_and_prefix_tokens(patches: str, prefix: int, tmp_path: Path) -> None:
    tokens = contract_of(tmp_path, patches=patches, prefix=prefix).tokens
    assert tokens.grid == GRID
    assert len(tokens.prefix) == prefix


def test_registers_between_the_class_token_and_the_patches(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, style="registers put in between")
    assert contract.tokens.grid == GRID
    assert contract.tokens.prefix == ("cls", "reg0", "reg1")


@pytest.mark.parametrize(
    ("read", "prefix", "kind", "ranges"),
    [
        ("class token", 1, "cls", ((0, 1),)),
        ("class token", 5, "cls", ((0, 1),)),
        ("class token, tokens first", 1, "cls", ((0, 1),)),
        ("class token of a split", 1, "cls", ((0, 1),)),
        ("two tokens", 2, "cls+dist", ((0, 1), (1, 2))),
        ("mean", 0, "mean", ((0, 12),)),
        ("mean", 1, "mean", ((0, 13),)),
        ("mean of patches", 2, "mean", ((2, 14),)),
        ("mean of patches of a split", 1, "mean", ((1, 13),)),
        ("sum of patches", 1, "mean", ((1, 13),)),
        ("average pooling", 0, "mean", ((0, 12),)),
        ("attention pooling", 1, "attention", ((0, 13),)),
    ],
)
def test_what_the_head_reads(
    read: str, prefix: int, kind: str, ranges: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    contract = contract_of(tmp_path, read=read, prefix=prefix)
    assert contract.readout == Readout(kind=kind, ranges=ranges)
    names = {"cls": ["cls", "reg0", "reg1", "reg2", "reg3"], "cls+dist": ["cls", "dist"]}
    expected = names.get(kind, [f"prefix{i}" for i in range(prefix)])[:prefix]
    assert contract.tokens.prefix == tuple(expected)


def test_a_head_that_no_row_stands_for_leaves_features_and_pixels(tmp_path: Path) -> None:
    module = HandWritten(read="maximum beside an earlier layer")
    plain = to_file(module, tmp_path / "plain.onnx")
    model = graphs.load(plain)
    contract = graphs.explain(model).contract
    assert contract.readout is None
    assert list(contract.methods) == ["gradcam", "attnlrp", "lrp"]
    with pytest.raises(UnsupportedModelError, match=r'rollout is not .*contract={"readout"'):
        graphs.explain(model, methods=["rollout"])
    given = {"readout": {"kind": "cls", "ranges": [[0, 1]]}}
    assert list(graphs.explain(model, contract=given).contract.methods) == list(METHODS)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"patches": "column by column"}, "column by column; expected row by row"),
        ({"patches": "last patch first"}, "the patch grid was not found; give it"),
        ({"read": "token at the end"}, "make 12 tokens; the attention spans 13"),
        (
            {"style": "two attentions of other tokens side by side"},
            "run side by side, not on the same tokens",
        ),
        ({"style": "two streams"}, "run side by side, in streams of their own"),
        ({"attention": "within windows", "prefix": 0}, "is over windows of 4 of the 12 positions"),
        (
            {"attention": "within windows, in one axis with the heads", "prefix": 0},
            "attention within windows",
        ),
        ({"attention": "between channels"}, "the patch grid was not found"),
        ({"attention": "pooled keys"}, "13 queries and 12 keys"),
        ({"attention": "softmax written out"}, "no attention found: expected a Softmax"),
    ],
)
def test_what_is_refused(options: dict[str, Any], found: str, tmp_path: Path) -> None:
    plain = to_file(HandWritten(**options), tmp_path / "plain.onnx")
    with pytest.raises(UnsupportedModelError) as error:
        ox.instrument(plain, tmp_path / "explained.onnx")
    assert found in str(error.value)
    assert str(error.value).startswith(f"{plain}: ")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == [plain]
