"""The export stage: plain ONNX from torch, arguments, checkpoints, verification, files."""

from __future__ import annotations

import copy
import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_vits import CONFIGURATIONS, small_vit
from timm.models.vision_transformer import VisionTransformer

import onnxplain as ox
from onnxplain.export import stage
from onnxplain.export.plain import inference_form, to_onnx
from onnxplain.export.timm_models import (
    build,
    describe_source,
    image_size_of,
    preprocessing_of,
    token_layout,
)
from onnxplain.export.torch_taps import torch_taps
from onnxplain.export.verify import TOLERANCE, relative_difference
from onnxplain.outputs import METHODS

ROOT = Path(__file__).resolve().parent.parent
TINY: dict[str, Any] = {"embed_dim": 32, "depth": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def module() -> Any:
    return small_vit()


@pytest.fixture(scope="module")
def plain(module: Any) -> ir.Model:
    return to_onnx(module, image_size=(32, 32))


@pytest.fixture
def ready(plain: ir.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares tests of what comes after it the seconds that torch's exporter takes."""
    monkeypatch.setattr(stage, "to_onnx", lambda module, **size: plain)


@pytest.fixture(scope="module")
def exported(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "vit.onnx"
    ox.export(module, path)
    return path


# Plain ONNX


def test_plain_graph_takes_any_batch(module: Any, plain: ir.Model) -> None:
    session = onnxruntime.InferenceSession(onnx_bytes(plain), providers=["CPUExecutionProvider"])
    for batch in (1, 2, 8):
        images = torch.randn(batch, 3, 32, 32, generator=torch.manual_seed(batch))
        with torch.inference_mode(), inference_form(module) as frozen:
            expected = frozen(images).numpy()
        (found,) = session.run(None, {"pixel_values": images.numpy()})
        assert found.shape == expected.shape
        assert relative_difference(found, expected) < 1e-5


def test_plain_graph_has_whole_operators_and_open_attention(plain: ir.Model) -> None:
    operators = [node.op_type for node in plain.graph]
    assert operators.count("Softmax") == operators.count("Gelu") == 2
    assert operators.count("LayerNormalization") == 5
    assert "Attention" not in operators
    assert [v.name for v in plain.graph.inputs] == ["pixel_values"]
    assert [v.name for v in plain.graph.outputs] == ["logits"]
    assert str(plain.graph.inputs[0].shape) == "[batch,3,32,32]"


def test_plain_graph_holds_nothing_of_this_machine(plain: ir.Model) -> None:
    data = onnx_bytes(plain)
    for trace in (b"site-packages", b".py", b"File ", b"torch.nn", b"timm.", str(ROOT).encode()):
        assert trace not in data
    assert b"pytorch" in data  # the producer


def test_module_is_left_as_it_was() -> None:
    module = small_vit().train()
    module.blocks[0].eval()
    module.head.weight.requires_grad_(False)
    module.blocks[1].attn.fused_attn = False
    before = state_of(module)
    to_onnx(module, image_size=(32, 32))
    assert state_of(module) == before


def test_half_precision_module_is_exported_in_float32(module: Any) -> None:
    half = copy.deepcopy(module).half()
    model = to_onnx(half, image_size=(32, 32))
    assert str(model.graph.inputs[0].dtype) == "FLOAT"
    assert next(half.parameters()).dtype == torch.float16


@pytest.mark.parametrize("opset", [17, 23])
def test_opset_out_of_range(module: Any, opset: int) -> None:
    with pytest.raises(ox.InputError, match="expected 18 to 22"):
        to_onnx(module, image_size=(32, 32), opset=opset)


class FixedBatch(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.reshape(2, -1)[:, :5]


class TwoOutputs(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images.mean((2, 3)), images.sum((2, 3))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (FixedBatch(), "FixedBatch"),
        (TwoOutputs(), "2 outputs"),
        (torch.nn.Conv2d(3, 2, 1), "expected \\[batch, classes\\]"),
        (torch.nn.Linear(3, 2), "cannot export Linear for 8x8 pixels"),
        (small_vit(), "Input height"),
    ],
)
def test_what_torch_cannot_export(model: torch.nn.Module, message: str) -> None:
    with pytest.raises(ox.ModelError, match=message) as raised:
        to_onnx(model, image_size=(8, 8))
    assert "\n" not in str(raised.value)


# The torch side of the comparison


@pytest.mark.parametrize("kind", ["sdpa", "multi-head"])
def test_fused_attention_of_torch_is_caught(kind: str) -> None:
    """Both of torch's fused forms give what timm's explicit form gives."""
    explicit, fused = small_vit(), small_vit()
    for block in explicit.blocks:
        block.attn.fused_attn = False
    if kind == "sdpa":
        assert all(block.attn.fused_attn for block in fused.blocks)
    else:
        for block in fused.blocks:
            block.attn = as_multihead(block.attn)
    images = torch.randn(2, 3, 32, 32, generator=torch.manual_seed(0))
    target = torch.tensor([1, 7])
    one, two = (torch_taps(m.eval(), images, target) for m in (explicit, fused))
    assert len(one.attention) == len(two.attention) == 2
    for a, b in zip(
        (*one.attention, *one.attention_gradient, one.features_gradient),
        (*two.attention, *two.attention_gradient, two.features_gradient),
        strict=True,
    ):
        assert a is not None and b is not None
        assert relative_difference(b.numpy(), a.numpy()) < 1e-5


def test_module_outside_timm_is_exported_and_verified(tmp_path: Path) -> None:
    module = small_vit()
    for block in module.blocks:
        block.attn = as_multihead(block.attn)
    report = ox.export(module, tmp_path / "vit.onnx")
    assert report.verification is not None
    assert max(report.verification["differences"].values()) < TOLERANCE


# Arguments


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("vit_tiny_patch16_24", {}, "did you mean vit_tiny_patch16_224"),
        ("no-such-thing", {}, "timm has no model 'no-such-thing'"),
        ("vit_tiny_patch16_224.nobody", {}, "Invalid pretrained tag"),
        ("vit_tiny_patch16_224", {"wings": 2}, "wings"),
        ("vit_tiny_patch16_224", {"image_size": (224,)}, "expected pixels or \\(height, width\\)"),
        ("vit_tiny_patch16_224", {"checkpoint": "no.pth"}, "no.pth: no such file"),
    ],
)
def test_wrong_arguments(
    name: str, arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ox.InputError, match=message) as raised:
        ox.export(name, tmp_path / "x.onnx", **arguments)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_arguments_for_a_name_given_with_a_module(module: Any, tmp_path: Path) -> None:
    with pytest.raises(ox.InputError, match="depth: model arguments go with a timm name"):
        ox.export(module, tmp_path / "x.onnx", depth=3)


@pytest.mark.usefixtures("ready")
def test_unknown_method(module: Any, tmp_path: Path) -> None:
    with pytest.raises(ox.InputError, match="rollouts"):
        ox.export(module, tmp_path / "x.onnx", methods=["rollouts"])


def test_attention_of_a_convolutional_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ox.UnsupportedModelError, match=r"rollout is not .*: no attention found"):
        ox.export("resnet10t", tmp_path / "x.onnx", methods=["rollout"])
    assert not list(tmp_path.iterdir())


