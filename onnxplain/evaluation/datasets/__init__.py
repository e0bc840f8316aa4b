"""What methods are compared on: pictures, the classes asked about, and where their objects are.

`opening.py` finds the pictures of a dataset (`table.py` those of a CSV file), `class_names.py` the
model's class of each, `mask_files.py` and `masks.py` the masks.
"""

from onnxplain.evaluation.datasets.masks import read_masks
from onnxplain.evaluation.datasets.opening import BUNDLED, Dataset, open_dataset
from onnxplain.evaluation.datasets.samples import Object, Sample

__all__ = ["BUNDLED", "Dataset", "Object", "Sample", "open_dataset", "read_masks"]
