"""What has been computed of an evaluation, on disk, so that a killed run goes on where it was."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplain.errors import InputError

__all__ = ["FILE", "Progress"]

FILE = "progress.sqlite"
_APPLICATION = int.from_bytes(b"oxev", "big")  # in the header of the file, whose it is
_ADD_PICTURE = (
    "INSERT OR REPLACE INTO pictures VALUES (?, CAST(? AS TEXT), CAST(? AS TEXT), ?, ?, ?)"
)
_LIMIT = "limit"
_WAYS_OUT = "choose another folder, or start again (--restart)"
_DIGESTS = {
    "model": "another model, or of this one before its files changed",
    "dataset": "another dataset, or of this one with other pictures, labels or masks",
}
"""Settings of which the values say nothing to a reader."""
_TABLES = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS pictures (
    number INTEGER PRIMARY KEY, name TEXT, error TEXT, stamp TEXT, facts TEXT, record BLOB
);
CREATE TABLE IF NOT EXISTS levels (number INTEGER PRIMARY KEY, record BLOB);
"""


class Progress:
    """The finished pictures and levels of one evaluation. Each is stored whole or not at all.

    An evaluation of more or of fewer pictures (`limit`) takes over those that both have, and
    leaves the others there.

    Args:
        folder: Where `progress.sqlite` is, or is to be.
        settings: All that results depend on, by name. What is there must be of the same, but for
            the limit.
        stamps: For each picture, by its number, what changes with its files. Those of the finished
            ones must be the same; a picture that failed may have been repaired.
        restart: Whether to forget what is there instead.

    Raises:
        InputError: It is of other settings or files, of another evaluation that is running, or no
            such file.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        stamps: Mapping[int, str],
        *,
        restart: bool,
    ) -> None:
        self._path = folder / FILE
        self._stamps = stamps
        with self._refusals():
            # The lock is held until the end, so that no other run writes here.
            self._database = sqlite3.connect(self._path, timeout=1, isolation_level=None)
            try:
                self._open(settings, restart)
            except BaseException:
                self._database.close()
                raise

    def _open(self, settings: Mapping[str, Any], restart: bool) -> None:
        execute = self._database.execute
        self._database.text_factory = lambda text: text.decode("utf-8", "surrogatepass")
        execute("PRAGMA locking_mode = EXCLUSIVE")
        self._check_ours()  # before anything is written
        execute(f"PRAGMA application_id = {_APPLICATION}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        if restart:  # also tables of another version
            for table in ("settings", "pictures", "levels"):
                execute(f"DROP TABLE IF EXISTS {table}")
        self._database.executescript(_TABLES)
        with self._transaction():
            known = dict(execute("SELECT name, value FROM settings"))
            wanted = {name: json.dumps(value) for name, value in settings.items()}
            if known and known != wanted:
                known[_LIMIT] = wanted[_LIMIT]
                if known != wanted:
                    raise InputError(self._difference(known, wanted))
                execute("DELETE FROM levels")  # their pictures are spread over those of the limit
            self._database.executemany(
                "INSERT OR REPLACE INTO settings VALUES (?, ?)", wanted.items()
            )
        self._check_files()

    def _check_ours(self) -> None:
        ((application,),) = self._database.execute("PRAGMA application_id")
        if application == _APPLICATION:
            return
        # Early versions set none, and one that was killed at once has not yet made every table.
        with contextlib.closing(sqlite3.connect(":memory:")) as ours:
            ours.executescript(_TABLES)
            if application or not _schema(self._database) <= _schema(ours):
                raise InputError(
                    f"{self._path}: a database that is not of an evaluation; choose another folder"
                )

    def _check_files(self) -> None:
        query = "SELECT number, name, stamp FROM pictures WHERE error IS NULL ORDER BY number"
        for number, name, stamp in self._database.execute(query):
            if stamp != self._stamps.get(number, stamp):
                raise InputError(
                    f"{self._path.parent}: holds an evaluation of {name} before its picture or "
                    f"mask changed; {_WAYS_OUT}"
                )

    def _difference(self, known: Mapping[str, str], wanted: Mapping[str, str]) -> str:
        """What differs, with both values; a digest only where it alone does, as it depends on
        settings too."""
        before, now = _flat(known), _flat(wanted)
        changed = [name for name in {**now, **before} if before.get(name) != now.get(name)]
        told = ", ".join(
            f"{name} {_said(before.get(name))} (this one: {_said(now.get(name))})"
            for name in changed
            if name not in _DIGESTS
        )
        holds = f"with {told}" if told else f"of {_DIGESTS[changed[0]]}"
        return f"{self._path.parent}: holds an evaluation {holds}; {_WAYS_OUT}"

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            if self._database.in_transaction:  # of a full disk SQLite has rolled back by itself
                self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """SQLite's errors as ours, or as those of the disk."""
        try:
            yield
        except sqlite3.Error as error:
            folder = self._path.parent
            text = str(error)
            if "locked" in text:
                raise InputError(
                    f"{folder}: another evaluation is writing here; wait for it, or choose another "
                    "folder"
                ) from None
            if "not a database" in text or "malformed" in text:
                raise InputError(
                    f"{self._path}: damaged, or not of an evaluation; choose another folder, or "
                    "remove it"
                ) from None
            # Python 3.10 does not give SQLite's code, only its text.
            number = errno.ENOSPC if "disk is full" in text else errno.EIO
            raise OSError(number, text, str(self._path)) from None

    def close(self) -> None:
        self._database.close()

    def pictures_done(self) -> set[int]:
        """Numbers of the pictures that are finished; those that failed are to be tried again."""
        query = "SELECT number FROM pictures WHERE error IS NULL"
        with self._refusals():
            return {number for (number,) in self._database.execute(query)} & self._stamps.keys()

    def add_picture(
        self, number: int, name: str, facts: Mapping[str, Any], record: NDArray[np.float64]
    ) -> None:
        stamp = self._stamps[number]
        row = (number, _as_bytes(name), None, stamp, json.dumps(facts), _packed(record))
        with self._refusals(), self._transaction():
            failed = self._database.execute("DELETE FROM pictures WHERE number = ?", (number,))
            if failed.rowcount:  # in an earlier run; the levels that it finished are without it
                self._database.execute("DELETE FROM levels")
            self._database.execute(_ADD_PICTURE, row)

    def add_failure(self, number: int, name: str, error: str) -> None:
        row = (number, _as_bytes(name), _as_bytes(error), self._stamps[number], None, None)
        self._insert(_ADD_PICTURE, row)

    def pictures(self) -> Iterator[tuple[int, str, dict[str, Any], NDArray[np.float64]]]:
        """Number, name, facts and record of each finished picture, in order."""
        query = "SELECT number, name, facts, record FROM pictures WHERE error IS NULL ORDER BY 1"
        with self._refusals():
            for number, name, facts, record in self._database.execute(query):
                if number in self._stamps:
                    yield number, name, json.loads(facts), _unpacked(record)

    def failures(self) -> list[tuple[str, str]]:
        """Name and error of each picture that could not be evaluated."""
        query = "SELECT number, name, error FROM pictures WHERE error IS NOT NULL ORDER BY number"
        with self._refusals():
            rows = self._database.execute(query)
            return [(name, error) for number, name, error in rows if number in self._stamps]

    def add_level(self, number: int, record: NDArray[np.float64]) -> None:
        self._insert("INSERT INTO levels VALUES (?, ?)", (number, _packed(record)))

    def levels(self) -> dict[int, NDArray[np.float64]]:
        """The record of each finished level of the randomisation of weights."""
        with self._refusals():
            rows = self._database.execute("SELECT number, record FROM levels ORDER BY number")
            return {number: _unpacked(record) for number, record in rows}

    def _insert(self, statement: str, row: tuple[Any, ...]) -> None:
        with self._refusals(), self._transaction():
            self._database.execute(statement, row)


def _schema(database: sqlite3.Connection) -> set[tuple[str, str]]:
    """The tables and whatever else a database consists of, as SQL."""
    rows = database.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return set(rows)


def _packed(array: NDArray[np.float64]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _unpacked(blob: bytes) -> NDArray[np.float64]:
    return np.asarray(np.load(io.BytesIO(blob)))


def _as_bytes(text: str) -> bytes:
    """File names that are not UTF-8 have surrogates, which sqlite3 refuses in text."""
    return text.encode("utf-8", "surrogatepass")


def _flat(settings: Mapping[str, str]) -> dict[str, Any]:
    """The values of settings, and those of each mapping (versions) by their own names."""
    flat: dict[str, Any] = {}
    for name, text in settings.items():
        value = json.loads(text)
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)
