"""Files that are complete or absent, JSON from files that may be damaged, the lock of a workdir, and URLs for paths."""

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
JsonObject = dict[str, Any]  # a JSON object, as json.loads gives it
_NEWLINE = b'\n'
MOST_BYTES = 256 << 20  # of a JSON file: more than any that a run writes or a checkpoint has
_PART_BYTES = 1 << 20
READ_S = 60.0  # for one file
_LOCK_TRIES, _LOCK_PAUSE_S = 4, 0.05
_URL = re.compile(r'(?:^|[=,(])\s*([a-z][a-z0-9+.-]+)://', re.IGNORECASE)  # also inside of log(RUN), FIELD=PATH and A,B
_INSTEAD = {
    'hf': 'download it first (hf download OWNER/NAME --local-dir DIR) and name the directory',
    'http': 'download it first and name the file',
    'https': 'download it first and name the file',
    'file': 'write the path alone, without file://',
}
_MOUNT = 'mount the bucket (gcsfuse, mountpoint-s3 or the driver of the cluster) and name the mount'


class FileError(UserError, ValueError):
    """A file that is missing, cut short, edited or of another program; the message names file, line and fix."""


Announce: TypeAlias = Callable[[int, int], None]  # hears how many bytes of how many are read or written


def announce_nothing(done: int, total: int) -> None:
    """For who shows no progress."""


def describe_url(path: str) -> str:
    """'is a URL, ...' with the fix, for what names a place with a scheme (gs://bucket/run); '' for any other path.

    The one check of all commands and fields that take paths: the standard library would make a directory 'gs:' of it.
    """
    found = _URL.search(path)
    if found is None:
        return ''
    fix = _INSTEAD.get(found[1].lower(), _MOUNT)
    return f'is a URL, and a run needs a directory or file of a file system: {fix}'


def require_local(name: str, path: str) -> None:
    """Raises FileError for a URL; `name` is the flag or field that holds it: '--workdir'."""
    if reason := describe_url(path):
        raise FileError(f'{name}={path} {reason}')


def read_json(path: pathlib.Path, fix: str = 'restore it or remove it', most_bytes: int = MOST_BYTES) -> JsonObject:
    """The JSON object in a file; raises FileError, which ends with `fix`, for anything else."""
    return parse_object(read_regular(path, fix, most_bytes), str(path), fix)


def read_regular(path: pathlib.Path, fix: str = 'restore it or remove it', most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a regular file; never waits for a writer, as opening a pipe would, and never reads without end.

    Raises FileError, which ends with `fix`, for a path that cannot be read, is not a file, is larger than `most_bytes`,
    or takes too long to read. A file system that does not answer at all still blocks: the kernel lets no reader go.
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
    """Also of a file that grows while it is read, or that has no size of its own."""
    content, end_s = bytearray(), time.monotonic() + READ_S
    while part := file.read(_PART_BYTES):
        content += part
        if len(content) > most_bytes:
            raise FileError(f'{path} has more than {most_bytes} bytes; {fix}')
        if time.monotonic() > end_s:
            raise FileError(f'{path} was not read within {READ_S:g} s; {fix}')
    return bytes(content)


def decode_json(content: str | bytes) -> object:
    """The JSON value of a text or of UTF-8; raises ValueError for anything else, also for nesting without end."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError('it is nested too deep') from error


def parse_object(content: bytes, where: str, fix: str) -> JsonObject:
    """The JSON object in some bytes; raises FileError, which begins with `where` and ends with `fix`."""
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise FileError(f'{where} is no JSON: {_line(content, error.start)}it is not UTF-8; {fix}') from error
    except json.JSONDecodeError as error:
        start = len(error.doc[: error.pos].encode())
        raise FileError(f'{where} is no JSON: {_line(content, start)}{error.msg}; {fix}') from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets of thousands of levels
        raise FileError(f'{where} is no JSON that can be read ({type(error).__name__}: {error}); {fix}') from error
    if not isinstance(value, dict):
        raise FileError(f'{where} holds a {type(value).__name__}, not an object; {fix}')
    return value


def _line(content: bytes, position: int) -> str:
    """'line 3: ', or '' where there is one line only."""
    return f'line {content.count(_NEWLINE, 0, position) + 1}: ' if _NEWLINE in content.rstrip() else ''


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces the file: after any death of the process or the machine it holds the old text or all of the new."""
    write_bytes(path, text.encode())


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """The same for bytes."""
    write_parts(path, [content])


def write_parts(path: pathlib.Path, parts: Iterable[bytes | memoryview], *, synced: bool = True) -> None:
    """The same for parts of a file; not `synced`: it may be lost when the machine dies, not when the process does."""
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
    """The same for a JSON value; raises ValueError for NaN and infinity unless `allow_nan` (Python's spelling)."""
    write_text(path, json.dumps(value, indent=indent, allow_nan=allow_nan) + '\n')


class LineWriter:
    """Appends lines to a file, each handed to the system at once, so that they survive the death of the process.

    After a failed write, every further one raises the same OSError, which names the file: the failed line may be
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
        """What was written is on the disk when this returns."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


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


def partial_name(path: pathlib.Path) -> pathlib.Path:
    """Where a directory is written before it is renamed to `path`: a hidden name beside it."""
    return path.with_name(f'.{path.name}.partial')


def remove_directory(path: pathlib.Path) -> None:
    """Removes a directory; if the process dies on the way, what is left has a hidden name that ends in '.partial'."""
    hidden = partial_name(path.with_name(f'{path.name}.removed'))
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden)


def free_bytes(directory: pathlib.Path) -> int:
    """Of the disk that holds the directory, which need not exist yet."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free


class DirectoryLock:
    """Keeps other processes, also of other hosts where the file system can, from using a directory; made if missing.

    The kernel releases it when this process dies, however it dies. On a file system without locks, stderr says so once;
    nothing keeps others out then.

    Raises UserError, naming host and process, where the directory is in use.
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
        """Lets others in; nothing the second time."""
        self._file.close()


def _lock(file: IO[str]) -> None:
    """Raises BlockingIOError where another process keeps the lock; `find_holder` has it for an instant only."""
    for _ in range(_LOCK_TRIES - 1):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_LOCK_PAUSE_S)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def find_holder(directory: pathlib.Path) -> str | None:
    """'process 12 on host' where a run uses the directory now, None where none does; '' where that cannot be told."""
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
    except (OSError, ValueError, KeyError, TypeError):  # it has just been locked and not been written yet
        return 'another process'
