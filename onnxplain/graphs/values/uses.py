"""What is computed from a value, and what a value is computed from."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

__all__ = ["dependents", "is_measured", "sources"]


def dependents(graph: ir.Graph, value: ir.Value) -> set[ir.Value]:
    """`value` and all that is computed from it; the rest is constant.

    Not what is computed from its shape alone, or from the step that it is rounded with.
    """
    found = {value}
    for node in graph:
        if node.op_type not in ("Shape", "Size") and any(v in found for v in node.inputs):
            found.update(v for v in node.outputs if not is_measured(v))
    return found


def sources(value: ir.Value, without: Collection[ir.Node] = ()) -> set[ir.Value]:
    """`value` and every value that it is computed from by other nodes than those of `without`."""
    found, waiting = {value}, [value]
    while waiting:
        node = waiting.pop().producer()
        for source in node.inputs if node is not None and node not in without else ():
            if source is not None and source not in found:
                found.add(source)
                waiting.append(source)
    return found


def is_measured(value: ir.Value | None) -> bool:
    """Whether it is the step or the zero point that values are rounded with, measured on them.

    Gradients take it for a constant.
    """
    node = None if value is None else value.producer()
    return (
        node is not None
        and node.op_type == "DynamicQuantizeLinear"
        and value is not node.outputs[0]
    )
