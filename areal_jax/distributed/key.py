"""The key of a run, by which its processes know each other: WORKDIR/registry/key, readable by its owner alone."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import stat
import time

from areal_jax import files
from areal_jax.errors import UserError

_MODE = 0o600
_KEY_BYTES = 32
BEING_WRITTEN_S = 5.0  # how long a file that is too short may belong to somebody who is writing it


class KeyFileError(UserError):
    """A key file that other users could read, or an invalid one; the message names the file and the fix."""


def key_path(workdir: pathlib.Path) -> pathlib.Path:
    return workdir.absolute() / 'registry' / 'key'


def load_key(path: pathlib.Path) -> bytes:
    """The key of the run; the first process makes it.

    Raises KeyFileError for a file of another owner, of another mode than 600, or with other content.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # another process was first
            _make(path)
    return _read(path)


def _make(path: pathlib.Path) -> None:
    """Puts a key at the path, whole or not at all; raises FileExistsError where there is one."""
    content = f'{secrets.token_hex(_KEY_BYTES)}\n'.encode()
    partial = path.with_name(f'.{path.name}.{secrets.token_hex(8)}.partial')
    _write_new(partial, content)
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without links; a key that is too short is never read
        _write_new(path, content)
    finally:
        partial.unlink()
    files.sync(path.parent)


def _write_new(path: pathlib.Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
    with os.fdopen(descriptor, 'wb') as file:
        os.fchmod(descriptor, _MODE)  # whatever the umask is
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _read(path: pathlib.Path) -> bytes:
    end = time.monotonic() + BEING_WRITTEN_S
    while True:
        content = _read_private(path)
        if len(content) > 2 * _KEY_BYTES or time.monotonic() > end:
            break
        time.sleep(0.05)
    try:
        key = bytes.fromhex(content.decode())
    except ValueError:
        key = b''
    if len(key) != _KEY_BYTES:
        raise KeyFileError(f'{path} holds no key of {_KEY_BYTES} bytes: remove it and start all roles of the run again')
    return key


def _read_private(path: pathlib.Path) -> bytes:
    with path.open('rb') as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise KeyFileError(
                f'{path} belongs to user {status.st_uid}, and this process to user {os.geteuid()}: start all roles of '
                'a run as one user'
            )
        if (mode := stat.S_IMODE(status.st_mode)) != _MODE:
            raise KeyFileError(
                f'{path} has mode {mode:o}, so that others may know the key: remove it, or chmod {_MODE:o} if nobody '
                'else can have read it'
            )
        return file.read()
