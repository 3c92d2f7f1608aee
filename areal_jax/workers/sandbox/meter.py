"""What the processes of an answer have used together, read from outside while it runs.

By its control group where it has one; else by the sum over its session, which no confined process can leave. The sum
misses what a process used between the last look and its end where nobody waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence

from areal_jax.workers.descendants import read_proc
from areal_jax.workers.sandbox.control_group import Used, read_used

LOOK_S = 0.1  # between two looks: what goes beyond its bound ends within half a second
_CPU_CLOCK = 2  # of a process, in a clock's number
TICKS, _PAGE = os.sysconf('SC_CLK_TCK'), os.sysconf('SC_PAGE_SIZE')
# fields of /proc/PID/stat, behind the name
_SESSION, _USED, _WAITED, _STARTED, _RESIDENT = 3, slice(11, 13), slice(13, 15), 19, 21

_NOTHING = Used(0.0, 0)


@dataclasses.dataclass
class Meter:
    """Of children that run.

    Args:
      server: the process that forked them.
      pids: of the children; the first one is that of the answer.
      memory_bytes: that the processes of the answer may have; 0 = no bound.
      files: of its control group, which the kernel bounds (control_group.read_used); () = it has none.
      before: what they said when the answer began.
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
        """CPU seconds of the child that has used most, with all processes of the answer."""
        if time.monotonic() - self._looked_s >= LOOK_S:
            self._look()
            self._looked_s = time.monotonic()
        return max(self.total_s, *map(read_process_s, self.pids))

    def waits(self) -> bool:
        """Whether one of the children, or of the processes of the answer, would run, and nothing is known to keep it.

        Where there is no group, processes that are new since the last call may keep it: what they used is not known
        once they have ended.
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
        # what has ended is told by those that waited for it; of others as far as it was seen
        self.total_s = max(self.total_s, used_s + max(waited_s, sum(gone.values())))
        self.is_over = self.is_over or 0 < self.memory_bytes < memory


def read_process_s(pid: int) -> float:
    """CPU seconds of a process so far, without its children; 0 where it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        return 0.0


def is_runnable(pid: int) -> bool:
    """Whether a process runs, or waits for a processor; False where it sleeps, is stopped or has ended.

    One that waits for a disk, or for a child that has its memory (vfork), sleeps: as long as it likes.
    """
    return read_proc(pid, 'stat').rpartition(b')')[2].split()[:1] == [b'R']


def list_session(server: int, leader: int) -> Iterator[tuple[int, list[bytes]]]:
    """Pid and fields of /proc/PID/stat of each process of a session; the server adopts its orphans."""
    unvisited = [server]
    while unvisited:
        pid = unvisited.pop()
        unvisited += _list_children(pid)
        fields = read_proc(pid, 'stat').rpartition(b')')[2].split()
        if len(fields) > _RESIDENT and int(fields[_SESSION]) == leader:
            yield pid, fields


def _list_children(pid: int) -> list[int]:
    """Of each thread."""
    try:
        threads = os.listdir(f'/proc/{pid}/task')
    except OSError:
        return []
    return [int(child) for thread in threads for child in read_proc(pid, f'task/{thread}/children').split()]


def _read_memory(pid: int, server: int, resident: int) -> int:
    """Bytes of a process, shared pages by the number of those that share them.

    Where that may not be read, without what a fork of the server has at least, which is not its own.
    """
    for line in read_proc(pid, 'smaps_rollup').splitlines():
        if line.startswith(b'Pss:'):
            return int(line.split()[1]) * 2**10
    return max(resident - _read_resident(server), 0)


def _read_resident(pid: int) -> int:
    return int((read_proc(pid, 'statm').split() or [b'0', b'0'])[1]) * _PAGE
