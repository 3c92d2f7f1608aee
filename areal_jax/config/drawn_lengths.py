"""Lengths of answers, drawn by key, for simulations and for runs with rollout.answer_lengths.

A length is a quantile of sqrt(c) * x + sqrt(1 - c) * y, where x is drawn once for the prompt, y for each answer, and c
is `group_share`: for lognormal lengths the share of the variance of log L that answers to one prompt have in common.
In a simulation, lengths may also drift from the first prompt of the run to the last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import statistics
import struct
from collections.abc import Callable

from areal_jax.config.fields import COUNT, SHARE, ConfigError

_NORMAL = statistics.NormalDist()
_BITS = 52  # of a number in (0, 1): it is still exact after half a step is added
_pack = struct.Struct('<4q').pack
_read = struct.Struct('<Q').unpack


def uniform(seed: int, draw: int, sample: int, kind: str, index: int = 0) -> float:
    """A uniform number in (0, 1), both ends excluded: a function of its key, never of the order of events.

    `draw` and `sample` name an answer, `kind` the quantity ('answer', 'reward', 'tool'), `index` one of several. Runs
    that differ only in their schedule draw the same numbers.
    """
    key = _pack(seed, draw, sample, index) + kind.encode()
    (word,) = _read(hashlib.blake2b(key, digest_size=8).digest())
    return ((word >> (64 - _BITS)) + 0.5) * 2.0**-_BITS


def normal(seed: int, draw: int, sample: int, kind: str, index: int = 0) -> float:
    """A number from the standard normal distribution."""
    return _NORMAL.inv_cdf(uniform(seed, draw, sample, kind, index))


FORMS = (
    'constant(VALUE)',
    'uniform(LOW, HIGH)',
    'exponential(MEAN)',
    'lognormal(MEAN, SIGMA)',
    'mixture(WEIGHT FORM, ...)',
)
_NUMBER = r'\d*\.?\d+(?:e[+-]?\d+)?|\d+\.'
_FORM = rf'[a-z]+\( *(?:{_NUMBER})(?: *, *(?:{_NUMBER}))* *\)'
_PART = rf'({_NUMBER}) +({_FORM})'
_MIXTURE = rf'mixture\( *(?:{_NUMBER}) +{_FORM}(?: *, *(?:{_NUMBER}) +{_FORM})* *\)'


@dataclasses.dataclass(frozen=True)
class Constant:
    """The distribution of a constant."""

    value: float

    def quantile(self, normal: float) -> float:
        return self.value


@dataclasses.dataclass(frozen=True)
class Uniform:
    """The uniform distribution from `low` to `high`."""

    low: float
    high: float

    def quantile(self, normal: float) -> float:
        return self.low + (self.high - self.low) * 0.5 * math.erfc(-normal / math.sqrt(2))


@dataclasses.dataclass(frozen=True)
class Exponential:
    """The exponential distribution."""

    mean: float

    def quantile(self, normal: float) -> float:
        return -self.mean * math.log(0.5 * math.erfc(normal / math.sqrt(2)))


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """A lognormal distribution; the mean is exp(sigma^2 / 2) medians, sigma the standard deviation of the logarithm."""

    mean: float
    sigma: float

    def quantile(self, normal: float) -> float:
        return self.mean * math.exp(self.sigma * (normal - self.sigma / 2))


Simple = Constant | Uniform | Exponential | Lognormal


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A mixture of `parts`, such as right and wrong answers, each chosen with its weight; weights sum to 1."""

    weights: tuple[float, ...]
    parts: tuple[Simple, ...]

    def part(self, uniform: float) -> int:
        """The index of the part that a uniform number in (0, 1) chooses."""
        for index, weight in enumerate(self.weights):
            uniform -= weight
            if uniform < 0:
                return index
        return len(self.parts) - 1


Distribution = Simple | Mixture


def move(start: Distribution, end: Distribution, share: float) -> Distribution:
    """The distribution at `share` of the way from `start` to `end`, which have the same form.

    Means and bounds change in equal ratios, sigma and weights in equal steps.
    """
    if isinstance(start, Mixture) and isinstance(end, Mixture):
        weights = tuple(a + share * (b - a) for a, b in zip(start.weights, end.weights, strict=True))
        return Mixture(weights, tuple(_move(a, b, share) for a, b in zip(start.parts, end.parts, strict=True)))
    assert not isinstance(start, Mixture)
    assert not isinstance(end, Mixture)
    return _move(start, end, share)


def same_form(a: Distribution, b: Distribution) -> bool:
    """Whether `move` can lead from one to the other."""
    if isinstance(a, Mixture) and isinstance(b, Mixture):
        return len(a.parts) == len(b.parts) and all(map(same_form, a.parts, b.parts))
    return type(a) is type(b)


def parse_distribution(text: str, field: str) -> Distribution:
    """Parses 'lognormal(9000, 0.75)' or another of FORMS; numbers are above 0, but a width may be 0.

    Raises ConfigError that names the field, the text and the known forms.
    """
    text = text.strip()
    if re.fullmatch(_MIXTURE, text):
        parts = re.findall(_PART, text[len('mixture(') :])
        weights = tuple(float(weight) for weight, _ in parts)
        if abs(sum(weights) - 1) > 1e-6 or min(weights) <= 0:
            raise ConfigError(f'{field}={text!r}: weights {weights} must be above 0 and sum to 1')
        return Mixture(weights, tuple(_parse_simple(form, field) for _, form in parts))
    return _parse_simple(text, field)


