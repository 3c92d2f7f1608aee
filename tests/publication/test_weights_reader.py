"""Two sets of buffers: the next version beside the one in use, and what happens to damage, joiners and pins."""

import ctypes
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from areal_jax.publication.record import Record
from areal_jax.publication.record_channel import WeightsReader
from areal_jax.publication.versions import PublicationError
from tests.publication.bits16 import Carrier, held_of, make_versions, next_version, over
from tests.publication.tiny import assert_bit_equal

DEVICE = jax.devices()[0]
SQUARE = {'layers/0/attention/query/weight', 'layers/1/mlp/up/weight'}


def sent(count, **options):
    """A carrier with so many versions of one chain, and them."""
    carrier, versions = Carrier(), make_versions(count, share=0.001)
    channel = over(carrier, **options)
    for version, params in enumerate(versions):
        channel.transfer(version, params)
    return carrier, versions


def test_each_version_takes_one_delta_while_the_one_before_is_in_use():
    carrier, versions = sent(6)
    reader, in_use = WeightsReader(carrier, DEVICE), None
    for version in range(6):
        after, held = reader.receive(version)
        assert held == held_of(versions[version], version)
        assert_bit_equal(after, versions[version])
        if in_use is not None:
            assert_bit_equal(in_use, versions[version - 1])  # what decodes was not written
        in_use = after
    assert carrier.fetched == [('whole', 0), *(('delta', version) for version in range(1, 6))]
    assert sorted(reader.versions) == [4, 5]
    assert carrier.told == [held_of(versions[version], version) for version in range(6)]


def test_weights_in_use_are_never_written_however_many_are_pinned():
    carrier, versions = sent(6)
    reader, pinned = WeightsReader(carrier, DEVICE), {}
    for version in range(5):
        pinned[version] = reader.receive(version)[0]
    leaf = pinned.pop(2)['layers']['0']['attention']['query']['weight']  # one array of a tree keeps its set
    for version, weights in pinned.items():
        assert_bit_equal(weights, versions[version])
    weights = reader.receive(5)[0]
    assert_bit_equal(weights, versions[5])
    np.testing.assert_array_equal(np.asarray(leaf), versions[2]['layers']['0']['attention']['query']['weight'])
    assert len(reader.versions) == 6
    del pinned, leaf
    reader.receive(4)
    assert reader.versions == (3, 4, 5)  # the newest that nothing uses, what was asked for, what `weights` uses


def test_a_view_on_the_host_keeps_its_version():
    carrier, versions = sent(4)
    reader = WeightsReader(carrier, DEVICE)
    views = jax.device_get(reader.receive(0)[0])
    for version in (1, 2, 3):
        reader.receive(version)
    assert_bit_equal(views, versions[0])


def test_matrices_lie_as_the_engine_takes_them():
    carrier, versions = sent(4)
    reader, keep = WeightsReader(carrier, DEVICE, transposed=SQUARE, verify=True), []
    for version in range(4):
        weights, held = reader.receive(version)
        keep.append(weights)
        assert held == held_of(versions[version], version)
        turned = jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf.T if jax.tree_util.keystr(path, simple=True, separator='/') in SQUARE else leaf,
            versions[version],
        )
        assert_bit_equal(weights, turned)


def test_an_engine_over_two_devices_gets_its_halves():
    carrier, versions = sent(3)
    whole = jax.NamedSharding(jax.make_mesh((2,), ('tensor',), devices=jax.devices()[4:6]), jax.P())
    half = jax.NamedSharding(whole.mesh, jax.P(None, 'tensor'))
    place = jax.tree.map(lambda leaf: half if leaf.ndim == 2 else whole, versions[0])
    reader, before = WeightsReader(carrier, place), None
    for version in range(3):
        weights = reader.receive(version)[0]
        assert_bit_equal(weights, versions[version])
        if before is not None:
            assert_bit_equal(before, versions[version - 1])
        before = weights
    assert before['embedding'].addressable_shards[1].data.shape[1] * 2 == versions[0]['embedding'].shape[1]


def test_a_joiner_takes_the_whole_version_and_the_deltas_after_it():
    carrier, versions = sent(5)
    assert_bit_equal(WeightsReader(carrier, DEVICE).receive(3)[0], versions[3])
    assert carrier.fetched == [('whole', 0), ('delta', 1), ('delta', 2), ('delta', 3)]


def test_a_reader_that_missed_versions_takes_the_deltas_in_between():
    carrier, versions = sent(6)
    reader = WeightsReader(carrier, DEVICE)
    first = reader.receive(1)[0]
    assert_bit_equal(reader.receive(5)[0], versions[5])
    assert carrier.fetched[2:] == [('delta', version) for version in (2, 3, 4, 5)]
    assert_bit_equal(first, versions[1])


def test_one_version_back_is_the_inverse_of_the_last_delta():
    """Nothing is fetched: the free set holds version 3 and goes back by the delta that made it."""
    carrier, versions = sent(4)
    reader = WeightsReader(carrier, DEVICE)
    reader.receive(2)
    del carrier.fetched[:]
    reader.receive(3)
    assert_bit_equal(reader.receive(2)[0], versions[2])
    assert carrier.fetched == [('delta', 3)]
    assert reader.versions == (2,)


def test_further_back_is_fetched_from_the_whole_version():
    carrier, versions = sent(6)
    reader = WeightsReader(carrier, DEVICE)
    reader.receive(5)
    del carrier.fetched[:]
    assert_bit_equal(reader.receive(1)[0], versions[1])
    assert carrier.fetched == [('whole', 0), ('delta', 1)]


