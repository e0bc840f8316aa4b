"""A torch vision transformer as plain ONNX, with its attention as separate operators."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch

from onnxplain.errors import InputError, ModelError

__all__ = ["BATCH", "INPUT", "LOGITS", "OPSET", "inference_form", "one_line", "to_onnx"]

INPUT = "pixel_values"
LOGITS = "logits"
BATCH = "batch"

# Gelu is one operator from 20 on; from 23 on the exporter emits Attention, which hides the
# probabilities.
OPSET = 20
_FIRST_OPSET, _LAST_OPSET = 18, 22


@contextlib.contextmanager
def inference_form(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Lends the module in evaluation mode, float32 on the CPU, with unfused attention, frozen.

    timm reads its `fused_attn` setting when a module is built, so the attribute is set on every
    submodule that has one. Afterwards the caller's module is as it was. A module that is not
    float32 on the CPU is copied.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(
        t.device.type != "cpu" or (t.is_floating_point() and t.dtype != torch.float32)
        for t in tensors
    ):
        module = copy.deepcopy(module).to("cpu", torch.float32)
    submodules: list[Any] = list(module.modules())
    training = [(m, m.training) for m in submodules]
    fused = [(m, m.fused_attn) for m in submodules if hasattr(m, "fused_attn")]
    trainable = [(p, p.requires_grad) for p in module.parameters()]
    try:
        module.eval()
        module.requires_grad_(False)
        for attention, _ in fused:
            attention.fused_attn = False
        yield module
    finally:
        for submodule, mode in training:
            submodule.training = mode
        for attention, value in fused:
            attention.fused_attn = value
        for parameter, flag in trainable:
            parameter.requires_grad_(flag)


def to_onnx(
    module: torch.nn.Module,
    *,
    image_size: tuple[int, int],
    multiple: tuple[int, int] | None = None,
    opset: int = OPSET,
) -> ir.Model:
    """Exports an image classifier to ONNX with a dynamic batch and unfused attention.

    The graph maps `pixel_values` [batch, 3, H, W] to `logits` [batch, classes], float32. Its names
    follow from the module alone and it holds no trace of the machine it was made on, so that equal
    modules give equal bytes. The module is left as it was.

    Args:
        module: The classifier, in any mode, on any device.
        image_size: Height and width of the input in pixels.
        multiple: Makes a graph for every height and width that are multiples of these; None: for
            `image_size` alone.
        opset: ONNX operator set, 18 to 22. LayerNormalization is one operator in all of them, Gelu
            from 20 on.

    Raises:
        InputError: `opset` is out of range.
        ModelError: torch cannot export the module, or only for a fixed batch.
    """
    if not _FIRST_OPSET <= opset <= _LAST_OPSET:
        raise InputError(f"opset {opset}: expected {_FIRST_OPSET} to {_LAST_OPSET}")
    axes: dict[int, Any] = {0: torch.export.Dim(BATCH)}
    sizes = f"{image_size[0]}x{image_size[1]} pixels"
    if multiple is not None:
        # Not square, and not the size the model was built for: models leave steps out for these.
        rows, columns = (side // step for side, step in zip(image_size, multiple, strict=True))
        image_size = ((rows + 1) * multiple[0], (columns + 2) * multiple[1])
        sizes = "pictures of any size (dynamic_size=False exports for one)"
        axes |= {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    example = torch.zeros(2, 3, *image_size)
    with inference_form(module) as frozen, _quiet():
        try:
            recorded: Any = frozen
            if multiple is not None:
                recorded = torch.export.export(frozen, (example,), dynamic_shapes=(axes,))
                # At yet another size: it raises where the first one became a constant.
                height, width = image_size
                recorded.module()(torch.zeros(1, 3, height + multiple[0], width + multiple[1]))
            program = torch.onnx.export(
                recorded,
                (example,),
                dynamo=True,
                opset_version=opset,
                input_names=[INPUT],
                output_names=[LOGITS],
                dynamic_shapes=(axes,),
                optimize=False,
                verbose=False,
            )
            assert program is not None
            model = _optimized(program)
        except Exception as error:  # torch raises anything at all from here
            raise ModelError(
                f"torch cannot export {type(module).__name__} for {sizes}: {one_line(error)}"
            ) from error
    _strip(model)
    _check_signature(model, type(module).__name__)
    return model


def _optimized(program: torch.onnx.ONNXProgram) -> ir.Model:
    """The exported model, with its constants folded.

    onnxscript's rewrite rules hold on to the last graph that they saw, as long as the process
    lives. So what they see does not keep the weights.
    """
    seen = list(program.model.graph.initializers.values())
    program.optimize()
    _register_constants(program.model.graph)
    model = program.model.clone()
    for value in (*seen, *program.model.graph.initializers.values()):
        value.const_value = None
    return model


def _register_constants(graph: ir.Graph) -> None:
    """Puts constants that nodes read among the weights: the exporter's optimiser leaves out the
    bounds of the Clips that it joins."""
    for node in graph.all_nodes():
        for value in node.inputs:
            if value is None or value.producer() is not None or value.const_value is None:
                continue
            if value.name not in graph.initializers:
                graph.register_initializer(value)


def _strip(model: ir.Model) -> None:
    """Removes stack traces, file paths and framework names."""
    model.doc_string = None
    model.metadata_props.clear()
    graph = model.graph
    graph.doc_string = None
    graph.metadata_props.clear()
    for value in (*graph.inputs, *graph.initializers.values()):
        value.doc_string = None
        value.metadata_props.clear()
    for node in graph.all_nodes():
        node.doc_string = None
        node.metadata_props.clear()
        for value in node.outputs:
            value.doc_string = None
            value.metadata_props.clear()


def _check_signature(model: ir.Model, name: str) -> None:
    inputs, outputs = model.graph.inputs, model.graph.outputs
    if len(inputs) != 1 or len(outputs) != 1 or outputs[0].shape is None:
        raise ModelError(
            f"{name} has {len(inputs)} inputs and {len(outputs)} outputs; expected an image "
            "classifier with one of each"
        )
    shape = outputs[0].shape
    if len(shape) != 2:
        raise ModelError(f"{name} returns shape {shape}; expected [batch, classes]")
    for value in (inputs[0], outputs[0]):
        assert value.shape is not None
        if isinstance(value.shape[0], int):
            raise ModelError(
                f"{name} exports with a fixed batch of {value.shape[0]}; write its forward method "
                "so that it works for any batch size"
            )


def one_line(error: BaseException) -> str:
    """The innermost cause of an error, its kind and the first line of its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of its own internals; what is for our users, it raises."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
