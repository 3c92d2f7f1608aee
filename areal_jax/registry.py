"""The entries of a run's registry: each describes a process, and the newest holder of a name counts.

    WORKDIR/registry/engine-3.000002.5f0c1b9a.json    name, incarnation, token

Each start writes a separate file with a unique name, so no process replaces another's file and no lock is needed. The
incarnation is one more than the highest existing one; two processes that start at the same time may get the same
incarnation, and then the larger token wins. The highest (incarnation, token) of a name is its holder: every reader
finds the same holder, and the order never goes back. A holder removes the files of earlier holders, which thereby
learn that they have lost the name. The file's modification time is the heartbeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import pathlib
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from areal_jax import files
from areal_jax.errors import LostPeerError, UserError

REGISTRY = 'registry'  # in the workdir
_FILE = re.compile(r'(.+)\.(\d{6,})\.([0-9a-f]{8})\.json')
_NAME = re.compile(r'[\w:@-][\w.:@-]*')
_MOST_BYTES = 1 << 20  # of an entry; its largest part is a config
_LOOKS = 3  # at a directory with an unreadable file: it may be half written, or its holder has just changed

Order = tuple[int, str]  # (incarnation, token): the highest is the holder of a name


@dataclasses.dataclass(frozen=True)
class Entry:
    """The entry of one process."""

    name: str  # 'engine-3'
    incarnation: int  # counts the holders of the name, from 1
    token: str  # random, eight hexadecimal digits
    address: str = ''  # 'http://host:port', 'host:port'; '' = takes no calls
    kind: str = ''  # of an engine: the kind of client that talks to it
    role: str = ''  # with `index`, for a process of a run in roles
    index: int | None = None
    host: str = ''
    process: int = 0
    code: str = ''  # version of this package
    is_leaving: bool = False  # it takes no new work
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # further data for readers
    heartbeat: int | None = None  # changes while the process lives

    @property
    def order(self) -> Order:
        return self.incarnation, self.token

    @property
    def holder(self) -> str:
        """'2-5f0c1b9a': identifies the process; sent with requests that only this process may serve."""
        return f'{self.incarnation}-{self.token}'

    def __str__(self) -> str:
        return f'{self.name} (process {self.process} on {self.host or "a host unknown"})'


class FencedError(UserError):
    """Another process has taken the name of this one."""


class Registration:
    """The entry of this process, which takes the name from its earlier holder.

    Raises UserError for an invalid name, FencedError if another process took it at the same time.
    """

    def __init__(self, workdir: pathlib.Path, entry: Entry):
        """`entry` has no incarnation or token yet; its host and process id are set here."""
        for _ in self.steps(workdir, entry):
            pass

    def steps(self, workdir: pathlib.Path, entry: Entry) -> Iterator[str]:
        """The constructor's steps; yields between accesses to the directory, where a test lets other processes act."""
        if not _NAME.fullmatch(entry.name):
            raise UserError(f'--name={entry.name!r} is no name in a registry: use letters, digits, - and .')
        self._directory = workdir / REGISTRY
        self._directory.mkdir(parents=True, exist_ok=True)
        earlier = list_orders(self._directory).get(entry.name, [])
        yield 'counted'
        self.entry = dataclasses.replace(
            entry,
            incarnation=max((incarnation for incarnation, _ in earlier), default=0) + 1,
            token=secrets.token_hex(4),
            host=socket.gethostname(),
            process=os.getpid(),
        )
        self._write()
        yield 'written'
        self.remove_earlier()

    def remove_earlier(self) -> None:
        """Removes entries of earlier holders, which tells them so. Raises FencedError if this process lost the name."""
        for order in list_orders(self._directory).get(self.entry.name, []):
            if order < self.entry.order:
                file_of(self._directory, self.entry.name, order).unlink(missing_ok=True)
        self._require_newest()

    def beat(self) -> None:
        """Signals that this process is alive; call it several times within a reader's patience.

        Raises FencedError if another process has the name. A removed entry is written again.
        """
        try:
            os.utime(self.path)
        except FileNotFoundError:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._require_newest()
            self._write()

    def update(self, **changes: Any) -> None:
        """Replaces fields of the entry."""
        self.entry = dataclasses.replace(self.entry, **changes)
        self._write()

    def close(self) -> None:
        """Marks the entry as leaving, unless another process has the name; the entry stays."""
        with contextlib.suppress(FencedError):
            self._require_newest()
            if not self.entry.is_leaving:
                self.update(is_leaving=True)

    @property
    def path(self) -> pathlib.Path:
        return file_of(self._directory, self.entry.name, self.entry.order)

    def _require_newest(self) -> None:
        newest = max(list_orders(self._directory).get(self.entry.name, []), default=self.entry.order)
        if newest <= self.entry.order:
            return
        other = read_entry(file_of(self._directory, self.entry.name, newest))
        by = f'process {other.process} on {other.host}' if other else 'another process'
        raise FencedError(
            f'{self.entry.name} of {self._directory} was taken over by {by}: this process ends; start each name once'
        )

    def _write(self) -> None:
        fields = dataclasses.asdict(self.entry)
        del fields['heartbeat']
        files.write_json(self.path, fields, allow_nan=True)  # a config may have infinite fields


