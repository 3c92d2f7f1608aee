"""The shared-memory file through which a process hands weights to others on its host: its bytes, locks and lifetime.

    control     magic, owner, state; a row for each place; a row for each reader
    place 0..   room for one chain (stream_sender.py): records one after the other, as shm_carrier.py writes them

Numbers have 64 bits in the byte order of the machine, and each is written in one store. docs/design/carriers.md has
the table of all fields. shm_carrier.py has the sender and the receiver.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys

from areal_jax.publication.carriers import open_file_locks
from areal_jax.publication.carriers.open_file_locks import are_supported, find_locked, try_lock, unlock
from areal_jax.publication.versions import PublicationError
from areal_jax.workers.descendants import MARK

DIRECTORY = pathlib.Path('/dev/shm')
MOST_PLACES, MOST_READERS = 8, 512
CONTROL_BYTES = 1 << 18
_MAGIC = int.from_bytes(b'ajxshm01', 'little')
_PREFIX, _SUFFIX = 'areal_jax-', '.weights'
_RUN_DIGITS = 12
_MODE = 0o600  # weights are read by processes of one user

# words of the control, counted in 8 bytes
_MAGIC_AT, _OWNER_PID, _STATE, _PLACE_BYTES, _N_PLACES, _NEWEST = range(6)
_PLACES_AT, _PLACE_WORDS = 64, 8  # of a place: sequence, number of records
_READERS_AT = 4096  # in bytes; shm_carrier.py says what a row holds
READER_BYTES = 256
_OPEN, _CLOSED = 1, 2

# bytes that processes lock, far past the end of the file
_LOCKS = 1 << 40
_OWNER_LOCK, _READER_LOCKS, _HOLD_LOCKS = _LOCKS, _LOCKS + (1 << 10), _LOCKS + (1 << 20)


def name_run(workdir: pathlib.Path) -> str:
    """Returns the name of a run for `segment_path`: a part of the digest of the path of its workdir."""
    return hashlib.sha256(os.fsencode(workdir.absolute())).hexdigest()[:_RUN_DIGITS]


def segment_path(run: str, incarnation: str, directory: pathlib.Path = DIRECTORY) -> pathlib.Path:
    """The path of the segment of one start of a run; characters that a name may not have become '_'."""
    safe = re.sub(r'[^A-Za-z0-9_.]', '_', f'{run}.{incarnation}')
    return directory / f'{_PREFIX}{safe}{_SUFFIX}'


class Segment:
    """One process's opening of the file. `create_segment` and `open_segment` make it."""

    def __init__(self, path: pathlib.Path, descriptor: int, *, writes: bool):
        self.path, self.descriptor, self._writes = path, descriptor, writes
        self._control = mmap.mmap(descriptor, CONTROL_BYTES)
        self._bytes = memoryview(self._control)
        self._words = self._bytes.cast('Q')
        self._places: dict[int, mmap.mmap] = {}

    @property
    def owner_pid(self) -> int:
        return int(self._words[_OWNER_PID])

    @property
    def place_bytes(self) -> int:
        return int(self._words[_PLACE_BYTES])

    @property
    def n_places(self) -> int:
        return int(self._words[_N_PLACES])

    @property
    def newest(self) -> int:
        """The place with the chain of the newest version."""
        return int(self._words[_NEWEST])

    @newest.setter
    def newest(self, place: int) -> None:
        self._words[_NEWEST] = place

    @property
    def is_closed(self) -> bool:
        return bool(self._words[_STATE] == _CLOSED)

    def begin(self) -> None:
        """Writes the control of a new segment, the magic last."""
        self._words[_OWNER_PID], self._words[_STATE] = os.getpid(), _OPEN
        self._words[_MAGIC_AT] = _MAGIC

    def is_valid(self) -> bool:
        return bool(self._words[_MAGIC_AT] == _MAGIC)

    def require_places(self) -> None:
        """Raises PublicationError if the control describes more places than the file holds; for readers."""
        size = os.fstat(self.descriptor).st_size
        if self.n_places > MOST_PLACES or CONTROL_BYTES + self.n_places * self.place_bytes > size:
            raise PublicationError(
                f'{self.path} is damaged: it has {size} bytes, and its control tells of {self.n_places} places of '
                f'{self.place_bytes}: start the run again'
            )

    def sequence(self, place: int) -> int:
        """The sequence number of a place: odd while the writer replaces its chain, a new even number for each chain."""
        return int(self._words[self._row(place)])

    def set_sequence(self, place: int, value: int) -> None:
        self._words[self._row(place)] = value

    def n_records(self, place: int) -> int:
        return int(self._words[self._row(place) + 1])

    def set_n_records(self, place: int, value: int) -> None:
        self._words[self._row(place) + 1] = value

    def reader_row(self, reader: int) -> memoryview:
        start = _READERS_AT + reader * READER_BYTES
        return self._bytes[start : start + READER_BYTES]

    def map_place(self, place: int) -> mmap.mmap:
        """Maps the bytes of a place, with all pages in this process's page table; readers cannot write there."""
        if place not in self._places:
            access = mmap.PROT_READ | (mmap.PROT_WRITE if self._writes else 0)
            self._places[place] = mmap.mmap(
                self.descriptor,
                self.place_bytes,
                flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                prot=access,
                offset=CONTROL_BYTES + place * self.place_bytes,
            )
        return self._places[place]

    def allocate(self, place_bytes: int, n_places: int) -> None:
        """Reserves memory for places; raises PublicationError, with both sizes, if the file system has less.

        Without the reservation, the first store to a page that cannot be had would end the process with SIGBUS.
        """
        old = self.n_places * self.place_bytes
        size = n_places * place_bytes
        try:
            os.posix_fallocate(self.descriptor, CONTROL_BYTES + old, size - old)
        except OSError as error:
            os.ftruncate(self.descriptor, CONTROL_BYTES + old)  # gives back the pages reserved before the failure
            raise _no_room(self.path, size - old, error) from error
        self._words[_PLACE_BYTES], self._words[_N_PLACES] = place_bytes, n_places

    def claim_reader(self) -> int:
        """Locks the lowest free row of readers, until `close` or the death of this process, and returns it."""
        for reader in range(MOST_READERS):
            if try_lock(self.descriptor, _READER_LOCKS + reader):
                return reader
        raise PublicationError(
            f"{self.path} has {MOST_READERS} readers, which is the most: use publication.channel='files' for more "
            'engines on one host'
        )

    def living_readers(self) -> list[int]:
        return [at - _READER_LOCKS for at in find_locked(self.descriptor, _READER_LOCKS, MOST_READERS)]

    def hold(self, place: int, reader: int) -> bool:
        """Asks the writer not to replace the chain of a place until `let_go`; False if another opening has the lock."""
        return try_lock(self.descriptor, _hold_lock(place, reader))

    def let_go(self, place: int, reader: int) -> None:
        unlock(self.descriptor, _hold_lock(place, reader))

    def holders(self, place: int) -> list[int]:
        first = _hold_lock(place, 0)
        return [at - first for at in find_locked(self.descriptor, first, MOST_READERS)]

    def has_owner(self) -> bool:
        """Whether the process that made the segment is alive; for readers."""
        return bool(find_locked(self.descriptor, _OWNER_LOCK, 1))

    def end(self) -> None:
        """Tells readers that no more versions come, and unlinks the file; places they have mapped stay readable."""
        self._words[_STATE] = _CLOSED
        with contextlib.suppress(OSError):  # another process has removed it
            if os.path.samestat(os.fstat(self.descriptor), os.stat(self.path)):
                self.path.unlink()

    def close(self) -> None:
        """Releases the locks of this opening, and its maps if nothing refers to them any more. Call it once."""
        self._words.release()
        self._bytes.release()
        for mapped in (self._control, *self._places.values()):
            with contextlib.suppress(BufferError):  # the caller's array still uses the map: it is freed with the array
                mapped.close()
        self._places.clear()
        os.close(self.descriptor)

    def _row(self, place: int) -> int:
        return _PLACES_AT + place * _PLACE_WORDS


