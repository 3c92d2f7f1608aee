"""The answers of a simulation: drawn from distributions, or those that a run has logged. See drawn_task.Answers."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable

from areal_jax.config.ranges import ConfigError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event
from areal_jax.simulation import draws
from areal_jax.simulation.lengths import Lengths

_MILLISECONDS = 1000
_LONGER = 1 << 40  # than any limit: an answer that reached the limit of its run would have gone on


@dataclasses.dataclass(frozen=True)
class DrawnAnswers:
    """Lengths, rewards and seconds of a verifier are independent of each other.

    Args:
      answers: tokens; `verifier`: milliseconds.
      success: share of the answers with the reward 1; the others have 0.
    """

    seed: int
    answers: Lengths
    verifier: Lengths
    success: float

    def length(self, draw: int, sample: int) -> int:
        return self.answers.draw(self.seed, draw, sample)

    def reward(self, draw: int, sample: int) -> float:
        return float(draws.uniform(self.seed, draw, sample, 'reward') < self.success)

    def verifier_s(self, draw: int, sample: int) -> float:
        return self.verifier.draw(self.seed, draw, sample, 'verifier') / _MILLISECONDS


@dataclasses.dataclass(frozen=True)
class LoggedAnswers:
    """Those of a run: by draw, then by sample. A later draw has the answers of an earlier one, in turns.

    Args:
      groups: (length, reward) of the samples 0, 1, ... of every draw whose samples have all ended.
      verifier: as of DrawnAnswers.
    """

    groups: tuple[tuple[tuple[int, float], ...], ...]
    seed: int
    verifier: Lengths

    def length(self, draw: int, sample: int) -> int:
        return self._find(draw, sample)[0]

    def reward(self, draw: int, sample: int) -> float:
        return self._find(draw, sample)[1]

    def verifier_s(self, draw: int, sample: int) -> float:
        return self.verifier.draw(self.seed, draw, sample, 'verifier') / _MILLISECONDS

    def _find(self, draw: int, sample: int) -> tuple[int, float]:
        group = self.groups[draw % len(self.groups)]
        return group[sample % len(group)]


def read_groups(
    events: Iterable[Event], workdir: pathlib.Path, groups_per_update: int
) -> tuple[tuple[tuple[int, float], ...], ...]:
    """LoggedAnswers.groups of a log, by draw.

    Raises ConfigError for a log with fewer whole groups than a batch has, or one that does not say lengths.
    """
    lengths: dict[int, dict[int, int]] = {}
    rewards: dict[int, dict[int, float]] = {}
    for event in events:
        if event['kind'] == 'finish' and event['reason'] in ('stop', 'length'):
            is_cut = event['reason'] == 'length'
            lengths.setdefault(event['draw'], {})[event['sample']] = _LONGER if is_cut else event['tokens']
        elif event['kind'] == 'reward':
            rewards.setdefault(event['draw'], {})[event['sample']] = event['value']
    widest = max(map(len, rewards.values()), default=0)
    groups = tuple(
        tuple((lengths[draw][sample], rewards[draw][sample]) for sample in sorted(rewards[draw]))
        for draw in sorted(rewards)
        if len(rewards[draw]) == widest and rewards[draw].keys() <= lengths.get(draw, {}).keys()
    )
    if len(groups) < groups_per_update:
        raise ConfigError(
            f'simulation.answers: {workdir / EVENTS} has {len(groups)} whole groups of answers, fewer than '
            f'learner.groups_per_update={groups_per_update}; name a longer run'
        )
    return groups
