"""Finds, encodes, applies and reverts the changes between two versions of a leaf of 16-bit elements.

An update of a few units in the last place changes a few per cent of the elements, and most of them by one step of their
format. A delta holds their positions and the differences of their bits, so that it applies in place and can be
inverted. It is exact bit for bit, NaN payloads and -0.0 included. The digest of a leaf (manifest.py) is a sum over its
elements, so both ends update it from the changes alone. record.py has the records that contain deltas.

The part of a leaf is b'' if nothing changed, else

  header   7 little-endian uint32: flags, changes, large gaps, bytes of each of the four streams
  gaps     uint8 for each change: unchanged elements since the change before; 255 = the next large gap
  large    little-endian uint32: the gaps of 255 and more
  low      uint8 for each change: the low byte of the difference of the bits, in zigzag order (0, -1, 1, -2, ...)
  high     likewise the high byte

Leaves of 32-bit elements, of which a model has few small ones, have other parts: the differences of the bits of all
elements, little-endian uint32, or b''.

If the flag DENSE is set, there is an entry for every element, changed or not, and there are no gaps. Bit i + 1 of the
flags says that stream i is deflated.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib

import numpy as np

from areal_jax.native import arrays as kernels
from areal_jax.native import compiled_library as library
from areal_jax.publication.manifest import change_of_sums, unfinite_bits
from areal_jax.publication.shard_plan import Runs
from areal_jax.publication.versions import PublicationError

MOST_ELEMENTS = 1 << 32  # of a leaf: positions are 32 bits
LARGE_GAP = 255
_DENSE = 1  # flag
_DENSE_SHARE = 0.6  # share of changed elements above which gaps cost more than entries for unchanged elements
_PIECE = 1 << 18  # elements that numpy compares at once: the data of a step stays in a core's cache
_HEADER = struct.Struct('<7I')
# These streams have few matches but many runs and uneven frequencies: Z_RLE gave fewer bytes than the default strategy,
# in half the time.
_LEVEL, _STRATEGY = 1, zlib.Z_RLE
_SAVES = 0.98  # a stream that deflates to more than this share of its bytes stays as it is


@dataclasses.dataclass(frozen=True)
class Changes:
    """The elements of a leaf that changed, in ascending order of their row-major positions."""

    gaps: np.ndarray  # uint8 [changes]
    large: np.ndarray  # uint32 [large gaps]
    low: np.ndarray  # uint8 [changes], of the differences in zigzag order
    high: np.ndarray  # uint8 [changes]

    @property
    def count(self) -> int:
        return self.low.size

    @property
    def positions(self) -> np.ndarray:
        """Row-major positions of the changed elements, int64 [changes]."""
        gaps = self.gaps.astype(np.int64)
        gaps[self.gaps == LARGE_GAP] = self.large
        return np.cumsum(gaps + 1) - 1

    @property
    def differences(self) -> np.ndarray:
        """uint16 [changes]: bits of the new version minus bits of the base, mod 2^16."""
        codes = self.low | self.high.astype(np.uint16) << np.uint16(8)
        return (codes >> np.uint16(1)) ^ (np.uint16(0) - (codes & np.uint16(1)))


@dataclasses.dataclass(frozen=True)
class Found:
    """The changes of a leaf, and their effect on its digest."""

    changes: Changes
    sums: tuple[int, int]  # added to the content of its LeafDigest, mod 2^32
    unfinite: int  # new values that are NaN or infinite

    def of_leaf(self, runs: Runs, current: np.ndarray) -> Found:
        """Returns the changes of the leaf, from the changes of a shard whose new bits are `current`, uint16 [n]."""
        local = self.changes.positions
        places, after = runs.positions(local), current[local]
        if places.size:
            _require_positions(int(places[-1]) + 1)
        gaps, large = _encode_gaps(places)
        changes = Changes(gaps, large, self.changes.low, self.changes.high)
        return Found(changes, change_of_sums(places, after - changes.differences, after), self.unfinite)


class ChangeFinder:
    """Finds the changes of leaves, one leaf after the other, in memory that it reuses.

    Args:
      largest: elements of the largest leaf.
      native: None = with the kernel if there is one.
    """

    def __init__(self, largest: int, *, native: bool | None = None):
        self._native = native
        # memory that is never written takes no pages
        byte = lambda: np.empty(largest, np.uint8)
        self._lists = byte(), np.empty(largest // (LARGE_GAP + 1) + 1, np.uint32), byte(), byte()

    def find(self, base: np.ndarray, current: np.ndarray, dtype: str) -> Found:
        """Finds the differences between `base` and `current`, uint16 [n], C-contiguous; makes `base` equal `current`.

        The result is valid until the next call. `dtype` names the float type that the bits encode.

        Raises PublicationError for a leaf of 2^32 elements or more.
        """
        _require_positions(base.size)
        exponent = unfinite_bits(dtype)
        counts = None if self._native is False else kernels.find_changes(base, current, exponent, self._lists)
        if counts is None:
            return self._find(base, current, exponent)
        changed, large, unfinite, *sums = counts
        return Found(self._taken(changed, large), (sums[0], sums[1]), unfinite)

    def _find(self, base: np.ndarray, current: np.ndarray, exponent: int) -> Found:
        found = [
            np.flatnonzero(base[start : start + _PIECE] != current[start : start + _PIECE]) + start
            for start in range(0, base.size, _PIECE)
        ]
        positions = np.concatenate(found) if found else np.zeros(0, np.int64)
        before, after = base[positions], current[positions]
        gaps, large = _encode_gaps(positions)
        difference = after - before
        codes = difference << np.uint16(1) ^ (np.uint16(0) - (difference >> np.uint16(15)))
        taken = self._taken(positions.size, large.size)
        taken.gaps[:], taken.large[:] = gaps, large
        taken.low[:], taken.high[:] = codes & np.uint16(255), codes >> np.uint16(8)
        np.copyto(base, current)
        unfinite = np.count_nonzero((after & exponent) == exponent) if exponent else 0
        return Found(taken, change_of_sums(positions, before, after), int(unfinite))

    def _taken(self, changed: int, large: int) -> Changes:
        gaps, larges, low, high = self._lists
        return Changes(gaps[:changed], larges[:large], low[:changed], high[:changed])


def _require_positions(size: int) -> None:
    if size >= MOST_ELEMENTS:
        raise PublicationError(
            f'a leaf of {size} elements has no delta, whose positions are 32 bits; use publication.delta=False'
        )


def _encode_gaps(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gaps, uint8 [changes], and the large gaps, uint32 [large gaps], of ascending positions."""
    gaps = np.diff(positions, prepend=-1) - 1
    return np.minimum(gaps, LARGE_GAP).astype(np.uint8), gaps[gaps >= LARGE_GAP].astype(np.uint32)


