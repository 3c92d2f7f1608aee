"""A control group for the processes of an answer: one bound for their memory and their number, one count of their CPU.

Version 2 of control groups where it governs memory, else version 1. It is made below the group of this process, or of
one above, where that is allowed: root, or a user to whom a part of the tree is delegated. A group is locked by its
owner and removed at its end; one whose owner was killed is found unlocked by the next owner, which removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_PREFIX = 'areal_jax-'
GRACE_S = 30.0  # a group so young may not be locked yet
_REMOVE_S = 1.0  # that has lost its last process a moment ago
_UNBOUNDED = 2**62
_KINDS = _VERSION_1, _VERSION_2 = 'cgroup', 'cgroup2'  # of file systems
_MEMORY, _CPU, _PIDS = 'memory', 'cpuacct', 'pids'


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a version, by the folder that they are in: one hierarchy each in version 1."""

    title: str
    folders: Mapping[str, str]  # controller -> where a group can be made
    memory: tuple[str, ...]  # the bound, with swap the last one
    kills: str
    cpu: str


_FIRST = ('memory.limit_in_bytes', 'memory.memsw.limit_in_bytes')
_SECOND = ('memory.max', 'memory.swap.max')


class Used(NamedTuple):
    """CPU seconds, and how often the kernel killed a process because the bound of memory was reached."""

    cpu_s: float
    kills: int


