"""The answers of a simulation: drawn from distributions, or taken from the log of a run. See drawn_task.Answers."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from areal_jax.config.drawn_lengths import Lengths, Mixture, uniform
from areal_jax.config.fields import ConfigError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event, FinishEvent
from areal_jax.report.event_log import lane_intervals
from areal_jax.types import NOT_GENERATED

_REACH, _STEP = 6.0, 0.01  # of the grid of normal numbers
_RESTS = 4000  # steps of the grid of remaining lengths
_PROMPTS = 64  # nodes of the grid of prompts


@dataclasses.dataclass(frozen=True)
class GroupMoments:
    """Length moments of G answers to one prompt, in tokens, after lengths are cut; L_max is the group's longest."""

    mean: float  # E[L]
    second: float  # E[L^2]
    longest: float  # E[L_max]
    product: float  # E[L L_max]

    @property
    def tail(self) -> float:
        """M_tail = E[L_max] / E[L]: the time a group holds its place, over the time an answer holds its slot."""
        return self.longest / self.mean

    @property
    def token_tail(self) -> float:
        """kappa = (E[L L_max] - E[L^2] / 2) / E[L]^2: the time a token waits for its group, in mean lengths."""
        return (self.product - self.second / 2) / self.mean**2

    @property
    def live_position(self) -> float:
        """E[L^2] / (2 E[L]): the mean tokens of a running answer; long answers count more, since they run longer."""
        return self.second / (2 * self.mean)


def group_moments(lengths: Lengths, size: int, draw: int = 0) -> GroupMoments:
    """Moments of a group of `size` answers, with the length distribution at that draw."""
    values, probabilities = _grid(lengths, draw)
    rows = np.array([_moments(value, probabilities, size) for value in values])
    mean, second, longest, product = np.average(rows, axis=0, weights=_prompt_weights(len(values)))
    return GroupMoments(float(mean), float(second), float(longest), float(product))


def rests(lengths: Lengths, rows: int, draw: int = 0) -> tuple[float, float]:
    """(E[R], E[max R]) in tokens: the mean remaining length of a running answer, and of the longest of `rows` answers.

    An answer seen at a random moment of its run has P(R <= r) = E[min(L, r)] / E[L].
    """
    values, probabilities = _grid(dataclasses.replace(lengths, group_share=0.0), draw)
    tokens = values[0]
    ends = np.linspace(0, tokens.max(), _RESTS + 1)
    order = np.argsort(tokens)
    v, p = tokens[order], probabilities[order]
    at_most = np.searchsorted(v, ends, side='right')
    below, sum_below = np.append(0, np.cumsum(p)), np.append(0, np.cumsum(v * p))
    mean = v @ p
    done = (sum_below[at_most] + ends * (1 - below[at_most])) / mean  # P(R <= r)
    return float((v**2 @ p) / (2 * mean)), float(np.trapezoid(1 - done**rows, ends))


def _moments(values: np.ndarray, probabilities: np.ndarray, size: int) -> tuple[float, float, float, float]:
    """(E[L], E[L^2], E[L_max], E[L L_max]) of `size` independent draws from [n] values: exact, ties included."""
    order = np.argsort(values)
    v, p = values[order], probabilities[order]
    below, sum_below = np.cumsum(p), np.cumsum(v * p)  # P(L <= v), E[L; L <= v]
    longest = v @ np.diff(below**size, prepend=0)
    product = v @ np.diff(sum_below * below ** (size - 1), prepend=0)
    return float(v @ p), float(v**2 @ p), float(longest), float(product)