def test_missing_folder(module: Any, tmp_path: Path) -> None:
    with pytest.raises(ox.InputError, match="no such folder"):
        ox.export(module, tmp_path / "nowhere" / "x.onnx")


@pytest.mark.usefixtures("ready")
def test_labels_from_a_list_and_a_file(module: Any, tmp_path: Path) -> None:
    names = [f"class {i}" for i in range(10)]
    (tmp_path / "labels.txt").write_text("\n".join(names) + "\n")
    sources: tuple[Any, ...] = (names, tmp_path / "labels.txt")
    for number, labels in enumerate(sources):
        report = ox.export(module, tmp_path / f"{number}.onnx", labels=labels, verify=False)
        assert report.contract.labels == tuple(names)
    with pytest.raises(ox.InputError, match="9"):
        ox.export(module, tmp_path / "x.onnx", labels=names[:9])
    assert not (tmp_path / "x.onnx").exists()


def test_image_size_builds_the_model_for_it(tmp_path: Path) -> None:
    report = ox.export(
        "vit_tiny_patch16_224", tmp_path / "x.onnx", image_size=(64, 32), verify=False, **TINY
    )
    assert report.contract.input.size == (64, 32)
    assert report.contract.tokens.grid == (4, 2)


def test_image_size_of_a_module_that_does_not_tell() -> None:
    with pytest.raises(ox.InputError, match="pass image_size="):
        image_size_of(torch.nn.Linear(2, 2), None)


