"""Which checkpoint a run goes on from: the newest that is intact; and how many stay on a disk that is nearly full."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from areal_jax.checkpoint.store import CheckpointError, CheckpointStore


def save(store, step):
    store.save(step, {'w': np.full(1000, step, np.float32), 'b': np.arange(5)}, {'step': step})


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope='module')
def original(tmp_path_factory):
    """Checkpoints of the steps 6 and 7."""
    directory = tmp_path_factory.mktemp('original')
    store = CheckpointStore(directory, keep=2)
    save(store, 6)
    save(store, 7)
    return directory


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 2
    path.write_bytes(content)


@pytest.mark.parametrize('damage', [pathlib.Path.unlink, lambda path: path.write_bytes(b''), flip])
def test_any_damage_is_harmless_or_leads_to_the_checkpoint_before(original, tmp_path, damage, capfd):
    files = [path.relative_to(original) for path in original.glob('step_00000007/**/*') if path.is_file()]
    passed_over = set()
    for name in files:
        torn = tmp_path / 'torn'
        shutil.copytree(original, torn)
        damage(torn / name)
        step, arrays, run_state = CheckpointStore(torn).restore_latest()
        assert {step, run_state['step'], *np.asarray(arrays['w']).tolist()} == {step}
        said = capfd.readouterr()
        assert said.out == ''
        if step == 6:
            passed_over.add(name.parts[1])
            (line,) = said.err.splitlines()  # and no traceback of a reader
            assert f'warning: the checkpoint {torn}/step_00000007 is damaged (' in line
            assert 'goes on after update 6' in line
            assert names(torn) == ['damaged_step_00000007', 'step_00000006']
        else:
            assert said.err == ''
            assert step == 7
        shutil.rmtree(torn)
    assert passed_over == {'arrays', 'contents.json', 'run_state.json'}


def test_saves_after_a_fallback_take_no_notice_of_the_damaged_one(original, tmp_path):
    torn = tmp_path / 'torn'
    shutil.copytree(original, torn)
    for _ in range(2):  # the second time beside the damaged one of the first
        (torn / 'step_00000007' / 'contents.json').unlink()
        store = CheckpointStore(torn, keep=2)
        assert store.restore_latest()[0] == 6
        save(store, 7)
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
