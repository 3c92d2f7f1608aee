"""Replaces a directory of weights atomically: it is there whole or not at all, after any death of the process.

The files channel writes each version with it, and `export` the final weights; formats/hf_export.py writes the files.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping

from areal_jax import files
from areal_jax.formats.hf_config import HfError
from areal_jax.formats.hf_directory import INDEX, WEIGHTS
from areal_jax.formats.hf_export import HfFiles, write_record
from areal_jax.formats.safetensors_file import SafetensorsError
from areal_jax.publication.errors import PublicationError


def write_hf_directory(
    target: pathlib.Path,
    contents: HfFiles,
    records: Mapping[str, Mapping[str, object]] | None = None,
    elsewhere: str = 'name another publication.directory',
) -> None:
    """Writes planned files and JSON `records` by file name; an earlier directory of the same name is replaced.

    `elsewhere` says in errors what else to do on a full disk than to make room.

    Raises PublicationError for a directory in the way that holds no weights, for lack of space (naming needed and
    free bytes), for a failed write, and for values that the dtype of the files cannot hold.
    """
    if target.exists() and not any((target / name).exists() for name in (WEIGHTS, INDEX)) and any(target.iterdir()):
        raise PublicationError(
            f'{target} exists and holds no {WEIGHTS}: it is not ours to replace; choose another name'
        )
    partial = files.partial_name(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_free_space(target.parent, contents.nbytes, elsewhere)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name, record in (records or {}).items():
            write_record(partial / name, record)
        contents.write(partial)  # syncs the records too
        if target.exists():
            files.remove_directory(target)
        partial.rename(target)
        files.sync(target.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise PublicationError(
            f'writing {target} failed ({error}); the disk has {files.free_bytes(target.parent)} bytes free. '
            f'Make room or {elsewhere}'
        ) from error
    except (PublicationError, HfError, SafetensorsError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise PublicationError(f'writing {target} failed: {error}') from error


def _require_free_space(directory: pathlib.Path, needed: int, elsewhere: str) -> None:
    free = files.free_bytes(directory)
    if free < needed:
        raise PublicationError(
            f'{directory} has {free} bytes free, one version of the weights needs {needed}: make room or {elsewhere}'
        )
