"""A step written in pieces by several processes: whole or not at all, and read by regions on another mesh."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
import shutil
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.checkpoint import shards
from areal_jax.checkpoint.shards import CheckpointError, TreeReader, named_leaves, write_shards
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.models.weights import unstack_layers
from areal_jax.sharding.placement import HostShards, copy_shards, place, place_regions
from areal_jax.sharding.rules import make_mesh

_WHOLE = {
    'layers': {'gate': np.arange(3 * 8 * 4, dtype=np.float32).reshape(3, 8, 4), 'norm': np.ones((3, 4), np.float32)},
    'head': np.arange(16, dtype=np.int8).reshape(2, 8),
    'step': np.array(7, np.int32),
}
_CUT = {'layers': {'gate': (None, 'fsdp'), 'norm': ()}, 'head': (None, 'fsdp'), 'step': ()}


class _Follower:
    """Holds the copies of another process; writes them at once."""

    name = 'follower 1'

    def __init__(self, leaves, error=None):
        self._leaves, self._error = leaves, error

    def write(self, directory):
        self._index = self._error or write_shards(pathlib.Path(directory), named_leaves(self._leaves))

    def written(self):
        return self._index


def _held_by(process):
    """What each of two processes of four devices holds of an array on fsdp=8, layers cut apart in views."""
    mesh = make_mesh(fsdp=8)

    def held(whole, cut):
        leaf = place(whole, NamedSharding(mesh, PartitionSpec(*cut)))
        first, own = 4 * process, []
        for shard in leaf.addressable_shards:
            if first <= shard.device.id < first + 4 and shard.replica_id == 0:
                own.append((tuple(s.start or 0 for s in shard.index), np.array(shard.data)))
        return HostShards(leaf.shape, leaf.dtype, tuple(own))

    is_cut = lambda x: isinstance(x, tuple)
    leaves = jax.tree.map(lambda cut, whole: held(whole, cut), _CUT, _WHOLE, is_leaf=is_cut)
    return unstack_layers(leaves, 3)


def _listed():
    return unstack_layers(_WHOLE, 3)


def _save(store, step, error=None, follower=None):
    follower = _Follower(_held_by(1) if follower is None else follower, error)
    store.save(step, _held_by(0), {'step': step}, [follower])


def _assert_whole(arrays):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, arrays), _listed())


def test_pieces_of_two_processes_are_one_step(tmp_path):
    store = CheckpointStore(tmp_path)
    _save(store, 3)
    arrays, run_state = store.restore(3)
    assert run_state == {'step': 3}
    _assert_whole(pickle.loads(pickle.dumps(arrays)))  # as followers get it
    written = [piece for leaf in jax.tree.leaves(arrays) for piece in leaf.pieces]
    # per layer 8 pieces of gate and one of norm, which is on every device; 8 of head, one of step
    assert len(written) == 3 * (8 + 1) + 8 + 1
    assert sum(piece.tree.startswith('writer_0001') for piece in written) == 3 * 4 + 4


def test_a_view_of_a_layer_needs_no_memory():
    held = _held_by(1)
    gates = [held['layers'][str(layer)]['gate'] for layer in range(3)]
    assert gates[0].shape == (8, 4)
    assert gates[0].parts[0][1].base is gates[1].parts[0][1].base is not None


@pytest.mark.parametrize(
    ('mesh', 'cut'),
    [({'fsdp': 2, 'tensor': 2}, ('tensor', 'fsdp')), ({'fsdp': 2, 'tensor': 4}, ('fsdp',)), ({}, ())],
    ids=str,
)
def test_any_mesh_reads_its_own_regions(tmp_path, mesh, cut):
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    stored = store.restore(1)[0]['layers']['2']['gate']
    sharding = NamedSharding(make_mesh(**mesh), PartitionSpec(*cut))
    placed = place_regions(stored.__getitem__, stored.shape, sharding)
    assert placed.sharding == sharding
    assert np.asarray(placed).tobytes() == _WHOLE['layers']['gate'][2].tobytes()
    assert copy_shards(placed).flags.owndata  # one process holds all of it


def test_a_region_reads_the_pieces_that_have_a_part_of_it(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    read = []

    class Reader(TreeReader):
        def read(self, tree, key):
            read.append(key)
            return super().read(tree, key)

    stored = dataclasses.replace(store.restore(1)[0]['layers']['0']['gate'], reader=Reader())  # [8, 4] in rows
    found = stored[slice(2, 5), slice(1, 3)]
    np.testing.assert_array_equal(found, _WHOLE['layers']['gate'][0, 2:5, 1:3])
    assert read == [f'layers/0/gate@{row}_0' for row in (2, 3, 4)]


def test_a_follower_that_fails_leaves_the_step_before(tmp_path):
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    message = r'saving step 2 to .* failed \(follower 1: OSError: no space left\); .* The checkpoint of step 1 is untou'
    with pytest.raises(CheckpointError, match=message):
        _save(store, 2, error='OSError: no space left')
    assert [path.name for path in tmp_path.iterdir()] == ['step_00000001']
    _assert_whole(store.restore(store.latest())[0])


def test_a_writer_that_leaves_an_array_out_is_noticed(tmp_path, monkeypatch):
    write = shards.write_trees
    big = {name: np.zeros(1 << 20, np.float32) for name in 'ab'}
    monkeypatch.setattr(shards, 'write_trees', lambda to, trees: write(to, [{'b@0': tree['b@0']} for tree in trees]))
    with pytest.raises(OSError, match=r'orbax wrote \d+ of 8388608 bytes'):
        write_shards(tmp_path / 'part', big)


def test_a_failure_here_waits_for_the_followers(tmp_path, monkeypatch):
    # else one would go on writing into a directory that is being removed
    follower, waited = _Follower(_held_by(1)), []
    monkeypatch.setattr(follower, 'written', lambda: waited.append(True) or {})
    monkeypatch.setattr(shards, 'write_trees', lambda *_: 1 / 0)
    monkeypatch.setattr(follower, 'write', lambda _: None)
    with pytest.raises(CheckpointError, match='ZeroDivisionError'):
        CheckpointStore(tmp_path).save(1, _held_by(0), {}, [follower])
    assert waited == [True]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('follower', [HostShards((2, 8), np.dtype(np.int8), ()), None], ids=['nothing', 'the same'])
def test_pieces_that_do_not_add_up_are_no_step(tmp_path, follower):
    store, held = CheckpointStore(tmp_path), _held_by(0)['head']  # half of 16 values
    with pytest.raises(CheckpointError, match="8 of the 16 values of leaf 'head' were written"):
        store.save(1, {'head': held}, {}, [_Follower({'head': follower or held})])
    assert store.latest() is None


def test_a_flipped_bit_of_a_follower_is_reported(tmp_path):
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    _save(store, 1)
    arrays = store.restore(1)[0]
    for file in (tmp_path / 'step_00000001_1' / 'arrays' / 'writer_0001').rglob('d/*'):
        content = bytearray(file.read_bytes())
        for place_ in range(len(content) // 3, len(content)):
            content[place_] ^= 2
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r'step_00000001_1 is damaged .*: there is no older one'):
        np.asarray(arrays['head'])
    np.testing.assert_array_equal(arrays['head'][slice(0, 2), slice(0, 4)], _WHOLE['head'][:, :4])  # of process 0


def test_a_directory_that_is_not_shared_is_said_in_one_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match='--workdir must be one directory that all processes of the run share'):
        write_shards(tmp_path / 'absent' / 'writer_0001', {})


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads and resets the peak in /proc')
def test_a_save_takes_the_memory_of_the_shards_that_a_process_holds(tmp_path):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = str(s.getsockname()[1])
    command = [sys.executable, '-m', 'tests.checkpoint.save_in_two']
    started = [subprocess.Popen([*command, str(index), port, str(tmp_path)]) for index in range(2)]
    assert [p.wait(200) for p in started] == [0, 0]
    shutil.rmtree(tmp_path / 'store')
    for rises in (json.loads((tmp_path / f'{index}.json').read_text()) for index in range(2)):
        # half of 16 leaves; when they are read, the new arrays, and of one leaf a piece and what it is put together in
        assert rises['save'] < 0.55 * rises['whole']
        assert rises['restore'] < (0.5 + 2 / 16) * rises['whole']