@pytest.mark.parametrize(
    ("name", "prefix", "grid"),
    [
        ("class token", ("cls",), (4, 4)),
        ("mean pooling, no class token", (), (4, 4)),
        ("distilled", ("cls", "dist"), (4, 4)),
        ("registers", ("cls", "reg0", "reg1", "reg2", "reg3"), (4, 4)),
        ("64 x 32 pixels", ("cls",), (8, 4)),
    ],
)
def test_token_layout(name: str, prefix: tuple[str, ...], grid: tuple[int, int]) -> None:
    module = CONFIGURATIONS[name]()
    size = image_size_of(module, None)
    assert token_layout(module, size) == {"prefix": prefix, "grid": grid}
    assert token_layout(torch.nn.Linear(2, 2), size) is None


def test_preprocessing_is_timms() -> None:
    import timm

    published = timm.create_model("vit_tiny_patch16_224", **TINY)
    assert preprocessing_of(published, (224, 224), {}) == {
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "crop_pct": 0.9,
        "crop_mode": "center",
        "interpolation": "bicubic",
    }
    another_head = timm.create_model("vit_tiny_patch16_224", num_classes=200, **TINY)
    found = preprocessing_of(another_head, (224, 224), {})
    assert (found["mean"], found["crop_pct"]) == ((0.5, 0.5, 0.5), 0.875)
    overlay = {"crop_pct": 0.95}
    given = timm.create_model(
        "vit_tiny_patch16_224", num_classes=200, pretrained_cfg_overlay=overlay, **TINY
    )
    assert preprocessing_of(given, (224, 224), overlay)["crop_pct"] == 0.95
    foreign = preprocessing_of(torch.nn.Linear(2, 2), (32, 32), {})
    assert (foreign["mean"], foreign["crop_pct"]) == ((0.485, 0.456, 0.406), 0.875)


# Checkpoints


def test_checkpoints_load(module: Any, tmp_path: Path) -> None:
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    torch.save({"state_dict": module.state_dict()}, tmp_path / "w.pth")
    blank = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=10
    )
    before = describe_source("x", blank).weights_sha256
    for name in ("w.safetensors", "w.pth"):
        loaded = build(blank, checkpoint=tmp_path / name, image_size=None, model_kwargs={})
        assert_same_weights(loaded, module)
    assert describe_source("x", blank).weights_sha256 == before
    assert describe_source("x", loaded).weights_sha256 != before


def test_checkpoint_of_another_image_size_is_resampled(tmp_path: Path) -> None:
    save_file(small_vit(img_size=64).state_dict(), tmp_path / "w.safetensors")
    loaded = build(
        small_vit(), checkpoint=tmp_path / "w.safetensors", image_size=None, model_kwargs={}
    )
    assert loaded.pos_embed.shape == (1, 17, 32)
    assert torch.equal(loaded.head.weight, small_vit(img_size=64).head.weight)


def assert_same_weights(found: Any, expected: Any) -> None:
    assert describe_source("x", found) == describe_source("x", expected)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_classes": 7},
            r"its head.weight is \[7, 32\], the model's \[10, 32\]; pass num_classes=7 "
            r"\(--num-classes 7\)",
        ),
        ({"embed_dim": 64}, r"its cls_token is \[1, 1, 64\], the model's \[1, 1, 32\]"),
        ({"depth": 1}, "it has no blocks.1.norm1.weight"),
        ({"depth": 3}, "the model has no blocks.2"),
    ],
)
def test_checkpoint_that_does_not_fit(
    changes: dict[str, Any], message: str, module: Any, tmp_path: Path
) -> None:
    save_file(small_vit(**changes).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ox.ModelError, match=f"w.safetensors does not fit: {message}") as raised:
        ox.export(module, tmp_path / "x.onnx", checkpoint=tmp_path / "w.safetensors")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
