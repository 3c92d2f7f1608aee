"""A run of several processes, as its config says: process 0 drives the loop, the others follow its learner's commands.

Reads the section `distributed`; distributed/ does the work.
"""

from __future__ import annotations

import atexit
import pathlib

from ml_collections import config_dict

from areal_jax.app.export.run_export import separates_head
from areal_jax.app.model.model import build_model
from areal_jax.app.parts.learner_builder import build_learner
from areal_jax.app.process.ending import ignore_signals
from areal_jax.config import TrackedConfig, validate
from areal_jax.config.cluster import parse_learner
from areal_jax.distributed import rendezvous
from areal_jax.distributed.follower import follow
from areal_jax.distributed.handshake import digest_config
from areal_jax.distributed.invitation import accept_invitation, invite
from areal_jax.distributed.leader import CommandLeader
from areal_jax.distributed.peers import Peers
from areal_jax.learning.learner import SpmdLearner
from areal_jax.publication.part_writer import PartWriter


def join_processes(config: config_dict.ConfigDict, process_id: int | None) -> bool:
    """Makes this one of the processes of `cluster.learner`, before anything asks for a device; True on followers.

    Raises LostPeerError for processes that do not find each other, ConfigError for a wrong number of them.
    """
    distributed, processes = config.distributed, parse_learner(config.cluster.learner).processes
    if processes == 1:
        return False
    validate(config)
    return rendezvous.join(distributed.coordinator, processes, process_id, distributed.command_deadline_s)


def lead(config: TrackedConfig, learner: SpmdLearner, workdir: pathlib.Path) -> SpmdLearner | CommandLeader:
    """The learner of the whole run for process 0, once all followers are there and see its `workdir`.

    Raises CommandError where one does not come.
    """
    distributed = config.distributed
    if parse_learner(config.cluster.learner).processes == 1:
        return learner
    deadline_s = distributed.command_deadline_s
    host = rendezvous.host_of(distributed.coordinator)
    with rendezvous.witness(workdir):
        rendezvous.meet(deadline_s)
    followers = invite(host, workdir, digest_config(config.as_dict()), deadline_s)
    leader = CommandLeader(learner, Peers(followers, deadline_s=deadline_s))
    atexit.register(leader.close)  # also where the run ends before it trains: jax's own waits for the followers
    return leader


def follow_run(config: config_dict.ConfigDict) -> None:
    """What a follower does from start to end.

    Raises CommandError where the others never come, ConfigError where it cannot see process 0's workdir.
    """
    tracked = TrackedConfig(config)
    model = build_model(tracked)
    learner = build_learner(tracked, model)
    deadline_s = config.distributed.command_deadline_s
    rendezvous.require_shared_workdir(deadline_s)
    rendezvous.meet(deadline_s)
    leader = accept_invitation(digest_config(tracked.as_dict()), deadline_s)
    # Ctrl-C in a terminal and the end of a SLURM job reach all processes. Process 0 finishes its update and saves, for
    # which it needs the others; it lets them go, and they notice when it is gone.
    ignore_signals()
    follow(learner, leader, versions=PartWriter(model.decoder.config, separate_head=separates_head(tracked)))
