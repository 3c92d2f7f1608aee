"""A control group for the processes of an answer: bounds their memory and their number, and counts their CPU time.

Version 2 of control groups is used if it governs memory, else version 1. The group is made below the group of this
process, or below an ancestor, if that is allowed: for root, or a user to whom a part of the tree is delegated. Its
owner locks a group and removes it at the end; if an owner was killed, the next owner removes the unlocked group.
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

from areal_jax.workers.descendants import read_proc

_PREFIX = 'areal_jax-'
GRACE_S = 30.0  # a younger group may not be locked yet
_REMOVE_S = 1.0  # for a group whose last process has just ended
_UNBOUNDED = 2**62
_KINDS = _VERSION_1, _VERSION_2 = 'cgroup', 'cgroup2'  # of file systems
_MEMORY, _CPU, _PIDS = 'memory', 'cpuacct', 'pids'


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a version, by the folder that they are in: version 1 has one hierarchy per controller."""

    title: str
    folders: Mapping[str, str]  # controller -> where a group can be made
    memory: tuple[str, ...]  # the bounds: of memory, then of swap or of their sum
    kills: str
    cpu: str


_FIRST = ('memory.limit_in_bytes', 'memory.memsw.limit_in_bytes')
_SECOND = ('memory.max', 'memory.swap.max')


class Used(NamedTuple):
    """CPU seconds, and how often the kernel killed a process because the memory bound was reached."""

    cpu_s: float
    kills: int


class ControlGroup:
    """One group, for one answer at a time; `folders` maps each controller to its folder."""

    def __init__(self, files: Files):
        """Makes the group. Raises OSError if this process may not."""
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
        """Sets the bounds, before a process enters. Raises OSError."""
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
        """Moves this process, a fork of the owner, into the group. Raises OSError."""
        for door in self._doors:
            os.write(door, b'0')

    def read_used(self) -> Used:
        """Reads the usage of all processes that were ever in the group. Raises OSError."""
        return read_used(self.cpu_file, self.kills_file)

    def close(self) -> None:
        """Removes the group; kills the processes in it."""
        for folder in self._list_folders():
            _remove(folder)
        while self._doors or self._locks:
            os.close((self._doors or self._locks).pop())

    def _name(self, controller: str, file: str) -> str:
        return os.path.join(self.folders[controller], file)

    def _list_folders(self) -> list[str]:
        return list(dict.fromkeys(self.folders.values()))


def make_group() -> ControlGroup | None:
    """Makes a group for the answers of this process; None if no group can be made."""
    for files in find_files():
        with contextlib.suppress(OSError):
            return ControlGroup(files)
    return None


def read_used(cpu_file: str, kills_file: str) -> Used:
    """Reads a group's files: nanoseconds in version 1, `usage_usec` in version 2. Raises OSError and ValueError."""
    with open(cpu_file, 'rb') as cpu, open(kills_file, 'rb') as events:
        text = cpu.read()
        kills = [int(line.split()[1]) for line in events if line.startswith(b'oom_kill ')]
    (number,) = kills
    return Used(int(text.split()[1]) * 1e-6 if text.startswith(b'usage_usec') else int(text) * 1e-9, number)


def find_files(mounts: str = '/proc/self/mountinfo', groups: str = '/proc/self/cgroup') -> Iterator[Files]:
    """Yields the places where a group may be made, the likeliest first; places that cannot be read are left out."""
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
    for line in text.splitlines():
        fields, _, rest = line.partition(' - ')
        kind, _, options = rest.split(' ', 2)
        if kind in _KINDS:
            root, point = fields.split()[3:5]
            yield kind, options.split(','), root, point


