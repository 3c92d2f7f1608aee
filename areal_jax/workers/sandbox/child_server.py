"""Forks confined children from a process that has imported the modules they run, but never held their inputs.

    python -P child_server.py DESCRIPTOR LEVEL READABLE MODULE...

DESCRIPTOR is a seqpacket socket to the calling process (confined_children.py); this process ends when the caller does.
READABLE, a JSON list, names files and folders that children can read in addition to the base. Messages are JSON.
{children: [{function, limits, is_counted, descriptors, input, output}]} comes with the descriptors of all children in
order; the reply is {pids, counted_in, before} (control_group.Meter) or {fault}. {end: true} kills the children and all
processes left of them; the reply is {ended: [{status, cpu_s, is_over, word}]}, or {fault} if a process survives.

A child holds neither the socket nor a descriptor of another child, and runs nothing before it is confined. It finds no
module of this package: the modules that it runs have been imported, and are removed from sys.modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import linecache
import os
import pathlib
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # this copy of the package

from areal_jax.installation import FOLDER
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
    ignore_file_limit,
    prepare,
    set_limits,
)
from areal_jax.workers.sandbox.control_group import ControlGroup, Used, make_group
from areal_jax.workers.sandbox.fork_hooks import keep_hooks
from areal_jax.workers.sandbox.landlock import close_range

_ROOT = sys.path[0]
MOST_DESCRIPTORS, MESSAGE_BYTES = 64, 2**16  # of one message
CONFINED = 'ok'  # the word of a child that is confined
_LARGEST_DESCRIPTOR = 2**31 - 1
_USERS_APART = 10_000  # between the users that two children of root become
_CONFINE_S = 10.0  # a child needs milliseconds for it, on a machine with a processor to spare
_KILL_S = 3.0  # a process that is alive this long after SIGKILL is stuck in the kernel
_PAUSE_S = 0.0002
_COUNT_S = 1.0  # between two counts of the user's threads, for which all of /proc is read
_Message = dict  # of JSON


@dataclasses.dataclass
class _Order:
    function: Callable[..., object]
    handed: list[int]  # descriptors that the function gets
    streams: list[int | None]  # stdin and stdout; None = the null device
    confinement: Confinement
    is_counted: bool


@dataclasses.dataclass
class _Child:
    """One child; it writes CONFINED, or the error, to `told` before it runs anything."""

    pid: int
    told: int
    is_counted: bool
    status: int | None = None
    cpu_s: float = 0.0
    is_over: bool = False


class _Server:
    """The children of one message at a time."""

    def __init__(
        self, control: socket.socket, confinement: Confinement, prepared: Preparation | None,
        modules: Mapping[str, types.ModuleType], group: ControlGroup | None,
    ):  # fmt: skip
        self._group, self._before = group, Used(0.0, 0)
        self._control, self._confinement, self._prepared, self._modules = control, confinement, prepared, modules
        self._children: list[_Child] = []
        self._own_processes, self._counted_s = 0, -_COUNT_S
        self._null = os.open(os.devnull, os.O_RDWR)

    def serve(self) -> None:
        """Serves messages until the other side closes the socket."""
        while True:
            data, descriptors, *_ = socket.recv_fds(self._control, MESSAGE_BYTES, MOST_DESCRIPTORS)
            try:
                if not data:
                    self._end()  # their own forks do not end with them
                    if self._group:
                        self._group.close()
                    return
                message = json.loads(data)
                reply = self._end() if 'end' in message else self._start(message['children'], descriptors)
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._control.send(json.dumps(reply).encode())

    def _start(self, children: Sequence[_Message], descriptors: list[int]) -> _Message:
        self._count_own()
        if len(descriptors) < sum(child['descriptors'] for child in children):
            return {'fault': 'no child process: its descriptors were lost'}  # this process has no room for them
        try:
            orders = list(self._read_orders(children, descriptors))
            self._begin_count(orders)
            for order in orders:
                self._children.append(self._fork(order))
        except OSError as error:
            self._end()
            return {'fault': f'no child process: {error.strerror}'}
        files = [self._group.cpu_file, self._group.kills_file] if self._group and orders[0].is_counted else []
        return {'pids': [child.pid for child in self._children], 'counted_in': files, 'before': self._before}

    def _read_orders(self, children: Sequence[_Message], descriptors: Sequence[int]) -> Iterator[_Order]:
        given = iter(descriptors)
        for number, child in enumerate(children):
            user = None if self._confinement.uid is None else self._confinement.uid + _USERS_APART * number
            module, _, name = child['function'].partition(':')
            handed = dict(enumerate(itertools.islice(given, child['descriptors'])))
            streams = [None if child[stream] is None else handed.pop(child[stream]) for stream in ('input', 'output')]
            confinement = dataclasses.replace(self._confinement, **child['limits'], uid=user)
            yield _Order(
                getattr(self._modules[module], name), list(handed.values()), streams, confinement, child['is_counted']
            )

    def _fork(self, order: _Order) -> _Child:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid:
            os.close(writer)
            return _Child(pid, reader, order.is_counted)
        code = 1
        try:
            self._hand_over(order, writer)
            if self._confine(order.confinement, writer):
                order.function(*order.handed)
            code = 0
        finally:
            os._exit(code)

    def _begin_count(self, orders: Sequence[_Order]) -> None:
        """Prepares the group for the first child, the only one that is counted. Raises OSError."""
        if self._group and orders[0].is_counted:
            confinement = orders[0].confinement
            self._group.bound(confinement.memory_bytes, confinement.processes)
            self._before = self._group.read_used()

    def _end_count(self, child: _Child) -> None:
        """Reads the usage of all processes of a counted child from its group. Raises OSError."""
        if self._group and child.is_counted:
            used = self._group.read_used()
            child.cpu_s, child.is_over = used.cpu_s - self._before.cpu_s, used.kills > self._before.kills

    def _count_own(self) -> None:
        if self._confinement.uid is None and time.monotonic() - self._counted_s > _COUNT_S:
            self._own_processes, self._counted_s = count_own(), time.monotonic()
            if self._prepared:
                self._prepared = dataclasses.replace(self._prepared, own_processes=self._own_processes)

    def _hand_over(self, order: _Order, writer: int) -> None:
        """Makes this process the child: a new session, its group and streams, and no other descriptors but its own."""
        os.setsid()
        if self._group and order.is_counted:
            self._group.enter()
        for stream, descriptor in enumerate((*order.streams, None)):
            os.dup2(self._null if descriptor is None else descriptor, stream)
        close_others([writer, *order.handed] + ([self._prepared.ruleset] if self._prepared else []))

    def _confine(self, confinement: Confinement, told: int) -> bool:
        """Confines this process and writes the outcome to `told`; returns whether it is confined."""
        try:
            if self._prepared is None:
                set_limits(confinement, self._own_processes)
                die_with_parent()
            else:
                confine(confinement, self._prepared)
            word = CONFINED
        except (SandboxError, OSError) as error:
            word = str(error)
        os.write(told, word.encode())
        os.close(told)
        return word == CONFINED

    def _end(self) -> _Message:
        children, self._children = {child.pid: child for child in self._children}, []
        try:
            words = _await_words(children.values())
            is_clean = _kill_all(children)
            for child in children.values():
                self._end_count(child)
            ended = [
                {'status': child.status, 'cpu_s': child.cpu_s, 'is_over': child.is_over, 'word': word}
                for child, word in zip(children.values(), words, strict=True)
            ]
        finally:
            for child in children.values():
                os.close(child.told)
        return {'ended': ended} if is_clean else {'fault': 'a process of a child outlives SIGKILL'}


def _await_words(children: Iterable[_Child]) -> list[str]:
    """The children's words on their confinement; '' for a child that ended before, or is silent for too long.

    Waits, because the other child of a check may end it before this one is confined: a kill then would look like a
    fault.
    """
    end_s = time.monotonic() + _CONFINE_S
    words = []
    for child in children:
        poll = select.poll()
        poll.register(child.told, select.POLLIN)
        is_told = poll.poll(max(end_s - time.monotonic(), 0) * 1000)
        words.append(os.read(child.told, 2000).decode() if is_told else '')
    return words


def _kill_all(children: dict[int, _Child]) -> bool:
    """Kills the children; waits until this process has no child or adopted orphan. False if one cannot be killed."""
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
    """Reaps the children that have ended; False if no child is left."""
    try:
        while True:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if not pid:
                return True
            used_s = usage.ru_utime + usage.ru_stime
            if pid in children:
                children[pid].status = status
                children[pid].cpu_s += used_s
            elif children:  # an orphan: it belongs to the answer, the first child
                next(iter(children.values())).cpu_s += used_s
    except ChildProcessError:
        return False


def close_others(kept: Sequence[int]) -> None:
    """Closes all descriptors of this process except the standard streams and `kept`."""
    first = 3
    try:
        for descriptor in [*sorted(kept), _LARGEST_DESCRIPTOR]:
            if first < descriptor:
                close_range(first, descriptor - 1)
            first = descriptor + 1
    except OSError:  # the kernel has no such call, or a filter refuses it
        for descriptor in map(int, os.listdir('/proc/self/fd')):
            if descriptor > 2 and descriptor not in kept:
                with contextlib.suppress(OSError):  # the descriptor of the listing itself
                    os.close(descriptor)


def _forget_package() -> None:
    """Makes a child import from the interpreter from now on, and never from this package."""
    for name in [name for name in sys.modules if name.partition('.')[0] == FOLDER.name]:
        del sys.modules[name]
    sys.path.remove(_ROOT)  # the first entry only: if the package is installed, this is also site-packages, which stays
    sys.path_importer_cache.clear()  # it knows the files of each folder
    linecache.clearcache()
    sys.modules['__main__'] = types.ModuleType('__main__')
    sys.argv[:] = ['']


def main(arguments: Sequence[str]) -> None:
    """Imports the modules, reports {ready}, and serves."""
    descriptor, level, readable, *modules = arguments
    adopt_orphans()
    with keep_hooks():
        imported = {module: importlib.import_module(module) for module in modules}
    for module in imported.values():
        # a fork copies each page that it writes to; code that has run before the fork writes less
        getattr(module, 'warm_up', lambda: None)()
    control = socket.socket(fileno=int(descriptor))
    try:
        confinement = choose_confinement(0, level if level in CONFINING else LANDLOCK, json.loads(readable))
        prepared = prepare(confinement) if level in CONFINING else None
        ignore_file_limit()
    except SandboxError as error:
        control.send(json.dumps({'fault': str(error)}).encode())
        return
    _forget_package()
    gc.collect()
    gc.freeze()
    group = make_group()
    control.send(json.dumps({'ready': True, 'group': group.title if group else ''}).encode())
    _Server(control, confinement, prepared, imported, group).serve()


if __name__ == '__main__':
    main(sys.argv[1:])
