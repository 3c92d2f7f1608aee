"""Arrays and run state of a step: both or neither, whatever happens while they are written."""

import asyncio
import collections
import importlib
import itertools
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import areal_jax.checkpoint
from areal_jax.checkpoint.shards import named_leaves
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore

KILLED_SAVER = pathlib.Path(__file__).with_name('killed_saver.py')


def test_dicts_come_back_with_their_types(tmp_path):
    saved = {
        'params': {'layers': {'0': np.arange(6, dtype=np.float32).reshape(2, 3)}, 'half': np.ones(3, jnp.bfloat16)},
        'optimizer': {'mu/x': np.array(3, np.int32), 'q': np.full((2, 1), -7, np.int8)},
        'e': {},
    }
    store = CheckpointStore(tmp_path)
    store.save(1, saved, {'x': 0.1})
    step, arrays, run_state = store.restore_latest()
    assert (step, run_state) == (1, {'x': 0.1})
    assert jax.tree.structure(arrays) == jax.tree.structure(saved)  # the empty dict and the key with '/' too
    for found, expected in zip(jax.tree.leaves(arrays), jax.tree.leaves(saved), strict=True):
        assert (found.shape, found.dtype, np.asarray(found).dtype) == (expected.shape, expected.dtype, expected.dtype)
        assert np.asarray(found).tobytes() == expected.tobytes()
    region = arrays['params']['layers']['0'][slice(1, 2), slice(0, 2)]
    assert region.tolist() == [[3, 4]]


def test_what_json_would_change_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\['state'\]\[0\] does not lie in dicts with text keys"):
        CheckpointStore(tmp_path).save(2, {'state': (np.ones(1), np.ones(1))}, {})


def test_two_leaves_of_one_path_are_refused(tmp_path):
    one = np.ones(1)
    with pytest.raises(ValueError, match='same path'):
        CheckpointStore(tmp_path).save(1, {'a': {'b': one}, 'a/b': one}, {})


def test_the_newest_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    for step in (1, 2, 10):
        _save(store, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['step_00000002', 'step_00000010']
    assert store.latest() == 10
    assert _restored(store, 2) == 2


def test_arrays_that_are_handed_over_are_let_go_as_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr('areal_jax.checkpoint.shards.TREE_BYTES', 1 << 20)
    arrays = {'params': {name: np.full(1 << 18, ord(name), np.float32) for name in 'abcdef'}}
    held, alive = [weakref.ref(leaf) for leaf in arrays['params'].values()], []
    write = ocp.Checkpointer.save

    def count(*args, **kwargs):
        alive.append(sum(leaf() is not None for leaf in held))
        return write(*args, **kwargs)

    monkeypatch.setattr(ocp.Checkpointer, 'save', count)
    CheckpointStore(tmp_path).save(1, arrays, {}, consume=True)
    assert arrays == {}
    assert (alive[0], alive[-1]) == (6, 1)
    assert [leaf[0] for leaf in areal_jax.checkpoint.read(tmp_path).values()] == [*map(ord, 'abcdef')]
    CheckpointStore(tmp_path).save(2, kept := {'a': np.ones(3)}, {})
    np.testing.assert_array_equal(kept['a'], np.ones(3))


def test_a_step_saved_again_replaces_the_first(tmp_path):
    # a resumed run that is stopped before its next update saves the step it came from
    store = CheckpointStore(tmp_path, keep=1)
    for value in range(12):
        store.save(5, {'w': np.full(2, value, np.float32)}, {'value': value})
    arrays, run_state = store.restore(5)
    assert (np.asarray(arrays['w']).tolist(), run_state) == ([11, 11], {'value': 11})
    assert len(list(tmp_path.iterdir())) == 1


def test_keep_below_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'checkpoint\.keep=0'):
        CheckpointStore(tmp_path, keep=0)


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(CheckpointError, match=f'{tmp_path}/x has no checkpoint'):
        CheckpointStore(tmp_path / 'x').restore_latest()
    store = CheckpointStore(tmp_path)
    _save(store, 4)
    with pytest.raises(CheckpointError, match='no checkpoint of step 3; it has: 4'):
        store.restore(3)


def test_any_missing_or_empty_file_is_reported_or_harmless(tmp_path):
    original = tmp_path / 'original'
    store = CheckpointStore(original, keep=2)
    _save(store, 6)
    _save(store, 7)
    files = [path.relative_to(original) for path in original.glob('step_00000007/**/*') if path.is_file()]
    messages = collections.defaultdict(list)
    for name in files:
        for damage in (pathlib.Path.unlink, lambda path: path.write_bytes(b'')):
            torn = tmp_path / 'torn'
            shutil.copytree(original, torn)
            damage(torn / name)
            try:
                assert _restored(CheckpointStore(torn), 7) == 7  # a file that orbax keeps for itself
            except CheckpointError as error:
                messages[name].append(str(error))
            shutil.rmtree(torn)
    assert len(messages) >= 4  # run_state.json, contents.json, the tree's metadata, the arrays
    for message in itertools.chain(*messages.values()):
        assert f'{torn}/step_00000007 is damaged' in message
        assert message.endswith('remove it to go back to step_00000006')


