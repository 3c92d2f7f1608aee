"""The admitted groups: runs their episodes through generation and reward until a group is complete.

The controller starts groups and is called for each complete one; workflows generate, the verifier scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import numpy as np

from areal_jax.control.buffer import BoundedQueue
from areal_jax.control.episode import LOST, Episode, RunningGroup, describe_episode
from areal_jax.control.event_writer import EventLog
from areal_jax.control.frictions import Disturbances
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.labels import CODE
from areal_jax.protocols import Clock, Verifier, Workflow
from areal_jax.types import UNSCORED, Prompt, Verdict, concatenate


class UnverifiedError(UserError, RuntimeError):
    """Too many verifications in a row failed; the message names the last failure, its labels and the field."""


class FailureCount:
    """Counts failed verifications in a row: with a scorer that always fails, engines would generate for nothing."""

    def __init__(self, limit: int, unit: str):
        """`unit` names the counted things, in the plural: 'groups'."""
        self._limit, self._unit = limit, unit
        self._in_a_row = 0

    def note_verified(self) -> None:
        self._in_a_row = 0

    def note_failed(self, name: str, labels: Iterable[str]) -> None:
        """Counts one failure: its name ('draw 5') and labels. Raises UnverifiedError at the limit."""
        self._in_a_row += 1
        if self._in_a_row >= self._limit:
            raise UnverifiedError(
                f'{self._in_a_row} {self._unit} in a row (task.max_failed_groups) could not be verified; the last, '
                f'{name}, ended in: {", ".join(sorted(set(labels)))}. The warnings above say what the scorer did: mend '
                'it, or raise task.verifier_deadline_s or task.verifier_memory_mb if it needs more'
            )


class RequestLostError(RuntimeError):
    """No engine finished a request; the iteration over a generation raises it, and the group is dropped."""


class RunningGroups:
    """Groups from their admission to the end of their last episode.

    Args:
      most_episodes: bound on the episodes that wait to be recorded in their groups.
      on_complete: called with each group whose episodes have all ended.
      disturbances: applied to ended answers before they are verified; None = no frictions.
    """

    def __init__(
        self,
        clock: Clock,
        log: EventLog,
        supervisor: Supervisor,
        *,
        workflow: Workflow,
        verifier: Verifier,
        most_episodes: int,
        on_complete: Callable[[RunningGroup], None],
        disturbances: Disturbances | None = None,
    ):
        self._clock, self._log, self._supervisor = clock, log, supervisor
        self._workflow, self._verifier, self._on_complete = workflow, verifier, on_complete
        self._disturbances = disturbances
        self._groups: dict[int, RunningGroup] = {}  # by draw
        self._order: list[tuple[int, int]] = []  # (draw, sample) of restored episodes that were open
        self.not_begun = 0  # episodes whose coroutine has not run yet
        self._unrecorded = 0  # generated answers that are not yet recorded in their groups
        self._settled = clock.event('verifications under way')
        self._finished: BoundedQueue[tuple[RunningGroup, Episode, Verdict | None]] = BoundedQueue(
            clock, 'episodes to groups', max(1, most_episodes)
        )

    def start(self, prompt: Prompt, group_size: int) -> None:
        """Starts the episodes of a new group."""
        episodes = [Episode(sample) for sample in range(group_size)]
        group = self._groups[prompt.draw] = RunningGroup(prompt, self._clock.now(), episodes)
        for episode in episodes:
            self._start_episode(group, episode)

    def copies(self) -> list[RunningGroup]:
        """Copies of the groups at this instant."""
        return [group.copy() for group in self._groups.values()]

    def restore(self, groups: Iterable[RunningGroup], order: Iterable[tuple[str, int, int]]) -> None:
        """Takes the groups of a snapshot; `order` is Pool.order of the same instant."""
        self._groups = {group.prompt.draw: group for group in groups}
        self._order = []
        for engine, draw, sample in order:
            self._order.append((draw, sample))
            if engine:  # the request may have moved to this engine since it began
                self._groups[draw].episodes[sample].engine = engine

    def resume(self) -> None:
        """Starts the open episodes of restored groups in the order in which the engines would have served them.

        Episodes without an open request, as between two turns of a workflow, come last.
        """
        open_ones = [
            (group.prompt.draw, episode.sample)
            for group in self._groups.values()
            for episode in group.episodes
            if episode.sample not in group.finished and episode.sample not in group.failed
        ]
        for draw, sample in dict.fromkeys([*self._order, *open_ones]):
            group = self._groups[draw]
            self._start_episode(group, group.episodes[sample])

    async def collect(self) -> None:
        """Records ended episodes in their groups, for ever."""
        while True:
            group, episode, verdict = await self._finished.get()
            self._unrecorded -= 1
            group.record(episode, verdict, self._clock.now())
            if group.complete:
                del self._groups[group.prompt.draw]
                self._on_complete(group)
            if self._unrecorded == 0:
                self._settled.set()

    async def wait_recorded(self) -> None:
        """Returns when every generated answer is recorded in its group."""
        while self._unrecorded:
            self._settled.clear()
            await self._clock.wait(self._settled)

    def _start_episode(self, group: RunningGroup, episode: Episode) -> None:
        self.not_begun += 1
        self._supervisor.start(f'episode {group.prompt.draw}.{episode.sample}', self._run_episode(group, episode))

    async def _run_episode(self, group: RunningGroup, episode: Episode) -> None:
        self.not_begun -= 1
        lost: Verdict | None = None
        try:
            await self._workflow.run(group.prompt, episode)
        except RequestLostError:
            lost = Verdict(0.0, attempts=0, label=LOST)
        if episode.label in UNSCORED:
            lost = Verdict(0.0, attempts=0, label=episode.label)
        if self._disturbances and lost is None and episode.finish_reason is not None:
            self._disturbances.disturb_answer(group.prompt.draw, episode)
        self._log.write('finish', None, draw=group.prompt.draw, **episode.describe_end(lost.label if lost else ''))
        self._unrecorded += 1
        await self._finished.put((group, episode, lost or await self._verify(group, episode)))

    async def _verify(self, group: RunningGroup, episode: Episode) -> Verdict | None:
        """Returns the verdict on the answer; None for a cancelled answer, which is not verified."""
        if episode.finish_reason is None:
            return None
        answer = concatenate([segment.tokens for segment in episode.segments], np.int32)
        describe = functools.partial(describe_episode, episode)
        verdict = await self._verifier.verify(group.prompt, answer, episode.finish_reason, describe)
        self._log.write(
            'reward', draw=group.prompt.draw, sample=episode.sample, value=verdict.reward, label=verdict.label,
            attempts=verdict.attempts,
        )  # fmt: skip
        if verdict.cpu_s or verdict.label in CODE:
            self._log.write(
                'check', draw=group.prompt.draw, sample=episode.sample, cpu_s=verdict.cpu_s, wall_s=verdict.wall_s,
                waiting=verdict.waiting,
            )  # fmt: skip
        if verdict.audit:
            self._log.write('audit', draw=group.prompt.draw, sample=episode.sample, outcome=verdict.audit)
        return verdict