def _read_groups(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(':', 2)
        found |= dict.fromkeys(controllers.split(','), path)
    return found


def _list_above(point: str, root: str, own: str) -> Iterator[str]:
    inside = os.path.relpath(own, root)
    if '..' in (own.split('/')[1], inside[:2]):  # outside of the mounted part, or of the namespace
        return
    folder = os.path.normpath(os.path.join(point, inside))
    while True:
        yield folder
        if folder == point or folder == os.path.dirname(folder):
            return
        folder = os.path.dirname(folder)


def _governs_memory(folder: str) -> bool:
    """Whether groups below this one have bounds on memory and on processes."""
    try:
        with open(f'{folder}/cgroup.subtree_control', encoding='ascii') as file:
            return {_MEMORY, _PIDS} <= set(file.read().split())
    except OSError:
        return False


def _remove_stale(above: str) -> None:
    """Removes groups whose owner was killed, with the processes left in them."""
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
            with contextlib.suppress(OSError, ValueError), open(f'{folder}/cgroup.procs', 'rb') as file:
                for pid in map(int, file.read().split()):
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        else:
            return


def _write(file: str, value: int) -> None:
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _write_where_it_is(file: str, value: int) -> None:
    """Writes to the file if it exists: a machine may count no swap."""
    with contextlib.suppress(FileNotFoundError):
        _write(file, value)


# The total usage of an answer's processes, read from outside while it runs.
#
# Read from its control group, if it has one; else summed over its session, which no confined process can leave. If no
# process waits for a child that ends, the sum misses the child's usage since the last look.


LOOK_S = 0.1  # between two looks: an answer beyond its bound ends within half a second
_CPU_CLOCK = 2  # of a process, in a clock's number
TICKS, _PAGE = os.sysconf('SC_CLK_TCK'), os.sysconf('SC_PAGE_SIZE')
# fields of /proc/PID/stat, after the name
_SESSION, _USED, _WAITED, _STARTED, _RESIDENT = 3, slice(11, 13), slice(13, 15), 19, 21

_NOTHING = Used(0.0, 0)


@dataclasses.dataclass
class Meter:
    """Measures children while they run.

    Args:
      server: the process that forked them.
      pids: of the children; the first one runs the answer.
      memory_bytes: the memory bound of the answer's processes; 0 = no bound.
      files: of the answer's control group, which the kernel bounds (control_group.read_used); () = no group.
      before: the usage in these files when the answer began.
    """

    server: int
    pids: Sequence[int]
    memory_bytes: int = 0
    files: tuple[str, str] | tuple[()] = ()
    before: Used = _NOTHING
    total_s: float = dataclasses.field(default=0.0, init=False)  # at the last look, of all processes of the answer
    is_over: bool = dataclasses.field(default=False, init=False)  # its memory, at the last look
    _seen: dict[tuple[int, bytes], float] = dataclasses.field(default_factory=dict, init=False)  # CPU seconds
    _here: frozenset[int] = dataclasses.field(default=frozenset(), init=False)
    _looked_s: float = dataclasses.field(default_factory=time.monotonic, init=False)

    def read_cpu_s(self) -> float:
        """CPU seconds of the child that has used most; for the answer, of all its processes."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._look()
            self._looked_s = time.monotonic()
        return max(self.total_s, *map(read_process_s, self.pids))

    def waits(self) -> bool:
        """Whether a child, or a process of the answer, is runnable, and nothing is known that keeps it from running.

        Without a group, processes that are new since the last call may keep it from running (False): their usage is not
        known once they have ended.
        """
        before, self._here = self._here, frozenset(pid for pid, _ in list_session(self.server, self.pids[0]))
        if before and not self.files and self._here - before:
            return False
        return any(map(is_runnable, {*self.pids, *self._here}))

    def _look(self) -> None:
        if self.files:
            with contextlib.suppress(OSError):
                used = read_used(*self.files)
                self.total_s, self.is_over = used.cpu_s - self.before.cpu_s, used.kills > self.before.kills
            return
        used_s, waited_s, memory = 0.0, 0.0, 0
        gone = dict(self._seen)
        for pid, fields in list_session(self.server, self.pids[0]):
            own, of_children = (sum(map(int, fields[part])) / TICKS for part in (_USED, _WAITED))
            used_s, waited_s = used_s + own, waited_s + of_children
            process = pid, fields[_STARTED]
            self._seen[process] = own
            gone.pop(process, None)
            memory += _read_memory(pid, self.server, int(fields[_RESIDENT]) * _PAGE)
        # usage of ended processes: from the processes that waited for them, else as far as it was seen
        self.total_s = max(self.total_s, used_s + max(waited_s, sum(gone.values())))
        self.is_over = self.is_over or 0 < self.memory_bytes < memory


def read_process_s(pid: int) -> float:
    """CPU seconds of a process so far, without its children; 0 if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        return 0.0


def is_runnable(pid: int) -> bool:
    """Whether a process runs, or waits for a processor; False if it sleeps, is stopped or has ended.

    A process that waits for a disk, or for a child that has its memory (vfork), counts as asleep, for however long.
    """
    return read_proc(pid, 'stat').rpartition(b')')[2].split()[:1] == [b'R']


def list_session(server: int, leader: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yields pid and /proc/PID/stat fields of each process of a session; the server adopts its orphans."""
    unvisited = [server]
    while unvisited:
        pid = unvisited.pop()
        unvisited += _list_children(pid)
        fields = read_proc(pid, 'stat').rpartition(b')')[2].split()
        if len(fields) > _RESIDENT and int(fields[_SESSION]) == leader:
            yield pid, fields


def _list_children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f'/proc/{pid}/task')
    except OSError:
        return []
    return [int(child) for thread in threads for child in read_proc(pid, f'task/{thread}/children').split()]


def _read_memory(pid: int, server: int, resident: int) -> int:
    """Bytes of a process; a shared page counts as its size over the number of processes that share it.

    If that cannot be read: the resident bytes less the server's, which a fork has at least and does not own.
    """
    for line in read_proc(pid, 'smaps_rollup').splitlines():
        if line.startswith(b'Pss:'):
            return int(line.split()[1]) * 2**10
    return max(resident - _read_resident(server), 0)


def _read_resident(pid: int) -> int:
    return int((read_proc(pid, 'statm').split() or [b'0', b'0'])[1]) * _PAGE
