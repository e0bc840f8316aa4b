"""What a file is asked to hold: raw outputs, finished maps or both, of which classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onnxplain.errors import InputError

__all__ = ["Request"]

OUTPUTS = ("taps", "maps", "both")
SEEDS = ("target", "weights")
SCORES = ("logit", "probability")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The outputs of a file besides the logits, and what they can be asked for.

    Attributes:
        outputs: "taps": what the methods read (attention, gradients, ...); "maps": their finished
            maps, `map.{method}` [batch, h, w], alone; "both". None: both, or the maps of several
            targets.
        map_options: `head_fusion`, `discard_ratio` and `start_layer` of the maps, which are fixed
            in the file; a method takes those that it has.
        heatmaps: Whether each map is there at the size of the input and in 0..1 as well, as
            `heatmap.{method}` [batch, height, width].
        targets: So many classes of each image in one run, maps [batch, targets, h, w]; those of a
            method that does not depend on the class stay [batch, h, w]. The raw outputs are those
            of one class, so there are none for more than one.
        seed: "target": a class is asked for. "weights": also, by the input `class_weights`
            [batch, classes], any sum of logits.
        score: "logit": gradients are those of the logit. "probability": of what a Softmax or
            Sigmoid at the end makes of it, or a Softmax would; relevance is that of a logit, so
            the methods of it are left out.
        require_target: Whether these inputs have to be given (a target of -1, weights of 0 are what
            they are when left out). Some runtimes refuse values for inputs that can be left out
            (onnxruntime-web), or make constants of them (OpenVINO).

    Raises:
        InputError: A value that is not one of these, or values that exclude each other.
    """

    outputs: str | None = None
    map_options: Mapping[str, Any] = field(default_factory=dict)
    heatmaps: bool = False
    targets: int = 1
    seed: str = "target"
    score: str = "logit"
    require_target: bool = False

    def __post_init__(self) -> None:
        if self.outputs is not None and self.outputs not in OUTPUTS:
            raise InputError(f"outputs {self.outputs!r}; expected one of {', '.join(OUTPUTS)}")
        if self.seed not in SEEDS:
            raise InputError(f"seed {self.seed!r}; expected one of {', '.join(SEEDS)}")
        if self.score not in SCORES:
            raise InputError(f"score {self.score!r}; expected one of {', '.join(SCORES)}")
        if not isinstance(self.targets, int) or isinstance(self.targets, bool) or self.targets < 1:
            raise InputError(f"targets {self.targets!r}; expected how many classes, from 1 on")
        if self.outputs == "taps" and (self.map_options or self.heatmaps):
            what = ", ".join(self.map_options) or "heatmaps"
            raise InputError(f"{what} without maps; expected outputs maps or both")
        if self.targets > 1 and self.outputs not in (None, "maps"):
            raise InputError(
                f"outputs {self.outputs!r} for {self.targets} targets; expected maps, since the "
                "raw outputs are those of one class"
            )

    @property
    def taps(self) -> bool:
        """Whether the file has what the methods read."""
        return self.targets == 1 and self.outputs != "maps"

    @property
    def maps(self) -> bool:
        """Whether the file has the methods' maps."""
        return self.outputs != "taps"
