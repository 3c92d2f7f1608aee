"""Lengths of answers that are drawn by key: correlated within a group, and drifting over a run where that is asked for.

A length is a quantile of sqrt(c) * x + sqrt(1 - c) * y, where x is drawn once for the prompt, y for each answer, and c
is `group_share`: for lognormal lengths the share of the variance of log L that answers to one prompt have in common.
"""

from __future__ import annotations

import dataclasses
import math

from areal_jax.config.ranges import COUNT, SHARE, ConfigError
from areal_jax.simulation import draws
from areal_jax.simulation.lengths import Distribution, Mixture, move, parse_distribution, same_form

ANSWER = 'answer'  # kind of the numbers that are drawn
OF_PROMPT, OF_PART = '/prompt', '/part'  # what is drawn besides an answer's own number


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Whole tokens, from 1 to `cap`; the mean of a distribution is that before lengths are cut off."""

    start: Distribution
    cap: int
    end: Distribution | None = None  # that of the last draw of the run, of the same form; None = it does not drift
    phases: tuple[Distribution, ...] = ()  # of equal parts of the run, the first of them `start`; () = there is one
    draws: int = 0  # prompts of the run, after which lengths stay as they are
    group_share: float = 0.0  # c

    def draw(self, seed: int, draw: int, sample: int, kind: str = ANSWER, index: int = 0) -> int:
        """The length of one answer, a function of its key alone; `index` counts where an answer has several."""
        found = self.at(draw)
        if isinstance(found, Mixture):
            found = found.parts[found.part(draws.uniform(seed, draw, sample, kind + OF_PART, index))]
        number = draws.normal(seed, draw, sample, kind, index) if self.group_share < 1 else 0.0
        if self.group_share:
            of_prompt = draws.normal(seed, draw, 0, kind + OF_PROMPT, index)
            number = math.sqrt(self.group_share) * of_prompt + math.sqrt(1 - self.group_share) * number
        return self.cut(found.quantile(number))

    def part(self, seed: int, draw: int, sample: int, kind: str = ANSWER, index: int = 0) -> int:
        """Which part of a mixture the answer was drawn from, counted from 0; 0 where there is no mixture."""
        found = self.at(draw)
        return found.part(draws.uniform(seed, draw, sample, kind + OF_PART, index)) if isinstance(found, Mixture) else 0

    def at(self, draw: int) -> Distribution:
        """The distribution of a draw, before lengths are cut off."""
        if self.phases:
            return self.phases[min(draw * len(self.phases) // self.draws, len(self.phases) - 1)]
        return self.start if self.end is None else move(self.start, self.end, min(1.0, draw / self.draws))

    def cut(self, length: float) -> int:
        """To whole tokens, from 1 to `cap`."""
        return max(1, min(self.cap, round(length)))


def parse_lengths(
    text: str, cap: int, *, group_share: float = 0.0, draws_of_run: int = 0, field: str = 'lengths'
) -> Lengths:
    """Lengths that are written as a distribution (`distributions.FORMS`), as two of one form with '->' between, or as
    several with ';' between.

    'lognormal(2000, 0.75) -> lognormal(16000, 0.75)' drifts from the first prompt of the run to the last: the logarithm
    of the mean in equal steps. 'constant(2000); constant(4000)' has one in the first half of the prompts and the other
    in the second.

    Args:
      cap: most tokens of an answer; longer ones are cut off.
      group_share: of the variance of log L, what answers to one prompt have in common.
      draws_of_run: prompts of the run, over which lengths drift.
      field: of the config, for errors.

    Raises ConfigError for a text that is no distribution, a drift between two forms, and a drift or phases of a run
    without an end.
    """
    COUNT.require(f'{field}: cap', cap)
    SHARE.require(f'{field}: group_share', group_share)
    if ';' in text:
        phases = tuple(parse_distribution(part, field) for part in text.split(';'))
        _require_end(draws_of_run, f'{field}={text!r} has phases')
        return Lengths(phases[0], cap, phases=phases, draws=draws_of_run, group_share=group_share)
    first, arrow, last = text.partition('->')
    start = parse_distribution(first, field)
    if not arrow:
        return Lengths(start, cap, group_share=group_share)
    end = parse_distribution(last, field)
    if not same_form(start, end):
        raise ConfigError(f'{field}={text!r} drifts from one form to another: use the same one on both sides')
    _require_end(draws_of_run, f'{field}={text!r} drifts')
    return Lengths(start, cap, end, draws=draws_of_run, group_share=group_share)


def _require_end(draws_of_run: int, what: str) -> None:
    if draws_of_run < 1:
        raise ConfigError(f'{what} over the prompts of the run, and the run has no last one: bound it')
