"""The gradient table: the vector-Jacobian product of every operator.

Formulas are those of the operators' definitions in ONNX. Adding an operator is adding one entry.
"""

from onnxplain.graphs.backward.gradient import (  # noqa: F401
    elementwise,
    layout,
    products,
    quantised,
    reductions,
    windows,
)
from onnxplain.graphs.backward.gradient.table import GRADIENT

__all__ = ["GRADIENT"]
