"""The loop on the host: batches, updates, stops and checkpoints around its parts, joined by bounded queues.

app/run/loop.py builds and runs it. Its parts are admission (gate.py, lock_step.py), groups on their way through
generation and reward (groups.py), publication and the writing of checkpoints.
It imports no jax and holds no array larger than a trajectory.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict

from areal_jax import lanes
from areal_jax.control.buffer import BoundedQueue, GroupFilter, TrajectoryBuffer, count_positions, stamp_consumed
from areal_jax.control.episode import CANCELLED, RunningGroup
from areal_jax.control.event_writer import EventLog
from areal_jax.control.frictions import Disturbances
from areal_jax.control.gate import Admission, HeldState, SlotDemand, StalenessGate
from areal_jax.control.groups import FailureCount, RunningGroups
from areal_jax.control.lock_step import LockStep, VersionRing
from areal_jax.control.reallocation import Reallocation, ReallocationState
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import publish_lane
from areal_jax.protocols import Channel, Clock, Learner, Pool, PromptStream, Verifier, Workflow
from areal_jax.types import Dropped, PublishedWeights, TrajectoryGroup, Weights, Work


@dataclasses.dataclass
class Update:
    """An update on its way from the learner to the engines."""

    version: int
    groups: list[TrajectoryGroup]
    metrics: Mapping[str, float]
    copy: Weights  # None after its transfer to the channel
    frictions: Mapping[str, float] = dataclasses.field(default_factory=dict)  # see StepRecord


class Publisher:
    """Publishes one update after another.

    Args:
      install: brings published weights to the engines; returns the lowest version still needed and the longest pause
        of decoding in seconds (None: the engines do not load it now).
      published: called with the update and that pause when its version is published.
      pinned: versions that the channel must not drop yet.
    """

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        channel: Channel,
        install: Callable[[PublishedWeights], Awaitable[tuple[int, float | None]]],
        published: Callable[[Update, float | None], None],
        pinned: Callable[[], Collection[int]],
    ):
        self._clock, self._log, self._channel = clock, log, channel
        self._install, self._published, self._pinned = install, published, pinned
        self._updates: BoundedQueue[Update] = BoundedQueue(clock, 'updates to publication', 1)

    async def put(self, update: Update) -> None:
        """Hands the update over; waits while another update waits."""
        await self._updates.put(update)

    async def run(self) -> None:
        """Publishes for ever. Transfers use the lane of engine 0's fetch, which starts only after the transfer."""
        while True:
            update = await self._updates.get()
            published = await self._transfer(update)
            size = published.size
            self._log.write(
                'publish',
                version=update.version,
                manifest=published.manifest_hash,
                channel=size and size.channel,
                record=size and size.record,
                bytes=size and size.nbytes,
                changed=size and size.changed,
            )
            lowest, pause_s = await self._install(published)
            self._channel.release(lowest, self._pinned())
            self._published(update, pause_s)

    async def _transfer(self, update: Update) -> PublishedWeights:
        copy, update.copy = update.copy, None  # so the last reference ends once the channel has its own copy
        work = Work('publish', 1, {'version': update.version})
        return await self._clock.run(publish_lane(0), lambda: self._channel.transfer(update.version, copy), work)


# Writes checkpoints, one at a time, on the lane `disk` while the loop continues.