def encode_changes(changes: Changes, size: int) -> bytes:
    """Encodes the part of a leaf of `size` elements."""
    if not changes.count:
        return b''
    flags, streams = 0, [changes.gaps, changes.large.astype('<u4').view(np.uint8), changes.low, changes.high]
    if changes.count > _DENSE_SHARE * size:
        flags, positions = _DENSE, changes.positions
        spread = np.zeros((2, size), np.uint8)
        spread[:, positions] = changes.low, changes.high
        streams = [np.zeros(0, np.uint8), np.zeros(0, np.uint8), *spread]
    encoded = []
    for index, stream in enumerate(streams):
        deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, _STRATEGY)
        made = deflate.compress(stream.data) + deflate.flush()
        deflated = made if len(made) < _SAVES * stream.size else None  # else it saves too little
        flags |= (deflated is not None) << index + 1
        encoded.append(stream.data if deflated is None else deflated)
    count, large = (size, 0) if flags & _DENSE else (changes.count, changes.large.size)
    return b''.join([_HEADER.pack(flags, count, large, *map(len, encoded)), *encoded])


def decode_changes(part: bytes | bytearray | memoryview, size: int) -> Changes:
    """Decodes the changes of a leaf of `size` elements; they do not share the finder's memory.

    Raises PublicationError for anything that `encode_changes` does not make of such a leaf.
    """
    view = memoryview(part).cast('B')
    if not len(view):
        return _unpack(0, b'', b'', b'', b'')
    try:
        flags, count, large, *lengths = _HEADER.unpack_from(view)
        if flags >> 5 or len(view) != _HEADER.size + sum(lengths) or count > size or large > count:
            raise ValueError(f'{len(view)} bytes with the header {(flags, count, large, *lengths)}')
        ends = np.cumsum([_HEADER.size, *lengths]).tolist()
        expected = (0, 0, size, size) if flags & _DENSE else (count, 4 * large, count, count)
        streams = [
            _read_stream(view[start:end], length, deflated=bool(flags >> index + 1 & 1))
            for index, (start, end, length) in enumerate(zip(ends[:-1], ends[1:], expected, strict=True))
        ]
        if flags & _DENSE:
            streams[0] = bytes(size)
        return _require_inside(_unpack(len(streams[2]), *streams), size)
    except (struct.error, ValueError, zlib.error) as error:
        raise PublicationError(f'the delta of a leaf of {size} elements is damaged ({error}): send it again') from error


