"""What a version is sent as, whole or as a delta, and its base; what a reader makes of damage, joiners and pins."""

import ctypes
import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.publication.files_channel import DeviceChannel, FilesChannel
from areal_jax.publication.record import Record
from areal_jax.publication.record_channel import WeightsReader
from areal_jax.publication.versions import PublicationError
from tests.publication.bits16 import Carrier, first_version, held_of, make_versions, next_version, over
from tests.publication.tiny import CONFIG, assert_bit_equal, host_params

WHOLE_BYTES = 2 * sum(leaf.size for leaf in jax.tree.leaves(host_params()))


def test_versions_arrive_bit_for_bit_and_name_their_base():
    carrier, versions = Carrier(), make_versions(4)
    channel = over(carrier)
    for version, params in enumerate(versions):
        published = channel.transfer(version, jax.device_put(params))
        assert published.manifest_hash == held_of(params, version).manifest_hash
        assert_bit_equal(channel.receive(published), params)
    bases = [carrier.records[version].header.base for version in range(4)]
    assert bases == [None, *(held_of(versions[version], version) for version in range(3))]


def test_the_hash_of_a_version_does_not_depend_on_the_channel(tmp_path):
    carrier = Carrier()
    channel, (one, two) = over(carrier), make_versions(2)
    channel.transfer(1, one)
    by_delta = channel.transfer(2, two)
    assert by_delta.size.record == 'delta'
    assert by_delta.manifest_hash == FilesChannel(tmp_path, CONFIG, verify=False).transfer(2, two).manifest_hash
    assert by_delta.manifest_hash == DeviceChannel(verify=False).transfer(2, jax.device_put(two)).manifest_hash


def test_a_whole_version_comes_after_so_many_or_as_many_bytes():
    """base_every=4: versions 0 and 4. A version of which each element changed is not smaller as a delta."""
    channel, versions = over(Carrier(), base_every=4), make_versions(6, share=0.001)
    assert [channel.transfer(v, p).size.record for v, p in enumerate(versions)] == [
        'whole', 'delta', 'delta', 'delta', 'whole', 'delta',
    ]  # fmt: skip
    noise = np.random.default_rng(0)
    random = jax.tree.map(lambda leaf: noise.integers(0, 0x7000, leaf.shape, np.uint16).view(leaf.dtype), versions[0])
    size = channel.transfer(6, random).size
    assert (size.record, size.nbytes) == ('whole', WHOLE_BYTES)
    assert size.changed > 0.99
    assert channel.transfer(7, next_version(random, 1, 0.001)).size.record == 'delta'


def test_deltas_that_sum_up_to_a_version_end_the_chain():
    """About 230 bytes of headers and as many of changes each, of 1488: the sum passes a whole version before ten."""
    channel, versions = over(Carrier(), base_every=100), make_versions(20)
    sizes = [channel.transfer(version, params).size for version, params in enumerate(versions)]
    wholes = [version for version, size in enumerate(sizes) if size.record == 'whole']
    assert wholes[0] == 0
    assert len(wholes) > 1
    for start, end in itertools.pairwise(wholes):
        assert sum(size.nbytes for size in sizes[start + 1 : end]) < WHOLE_BYTES


def test_nothing_changed_is_a_delta_of_no_bytes():
    channel, params = over(Carrier()), first_version()
    channel.transfer(0, params)
    published = channel.transfer(1, params)
    assert (published.size.record, published.size.nbytes, published.size.changed) == ('delta', 0, 0.0)
    assert_bit_equal(channel.receive(published), params)


def test_after_a_failed_send_the_next_version_is_whole():
    """The base is a version that was sent: readers may or may not have the one that failed."""
    carrier, versions = Carrier(), make_versions(4)
    channel = over(carrier)
    channel.transfer(0, versions[0])
    carrier.fails = True
    with pytest.raises(PublicationError, match='no room'):
        channel.transfer(1, versions[1])
    carrier.fails = False
    published = channel.transfer(2, versions[2])
    assert published.size.record == 'whole'
    assert_bit_equal(channel.receive(published), versions[2])
    assert channel.transfer(3, versions[3]).size.record == 'delta'


def test_a_version_goes_whole_where_the_carrier_has_no_room_for_its_delta():
    carrier, versions = Carrier(), make_versions(3)
    channel = over(carrier)
    channel.transfer(0, versions[0])
    carrier.is_full = True
    published = channel.transfer(1, versions[1])
    assert published.size.record == 'whole'
    assert_bit_equal(channel.receive(published), versions[1])
    carrier.is_full = False
    published = channel.transfer(2, versions[2])
    assert carrier.records[2].header.base == held_of(versions[1], 1)
    assert_bit_equal(channel.receive(published), versions[2])


