"""Frictions: faults of large asynchronous systems, injected on purpose (docs/frictions.md).

A friction of the actor changes an answer or its reported log-probs; the others change its reward. The affected answers
and the changes depend only on (seed, draw, sample); whether a prompt pays depends only on (seed, prompt). Nothing
depends on the order in which answers end, so resumed and replayed runs and the arms of a study have the same frictions.
Shapes: G answers of a group, n tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from areal_jax.columns import SAMPLING_LOGPROBS
from areal_jax.control.episode import Episode
from areal_jax.control.event_writer import EventLog
from areal_jax.types import NOT_GENERATED, Prompt, Segment, Trajectory, TrajectoryGroup

CONSTANT, LOGPROBS, TEMPERATURE = ACTORS = ('constant', 'logprobs', 'temperature')
REWARD, UNREWARDED = 'reward', 'unrewarded'
ENGINE = 'friction'  # in place of the engine of an answer whose log-probs do not come from an engine
_DRAWN, _NOISE = 0, 1  # streams of the generator
_WORDS = 4  # words per step of its counter
_BITS = 53  # random bits of a float64 in [0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frictions:
    """The settings of frictions. Shares lie in [0, 1]; only fields of the chosen actor are read."""

    seed: int
    actor: str = CONSTANT  # one of ACTORS
    actor_share: float = 0.0  # of the answers
    actor_token: int = 0  # CONSTANT: replaces every generated token
    actor_nats: float = 1.0  # LOGPROBS: standard deviation of the noise
    actor_temperature: float = 1.0  # TEMPERATURE: temperature at which tokens are drawn
    temperature: float = 1.0  # temperature at which log-probs are reported
    reward_share: float = 0.0  # of the answers
    unrewarded_share: float = 0.0  # of the prompts

    def hits_actor(self, draw: int, size: int) -> np.ndarray:
        """bool [G]: the answers of the group with the friction of the actor."""
        return self._uniforms(draw, size)[:, 0] < self.actor_share

    def redraws_reward(self, draw: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(bool [G], float64 [G]): answers whose reward is replaced, and the new reward's place from least to most."""
        uniforms = self._uniforms(draw, size)
        return uniforms[:, 1] < self.reward_share, uniforms[:, 2]

    def noise(self, draw: int, sample: int, tokens: int) -> np.ndarray:
        """float64 [n], nats: Gaussian noise to add to the log-probs of an answer."""
        generator = np.random.Generator(self._stream(_NOISE, [0, sample, draw, 0]))
        return self.actor_nats * generator.standard_normal(tokens)

    def never_pays(self, prompt_tokens: np.ndarray) -> bool:
        """Whether answers to this prompt always have the reward 0."""
        if not self.unrewarded_share:
            return False
        tokens = np.ascontiguousarray(prompt_tokens, np.int32).tobytes()
        digest = hashlib.sha256(self.seed.to_bytes(8, 'little') + tokens).digest()
        return (int.from_bytes(digest[:8], 'little') >> (64 - _BITS)) / 2**_BITS < self.unrewarded_share

    @property
    def logit_scale(self) -> float:
        """TEMPERATURE: the factor of the logits before a token is drawn at the reported temperature."""
        return self.temperature / self.actor_temperature

    def is_hit(self, draw: int, sample: int) -> bool:
        return bool(self.actor_share and self.hits_actor(draw, sample + 1)[sample])

    def describe(self) -> str:
        """'actor constant 0.1, reward 0.2': the frictions that are on."""
        found = [f'actor {self.actor} {self.actor_share:g}'] if self.actor_share else []
        found += [f'reward {self.reward_share:g}'] if self.reward_share else []
        found += [f'unrewarded {self.unrewarded_share:g}'] if self.unrewarded_share else []
        return ', '.join(found)

    def _uniforms(self, draw: int, size: int) -> np.ndarray:
        """float64 [G, _WORDS] in [0, 1); row g is the same for every `size` above g."""
        words = self._stream(_DRAWN, [0, draw, 0, 0]).random_raw(size * _WORDS)
        return (words.reshape(size, _WORDS) >> np.uint64(64 - _BITS)) / 2**_BITS

    def _stream(self, stream: int, counter: Sequence[int]) -> np.random.Philox:
        """Philox 4x64 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011."""
        key = np.array([self.seed, stream], np.uint64)
        return np.random.Philox(key=key, counter=np.array(counter, np.uint64))


@dataclasses.dataclass(frozen=True)
class Change:
    """One friction of one answer, as in the event log."""

    sample: int
    friction: str  # of ACTORS, or REWARD or UNREWARDED
    before: list[float]  # log-probs of the generated tokens, or the reward
    after: list[float]
    tokens: list[int] | None = None  # CONSTANT: the generated tokens


def disturb_answer(
    frictions: Frictions, draw: int, sample: int, segments: Sequence[Segment]
) -> tuple[list[Segment], Change | None]:
    """Returns the segments as the actor reports them, and the change; None if this answer has no friction.

    Tokens that no policy generated do not change. With TEMPERATURE the tokens were already drawn so (`logit_scale`):
    `before` has the log-probs of the sampled distribution, `after` the reported ones.
    """
    if not frictions.is_hit(draw, sample) or not (generated := [s for s in segments if _is_generated(s)]):
        return list(segments), None
    before = np.concatenate([_sampled(s) if frictions.actor == TEMPERATURE else s.behavior_logprobs for s in generated])
    noise = iter(np.split(_noise(frictions, draw, sample, len(before)), np.cumsum([len(s.tokens) for s in generated])))
    changed = [_disturb(frictions, s, next(noise)) if _is_generated(s) else s for s in segments]
    after = np.concatenate([s.behavior_logprobs for s in changed if _is_generated(s)])
    tokens = None
    if frictions.actor == CONSTANT:
        tokens = np.concatenate([s.tokens for s in generated]).tolist()
    return changed, Change(sample, frictions.actor, before.tolist(), after.tolist(), tokens)


