"""From an explained ONNX file to heatmaps, with NumPy and onnxruntime alone.

`onnxplain.runtime.methods` needs NumPy only, so the classes below load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxplain.runtime.explainer import Explainer
    from onnxplain.runtime.explanation import Explanation
    from onnxplain.runtime.taps import Taps

__all__ = ["Explainer", "Explanation", "Taps"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'onnxplain.runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(f"onnxplain.runtime.{name.lower()}"), name)


def __dir__() -> list[str]:
    return __all__
