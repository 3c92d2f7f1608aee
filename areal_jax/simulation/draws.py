"""Random numbers of a simulated run: each is a function of its key alone, never of the order of events.

A key is (seed, draw, sample, kind, index): `draw` and `sample` name an answer, `kind` the quantity that is drawn
('answer', 'reward', 'tool'), `index` one of several. Runs that differ only in their schedule draw the same numbers.
"""

from __future__ import annotations

import hashlib
import statistics
import struct

_NORMAL = statistics.NormalDist()
_BITS = 52  # of a number in (0, 1): it is still exact after half a step is added
_pack = struct.Struct('<4q').pack
_read = struct.Struct('<Q').unpack


def uniform(seed: int, draw: int, sample: int, kind: str, index: int = 0) -> float:
    """A uniform number in (0, 1), both ends excluded."""
    key = _pack(seed, draw, sample, index) + kind.encode()
    (word,) = _read(hashlib.blake2b(key, digest_size=8).digest())
    return ((word >> (64 - _BITS)) + 0.5) * 2.0**-_BITS


def normal(seed: int, draw: int, sample: int, kind: str, index: int = 0) -> float:
    """A number from the standard normal distribution."""
    return _NORMAL.inv_cdf(uniform(seed, draw, sample, kind, index))
