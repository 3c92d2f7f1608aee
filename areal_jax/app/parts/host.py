"""Builds the host side of a run: clock and lanes, pool of engines, energy account, tracker. Imports no jax."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from areal_jax import lanes, protocols
from areal_jax.app.parts.part_settings import build_requirements, find_splits, moves_devices
from areal_jax.app.workdir.run_directory import Report
from areal_jax.app.workdir.run_list import SWEEP
from areal_jax.config import TrackedConfig
from areal_jax.config.agent_fields import PROGRAM
from areal_jax.config.generation import uses_servers
from areal_jax.config.splits import parse_split
from areal_jax.control.clocks.loop import LoopClock
from areal_jax.control.clocks.real import END_OF_WORK_S, RealClock
from areal_jax.control.clocks.virtual import Price, VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import LostPeerError, UserError
from areal_jax.installation import describe_install
from areal_jax.lanes import LEARNER, engine_lane
from areal_jax.plugins import is_own
from areal_jax.protocols import RolloutEngine
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.servers.evaluation import EvaluatedPool
from areal_jax.rollout.servers.keeper import MismatchWatch
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.telemetry.energy_accounting import EnergyAccount
from areal_jax.telemetry.energy_meters import POWERCAP, DeviceSet, Meter, MeterError, RaplMeter, open_nvml
from areal_jax.telemetry.metrics import Line
from areal_jax.telemetry.trackers import FIELD, TRACKERS, TrackedRun, Tracker, TrackerFeed, read_token
from areal_jax.types import TrajectoryGroup, Weights

if TYPE_CHECKING:
    from areal_jax.sharding.rules import Allocation


_MOST_EPISODES = 1 << 16  # may wait for their programs at once: agent.programs bounds the programs
SERVERS_S = 90.0  # margin after the pool's deadline, so that the pool ends the run first: it saves its state


def build_clock(config: TrackedConfig, log: EventLog, start_s: float, *, waits_for_work: bool = False) -> LoopClock:
    """Builds the clock that `run.clock` names.

    Args:
      waits_for_work: at the end, wait for work under way until it counts as hanging (run.stall_timeout_s): the process
        continues after the run, and a thread left behind would write into a workdir that is free again.
    """
    widths = lane_widths(config)
    if config.run.clock == 'real':
        stall_s = config.run.stall_timeout_s + (SERVERS_S if uses_servers(config) else 0.0)
        return RealClock(
            widths, log, stall_s, start_s, max(stall_s, END_OF_WORK_S) if waits_for_work else END_OF_WORK_S
        )
    return VirtualClock(widths, log, unit_prices(config), start_s)


def unit_prices(config: TrackedConfig) -> dict[str, Price]:
    """Returns the prices of the section `virtual`, in seconds per unit."""
    prices = config.virtual
    return {
        **dict.fromkeys(('decode', 'evaluation_decode'), prices.decode_step_s),
        **dict.fromkeys(('prefill', 'evaluation_prefill'), prices.prefill_token_s),
        'train': prices.train_token_s,
        **dict.fromkeys(('publish', 'load', 'snapshot', 'pin', 'reshard'), prices.publish_s),
        'reward': prices.reward_s,
        'tool': prices.tool_s,
        'save': prices.save_s,
        'compile': 0.0,
    }


def lane_widths(config: TrackedConfig) -> dict[str, int]:
    """Returns the lanes of a run, each with its number of parallel jobs."""
    beside = {lanes.EVALUATION_REWARD: 1} if config.evaluation.every else {}
    others = {lanes.LEARNER: 1, lanes.REWARD: config.task.verifier_workers, lanes.DISK: 1}
    return _engine_lanes(config) | beside | others | _agent_lanes(config)


def _agent_lanes(config: TrackedConfig) -> dict[str, int]:
    if config.rollout.workflow == PROGRAM:
        return {lanes.PROGRAM: _MOST_EPISODES}
    return {lanes.TOOL: config.agent.tool_calls} if is_own(config.rollout.workflow) else {}


def _engine_lanes(config: TrackedConfig) -> dict[str, int]:
    """Returns the lanes of engines in this process; for servers, which declare theirs on joining, the shared lanes."""
    if uses_servers(config):
        return {lanes.REGISTRY: 1, lanes.publish_lane(0): 1}
    of_engine = (lanes.engine_lane, lanes.publish_lane)
    most = max(parse_split(split)[1].count for split in find_splits(config))
    beside = {lanes.PREPARE: 1} if moves_devices(config) else {}
    return {lane(index): 1 for index in range(most) for lane in of_engine} | beside


# The pool of engines in this process; server_builder.py has the pool of servers.


def build_pool(
    config: TrackedConfig, engines: Sequence[RolloutEngine], clock: LoopClock, log: EventLog, supervisor: Supervisor
) -> Pool:
    """Builds the pool; raises EngineError if an engine lacks a feature that the run needs."""
    rollout = config.rollout
    return Pool(
        engines, clock, log, supervisor, build_requirements(config),
        slow_versions=rollout.slow_versions, spare_slots=rollout.slots if rollout.slow_engines == 'spare' else 0,
    )  # fmt: skip


class EngineMoves:
    """The part of control.reallocation.DeviceSite that is the same for all engines of this process."""

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor

    def start_engine(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, LocalEngine)
        engine.start(self._supervisor)

    def stop_engine(self, engine: RolloutEngine) -> None:
        assert isinstance(engine, LocalEngine)
        engine.stop()


# Base class for learners that do additional work in their updates.


class LearnerAround:
    """A learner that wraps another one; see protocols.Learner."""

    def __init__(self, learner: protocols.Learner):
        self._learner = learner

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, float]:
        return self._learner.update(groups, version)

    def publish(self, version: int) -> Weights:
        return self._learner.publish(version)

    def save(self) -> Weights:
        return self._learner.save()

    def restore(self, saved: Weights) -> None:
        self._learner.restore(saved)


# The servers of a run: their pool, and the messages to it. server_builder.py, which needs aiohttp, builds the pool.


class EndedBy:
    """The reason why a run without servers ends: `note` asks the run to save its state and stop."""

    def __init__(self, stop: Callable[[], None]):
        self._stop, self._reason = stop, ''

    def note(self, reason: str) -> None:
        self._reason = reason
        self._stop()

    def require_nothing(self) -> None:
        """Raises LostPeerError if the loss of the servers ended the run."""
        if self._reason:
            raise LostPeerError(f'{self._reason}; start servers, and go on with --resume')


class Watch(Protocol):
    """Tells a pool which servers exist."""

    async def run(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class ServersBeside:
    """The servers that answer only the evaluation during training."""

    pool: EvaluatedPool
    watch: Watch


@dataclasses.dataclass(frozen=True)
class Servers:
    """The servers of a run."""

    pool: ServerPool
    watch: Watch
    mismatches: MismatchWatch
    ended_by: EndedBy
    beside: ServersBeside | None = None

    @property
    def whole(self) -> protocols.Pool:
        """The pool that the controller generates with."""
        return self.beside.pool if self.beside else self.pool

    def start(self, supervisor: Supervisor) -> None:
        self.pool.start()
        supervisor.start('registry', self.watch.run())
        if self.beside:
            supervisor.start('registry of evaluation', self.beside.watch.run())

    async def close(self) -> None:
        """Resumes engines that the run has paused, and disconnects from the servers."""
        await self.pool.close()
        if self.beside:
            await self.beside.pool.evaluation.close()

    def note_update(self, step: int, metrics: Line) -> None:
        """Takes an engine out of service if its log-probs differ from the learner's."""
        self.mismatches.note_update(metrics)


