"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from onnxplain.errors import InputError

__all__ = ["write_whole"]


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes beside the file's place and renames into it, so that no half of one is left.

    Args:
        path: The place; its folder is made if need be.
        write: Writes into the open file.

    Raises:
        OSError: With the path: it cannot be written, or the disk is full.
        InputError: The format cannot hold what is to be written, such as a picture of that size.
    """
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "xb") as file:
            write(file)
        os.replace(beside, path)
    except OSError as error:  # a full disk tells no name, the rest that of the file beside
        if error.strerror is None:
            raise InputError(f"{path}: cannot be written ({error}); try .png") from None
        raise OSError(error.errno, error.strerror, str(path)) from None
    except ValueError as error:
        raise InputError(f"{path}: cannot be written ({error}); try .png") from None
    finally:
        beside.unlink(missing_ok=True)
