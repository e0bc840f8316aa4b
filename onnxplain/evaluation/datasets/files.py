"""Reading what the files of a dataset say, with errors that name the file."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from onnxplain.errors import InputError

__all__ = ["files_below", "read_text"]


def files_below(folder: Path, suffixes: Container[str]) -> list[Path]:
    """The files of these suffixes in a folder and the folders in it, but for hidden ones.

    Links to folders are followed, but for those that lead back to where they are.

    Args:
        folder: The folder.
        suffixes: Suffixes in small letters, with the dot.

    Returns:
        Paths relative to the folder, sorted.

    Raises:
        InputError: The folder, or one in it, cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: the folder cannot be read ({error.strerror})")

    found = []
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(place)
        folders[:] = [n for n in folders if not n.startswith(".") and not _leads_back(here / n)]
        below = here.relative_to(folder)
        for name in files:
            if not name.startswith(".") and Path(name).suffix.lower() in suffixes:
                found.append(below / name)
    return sorted(found)


def _leads_back(folder: Path) -> bool:
    return folder.is_symlink() and folder.resolve() in {above.resolve() for above in folder.parents}


def read_text(path: Path) -> str:
    """A text file in UTF-8, with or without byte order mark.

    Raises:
        InputError: It cannot be read, or is something else.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{path}, line {line}: not text in UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
