"""What a version is sent as: whole or as a delta, and the base that is named."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.publication.files_channel import DeviceChannel, FilesChannel
from areal_jax.publication.versions import PublicationError
from areal_jax.sharding.rules import SharedLeaf
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


def test_a_learner_over_several_processes_is_refused():
    shared = {'leaf': SharedLeaf((2,), np.dtype('float32'), 1, (), None)}
    with pytest.raises(
        PublicationError, match=r"channel='memory' with a learner over several processes: each holds a p"
    ):
        over(Carrier()).transfer(0, shared)
