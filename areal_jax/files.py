"""Atomic writes of files, JSON from files that may be damaged, the lock of a workdir, and the refusal of URLs."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pathlib
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable
from typing import IO, Any, TypeAlias

from areal_jax.errors import UserError

LOCK = '.lock'
JsonObject = dict[str, Any]  # a JSON object, as json.loads returns it
_NEWLINE = b'\n'
MOST_BYTES = 256 << 20  # of a JSON file: larger than any that a run writes or a checkpoint has
_PART_BYTES = 1 << 20
READ_S = 60.0  # time limit for one file
_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.05
_URL = re.compile(r'(?:^|[=,(])\s*([a-z][a-z0-9+.-]+)://', re.IGNORECASE)  # also within log(RUN), FIELD=PATH and A,B
_INSTEAD = {
    'hf': 'download it first (hf download OWNER/NAME --local-dir DIR) and name the directory',
    'http': 'download it first and name the file',
    'https': 'download it first and name the file',
    'file': 'write the path alone, without file://',
}
_STORE = re.compile('(gs|s3|memory)://.+')
_PACKAGES = {'s3': 's3fs', 'gs': 'gcsfs'}  # by scheme
_MOUNT = (
    'mount the bucket (gcsfuse, mountpoint-s3 or the driver of the cluster) and name the mount; run.mirror copies '
    'a run to a bucket'
)


class FileError(UserError, ValueError):
    """A file that is missing, cut short, edited or of another program; the message names file, line and fix."""


Announce: TypeAlias = Callable[[int, int], None]  # called with (bytes read or written, bytes in all)


def announce_nothing(done: int, total: int) -> None:
    """Ignores progress."""


def describe_url(path: str) -> str:
    """'is a URL, ...' with the fix, for a path with a scheme (gs://bucket/run); '' for any other path.

    All commands and fields that take paths use this check: the standard library would make a directory 'gs:'.
    """
    found = _URL.search(path)
    if found is None:
        return ''
    fix = _INSTEAD.get(found[1].lower(), _MOUNT)
    return f'is a URL, and a run needs a directory or file of a file system: {fix}'


def is_address(path: str) -> bool:
    """Tells whether a path is an address of an object store that checkpoint/mirror.py reads."""
    return _STORE.fullmatch(path) is not None


def find_package(address: str) -> str:
    """Returns the package that reads an address: 's3fs', 'gcsfs'; '' if none is needed, and for a path."""
    found = _STORE.fullmatch(address)
    return _PACKAGES.get(found[1], '') if found else ''


def require_local(name: str, path: str) -> None:
    """Raises FileError for a URL; `name` is the flag or field that holds it: '--workdir'."""
    if reason := describe_url(path):
        raise FileError(f'{name}={path} {reason}')


def read_json(path: pathlib.Path, fix: str = 'restore it or remove it', most_bytes: int = MOST_BYTES) -> JsonObject:
    """Reads the JSON object in a file; raises FileError, which ends with `fix`, for anything else."""
    return parse_object(read_regular(path, fix, most_bytes), str(path), fix)


def read_regular(path: pathlib.Path, fix: str = 'restore it or remove it', most_bytes: int = MOST_BYTES) -> bytes:
    """Reads a regular file; never waits for a writer, as opening a pipe would, and never reads without end.

    Raises FileError, which ends with `fix`, for a path that cannot be read, is not a file, is larger than `most_bytes`,
    or takes too long to read. A file system that does not answer at all still blocks: the kernel does not release the
    reader.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FileError(f'{path} cannot be read ({error.strerror}); {fix}') from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f'{path} cannot be read (it is no regular file); {fix}')
    with open(descriptor, 'rb', buffering=0) as file:
        try:
            return _read_bounded(file, path, fix, most_bytes)
        except OSError as error:
            raise FileError(f'{path} cannot be read ({error.strerror}); {fix}') from error


def _read_bounded(file: io.FileIO, path: pathlib.Path, fix: str, most_bytes: int) -> bytes:
    """Reads within the bounds even if the file grows meanwhile or reports no size."""
    content, end_s = bytearray(), time.monotonic() + READ_S
    while part := file.read(_PART_BYTES):
        content += part
        if len(content) > most_bytes:
            raise FileError(f'{path} has more than {most_bytes} bytes; {fix}')
        if time.monotonic() > end_s:
            raise FileError(f'{path} was not read within {READ_S:g} s; {fix}')
    return bytes(content)


