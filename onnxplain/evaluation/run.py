"""`evaluate`: a model and a dataset in, a report on every method out."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplain.contract import Contract
from onnxplain.errors import InputError, UnsupportedModelError
from onnxplain.evaluation.datasets import open_dataset
from onnxplain.evaluation.examples import draw_examples
from onnxplain.evaluation.measures import FILLS, GROUPS, measures_of
from onnxplain.evaluation.progress import FILE, Progress
from onnxplain.evaluation.report import write_report
from onnxplain.evaluation.report.reading import read
from onnxplain.evaluation.report.verdict import doubt
from onnxplain.evaluation.results import FORMAT, Measured, summarise, versions
from onnxplain.evaluation.statistics import CONFIDENCE, Interval, Statistics
from onnxplain.evaluation.study import Layout
from onnxplain.evaluation.work import Work, spread
from onnxplain.graphs.files.reading import weight_files
from onnxplain.graphs.randomised import levels
from onnxplain.runtime import dispatch
from onnxplain.runtime.explainer import Explainer
from onnxplain.steps import Step, silent

__all__ = ["Evaluation", "evaluate"]

_SCRATCH = ".onnxplain-evaluation"  # in the report's folder, gone at the end
_REPORT = ("index.html", "results.csv", "results.json")


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        results: The document that `results.json` holds.
        folder: Where the report is, or None.
        failures: Name and error of each picture that could not be evaluated.
    """

    results: dict[str, Any]
    folder: Path | None
    failures: tuple[tuple[str, str], ...]
    _statistics: Statistics
    _layout: Layout

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that were compared, then the baselines."""
        return self._layout.methods

    def value(self, method: str, measure: str) -> Interval:
        """A method's number, with its bootstrap interval.

        Raises:
            InputError: No such method or measure.
        """
        return self._statistics.value(*self._named(method, measure))

    def difference(self, method: str, other: str, measure: str) -> Interval:
        """A method's number less another one's, of the same pictures; the interval is paired.

        Raises:
            InputError: No such method or measure.
        """
        self._named(other, measure)
        name, found = self._named(method, measure)
        return self._statistics.difference(name, other, found)

    def _named(self, method: str, measure: str) -> tuple[str, Any]:
        if method not in self._layout.methods:
            raise InputError(f"method {method!r}; one of {', '.join(self._layout.methods)}")
        known = {one.name: one for one in self._layout.measures}
        if measure not in known:
            raise InputError(f"measure {measure!r}; one of {', '.join(known)}")
        return method, known[measure]


def evaluate(
    model: str | os.PathLike[str],
    dataset: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    methods: Iterable[str] | None = None,
    measures: Iterable[str] | None = None,
    fills: Sequence[str] = ("zero",),
    steps: int = 16,
    masks: str | os.PathLike[str] | None = None,
    mask_labels: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    sanity_pictures: int = 32,
    seed: int = 0,
    resamples: int = 1000,
    batch_size: int = 32,
    device: str | Sequence[Any] = "auto",
    threads: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    restart: bool = False,
    on_error: Callable[[str, str], None] | None = None,
    step: Step | None = None,
) -> Evaluation:
    """Measures which explanation methods can be trusted, on a dataset, from the ONNX file alone.

    What each number is exactly stands in the report and in docs/evaluation.md.

    Args:
        model: An explained file or bundle.
        dataset: A folder with a folder for each class, a CSV file (path,label[,mask[,mask_value]]),
            a folder of pictures, or "garments" or "garments-pairs", the bundled scenes of one and
            of two garments.
        output: Folder of the report: index.html, results.json, results.csv, and progress.sqlite,
            with which a run that was interrupted goes on; None writes nothing.
        methods: Names; None is every method that the file serves.
        measures: Some of "perturbation", "insertion_deletion", "localisation", "sanity"; None: all.
        fills: What takes the place of removed pixels: "zero", "mean", "blur", "road".
        steps: Of insertion and deletion; no more than there are patches.
        masks: Folder of masks, beside a folder of pictures, with the same names.
        mask_labels: Text file, line i the class of pixel value i of the masks.
        limit: So many pictures, drawn at random from the dataset. A run with another limit takes
            over what is known of the pictures that it has, too.
        sanity_pictures: So many, spread evenly over the dataset, for the randomisation of weights;
            0: none.
        seed: Of every random choice.
        resamples: Of the bootstrap.
        batch_size: Pictures in a run of the model.
        device, threads, image_size: As in `Explainer`.
        restart: Forget what an earlier run left in `output`.
        on_error: Called with the name and the error of each picture that cannot be evaluated.
        step: Called with what is going on, how much of it is done, and of how much.

    Returns:
        The results; `results` is the document in results.json.

    Raises:
        InputError: A wrong argument, a dataset that does not fit the model, nothing to measure, or
            `output` holds another evaluation, or other things.
        ModelError, ContractError, DeviceError: As in `Explainer`.
        OSError: The report cannot be written.
    """
    for name, value, least in (
        ("steps", steps, 1),
        ("sanity_pictures", sanity_pictures, 0),
        ("seed", seed, 0),
        ("resamples", resamples, 1),
        ("batch_size", batch_size, 1),
        ("limit", 1 if limit is None else limit, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name} is {value!r}, expected a whole number from {least} on")
    source = Path(model)
    explainer = Explainer(source, device=device, threads=threads, image_size=image_size)
    contract = explainer.contract
    if contract.input.layout == "HWC":
        raise InputError(
            f"{source}: takes pictures as they are (embedded preprocessing), so their pixels "
            "cannot be removed; evaluate the file without it"
        )
    groups = _groups(measures, contract)
    names = _chosen("methods", methods, explainer.methods)
    names = list(dict.fromkeys(dispatch.choose(name, contract) for name in names))
    steps = min(steps, contract.tokens.grid[0] * contract.tokens.grid[1])
    data = open_dataset(
        dataset if isinstance(dataset, str) else Path(dataset),
        contract,
        masks=None if masks is None else Path(masks),
        mask_labels=None if mask_labels is None else Path(mask_labels),
        limit=limit,
        seed=seed,
    )
    fills = _chosen("fills", fills, FILLS)
    level_names = _levels(source) if "sanity" in groups and sanity_pictures else []
    layout = Layout(names, measures_of(groups, fills, steps, level_names))
    settings = {
        "methods": names,
        "measures": groups,
        "fills": fills,
        "steps": steps,
        "image_size": list(contract.input.size),
        "limit": limit,
        "sanity_pictures": sanity_pictures,
        "seed": seed,
        "batch_size": batch_size,
        "device": explainer.device,
        "threads": threads,
    }
    digest = _digest(source)
    identity = {"format": FORMAT, **settings, "model": digest, "dataset": data.identity}
    tell = step or silent
    with _folder(output) as folder:
        identity["versions"] = versions()
        stamps = dict(zip(data.numbers, data.stamps, strict=True))
        progress = Progress(folder, identity, stamps, restart=restart)
        with contextlib.closing(progress), _scratch(folder) as scratch:
            chosen = spread(data.numbers, sanity_pictures) if level_names else []
            work = Work(explainer, data, layout, progress, scratch, source, settings)
            work.pictures(on_error or (lambda name, error: None), tell)
            work.levels(chosen, level_names, tell)
            tell("summing up", 0, 1)
            found = Measured(progress, layout, chosen)
            failures = tuple(progress.failures())
            if not found.names:
                raise InputError(
                    f"{dataset}: none of {len(data)} pictures could be evaluated; the first: "
                    f"{failures[0][1]}"
                )
            document, statistics = summarise(
                found,
                model={"name": contract.source.name, "file": source.name, "sha256": digest},
                dataset={"name": data.name, "pictures": len(data)},
                contract=contract,
                settings={**settings, "resamples": resamples, "confidence": CONFIDENCE},
                level_names=level_names,
                failures=failures,
            )
            if not document["measures"]:
                lack = (
                    "as no mask shows an object and a background in what the model sees; mend them"
                    if document["dataset"]["with_masks"]
                    else "without masks; give them (--masks, or a CSV's column mask)"
                )
                raise InputError(
                    f"{dataset}: nothing of {', '.join(groups)} can be measured {lack}, or other "
                    "measures"
                )
            reading = read(document)
            for verdict in document["verdicts"]:
                verdict["doubt"] = doubt(reading, verdict["method"])
            if output is not None:
                document["examples"], pictures = draw_examples(explainer, data, found, names, tell)
                # All or nothing, and what a killed run leaves of it goes with the scratch.
                write_report(document, pictures, scratch / "report")
                for path in sorted((scratch / "report").iterdir()):
                    os.replace(path, folder / path.name)
    return Evaluation(
        document, None if output is None else Path(output), failures, statistics, layout
    )


def _levels(source: Path) -> list[str]:
    try:
        return levels(source)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{source}: {error}; to leave their randomisation out: sanity_pictures=0 "
            "(--sanity-pictures 0)"
        ) from None


def _chosen(what: str, given: Iterable[str] | None, known: Collection[str]) -> list[str]:
    if isinstance(given, str):
        raise InputError(f"{what} {given!r}; expected a list of names")
    names = list(known if given is None else dict.fromkeys(given))
    if not names:
        raise InputError(f"no {what}; expected some of {', '.join(known) or 'none'}")
    return names


def _groups(measures: Iterable[str] | None, contract: Contract) -> list[str]:
    """What is measured; of a model that has but one class and so always predicts it, where its maps
    lie."""
    if contract.classes > 1:
        return _chosen("measures", measures, GROUPS)
    groups = _chosen("measures", measures, ["localisation"])
    if groups != ["localisation"]:
        raise InputError(
            f"measures {', '.join(groups)} of a model with one class, which is always predicted; "
            "expected localisation alone"
        )
    return groups


def _digest(source: Path) -> str:
    """sha256 of the model's files: the graphs, and the weights beside them."""
    if source.is_dir():  # the report may be in it
        files = sorted(p for p in source.iterdir() if p.is_file() and not _is_ours(p.name))
    else:
        files = [source, *weight_files(source)]
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _is_ours(name: str) -> bool:
    return name in _REPORT or name.startswith(FILE)


@contextlib.contextmanager
def _folder(output: str | os.PathLike[str] | None) -> Iterator[Path]:
    """Where progress is kept: the report's folder, or one that is gone afterwards."""
    if output is None:
        with tempfile.TemporaryDirectory(prefix="onnxplain-") as passing:
            yield Path(passing)
        return
    folder = Path(output)
    if os.path.lexists(folder) and not folder.is_dir():
        found = "a link to nothing" if folder.is_symlink() and not folder.exists() else "a file"
        raise InputError(f"{folder}: {found}; expected a folder for the report")
    for name in () if (folder / FILE).exists() else _REPORT:
        if (folder / name).exists():
            article = "an" if name.startswith("i") else "a"
            raise InputError(
                f"{folder}: holds {article} {name} that is not of an evaluation; choose another "
                "folder"
            )
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):  # of which SQLite only says that it cannot open its file
        raise InputError(f"{folder}: cannot be written to; choose another folder")
    yield folder


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Room for graphs. What a killed run left there goes first."""
    path = folder / _SCRATCH
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
