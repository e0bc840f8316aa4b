"""`Explainer`: an explained ONNX file in, heatmaps out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from onnxplain.contract import Contract
from onnxplain.errors import InputError, OnnxplainError
from onnxplain.outputs import METHODS
from onnxplain.runtime import dispatch
from onnxplain.runtime.explanation import Explanation, upsample
from onnxplain.runtime.model import Model
from onnxplain.runtime.preprocessing import Prepared, prepare, prepare_picture
from onnxplain.runtime.streaming import ahead
from onnxplain.runtime.taps import SINGLE, Taps, outputs_of
from onnxplain.runtime.targets import (
    PREDICTION,
    ClassWeights,
    Question,
    Target,
    class_index,
    likeliest_first,
    question,
)

__all__ = ["Explainer"]

# More images than this go through the model in several runs, whose maps alone are kept: the
# attention of all layers of a base model is 22 MB per image.
_IMAGES_PER_RUN = 16


class Explainer:
    """Explains pictures with an explained ONNX file or bundle; needs neither torch nor onnx.

    Args:
        path: A file or bundle folder made by `onnxplain.export` or `onnxplain.instrument`.
        device: "auto" takes the best provider that really loads; "cpu", "cuda", "cuda:1",
            "tensorrt", "openvino" or a list of onnxruntime providers is what runs, or an error.
        threads: Threads within an operator; None leaves the choice to onnxruntime.
        provider_options: onnxruntime's options for the provider of the named device.
        image_size: Pixels, or height and width, that pictures are brought to, for a file that takes
            several sizes; None: what its contract says.

    Attributes:
        contract: What the file says about itself, for pictures of this size.
        methods: Names of the methods it can serve.
        device: What was obtained, such as "cpu" or "cuda:0".

    Raises:
        ModelError: The file is missing, empty, not ONNX, or its weights are missing.
        ContractError: It has no contract, one of a newer format, or one that its graph breaks.
        DeviceError: The device cannot be had; the message says why and what to install.
        InputError: The file does not take pictures of `image_size`, or `threads` is no count.

    Example:
        >>> explainer = Explainer("vit.onnx")
        >>> result = explainer.explain("cat.jpg", target="tabby")
        >>> result.save("out/")
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | Sequence[Any] = "auto",
        threads: int | None = None,
        provider_options: Mapping[str, Any] | None = None,
        image_size: int | tuple[int, int] | None = None,
    ) -> None:
        _refuse_count("threads", threads)
        self._model = Model(path, device=device, threads=threads, provider_options=provider_options)
        self._contract = self._model.contract
        if image_size is not None:
            self._contract = self._contract.at(image_size)

    @property
    def contract(self) -> Contract:
        return self._contract

    @property
    def methods(self) -> tuple[str, ...]:
        return dispatch.served(self.contract)

    @property
    def device(self) -> str:
        return self._model.device

    def taps(
        self,
        images: Any,
        *,
        target: Target | Sequence[Target] = None,
        kinds: Iterable[str] | None = None,
    ) -> Taps:
        """The raw outputs of the graph: logits, attention, gradients, features.

        Args:
            images: As in `explain`.
            target: As in `explain`.
            kinds: Names of the taps to fetch (fields of `Taps`); None is everything the file has.

        Returns:
            Arrays over the whole batch; what was not fetched is None.

        Raises:
            InputError: An image, target or kind is not what the model can take or give.
        """
        wanted = outputs_of(kinds, self.contract, self._model.outputs)
        batch = prepare(images, self.contract.input)
        asked = question(target, None, len(batch), self.contract)
        outputs = [name for names in wanted.values() for name in names if name is not None]
        values = self._model.run([image for image, _ in batch], asked, outputs)
        found: dict[str, Any] = {}
        for kind, names in wanted.items():
            arrays = [None if name is None else values[name] for name in names]
            found[kind] = arrays[0] if kind in SINGLE else arrays
        logits = values[self.contract.logits]
        return Taps(logits=logits, target=asked.answered(logits), **found)

    def explain(
        self,
        images: Any,
        *,
        method: str = "auto",
        target: Target | Sequence[Target] = None,
        class_weights: ClassWeights = None,
        **options: Any,
    ) -> Explanation:
        """Heatmaps for one picture or a batch.

        Args:
            images: A path, a PIL image, a uint8 RGB array [H, W, 3], or a list of these; or a
                float32 array [B, 3, H, W] of already normalised pixel values, of any size that the
                file takes, also where it has channels last. Pictures are turned upright by their
                EXIF orientation; transparent ones are laid on white.
            method: One of `methods`; "auto" takes the best one that the file serves.
            target: The class to explain: None for each image's prediction, an index, a label, or
                a list with one of these per image.
            class_weights: Instead of a class, a sum of logits, from a file with
                `seed="weights"`: a weight by class (label or index; the others are 0), or an array
                [classes] or [B, classes]. `{"cat": 1, "dog": -1}`: what makes it a cat rather
                than a dog.
            **options: The method's own, such as `head_fusion`, `discard_ratio`, `start_layer`.

        Raises:
            InputError: Unknown method, option or class, or images of a wrong shape or type.
            ImageError: A picture is missing, damaged, or not a picture.
        """
        method = dispatch.choose(method, self.contract)
        dispatch.check_options(method, options)
        batch = prepare(images, self.contract.input)
        asked = question(target, class_weights, len(batch), self.contract)
        return self._explain(batch, asked, method, options)[0]

    def explain_classes(
        self,
        images: Any,
        *,
        method: str = "auto",
        classes: Sequence[Target] | None = None,
        top: int | None = None,
        **options: Any,
    ) -> list[Explanation]:
        """Several classes of each image, as many in one run of the model as the file takes.

        Args:
            images: As in `explain`.
            method: As in `explain`.
            classes: The same for all images; None: each image's likeliest ones.
            top: How many of these; None: as many as the file takes at once (`contract.targets`).
            **options: The method's own.

        Returns:
            One result per class, in the order of `classes` or the likeliest first.

        Raises:
            InputError, ImageError: As in `explain`.
        """
        _refuse_count("top", top)
        if classes is not None and top is not None:
            raise InputError("both classes and top; give one of them")
        if isinstance(classes, str) or not isinstance(classes, Iterable | None):
            raise InputError(f"classes {classes!r}; expected a list of them")
        method = dispatch.choose(method, self.contract)
        dispatch.check_options(method, options)
        batch = prepare(images, self.contract.input)
        size = self.contract.targets
        results: list[Explanation] = []
        if classes is not None:
            row = np.array([class_index(one, self.contract) for one in classes], np.int64)
            wanted = row[None].repeat(len(batch), axis=0)
        else:
            ranks = (PREDICTION - np.arange(size))[None].repeat(len(batch), axis=0)
            results = self._explain(batch, Question(classes=ranks), method, options)
            results = results[: min(top or size, self.contract.classes)]
            wanted = likeliest_first(results[0].logits)[:, : top or size]
        for start in range(len(results), wanted.shape[1], size):
            # The last run is filled up with its last class.
            columns = [min(start + i, wanted.shape[1] - 1) for i in range(size)]
            found = self._explain(batch, Question(classes=wanted[:, columns]), method, options)
            results += found[: wanted.shape[1] - start]
        return results

    def explain_many(
        self,
        paths: Iterable[Any],
        *,
        batch_size: int = 8,
        workers: int | None = None,
        on_error: str | Callable[[Any, OnnxplainError], None] = "raise",
        method: str = "auto",
        target: Target = None,
        class_weights: ClassWeights = None,
        **options: Any,
    ) -> Iterator[Explanation]:
        """Explains a stream of pictures, one result per picture, in order.

        Pictures are decoded in threads while the model runs. However long the stream, no more than
        two batches and a picture per thread are in memory.

        Args:
            paths: Pictures as in `explain`, one by one; may be an endless iterator.
            batch_size: Pictures per run of the model.
            workers: Decoding threads; None is one per CPU, at most 4.
            on_error: What a picture that cannot be read does. "raise": stops, after the results
                before it. "skip": leaves it out with a warning. A function is called with the
                picture as it came from `paths` and the error, then it is left out.
            method, target, class_weights, **options: As in `explain`; one question for all.

        Raises:
            InputError: At the call, for a wrong argument.
            ImageError: While iterating, with `on_error="raise"`.
        """
        _refuse_count("batch_size", batch_size)
        _refuse_count("workers", workers)
        if on_error not in ("raise", "skip") and not callable(on_error):
            raise InputError(f"on_error is {on_error!r}, expected 'raise', 'skip' or a function")
        if isinstance(paths, str | os.PathLike | Image.Image):
            raise InputError("explain_many takes a list of pictures; for one picture use explain")
        method = dispatch.choose(method, self.contract)
        dispatch.check_options(method, options)
        if target is not None:
            target = class_index(target, self.contract)
        asked = question(target, class_weights, 1, self.contract)
        threads = workers or min(4, os.cpu_count() or 1)
        return self._stream(iter(paths), batch_size, threads, on_error, asked, method, options)

    def _stream(
        self,
        sources: Iterator[Any],
        batch_size: int,
        workers: int,
        on_error: str | Callable[[Any, OnnxplainError], None],
        asked: Question,
        method: str,
        options: dict[str, Any],
    ) -> Iterator[Explanation]:
        def run(batch: list[Prepared]) -> Iterator[Explanation]:
            if batch:
                yield from self._explain(batch, asked.repeated(len(batch)), method, options)[0]

        def decode(source: Any) -> Prepared:
            return prepare_picture(source, self.contract.input)

        batch: list[Prepared] = []
        for source, outcome in ahead(sources, decode, workers=workers, count=batch_size + workers):
            if not isinstance(outcome, OnnxplainError):
                batch.append(outcome)
            elif on_error == "raise":
                yield from run(batch)
                raise outcome
            elif callable(on_error):
                on_error(source, outcome)
            else:
                warnings.warn(str(outcome), stacklevel=2)
            if len(batch) == batch_size:
                yield from run(batch)
                batch = []
        yield from run(batch)

    def explain_each(
        self,
        images: Any,
        *,
        methods: Iterable[str] | None = None,
        target: Target | Sequence[Target] = None,
        class_weights: ClassWeights = None,
    ) -> Iterator[Explanation]:
        """Several methods side by side, from one run of the model.

        Args:
            images: As in `explain`; all their outputs are in memory at once.
            methods: Names; None is every method that the file serves.
            target, class_weights: As in `explain`.

        Yields:
            One result per method, each with its default options.

        Raises:
            InputError, ImageError: As in `explain`.
        """
        names = [dispatch.choose(m, self.contract) for m in (methods or self.methods)]
        batch = prepare(images, self.contract.input)
        contract = self._contract_of(batch)
        asked = question(target, class_weights, len(batch), contract)
        outputs = {output for name in names for output in dispatch.reads(name, contract, {})}
        values = self._model.run([image for image, _ in batch], asked, outputs)
        for name in names:
            grid = dispatch.compute(name, values, contract, {})
            yield self._explanation(name, {}, grid, values[contract.logits], asked, batch)

    def _explain(
        self, batch: list[Prepared], asked: Question, method: str, options: dict[str, Any]
    ) -> list[Explanation]:
        """One result for each class of an image that is asked for."""
        contract = self._contract_of(batch)
        outputs = dispatch.reads(method, contract, options)
        questions = asked.one_by_one()
        logits: list[NDArray[Any]] = []
        grids: list[list[NDArray[np.float32]]] = [[] for _ in questions]
        for start in range(0, len(batch), _IMAGES_PER_RUN):
            part = slice(start, start + _IMAGES_PER_RUN)
            values = self._model.run([image for image, _ in batch[part]], asked[part], outputs)
            logits.append(values[contract.logits])
            for i, grid in enumerate(grids):
                grid.append(dispatch.compute(method, values, contract, options, column=i))
        whole = np.concatenate(logits)
        return [
            self._explanation(method, options, np.concatenate(grid), whole, one, batch)
            for one, grid in zip(questions, grids, strict=True)
        ]

    def _explanation(
        self,
        method: str,
        options: dict[str, Any],
        grid: NDArray[np.float32],
        logits: NDArray[Any],
        asked: Question,
        batch: list[Prepared],
    ) -> Explanation:
        # Relevance of pixels has a sign: the map shows what speaks for the class.
        contract = self._contract_of(batch)
        pixels, tokens = METHODS[method].pixels, contract.tokens
        size = contract.input.size
        shown, covered = (np.maximum(grid, 0), size) if pixels else (grid, tokens.covered(size))
        heatmap, degenerate = upsample(shown, size, covered)
        return Explanation(
            method=method,
            options=dict(options),
            grid=grid,
            heatmap=heatmap,
            logits=logits,
            target=asked.answered(logits),
            labels=asked.names(logits, contract),
            degenerate=degenerate,
            pictures=tuple(picture for _, picture in batch),
            class_weights=asked.weights,
        )

    def _contract_of(self, batch: list[Prepared]) -> Contract:
        """The contract for pixels of the batch's size."""
        if self.contract.input.layout == "HWC":  # the graph brings every picture to one size
            return self.contract
        return self.contract.at(batch[0][0].shape[1:])


def _refuse_count(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int | np.integer) or value < 1):
        raise InputError(f"{name} is {value!r}, expected a positive number")
