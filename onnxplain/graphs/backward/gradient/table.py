"""The table itself and what its rules share.

A rule gets the step (operands `x`, result `y`, builder `b`) and the cotangent of each output, and
returns one of each input: `g * dy/dx`, summed over what the operand was broadcast along. Inputs
that lead to no tap (`wants`) may be left None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from onnxplain.graphs.backward.walk import Cotangent, Rule, Step
from onnxplain.graphs.builder import Tensor

__all__ = [
    "GRADIENT",
    "Grads",
    "Results",
    "first",
    "operands",
    "pointwise",
    "rule",
    "where",
]

GRADIENT: dict[str, Rule] = {}
"""Rule of each operator of the standard domain."""

Grads = Sequence[Tensor | None]
Results = Sequence[Tensor | Cotangent | None]


def rule(*operators: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        GRADIENT.update(dict.fromkeys(operators, function))
        return function

    return add


def pointwise(operator: str, slope: Callable[[Step, Tensor, Tensor], Tensor]) -> None:
    """Adds y = f(x) elementwise by its slope f'(x), a function of the step, x and y."""

    @rule(operator)
    def _(s: Step, g: Grads) -> Results:
        return (s.b.mul(first(g), slope(s, s.input(0), s.y)),)


def first(g: Grads) -> Tensor:
    assert g[0] is not None
    return g[0]


def operands(s: Step, products: Callable[[int], Tensor]) -> list[Tensor | None]:
    """One cotangent per wanted input, summed back to the shape of that input."""
    return [
        s.b.unbroadcast(products(i), s.input(i).shape) if wanted else None
        for i, wanted in enumerate(s.wants)
    ]


def where(s: Step, condition: Tensor, g: Tensor) -> Tensor:
    return s.b.where(condition, g, s.b.scalar(0, g))
