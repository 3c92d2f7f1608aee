"""Which role runs on which node of a SLURM job, on which GPUs, and how many nodes that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.config.cluster import ENGINES, LEARNER
from areal_jax.errors import UserError

from .cluster_run import ClusterRun


@dataclasses.dataclass(frozen=True)
class NodeKind:
    """What is asked of the nodes of one component of a job."""

    partition: str = ''
    constraint: str = ''
    gpus: int = 0  # of a node; 0: its processes compute on the CPU


@dataclasses.dataclass(frozen=True)
class Component:
    """Nodes of one kind: a job without a second component, or a component of a heterogeneous job."""

    kind: NodeKind
    nodes: int


@dataclasses.dataclass(frozen=True)
class Engine:
    """Where one engine runs."""

    index: int
    node: int  # in its component
    gpus: tuple[int, ...]  # of the node; () for all of them, or for none


@dataclasses.dataclass(frozen=True)
class Layout:
    """The nodes of a run; process K of the learner is on node K, the controller beside process 0."""

    components: tuple[Component, ...]
    learner_gpus: tuple[int, ...]  # of each of its nodes; () for all of them, or for none
    engines: tuple[Engine, ...]
    engines_begin: int  # first node of the engines in the last component

    @property
    def nodes(self) -> int:
        return sum(component.nodes for component in self.components)

    @property
    def is_heterogeneous(self) -> bool:
        return len(self.components) > 1


def plan_layout(run: ClusterRun, learner: NodeKind, engine: NodeKind, share_nodes: bool) -> Layout:
    """Gives every process its node; engines fill the GPUs of a node before they take the next one.

    Args:
      share_nodes: engines run on the nodes of the learner, on the GPUs that it leaves.

    Raises UserError for a process that needs more GPUs than a node has, and for too few nodes to share.
    """
    _require_gpus(f'{LEARNER}={run.config.cluster.learner!r}', run.learner.devices, learner)
    if run.engine.count:
        _require_gpus(f'{ENGINES}={run.config.cluster.engines!r}', run.engine.devices, engine)
    if share_nodes:
        return _plan_shared(run, learner, engine)
    per_node = engine.gpus // run.engine.devices if engine.gpus and run.engine.devices else 1
    engines = tuple(
        Engine(index, index // per_node, _choose_gpus(index % per_node, run.engine.devices, engine, per_node > 1))
        for index in range(run.engine.count)
    )
    nodes = -(-run.engine.count // per_node)
    learner_gpus = _choose_gpus(0, run.learner.devices, learner, learner.gpus > run.learner.devices)
    if learner == engine or not nodes:
        component = Component(learner, run.learner.count + nodes)
        return Layout((component,), learner_gpus, engines, run.learner.count)
    return Layout((Component(learner, run.learner.count), Component(engine, nodes)), learner_gpus, engines, 0)


def _plan_shared(run: ClusterRun, learner: NodeKind, engine: NodeKind) -> Layout:
    if learner != engine:
        raise UserError('--share_nodes puts engines on the nodes of the learner: leave out the flags --engine_...')
    nodes, left = run.learner.count, learner.gpus - run.learner.devices
    per_node = -(-run.engine.count // nodes)
    if learner.gpus and per_node * run.engine.devices > left:
        raise UserError(
            f'--share_nodes: {run.engine.count} engines of {run.engine.devices} GPUs do not fit beside the learner, '
            f'which leaves {left} of --gpus_per_node={learner.gpus} free on each of {nodes} nodes: leave out the flag'
        )
    engines = []
    for index in range(run.engine.count):
        first = run.learner.devices + index // nodes * run.engine.devices
        gpus = tuple(range(first, first + run.engine.devices)) if learner.gpus else ()
        engines.append(Engine(index, index % nodes, gpus))
    learner_gpus = _choose_gpus(0, run.learner.devices, learner, bool(run.engine.count))
    return Layout((Component(learner, nodes),), learner_gpus, tuple(engines), 0)


def _choose_gpus(place: int, size: int, kind: NodeKind, is_part: bool) -> tuple[int, ...]:
    """The GPUs of process number `place` on a node; () where it has them all."""
    return tuple(range(place * size, (place + 1) * size)) if kind.gpus and is_part else ()


def _require_gpus(field: str, devices: int, kind: NodeKind) -> None:
    if kind.gpus and devices > kind.gpus:
        raise UserError(
            f'{field} asks for {devices} devices a process, and a node has {kind.gpus} GPUs: use more and smaller '
            'processes, or raise --gpus_per_node (--engine_gpus_per_node for engines) if it has more'
        )


def require_nodes(layout: Layout, available: Sequence[tuple[str, int]]) -> None:
    """Raises UserError where a partition has fewer nodes than the job asks of it.

    Args:
      available: (name of the partition, its nodes) for each component.
    """
    for component, (partition, nodes) in zip(layout.components, available, strict=True):
        if component.nodes > nodes:
            raise UserError(
                f'{LEARNER} and {ENGINES} need {component.nodes} nodes of the partition {partition!r}, which has '
                f'{nodes}: lower one of the two, or name another --partition'
            )