def file_of(directory: pathlib.Path, name: str, order: Order) -> pathlib.Path:
    return directory / f'{name}.{order[0]:06d}.{order[1]}.json'


def list_orders(directory: pathlib.Path) -> dict[str, list[Order]]:
    """The (incarnation, token) of all files, by name."""
    found: dict[str, list[Order]] = {}
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    for name in names:
        if match := _FILE.fullmatch(name):
            found.setdefault(match[1], []).append((int(match[2]), match[3]))
    return found


def read_entry(path: pathlib.Path) -> Entry | None:
    """Reads the entry in a file; None if it is gone, incomplete, or does not match the file's name.

    Unknown fields are ignored.
    """
    try:
        heartbeat = path.stat().st_mtime_ns
        fields = files.read_json(path, most_bytes=_MOST_BYTES)
    except (OSError, files.FileError):
        return None
    known = {field.name: fields[field.name] for field in dataclasses.fields(Entry) if field.name in fields}
    texts = ('name', 'token', 'address', 'kind', 'role', 'host', 'code')
    types: Mapping[str, type | tuple[type, ...]] = {
        **dict.fromkeys(texts, str),
        **dict.fromkeys(('incarnation', 'process'), int),
        'index': (int, type(None)),
        'is_leaving': bool,
        'details': dict,
    }
    if any(not isinstance(known.get(name), kind) for name, kind in types.items()):
        return None
    entry = Entry(**{**known, 'heartbeat': heartbeat})
    return entry if file_of(path.parent, entry.name, entry.order) == path else None


def read_entries(workdir: pathlib.Path) -> list[Entry]:
    """The holder of each name, sorted by name; holders whose file stays unreadable for _LOOKS looks are left out."""
    directory = workdir / REGISTRY
    for _ in range(_LOOKS):
        newest = {name: max(orders) for name, orders in list_orders(directory).items()}
        found = [read_entry(file_of(directory, name, order)) for name, order in sorted(newest.items())]
        if None not in found:
            break
    return [entry for entry in found if entry is not None]


# Tests whether a directory can hold the registry and the checkpoints of a run, before anything depends on it.


_FIX = 'use a --workdir on a file system that all hosts share, NFS or Lustre for instance'
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EPERM, errno.EXDEV, errno.ENOLCK, errno.EINVAL}