# The energy account of a run, from telemetry.energy and the devices of the run.


_VIRTUAL = "No joules: run.clock='virtual' models the seconds of a run, and no meter measures modelled seconds."
_ELSEWHERE = (
    'No joules: learner or engines compute in other processes, and their devices are neither measured nor modelled '
    'from here.'
)


_NO_CHIP = 'No joules: the prices of this simulation name no chip.'


@dataclasses.dataclass(frozen=True)
class UsedDevices:
    """The devices of learner and engines."""

    sets: tuple[DeviceSet, ...]
    has_counters: bool = False  # they are GPUs, which NVML may know
    gpus: tuple[tuple[int, str], ...] | None = None  # CUDA's number and name; None: some belong to another process
    simulated: bool = False  # nothing can be measured, and modelled joules follow from modelled seconds


def group_devices(uses: Iterable[tuple[Hashable, str, str]]) -> tuple[DeviceSet, ...]:
    """Groups (device, kind, lane that uses it) into sets of devices with equal kind and lanes."""
    lanes: dict[tuple[Hashable, str], set[str]] = collections.defaultdict(set)
    for device, kind, lane in uses:
        lanes[device, kind].add(lane)
    counts = collections.Counter((kind, frozenset(own)) for (_, kind), own in lanes.items())
    return tuple(DeviceSet(*key, count) for key, count in counts.items())


def list_devices(allocation: Allocation, process: int) -> UsedDevices:
    """Lists the devices of a run whose learner and engines are in this process, which jax numbers `process`."""
    uses = [(device, LEARNER) for device in allocation.learner.devices.flat]
    uses += [(device, engine_lane(index)) for index, own in enumerate(allocation.engines) for device in own]
    used = dict.fromkeys(device for device, _ in uses)
    has_counters = all(device.platform not in ('cpu', 'tpu') for device in used)
    gpus: tuple[tuple[int, str], ...] | None = None
    if has_counters and all(device.process_index == process for device in used):
        gpus = tuple((int(device.local_hardware_id or 0), device.device_kind) for device in used)
    sets = group_devices((device, device.device_kind, lane) for device, lane in uses)
    return UsedDevices(sets, has_counters, gpus)