def decode_json(content: str | bytes) -> object:
    """Decodes a JSON value from text or UTF-8; raises ValueError for anything else, including too deep nesting."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError('it is nested too deep') from error


def parse_object(content: bytes, where: str, fix: str) -> JsonObject:
    """Parses a JSON object; raises FileError, which begins with `where` and ends with `fix`."""
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise FileError(f'{where} is no JSON: {_line(content, error.start)}it is not UTF-8; {fix}') from error
    except json.JSONDecodeError as error:
        start = len(error.doc[: error.pos].encode())
        raise FileError(f'{where} is no JSON: {_line(content, start)}{error.msg}; {fix}') from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; thousands of nested brackets
        raise FileError(f'{where} is no JSON that can be read ({type(error).__name__}: {error}); {fix}') from error
    if not isinstance(value, dict):
        raise FileError(f'{where} holds a {type(value).__name__}, not an object; {fix}')
    return value


def _line(content: bytes, position: int) -> str:
    """'line 3: ', or '' if there is only one line."""
    return f'line {content.count(_NEWLINE, 0, position) + 1}: ' if _NEWLINE in content.rstrip() else ''


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces the file atomically: after a crash of process or machine it holds the old text or all of the new."""
    write_bytes(path, text.encode())


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Replaces the file with bytes, atomically as `write_text` does."""
    write_parts(path, [content])


def write_parts(path: pathlib.Path, parts: Iterable[bytes | memoryview], *, synced: bool = True) -> None:
    """Replaces the file with the joined parts, atomically. Not `synced`: survives a crash of the process only."""
    replacement = path.with_name(f'.{path.name}.partial')
    try:
        with replacement.open('wb') as file:
            for part in parts:
                file.write(part)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        replacement.replace(path)
    except OSError as error:
        replacement.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise
    if synced:
        sync(path.parent)


def write_json(path: pathlib.Path, value: object, *, indent: int | None = 1, allow_nan: bool = False) -> None:
    """Replaces the file with a JSON value, atomically; raises ValueError for NaN and infinity unless `allow_nan`.

    `allow_nan` writes them in Python's spelling.
    """
    write_text(path, json.dumps(value, indent=indent, allow_nan=allow_nan) + '\n')


class LineWriter:
    """Appends lines to a file, each handed to the system at once, so that they survive the death of the process.

    After a failed write, every further write raises the same OSError, which names the file: the failed line may be
    written in part, and the next line would be appended to it.
    """

    def __init__(self, path: pathlib.Path):
        self._path, self._file = path, path.open('ab', buffering=0)
        self._error: OSError | None = None

    def write(self, line: str) -> None:
        """Appends the line and a line break."""
        if self._error is not None:
            raise self._error
        content = f'{line}\n'.encode()
        try:
            while content:
                content = content[self._file.write(content) :]
        except OSError as error:
            error.filename = error.filename or str(self._path)
            self._error = error
            raise

    def sync(self) -> None:
        """Returns when all written lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def sync(path: pathlib.Path) -> None:
    """Returns when the file, or the names in the directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: pathlib.Path) -> None:
    """Returns when all files and names below the directory are on the disk."""
    for path in (*directory.rglob('*'), directory):
        sync(path)


def partial_name(path: pathlib.Path) -> pathlib.Path:
    """The hidden sibling of `path` in which it is written before it is renamed."""
    return path.with_name(f'.{path.name}.partial')


def remove_directory(path: pathlib.Path) -> None:
    """Removes a directory; if the process dies meanwhile, the rest has a hidden name that ends in '.partial'."""
    hidden = partial_name(path.with_name(f'{path.name}.removed'))
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def free_bytes(directory: pathlib.Path) -> int:
    """The free bytes of the disk that holds the directory, which need not exist yet."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


class DirectoryLock:
    """Keeps other processes, also on other hosts if the file system can, from using a directory; makes the directory.

    The kernel releases the lock when this process dies in any way. A file system without locks keeps no process out;
    then a warning goes to stderr once.

    Raises UserError, naming host and process, if the directory is in use.
    """

    def __init__(self, directory: pathlib.Path):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f'{directory} is a file: choose another directory') from None
        self._file: IO[str] = (directory / LOCK).open('a+', encoding='utf-8')
        try:
            _lock(self._file)
        except BlockingIOError:
            holder = _read_holder(self._file)
            self._file.close()
            raise UserError(
                f'{directory} is in use by {holder}: wait for it to end, stop it, or give another --workdir'
            ) from None
        except OSError as error:
            print(
                f'warning: the file system of {directory} has no locks ({error.strerror}): nothing keeps a second run '
                'from using it at the same time',
                file=sys.stderr,
                flush=True,
            )
        self._file.truncate(0)
        self._file.write(json.dumps({'host': socket.gethostname(), 'pid': os.getpid()}) + '\n')
        self._file.flush()

    def release(self) -> None:
        """Releases the lock; a second call does nothing."""
        self._file.close()


def _lock(file: IO[str]) -> None:
    """Takes the lock; raises BlockingIOError if another process keeps it. `find_holder` has it only for an instant."""
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_PAUSE_S)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def find_holder(directory: pathlib.Path) -> str | None:
    """'process 12 on host' if a run uses the directory now; None if no run does; '' if that is unknown."""
    try:
        with (directory / LOCK).open(encoding='utf-8') as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read_holder(file)
    except FileNotFoundError:
        return None
    except OSError:  # a file system without locks
        return ''
    return None


def _read_holder(file: IO[str]) -> str:
    try:
        file.seek(0)
        holder = json.loads(file.read())
        return f'process {holder["pid"]} on {holder["host"]}'
    except (OSError, ValueError, KeyError, TypeError):  # it was just locked and not written yet
        return 'another process'