def apply_changes(
    words: np.ndarray, changes: Changes, *, rows: int = 0, back: bool = False, native: bool | None = None
) -> tuple[int, int]:
    """Applies the changes to uint16 [n] in place; returns their increments to the sums of the leaf's digest, mod 2^32.

    Args:
      rows: > 0: the leaf is a matrix of `rows` rows, and `words` are its transpose.
      back: from the new version to the base.
      native: None = with the kernel if there is one.

    Raises PublicationError for a position outside the leaf; some of the changes may then have been made.
    """
    lists = changes.gaps, changes.large, changes.low, changes.high
    if native is not False and library.is_available():
        sums = kernels.apply_changes(words, rows, lists, back=back)
        if sums is None:
            raise _outside(words.size)
        return sums
    positions = _require_inside(changes, words.size).positions
    places = positions % (words.size // rows) * rows + positions // (words.size // rows) if rows else positions
    before = words[places]
    after = before - changes.differences if back else before + changes.differences
    words[places] = after
    return change_of_sums(positions, before, after)


def _read_stream(content: memoryview, length: int, *, deflated: bool) -> bytes:
    """Reads `length` bytes, and allocates no more; raises zlib.error or ValueError for other content."""
    if deflated:
        inflate = zlib.decompressobj()
        found = inflate.decompress(content, max(1, length))
        if not inflate.eof or inflate.unused_data:
            raise ValueError(f'a stream that is not of {length} bytes')
    else:
        found = bytes(content)
    if len(found) != length:
        raise ValueError(f'a stream of {len(found)} bytes, and {length} were expected')
    return found


def _unpack(count: int, gaps: bytes, large: bytes, low: bytes, high: bytes) -> Changes:
    byte = lambda content: np.frombuffer(content, np.uint8, count)
    return Changes(byte(gaps), np.frombuffer(large, '<u4').astype(np.uint32, copy=False), byte(low), byte(high))


def _require_inside(changes: Changes, size: int) -> Changes:
    """Raises PublicationError if the last position is outside the leaf, or the number of large gaps is wrong."""
    escaped = np.count_nonzero(changes.gaps == LARGE_GAP)
    gaps = int(changes.gaps.sum(dtype=np.int64)) + int(changes.large.sum(dtype=np.int64)) - LARGE_GAP * escaped
    if escaped != changes.large.size or gaps + changes.count > size:
        raise _outside(size)
    return changes


def _outside(size: int) -> PublicationError:
    return PublicationError(f'a delta has positions outside of its leaf of {size} elements: send it again')


# Leaves of 32-bit elements.


def encode_wide(base: np.ndarray, bits: np.ndarray) -> bytes:
    """The part of a leaf whose bits, uint32 [n], were `base`."""
    return b'' if np.array_equal(base, bits) else (bits - base).astype('<u4').tobytes()


def apply_wide(words: np.ndarray, part: bytes | bytearray | memoryview, *, back: bool = False) -> None:
    """Adds the differences of `encode_wide` to the bits uint32 [...] in place, or with `back` subtracts them.

    Raises PublicationError for a part of another length.
    """
    if len(part) != words.nbytes:
        raise PublicationError(f'a delta has {len(part)} bytes for a leaf of {words.nbytes}: send it again')
    differences = np.frombuffer(part, '<u4').reshape(words.shape)
    words += -differences if back else differences
