"""The walk over timm: how names are grouped, what is said of a model, and the page it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import onnxplain as ox
from benchmarks import coverage
from benchmarks.architectures import attention_kind, blocks, family, plan
from onnxplain.outputs import METHODS

GLOBAL = (
    "test_vit",  # class token
    "vit_wee_patch16_reg1_gap_256",  # a register, mean pooling, other residuals
    "deit_tiny_distilled_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "test_vit_relpos",  # relative positions
    "vit_small_patch16_rope_224",
)
TOLERANCE = 1e-4  # what the project promises for every model; these come to about 1e-6
WITHOUT_ROLLOUT = ("test_resnet", "pit_ti_224")


@pytest.mark.parametrize("name", GLOBAL)
def test_global_attention_is_served_with_all_methods(name: str) -> None:
    planned = plan(name)
    assert planned["attention"] == "global"
    found = coverage.check(name, planned["arguments"], planned["size"])
    assert found["outcome"] == "served", found
    assert found["methods"] == list(METHODS)
    assert set(found["differences"]) == {
        "logits",
        "attention",
        "attention_gradient",
        "features",
        "features_gradient",
    }
    assert max(found["differences"].values()) < TOLERANCE


@pytest.mark.parametrize("name", WITHOUT_ROLLOUT)
def test_rollout_is_not_claimed_without_global_attention(name: str) -> None:
    planned = plan(name)
    assert planned["attention"] != "global"
    found = coverage.check(name, planned["arguments"], planned["size"])
    if found["outcome"] == "served":
        assert set(found["methods"]) <= {"gradcam", "raw_attention"}
    else:
        assert found["outcome"] == "refused"
        assert found["reason"].startswith("UnsupportedModelError: ")
        assert "attention" in found["reason"]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ox.UnsupportedModelError("no attention"), "refused"),
        (ox.VerificationError("logits differ"), "differs"),
        (KeyError("blocks"), "failed"),
    ],
)
def test_what_an_error_means(
    error: Exception, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(ox, "export", export)
    found = coverage.check("test_vit", {}, 160)
    assert found["outcome"] == outcome
    assert found["reason"] == f"{type(error).__name__}: {error}"


def model(name: str, **arguments: Any) -> Any:
    with torch.device("meta"):
        return timm.create_model(name, **arguments)


def test_sizes_make_no_group_and_building_blocks_do() -> None:
    tiny = blocks(model("vit_tiny_patch16_224"))
    assert blocks(model("vit_base_patch32_384")) == tiny
    assert blocks(model("vit_tiny_patch16_224", depth=2, img_size=64)) == tiny
    for change in (
        {"class_token": False, "global_pool": "avg"},
        {"reg_tokens": 4},
        {"init_values": 1e-5},
        {"qk_norm": True},
        {"act_layer": "relu"},
        {"global_pool": "max"},
    ):
        assert blocks(model("vit_tiny_patch16_224", **change)) != tiny, change


def test_a_small_model_keeps_its_blocks() -> None:
    planned = plan("vit_giant_patch14_dinov2")
    assert planned["arguments"] == {"num_classes": 10, "depth": 2, "img_size": 112}
    assert planned["parameters"] < 100e6


def test_a_picture_is_small_where_the_model_takes_it() -> None:
    assert plan("resnet18")["size"] == 128
    assert plan("resmlp_12_224")["arguments"] == {"num_classes": 10, "img_size": 128}
    assert plan("vgg11")["size"] == 224
    assert plan("davit_base_fl")["size"] == 288


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vit_base_patch16_siglip_224", "global"),  # pooled by attention with one query
        ("cait_xxs24_224", "global"),  # class attention in the end
        ("vit_tiny_r_s16_p8_224", "global"),  # convolutions before the first attention alone
        ("lowformer_b0", "other"),  # and behind it
        ("swin_tiny_patch4_window7_224", "other"),
        ("pvt_v2_b0", "other"),
        ("resnet18", "none"),
    ],
)
def test_kind_of_attention(name: str, kind: str) -> None:
    assert attention_kind(model(name), 224) == kind


def test_page_from_results() -> None:
    groups = [
        {"family": "vision_transformer", "representative": "a", "names": ["a", "b", "c"]},
        {"family": "resnet", "representative": "d", "names": ["d"]},
        {"family": "swin_transformer", "representative": "e", "names": ["e", "h"]},
        {"family": "swin_transformer", "representative": "f", "names": ["f"]},
        {"family": "swin_transformer", "representative": "g", "names": ["g"]},
        {"family": "swin_transformer", "representative": "j", "names": ["i", "j"]},
    ]
    results: dict[str, dict[str, Any]] = {
        "a": {
            "arguments": {"num_classes": 10, "depth": 2, "img_size": 64},
            "size": 64,
            "attention": "global",
            "outcome": "served",
            "methods": list(METHODS),
            "differences": {"logits": 1.2e-6},
        },
        "d": {
            "attention": "none",
            "outcome": "refused",
            "reason": "UnsupportedModelError: no [a|b]",
            "size": 128,
        },
        "e": {
            "attention": "other",
            "outcome": "served",
            "methods": ["rollout", "gradcam"],
            "undefined": {"partial_lrp": "odd", "lrp": "no rule", "attention_gradcam": "odd"},
        },
        "f": {"attention": "other", "outcome": "failed", "reason": "KeyError: 'a'"},
        "g": {
            "attention": "other",
            "outcome": "served",
            "methods": ["gradcam"],
            "undefined": {
                "rollout": "windows; expected none",
                "lrp": "n",
                "partial_lrp": "windows",
            },
        },
    }
    text = coverage.page(groups, results, "1.0")
    assert "timm 1.0" in text
    assert "| global | 3 | 3 | 0 | 0 | 0 | 0 | 0 |" in text
    assert "| none | 1 | 0 | 0 | 1 | 0 | 0 | 0 |" in text
    assert "| unknown | 2 | 0 | 0 | 0 | 0 | 0 | 2 |" in text
    assert "| other | 4 | 0 | 3 | 0 | 0 | 1 | 0 |" in text
    assert "| all | 10 | 3 | 3 | 1 | 0 | 1 | 2 |" in text
    assert "Of the 3 names with global attention, 3 (100.0 %)" in text
    assert "| `a` (depth=2, 64 px) | 3 | global | all | logits 1.2e-06 |" in text
    assert "| `d` (128 px) | 1 | none | refused: no [a\\|b] |  |" in text
    what = "rollout, gradcam; not partial_lrp, attention_gradcam: odd; not lrp: no rule"
    assert f"| `e` | 2 | other | {what} |  |" in text
    assert "| `f` | 1 | other | failed: KeyError: 'a' |  |" in text
    assert "| `g` | 1 | other | gradcam alone: windows |  |" in text
    assert "| `j` | 2 | unknown | not run: not yet |  |" in text
    assert "- a, b, c\n" in text


def test_the_page_accounts_for_every_name() -> None:
    text = coverage.PAGE.read_text(encoding="utf-8")
    stated = re.search(r"with timm (\S+),", text)
    assert stated is not None
    if stated[1] != timm.__version__:
        pytest.skip(f"docs/coverage.md is about timm {stated[1]}, not {timm.__version__}")
    found: dict[str, str] = {}
    for section in text.split("\n## ")[1:]:
        title = section.split("\n")[0]
        for line in re.findall(r"^- (.+)$", section, flags=re.MULTILINE):
            found |= dict.fromkeys(line.split(", "), title)
    assert found == {name: family(name) for name in timm.list_models()}
    total = re.search(r"^\| all \| (\d+) \|", text, flags=re.MULTILINE)
    assert total is not None
    assert int(total[1]) == len(found)


def test_a_run_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        {"family": "f", "representative": name, "names": [name], "class": "C", "parameters": 1}
        for name in ("a", "b", "c")
    ]
    ran: list[str] = []

    def run(name: str, limits: object) -> dict[str, Any]:
        ran.append(name)
        return {"representative": name, "outcome": "refused", "reason": "r", "attention": "none"}

    monkeypatch.setattr(coverage, "group", lambda: groups)
    monkeypatch.setattr(coverage, "in_own_process", run)
    monkeypatch.setattr(coverage, "PAGE", tmp_path / "page.md")

    def sweep(*options: str) -> list[str]:
        ran.clear()
        monkeypatch.setattr("sys.argv", ["coverage", "--results", str(tmp_path), *options])
        coverage.main()
        return list(ran)

    assert sweep("--page") == []
    assert sweep("--only", "b") == ["b"]
    assert sweep() == ["a", "c"]
    assert sweep() == []
    assert sweep("--again", "refused", "--only", "[ab]") == ["a", "b"]
    assert "| none | 3 | 0 | 0 | 3 | 0 | 0 | 0 |" in (tmp_path / "page.md").read_text()


def test_a_model_that_takes_too_long_ends_alone() -> None:
    limits = coverage.arguments(["--seconds", "1"])
    found = coverage.in_own_process("test_vit", limits)
    assert found["outcome"] == "not run"
    assert found["reason"] == "takes more than 1 s"
