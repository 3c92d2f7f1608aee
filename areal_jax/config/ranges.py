"""Ranges of numbers, with the error for a number outside."""

from __future__ import annotations

import dataclasses
import math

from areal_jax.errors import UserError


class ConfigError(UserError, ValueError):
    """A configuration that cannot run; the message names the fields, their values and the fix."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included; NaN is never inside."""

    low: float
    high: float
    rule: str  # the same in words, after 'must'
    or_none: bool = False  # None is allowed too

    def __contains__(self, value: float | None) -> bool:
        return self.or_none if value is None else self.low <= value <= self.high

    def require(self, field: str, value: float | None) -> None:
        """Raises ConfigError where `value` is outside."""
        if value not in self:
            raise ConfigError(f'{field}={value} must {self.describe()}')

    def describe(self) -> str:
        """'be at least 1 and below 2^31, or be None'."""
        return f'{self.rule}, or be None' if self.or_none else self.rule


# Programs compute in float32: a number that float32 rounds to 0, to 1 or to infinity is refused like these three.
_LEAST, _BELOW_ONE, _MOST = 2.0**-126, 1 - 2.0**-24, (2 - 2.0**-23) * 2.0**127

_INT32 = 2**31 - 1
DTYPES = ('float32', 'bfloat16', 'float16')
SEED = Range(0, _INT32, 'lie in [0, 2^31 - 1]')
COUNT = Range(1, _INT32, 'be at least 1 and below 2^31')
COUNT_OR_OFF = Range(0, _INT32, 'not be negative, and be below 2^31')
THREADS = Range(1, 1024, 'be at least 1 and at most 1024')
BYTES = Range(1, 2**50, 'lie in [1, 2^50]')
MEBIBYTES = Range(0, 2**40, 'lie in [0, 2^40]')
SECONDS = Range(_LEAST, 1e6, 'be above 0 and at most 1e6 (11 days)')  # below threading.TIMEOUT_MAX
LEASE = Range(1, 3600, 'be from 1 to 3600 (an hour)')
POSITIVE = Range(_LEAST, _MOST, 'be above 0 and finite, in float32')
NOT_NEGATIVE = Range(0, _MOST, 'not be negative, infinite or NaN, in float32')
VERSIONS = Range(0, math.inf, 'be at least 0; 0 is synchronous')
SHARE = Range(0, 1, 'lie in [0, 1]')
SHARE_ABOVE_ZERO = Range(_LEAST, 1, 'lie in (0, 1]')
DECAY = Range(0, _BELOW_ONE, 'lie in [0, 1), in float32')
LOSS_SCALE = Range(_LEAST, 2.0**32, 'lie in (0, 2^32]')  # the reciprocal of a larger one is too near 0 for float32