def _grid(lengths: Lengths, draw: int) -> tuple[np.ndarray, np.ndarray]:
    """(float64 [prompts, n] lengths, float64 [n] probabilities); `_prompt_weights` has the weights of the prompts."""
    numbers = np.arange(-_REACH, _REACH + _STEP / 2, _STEP)
    density = np.exp(-(numbers**2) / 2)
    density /= density.sum()
    found = lengths.at(draw)
    weights, parts = (found.weights, found.parts) if isinstance(found, Mixture) else ((1.0,), (found,))
    prompts = _prompt_nodes(lengths.group_share)
    own = np.sqrt(1 - lengths.group_share) * numbers
    values = [[lengths.cut(part.quantile(x + y)) for part in parts for y in own] for x in prompts]
    return np.array(values, np.float64), np.concatenate([weight * density for weight in weights])


def _prompt_nodes(group_share: float) -> np.ndarray:
    """float64 [prompts]: the numbers that prompts add to the normal number of an answer."""
    if not group_share:
        return np.zeros(1)
    return np.sqrt(2 * group_share) * np.polynomial.hermite.hermgauss(_PROMPTS)[0]


def _prompt_weights(prompts: int) -> np.ndarray:
    return np.ones(1) if prompts == 1 else np.polynomial.hermite.hermgauss(_PROMPTS)[1]


_MILLISECONDS = 1000
_LONGER = 1 << 40  # above any limit: an answer that reached the limit of its run would have continued


@dataclasses.dataclass(frozen=True)
class DrawnAnswers:
    """Draws lengths, rewards and seconds of a verifier, independently of each other.

    Args:
      answers: tokens of a turn; `results`: tokens that a tool returns; `verifier`, `tool`: milliseconds.
      success: share of the answers with the reward 1; the others have 0.
      episode: number of turns; None: the answers are not from agents.
    """

    seed: int
    answers: Lengths
    verifier: Lengths
    success: float
    results: Lengths
    tool: Lengths
    episode: Lengths | None = None

    @property
    def of_agents(self) -> bool:
        return self.episode is not None

    def turns(self, draw: int, sample: int) -> int:
        return 1 if self.episode is None else self.episode.draw(self.seed, draw, sample, 'turns')

    def length(self, draw: int, sample: int, turn: int = 0) -> int:
        return self.answers.draw(self.seed, draw, sample, index=turn)

    def result(self, draw: int, sample: int, call: int) -> int:
        return self.results.draw(self.seed, draw, sample, 'result', call)

    def tool_s(self, draw: int, sample: int, call: int) -> float:
        return self.tool.draw(self.seed, draw, sample, 'tool', call) / _MILLISECONDS

    def reward(self, draw: int, sample: int) -> float:
        return float(uniform(self.seed, draw, sample, 'reward') < self.success)

    def verifier_s(self, draw: int, sample: int, attempt: int = 0) -> float:
        return self.verifier.draw(self.seed, draw, sample, 'verifier', attempt) / _MILLISECONDS


class LoggedAnswer(NamedTuple):
    """An answer of a run; of an agent, its whole episode."""

    turns: tuple[int, ...]  # tokens of each turn
    reward: float
    results: tuple[int, ...] = ()  # tokens between two turns
    tools_s: float | None = None  # seconds of all calls of tools; None: the log has none

    @property
    def length(self) -> int:
        """Tokens of the last turn."""
        return self.turns[-1]


Groups = tuple[tuple[LoggedAnswer, ...], ...]  # by draw, then by sample


