"""Versions of a model whose leaves share tensors of files, and two of whose leaves are float32 beside 16 bits."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.formats.hf_directory import hf_tensors, load_hf
from areal_jax.learning import weights as trees
from areal_jax.models.families import DELTA, FAMILIES, LayerKind, ModelConfig
from areal_jax.models.layer_parts import DeltaNet, Experts
from areal_jax.models.weights import shared_tensors
from areal_jax.publication.export import PartWriter
from areal_jax.publication.files_channel import DeviceChannel, FilesChannel, find_version, load_version
from areal_jax.publication.manifest import by_path
from areal_jax.publication.record import Record
from areal_jax.publication.record_channel import WeightsReader
from areal_jax.publication.versions import PublicationError
from areal_jax.publication.weight_buffers import WeightBuffers, decode_delta
from areal_jax.sharding.rules import Shares, make_mesh
from tests.publication.bits16 import Carrier, over
from tests.publication.tiny import assert_bit_equal, host_params

NEXT = ModelConfig(
    vocab_size=11, d_model=6, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=10, rope_theta=1e4, rms_eps=1e-6,
    family='qwen3_next', kinds=(DELTA, LayerKind(), DELTA), delta=DeltaNet(2, 4, 3, 5), rotary_dim=2,
    experts=Experts(2, 1, 4, dense_layers=(1,), d_shared=7), tie_embeddings=False, **FAMILIES['qwen3_next'].switches,
)  # fmt: skip
DEVICE = jax.devices()[0]


def version(seed=0, dtype='bfloat16'):
    return trees.cast(host_params(seed, NEXT), dtype)


def test_a_cast_leaves_two_leaves_of_a_delta_net_in_float32():
    cast = by_path(version())
    kept = {path for path, leaf in cast.items() if leaf.dtype == np.float32}
    assert kept == {f'layers/{layer}/delta/{name}' for layer in (0, 2) for name in ('log_rate', 'rate_bias')}
    assert {str(leaf.dtype) for path, leaf in cast.items() if path not in kept} == {'bfloat16'}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_directory_holds_a_version_bit_for_bit(tmp_path, dtype):
    channel, params = FilesChannel(tmp_path, NEXT, verify=True), version(dtype=dtype)
    published = channel.transfer(1, jax.device_put(params))
    assert_bit_equal(channel.receive(published), params)
    assert_bit_equal(channel.map_version(1), params)
    assert_bit_equal(load_version(find_version(published.handle, 1), NEXT, verify=True), params)
    assert load_hf(published.handle)[0] == NEXT
    assert published.manifest_hash == DeviceChannel(verify=True).transfer(1, jax.device_put(params)).manifest_hash


def test_a_file_is_linked_only_if_all_leaves_of_its_tensors_are_as_before(tmp_path):
    number = {path: int(path.startswith('layers/0/')) for path in by_path(version())}
    channel = FilesChannel(tmp_path, NEXT, verify=True, file_of=number.__getitem__)
    first = jax.device_put(version())
    channel.transfer(0, first)
    # the last leaf of a tensor that four share
    delta = first['layers']['0']['delta']
    changed = delta | {'output_gate': {'weight': delta['output_gate']['weight'] + 1}}
    second = first | {'layers': first['layers'] | {'0': first['layers']['0'] | {'delta': changed}}}
    published = channel.transfer(1, second)
    inodes = [
        {file.name: file.stat().st_ino for file in (tmp_path / f'v00000{v}').glob('*.safetensors')} for v in (0, 1)
    ]
    assert [inodes[0][name] == inodes[1][name] for name in sorted(inodes[0])] == [True, False]
    assert_bit_equal(channel.receive(published), second)


# Deltas.


def changed(params, seed):
    """Some elements of each leaf by a few units in the last place."""
    rng = np.random.default_rng(seed)

    def change(leaf):
        bits = np.asarray(leaf).view(f'u{leaf.dtype.itemsize}').copy()
        bits += (rng.random(bits.shape) < (0.5 if leaf.dtype == np.float32 else 0.03)).astype(bits.dtype)
        return bits.view(leaf.dtype)

    return jax.tree.map(change, params)


def chain(count):
    versions = [version()]
    for seed in range(1, count):
        versions.append(changed(versions[-1], seed))
    return versions


def test_deltas_take_leaves_of_32_bits_with_them():
    carrier, versions = Carrier(), chain(3)
    channel = over(carrier)
    for number, params in enumerate(versions):
        published = channel.transfer(number, jax.device_put(params))
        assert published.size.record == ('delta' if number else 'whole')
        assert published.manifest_hash == DeviceChannel(verify=False).transfer(number, params).manifest_hash
        assert_bit_equal(channel.receive(published), params)
    kept = 'layers/0/delta/log_rate'
    assert not np.array_equal(*(by_path(params)[kept] for params in versions[1:]))
    elements = sum(leaf.size for leaf in jax.tree.leaves(versions[0]))
    differ = sum(np.count_nonzero(a != b) for a, b in zip(*map(jax.tree.leaves, versions[1:]), strict=True))
    assert published.size.changed == differ / elements
    # a leaf that did not change takes no bytes
    again = channel.transfer(3, versions[-1])
    assert (again.size.record, again.size.nbytes) == ('delta', 0)


def test_a_reader_that_holds_an_older_version_goes_back_and_forth():
    carrier, versions = Carrier(), chain(4)
    channel = over(carrier)
    published = [channel.transfer(number, params) for number, params in enumerate(versions)]
    reader = WeightsReader(carrier, DEVICE)
    for number in (0, 1, 3):
        weights, held = reader.receive(number)
        assert held.manifest_hash == published[number].manifest_hash
        assert_bit_equal(weights, versions[number])
        del weights
    for number in (3, 2):  # pinned by an engine while the channel goes on
        assert_bit_equal(channel.receive(published[number]), versions[number])


def test_a_delta_with_leaves_of_32_bits_is_reverted():
    carrier, versions = Carrier(), chain(2)
    channel = over(carrier)
    for number, params in enumerate(versions):
        channel.transfer(number, params)
    buffers, delta = WeightBuffers(), decode_delta(carrier.records[1])
    buffers.load(carrier.records[0])
    for back in (False, True):
        buffers.apply(delta, back=back)
        lent, expected = buffers.lend(), by_path(versions[0 if back else 1])
        assert lent.keys() == expected.keys()
        for path in list(lent):
            assert lent.pop(path).tobytes() == np.asarray(expected[path]).tobytes(), path


def test_a_damaged_part_of_32_bits_is_refused():
    carrier, versions = Carrier(), chain(2)
    channel = over(carrier)
    for number, params in enumerate(versions):
        channel.transfer(number, params)
    record = carrier.records[1]
    paths = sorted(record.header.leaves)
    at = paths.index('layers/0/delta/log_rate')
    parts = [bytes(part) for part in record.parts]
    for wrong, message in ((parts[at] + b'1234', 'for a leaf of 16: send it again'), (b'\1' * 16, 'is not what was')):
        header = dataclasses.replace(record.header, sizes=[len(part) for part in record.parts])
        carrier.records[1] = Record(header, [*parts[:at], wrong, *parts[at + 1 :]])
        with pytest.raises(PublicationError, match=message):
            WeightsReader(carrier, DEVICE).receive(1)


def test_a_leaf_of_32_bits_with_nan_is_named():
    channel, (first, second) = over(Carrier()), chain(2)
    channel.transfer(0, first)
    second['layers']['0']['delta']['log_rate'][1] = np.nan
    with pytest.raises(PublicationError, match="1 of the 4 values of 'layers/0/delta/log_rate' are NaN"):
        channel.transfer(1, second)


def test_float32_elsewhere_is_still_refused():
    with pytest.raises(PublicationError, match=r"the leaf 'embedding' in float32: 99\.8 %"):
        over(Carrier()).transfer(0, version(dtype='float32'))


# Several processes.


def _shared(params, processes):
    mesh = make_mesh(fsdp=8)
    tree = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    process_of = lambda device: device.id * processes // 8
    shares = Shares(tree, mesh, process_of, shared_tensors(NEXT))
    return shares.collect(jax.jit(shares.spread, out_shardings=shares.shardings)(tree))


@pytest.mark.parametrize('processes', [2, 4])
def test_leaves_that_share_a_tensor_have_one_owner(processes):
    owners: dict[str, set[int]] = {}
    leaves = by_path(_shared(version(), processes))
    for tensor in hf_tensors(NEXT):
        owners.setdefault(tensor.name, set()).add(leaves[tensor.path].owner)
    assert {len(found) for found in owners.values()} == {1}
    assert {owner for found in owners.values() for owner in found} == set(range(processes))


def test_several_processes_write_a_version(tmp_path, monkeypatch):
    params = version()
    copy = _shared(params, 2)

    class Other:
        def write(self, directory, number):
            with monkeypatch.context() as patch:
                patch.setattr(jax, 'process_index', lambda: 1)
                self._outcome = PartWriter(NEXT).write(directory, number, copy)

        def written(self):
            return self._outcome

    channel = FilesChannel(tmp_path, NEXT, verify=True, writers=[Other()])
    published = channel.transfer(3, copy)
    assert len(list(pathlib.Path(published.handle).glob('*.safetensors'))) == 2
    assert_bit_equal(channel.receive(published), params)
    assert published.manifest_hash == DeviceChannel(verify=False).transfer(3, jax.device_put(params)).manifest_hash
