"""The loop on the host: admission, episodes, groups, batches, updates and publications, joined by bounded queues.

It imports no jax and holds no array larger than a trajectory. Every coroutine below is one arrow of the loop.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from areal_jax.control.buffer import TrajectoryBuffer
from areal_jax.control.episode import Episode, Pool, RunningGroup, Workflow
from areal_jax.control.events import EventLog
from areal_jax.control.failures import FailureCount
from areal_jax.control.gate import Bound, HeldTimes, StalenessGate
from areal_jax.control.queues import BoundedQueue
from areal_jax.control.schedule import VersionRing
from areal_jax.control.supervisor import Supervisor
from areal_jax.events import DISK, LEARNER, PUBLISH
from areal_jax.protocols import Channel, Clock, Learner, PromptStream, Verifier
from areal_jax.types import Dropped, Prompt, PublishedWeights, TrajectoryGroup, Verdict, Work, concatenate


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """What the loop does, in plain numbers (config.py has the comments)."""

    steps: int
    group_size: int
    groups_per_update: int
    max_token_age: int | None = None
    over_age: Literal['drop', 'mask', 'off'] = 'off'
    checkpoint_every: int = 0
    max_failed_groups: int = 32


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One published update. Consumer: telemetry."""

    step: int  # the version published
    time_s: float
    groups: Sequence[TrajectoryGroup]
    metrics: Mapping[str, Any]  # of the learner, as they are
    publish_pause_s: float | None  # None: in lock-step engines load weights apart from publications
    buffered: int
    held_s: Mapping[str, float]  # clock seconds in which admission was closed since the last update, by gate.Bound
    dropped: Mapping[str, int]  # by reason, since the start


@dataclasses.dataclass
class _Update:
    """An update on its way from the learner to the engines."""

    version: int
    groups: list[TrajectoryGroup]
    metrics: Mapping[str, Any]
    copy: Any


# step, arrays of the learner, weights of earlier versions (lock-step schedules), run state; on the lane `disk`
SaveCheckpoint = Callable[[int, Any, Mapping[int, Any], Mapping[str, Any]], None]
CopyVersion = Callable[[PublishedWeights], Any]  # the weights as a checkpoint can hold them; on the lane `publish`
PriceUpdate = Callable[[Sequence[TrajectoryGroup]], int]  # tokens of an update, for Work('train')


