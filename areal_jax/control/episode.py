"""Groups on their way from admission to the buffer: what is running, and what has come of it so far."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from areal_jax.types import FinishReason, Prompt, PublishedWeights, Segment, Trajectory, TrajectoryGroup, Verdict


@dataclasses.dataclass(eq=False)
class Episode:
    """One answer in the making; the workflow appends segments as they arrive."""

    sample: int
    segments: list[Segment] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    engine: str = ''  # where the last segment came from; a resumed episode goes back there

    def append(self, segment: Segment) -> None:
        """Adds the segment; joins it to the last one when both are of one version, and both cut or both not."""
        last = self.segments[-1] if self.segments else None
        if last and last.policy_version == segment.policy_version and _cut(last) == _cut(segment):
            segment = join_segments(self.segments.pop(), segment)
        self.segments.append(segment)


@dataclasses.dataclass(eq=False)
class RunningGroup:
    """An admitted group: its episodes, and the trajectories of those that are finished and verified."""

    prompt: Prompt
    admitted_s: float
    episodes: list[Episode]
    trajectories: dict[int, Trajectory] = dataclasses.field(default_factory=dict)  # by sample
    failed: dict[int, str] = dataclasses.field(default_factory=dict)  # sample -> label of the verifier

    def copy(self) -> RunningGroup:
        """The group at this instant; what happens later does not show in it."""
        episodes = [dataclasses.replace(episode, segments=list(episode.segments)) for episode in self.episodes]
        return RunningGroup(self.prompt, self.admitted_s, episodes, dict(self.trajectories), dict(self.failed))

    @property
    def complete(self) -> bool:
        return len(self.trajectories) + len(self.failed) == len(self.episodes)

    def open_episodes(self) -> list[Episode]:
        done = {*self.trajectories, *self.failed}
        return [episode for episode in self.episodes if episode.sample not in done]

    def record(self, episode: Episode, verdict: Verdict, finished_s: float) -> None:
        """The verdict on an episode: a trajectory, or a failure with its label."""
        assert episode.finish_reason is not None
        if verdict.failed:
            self.failed[episode.sample] = verdict.label
            return
        self.trajectories[episode.sample] = Trajectory(
            prompt=self.prompt,
            sample=episode.sample,
            segments=tuple(episode.segments),
            reward=verdict.reward,
            finish_reason=episode.finish_reason,
            engine=episode.engine,
            admitted_s=self.admitted_s,
            finished_s=finished_s,
        )

    def group(self) -> TrajectoryGroup:
        ordered = tuple(self.trajectories[sample] for sample in sorted(self.trajectories))
        return TrajectoryGroup(self.prompt.draw, ordered)


class Workflow(Protocol):
    """How a prompt becomes an answer: one turn, several turns, tools (rollout/workflow.py)."""

    async def run(self, prompt: Prompt, episode: Episode) -> None:
        """Appends segments to the episode and sets its finish reason and engine; goes on where an episode stands."""
        ...


class Pool(Protocol):
    """The engines, as the controller drives them (rollout/pool.py)."""

    async def load_weights(self, published: PublishedWeights) -> float:
        """Swaps every engine; returns the longest pause of decoding, in seconds."""
        ...

    async def pause(self) -> None:
        """Returns when every engine stands between two dispatches with all partial output delivered."""
        ...

    def resume(self) -> None: ...

    def order(self) -> list[tuple[str, int, int]]:
        """(engine, draw, sample) of every open request, in the order in which engines serve them."""
        ...


def join_segments(first: Segment, second: Segment) -> Segment:
    """Two segments of one policy version and one kind of sampling as one."""
    cut = None
    if first.sampling_logprobs is not None and second.sampling_logprobs is not None:
        cut = np.concatenate([first.sampling_logprobs, second.sampling_logprobs])
    return Segment(
        np.concatenate([first.tokens, second.tokens]),
        np.concatenate([first.behavior_logprobs, second.behavior_logprobs]),
        first.policy_version,
        cut,
    )


def _cut(segment: Segment) -> bool:
    return segment.sampling_logprobs is not None