class CheckpointWriter:
    """Starts the writing of a checkpoint, and waits for its end."""

    def __init__(self, clock: Clock, supervisor: Supervisor):
        self._clock, self._supervisor = clock, supervisor
        self._writing = False
        self._written = clock.event('the checkpoint before')

    def start(self, update: int, write: Callable[[], None]) -> None:
        """Starts to write the checkpoint that was taken after `update`."""
        self._writing = True
        self._supervisor.start('save', self._write(update, write))

    async def wait(self) -> None:
        """Returns when no checkpoint is being written."""
        while self._writing:
            self._written.clear()
            await self._clock.wait(self._written)

    async def _write(self, update: int, write: Callable[[], None]) -> None:
        await self._clock.run(lanes.DISK, write, Work('save', 1, {'update': update}))
        self._writing = False
        self._written.set()


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """The settings of the loop; config/declarations.py has their meaning and defaults."""

    steps: int
    group_size: int
    groups_per_update: int
    oldest_kept: int | None  # age in versions: a group with an older token is dropped; None = no group is
    checkpoint_every: int
    max_failed_groups: int
    slots: int  # of one engine


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One published update. Consumer: telemetry."""

    step: int  # the version published
    time_s: float
    groups: Sequence[TrajectoryGroup]
    metrics: Mapping[str, float]  # of the learner, unchanged
    publish_pause_s: float | None  # None: in lock-step engines load weights apart from publications
    buffered: int
    held_s: Mapping[str, float]  # clock seconds of closed admission since the last update, by gate.Bound
    idle_slots_s: Mapping[str, float]  # slot-seconds of idle decoding slots meanwhile, by gate.Bound
    dropped: Mapping[str, int]  # by reason, since the start
    filtered_rate: float | None  # see GroupFilter.take_rate; None: no filter
    frictions: Mapping[str, float]  # metrics of the batch, see Disturbances; empty without frictions


class HostState(TypedDict):
    """The host side at one instant; checkpoint/store.py saves it."""

    version: int  # of the learner's weights
    clock_s: float
    next_seq: int  # of the event log
    next_run: int  # number of the next run of a lane
    stream: Mapping[str, Any]
    gate: dict[str, int]
    buffer: list[TrajectoryGroup]
    running: list[RunningGroup]
    order: list[tuple[str, int, int]]  # Pool.order
    dropped: dict[str, int]
    filter: dict[str, int] | None  # GroupFilter.state
    generated_update: int | None  # LockStep.generated_update
    admission: HeldState
    idle_slots: HeldState
    observer: dict[str, Any]
    reallocation: ReallocationState | None
    pool: dict[str, Any]  # Pool.state


# (step, arrays of the learner, weights of earlier versions in lock-step, state of the host); on the lane `disk`
SaveCheckpoint = Callable[[int, Weights, Mapping[int, Weights], HostState], None]
PriceUpdate = Callable[[Sequence[TrajectoryGroup]], int]  # tokens of an update, for Work('train')


class Controller:
    """Drives one run; the caller passes in every part."""

    def __init__(
        self,
        settings: LoopSettings,
        *,
        clock: Clock,
        log: EventLog,
        supervisor: Supervisor,
        stream: PromptStream,
        pool: Pool,
        workflow: Workflow,
        verifier: Verifier,
        learner: Learner,
        channel: Channel,
        gate: StalenessGate,
        update_tokens: PriceUpdate,
        on_step: Callable[[StepRecord], None],
        save_checkpoint: SaveCheckpoint,
        ring: VersionRing | None,
        observer_state: Callable[[], Mapping[str, Any]],
        on_published: Callable[[PublishedWeights], None] = lambda _: None,
        group_filter: GroupFilter | None = None,
        disturbances: Disturbances | None = None,
        reallocation: Reallocation | None = None,
    ):
        self._settings, self._clock, self._log, self._supervisor = settings, clock, log, supervisor
        self._stream, self._pool, self._learner, self._gate = stream, pool, learner, gate
        self._update_tokens, self._on_step, self._save_checkpoint = update_tokens, on_step, save_checkpoint
        self._observer_state = observer_state  # state of the listener to the steps, saved with a snapshot
        self._buffer, self._filter, self._disturbances = TrajectoryBuffer(), group_filter, disturbances
        self._on_published, self._reallocation = on_published, reallocation
        self._dropped: collections.Counter[str] = collections.Counter()
        self._trained_version = 0  # version of the learner's weights; publication lags behind
        self._failures = FailureCount(settings.max_failed_groups, 'groups')
        self._resumed_in_save = self._saved_for_good = False  # after the last checkpoint the loop stays paused
        self.stop_requested = clock.event('stop requested')
        self._filled = clock.event('a full batch in the buffer, or a stop')
        self._published = clock.event('publication of the last update')
        self._groups = RunningGroups(
            clock, log, supervisor, workflow=workflow, verifier=verifier,
            most_episodes=int(min(gate.max_running, gate.buffer_capacity)) * settings.group_size,
            on_complete=self._finish_group, disturbances=disturbances,
        )  # fmt: skip
        demand = SlotDemand(pool, lambda: self._groups.not_begun, slots=settings.slots, group_size=settings.group_size)
        self._admission = Admission(clock, gate, demand, self.stop_requested, self._start_group)
        pool.watch(self._admission.note_room)
        self._lock_step = LockStep(clock, pool, gate, self._admission, ring) if ring else None
        self._publisher = Publisher(clock, log, channel, self._install, self._note_published, pool.pinned_versions)
        self._writer = CheckpointWriter(clock, supervisor)

    async def run(self) -> bool:
        """Runs until `steps` updates are published (True) or a stop is requested and saved (False)."""
        if self._resumed_in_save:  # as in the original run, where this checkpoint was being written: the next waits
            self._writer.start(self._trained_version, lambda: None)
        self._supervisor.start('groups', self._groups.collect())
        self._supervisor.start('publication', self._publisher.run())
        self._supervisor.start('stop watch', self._watch_stop())
        self._groups.resume()
        self._supervisor.start('admission', self._admit())
        return await self._train()

    async def _admit(self) -> None:
        settings = self._settings
        if self._lock_step:
            await self._lock_step.run(self._trained_version, settings.steps, settings.groups_per_update)
        else:
            await self._admission.run()

    # Groups: from admission to the buffer.

    def _start_group(self) -> None:
        prompt, demand = self._stream.draw(), self._admission.demand
        self._log.write('draw', draw=prompt.draw, source=prompt.source or None)
        self._gate.admit()
        by_need = self._admission.is_by_need
        self._log.write(
            'admit',
            draw=prompt.draw,
            open=demand.open_answers() if by_need else None,
            wanted=demand.wanted_answers() if by_need else None,
        )
        self._groups.start(prompt, self._settings.group_size)

    def _finish_group(self, group: RunningGroup) -> None:
        draw = group.prompt.draw
        if detail := group.describe_loss():  # the rest of the group would be biased: long answers are lost more often
            self._gate.drop_running()
            self._note_drop(Dropped(draw, 'engine_lost', detail))
        elif group.finished:
            self._failures.note_verified()
            self._judge(group)
        else:
            self._gate.drop_running()
            reason = CANCELLED if group.all_cancelled else 'verifier_failed'
            self._note_drop(Dropped(draw, reason, ','.join(group.failed.values())))
            if not group.all_cancelled:
                self._failures.note_failed(f'draw {draw}', group.failed.values())
        self._admission.note_change()

    def _judge(self, group: RunningGroup) -> None:
        """Puts a group with scored answers into the buffer, or drops it by task.filter."""
        finished = group.group()
        if self._filter and (drop := self._filter.judge(finished)):
            self._gate.drop_running()
            self._note_drop(drop)
            self._filter.require_signal(drop)
            return
        self._gate.buffer()
        self._buffer.put(finished)
        rewards = [trajectory.reward for trajectory in finished.heads]
        self._log.write('buffer', draw=finished.draw, partial=bool(group.failed), rewards=rewards)
        self._filled.set()

    def _note_drop(self, drop: Dropped) -> None:
        self._dropped[drop.reason] += 1
        self._log.write('drop', draw=drop.draw, reason=drop.reason, detail=drop.detail)

    # Batches and updates.

    async def _train(self) -> bool:
        while self._trained_version < self._settings.steps:
            if self._reallocation and not self.stop_requested.is_set():
                await self._reallocation.pass_boundary(self._trained_version + 1, self._newest_publication)
            groups = await self._form_batch()
            if groups is None:
                await self.save_for_good()
                return False
            await self._update(*self._disturb(groups))
            if self._is_checkpoint_due():
                await self._newest_publication()
                await self._checkpoint()
        await self._newest_publication()
        if self.stop_requested.is_set():
            await self.save_for_good()
        elif self._lock_step:  # the engines may hold an earlier version
            await self._lock_step.load_newest(self._trained_version)
        await self._writer.wait()
        return True

    def _is_checkpoint_due(self) -> bool:
        """Whether `checkpoint.every` divides the update, or it is the last."""
        every, trained = self._settings.checkpoint_every, self._trained_version
        return trained == self._settings.steps or (every > 0 and trained % every == 0)

    async def _form_batch(self) -> list[TrajectoryGroup] | None:
        """Takes the lowest draws once enough young enough groups are buffered; None if a stop is requested."""
        while True:
            if self.stop_requested.is_set():
                return None
            if self._settings.oldest_kept is not None:
                for drop in self._buffer.drop_over_age(self._trained_version, self._settings.oldest_kept):
                    self._gate.drop_buffered()
                    self._note_drop(drop)
                    self._admission.note_change()
            if len(self._buffer) >= self._settings.groups_per_update:
                return self._take_batch()
            self._filled.clear()
            await self._clock.wait(self._filled)

    def _disturb(self, groups: list[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], Mapping[str, float]]:
        return self._disturbances.disturb_batch(groups) if self._disturbances else (groups, {})

    def _take_batch(self) -> list[TrajectoryGroup]:
        now = self._clock.now()
        groups = [stamp_consumed(group, now) for group in self._buffer.take(self._settings.groups_per_update)]
        self._gate.consume(len(groups))
        self._log.write('consume', update=self._trained_version + 1, draws=[group.draw for group in groups])
        self._admission.note_change()
        return groups

    async def _update(self, groups: list[TrajectoryGroup], frictions: Mapping[str, float]) -> None:
        version, learner, run = self._trained_version, self._learner, self._clock.run
        detail = {'update': version + 1}
        work = Work('train', self._update_tokens(groups), detail, size=count_positions(groups))
        metrics = await run(lanes.LEARNER, lambda: learner.update(groups, version), work)
        copy = await run(lanes.LEARNER, lambda: learner.publish(version + 1), Work('snapshot', 1, detail))
        self._trained_version = version + 1
        await self._publisher.put(Update(version + 1, groups, metrics, copy, frictions))

    # Publication; the learner continues meanwhile.

    async def _install(self, published: PublishedWeights) -> tuple[int, float | None]:
        """Publisher's `install`: every engine loads the version; in lock-step it is kept for later batches."""
        lowest, pause_s = published.version, None
        if self._lock_step:
            lowest = self._lock_step.add(published)
        else:
            pause_s = await self._pool.load_weights(published)
            if self._reallocation:
                self._reallocation.published = published
        self._on_published(published)
        return lowest, pause_s

    def _note_published(self, update: Update, pause_s: float | None) -> None:
        self._gate.publish(update.version)
        now = self._clock.now()
        step = StepRecord(
            step=update.version,
            time_s=now,
            groups=update.groups,
            metrics=update.metrics,
            publish_pause_s=pause_s,
            buffered=len(self._buffer),
            held_s=self._admission.held.take(now),
            idle_slots_s=self._admission.idle.take(now),
            dropped=dict(self._dropped),
            filtered_rate=self._filter.take_rate() if self._filter else None,
            frictions=update.frictions,
        )
        self._on_step(step)
        self._admission.note_change()
        self._published.set()

    async def _newest_publication(self) -> None:
        """Returns when every engine has the weights of the last update."""
        while self._gate.version < self._trained_version:
            self._published.clear()
            await self._clock.wait(self._published)

    # Stop, checkpoint, resume: see docs/design/checkpoint.md.

    async def _watch_stop(self) -> None:
        await self._clock.wait(self.stop_requested)
        self._admission.close()
        self._admission.note_bound('stop')
        self._filled.set()

    async def save_for_good(self) -> None:
        """Takes the last checkpoint of a run that was asked to stop; returns when it is written."""
        await self._newest_publication()
        await self._checkpoint()
        await self._writer.wait()

    async def _checkpoint(self) -> None:
        """Pauses the loop, takes the whole state at one instant, and continues while the state is written."""
        if self._saved_for_good:
            return
        await self._writer.wait()
        await self._pause()
        arrays = await self._clock.run(lanes.LEARNER, self._learner.save, Work('snapshot'))
        earlier = await self._lock_step.copy_earlier_versions() if self._lock_step else {}
        self._log.write('save', update=self._trained_version)
        save, step, state = self._save_checkpoint, self._trained_version, self.snapshot()
        self._writer.start(step, lambda: save(step, arrays, earlier, state))
        stopped = self.stop_requested.is_set()
        self._saved_for_good = stopped or self._trained_version == self._settings.steps
        if not stopped:
            self._admission.open()
            self._pool.resume()
            self._admission.note_change()

    async def _pause(self) -> None:
        """Returns when no group can start, every generated token is delivered and every answer is recorded."""
        self._admission.close()
        if self._lock_step:
            await self._lock_step.wait_loaded()
        self._admission.note_bound(self._admission.closed_by())
        await self._pool.pause()
        await self._groups.wait_recorded()

    def snapshot(self) -> HostState:
        """The host side at this instant."""
        return {
            'version': self._trained_version,
            'clock_s': self._clock.now(),
            'next_seq': self._log.next_seq,
            'next_run': self._log.next_run,
            'stream': self._stream.state(),
            'gate': self._gate.state(),
            'buffer': self._buffer.groups(),
            'running': self._groups.copies(),
            'order': self._pool.order(),
            'dropped': dict(self._dropped),
            'filter': self._filter.state() if self._filter else None,
            'generated_update': self._lock_step.generated_update if self._lock_step else None,
            'admission': self._admission.held.state(self._clock.now()),
            'idle_slots': self._admission.idle.state(self._clock.now()),
            'observer': dict(self._observer_state()),
            'reallocation': self._reallocation.state() if self._reallocation else None,
            'pool': self._pool.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a snapshot; call before `run`."""
        self._trained_version, self._resumed_in_save = state['version'], True
        if self._lock_step:
            self._lock_step.generated_update = state['generated_update']
        self._stream.restore(state['stream'])
        self._gate.restore(state['gate'])
        for group in state['buffer']:
            self._buffer.put(group)
        self._groups.restore(state['running'], state['order'])
        self._dropped.update(state['dropped'])
        if self._filter and state.get('filter'):
            self._filter.restore(state['filter'])
        self._admission.held.restore(state['admission'])
        self._admission.idle.restore(state['idle_slots'])
        if self._reallocation:
            self._reallocation.restore(state['reallocation'])
        self._pool.restore(state['pool'])
        self._log.write('restore', update=self._trained_version)
