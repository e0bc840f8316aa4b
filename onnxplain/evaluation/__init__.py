"""Which map can be trusted: explanation methods compared on a dataset, from the ONNX file alone."""

import importlib.util

from onnxplain.errors import MissingDependencyError

__all__ = ["Evaluation", "evaluate"]

for _package in ("scipy", "sklearn", "matplotlib"):
    # Looked for before the work: the report, which needs the last, is drawn at its end.
    if importlib.util.find_spec(_package) is None:
        raise MissingDependencyError(
            f"{_package} is not installed; pip install onnxplain[evaluate]"
        )

from onnxplain.evaluation.run import Evaluation, evaluate  # noqa: E402
