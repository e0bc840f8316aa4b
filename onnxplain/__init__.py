"""Explain ONNX vision transformers with NumPy and onnxruntime.

The names below load on first use, so that `import onnxplain` needs neither onnx nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxplain.contract import Contract
    from onnxplain.errors import (
        ContractError,
        DeviceError,
        ImageError,
        InputError,
        MissingDependencyError,
        ModelError,
        OnnxplainError,
        UnsupportedModelError,
        UnsupportedOperatorError,
        VerificationError,
    )
    from onnxplain.evaluation import Evaluation, evaluate
    from onnxplain.export import export
    from onnxplain.graphs import Report, instrument
    from onnxplain.runtime import Explainer, Explanation, Taps
    from onnxplain.verification import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "Contract",
    "ContractError",
    "DeviceError",
    "Evaluation",
    "Explainer",
    "Explanation",
    "ImageError",
    "InputError",
    "MissingDependencyError",
    "ModelError",
    "OnnxplainError",
    "Report",
    "Taps",
    "UnsupportedModelError",
    "UnsupportedOperatorError",
    "Verification",
    "VerificationError",
    "__version__",
    "evaluate",
    "export",
    "instrument",
    "verify",
]

_HOME = {
    "Contract": "contract",
    "Evaluation": "evaluation",
    "Explainer": "runtime",
    "Explanation": "runtime",
    "Report": "graphs",
    "Taps": "runtime",
    "Verification": "verification",
    "evaluate": "evaluation",
    "instrument": "graphs",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'onnxplain' has no attribute {name!r}")
    if name == "export":  # the subpackage has this name too, so it is itself callable
        return importlib.import_module("onnxplain.export")
    module = _HOME.get(name, "errors")
    return getattr(importlib.import_module(f"onnxplain.{module}"), name)


def __dir__() -> list[str]:
    return __all__
