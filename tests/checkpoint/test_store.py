"""Arrays and run state of a step: both or neither, whatever happens while they are written; which checkpoint a run
goes on from, and how many stay on a disk that is nearly full."""

import asyncio
import importlib
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
    store.save(step, {'w': np.full(1000, step, np.float32), 'b': np.arange(5)}, {'step': step})


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


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope='module')
def original(tmp_path_factory):
    """Checkpoints of the steps 6 and 7."""
    directory = tmp_path_factory.mktemp('original')
    store = CheckpointStore(directory, keep=2)
    _save(store, 6)
    _save(store, 7)
    return directory


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 2
    path.write_bytes(content)


@pytest.mark.parametrize('damage', [pathlib.Path.unlink, lambda path: path.write_bytes(b''), flip])
def test_any_damage_is_harmless_or_reported_and_leads_to_the_checkpoint_before(original, tmp_path, damage, capfd):
    files = [path.relative_to(original) for path in original.glob('step_00000007/**/*') if path.is_file()]
    passed_over = set()
    for name in files:
        torn = tmp_path / 'torn'
        shutil.copytree(original, torn)
        damage(torn / name)
        reported = []
        try:
            jax.tree.map(np.asarray, CheckpointStore(torn).restore(7)[0])
        except CheckpointError as error:
            reported.append(str(error))
        step, arrays, run_state = CheckpointStore(torn).restore_latest()
        assert {step, run_state['step'], *np.asarray(arrays['w']).tolist()} == {step}
        said = capfd.readouterr()
        assert said.out == ''
        if step == 6:
            passed_over.add(name.parts[1])
            assert f'{torn}/step_00000007 is damaged' in reported[0]
            assert reported[0].endswith('remove it to go back to step_00000006')
            (line,) = said.err.splitlines()  # and no traceback of a reader
            assert f'warning: the checkpoint {torn}/step_00000007 is damaged (' in line
            assert 'goes on after update 6' in line
            assert names(torn) == ['damaged_step_00000007', 'step_00000006']
        else:
            assert (said.err, reported) == ('', [])  # a file that orbax keeps for itself
        shutil.rmtree(torn)
    assert passed_over == {'arrays', 'contents.json', 'run_state.json'}


def test_saves_after_a_fallback_take_no_notice_of_the_damaged_one(original, tmp_path):
    torn = tmp_path / 'torn'
    shutil.copytree(original, torn)
    for _ in range(2):  # the second time beside the damaged one of the first
        (torn / 'step_00000007' / 'contents.json').unlink()
        store = CheckpointStore(torn, keep=2)
        assert store.restore_latest()[0] == 6
        _save(store, 7)
    assert store.restore_latest()[0] == 7
    assert names(torn) == ['damaged_step_00000007', 'damaged_step_00000007_again', 'step_00000006', 'step_00000007']


def test_nothing_is_renamed_where_no_checkpoint_is_intact(original, tmp_path):
    torn = tmp_path / 'torn'
    shutil.copytree(original, torn)
    for step in (6, 7):
        (torn / f'step_0000000{step}' / 'run_state.json').write_text('{}')
    message = r'no checkpoint in .* is intact \(step_00000007: .*step_00000006: .*'
    for _ in range(2):  # a second --resume does not start at update 0 either
        with pytest.raises(CheckpointError, match=message):
            CheckpointStore(torn).restore_latest()
    assert names(torn) == ['step_00000006', 'step_00000007']


def test_what_a_process_may_not_read_is_not_called_damaged(original, tmp_path, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, 'Permission denied', str(path))

    torn = tmp_path / 'torn'
    shutil.copytree(original, torn)
    monkeypatch.setattr(pathlib.Path, 'read_text', refuse)
    with pytest.raises(PermissionError):
        CheckpointStore(torn).restore_latest()
    assert names(torn) == ['step_00000006', 'step_00000007']


def test_unfinished_directories_are_removed(original, tmp_path):
    torn = tmp_path / 'torn'
    shutil.copytree(original, torn)
    (torn / '.step_00000008.partial' / 'arrays').mkdir(parents=True)
    (torn / '.step_00000005.partial').mkdir()
    CheckpointStore(torn).remove_unfinished()
    assert names(torn) == ['step_00000006', 'step_00000007']


class Disk:
    """A disk of `capacity` checkpoints that looks as full as the directory on it is."""

    def __init__(self, directory, monkeypatch, capacity):
        self.directory, self.one = directory, 1 << 21
        usage = shutil.disk_usage(directory)
        self.fewest = 10
        monkeypatch.setattr(
            shutil, 'disk_usage', lambda path: usage._replace(free=int((capacity - self.used()) * self.one))
        )

    def used(self):
        steps = len([path for path in self.directory.iterdir() if path.name.startswith('step_')])
        self.fewest = min(self.fewest, steps) if steps else self.fewest
        return steps


def save_large(store, step):
    """With what is set aside for metadata 2 MiB."""
    store.save(step, {'w': np.zeros((1 << 20) // 4 - 16, np.float32)}, {'step': step})


@pytest.mark.parametrize(
    ('capacity', 'kept', 'warnings'),
    [(9, [2, 3, 4], 0), (4.3, [2, 3, 4], 0), (4.1, [3, 4], 1), (2.1, [4], 1)],
)
def test_fewer_stay_where_there_is_no_room_for_another(tmp_path, monkeypatch, capfd, capacity, kept, warnings):
    disk = Disk(tmp_path, monkeypatch, capacity)
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3, 4):
        save_large(store, step)
    assert [int(name[-1]) for name in names(tmp_path)] == kept
    assert capfd.readouterr().err.count('warning: checkpoint.keep=3, but ') == warnings
    assert disk.fewest == 1  # never without a complete one


def test_old_ones_are_not_removed_for_a_checkpoint_that_does_not_fit_anyway(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, keep=3)
    for step in (1, 2, 3):
        save_large(store, step)
    Disk(tmp_path, monkeypatch, 3.1)
    with pytest.raises(CheckpointError, match='step 4 needs'):
        store.save(4, {'w': np.zeros(1 << 23, np.float32)}, {})
    assert len(names(tmp_path)) == 3


def test_leaves_of_a_fallback_are_read_by_regions(original):
    _, arrays, _ = CheckpointStore(original).restore_latest()
    assert arrays['b'][(slice(1, 3),)].tolist() == [1, 2]
    assert len(jax.tree.leaves(arrays)) == 2
