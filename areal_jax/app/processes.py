"""A run of several processes: process 0 drives the loop, the others follow its learner's commands."""

from __future__ import annotations

import atexit
import pathlib
import secrets
import socket
import time
from typing import Any

import jax
from ml_collections import config_dict

from areal_jax.app.interrupt import ignore_signals
from areal_jax.app.learner import build_learner
from areal_jax.app.model import build_model
from areal_jax.config import TrackedConfig, validate
from areal_jax.errors import LostPeerError
from areal_jax.learning.commands import CommandError, CommandLeader, accept_invitation, follow, invite
from areal_jax.learning.learner import SpmdLearner
from areal_jax.ranges import ConfigError

_BUILT, _ENDED = 'built', 'ended'
_WITNESS = 'areal_jax/witness'  # key of the path of a file that process 0 has written


def join_processes(config: config_dict.ConfigDict, process_id: int | None) -> bool:
    """Makes this one of `distributed.processes` processes, before anything asks for a device; True on followers.

    Without `distributed.coordinator` jax finds the others by itself, as it can on SLURM, GKE and TPU pods.
    Raises LostPeerError for processes that do not find each other, ConfigError for a wrong number of them.
    """
    distributed = config.distributed
    if distributed.processes == 1:
        return False
    validate(config)
    if distributed.coordinator and process_id is None:
        raise ConfigError(
            f'distributed.coordinator={distributed.coordinator!r} needs --process_id, from 0 to '
            f'{distributed.processes - 1}, a different one for each process'
        )
    named = {}
    if distributed.coordinator:
        named = {
            'coordinator_address': distributed.coordinator,
            'num_processes': distributed.processes,
            'process_id': process_id,
        }
    jax.config.update('jax_enable_preemption_service', False)  # it would take SIGTERM away from app/interrupt.py
    try:
        jax.distributed.initialize(**named, initialization_timeout=int(distributed.command_deadline_s))
    except (RuntimeError, ValueError) as error:
        raise LostPeerError(
            f'distributed.coordinator={distributed.coordinator!r}: the processes did not find each other ({error}); '
            'start all of them, and let them reach that address'
        ) from error
    if jax.process_count() != distributed.processes:
        raise ConfigError(
            f'distributed.processes={distributed.processes}, but {jax.process_count()} have come; set their number'
        )
    atexit.register(_tell, _ENDED)  # before jax's own, which waits for the others
    return jax.process_index() > 0


def lead(config: TrackedConfig, learner: SpmdLearner, workdir: pathlib.Path) -> SpmdLearner | CommandLeader:
    """The learner of the whole run for process 0, once all followers are there and see its `workdir`.

    Raises CommandError where one does not come.
    """
    distributed = config.distributed
    if distributed.processes == 1:
        return learner
    deadline_s = distributed.command_deadline_s
    host = distributed.coordinator.rpartition(':')[0] or socket.gethostbyname(socket.gethostname())
    witness = workdir.absolute() / f'.seen_by_all_{secrets.token_hex(8)}'
    witness.touch()
    try:
        _coordination().key_value_set(_WITNESS, str(witness))
        _meet(deadline_s)
    finally:
        witness.unlink()
    leader = CommandLeader(learner, invite(host, deadline_s), deadline_s=deadline_s)
    atexit.register(leader.close)  # also where the run ends before it trains: jax's own waits for the followers
    return leader


def follow_run(config: config_dict.ConfigDict) -> None:
    """What a follower does from start to end.

    Raises CommandError where the others never come, ConfigError where it cannot see process 0's workdir.
    """
    tracked = TrackedConfig(config)
    learner = build_learner(tracked, build_model(tracked))
    deadline_s = config.distributed.command_deadline_s
    _await_built(0, time.monotonic() + deadline_s, deadline_s)
    _require_shared(pathlib.Path(_coordination().blocking_key_value_get(_WITNESS, 1000)))
    _meet(deadline_s)
    leader = accept_invitation()
    # Ctrl-C in a terminal and the end of a SLURM job reach all processes. Process 0 finishes its update and saves, for
    # which it needs the others; it lets them go, and they notice when it is gone.
    ignore_signals()
    follow(learner, leader)


def _meet(deadline_s: float) -> None:
    """Returns when all processes have built their part; raises CommandError where one ended or takes longer.

    Collectives between CPUs give up after 30 s, but a process may read its weights, or process 0 its demonstrations,
    for longer than the others; so they wait for each other before the first one.
    """
    _tell(_BUILT)
    end = time.monotonic() + deadline_s
    for index in range(jax.process_count()):
        _await_built(index, end, deadline_s)
    atexit.unregister(_tell)


def _await_built(index: int, end: float, deadline_s: float) -> None:
    try:
        left_ms = int(1000 * max(end - time.monotonic(), 0.001))
        state = _coordination().blocking_key_value_get(_key(index), left_ms)
    except jax.errors.JaxRuntimeError as error:
        raise CommandError(
            f'process {index} did not build its part of the run within distributed.command_deadline_s='
            f'{deadline_s:g}: its own output says what it does; raise the deadline if it needs longer'
        ) from error
    if state == _ENDED:
        raise CommandError(f'process {index} ended before the run began; its own output says why')


def _require_shared(witness: pathlib.Path) -> None:
    """Every process writes its shards of a checkpoint where process 0 says."""
    if not witness.is_file():
        raise ConfigError(
            f'process {jax.process_index()} does not see what process 0 wrote in --workdir={witness.parent}: for '
            'checkpoints it must be one directory that all processes share under the same path (NFS, a mounted bucket)'
        )


def _tell(state: str) -> None:
    """Tells all processes how far this one is."""
    _coordination().key_value_set(_key(jax.process_index()), state, allow_overwrite=True)


def _key(index: int) -> str:
    return f'areal_jax/process/{index}'


def _coordination() -> Any:
    """Messages between processes that need no collective; jax has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client
