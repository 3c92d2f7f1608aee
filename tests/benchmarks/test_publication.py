"""benchmarks/publication.py: what it makes of versions and of gaps between dispatches, and a soak of seconds."""

import pathlib

import numpy as np
import pytest

from areal_jax.errors import UserError
from benchmarks import publication
from benchmarks.carriers import CARRIERS
from benchmarks.publication import read_options, staged_sides, summarize_bytes
from benchmarks.publication_soak import change, soak
from benchmarks.side_published import find_swap_gaps
from tests.telemetry.logs import event_log, work


def test_the_bytes_are_those_of_deltas_from_an_update_on():
    row = lambda version, record, nbytes: {'version': version, 'record': record, 'bytes': nbytes, 'changed': 0.03}
    rows = [row(7, 'delta', 1), row(8, 'delta', 269_030), row(9, 'whole', 269_030_016), row(10, 'delta', 807_090)]
    found = summarize_bytes(rows, first=8)
    assert found['updates'] == [8, 10]
    assert found['bytes'] == 538_060
    assert found['share_of_whole'] == pytest.approx(0.002)  # of 2 bytes for each of 134,515,008 weights


def test_every_channel_is_compared_whole_and_with_deltas(tmp_path):
    sides = staged_sides(tmp_path)
    assert sides['directory before'] == ('directory', False, tmp_path)
    assert {name for name, (_, delta, _) in sides.items() if delta} == {f'{name} delta' for name in CARRIERS}
    assert 'directory before' not in staged_sides(None)


def test_the_gaps_of_swaps_are_those_in_which_weights_were_swapped():
    """Dispatches 0-1, 1.1-2, 2.5-3, 3.1-4, 4.9-5: gaps 0.1, 0.5 (swap at 2.2), 0.1, 0.9 (none)."""
    ends = [(0, 1), (1.1, 2), (2.5, 3), (3.1, 4), (4.9, 5)]
    events = [
        event for number, (start, end) in enumerate(ends) for event in work('engine/0', 'decode', start, end, number)
    ]
    swap = (2.2, 'interrupt', {'engine': 'engine/0', 'requests': ['a'], 'from_version': 0, 'to_version': 1})
    found = find_swap_gaps(event_log(*sorted([*events, swap], key=lambda event: event[0])))
    assert found.pop('swap_gaps_s') == pytest.approx([0.5])
    assert found == pytest.approx({'median_gap_s': 0.3, 'dispatch_s': 0.9, 'swaps': 1})


def test_a_checkout_that_is_none_is_refused(tmp_path):
    with pytest.raises(UserError, match='is no checkout of this repository'):
        read_options([f'--before={tmp_path}'])
    assert read_options(['--soak']).versions > 10**9
    assert read_options(['--json=x.json']).out == pathlib.Path('x.json')


def test_a_missed_side_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r'side_staged of .* ended'):
        publication.ask('side_staged', {'channel': 'nothing'})


def test_a_version_changes_as_many_elements_as_asked():
    before = {'a': np.zeros((100, 100), np.uint16), 'b': np.zeros(7, np.uint16)}
    after = change(before, np.random.default_rng(0), 0.05)
    assert 300 < np.count_nonzero(after['a']) < 700
    assert not np.count_nonzero(before['a'])
    assert not np.count_nonzero(change(before, np.random.default_rng(0), 0.0)['a'])


@pytest.mark.slow
@pytest.mark.parametrize('name', CARRIERS)
def test_a_soak_of_a_few_versions_finds_nothing_wrong(name):
    covered = soak(name, minutes=1.0, most=8, seed=0)
    assert (covered.wrong_bits, covered.wrong_logprobs, covered.digest_misses) == (0, 0, 0)
    assert (covered.versions, covered.odd_versions) == (8, 8)
    assert covered.compared_logprobs == 8 * 4 * 16
