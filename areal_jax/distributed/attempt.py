"""Lets the learner processes of a run find each other, through WORKDIR/registry/learner.json. Needs no jax.

Every joint start of the learners is an attempt. Each process registers. Process 0 waits until all are alive, then
invites exactly these processes, by their incarnations, so no process of an earlier attempt joins, whichever executor
starts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable

from areal_jax import files
from areal_jax.config.addresses import find_free_port, join_address
from areal_jax.errors import LostPeerError
from areal_jax.registry import REGISTRY, Entry, Presence, await_living

FILE = 'learner.json'  # in the registry
LOOK_S, REPORT_S = 0.25, 10.0  # between two reads of the registry, between two reports while waiting
_FIX = 'start all learner processes of the run, with one --workdir that they share'


def learner_name(index: int) -> str:
    """The name of a learner process in the registry."""
    return f'learner-{index}'


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of all learner processes."""

    number: int  # from 1
    coordinator: str  # 'host:port' of jax.distributed, in process 0
    members: tuple[str, ...]  # Entry.holder of each process, by index


def read_attempt(workdir: pathlib.Path) -> Attempt | None:
    """Reads the newest attempt; None if there is no record, or no complete one."""
    with contextlib.suppress(files.FileError, KeyError, TypeError, ValueError):
        fields = files.read_json(workdir / REGISTRY / FILE)
        return Attempt(int(fields['attempt']), str(fields['coordinator']), tuple(map(str, fields['members'])))
    return None


def lead_attempt(workdir: pathlib.Path, own: Entry, count: int, host: str, deadline_s: float) -> Attempt:
    """Invites the other processes as soon as all are alive; for process 0.

    Args:
      own: the entry of this process.
      host: the address at which the other processes reach this machine.

    Raises LostPeerError that names the processes that have not registered within the deadline.
    """
    before = read_attempt(workdir)
    number = 1 if before is None else before.number + 1
    names = [learner_name(index) for index in range(1, count)]
    what = f'the learner processes of attempt {number}'
    living = await_living(workdir, names, deadline_s, what=what, fix=_FIX)
    members = (own.holder, *(living[name].holder for name in names))
    attempt = Attempt(number, join_address(host, find_free_port(host)), members)
    record = {'attempt': number, 'coordinator': attempt.coordinator, 'count': count, 'members': list(members)}
    files.write_json(workdir / REGISTRY / FILE, record)
    return attempt


def join_attempt(
    workdir: pathlib.Path,
    own: Entry,
    index: int,
    deadline_s: float,
    *,
    say: Callable[[str], None] = lambda sentence: print(sentence, flush=True),
) -> Attempt:
    """Waits for the invitation of process 0; for every other process.

    Raises LostPeerError if it does not come within the deadline.
    """
    presence, began = Presence(workdir), time.monotonic()
    before, reported = read_attempt(workdir), began
    whom = f'learner 0 of attempt {1 if before is None else before.number + 1}'
    while True:
        attempt = read_attempt(workdir)
        if attempt is not None and attempt.members[index : index + 1] == (own.holder,):
            return attempt
        lives = learner_name(0) in presence.look()
        state = 'which is alive and waits for others' if lives else 'which is not alive'
        waited_s = time.monotonic() - began
        if waited_s >= deadline_s:
            raise LostPeerError(f'waited {waited_s:.0f} s for {whom}, {state}: {_FIX}')
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            say(f'waiting for {whom}, {state}, {waited_s:.0f} s')
        time.sleep(LOOK_S)
