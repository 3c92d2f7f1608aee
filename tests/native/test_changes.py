"""The kernels of changes: what they say of positions outside, and that numpy takes over where there is no library."""

import numpy as np
import pytest

from areal_jax.native import arrays, compiled_library
from areal_jax.publication.delta import ChangeFinder, apply_changes, decode_changes, encode_changes
from tests.native import needs_kernels


def lists(gaps, low, large=()):
    return (
        np.array(gaps, np.uint8), np.array(large, np.uint32), np.array(low, np.uint8), np.zeros(len(low), np.uint8),
    )  # fmt: skip


@needs_kernels
def test_changes_by_hand():
    """Codes 2 and 1 are +1 and -1, at positions 1 and 3 = 1 + 1 + 1."""
    words = np.array([10, 20, 30, 40], np.uint16)
    plain, _ = arrays.apply_changes(words, 0, lists([1, 1], [2, 1]), back=False)
    assert words.tolist() == [10, 21, 30, 39]
    assert plain == 0  # +1 - 1
    plain, _ = arrays.apply_changes(words, 0, lists([1], [2]), back=True)
    assert words.tolist() == [10, 20, 30, 39]
    assert plain == 2**32 - 1


@needs_kernels
@pytest.mark.parametrize(
    'wrong',
    [lists([4], [2]), lists([3, 0], [2, 2]), lists([255], [2]), lists([255], [2], [300]), lists([0], [2], [300])],
    ids=['beyond', 'one too many', 'no large gap', 'large gap beyond', 'large gap left over'],
)
def test_positions_outside_are_never_written(wrong):
    memory = np.arange(8, dtype=np.uint16)
    assert arrays.apply_changes(memory[:4], 0, wrong, back=False) is None
    np.testing.assert_array_equal(memory[4:], [4, 5, 6, 7])


def test_numpy_takes_over_without_a_library(monkeypatch):
    monkeypatch.setattr(compiled_library, 'is_available', lambda: False)
    base, current = np.zeros(9, np.uint16), np.arange(9, dtype=np.uint16)
    assert arrays.find_changes(base, current, 0, lists([0] * 9, [0] * 9)) is None
    part = encode_changes(ChangeFinder(9).find(base.copy(), current, 'bfloat16').changes, 9)
    apply_changes(base, decode_changes(part, 9))
    np.testing.assert_array_equal(base, current)