def create_segment(path: pathlib.Path) -> Segment:
    """Makes a new segment without places, owned by this process.

    Raises PublicationError if a living process owns a segment of that name, or if the directory cannot hold it.
    """
    _require_linux()
    while True:
        descriptor = _create(path)
        # a sweep may have met the file between its creation and this lock, and have removed it
        if try_lock(descriptor, _OWNER_LOCK) and _is_at(path, descriptor):
            break
        os.close(descriptor)
    try:
        os.posix_fallocate(descriptor, 0, CONTROL_BYTES)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise _no_room(path, CONTROL_BYTES, error) from error
    segment = Segment(path, descriptor, writes=True)
    segment.begin()
    return segment


def remove_with_owner(path: pathlib.Path) -> None:
    """Has the segment removed when its owner ends, however it ends, even by SIGKILL to the whole process group.

    A small watcher process waits for that end. If both die together, as at the end of a container, the file is left
    to `sweep`. Raises PublicationError if the watcher cannot be started.
    """
    program = [sys.executable, '-I', '-S', open_file_locks.__file__, str(path), str(_OWNER_LOCK)]
    # without the mark of a worker: whatever kills the workers of a run must not kill the watcher
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    nothing = subprocess.DEVNULL
    done = subprocess.run(program, env=environment, stdin=nothing, stdout=nothing, stderr=nothing, cwd='/', check=False)
    if done.returncode:
        raise PublicationError(f"{path} can not be watched: use publication.channel='stream'")