class ControlGroup:
    """One group, for one answer at a time; `folders` has its folder by controller."""

    def __init__(self, files: Files):
        """Makes it. Raises OSError where this process may not."""
        self.title, self._files = files.title, files
        name = f'{_PREFIX}{os.getpid()}-{os.urandom(4).hex()}'
        self.folders = {controller: os.path.join(above, name) for controller, above in files.folders.items()}
        self._locks: list[int] = []
        self._bounds = (-1, -1)
        self._doors: list[int] = []
        try:
            for folder in self._list_folders():
                _remove_stale(os.path.dirname(folder))
                os.mkdir(folder)
                self._locks.append(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
                fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.bound(_UNBOUNDED // 4096 * 4096, 2**20)
            self.cpu_file, self.kills_file = self._name(_CPU, files.cpu), self._name(_MEMORY, files.kills)
            self._doors = [os.open(f'{folder}/cgroup.procs', os.O_WRONLY) for folder in self._list_folders()]
            self.read_used()
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(getattr(error, 'errno', 0) or 0, str(error)) from error

    def bound(self, memory_bytes: int, processes: int) -> None:
        """Before a process enters. Raises OSError."""
        if (memory_bytes, processes) == self._bounds:
            return
        limit, swap = (self._name(_MEMORY, name) for name in self._files.memory)
        if self._files.memory == _SECOND:
            _write(limit, memory_bytes)
            _write_where_it_is(swap, 0)
        else:  # the sum with swap is never below memory alone
            _write_where_it_is(swap, -1)
            _write(limit, memory_bytes)
            _write_where_it_is(swap, memory_bytes)
        if _PIDS in self.folders:
            _write(self._name(_PIDS, 'pids.max'), processes)
        self._bounds = (memory_bytes, processes)

    def enter(self) -> None:
        """Moves this process, a fork of the owner, into it. Raises OSError."""
        for door in self._doors:
            os.write(door, b'0')

    def read_used(self) -> Used:
        """Of all processes that were ever in it. Raises OSError."""
        return read_used(self.cpu_file, self.kills_file)

    def close(self) -> None:
        """Removes it; what is in it is killed."""
        for folder in self._list_folders():
            _remove(folder)
        while self._doors or self._locks:
            os.close((self._doors or self._locks).pop())

    def _name(self, controller: str, file: str) -> str:
        return os.path.join(self.folders[controller], file)

    def _list_folders(self) -> list[str]:
        return list(dict.fromkeys(self.folders.values()))


def make_group() -> ControlGroup | None:
    """One for the answers of this process; None where none can be made."""
    for files in find_files():
        with contextlib.suppress(OSError):
            return ControlGroup(files)
    return None


def read_used(cpu_file: str, kills_file: str) -> Used:
    """By the files of a group: nanoseconds of version 1, `usage_usec` of version 2. Raises OSError and ValueError."""
    with open(cpu_file, 'rb') as cpu, open(kills_file, 'rb') as events:
        text = cpu.read()
        kills = [int(line.split()[1]) for line in events if line.startswith(b'oom_kill ')]
    (number,) = kills
    return Used(int(text.split()[1]) * 1e-6 if text.startswith(b'usage_usec') else int(text) * 1e-9, number)


def find_files(mounts: str = '/proc/self/mountinfo', groups: str = '/proc/self/cgroup') -> Iterator[Files]:
    """The places where a group may be made, the likeliest first; what cannot be read is none."""
    try:
        with open(mounts, encoding='utf-8') as one, open(groups, encoding='utf-8') as other:
            mounted, own = list(_read_mounts(one.read())), _read_groups(other.read())
    except OSError:
        return
    for kind, _, root, point in mounted:
        if kind == _VERSION_2 and '' in own:
            for folder in _list_above(point, root, own['']):
                if _governs_memory(folder):
                    folders = dict.fromkeys((_MEMORY, _CPU, _PIDS), folder)
                    yield Files('cgroup v2', folders, _SECOND, 'memory.events', 'cpu.stat')
    folders = {
        name: next(iter(_list_above(point, root, own[name])), '')
        for kind, controllers, root, point in mounted
        for name in (_MEMORY, _CPU, _PIDS)
        if kind == _VERSION_1 and name in controllers and name in own
    }
    if {_MEMORY, _CPU} <= set(folders) and all(folders.values()):
        yield Files('cgroup v1', folders, _FIRST, 'memory.oom_control', 'cpuacct.usage')


def _read_mounts(text: str) -> Iterator[tuple[str, Sequence[str], str, str]]:
    """Kind, controllers, which group is mounted, and where, of each hierarchy."""
    for line in text.splitlines():
        fields, _, rest = line.partition(' - ')
        kind, _, options = rest.split(' ', 2)
        if kind in _KINDS:
            root, point = fields.split()[3:5]
            yield kind, options.split(','), root, point


def _read_groups(text: str) -> dict[str, str]:
    """The group of this process by controller; '' is version 2."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(':', 2)
        found |= dict.fromkeys(controllers.split(','), path)
    return found


def _list_above(point: str, root: str, own: str) -> Iterator[str]:
    """The folder of the group, and those above it, as far as they are mounted."""
    inside = os.path.relpath(own, root)
    if '..' in (own.split('/')[1], inside[:2]):  # outside of what is mounted, or of the namespace
        return
    folder = os.path.normpath(os.path.join(point, inside))
    while True:
        yield folder
        if folder == point or folder == os.path.dirname(folder):
            return
        folder = os.path.dirname(folder)


def _governs_memory(folder: str) -> bool:
    """Whether groups below this one have a bound of memory."""
    try:
        with open(f'{folder}/cgroup.subtree_control', encoding='ascii') as file:
            return {_MEMORY, _PIDS} <= set(file.read().split())
    except OSError:
        return False


def _remove_stale(above: str) -> None:
    """Groups whose owner was killed, with what is left in them."""
    for entry in os.scandir(above):
        if not entry.name.startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_ctime > GRACE_S:
                    _remove(entry.path)
            finally:
                os.close(lock)


def _remove(folder: str) -> None:
    end_s = time.monotonic() + _REMOVE_S
    while True:
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > end_s:
                return
            _kill(folder)
            time.sleep(0.002)
        else:
            return


def _kill(folder: str) -> None:
    with contextlib.suppress(OSError, ValueError), open(f'{folder}/cgroup.procs', 'rb') as file:
        for pid in map(int, file.read().split()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _write(file: str, value: int) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _write_where_it_is(file: str, value: int) -> None:
    """A machine may count no swap."""
    with contextlib.suppress(FileNotFoundError):
        _write(file, value)
