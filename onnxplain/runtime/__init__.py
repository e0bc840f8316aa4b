"""From an explained ONNX file to heatmaps, with NumPy and onnxruntime alone."""

from onnxplain.runtime.explainer import Explainer
from onnxplain.runtime.explanation import Explanation
from onnxplain.runtime.taps import Taps

__all__ = ["Explainer", "Explanation", "Taps"]