def test_checkpoint_that_is_something_else(name: str, module: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"these are not weights")
    with pytest.raises(ox.ModelError, match=r"cannot be read .*expected a state dict"):
        ox.export(module, tmp_path / "x.onnx", checkpoint=tmp_path / name)


# Verification


def test_differences_are_stored_in_the_file(exported: Path) -> None:
    verification = ox.Explainer(exported, device="cpu").contract.verification
    assert verification is not None
    assert set(verification["differences"]) == {
        "logits",
        "attention",
        "attention_gradient",
        "features",
        "features_gradient",
    }
    assert all(0 < v < TOLERANCE for v in verification["differences"].values())
    assert verification["batches"] == [1, 2]
    assert verification["version"] == torch.__version__


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize("name", ["vit.onnx", "bundle"])
def test_a_graph_that_differs_is_refused_and_leaves_nothing(
    name: str, module: Any, tmp_path: Path
) -> None:
    other = copy.deepcopy(module)  # and the graph is that of `module`
    with torch.no_grad():
        other.blocks[0].attn.qkv.weight[0, 0] += 0.05
    with pytest.raises(ox.VerificationError, match=r"differs from torch by .* allowed is 0.0001"):
        ox.export(other, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("ready")
def test_interruption_keeps_the_old_file(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vit.onnx").write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "verify_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ox.export(module, tmp_path / "vit.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["vit.onnx"]
    assert (tmp_path / "vit.onnx").read_text() == "old"


@pytest.mark.usefixtures("ready")
def test_a_module_in_training_mode_is_exported_for_inference_and_left_so(tmp_path: Path) -> None:
    module = small_vit().train()
    module.pos_drop.p = 0.5  # what torch is compared with would be noise
    before = state_of(module)
    ox.export(module, tmp_path / "vit.onnx")
    assert state_of(module) == before
    assert module.training


@pytest.mark.usefixtures("ready")
def test_an_export_tells_what_is_going_on(module: Any, tmp_path: Path) -> None:
    told: list[str] = []
    ox.export(module, tmp_path / "vit.onnx", step=lambda what, done, total: told.append(what))
    assert told == [
        "building the model",
        "torch exports it",
        "explaining the graph",
        "comparing with torch",
    ]


@pytest.mark.usefixtures("ready")
@pytest.mark.parametrize(("library", "function"), [(np, "savez"), (ir, "save")])
def test_a_full_disk_while_verifying_leaves_nothing(
    library: Any, function: str, module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(library, function, full)
    with pytest.raises(ox.ModelError, match=r"vit\.onnx: cannot be written: No space left"):
        ox.export(module, tmp_path / "vit.onnx")
    assert not list(tmp_path.iterdir())


def test_relative_difference() -> None:
    expected = np.array([1.0, -4.0])
    assert relative_difference(np.array([1.5, -4.0]), expected) == 0.125
    assert relative_difference(np.array([0.0, 0.25]), np.zeros(2)) == 0.25
    assert relative_difference(np.zeros(3), expected) == np.inf
    assert not relative_difference(np.array([np.nan, 0.0]), expected) <= 1


# Files


def test_two_exports_are_the_same_bytes(module: Any, exported: Path, tmp_path: Path) -> None:
    ox.export(module, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == exported.read_bytes()


def test_another_process_makes_the_same_bytes(exported: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from small_vits import small_vit; import onnxplain; "
        "onnxplain.export(small_vit(), sys.argv[1])"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "again.onnx")],
        check=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": "42", "PATH": ""},
    )
    assert (tmp_path / "again.onnx").read_bytes() == exported.read_bytes()


@pytest.mark.usefixtures("ready")
def test_bundle_is_replaced_and_other_folders_are_not(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "vit"
    for _ in range(2):
        report = ox.export(module, folder)
        assert set(report.files) == {p.name for p in folder.iterdir()}
    assert json.loads((folder / "contract.json").read_text())["verification"]["batches"] == [1, 2]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_text("precious")
    monkeypatch.setattr(stage, "to_onnx", None)  # refused before the slow part
    with pytest.raises(ox.InputError, match=r"holds cat\.jpg, so it is not a bundle"):
        ox.export(module, tmp_path / "photos")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["photos", "vit"]
    assert (tmp_path / "photos" / "cat.jpg").read_text() == "precious"


def test_export_and_instrument_make_the_same_graph(
    module: Any, plain: ir.Model, exported: Path, tmp_path: Path
) -> None:
    expected = onnx.load(exported).graph.SerializeToString()
    ir.save(plain, tmp_path / "plain.onnx")
    ox.instrument(tmp_path / "plain.onnx", tmp_path / "from_plain.onnx")
    assert onnx.load(tmp_path / "from_plain.onnx").graph.SerializeToString() == expected
    # The plain graph of a bundle is such a file too, and brings along what the graph cannot tell.
    labels = [f"class {i}" for i in range(module.num_classes)]
    ox.export(module, tmp_path / "bundle", labels=labels, verify=False)
    report = ox.instrument(tmp_path / "bundle" / "plain.onnx", tmp_path / "from_bundle.onnx")
    assert onnx.load(tmp_path / "from_bundle.onnx").graph.SerializeToString() == expected
    assert report.contract.labels == tuple(labels)
    with pytest.raises(ox.UnsupportedModelError, match="explained already"):
        ox.instrument(tmp_path / "bundle" / "gradient.onnx", tmp_path / "again.onnx")


@pytest.mark.usefixtures("ready")
def test_one_file_has_exactly_the_requested_methods(module: Any, tmp_path: Path) -> None:
    report = ox.export(module, tmp_path / "x.onnx", methods=["rollout"])
    assert report.methods == ("rollout",)
    outputs = [v.name for v in onnx.load(report.path).graph.output]
    assert outputs == ["logits", "attention.0", "attention.1", "map.rollout"]


# Golden values


@pytest.mark.parametrize("name", ["vit_square", "vit_wide"])
def test_golden_attention_and_gradients(name: str, shared_golden: Path, tmp_path: Path) -> None:
    arguments = json.loads((shared_golden / f"{name}.json").read_text())["kwargs"]
    module = VisionTransformer(**arguments)
    module.load_state_dict(load_file(shared_golden / f"{name}.safetensors"))
    report = ox.export(module, tmp_path / "vit.onnx")
    assert report.methods == tuple(METHODS)
    golden = np.load(shared_golden / f"{name}.npz")
    assert len(set(golden["target"])) > 1
    taps = ox.Explainer(report.path, device="cpu").taps(
        golden["pixel_values"], target=golden["target"]
    )
    assert relative_difference(taps.logits, golden["logits"]) < 1e-5
    for quantity in ("attention", "attention_gradient"):
        found = np.stack(getattr(taps, quantity), axis=1)
        assert found.shape == golden[quantity].shape
        assert relative_difference(found, golden[quantity]) < 1e-5


# The module `onnxplain.export` is the function


@pytest.mark.parametrize(
    "first", ["import onnxplain.export", "from onnxplain.export import export", "pass"]
)
def test_export_is_callable_whatever_was_imported_first(first: str) -> None:
    script = (
        f"{first}\nimport sys, onnxplain as ox\n"
        "assert not {'torch', 'timm', 'onnx'} & set(sys.modules)\n"
        "for name in ('torch', 'timm'): sys.modules[name] = None\n"
        "try: ox.export('vit_tiny_patch16_224', 'x.onnx')\n"
        "except ox.MissingDependencyError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.startswith("export needs torch")
    assert "pip install onnxplain[cpu,export]" in done.stdout


def onnx_bytes(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString()


def state_of(module: Any) -> list[object]:
    return [
        [(name, m.training, getattr(m, "fused_attn", None)) for name, m in module.named_modules()],
        [(name, p.requires_grad, p.data_ptr()) for name, p in module.named_parameters()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules()],
    ]


class MultiHead(torch.nn.Module):
    def __init__(self, attention: torch.nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def as_multihead(attention: Any) -> MultiHead:
    """timm's attention with the same weights in torch's own module."""
    dim = attention.qkv.in_features
    theirs = torch.nn.MultiheadAttention(dim, attention.num_heads, batch_first=True)
    theirs.in_proj_weight.data = attention.qkv.weight.data
    theirs.in_proj_bias.data = attention.qkv.bias.data
    theirs.out_proj.load_state_dict(attention.proj.state_dict())
    return MultiHead(theirs)
