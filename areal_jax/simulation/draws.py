"""Random numbers of a simulated run: each is a function of its key alone, never of the order of events.

A key is (seed, draw, sample, kind, index): `draw` and `sample` name an answer, `kind` what is drawn ('answer',
'reward', 'tool'), `index` which one of several. Runs that differ in their schedule alone draw the same numbers.
"""

from __future__ import annotations

import hashlib
import statistics
import struct

_NORMAL = statistics.NormalDist()
_BITS = 52  # of a number in (0, 1): with half a step added it is still exact
_pack = struct.Struct('<4q').pack
_read = struct.Struct('<Q').unpack


def uniform(seed: int, draw: int, sample: int, kind: str, index: int = 0) -> float:
    """In (0, 1), both ends left out."""
    key = _pack(seed, draw, sample, index) + kind.encode()
    (word,) = _read(hashlib.blake2b(key, digest_size=8).digest())
    return ((word >> (64 - _BITS)) + 0.5) * 2.0**-_BITS


def normal(seed: int, draw: int, sample: int, kind: str, index: int = 0) -> float:
    """Of the standard normal distribution."""
    return _NORMAL.inv_cdf(uniform(seed, draw, sample, kind, index))