@pytest.mark.parametrize('name', ['run_state.json', 'arrays'])
def test_a_flipped_bit_is_reported(tmp_path, name):
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    path = tmp_path / 'step_00000001' / name
    if path.is_dir():
        path = max((p for p in path.rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(path.read_bytes())
    place = content.index(b'1') if name == 'run_state.json' else len(content) // 2
    content[place] ^= 2
    path.write_bytes(content)
    what = "leaf 'w'" if name == 'arrays' else 'run_state.json'
    with pytest.raises(CheckpointError, match=f'damaged .*{what} is not what was saved.*: there is no older one'):
        _restored(store, 1)


def test_too_little_space_is_seen_before_writing(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    usage = shutil.disk_usage(tmp_path)._replace(free=12345)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
    with pytest.raises(CheckpointError, match=f'{tmp_path} has 12345 bytes free, step 2 needs .* step 1 is untouched'):
        _save(store, 2)
    assert _restored(store, 1) == store.latest() == 1


def test_a_write_that_fails_leaves_the_step_before(tmp_path):
    # the limit on the size of a file makes write() fail half-way, as a disk that fills up does
    store = CheckpointStore(tmp_path)
    _save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=rf'saving step 2 to {tmp_path} failed .* \d+ bytes free.* step 1 is'):
            store.save(2, {'w': np.arange(10**6, dtype=np.float32)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert _restored(store, store.latest()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ['step_00000001']


def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    # a save of this size takes some 30 ms: kills come before, in and after every stage of it
    delays = [random.Random(0).uniform(0, 0.1) for _ in range(10)]
    repository = KILLED_SAVER.parents[2]
    command = [sys.executable, str(KILLED_SAVER), str(tmp_path), *map(str, delays)]
    subprocess.run(command, cwd=repository, env=_environment(repository), check=True, timeout=100)
    interrupted = 0
    for number in range(len(delays)):
        interrupted += any((tmp_path / str(number)).glob('.*'))
        store = CheckpointStore(tmp_path / str(number))
        done = int((tmp_path / f'{number}.done').read_text() or 1)
        step, arrays, run_state = store.restore_latest()
        assert step >= done  # what was reported as saved is saved
        assert run_state == {'step': step}
        np.testing.assert_array_equal(arrays['w'], np.full(1000, step, np.float32))
        _save(store, step + 1)  # and the store goes on, cleaning up what was left
        assert [path.name for path in (tmp_path / str(number)).iterdir()] == [f'step_{step + 1:08d}']
    assert interrupted > 0  # else no kill hit a save


def test_inline_in_a_running_loop_nothing_else_runs_meanwhile(tmp_path, monkeypatch):
    # as on platforms without uvloop: in the loop's own thread orbax would patch asyncio, or fail
    monkeypatch.setattr(importlib.import_module('orbax.checkpoint._src.asyncio_utils'), 'uvloop', None)
    store, order = CheckpointStore(tmp_path), []

    def save_and_restore():
        order.append('begin')
        _save(store, 1)
        order.append(_restored(store, 1))

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_soon(save_and_restore)
        loop.call_soon(order.append, 'next callback')
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert order == ['begin', 1, 'next callback']
    assert not hasattr(asyncio, '_nest_patched')  # orbax left asyncio as it was


def test_from_a_thread_beside_a_running_loop(tmp_path):
    store = CheckpointStore(tmp_path)

    async def main():
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, _save, store, 1)
        return await loop.run_in_executor(None, _restored, store, 1)

    assert asyncio.run(main()) == 1


def _save(store, step):
    store.save(step, {'w': np.full(1000, step, np.float32)}, {'step': step})


def _restored(store, step):
    """The step that arrays and run state both say they are of."""
    arrays, run_state = store.restore(step)
    assert set(np.asarray(arrays['w']).tolist()) == {run_state['step']}
    return run_state['step']


def _environment(repository):
    return {'PYTHONPATH': str(repository), 'PATH': '/usr/bin:/bin', 'JAX_PLATFORMS': 'cpu'}


def _some_arrays():
    return {
        'params': {
            'layers': {'0': {'query': np.arange(6, dtype=np.float32).reshape(2, 3)}},
            'head': np.ones(4, 'int8'),
        },
        'optimizer': {'count': np.array(3, np.int32), 'mu': np.zeros((2, 3), jnp.bfloat16)},
    }


@pytest.mark.parametrize('where', ['step', 'steps', 'workdir'])
def test_read_gives_the_arrays_by_name(tmp_path, where):
    store = CheckpointStore(tmp_path / 'checkpoints')
    store.save(1, {'params': {'head': np.zeros(4, 'int8')}}, {})
    store.save(2, _some_arrays(), {})
    directory = {'step': store.path(2), 'steps': tmp_path / 'checkpoints', 'workdir': tmp_path}[where]
    found = areal_jax.checkpoint.read(directory)
    assert set(found) == {'params/layers/0/query', 'params/head', 'optimizer/count', 'optimizer/mu'}
    for name, leaf in named_leaves(_some_arrays()).items():
        assert found[name].dtype == leaf.dtype
        np.testing.assert_array_equal(found[name], leaf)


def test_read_names_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match='has no checkpoint; name a step'):
        areal_jax.checkpoint.read(tmp_path)


def test_a_tree_opens_with_three_lines_of_orbax(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(2, _some_arrays(), {})
    # as docs/design/checkpoint.md has them
    import orbax.checkpoint as ocp

    with ocp.PyTreeCheckpointer() as reader:
        found = reader.restore(store.path(2) / 'arrays' / 'writer_0000' / '0000')
    assert found['params/head@0'].tolist() == [1, 1, 1, 1]
    np.testing.assert_array_equal(found['params/layers/0/query@0_0'], _some_arrays()['params']['layers']['0']['query'])
    assert len(found) == 4
