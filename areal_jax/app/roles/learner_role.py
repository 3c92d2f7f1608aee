"""Learner processes: the followers of process 0 of a run, and the learners of a run in roles."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import jax
from ml_collections import config_dict

from areal_jax.app.export.run_export import build_companions, separates_head
from areal_jax.app.model.model import Model, build_model
from areal_jax.app.parts.channels import open_sender, share_sender
from areal_jax.app.parts.compilations import print_passed_over, print_warnings, use_compilation_cache
from areal_jax.app.parts.learner_builder import build_learner
from areal_jax.app.parts.part_settings import build_mesh
from areal_jax.app.process.ending import ignore_signals
from areal_jax.app.roles.roles import RoleProcess, await_controller, keep_name
from areal_jax.app.workdir.environment import read_xla_flags
from areal_jax.config import TrackedConfig, validate
from areal_jax.config.cluster import LEARNER, LearnerLayout, parse_learner
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import find_channel
from areal_jax.distributed import rendezvous
from areal_jax.distributed.handshake import (
    Attempt,
    Hello,
    Listener,
    digest_config,
    join_attempt,
    key_path,
    lead_attempt,
    load_key,
)
from areal_jax.distributed.remote_learner import follow
from areal_jax.distributed.rendezvous import accept_invitation
from areal_jax.native.compiled_library import keep_blocks
from areal_jax.publication.export import PartWriter
from areal_jax.publication.shard_channel import ShardSender
from areal_jax.registry import Entry


def join_processes(config: config_dict.ConfigDict, process_id: int | None) -> bool:
    """Makes this one of the processes of `cluster.learner`, before a device is used; returns True on followers.

    Raises LostPeerError for processes that do not find each other, ConfigError for a wrong number of processes.
    """
    distributed, processes = config.distributed, parse_learner(config.cluster.learner).processes
    if processes == 1:
        return False
    validate(config)
    return rendezvous.join(distributed.coordinator, processes, process_id, distributed.command_deadline_s)


def follow_run(config: config_dict.ConfigDict) -> None:
    """Runs a follower from start to end.

    Raises CommandError if the others never come, ConfigError if it cannot see process 0's workdir.
    """
    tracked = TrackedConfig(config)
    model = build_model(tracked)
    learner = build_learner(tracked, model, build_mesh(tracked))
    deadline_s = config.distributed.command_deadline_s
    workdir = rendezvous.require_shared_workdir(deadline_s)
    rendezvous.meet(deadline_s)
    leader = accept_invitation(digest_config(tracked.as_dict()), deadline_s)
    # Ctrl-C in a terminal and the end of a SLURM job reach all processes. Process 0 finishes its update and saves,
    # which needs the followers. They end when it dismisses them, or when they notice that it is gone.
    ignore_signals()
    with open_versions(tracked, workdir, model) as versions:
        follow(learner, leader, versions=versions, deadline_s=deadline_s)


@contextlib.contextmanager
def open_versions(
    config: TrackedConfig, workdir: pathlib.Path, model: Model, host: str = '', *, finishes: bool = False
) -> Iterator[PartWriter | ShardSender]:
    """Opens what writes or sends this process's part of versions.

    Args:
      host: see open_sender.
      finishes: this process also writes the files that accompany the weights.
    """
    if find_channel(config.publication.channel).sends_records:
        with contextlib.closing(share_sender(config, open_sender(config, workdir, host))) as sender:
            yield sender
    else:
        companions = build_companions(workdir, model) if finishes else None
        yield PartWriter(model.decoder.config, companions, separate_head=separates_head(config))


# A learner process of a run in roles: joins the others, builds its part, and executes the controller's commands.
#
# It ends with ExitCode.FINISHED when the controller dismisses it, and with STOPPED when a peer is lost: then all
# learner processes are restarted together.


def serve_learner(config: config_dict.ConfigDict, process: RoleProcess) -> None:
    """Runs a learner process from start to end.

    Raises LostPeerError if the others do not come, UserError for errors that the user can fix.
    """
    deadline_s = config.distributed.command_deadline_s
    tracked = TrackedConfig(config)
    with keep_name(process, config) as heartbeat, use_compilation_cache(tracked):
        await_controller(process, config, deadline_s)
        layout = parse_learner(config.cluster.learner)
        attempt = _meet(layout, process, heartbeat.entry, deadline_s)
        _require_devices(layout, config.cluster.learner, process)
        keep_blocks()
        model = build_model(tracked)
        learner = build_learner(tracked, model, build_mesh(tracked))
        model.params = None  # the learner has its copy
        if process.index == 0:
            print_warnings(config)
            print_passed_over('learner.attention', learner.passed_over)
        if len(attempt.members) > 1:
            rendezvous.meet(deadline_s)
        hello = Hello(str(process), digest_config(tracked.as_dict()))
        with Listener(process.host, 0, load_key(key_path(process.workdir)), hello) as listener:
            heartbeat.update(address=listener.address, details=_describe(attempt))
            print(f'{process} of attempt {attempt.number} waits for the controller at {listener.address}', flush=True)
            connection = listener.accept(deadline_s).connection
            # a signal reaches all roles; the controller finishes its update and saves, which needs this process
            ignore_signals()
            reports = process.index == 0
            with open_versions(tracked, process.workdir, model, process.host, finishes=True) as versions:
                follow(learner, connection, 'the controller', versions=versions, reports=reports, listener=listener)


def _meet(layout: LearnerLayout, process: RoleProcess, own: Entry, deadline_s: float) -> Attempt:
    """Joins the processes of the learner, before a device is used."""
    count = layout.processes
    if process.index == 0:
        attempt = lead_attempt(process.workdir, own, count, process.host, deadline_s)
    else:
        attempt = join_attempt(process.workdir, own, process.index, deadline_s)
    if count > 1:
        rendezvous.join(attempt.coordinator, count, process.index, deadline_s, binds=True)
    return attempt


def _require_devices(layout: LearnerLayout, spelled: str, process: RoleProcess) -> None:
    """Raises ConfigError, with both numbers, for a process whose number of devices differs from the config's."""
    needed, found = layout.devices_per_process, jax.local_device_count()
    if found != needed:
        raise ConfigError(
            f'{process} has {found} devices, and {LEARNER}={spelled!r} needs {needed} in each process: '
            'change a size or the number of hosts'
        )


def _describe(attempt: Attempt) -> dict[str, object]:
    """Returns the facts that the controller reads about this process."""
    devices = jax.local_devices()
    return {
        'attempt': attempt.number,
        'devices': [str(device) for device in devices],
        'device_ids': [device.id for device in devices],
        'device_kind': devices[0].device_kind,
        'platform': devices[0].platform,
        'xla_flags': read_xla_flags(devices[0].platform),
    }