def open_segment(path: pathlib.Path) -> Segment:
    """Opens a segment that another process made; raises PublicationError if there is no valid one."""
    _require_linux()
    fix = "let the learner run on this host, or use publication.channel='stream'"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise PublicationError(f'{path} can not be opened ({error.strerror}): {fix}') from error
    if os.fstat(descriptor).st_size < CONTROL_BYTES:
        os.close(descriptor)
        raise PublicationError(f'{path} is no segment of weights, or its writer died while it made it: {fix}')
    segment = Segment(path, descriptor, writes=False)
    if not segment.is_valid():
        segment.close()
        raise PublicationError(f'{path} is no segment of weights of this version of areal_jax: {fix}')
    return segment


def sweep(directory: pathlib.Path = DIRECTORY) -> list[pathlib.Path]:
    """Removes the segments of dead processes of this user, of any run; returns their paths."""
    return [path for path in sorted(directory.glob(f'{_PREFIX}*{_SUFFIX}')) if _remove_if_dead(path)]


def _require_linux() -> None:
    if not are_supported():
        raise PublicationError("publication.channel='shm' needs Linux: use publication.channel='stream'")


def _remove_if_dead(path: pathlib.Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # the file is gone, or belongs to another user
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        if not try_lock(descriptor, _OWNER_LOCK) or not _is_at(path, descriptor):
            return False
        path.unlink()
        return True
    finally:
        os.close(descriptor)


def _create(path: pathlib.Path) -> int:
    for _ in range(2):
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
        except FileExistsError:
            _remove_if_dead(path)
        except OSError as error:
            raise PublicationError(
                f"{path} can not be made ({error.strerror}): use publication.channel='stream' or 'files'"
            ) from error
    raise PublicationError(
        f'{path} is in use by another process that sends weights: stop it, or start this run in a workdir of its own'
    )


def _is_at(path: pathlib.Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _no_room(path: pathlib.Path, needed: int, error: OSError) -> PublicationError:
    free = shutil.disk_usage(path.parent).free
    raised = 'raise the limit of file sizes (ulimit -f)' if error.errno == errno.EFBIG else f'enlarge {path.parent}'
    return PublicationError(
        f'{path.parent} has {free} bytes free, and the weights need {needed} more there ({error.strerror}): {raised} '
        "(docker: --shm-size), or use publication.channel='stream'"
    )


def _hold_lock(place: int, reader: int) -> int:
    return _HOLD_LOCKS + place * MOST_READERS + reader