def require_usable(workdir: pathlib.Path) -> None:
    """Writes, renames, lists, reads, touches and locks files of the registry; leaves no file behind.

    Raises UserError that names the directory and the operation that does not work there.
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


# The heartbeat of a process, on a separate thread, so it does not depend on the process's other work.


PERIOD_S = 1.0  # between two heartbeats

OnFenced = Callable[[FencedError], None]


class Heartbeat:
    """A context manager: inside, the process is registered and its heartbeat runs.

    Args:
      entry: see Registration.
      on_fenced: called once, on the thread, if another process takes the name; then the heartbeat ends. The attribute
        may be set to another function.
    """

    def __init__(self, workdir: pathlib.Path, entry: Entry, on_fenced: OnFenced):
        self.workdir, self.registration = workdir, Registration(workdir, entry)
        self.on_fenced = on_fenced
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, name='heartbeat', daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.registration.close()

    @property
    def entry(self) -> Entry:
        return self.registration.entry

    def note_leaving(self) -> None:
        """Marks the entry as leaving: the process takes no new work."""
        self.update(is_leaving=True)

    def update(self, **changes: object) -> None:
        """Replaces fields of the entry."""
        with self._lock:
            self.registration.update(**changes)

    def _beat(self) -> None:
        while not self._end.wait(PERIOD_S):
            try:
                with (
                    contextlib.suppress(OSError),
                    self._lock,
                ):  # the file system may be away for a while
                    self.registration.beat()
            except FencedError as error:
                self.on_fenced(error)
                return


# Finds the living processes of a registry, and waits for expected ones.
#
# A heartbeat is a change of the entry between two looks of one reader, on its own clock: no clocks of two machines are
# compared, and the entry of a dead process is never taken for a living one.


PATIENCE_S = 10.0  # longest time without a heartbeat of a process that counts as alive
LOOK_S = 0.25  # between two looks of a waiting process
REPORT_S = 10.0  # between two messages of a waiting process


class Presence:
    """A reader of one registry. `now` gives seconds of this process's clock."""

    def __init__(self, workdir: pathlib.Path, *, now: Callable[[], float] = time.monotonic):
        self._workdir, self._now = workdir, now
        self._beats: dict[str, tuple[Order, int | None]] = {}  # by name: order and heartbeat at the last look
        self._alive: dict[str, tuple[Order, float]] = {}  # by name: whose heartbeat changed, and when

    def look(self) -> dict[str, Entry]:
        """The living entries by name: not leaving, and with a heartbeat that changed within PATIENCE_S."""
        now = self._now()
        entries = {entry.name: entry for entry in read_entries(self._workdir)}
        for name, entry in entries.items():
            before = self._beats.get(name)
            if before is not None and before[0] == entry.order and before[1] != entry.heartbeat:
                self._alive[name] = entry.order, now
            self._beats[name] = entry.order, entry.heartbeat
        return {name: entry for name, entry in entries.items() if not entry.is_leaving and self._is_alive(entry, now)}

    def _is_alive(self, entry: Entry, now: float) -> bool:
        order, since_s = self._alive.get(entry.name, (None, 0.0))
        return order == entry.order and now - since_s <= PATIENCE_S


def await_living(
    workdir: pathlib.Path,
    names: Collection[str],
    deadline_s: float,
    *,
    what: str,
    fix: str,
    accept: Callable[[Mapping[str, Entry]], bool] = lambda found: True,
    say: Callable[[str], None] = lambda sentence: print(sentence, flush=True),
) -> dict[str, Entry]:
    """Waits until all these names are alive and `accept` takes them; returns their entries.

    Args:
      what: the awaited processes, for messages: 'learner 0 of attempt 2'.
      fix: what to do if they do not come.

    Raises LostPeerError that names the processes that did not come within the deadline.
    """
    presence, began = Presence(workdir), time.monotonic()
    reported = began
    while True:
        living = presence.look()
        found = {name: living[name] for name in names if name in living}
        if len(found) == len(names) and accept(found):
            return found
        now = time.monotonic()
        missing = ', '.join(sorted(set(names) - set(found))) or 'one of an earlier attempt'
        if now - began >= deadline_s:
            raise LostPeerError(
                f'waited {now - began:.0f} s for {what} in {workdir}, and {missing} has not come: {fix}'
            )
        if now - reported >= REPORT_S:
            reported = now
            say(f'waiting for {what} ({missing}), {now - began:.0f} s')
        time.sleep(LOOK_S)
