"""Whether a directory can hold the registry and the checkpoints of a run: tried out, before anything depends on it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import secrets
from collections.abc import Callable, Iterator

from areal_jax.errors import UserError
from areal_jax.registry.entries import REGISTRY

_FIX = 'use a --workdir on a file system that all hosts share, NFS or Lustre for instance'
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EXDEV, errno.ENOLCK, errno.EINVAL}


def require_usable(workdir: pathlib.Path) -> None:
    """Writes, renames, lists, reads, touches and locks files of the registry; leaves none behind.

    Raises UserError that names the directory and what does not work there.
    """
    directory = workdir / REGISTRY
    with _doing('making it', directory):
        directory.mkdir(parents=True, exist_ok=True)
    name = f'.test_{secrets.token_hex(8)}'
    first, second = directory / name, directory / f'{name}.renamed'
    try:
        _try_files(directory, first, second)
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _try_files(directory: pathlib.Path, first: pathlib.Path, second: pathlib.Path) -> None:
    with _doing('writing a file', directory):
        second.write_text('replaced')
        with first.open('w') as file:
            file.write(first.name)
            file.flush()
            os.fsync(file.fileno())
    with _doing('renaming a file over another', directory):
        first.rename(second)
    _require(lambda: not first.exists() and second.name in os.listdir(directory), 'listing what was renamed', directory)
    _require(lambda: second.read_text() == first.name, 'reading what was written', directory)
    with _doing('setting the time of a file', directory):
        os.utime(second, ns=(10**18, 10**18))
    _require(lambda: second.stat().st_mtime_ns // 10**9 == 10**9, 'reading the time of a file', directory)
    with _doing('locking a file', directory), second.open('r+') as file, second.open('r+') as other:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise UserError(f'{directory} gives one lock to two holders: {_FIX}')


@contextlib.contextmanager
def _doing(action: str, directory: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _UNSUPPORTED or isinstance(error, PermissionError | FileExistsError | NotADirectoryError):
            raise UserError(f'{directory}: {action} does not work there ({error.strerror}): {_FIX}') from error
        raise


def _require(holds: Callable[[], bool], action: str, directory: pathlib.Path) -> None:
    with _doing(action, directory):
        if not holds():
            raise UserError(f'{directory}: {action} does not give what was put there: {_FIX}')
