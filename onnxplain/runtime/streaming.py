"""Decoding pictures ahead of the model, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

from onnxplain.errors import OnnxplainError

__all__ = ["ahead"]

T = TypeVar("T")


def ahead(
    sources: Iterable[Any], work: Callable[[Any], T], *, workers: int, count: int
) -> Iterator[tuple[Any, T | OnnxplainError]]:
    """Does `work` on each source in threads, at most `count` sources ahead of the consumer.

    Args:
        sources: May be endless; it is read from the consumer's thread only.
        work: Called in a thread.
        workers: Number of threads.
        count: How many sources may be in work or waiting.

    Yields:
        Each source with its result, or with the `OnnxplainError` that its work raised, in the
        order of the sources. Any other exception is raised.
    """

    def attempt(source: Any) -> T | OnnxplainError:
        try:
            return work(source)
        except OnnxplainError as error:
            return error

    remaining = iter(sources)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="onnxplain")
    pending: deque[tuple[Any, Future[T | OnnxplainError]]] = deque()
    try:
        while True:
            for source in islice(remaining, count - len(pending)):
                pending.append((source, pool.submit(attempt, source)))
            if not pending:
                return
            source, future = pending.popleft()
            yield source, future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