def disturb_rewards(
    frictions: Frictions, groups: Sequence[TrajectoryGroup]
) -> tuple[list[TrajectoryGroup], dict[int, list[Change]]]:
    """Returns the groups of a batch with the rewards that the learner gets, and the changes by draw.

    Prompts that never pay have the reward 0. Then a share of all answers get a reward that is uniform between the
    lowest and the highest of the batch.
    """
    rewards = {group.draw: _pay(frictions, group) for group in groups}
    flat = [reward for paid in rewards.values() for reward in paid]
    least, most = min(flat), max(flat)
    changes: dict[int, list[Change]] = {}
    disturbed = []
    for group in groups:
        trajectories = []
        for rows, paid in zip(group.episodes, rewards[group.draw], strict=True):
            reward, found = _redraw(frictions, rows[0], paid, least, most)
            changes.setdefault(group.draw, []).extend(found)
            trajectories += [dataclasses.replace(row, reward=reward) if found else row for row in rows]
        disturbed.append(dataclasses.replace(group, trajectories=tuple(trajectories)))
    return disturbed, changes


def undisturbed_rewards(frictions: Frictions, groups: Sequence[TrajectoryGroup]) -> Iterator[float]:
    """Yields the verifier's rewards of answers without a friction of the actor, to prompts that pay."""
    for group in groups:
        for trajectory in group.heads:
            if not frictions.is_hit(group.draw, trajectory.sample) and not frictions.never_pays(
                trajectory.prompt.tokens
            ):
                yield trajectory.reward


def _pay(frictions: Frictions, group: TrajectoryGroup) -> list[float]:
    prompt: Prompt = group.trajectories[0].prompt
    if frictions.never_pays(prompt.tokens):
        return [0.0] * len(group.episodes)
    return [trajectory.reward for trajectory in group.heads]


def _redraw(
    frictions: Frictions, trajectory: Trajectory, paid: float, least: float, most: float
) -> tuple[float, list[Change]]:
    """Returns the reward that the learner gets, and the changes that lead to it from the verifier's reward."""
    sample, found = trajectory.sample, []
    if frictions.never_pays(trajectory.prompt.tokens):
        found.append(Change(sample, UNREWARDED, [trajectory.reward], [paid]))
    hits, places = frictions.redraws_reward(trajectory.prompt.draw, sample + 1)
    if not hits[sample]:
        return paid, found
    reward = float(least + places[sample] * (most - least))
    return reward, [*found, Change(sample, REWARD, [paid], [reward])]


def _is_generated(segment: Segment) -> bool:
    return segment.policy_version != NOT_GENERATED


def _sampled(segment: Segment) -> np.ndarray:
    return SAMPLING_LOGPROBS.of(segment.columns, segment.behavior_logprobs)


def _noise(frictions: Frictions, draw: int, sample: int, tokens: int) -> np.ndarray:
    return frictions.noise(draw, sample, tokens) if frictions.actor == LOGPROBS else np.zeros(tokens)


def _disturb(frictions: Frictions, segment: Segment, noise: np.ndarray) -> Segment:
    """The reported form of a segment of generated tokens, [n]."""
    if frictions.actor == CONSTANT:  # without columns: they describe the generated tokens
        tokens = np.full_like(segment.tokens, frictions.actor_token)
        return Segment(tokens, np.zeros_like(segment.behavior_logprobs), segment.policy_version)
    if frictions.actor == LOGPROBS:
        reported = np.minimum(segment.behavior_logprobs + noise.astype(np.float32), np.float32(0.0))
        return dataclasses.replace(segment, behavior_logprobs=reported)
    kept = {name: values for name, values in segment.columns.items() if name != SAMPLING_LOGPROBS.name}
    return dataclasses.replace(segment, columns=kept)


# Applies the frictions in the loop of a run, and logs each with both values.


class Disturbances:
    """Applies and logs the frictions of a run."""

    def __init__(self, frictions: Frictions, log: EventLog):
        self._frictions, self._log = frictions, log

    def disturb_answer(self, draw: int, episode: Episode) -> None:
        """Disturbs an ended answer before it is verified.

        An answer whose log-probs do not come from an engine does not count as its engine's: else the comparison with
        the learner's log-probs would take the engine out of service.
        """
        episode.segments, change = disturb_answer(self._frictions, draw, episode.sample, episode.segments)
        if change:
            episode.engine = ENGINE if change.friction != TEMPERATURE else episode.engine
            self._write(draw, change)

    def disturb_batch(self, groups: Sequence[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], dict[str, float]]:
        """Returns the groups with the learner's rewards, and metrics of the batch (names.FRICTION and a name)."""
        disturbed, changes = disturb_rewards(self._frictions, groups)
        for draw, found in changes.items():
            for change in found:
                self._write(draw, change)
        return disturbed, self._count(groups, changes)

    def _count(self, groups: Sequence[TrajectoryGroup], changes: Mapping[int, Sequence[Change]]) -> dict[str, float]:
        made = [change.friction for found in changes.values() for change in found]
        hit = [self._frictions.is_hit(group.draw, t.sample) for group in groups for t in group.heads]
        rewards = list(undisturbed_rewards(self._frictions, groups))
        return {
            'actor': float(sum(hit)),
            'reward': float(made.count(REWARD)),
            'unrewarded': float(made.count(UNREWARDED)),
            **({'policy_reward': sum(rewards) / len(rewards)} if rewards else {}),
        }

    def _write(self, draw: int, change: Change) -> None:
        self._log.write('friction', None, draw=draw, **dataclasses.asdict(change))
