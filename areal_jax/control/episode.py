"""Admitted groups until they enter the buffer: their episodes and what has become of each.

The controller drives them, workflows fill episodes (protocols.Episode), checkpoint/state.py writes them down.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.columns import join
from areal_jax.types import FinishReason, Prompt, Segment, Trajectory, TrajectoryGroup, Verdict

CANCELLED = 'cancelled'  # label of an episode whose request was cancelled: it has no answer to verify
LOST = 'lost'  # label of an episode whose request no engine finished: its group is dropped


@dataclasses.dataclass(eq=False)
class Episode:
    """One answer in the making; the workflow appends segments as they arrive."""

    sample: int
    segments: list[Segment] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None  # None: the answer is unfinished, or was cancelled
    engine: str = ''  # the engine of the last request; a resumed episode prefers it

    def append(self, segment: Segment) -> None:
        """Adds the segment; joins it to the last one if both have the same version and the same columns."""
        last = self.segments[-1] if self.segments else None
        if last and last.policy_version == segment.policy_version and last.columns.keys() == segment.columns.keys():
            segment = join_segments(self.segments.pop(), segment)
        self.segments.append(segment)


@dataclasses.dataclass(eq=False)
class RunningGroup:
    """An admitted group: its episodes, and a trajectory or the label of a failure for each that has ended."""

    prompt: Prompt
    admitted_s: float
    episodes: list[Episode]
    trajectories: dict[int, Trajectory] = dataclasses.field(default_factory=dict)  # by sample
    failed: dict[int, str] = dataclasses.field(
        default_factory=dict
    )  # sample -> label of the verdict, CANCELLED or LOST

    def copy(self) -> RunningGroup:
        """The group at this instant; later changes to the group do not reach the copy."""
        episodes = [dataclasses.replace(episode, segments=list(episode.segments)) for episode in self.episodes]
        return RunningGroup(self.prompt, self.admitted_s, episodes, dict(self.trajectories), dict(self.failed))

    @property
    def complete(self) -> bool:
        return len(self.trajectories) + len(self.failed) == len(self.episodes)

    def record(self, episode: Episode, verdict: Verdict | None, finished_s: float) -> None:
        """The end of an episode: a trajectory, or a failure with its label; no verdict = it was cancelled."""
        if verdict is None or verdict.failed:
            self.failed[episode.sample] = CANCELLED if verdict is None else verdict.label
            return
        assert episode.finish_reason is not None
        self.trajectories[episode.sample] = Trajectory(
            prompt=self.prompt,
            sample=episode.sample,
            segments=tuple(episode.segments),
            reward=verdict.reward,
            finish_reason=episode.finish_reason,
            engine=episode.engine,
            admitted_s=self.admitted_s,
            finished_s=finished_s,
            label=verdict.label,
        )

    @property
    def all_cancelled(self) -> bool:
        """Whether every episode was cancelled."""
        return len(self.failed) == len(self.episodes) and set(self.failed.values()) == {CANCELLED}

    def describe_loss(self) -> str:
        """Tokens of the lost answers and of those that were finished; '' where no answer is lost."""
        lost = [sample for sample, label in self.failed.items() if label == LOST]
        if not lost:
            return ''
        tokens = {e.sample: sum(len(segment.tokens) for segment in e.segments) for e in self.episodes}
        kept = [tokens[sample] for sample in tokens if sample not in lost]
        return f'lost answers of {sorted(tokens[sample] for sample in lost)} tokens, finished ones of {sorted(kept)}'

    def group(self) -> TrajectoryGroup:
        ordered = tuple(self.trajectories[sample] for sample in sorted(self.trajectories))
        return TrajectoryGroup(self.prompt.draw, ordered)


def join_segments(first: Segment, second: Segment) -> Segment:
    """Two segments of the same policy version and the same columns as one."""
    return Segment(
        np.concatenate([first.tokens, second.tokens]),
        np.concatenate([first.behavior_logprobs, second.behavior_logprobs]),
        first.policy_version,
        join([first.columns, second.columns]),
    )
