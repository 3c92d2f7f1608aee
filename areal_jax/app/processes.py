"""A run of several processes: process 0 drives the loop, the others follow its learner's commands."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator

import jax
from ml_collections import config_dict

from areal_jax.app import build
from areal_jax.config import ConfigError, TrackedConfig, validate
from areal_jax.learning.commands import CommandError, CommandLeader, accept_invitation, follow, invite
from areal_jax.learning.learner import SpmdLearner


def join_processes(config: config_dict.ConfigDict, process_id: int | None) -> bool:
    """Makes this one of `distributed.processes` processes, before anything asks for a device; True on followers.

    Without `distributed.coordinator` jax finds the others by itself, as it can on SLURM, GKE and TPU pods.
    Raises ConfigError for processes that do not find each other.
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
    try:
        jax.distributed.initialize(**named, initialization_timeout=int(distributed.command_deadline_s))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f'distributed.coordinator={distributed.coordinator!r}: the processes did not find each other ({error}); '
            'start all of them, and let them reach that address'
        ) from error
    if jax.process_count() != distributed.processes:
        raise ConfigError(
            f'distributed.processes={distributed.processes}, but {jax.process_count()} have come; set their number'
        )
    return jax.process_index() > 0


def lead(config: TrackedConfig, learner: SpmdLearner) -> SpmdLearner | CommandLeader:
    """The learner of the whole run for process 0, once all followers are there; raises CommandError without them."""
    distributed = config.distributed
    if distributed.processes == 1:
        return learner
    deadline_s = distributed.command_deadline_s
    host = distributed.coordinator.rpartition(':')[0] or socket.gethostbyname(socket.gethostname())
    with _expecting('a follower'):
        followers = invite(host, deadline_s)
    return CommandLeader(learner, followers, deadline_s=deadline_s)


def follow_run(config: config_dict.ConfigDict) -> None:
    """What a follower does from start to end; raises CommandError where process 0 never comes."""
    tracked = TrackedConfig(config)
    learner = build.build_learner(tracked, build.build_model(tracked))
    with _expecting('process 0'):
        leader = accept_invitation()
    # Ctrl-C in a terminal and the end of a SLURM job reach all processes. Process 0 finishes its update and saves, for
    # which it needs the others; it lets them go, and they notice when it is gone.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(learner, leader)


@contextlib.contextmanager
def _expecting(who: str) -> Iterator[None]:
    """One sentence where the other side of the first collective ended while it was building the run."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, OSError, EOFError) as error:
        raise CommandError(f'{who} ended before the run began; its own output says why') from error