@dataclasses.dataclass(frozen=True)
class LoggedAnswers:
    """The answers of a run, by draw, then by sample. Draws beyond the last logged group start again from the first.

    Args:
      groups: samples 0, 1, ... of every draw whose samples have all ended.
      verifier, tool: as in DrawnAnswers; `tool` is used for episodes whose calls the log does not have.
    """

    groups: Groups
    seed: int
    verifier: Lengths
    tool: Lengths

    @property
    def of_agents(self) -> bool:
        return any(len(answer.turns) > 1 for group in self.groups for answer in group)

    def turns(self, draw: int, sample: int) -> int:
        return len(self._find(draw, sample).turns)

    def length(self, draw: int, sample: int, turn: int = 0) -> int:
        turns = self._find(draw, sample).turns
        return turns[min(turn, len(turns) - 1)]

    def result(self, draw: int, sample: int, call: int) -> int:
        results = self._find(draw, sample).results
        return results[min(call, len(results) - 1)]

    def reward(self, draw: int, sample: int) -> float:
        return self._find(draw, sample).reward

    def verifier_s(self, draw: int, sample: int, attempt: int = 0) -> float:
        return self.verifier.draw(self.seed, draw, sample, 'verifier', attempt) / _MILLISECONDS

    def tool_s(self, draw: int, sample: int, call: int) -> float:
        """Divides the seconds of the episode's calls equally over its tool turns, which may have several calls each."""
        found = self._find(draw, sample)
        if found.tools_s is None:
            return self.tool.draw(self.seed, draw, sample, 'tool', call) / _MILLISECONDS
        return found.tools_s / (len(found.turns) - 1)

    def _find(self, draw: int, sample: int) -> LoggedAnswer:
        group = self.groups[draw % len(self.groups)]
        return group[sample % len(group)]


def read_groups(events: Sequence[Event], workdir: pathlib.Path, groups_per_update: int) -> Groups:
    """Reads LoggedAnswers.groups from a log.

    Raises ConfigError for a log with fewer whole groups than a batch has, or with episodes of several rows.
    """
    ends: dict[int, dict[int, FinishEvent]] = {}
    rewards: dict[int, dict[int, float]] = {}
    for event in events:
        if event['kind'] == 'finish' and event['reason'] in ('stop', 'length', 'turns'):
            ends.setdefault(event['draw'], {})[event['sample']] = event
        elif event['kind'] == 'reward':
            rewards.setdefault(event['draw'], {})[event['sample']] = event['value']
    tools_s, widest = _sum_tools(events), max(map(len, rewards.values()), default=0)

    def read(draw: int, sample: int) -> LoggedAnswer:
        return _read_answer(ends[draw][sample], rewards[draw][sample], tools_s.get((draw, sample)), workdir)

    groups = tuple(
        tuple(read(draw, sample) for sample in sorted(rewards[draw]))
        for draw in sorted(rewards)
        if len(rewards[draw]) == widest and rewards[draw].keys() <= ends.get(draw, {}).keys()
    )
    if len(groups) < groups_per_update:
        raise ConfigError(
            f'simulation.answers: {workdir / EVENTS} has {len(groups)} whole groups of answers, fewer than '
            f'learner.groups_per_update={groups_per_update}; name a longer run'
        )
    return groups


def _read_answer(end: FinishEvent, reward: float, tools_s: float | None, workdir: pathlib.Path) -> LoggedAnswer:
    """Reads one answer; its turns are the tokens between segments that no policy generated."""
    if 'rows' in end:
        raise ConfigError(
            f'simulation.answers: {workdir / EVENTS} has episodes of several rows, whose further prompts it does not '
            'say: name a run whose agents go on with one conversation'
        )
    turns, results = [0 if 'lengths' in end else end['tokens']], list[int]()
    for version, tokens in zip(end['versions'], end['lengths'], strict=True) if 'lengths' in end else ():
        if version == NOT_GENERATED:
            results.append(tokens)
            turns.append(0)
        else:
            turns[-1] += tokens
    if end['reason'] == 'length':
        turns[-1] = _LONGER
    elif end['reason'] == 'turns':  # the agent asked for one more turn, which agent.max_turns refused
        turns, results = [*turns, 1], [*results, 1]
    return LoggedAnswer(tuple(turns), reward, tuple(results), tools_s)


def _sum_tools(events: Sequence[Event]) -> dict[tuple[int, int], float]:
    """Seconds of the calls of tools by (draw, sample)."""
    found = collections.defaultdict[tuple[int, int], float](float)
    for interval in lane_intervals(events):
        if interval.work == 'tool':
            draw, sample = cast(int, interval.detail['draw']), cast(int, interval.detail['sample'])
            found[draw, sample] += interval.end - interval.start
    return found
