"""The caller's side of confined child processes: what they get, and how they ended.

They are forks of a separate server (child_server.py), so that they hold nothing of the caller's memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from areal_jax.files import JsonObject
from areal_jax.installation import strip_python_path
from areal_jax.workers.descendants import MARK
from areal_jax.workers.sandbox.child_server import CONFINED, MESSAGE_BYTES
from areal_jax.workers.sandbox.control_group import Meter, Used

SERVER = str(pathlib.Path(__file__).with_name('child_server.py'))
_START_S = 60.0  # it imports modules
_REPLY_S = 20.0  # a fork, or the end of some processes
# for an answer that computes with numpy: a thread per core would exceed the bound on processes on a large machine
_THREADS = {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}


class ServerLostError(Exception):
    """Raised if a child cannot be started, or cannot be ended: nothing is known about the code that it ran."""


@dataclasses.dataclass(frozen=True)
class Child:
    """One child.

    Args:
      function: 'module:name' of a module that the server imported; it is called with the descriptors in order.
      descriptors: that the child gets copies of; the caller's stay open.
      limits: fields of confinement.Confinement, including memory_bytes.
      is_counted: whether memory and CPU time count over all its processes (`ConfinedChildren.meter`); only the first
        child of a message can be counted.
      input, output: the descriptors that become its stdin and stdout, which the function does not get; None = the null
        device.
    """

    function: str
    descriptors: tuple[int, ...]
    limits: Mapping[str, int | str]
    is_counted: bool = False
    input: int | None = None
    output: int | None = None


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a child.

    Args:
      status: its wait status.
      cpu_s: CPU seconds of the child and of the processes it waited for; if it is counted, of all its processes.
      is_over: its processes exceeded its memory bound, so the kernel killed one of them, or all were ended.
    """

    status: int
    cpu_s: float
    is_over: bool = False


class ConfinedChildren:
    """A server of children, which forks several at a time; calls of `start` and `end` alternate.

    Args:
      level: 'landlock', or 'none' for limits alone.
      modules: modules that the server imports before it forks.
      readable: files and folders that the children can read in addition to the base (packages.find_packages).
    """

    def __init__(self, level: str, modules: Sequence[str], readable: Sequence[str] = ()):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mark = {MARK: os.environ[MARK]} if MARK in os.environ else {}
        environment = {'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8', 'PYTHONHASHSEED': '0', **_THREADS, **mark}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, '-P', SERVER, str(theirs.fileno()), level, json.dumps(readable), *modules],
                env=environment | {'PYTHONPATH': strip_python_path()}, pass_fds=[theirs.fileno()], cwd='/',
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self._control = ours
        self.group = str(self._await_reply(_START_S)['group'])  # the kind of control group that bounds an answer, or ''
        self.meter = Meter(self.pid, ())

    def start(self, children: Sequence[Child]) -> list[int]:
        """Starts the children and returns their pids; each child leads a session. Raises ServerLostError."""
        words = [
            {
                'function': child.function, 'limits': dict(child.limits), 'descriptors': len(child.descriptors),
                'input': child.input, 'output': child.output, 'is_counted': child.is_counted,
            }
            for child in children
        ]  # fmt: skip
        handed = [descriptor for child in children for descriptor in child.descriptors]
        started = self._ask({'children': words}, handed)
        pids: list[int] = started['pids']
        bound = int(children[0].limits['memory_bytes']) if children[0].is_counted else 0
        self.meter = Meter(self.pid, pids, bound, tuple(started['counted_in']), Used(*started['before']))
        return pids

    def end(self) -> list[Ended]:
        """Kills the children and all processes they started; returns how each child ended.

        Raises ServerLostError, also if a child could not be confined.
        """
        ended = self._ask({'end': True})['ended']
        for child in ended:
            if child['word'] != CONFINED:
                raise ServerLostError(child['word'] or 'a child ended before it was confined')
        found = [Ended(child['status'], child['cpu_s'], child['is_over']) for child in ended]
        if self.meter.memory_bytes:
            cpu_s, is_over = max(found[0].cpu_s, self.meter.total_s), found[0].is_over or self.meter.is_over
            found[0] = dataclasses.replace(found[0], cpu_s=cpu_s, is_over=is_over)
        return found

    def close(self) -> None:
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REPLY_S)
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ask(self, message: JsonObject, descriptors: Sequence[int] = ()) -> JsonObject:
        data = json.dumps(message).encode()
        assert len(data) <= MESSAGE_BYTES
        try:
            socket.send_fds(self._control, [data], descriptors)
        except OSError as error:
            raise ServerLostError(f'the server of children has ended: {error.strerror}') from error
        return self._await_reply(_REPLY_S)

    def _await_reply(self, within_s: float) -> JsonObject:
        self._control.settimeout(within_s)
        try:
            data = self._control.recv(MESSAGE_BYTES)
        except TimeoutError as error:
            raise ServerLostError(f'the server of children does not answer within {within_s:g} s') from error
        except OSError as error:
            raise ServerLostError(f'the server of children has ended: {error.strerror}') from error
        if not data:
            raise ServerLostError('the server of children has ended')
        reply: JsonObject = json.loads(data)
        if 'fault' in reply:
            raise ServerLostError(str(reply['fault']))
        return reply


def hand_text(text: bytes) -> int:
    """Returns a descriptor from which a child reads this text to its end."""
    descriptor = os.memfd_create('text', os.MFD_CLOEXEC)
    os.write(descriptor, text)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
