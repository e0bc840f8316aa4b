"""The gradient table: the vector-Jacobian product of every operator.

Formulas are those of the operators' definitions in ONNX. Adding an operator is adding one entry.
"""

from onnxplain.graphs.gradient import elementwise, layout, products, reductions  # noqa: F401
from onnxplain.graphs.gradient.table import GRADIENT

__all__ = ["GRADIENT"]
