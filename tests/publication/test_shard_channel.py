"""Versions that every process of a learner sends: bit for bit, whole and as changes, and what a failure leaves."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.publication.carriers.shard_receiver import ShardReceiver, require_tiled
from areal_jax.publication.carriers.shm_carrier import ShmSender
from areal_jax.publication.carriers.stream_receiver import Reader, open_receiver
from areal_jax.publication.carriers.stream_sender import StreamSender
from areal_jax.publication.files_channel import DeviceChannel
from areal_jax.publication.manifest import device_manifest, finite_host_manifest, finite_shard_manifest, merge_shards
from areal_jax.publication.record import Record
from areal_jax.publication.record_channel import WeightsReader
from areal_jax.publication.shard_channel import ShardChannel, ShardSender, take_shards
from areal_jax.publication.shard_plan import divide_leaves, layouts_of
from areal_jax.publication.shard_versions import ShardVersions
from areal_jax.publication.versions import PublicationError
from tests.publication.bits16 import Carrier
from tests.publication.carriers.stream_proxy import prove_reader, prove_sender
from tests.publication.tiny import assert_bit_equal

PROCESSES = 4  # of two devices each
SPECS = {'embedding': P('fsdp', 'tensor'), 'layers': {'0': {
    'query': P(None, None, ('fsdp', 'tensor')), 'norm': P(),
    'experts': P('data', None, 'tensor'), 'log_rate': P('tensor'),
}}}  # fmt: skip
SHAPES = {'embedding': (24, 10), 'layers': {'0': {
    'query': (6, 3, 16), 'norm': (7,), 'experts': (4, 5, 6), 'log_rate': (8,),
}}}  # fmt: skip


def process_of(device):
    return device.id // 2


def mesh(devices=8, shape=(2, 2, 2)):
    return Mesh(np.array(jax.devices()[:devices]).reshape(shape), ('data', 'fsdp', 'tensor'))


def over(params, specs=SPECS, on=None):
    on = mesh() if on is None else on
    return jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(on, spec)), params, specs)


def first(seed=0, dtype='bfloat16'):
    rng = np.random.default_rng(seed)
    make = lambda path, shape: rng.normal(size=shape).astype(
        np.float32 if path[-1].key == 'log_rate' else jnp.dtype(dtype)
    )
    return jax.tree_util.tree_map_with_path(make, SHAPES, is_leaf=lambda each: isinstance(each, tuple))


def following(params, seed, share=0.05):
    """About this share of the elements of each leaf moves by one step, and so does one of the norm."""
    rng, after = np.random.default_rng(seed), jax.tree.map(np.copy, params)
    for leaf in jax.tree.leaves(after):
        bits = leaf.reshape(-1).view(np.uint16 if leaf.dtype.itemsize == 2 else np.uint32)
        bits[rng.random(leaf.size) < share] ^= 1
        bits[0] ^= 1
    return after


def versions(count, share=0.05):
    made = [first()]
    for seed in range(1, count):
        made.append(following(made[-1], seed, share))
    return made


class Processes:
    """The senders of all processes, which one process of a test runs; `failing` raises where it sends."""

    def __init__(self, carriers, *, delta):
        self.senders = [
            ShardSender(carrier, delta=delta, process=number, process_of=process_of)
            for number, carrier in enumerate(carriers)
        ]
        self.calls = []

    def __call__(self, name, *args, copy=None):
        self.calls.append(name)
        args = (*args, copy) if name == 'send_shards' else args
        return [getattr(sender, name)(*args) for sender in self.senders]


def open_channel(*, delta=True):
    """(The channel, the carriers of its processes, what calls their senders.)"""
    carriers = [Carrier() for _ in range(PROCESSES)]
    everywhere = Processes(carriers, delta=delta)
    leader = ShardVersions(everywhere, name='stream', delta=delta)
    return ShardChannel(leader, lambda address: ShardReceiver(carriers), everywhere.senders[0]), carriers, everywhere


@pytest.mark.parametrize('delta', [False, True])
def test_versions_arrive_bit_for_bit(delta):
    channel, carriers, _ = open_channel(delta=delta)
    for version, params in enumerate(versions(4)):
        published = channel.transfer(version, over(params))
        assert published.size.record == ('delta' if delta and version else 'whole')
        assert_bit_equal(channel.receive(published), params)
    assert all(len(carrier.told) == 4 for carrier in carriers)


def test_the_hash_of_a_version_does_not_depend_on_the_shards():
    one, two = versions(2)
    channel, _, _ = open_channel()
    device = DeviceChannel(verify=False)
    for version, params in enumerate((one, two)):
        found = channel.transfer(version, over(params)).manifest_hash
        assert found == device.transfer(version, jax.device_put(params)).manifest_hash


def test_a_process_sends_about_its_share_of_the_bytes():
    params = {'a': np.zeros((64, 4096), np.uint16), 'b': np.zeros((2048, 64), np.uint16), 'c': np.zeros(3, np.uint16)}
    specs = {'a': P('fsdp', 'tensor'), 'b': P(), 'c': P()}
    channel, carriers, _ = open_channel(delta=False)
    size = channel.transfer(0, over(params, specs)).size
    assert size.nbytes == sum(leaf.nbytes for leaf in params.values())
    assert max(carrier.records[0].header.n_bytes for carrier in carriers) <= 0.26 * size.nbytes


def test_engines_take_their_own_layout():
    """Transposed matrices on one device, and other meshes, from the same shards."""
    channel, _, _ = open_channel()
    pair = Mesh(np.array(jax.devices()[:2]).reshape(1, 1, 2), ('data', 'fsdp', 'tensor'))
    place = jax.tree.map(lambda spec: NamedSharding(pair, spec), SPECS, is_leaf=lambda spec: isinstance(spec, P))
    for version, params in enumerate(versions(3)):
        published = channel.transfer(version, over(params))
        assert_bit_equal(channel.read(published, place), params)
        turned = channel.read(published, jax.devices()[0], ('embedding',))
        assert_bit_equal(turned | {'embedding': np.asarray(turned['embedding']).T}, params)


def test_a_late_reader_takes_the_whole_version_and_the_changes_after_it():
    channel, carriers, _ = open_channel()
    made = versions(4)
    published = [channel.transfer(version, over(params)) for version, params in enumerate(made)]
    reader = WeightsReader(ShardReceiver(carriers), jax.devices()[0])
    assert_bit_equal(reader.receive(3, published[3].manifest_hash)[0], made[3])
    assert carriers[2].fetched == [('whole', 0), ('delta', 1), ('delta', 2), ('delta', 3)]


def test_the_chain_ends_for_all_processes_where_one_has_no_room():
    channel, carriers, everywhere = open_channel()
    made = versions(3)
    channel.transfer(0, over(made[0]))
    carriers[1].is_full = True
    published = channel.transfer(1, over(made[1]))
    assert published.size.record == 'whole'
    assert everywhere.calls[-2:] == ['send_shards', 'repeat_shards']
    assert_bit_equal(channel.receive(published), made[1])
    carriers[1].is_full = False
    published = channel.transfer(2, over(made[2]))
    assert published.size.record == 'delta'
    assert_bit_equal(channel.receive(published), made[2])


def test_changes_of_as_many_bytes_go_whole():
    channel, _, everywhere = open_channel()
    channel.transfer(0, over(first(0)))
    other = first(1)
    published = channel.transfer(1, over(other))
    assert (published.size.record, everywhere.calls[-1]) == ('whole', 'repeat_shards')
    assert_bit_equal(channel.receive(published), other)


def test_after_a_failed_process_the_next_version_is_whole():
    channel, carriers, _ = open_channel()
    made = versions(3)
    channel.transfer(0, over(made[0]))
    carriers[3].fails = True
    with pytest.raises(PublicationError, match='no room'):
        channel.transfer(1, over(made[1]))
    carriers[3].fails = False
    published = channel.transfer(2, over(made[2]))
    assert published.size.record == 'whole'
    assert_bit_equal(channel.receive(published), made[2])


def test_nan_is_told_with_its_leaf():
    channel, _, _ = open_channel()
    params = first()
    params['layers']['0']['experts'][1, 2, 3] = np.nan
    with pytest.raises(PublicationError, match=r'1 of the .* values of .layers/0/experts'):
        channel.transfer(0, over(params))


def test_records_that_do_not_fit_together_are_refused():
    """One process says that its changes are a whole version, another one stops at the version before."""
    channel, carriers, _ = open_channel()
    made = versions(2)
    published = [channel.transfer(version, over(params)) for version, params in enumerate(made)]
    reader = WeightsReader(ShardReceiver(carriers), jax.devices()[0])
    carriers[2].damage = lambda record: Record(dataclasses.replace(record.header, base=None), record.parts)
    with pytest.raises(PublicationError, match='do not fit together: delta 1, delta 1, whole 1, delta 1'):
        reader.receive(1, published[1].manifest_hash)
    carriers[2].damage = lambda record: record
    carriers[2].records[1] = carriers[2].records[0]
    with pytest.raises(PublicationError, match='do not fit together: some sent fewer'):
        reader.receive(1, published[1].manifest_hash)


def test_a_damaged_shard_is_found():
    channel, carriers, _ = open_channel(delta=False)

    def damage(record):
        record.parts[0] = bytes([record.parts[0][0] ^ 1]) + record.parts[0][1:]
        return record

    published = channel.transfer(0, over(first()))
    carriers[1].damage = damage
    with pytest.raises(PublicationError, match='is not what was published'):
        channel.receive(published)


def test_one_process_that_lacks_a_version_fails_the_reader_at_once():
    channel, carriers, _ = open_channel()
    published = channel.transfer(0, over(first()))

    def refuse(version, held, consume):
        raise PublicationError('version 0 is not at the sender')

    carriers[2].fetch = refuse
    with pytest.raises(PublicationError, match='not at the sender'):
        channel.receive(published)


def test_shards_that_leave_a_hole_or_overlap_are_refused():
    values = {
        shard.name: np.zeros([stop - start for start, stop in shard.box], np.float32)
        for own in divide_leaves(layouts_of(over(first()), process_of)).values()
        for shard in own
    }
    manifest = finite_host_manifest(values, 0)
    require_tiled(manifest, 0)
    name = next(name for name in manifest if name.startswith('embedding['))
    with pytest.raises(PublicationError, match="'embedding' do not cover its 240 elements once"):
        require_tiled({key: digest for key, digest in manifest.items() if key != name}, 0)


def test_digests_on_devices_are_the_digests_of_the_host():
    params = over(first())
    manifest = {}
    for own in divide_leaves(layouts_of(params, process_of)).values():
        values = take_shards(params, own)
        found = finite_shard_manifest({name: jnp.asarray(value) for name, value in values.items()}, 0)
        assert found == finite_host_manifest(values, 0)
        manifest |= found
    assert merge_shards(manifest) == device_manifest(params)
    with pytest.raises(PublicationError, match='version 3: 2 of the 6 values'):
        finite_shard_manifest({'norm': jnp.array([1, 2, jnp.nan, 4, jnp.inf, 6])}, 3)


def test_over_sockets(tmp_path_factory):
    directory = tmp_path_factory.mktemp('s')
    with contextlib.ExitStack() as opened:
        senders = [
            opened.enter_context(contextlib.closing(StreamSender(prove_sender, directory=directory)))
            for _ in range(PROCESSES)
        ]
        reader = Reader('engine', prove_reader)
        processes = Processes(senders, delta=True)
        leader = ShardVersions(processes, name='stream', delta=True)
        channel = ShardChannel(leader, functools.partial(open_receiver, reader=reader), processes.senders[0])
        opened.callback(channel.close)
        for version, params in enumerate(versions(3)):
            published = channel.transfer(version, over(params))
            assert published.handle.startswith('shards:unix:')
            assert_bit_equal(channel.receive(published), params)
            assert [set(sender.held()) for sender in senders] == [{'engine'}] * PROCESSES
        assert len(list(directory.iterdir())) == PROCESSES
        channel.close()
        assert len(list(directory.iterdir())) == PROCESSES - 1  # its own socket is gone, the other processes' are not


@pytest.mark.parametrize('kind', ['stream', 'shm'])
def test_a_version_that_is_sent_again_whole_is_in_one_chain_only(tmp_path_factory, kind):
    """A pinned version keeps one of three buffers, and the other two take all versions that follow."""
    directory = tmp_path_factory.mktemp('s')
    with contextlib.ExitStack() as opened:
        open_one = {
            'stream': lambda number: StreamSender(prove_sender, directory=directory),
            'shm': lambda number: ShmSender(directory / f'segment-{number}'),
        }[kind]
        senders = [opened.enter_context(contextlib.closing(open_one(number))) for number in range(PROCESSES)]
        everywhere = Processes(senders, delta=True)
        leader = ShardVersions(everywhere, name=kind, delta=True)
        for version in range(8):
            leader.transfer(version, over(first(version)))  # every element changed: sent as a delta, and again
            leader.release(version, [1] if version else [])
        assert everywhere.calls.count('repeat_shards') >= 4