def test_a_new_base_costs_one_whole_version_and_the_other_set_is_copied():
    carrier, versions = sent(6, base_every=3)  # whole: 0 and 3
    reader, in_use = WeightsReader(carrier, DEVICE), None
    for version in range(6):
        in_use, before = reader.receive(version)[0], in_use
        assert_bit_equal(in_use, versions[version])
    assert [kind for kind, _ in carrier.fetched] == ['whole', 'delta', 'delta', 'whole', 'delta', 'delta']
    assert_bit_equal(before, versions[4])


def flipped(record, path_index=0):
    """The record with one more change: another element of the first leaf that changed."""
    parts = list(record.parts)
    place = next(index for index, part in enumerate(parts) if len(part))
    damaged = bytearray(parts[place])
    damaged[-1 - path_index] ^= 2
    parts[place] = bytes(damaged)
    return Record(record.header, parts)


def test_a_damaged_delta_is_found_before_the_swap_and_the_whole_version_is_taken():
    carrier, versions = sent(4)
    reader = WeightsReader(carrier, DEVICE)
    in_use = reader.receive(2)[0]
    damages = iter([flipped])
    carrier.damage = lambda record: next(damages, lambda r: r)(record)
    assert_bit_equal(reader.receive(3)[0], versions[3])
    assert carrier.fetched[3:] == [('delta', 3), ('whole', 0), ('delta', 1), ('delta', 2), ('delta', 3)]
    assert_bit_equal(in_use, versions[2])


def test_where_the_whole_way_is_damaged_too_the_reader_keeps_its_version():
    carrier, versions = sent(4)
    reader = WeightsReader(carrier, DEVICE)
    in_use = reader.receive(2)[0]
    carrier.damage = lambda record: flipped(record) if record.header.version == 3 else record
    for _ in range(2):
        with pytest.raises(PublicationError, match=r"version 3: leaf '.*' is not what was published"):
            reader.receive(3)
        assert_bit_equal(in_use, versions[2])
    carrier.damage = lambda record: record
    assert_bit_equal(reader.receive(3)[0], versions[3])
    assert_bit_equal(in_use, versions[2])


def test_a_whole_version_that_is_damaged_or_cut_is_refused():
    carrier, _ = sent(1)
    for damage in (lambda part: part[:-2], lambda part: part[:-1] + bytes([part[-1] ^ 1])):
        carrier.damage = lambda record, damage=damage: Record(
            record.header, [damage(record.parts[0]), *record.parts[1:]]
        )
        with pytest.raises(PublicationError, match=r"version 0: leaf 'embedding' (has .* bytes|is not what was publ)"):
            WeightsReader(carrier, DEVICE).receive(0)


def test_a_delta_for_another_base_is_refused_by_name():
    """Repeated, left out, or of another run: the base that the header names is not what is held."""
    carrier, versions = sent(4)
    other = over(other_carrier := Carrier())
    for version in range(2):
        other.transfer(version, next_version(versions[version], seed=50))
    reader = WeightsReader(carrier, DEVICE)
    reader.receive(2)
    for record in (carrier.records[2], other_carrier.records[1]):
        carrier.fetch = lambda version, held, consume, record=record: consume(record)
        with pytest.raises(PublicationError, match=r'the delta of version \d is for version \d \(manifest .* is held'):
            reader.receive(3)


def test_a_delta_of_other_elements_is_refused():
    carrier, _ = sent(2)
    record = carrier.records[1]
    leaves = {path: dataclasses.replace(leaf, dtype='float32') for path, leaf in record.header.leaves.items()}
    carrier.records[1] = Record(dataclasses.replace(record.header, leaves=leaves), record.parts)
    with pytest.raises(PublicationError, match=r"leaf 'embedding' in float32: only 16-bit elements have deltas"):
        WeightsReader(carrier, DEVICE).receive(1)


def test_a_version_of_another_manifest_is_refused():
    carrier, versions = sent(2)
    with pytest.raises(
        PublicationError, match=r'version 1 with manifest 0000 was asked for, and its records lead to 1'
    ):
        WeightsReader(carrier, DEVICE).receive(1, '0000')
    assert_bit_equal(WeightsReader(carrier, DEVICE).receive(1, held_of(versions[1], 1).manifest_hash)[0], versions[1])


@pytest.mark.parametrize('verify', [False, True])
def test_memory_that_something_else_changed_is_found_where_all_is_verified(verify):
    """The whole version is taken again then; without `verify` the digest sees only what the deltas changed."""
    carrier, versions = sent(3)
    reader = WeightsReader(carrier, DEVICE, verify=verify)
    weights = reader.receive(1)[0]
    address = weights['embedding'].unsafe_buffer_pointer()  # in the memory of the reader
    del weights
    ctypes.c_uint16.from_address(address).value ^= 0x10
    weights = reader.receive(2)[0]
    assert np.array_equal(np.asarray(weights['embedding']), versions[2]['embedding']) == verify
    assert carrier.fetched.count(('whole', 0)) == 1 + verify


def test_a_set_in_use_that_something_else_changed_is_given_up():
    carrier, versions = sent(3)
    reader = WeightsReader(carrier, DEVICE, verify=True)
    in_use = reader.receive(1)[0]
    ctypes.c_uint16.from_address(in_use['embedding'].unsafe_buffer_pointer()).value ^= 0x10
    assert_bit_equal(reader.receive(1)[0], versions[1])


def test_two_threads_get_the_version_that_each_asks_for():
    carrier, versions = sent(8)
    reader = WeightsReader(carrier, DEVICE)
    with ThreadPoolExecutor(4) as threads:
        for version, weights in zip(range(8), threads.map(lambda v: reader.receive(v)[0], range(8)), strict=True):
            assert_bit_equal(weights, versions[version])
