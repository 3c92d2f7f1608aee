"""Files that are whole or absent, and a lock on a directory: whoever writes to a disk uses these."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces the file: after any death of the process or the machine it holds the old text or all of the new."""
    write_bytes(path, text.encode())


def write_bytes(path: pathlib.Path, data: bytes) -> None:
    """The same for bytes."""
    replacement = path.with_name(f'.{path.name}.partial')
    try:
        with replacement.open('wb') as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(path)
    except OSError as error:
        replacement.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    sync(path.parent)


def write_json(path: pathlib.Path, value: Any, *, indent: int | None = 1, allow_nan: bool = False) -> None:
    """The same for a JSON value; raises ValueError for NaN and infinity unless `allow_nan` (Python's spelling)."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=allow_nan) + '\n')


def sync(path: pathlib.Path) -> None:
    """The file, or the names in the directory, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: pathlib.Path) -> None:
    """All files and names below are on the disk when this returns."""
    for path in (*directory.rglob('*'), directory):
        sync(path)