def build_energy(
    config: TrackedConfig, list_used: Callable[[], UsedDevices | None], powercap: pathlib.Path | None = None
) -> EnergyAccount | None:
    """Builds the energy account; None if telemetry.energy is 'off'.

    `list_used` returns the devices of the run, None if learner or engines are in other processes.
    """
    if config.telemetry.energy == 'off':
        return None
    if (used := list_used()) is None:
        return EnergyAccount((), (), _warn, note=_ELSEWHERE)
    if used.simulated:
        return EnergyAccount(used.sets, (), _warn, note='' if used.sets else _NO_CHIP)
    if config.run.clock == 'virtual':
        return EnergyAccount((), (), _warn, note=_VIRTUAL)
    meters, reasons = open_meters(used, powercap or POWERCAP)
    return EnergyAccount(used.sets, meters, _warn, reasons=reasons)


def open_meters(used: UsedDevices, powercap: pathlib.Path) -> tuple[list[Meter], list[str]]:
    """Returns (the meters that can be read here, why each of the others cannot)."""
    meters: list[Meter] = []
    reasons: list[str] = []
    if used.has_counters:
        try:
            meters.append(_open_nvml(used.gpus))
        except MeterError as error:
            reasons.append(str(error))
    try:
        meters.append(RaplMeter(powercap))
    except MeterError as error:
        reasons.append(str(error))
    return meters, reasons


def _open_nvml(gpus: Sequence[tuple[int, str]] | None) -> Meter:
    if gpus is None:
        raise MeterError('NVML: some GPUs belong to other processes')
    try:
        library: Any = importlib.import_module('pynvml')
    except ImportError as error:
        raise MeterError(f'NVML: the package nvidia-ml-py is not installed, {describe_install("energy")}') from error
    return open_nvml(library, gpus, os.environ.get('CUDA_VISIBLE_DEVICES'))


def _warn(sentence: str) -> None:
    print(f'warning: {sentence}', file=sys.stderr, flush=True)


# The tracker of a run, built from its config, and the numbers that a finished run sends to it.


_PROJECT = 'areal_jax'
# paths in report.json: reinforcement learning, then supervised training
_HEADLINE = (
    'steps', 'wall_seconds', 'reward.first', 'reward.last', 'accuracy.greedy.before.mean', 'accuracy.greedy.after.mean',
    'accuracy.sampled.before.mean', 'accuracy.sampled.after.mean', 'accuracy.sampled.gain.mean',
    'accuracy.sampled.gain.low', 'accuracy.sampled.gain.high', 'token_age.mean', 'tokens.generated', 'tokens.trained',
    'throughput.generate_tokens_per_second', 'throughput.train_tokens_per_second', 'peak_memory_bytes',
    'train_nll.first', 'train_nll.last', 'epochs', 'trained_tokens',
)  # fmt: skip


def build_tracker(config: TrackedConfig) -> Tracker | None:
    """Imports the library that telemetry.tracker names; None for 'none'. Raises UserError if the import fails."""
    kind = config.telemetry.tracker
    if kind == 'none':
        return None
    try:
        return TRACKERS[kind]()
    except Exception as error:  # an installation that is broken may raise anything
        said = ' '.join(str(error).split())
        raise UserError(
            f'{FIELD}={kind!r}: the package {kind} cannot be imported ({type(error).__name__}: {said}); install it '
            f"again with pip install 'areal_jax[{kind}]', or --config.{FIELD}=none"
        ) from error


def build_feed(tracker: Tracker, config: TrackedConfig, workdir: pathlib.Path) -> TrackerFeed:
    """Builds the feed from a run's workdir to the tracker; raises FileError for a damaged tracker.json."""
    kind = config.telemetry.tracker
    config.note_used(('telemetry.tracker_answers',))  # the report reads it from config.json
    project = config.telemetry.project or os.environ.get(tracker.project_variable) or _PROJECT
    own = workdir.resolve()
    run = TrackedRun(
        project=project,
        name=own.name,
        group=own.parent.name if (own.parent / SWEEP).exists() else '',
        token=read_token(workdir, kind, project) or secrets.token_hex(4),
        workdir=own,
        config=config.as_dict(),
    )
    return TrackerFeed(tracker, kind, run)


def headline(report: Report) -> dict[str, float]:
    """Returns the numbers of a report by which runs are compared, named 'summary/accuracy/sampled/gain/mean'."""
    found = {}
    for path in _HEADLINE:
        value: object = report
        for key in path.split('.'):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, (int, float)):
            found[f'summary/{path.replace(".", "/")}'] = float(value)
    held_out = report.get('held_out_nll') or {}
    if pairs := report.get('held_out_pairs'):
        last = pairs[max(pairs, key=int)]
        found['summary/held_out_pair_accuracy/last'] = last['pair_accuracy']
    measured: Sequence[float] = [nll for nll in held_out.values() if nll is not None]
    return found | ({'summary/held_out_nll/last': measured[-1]} if measured else {})