class Controller:
    """Drives one run; every collaborator is handed in."""

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
        copy_version: CopyVersion,
        ring: VersionRing | None = None,
        observer_state: Callable[[], Mapping[str, Any]] = dict,
    ):
        self._settings, self._clock, self._log, self._supervisor = settings, clock, log, supervisor
        self._stream, self._pool, self._workflow, self._verifier = stream, pool, workflow, verifier
        self._learner, self._channel, self._gate = learner, channel, gate
        self._update_tokens, self._on_step, self._save_checkpoint = update_tokens, on_step, save_checkpoint
        self._observer_state = observer_state  # of whoever listens to the steps: saved at the instant of a snapshot
        self._ring, self._copy_version = ring, copy_version
        self._generated_update: int | None = None  # lock-step: the update whose batch the engines generate
        self._loading = False  # lock-step: the engines are given the version of the next batch
        self._buffer = TrajectoryBuffer()
        self._held = HeldTimes()
        self._running: dict[int, RunningGroup] = {}  # by draw
        self._dropped: collections.Counter[str] = collections.Counter()
        self._trained_version = 0  # of the learner's weights; publication follows
        self._admission_closed = False
        self._verifying = 0
        self._failures = FailureCount(settings.max_failed_groups, 'groups')
        self._saving = False
        self._saved_for_good = False  # nothing of the loop moves after the last checkpoint
        self._admission = clock.event('admission (staleness, memory or checkpoint)')
        self._filled = clock.event('a full batch in the buffer, or a stop')
        self._published = clock.event('publication of the last update')
        self._settled = clock.event('verifications or a load under way')
        self._saved = clock.event('the checkpoint before')
        self.stop_requested = clock.event('stop requested')
        self._finished: BoundedQueue[tuple[RunningGroup, Episode, Verdict]] = BoundedQueue(
            clock, 'episodes to groups', max(1, gate.max_running * settings.group_size)
        )
        self._updates: BoundedQueue[_Update] = BoundedQueue(clock, 'updates to publication', 1)

    async def run(self) -> bool:
        """The loop until `steps` updates are published (True) or a stop is requested and saved (False)."""
        if self._saving:  # resumed: at this instant the checkpoint was being written, which holds up the next one
            self._supervisor.start('save', self._write_checkpoint(self._trained_version, lambda: None))
        self._supervisor.start('groups', self._collect_groups())
        self._supervisor.start('publication', self._publish_updates())
        self._supervisor.start('stop watch', self._watch_stop())
        self._resume_episodes()
        self._supervisor.start('admission', self._admit_by_schedule() if self._ring else self._admit())
        return await self._train()

    # 2 admission

    async def _admit(self) -> None:
        while True:
            while bound := self._closed_by():
                await self._wait_for_admission(bound)
            self._start_group(self._draw())

    def _closed_by(self) -> Bound | None:
        if self._admission_closed:
            return 'stop' if self.stop_requested.is_set() else 'checkpoint'
        return self._gate.closed_by()

    async def _wait_for_admission(self, bound: Bound) -> None:
        self._held.note(bound, self._clock.now())
        self._admission.clear()
        await self._clock.wait(self._admission)

    async def _admit_by_schedule(self) -> None:
        """Lock-step: the batch of one update is generated wholly with the version that the schedule names."""
        assert self._ring is not None
        resumed = self._generated_update  # the engines hold the version of this one already
        for update in range(self._trained_version if resumed is None else resumed, self._settings.steps):
            if update != resumed:
                await self._load_for(update)
            wanted = (update + 1) * self._settings.groups_per_update  # a group that fails leaves the count: refilled
            while self._running or self._gate.admitted < wanted:
                bound = self._closed_by() if self._gate.admitted < wanted else 'schedule'
                if bound is None:
                    self._start_group(self._draw())
                else:
                    await self._wait_for_admission(bound)
        self._held.note('steps', self._clock.now())

    async def _load_for(self, update: int) -> None:
        """Lock-step: every engine gets the version that the batch of this update is generated with."""
        assert self._ring is not None
        version = self._ring.version_for(update)
        while self._admission_closed or self._gate.version < version:
            await self._wait_for_admission('schedule')
        self._held.note('schedule', self._clock.now())
        self._loading = True
        await self._pool.load_weights(self._ring.weights(version))
        self._loading, self._generated_update = False, update
        self._settled.set()

    def _draw(self) -> Prompt:
        prompt = self._stream.draw()
        self._log.write('draw', draw=prompt.draw)
        return prompt

    def _start_group(self, prompt: Prompt) -> None:
        self._gate.admit()
        self._log.write('admit', draw=prompt.draw)
        episodes = [Episode(sample) for sample in range(self._settings.group_size)]
        group = self._running[prompt.draw] = RunningGroup(prompt, self._clock.now(), episodes)
        for episode in episodes:
            self._start_episode(group, episode)

    # 3 generation, 4 reward

    def _start_episode(self, group: RunningGroup, episode: Episode) -> None:
        self._supervisor.start(f'episode {group.prompt.draw}.{episode.sample}', self._run_episode(group, episode))

    async def _run_episode(self, group: RunningGroup, episode: Episode) -> None:
        await self._workflow.run(group.prompt, episode)
        draw, sample = group.prompt.draw, episode.sample
        versions = [segment.policy_version for segment in episode.segments]
        tokens = sum(len(segment.tokens) for segment in episode.segments)
        self._log.write(
            'finish', draw=draw, sample=sample, tokens=tokens, reason=episode.finish_reason, versions=versions
        )
        self._verifying += 1
        answer = concatenate([segment.tokens for segment in episode.segments], np.int32)
        assert episode.finish_reason is not None
        verdict = await self._verifier.verify(group.prompt, answer, episode.finish_reason)
        fields: dict[str, Any] = {'value': verdict.reward, 'label': verdict.label, 'attempts': verdict.attempts}
        self._log.write('reward', draw=draw, sample=sample, **fields)
        await self._finished.put((group, episode, verdict))

    async def _collect_groups(self) -> None:
        """5 buffer: whole groups, with what could not be verified left out."""
        while True:
            group, episode, verdict = await self._finished.get()
            self._verifying -= 1
            group.record(episode, verdict, self._clock.now())
            if group.complete:
                self._finish_group(group)
            if self._verifying == 0:
                self._settled.set()

    def _finish_group(self, group: RunningGroup) -> None:
        draw = group.prompt.draw
        del self._running[draw]
        if group.trajectories:
            self._gate.buffer()
            self._buffer.put(group.group())
            self._log.write('buffer', draw=draw, partial=bool(group.failed))
            self._filled.set()
            self._failures.note_verified()
        else:
            self._gate.drop_running()
            self._note_drop(Dropped(draw, 'verifier_failed', ','.join(group.failed.values())))
            self._failures.note_failed(f'draw {draw}', group.failed.values())
        self._admission.set()

    # 6 packing, 7 update

    async def _train(self) -> bool:
        while self._trained_version < self._settings.steps:
            groups = await self._form_batch()
            if groups is None:
                await self.save_for_good()
                return False
            await self._update(groups)
            if self._is_checkpoint_due():
                await self._publication_of(self._trained_version)
                await self._checkpoint()
        await self._publication_of(self._trained_version)
        if self.stop_requested.is_set():
            await self.save_for_good()
        elif self._ring:  # the engines may stand at an earlier version; an evaluation is of the last one
            await self._pool.load_weights(self._ring.weights(self._trained_version))
        await self._wait_saved()
        return True

    def _is_checkpoint_due(self) -> bool:
        """After every `checkpoint.every` updates, and after the last one."""
        every, trained = self._settings.checkpoint_every, self._trained_version
        return trained == self._settings.steps or (every > 0 and trained % every == 0)

    async def _form_batch(self) -> list[TrajectoryGroup] | None:
        """The lowest draws buffered, once there are enough that are young enough; None when the run shall stop."""
        while True:
            if self.stop_requested.is_set():
                return None
            if self._settings.over_age == 'drop' and self._settings.max_token_age is not None:
                for drop in self._buffer.drop_over_age(self._trained_version, self._settings.max_token_age):
                    self._gate.drop_buffered()
                    self._note_drop(drop)
                    self._admission.set()
            if len(self._buffer) >= self._settings.groups_per_update:
                return self._take_batch()
            self._filled.clear()
            await self._clock.wait(self._filled)

    def _take_batch(self) -> list[TrajectoryGroup]:
        now = self._clock.now()
        groups = [_stamp_consumed(group, now) for group in self._buffer.take(self._settings.groups_per_update)]
        self._gate.consume(len(groups))
        self._log.write('consume', update=self._trained_version + 1, draws=[group.draw for group in groups])
        self._admission.set()
        return groups

    async def _update(self, groups: list[TrajectoryGroup]) -> None:
        version = self._trained_version
        detail = {'update': version + 1}
        work = Work('train', self._update_tokens(groups), detail)
        metrics = await self._clock.run(LEARNER, lambda: self._learner.update(groups, version), work)
        copy = await self._clock.run(LEARNER, lambda: self._learner.publish(version + 1), Work('snapshot', 1, detail))
        self._trained_version = version + 1
        await self._updates.put(_Update(version + 1, groups, metrics, copy))

    # 8 publication

    async def _publish_updates(self) -> None:
        """The learner goes on while the engines receive the weights; admission follows when they decode with them."""
        while True:
            update = await self._updates.get()
            version, copy = update.version, update.copy
            update.copy = None
            published = await self._clock.run(
                PUBLISH, lambda: self._channel.transfer(version, copy), Work('publish', 1, {'version': version})
            )
            del copy
            self._log.write('publish', version=version, manifest=published.manifest_hash)
            pause_s = None
            if self._ring:
                self._channel.release(self._ring.add(published))
            else:
                pause_s = await self._pool.load_weights(published)
                self._channel.release(version)
            self._gate.publish(version)
            self._record_step(update, pause_s)
            self._admission.set()
            self._published.set()

    def _record_step(self, update: _Update, pause_s: float | None) -> None:
        now = self._clock.now()
        step = StepRecord(
            step=update.version,
            time_s=now,
            groups=update.groups,
            metrics=update.metrics,
            publish_pause_s=pause_s,
            buffered=len(self._buffer),
            held_s=self._held.take(now),
            dropped=dict(self._dropped),
        )
        self._on_step(step)

    async def _publication_of(self, version: int) -> None:
        while self._gate.version < version:
            self._published.clear()
            await self._clock.wait(self._published)

    # Stop, checkpoint, resume: see docs/design/checkpoint.md

    async def _watch_stop(self) -> None:
        await self._clock.wait(self.stop_requested)
        self._admission_closed = True
        self._held.note('stop', self._clock.now())
        self._filled.set()

    async def save_for_good(self) -> None:
        """The last checkpoint of a run that was asked to stop; returns when it is written."""
        await self._publication_of(self._trained_version)
        await self._checkpoint()
        await self._wait_saved()

    async def _checkpoint(self) -> None:
        """Stand still between two dispatches, take the whole state at one instant, and write it while going on."""
        if self._saved_for_good:
            return
        await self._wait_saved()
        self._admission_closed = True
        while self._loading:
            self._settled.clear()
            await self._clock.wait(self._settled)
        self._held.note(self._closed_by(), self._clock.now())
        await self._pool.pause()
        while self._verifying:
            self._settled.clear()
            await self._clock.wait(self._settled)
        arrays = await self._clock.run(LEARNER, self._learner.save, Work('snapshot'))
        earlier = await self._copy_earlier_versions()
        self._saving = True
        self._log.write('save', update=self._trained_version)
        save, step, run_state = self._save_checkpoint, self._trained_version, self.snapshot()
        self._supervisor.start('save', self._write_checkpoint(step, lambda: save(step, arrays, earlier, run_state)))
        stopped = self.stop_requested.is_set()
        self._saved_for_good = stopped or self._trained_version == self._settings.steps
        if not stopped:
            self._admission_closed = False
            self._pool.resume()
            self._admission.set()

    async def _copy_earlier_versions(self) -> dict[int, Any]:
        """Lock-step: the weights of the ring by version, without the newest, which the learner's own are."""
        held = self._ring.earlier() if self._ring else []
        if not held:
            return {}
        copy = lambda: {published.version: self._copy_version(published) for published in held}
        return await self._clock.run(PUBLISH, copy, Work('snapshot', len(held)))

    async def _write_checkpoint(self, step: int, write: Callable[[], None]) -> None:
        await self._clock.run(DISK, write, Work('save', 1, {'update': step}))
        self._saving = False
        self._saved.set()

    async def _wait_saved(self) -> None:
        while self._saving:
            self._saved.clear()
            await self._clock.wait(self._saved)

    def snapshot(self) -> dict[str, Any]:
        """The host side at this instant; checkpoint/state.py writes it down."""
        return {
            'version': self._trained_version,
            'clock_s': self._clock.now(),
            'next_seq': self._log.next_seq,
            'next_run': self._log.next_run,
            'stream': self._stream.state(),
            'gate': self._gate.state(),
            'buffer': self._buffer.groups(),
            'running': [group.copy() for group in self._running.values()],
            'order': self._pool.order(),
            'dropped': dict(self._dropped),
            'generated_update': self._generated_update,
            'admission': self._held.state(self._clock.now()),
            'observer': dict(self._observer_state()),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot; call before `run`."""
        self._trained_version, self._saving = state['version'], True
        self._generated_update = state['generated_update']
        self._stream.restore(state['stream'])
        self._gate.restore(state['gate'])
        for group in state['buffer']:
            self._buffer.put(group)
        self._running = {group.prompt.draw: group for group in state['running']}
        self._dropped.update(state['dropped'])
        self._held.restore(state['admission'])
        self._restored_order = [(draw, sample) for _, draw, sample in state['order']]
        self._log.write('restore', update=self._trained_version)

    _restored_order: Sequence[tuple[int, int]] = ()

    def _resume_episodes(self) -> None:
        """Start the open episodes of restored groups in the order in which the engines would have served them."""
        for draw, sample in self._restored_order:
            group = self._running[draw]
            self._start_episode(group, group.episodes[sample])

    def _note_drop(self, drop: Dropped) -> None:
        self._dropped[drop.reason] += 1
        self._log.write('drop', draw=drop.draw, reason=drop.reason, detail=drop.detail)


def _stamp_consumed(group: TrajectoryGroup, now: float) -> TrajectoryGroup:
    stamped = tuple(dataclasses.replace(trajectory, consumed_s=now) for trajectory in group.trajectories)
    return dataclasses.replace(group, trajectories=stamped)