def test_an_incarnation_begins_with_a_whole_version():
    """Resumed from version 1: the versions 2 that were sent before and after differ, and readers take the new one."""
    carrier, versions = Carrier(), make_versions(3)
    before = over(carrier)
    for version, params in enumerate(versions):
        published = before.transfer(version, params)
    before.receive(published)
    after = over(carrier)
    assert after.transfer(1, versions[1]).size.record == 'whole'
    other = next_version(versions[1], seed=77)
    published = after.transfer(2, other)
    assert_bit_equal(before.receive(published), other)  # the old reader held another version 2
    assert_bit_equal(after.receive(published), other)


def test_an_earlier_version_begins_a_chain():
    """A ring of versions is restored from a checkpoint before the newest version."""
    channel, versions = over(Carrier()), make_versions(3)
    records = [channel.transfer(version, versions[version]).size.record for version in (1, 2, 2, 0)]
    assert records == ['whole', 'delta', 'whole', 'whole']


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_weights_that_are_no_numbers_are_refused_and_a_whole_version_follows(bad):
    channel, (one, two, three) = over(Carrier()), make_versions(3)
    channel.transfer(0, one)
    two['layers']['1']['mlp']['up']['weight'][0, 0] = bad
    with pytest.raises(PublicationError, match=r"version 1: 1 of the 60 values of 'layers/1/mlp/up/weight' are NaN"):
        channel.transfer(1, two)
    published = channel.transfer(2, three)
    assert published.size.record == 'whole'
    assert_bit_equal(channel.receive(published), three)


def test_float32_has_no_deltas_and_goes_whole_without_them():
    with pytest.raises(PublicationError, match=r'float32: 99.8 % of the elements .* no delta is smaller; use public'):
        over(Carrier()).transfer(0, host_params())
    channel = over(Carrier(), delta=False)
    for version in range(2):
        published = channel.transfer(version, host_params(version))
        assert published.size.record == 'whole'
        assert_bit_equal(channel.receive(published), host_params(version))


def test_float16_has_deltas():
    channel = over(Carrier())
    params = first_version('float16')
    channel.transfer(0, params)
    after = next_version(params, 1)
    published = channel.transfer(1, after)
    assert published.size.record == 'delta'
    assert_bit_equal(channel.receive(published), after)


def test_another_dtype_begins_a_chain():
    channel = over(Carrier())
    channel.transfer(0, first_version())
    published = channel.transfer(1, first_version('float16'))
    assert published.size.record == 'whole'
    assert {leaf.dtype for leaf in jax.tree.leaves(channel.receive(published))} == {jnp.dtype('float16')}


def test_leaves_of_any_size_and_any_bits():
    """Empty, sparse, dense and unchanged leaves in one version; NaN payloads stay out: they are refused before."""
    rng = np.random.default_rng(0)
    sizes = {'none': (0, 4), 'one': (1,), 'scalar': (), 'below': (255,), 'at': (16, 16), 'large': (70_000,)}
    make = lambda shape: rng.integers(0, 0x7F00, shape, np.uint16).view(jnp.bfloat16)
    channel, tree = over(Carrier(), verify=True), {name: make(shape) for name, shape in sizes.items()}
    assert_bit_equal(channel.receive(channel.transfer(0, tree)), tree)
    for version, share in enumerate((0, 0.001, 0.3, 0.001), start=1):
        tree = {name: leaf.copy() for name, leaf in tree.items()}
        for name, leaf in tree.items():
            words = leaf.reshape(-1).view(np.uint16)
            words[rng.random(words.size) < (0.9 if name in ('one', 'at') else share)] ^= 0x8001  # -0.0 among them
        tree['scalar'] = make(())
        published = channel.transfer(version, tree)
        assert published.size.record == 'delta'
        assert_bit_equal(channel.receive(published), tree)


# Readers.


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


@pytest.mark.parametrize(
    ('before', 'asked', 'fetched'),
    [
        ([], 3, [('whole', 0), ('delta', 1), ('delta', 2), ('delta', 3)]),  # a joiner
        ([1], 5, [('delta', version) for version in (2, 3, 4, 5)]),  # it missed versions
        ([2, 3], 2, []),  # the free set holds version 3, and goes back by the delta that made it
        ([5], 1, [('whole', 0), ('delta', 1)]),  # further back
    ],
)
def test_a_reader_fetches_what_leads_from_what_it_holds_to_what_is_asked_for(before, asked, fetched):
    carrier, versions = sent(6)
    reader = WeightsReader(carrier, DEVICE)
    for version in before:
        reader.receive(version)
    del carrier.fetched[:]
    assert_bit_equal(reader.receive(asked)[0], versions[asked])
    assert carrier.fetched == fetched
    assert fetched or reader.versions == (asked,)  # what went back is version 3 no longer


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
