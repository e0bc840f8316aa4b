"""Matrix products."""

from __future__ import annotations

from typing import Any

from onnxplain.graphs.backward.gradient.table import Grads, Results, first, operands, rule
from onnxplain.graphs.backward.walk import Cotangent, Step
from onnxplain.graphs.builder import Builder, Tensor
from onnxplain.graphs.values.axes import size_of, volume

__all__: list[str] = []  # imported for its entries


@rule("MatMul")
def _(s: Step, g: Grads) -> Results:
    b, flat = s.b, first(g)
    left, right = s.input(0), s.input(1)
    if right.rank == 1:  # a vector is a column on the right, a row on the left
        flat, right = b.unsqueeze(flat, flat.rank), b.unsqueeze(right, 1)
    if left.rank == 1:
        flat, left = b.unsqueeze(flat, flat.rank - 1), b.unsqueeze(left, 0)
    results: list[Tensor | Cotangent | None] = [None, None]
    if s.wants[0]:
        product = b.unbroadcast(b.matmul(flat, b.swap(b.apart(right))), left.shape)
        # sum_k of (g V^T)_ik P_ik is sum_j of g_ij (P V)_ij, over the narrow V
        dots = None
        if s.wants[1] and right.rank == left.rank > 2 and s.y.shape[:-1] == left.shape[:-1]:
            dots = b.sum(b.mul(first(g), s.y), [-1])
        results[0] = Cotangent(b.reshape(product, s.input(0).shape), dots=dots)
    if s.wants[1]:
        results[1] = b.reshape(right_factor(b, left, flat, right), s.input(1).shape)
    return results


def right_factor(b: Builder, left: Tensor, g: Tensor, right: Tensor) -> Tensor:
    """`left^T g` summed over the stack axes that `right` does not have."""
    if left.rank > right.rank == 2 and left.rank == g.rank:  # one product over all rows
        left = b.reshape(left, (size_of(volume(left.shape[:-1])), left.shape[-1]))
        g = b.reshape(g, (size_of(volume(g.shape[:-1])), g.shape[-1]))
    if b.is_swapped(right):  # K^T: the transpose of this one cancels that one
        return b.unbroadcast(b.swap(b.matmul(b.swap(g), left)), right.shape)
    return b.unbroadcast(b.matmul(b.swap(left), g), right.shape)


@rule("Gemm")  # alpha A' B' + beta C, where ' transposes on request
def _(s: Step, g: Grads) -> Results:
    b, flat = s.b, first(g)
    turned = [bool(s.integer("transA", 0)), bool(s.integer("transB", 0))]
    alpha, beta = s.real("alpha", 1.0), s.real("beta", 1.0)

    def gemm(p: Tensor, q: Tensor, trans_p: bool, trans_q: bool) -> Tensor:
        shape = (p.shape[1 if trans_p else 0], q.shape[0 if trans_q else 1])
        turns: dict[str, Any] = {"transA": int(trans_p), "transB": int(trans_q)}
        return b.op("Gemm", [p, q], shape, alpha=alpha, **turns)

    def product(i: int) -> Tensor:
        if i == 2:
            return flat if beta == 1 else b.mul(flat, beta)
        other = b.apart(s.input(1 - i))
        if i == 0:
            return (
                gemm(other, flat, turned[1], True)
                if turned[0]
                else gemm(flat, other, False, not turned[1])
            )
        return (
            gemm(flat, other, True, turned[0])
            if turned[1]
            else gemm(other, flat, not turned[0], False)
        )

    return operands(s, product)


@rule("Einsum")  # the subscripts of the operand and of the result change places
def _(s: Step, g: Grads) -> Results:
    equation = s.text("equation", "").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    subscripts = terms.split(",")
    if not arrow or "." in equation or any(len(set(t)) != len(t) for t in subscripts):
        raise s.refuse(f"equation {equation}; expected an explicit result, no ellipsis or diagonal")
    sizes = {
        k: d for t, x in enumerate(subscripts) for k, d in zip(x, s.input(t).shape, strict=True)
    }

    def product(i: int) -> Tensor:
        others = [j for j in range(len(subscripts)) if j != i]
        known = set(result).union(*(subscripts[j] for j in others))
        kept = "".join(k for k in subscripts[i] if k in known)
        shape = tuple(sizes[k] for k in kept)
        sources = ",".join([result, *(subscripts[j] for j in others)])
        inputs = [first(g), *(s.input(j) for j in others)]
        found = s.b.op("Einsum", inputs, shape, equation=f"{sources}->{kept}")
        for axis, k in enumerate(subscripts[i]):  # summed out alone: the same for each position
            if k not in known:
                found = s.b.unsqueeze(found, axis)
        return s.b.expand(found, s.input(i).shape, s.input(i).value)

    return [product(i) if wanted else None for i, wanted in enumerate(s.wants)]
