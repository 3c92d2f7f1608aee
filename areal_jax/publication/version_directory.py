"""Replaces a directory of weights atomically: it is there whole or not at all, after any death of the process.

The files channel writes each version with it, and `export` the final weights; formats/hf_export.py writes the files.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping

from areal_jax import files
from areal_jax.formats.hf_config import HfError
from areal_jax.formats.hf_directory import INDEX, WEIGHTS
from areal_jax.formats.hf_export import HfFiles, write_record
from areal_jax.formats.safetensors_file import SafetensorsError
from areal_jax.publication.versions import PublicationError

ANOTHER = 'name another publication.directory'


def write_hf_directory(
    target: pathlib.Path,
    contents: HfFiles,
    records: Mapping[str, Mapping[str, object]] | None = None,
    elsewhere: str = ANOTHER,
    announce: files.Announce = files.announce_nothing,
    links: Mapping[str, pathlib.Path] | None = None,
) -> None:
    """Writes planned files and JSON `records` by file name; an earlier directory of the same name is replaced.

    `elsewhere` says in errors what else to do on a full disk than to make room. `announce` hears of the bytes written.
    `links` has, by name, files on the same disk that hold what would be written; they are written where the file system
    has no hard links.

    Raises PublicationError for a directory in the way that holds no weights, for lack of space (naming needed and
    free bytes), for a failed write, and for values that the dtype of the files cannot hold.
    """
    partial = open_directory(target, contents.nbytes, elsewhere)
    done, total = 0, contents.nbytes

    def note(nbytes: int) -> None:
        nonlocal done
        announce(done, total)
        done += nbytes

    with writing(target, elsewhere):
        for name in contents.weights:
            if not (links and name in links and _link(links[name], partial / name)):
                contents.write_weights(partial, name, note=note)
        finish_directory(target, contents, records)


def _link(source: pathlib.Path, target: pathlib.Path) -> bool:
    """Whether `target` is a hard link to `source` now."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def open_directory(target: pathlib.Path, nbytes: int, elsewhere: str = ANOTHER) -> pathlib.Path:
    """An empty directory of a hidden name in which `target` can be written; raises PublicationError as above."""
    if target.exists() and not any((target / name).exists() for name in (WEIGHTS, INDEX)) and any(target.iterdir()):
        raise PublicationError(
            f'{target} exists and holds no {WEIGHTS}: it is not ours to replace; choose another name'
        )
    partial = files.partial_name(target)
    with writing(target, elsewhere):
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_free_space(target, nbytes, elsewhere)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    return partial


def finish_directory(
    target: pathlib.Path, contents: HfFiles, records: Mapping[str, Mapping[str, object]] | None = None
) -> None:
    """Writes all but the weights, which are there, and gives the directory its name. Use it inside `writing`."""
    partial = files.partial_name(target)
    for name, record in (records or {}).items():
        write_record(partial / name, record)
    contents.write_rest(partial)  # syncs the records too
    if target.exists():
        files.remove_directory(target)
    partial.rename(target)
    files.sync(target.parent)


@contextlib.contextmanager
def writing(target: pathlib.Path, elsewhere: str = ANOTHER, *, remove: bool = True) -> Iterator[None]:
    """Raises PublicationError where the block fails for a reason that the user can mend.

    `remove`: what was written of `target` is removed then.
    """
    try:
        yield
    except (OSError, PublicationError, HfError, SafetensorsError) as error:
        if remove:
            shutil.rmtree(files.partial_name(target), ignore_errors=True)
        if isinstance(error, PublicationError):
            raise
        if isinstance(error, OSError):
            raise PublicationError(
                f'writing {target} failed ({error}); the disk has {files.free_bytes(target.parent)} bytes free. '
                f'Make room or {elsewhere}'
            ) from error
        raise PublicationError(f'writing {target} failed: {error}') from error


def _require_free_space(target: pathlib.Path, needed: int, elsewhere: str) -> None:
    free = files.free_bytes(target.parent)
    if free < needed:
        raise PublicationError(
            f'writing {target} failed: {target.parent} has {free} bytes free, one version of the weights needs '
            f'{needed}: make room or {elsewhere}'
        )
