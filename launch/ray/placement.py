"""A group of processes on a Ray cluster: its bundles, its actors, and whether they are there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import ray
import ray.exceptions
import ray.util
import ray.util.tpu
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .actor import RoleActor, State
from .plan import Group
from .reservation import Reservation
from .supervision import LostGroupError

ATTEMPT_S = 5.0  # of one attempt to reserve a slice
_ANSWER_S = 10.0  # for one look at an actor
PATIENCE_S = 60.0  # with an actor that does not answer
_VERSIONS = {'v5e': 'v5litepod'}  # where Ray has another name for a generation
_TOPOLOGY_LABEL, _WORKER_LABEL = 'ray.io/tpu-topology', 'ray.io/tpu-worker-id'


class PlacedGroup:
    """The placement group and the actors of a group. Made again, as a whole, when one of its nodes is lost.

    Args:
      logs: folder of the logs of all roles.
      host: address of all roles; '' = each one's node.
    """

    def __init__(self, group: Group, *, logs: str, host: str, restarts: int):
        self._group, self._logs, self._host, self._restarts = group, logs, host, restarts
        self._actors: list[ray.actor.ActorHandle] = []
        self._silent_s: float | None = None  # since when an actor has not answered
        self._ready: ray.ObjectRef | None = None  # there when the bundles are
        self._reservation = Reservation(lambda: _reserve(group), lambda reserved: reserved[1]())

    def is_reserved(self) -> bool:
        """Whether Ray has a slice of TPUs for it, or needs none."""
        return self._reservation.find() is not None

    def is_placed(self) -> bool:
        """Starts the actors when the bundles are there; raises LostGroupError if a node was lost meanwhile."""
        if not self._actors:
            reserved = self._reservation.find()
            if reserved is None:
                return False
            if self._ready is None:
                self._ready = reserved[0].ready()
            ready, _ = ray.wait([self._ready], timeout=0)
            if not ready:
                return False
            try:
                ray.get(self._ready)
            except ray.exceptions.RayError as error:
                raise LostGroupError(_find_cause(error)) from error
            self._actors = [self._start(reserved[0], index) for index in range(len(self._group.processes))]
        return True

    def look(self) -> list[State]:
        """Of each process; [] where a look fails, as when an actor cannot reach its folder of logs for a moment.

        Raises LostGroupError where an actor has died, or where looks have failed for long.
        """
        references = [actor.look.remote() for actor in self._actors]
        try:
            states: list[State] = ray.get(references, timeout=_ANSWER_S)
        except (
            ray.exceptions.ActorUnavailableError,
            ray.exceptions.GetTimeoutError,
            ray.exceptions.RayTaskError,
        ) as error:
            self._silent_s = self._silent_s or time.monotonic()
            if time.monotonic() - self._silent_s > PATIENCE_S:
                raise LostGroupError(f'no answer for {PATIENCE_S:g} s: {_find_cause(error)}') from error
            return []
        except ray.exceptions.RayError as error:  # not only RayActorError: too little memory has an error of its own
            raise LostGroupError(f'an actor died: {_find_cause(error)}') from error
        self._silent_s = None
        return states

    def stop(self) -> None:
        """SIGTERM to all roles."""
        for actor in self._actors:
            actor.stop.remote()

    def remove(self) -> None:
        """Ends all roles at once and gives the bundles back."""
        references = [actor.kill.remote() for actor in self._actors]
        for reference in references:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(reference, timeout=_ANSWER_S)
        for actor in self._actors:
            ray.kill(actor)
        self._reservation.let_go()

    def _start(self, placement: PlacementGroup, index: int) -> ray.actor.ActorHandle:
        process, bundle = self._group.processes[index], dict(self._group.bundle)
        strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=index)
        cpus, gpus = bundle.pop('CPU'), bundle.pop('GPU', 0)
        actor = ray.remote(RoleActor).options(
            num_cpus=cpus, num_gpus=gpus, resources=bundle, scheduling_strategy=strategy, max_restarts=0
        )
        return actor.remote(
            process.name,
            process.command,
            dict(self._group.environment),
            os.getcwd(),
            self._logs,
            host=self._host,
            restarts=self._restarts,
        )


def _reserve(group: Group) -> tuple[PlacementGroup, Callable[[], None]] | None:
    """(placement group, what removes it); None where the cluster has no such slice now."""
    if group.slice is None:
        placement = ray.util.placement_group([dict(group.bundle) for _ in group.processes], strategy='SPREAD')
        return placement, lambda: ray.util.remove_placement_group(placement)
    found = group.slice
    if found.hosts > 1:  # process K on host K, as libtpu numbers them
        labels = [{_WORKER_LABEL: str(index)} for index in range(found.hosts)]
    else:  # a host of a larger slice has as many chips, and must not be taken for it
        labels = [{_TOPOLOGY_LABEL: found.topology}]
    try:
        slices = ray.util.tpu.slice_placement_group(
            topology=found.topology,
            accelerator_version=_VERSIONS.get(found.generation, found.generation),
            chips_per_vm=found.chips_per_host,
            resources_per_bundle=dict(group.bundle),
            bundle_label_selector=labels,
            head_reservation_timeout_s=ATTEMPT_S,
        )
    except (RuntimeError, TimeoutError, ray.exceptions.RayError):
        return None
    return slices.placement_group, slices.shutdown


def describe_shortage(group: Group) -> str:
    """One sentence on what the group asks for and what the cluster has."""
    total = {name: number for name, number in ray.cluster_resources().items() if name in ('CPU', 'GPU', 'TPU')}
    has = ', '.join(f'{name}: {number:g}' for name, number in sorted(total.items()))
    nodes = sum(1 for node in ray.nodes() if node['Alive'])
    return (
        f'{str(group).splitlines()[0]} cannot be placed: the cluster has {nodes} nodes with {{{has}}} in all; add '
        'nodes, or lower cluster.learner or cluster.engines'
    )


def _find_cause(error: Exception) -> str:
    """The line of Ray's message that says why: the one after the traceback, or after the facts about the actor."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    after = 1 + max((number for number, line in enumerate(lines) if line[0].isspace()), default=-1)
    return lines[min(after, len(lines) - 1)].strip()
