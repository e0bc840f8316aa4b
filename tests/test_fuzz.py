"""Whatever is wrong with a file, the answer is an explained file or one of our errors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import onnx
import pytest
from channels_last import turned
from conftest import toy_contract, toy_model
from hand_written import HandWritten, to_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import BYTES, MUTATIONS, spoil_document
from torch import nn
from untrusted_worker import Outcome, Worker

ROUNDS = int(os.environ.get("ONNXPLAIN_FUZZ_ROUNDS", "60"))
LONGEST = 20  # seconds of the processor
LARGEST_PEAK = 400e6  # bytes; with all libraries loaded 170e6
LOG = os.environ.get("ONNXPLAIN_FUZZ_LOG")  # a line of JSON for every round


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer in two exporters' hands, with channels last, in bfloat16, and a convolutional
    network."""
    folder = tmp_path_factory.mktemp("files")
    network = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    )
    to_file(HandWritten(), folder / "a.onnx")
    to_file(HandWritten(), folder / "b.onnx", dynamo=True, opset=20)
    to_file(network.eval(), folder / "c.onnx")
    turned(folder / "a.onnx", folder / "d.onnx")
    to_file(HandWritten().bfloat16(), folder / "e.onnx", dynamo=True, opset=20)
    return folder


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


fuzzed = settings(
    max_examples=ROUNDS,
    deadline=None,
    derandomize=ROUNDS <= 60,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@fuzzed
@given(
    which=st.sampled_from("abcde"),
    changes=st.lists(st.sampled_from([*MUTATIONS, *BYTES]), min_size=1, max_size=3),
    random=st.randoms(use_true_random=False),
)
def test_every_answer_is_one_of_ours(
    files: Path,
    worker: Worker,
    tmp_path_factory: pytest.TempPathFactory,
    which: str,
    changes: list[str],
    random: Random,
) -> None:
    model = onnx.load(files / f"{which}.onnx")
    for name in changes:
        if name in MUTATIONS and model.graph.node:
            MUTATIONS[name](model, random)
    data = model.SerializeToString()
    for name in changes:
        if name in BYTES and data:
            data = BYTES[name](data, random)
    path = tmp_path_factory.getbasetemp() / "fuzzed.onnx"
    path.write_bytes(data)
    check(worker(path), which, changes)


@fuzzed
@given(changes=st.integers(1, 3), random=st.randoms(use_true_random=False))
def test_a_contract_of_a_stranger(
    worker: Worker, tmp_path_factory: pytest.TempPathFactory, changes: int, random: Random
) -> None:
    model = toy_model(toy_contract())
    document = json.loads(model.metadata_props[0].value)
    for _ in range(changes):
        spoil_document(document, random)
    model.metadata_props[0].value = json.dumps(document)
    path = tmp_path_factory.getbasetemp() / "strange.onnx"
    path.write_bytes(model.SerializeToString())
    check(worker(path, "explained"), "contract", [])


def check(outcome: Outcome, which: str, changes: list[str]) -> None:
    if LOG:
        with Path(LOG).open("a") as log:
            print(json.dumps([which, changes, *vars(outcome).values()]), file=log)
    assert outcome.typed, f"{outcome.kind}: {outcome.text}"
    assert "\n" not in outcome.text
    assert outcome.seconds < LONGEST
    assert outcome.peak < LARGEST_PEAK
