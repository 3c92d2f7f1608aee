"""Forks confined children from a process that has imported what they run and held nothing of what they are given.

    python -P child_server.py DESCRIPTOR LEVEL MODULE...

DESCRIPTOR is a seqpacket socket to the process that asks, with whose end this one ends; confined_children.py is its
other side. A JSON message each: {children: [{function, limits, descriptors, input, output}]} comes with the
descriptors of all children in one row, and is answered by {pids} or {fault}. {end: true} kills what is left of them
and is answered by {ended: [{status, cpu_s, word}]}, or by {fault} where a process outlives that.

A child holds neither the socket nor a descriptor of another child, and runs nothing before it is confined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # this copy of the package

from areal_jax.workers.descendants import adopt_orphans, die_with_parent, end_descendants
from areal_jax.workers.sandbox.confinement import (
    CONFINING,
    LANDLOCK,
    Confinement,
    Preparation,
    SandboxError,
    choose_confinement,
    confine,
    count_own,
    prepare,
    set_limits,
)
from areal_jax.workers.sandbox.fork_hooks import keep_hooks

del sys.path[0]

MOST_DESCRIPTORS, MESSAGE_BYTES = 64, 2**16  # of one message
CONFINED = 'ok'  # the word of a child
_USERS_APART = 10_000  # between the users that two children of root become
_KILL_S = 3.0  # a process that outlives SIGKILL by so long is stuck in the kernel
_PAUSE_S = 0.0002
_COUNT_S = 1.0  # between two counts of the user's threads, for which all of /proc is read
_Message = dict  # of JSON


@dataclasses.dataclass
class _Child:
    """One child; on `told` it says CONFINED, or why it is not, before it runs anything."""

    pid: int
    told: int
    status: int | None = None
    cpu_s: float = 0.0


class _Server:
    """The children of one message at a time."""

    def __init__(self, control: socket.socket, confinement: Confinement, prepared: Preparation | None):
        self._control, self._confinement, self._prepared = control, confinement, prepared
        self._children: list[_Child] = []
        self._own_processes, self._counted_s = 0, -_COUNT_S

    def serve(self) -> None:
        """Until the other side closes the socket."""
        while True:
            data, descriptors, *_ = socket.recv_fds(self._control, MESSAGE_BYTES, MOST_DESCRIPTORS)
            try:
                if not data:
                    self._end()  # what they have forked does not end with them
                    return
                message = json.loads(data)
                reply = self._end() if 'end' in message else self._start(message['children'], descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._control.send(json.dumps(reply).encode())

    def _start(self, children: Sequence[_Message], descriptors: list[int]) -> _Message:
        first = 0
        self._count_own()
        if len(descriptors) < sum(child['descriptors'] for child in children):
            return {'fault': 'no child process: its descriptors were lost'}  # this process has no room for them
        try:
            for number, child in enumerate(children):
                own = descriptors[first : first + child['descriptors']]
                self._children.append(self._fork(child, own, number))
                first += len(own)
        except OSError as error:
            self._end()
            return {'fault': f'no child process: {error.strerror}'}
        return {'pids': [child.pid for child in self._children]}

    def _fork(self, child: _Message, descriptors: Sequence[int], number: int) -> _Child:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid:
            os.close(writer)
            return _Child(pid, reader)
        code = 1
        try:
            handed = _hand_over(child, descriptors, writer, self._prepared)
            if self._confine(child['limits'], writer, number):
                module, _, name = child['function'].partition(':')
                getattr(sys.modules[module], name)(*handed)
            code = 0
        finally:
            os._exit(code)

    def _count_own(self) -> None:
        """The run may have more threads by now; they count in the limit of a child of the same user."""
        if self._confinement.uid is None and time.monotonic() - self._counted_s > _COUNT_S:
            self._own_processes, self._counted_s = count_own(), time.monotonic()

    def _confine(self, limits: _Message, told: int, number: int) -> bool:
        """Confines this process, and says on `told` whether it is."""
        uid = self._confinement.uid
        user = None if uid is None else uid + _USERS_APART * number
        try:
            confinement = dataclasses.replace(self._confinement, **limits, uid=user)
            if self._prepared is None:
                set_limits(confinement, self._own_processes)
            else:
                confine(confinement, dataclasses.replace(self._prepared, own_processes=self._own_processes))
            die_with_parent()  # a change of user takes it back
            word = CONFINED
        except (SandboxError, OSError) as error:
            word = str(error)
        os.write(told, word.encode())
        os.close(told)
        return word == CONFINED

    def _end(self) -> _Message:
        children, self._children = {child.pid: child for child in self._children}, []
        try:
            is_clean = _kill_all(children)
            ended = [
                {'status': child.status, 'cpu_s': child.cpu_s, 'word': os.read(child.told, 2000).decode()}
                for child in children.values()
            ]
        finally:
            for child in children.values():
                os.close(child.told)
        return {'ended': ended} if is_clean else {'fault': 'a process of a child outlives SIGKILL'}


def _kill_all(children: dict[int, _Child]) -> bool:
    """Waits until this process has no child, orphans of its children included; False where one cannot be killed."""
    for pid in children:
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
    end_s = time.monotonic() + _PAUSE_S * 100
    while _reap(children):
        if time.monotonic() > end_s:
            return end_descendants(lambda: _reap(children), _KILL_S)
        time.sleep(_PAUSE_S)
    return True


def _reap(children: dict[int, _Child]) -> bool:
    """Waits for those that have ended; False if there are no others."""
    try:
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return True
            if pid in children:
                children[pid].status, children[pid].cpu_s = status, usage.ru_utime + usage.ru_stime
    except ChildProcessError:
        return False


def _hand_over(child: _Message, descriptors: Sequence[int], writer: int, prepared: Preparation | None) -> list[int]:
    """Closes all but the streams of the child and its own descriptors; returns those that the function gets."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    given = dict(enumerate(descriptors))
    for stream, index in ((0, child.get('input')), (1, child.get('output')), (2, None)):
        os.dup2(null if index is None else given.pop(index), stream)
    handed = list(given.values())
    kept = {writer, *handed} | ({prepared.ruleset} if prepared else set())
    for descriptor in map(int, os.listdir('/proc/self/fd')):
        if descriptor > 2 and descriptor not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(descriptor)
    return handed


def main(arguments: Sequence[str]) -> None:
    """Imports the modules, says {ready}, and serves."""
    descriptor, level, *modules = arguments
    adopt_orphans()
    with keep_hooks():
        imported = [importlib.import_module(module) for module in modules]
    for module in imported:
        # a fork copies each page that it writes to, and code that ran before writes less
        getattr(module, 'warm_up', lambda: None)()
    control = socket.socket(fileno=int(descriptor))
    try:
        confinement = choose_confinement(memory_bytes=0, level=level if level in CONFINING else LANDLOCK)
        prepared = prepare(confinement) if level in CONFINING else None
    except SandboxError as error:
        control.send(json.dumps({'fault': str(error)}).encode())
        return
    gc.collect()
    gc.freeze()
    control.send(json.dumps({'ready': True}).encode())
    _Server(control, confinement, prepared).serve()


if __name__ == '__main__':
    main(sys.argv[1:])
