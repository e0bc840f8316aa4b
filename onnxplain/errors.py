"""What can go wrong, by kind. Every message is one line: what was found, expected, what to do."""

__all__ = [
    "ContractError",
    "DeviceError",
    "ImageError",
    "InputError",
    "MissingDependencyError",
    "ModelError",
    "OnnxplainError",
    "UnsupportedModelError",
    "UnsupportedOperatorError",
    "VerificationError",
]


class OnnxplainError(Exception):
    """Base of every error that onnxplain raises on purpose."""


class ModelError(OnnxplainError):
    """A model file is missing, unreadable, or not ONNX."""


class ContractError(ModelError):
    """An explained file has no contract, one of a newer format, or one its graph does not keep."""


class UnsupportedModelError(ModelError):
    """The model is readable, but its structure is not one that can be explained."""


class UnsupportedOperatorError(UnsupportedModelError):
    """An operator on the path from the logits to a tap has no rule."""


class VerificationError(OnnxplainError):
    """The explained graph disagrees with the framework that the model came from."""


class InputError(OnnxplainError, ValueError):
    """An argument has a wrong value, shape or type: an unknown method, class, option."""


class ImageError(InputError):
    """A picture cannot be read, or is not what the model can take."""


class DeviceError(OnnxplainError):
    """The requested execution provider cannot be had on this machine."""


class MissingDependencyError(OnnxplainError, ImportError):
    """A stage needs packages of an extra that is not installed."""