def _parse_simple(text: str, field: str) -> Simple:
    makers: dict[str, tuple[int, Callable[..., Simple]]] = {
        'constant': (1, Constant),
        'uniform': (2, Uniform),
        'exponential': (1, Exponential),
        'lognormal': (2, Lognormal),
    }
    name, _, rest = text.partition('(')
    if not re.fullmatch(_FORM, text) or name not in makers:
        raise ConfigError(f'{field}={text!r} is not known; use {", ".join(FORMS[:-1])} or {FORMS[-1]}')
    values = [float(word) for word in rest.rstrip(') ').split(',')]
    count, make = makers[name]
    if len(values) != count:
        form = next(form for form in FORMS if form.startswith(name))
        raise ConfigError(f'{field}={text!r} has {len(values)} numbers: use {form}')
    found = make(*values)
    if (
        not 0 < values[0] < math.inf
        or values[-1] == math.inf
        or (isinstance(found, Uniform) and found.low > found.high)
    ):
        raise ConfigError(f'{field}={text!r}: the first number must be above 0, LOW at most HIGH, and all finite')
    return found


def _move(start: Simple, end: Simple, share: float) -> Simple:
    match start, end:
        case Constant(), Constant():
            return Constant(_between(start.value, end.value, share))
        case Uniform(), Uniform():
            return Uniform(_between(start.low, end.low, share), _between(start.high, end.high, share))
        case Exponential(), Exponential():
            return Exponential(_between(start.mean, end.mean, share))
        case Lognormal(), Lognormal():
            return Lognormal(_between(start.mean, end.mean, share), start.sigma + share * (end.sigma - start.sigma))
        case _:
            raise TypeError(f'{start} and {end} are of two forms')


def _between(start: float, end: float, share: float) -> float:
    """Interpolates in equal ratios."""
    return start * (end / start) ** share


ANSWER = 'answer'  # kind of the numbers that are drawn
OF_PROMPT, OF_PART = '/prompt', '/part'  # kinds that are drawn in addition to an answer's own number


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Lengths in whole tokens, from 1 to `cap`; the means of the distributions are before this cut."""

    start: Distribution
    cap: int
    end: Distribution | None = None  # at the last draw of the run, of the same form; None = no drift
    phases: tuple[Distribution, ...] = ()  # of equal parts of the run, the first of them `start`; () = there is one
    draws: int = 0  # prompts of the run, after which lengths stay as they are
    group_share: float = 0.0  # c

    def draw(self, seed: int, draw: int, sample: int, kind: str = ANSWER, index: int = 0) -> int:
        """The length of one answer, a function of its key alone; `index` counts the lengths of one answer."""
        found = self.at(draw)
        if isinstance(found, Mixture):
            found = found.parts[found.part(uniform(seed, draw, sample, kind + OF_PART, index))]
        number = normal(seed, draw, sample, kind, index) if self.group_share < 1 else 0.0
        if self.group_share:
            of_prompt = normal(seed, draw, 0, kind + OF_PROMPT, index)
            number = math.sqrt(self.group_share) * of_prompt + math.sqrt(1 - self.group_share) * number
        return self.cut(found.quantile(number))

    def part(self, seed: int, draw: int, sample: int, kind: str = ANSWER, index: int = 0) -> int:
        """The index of the part of a mixture from which the answer was drawn; 0 if there is no mixture."""
        found = self.at(draw)
        return found.part(uniform(seed, draw, sample, kind + OF_PART, index)) if isinstance(found, Mixture) else 0

    def at(self, draw: int) -> Distribution:
        """The distribution of a draw, before lengths are cut."""
        if self.phases:
            return self.phases[min(draw * len(self.phases) // self.draws, len(self.phases) - 1)]
        return self.start if self.end is None else move(self.start, self.end, min(1.0, draw / self.draws))

    def cut(self, length: float) -> int:
        """Rounds and cuts a length to whole tokens from 1 to `cap`."""
        return max(1, min(self.cap, round(length)))


def parse_lengths(
    text: str, cap: int, *, group_share: float = 0.0, draws_of_run: int = 0, field: str = 'lengths'
) -> Lengths:
    """Parses lengths: one distribution (`FORMS`), two of one form with '->' between, or several with ';' between.

    'lognormal(2000, 0.75) -> lognormal(16000, 0.75)' drifts from the first prompt of the run to the last: the logarithm
    of the mean changes in equal steps. 'constant(2000); constant(4000)' uses the first for the first half of the
    prompts and the second for the other half.

    Args:
      cap: most tokens of an answer; longer ones are cut off.
      group_share: the share of the variance of log L that answers to one prompt have in common.
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


ANSWER_LENGTHS = 'rollout.answer_lengths'


@dataclasses.dataclass(frozen=True)
class AnswerLimits:
    """The most tokens of each answer of a training run: rollout.max_new_tokens, or drawn up to it by key."""

    most: int  # rollout.max_new_tokens
    lengths: Lengths | None = None  # None: every answer may have `most`
    seed: int = 0  # of sampling

    @classmethod
    def parse(cls, text: str, most: int, seed: int) -> AnswerLimits:
        """Parses rollout.answer_lengths; '' draws nothing. Raises ConfigError for a text that is no distribution."""
        return cls(most, Lengths(parse_distribution(text, ANSWER_LENGTHS), most) if text else None, seed)

    @property
    def field(self) -> str:
        """The field that sets the limits."""
        return ANSWER_LENGTHS if self.lengths else 'rollout.max_new_tokens'

    def of(self, draw: int, sample: int) -> int:
        """The limit of one answer, a function of seed, draw and sample: also the length that a simulation draws."""
        return self.lengths.draw(self.seed, draw, sample) if self.lengths else self.most
