"""Distributions of lengths and times, each a function of a standard normal number: `quantile` rises with it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

from areal_jax.config.ranges import ConfigError

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
    """The same every time."""

    value: float

    def quantile(self, normal: float) -> float:
        return self.value


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every number from `low` to `high` alike."""

    low: float
    high: float

    def quantile(self, normal: float) -> float:
        return self.low + (self.high - self.low) * 0.5 * math.erfc(-normal / math.sqrt(2))


@dataclasses.dataclass(frozen=True)
class Exponential:
    """Without memory."""

    mean: float

    def quantile(self, normal: float) -> float:
        return -self.mean * math.log(0.5 * math.erfc(normal / math.sqrt(2)))


@dataclasses.dataclass(frozen=True)
class Lognormal:
    """Given by its mean, which is exp(sigma^2 / 2) times its median, and the standard deviation of its logarithm."""

    mean: float
    sigma: float

    def quantile(self, normal: float) -> float:
        return self.mean * math.exp(self.sigma * (normal - self.sigma / 2))


Simple = Constant | Uniform | Exponential | Lognormal


@dataclasses.dataclass(frozen=True)
class Mixture:
    """One of `parts`, chosen with its weight, such as right answers and wrong ones; weights sum to 1."""

    weights: tuple[float, ...]
    parts: tuple[Simple, ...]

    def part(self, uniform: float) -> int:
        """The number of the part that a uniform number in (0, 1) chooses."""
        for index, weight in enumerate(self.weights):
            uniform -= weight
            if uniform < 0:
                return index
        return len(self.parts) - 1


Distribution = Simple | Mixture


def move(start: Distribution, end: Distribution, share: float) -> Distribution:
    """The distribution so far on the way from one to another of its form.

    Means and bounds change in equal ratios, sigma and weights in equal steps.
    """
    if isinstance(start, Mixture) and isinstance(end, Mixture):
        weights = tuple(a + share * (b - a) for a, b in zip(start.weights, end.weights, strict=True))
        return Mixture(weights, tuple(_move(a, b, share) for a, b in zip(start.parts, end.parts, strict=True)))
    assert not isinstance(start, Mixture)
    assert not isinstance(end, Mixture)
    return _move(start, end, share)


def same_form(a: Distribution, b: Distribution) -> bool:
    """Whether one can be moved toward the other."""
    if isinstance(a, Mixture) and isinstance(b, Mixture):
        return len(a.parts) == len(b.parts) and all(map(same_form, a.parts, b.parts))
    return type(a) is type(b)


def parse_distribution(text: str, field: str) -> Distribution:
    """'lognormal(9000, 0.75)', or another of FORMS; numbers are above 0, and 0 is allowed for a width.

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
    """In equal ratios."""
    return start * (end / start) ** share
