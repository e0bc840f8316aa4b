"""What is computed from a value, and what a value is computed from."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

__all__ = ["dependents", "sources"]


def dependents(graph: ir.Graph, value: ir.Value) -> set[ir.Value]:
    """`value` and all that is computed from it, not only from its shape; the rest is constant."""
    found = {value}
    for node in graph:
        if node.op_type not in ("Shape", "Size") and any(v in found for v in node.inputs):
            found.update(node.outputs)
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
