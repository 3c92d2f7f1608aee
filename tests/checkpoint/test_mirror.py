"""Copies in an object store: committed as a whole or absent, verified when they come back."""

import errno

import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem

from areal_jax.checkpoint.mirror import DamagedCopyError, Mirror, MirrorError

STORE = MemoryFileSystem()


@pytest.fixture(autouse=True)
def empty_store():
    STORE.store.clear()


@pytest.fixture(params=['memory://', 'directory'])
def mirror(request, tmp_path):
    return Mirror('memory://bucket/run/' if request.param == 'memory://' else str(tmp_path / 'mirror' / 'run'))


@pytest.fixture
def sources(tmp_path):
    return make_files(tmp_path / 'source', {'a': b'', 'b/c': b'content', 'b/d': bytes(range(256)) * 100})


def make_files(directory, contents):
    for path, content in contents.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    return {path: directory / path for path in contents}


def read_files(directory):
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob('*') if p.is_file()}


def test_a_copy_comes_back_as_it_was(mirror, sources, tmp_path):
    assert mirror.steps() == []
    mirror.write('step_00000002', 2, sources)
    assert mirror.steps() == ['step_00000002']
    assert mirror.fetch('step_00000002', tmp_path / 'back').step == 2
    assert read_files(tmp_path / 'back') == {path: file.read_bytes() for path, file in sources.items()}


def test_a_later_copy_with_the_name_replaces_the_first(mirror, sources, tmp_path):
    mirror.write('finished', 2, sources)
    mirror.write('finished', 3, {'a': sources['b/c']})
    mirror.fetch('finished', tmp_path / 'back')
    assert read_files(tmp_path / 'back') == {'a': b'content'}


def test_steps_are_sorted_by_number_and_repetition(mirror, sources):
    for name in ('step_00000010', 'step_00000002_1', 'step_00000002'):
        mirror.write(name, 2, sources)
    assert mirror.steps() == ['step_00000002', 'step_00000002_1', 'step_00000010']


@pytest.mark.parametrize('break_at', [0, 1, 2, 3])
def test_an_upload_that_breaks_at_any_file_commits_nothing(sources, monkeypatch, break_at):
    """File 3 is the record itself."""
    mirror, opened, whole = Mirror('memory://bucket/run'), [], MemoryFileSystem.open

    def open_or_break(self, path, mode='rb', **settings):
        opened.extend([path] if mode == 'wb' else [])
        if mode == 'wb' and len(opened) == break_at + 1:
            raise ConnectionResetError('the connection was cut')
        return whole(self, path, mode, **settings)

    monkeypatch.setattr(MemoryFileSystem, 'open', open_or_break)
    with pytest.raises(MirrorError, match=r'^memory://bucket/run: ConnectionResetError: the connection was cut$'):
        mirror.write('step_00000002', 2, sources)
    assert mirror.steps() == []
    monkeypatch.setattr(MemoryFileSystem, 'open', whole)
    mirror.write('step_00000002', 2, sources)
    assert mirror.steps() == ['step_00000002']
    opened.clear()
    monkeypatch.setattr(MemoryFileSystem, 'open', open_or_break)
    with pytest.raises(MirrorError):
        mirror.write('step_00000002', 2, sources)
    assert mirror.steps() == []  # some files of it may be of the second upload


@pytest.mark.parametrize(
    ('error', 'sentence'),
    [
        (OSError(errno.ENOSPC, 'No space left on device'), r'OSError: \[Errno 28\] No space left on device'),
        (PermissionError('Access Denied'), 'PermissionError: Access Denied'),
    ],
)
def test_a_refusal_is_one_sentence_with_the_address(sources, monkeypatch, error, sentence):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(MemoryFileSystem, 'open', refuse)
    with pytest.raises(MirrorError, match=f'^memory://bucket/run: {sentence}$'):
        Mirror('memory://bucket/run').write('step_00000002', 2, sources)


def test_a_store_that_keeps_less_than_it_got_commits_nothing(sources, monkeypatch):
    mirror, whole = Mirror('memory://bucket/run'), MemoryFileSystem.find

    def lose(self, path, **settings):
        found = whole(self, path, **settings)
        next(entry for name, entry in found.items() if name.endswith('b/c'))['size'] -= 1
        return found

    monkeypatch.setattr(MemoryFileSystem, 'find', lose)
    with pytest.raises(MirrorError, match=r'b/c has 6 bytes after an upload of 7$'):
        mirror.write('step_00000002', 2, sources)
    monkeypatch.setattr(MemoryFileSystem, 'find', whole)
    assert mirror.steps() == []


@pytest.mark.parametrize(('change', 'reason'), [(b'CONTENT', 'is not the committed file'), (None, 'lacks b/c')])
def test_a_file_that_changed_in_the_store_is_found(sources, tmp_path, change, reason):
    mirror = Mirror('memory://bucket/run')
    mirror.write('step_00000002', 2, sources)
    stored = '/bucket/run/step_00000002/b/c'
    if change is None:
        STORE.rm_file(stored)
    else:
        STORE.pipe_file(stored, change)
    with pytest.raises(DamagedCopyError, match=reason):
        mirror.fetch('step_00000002', tmp_path / 'back')


@pytest.mark.parametrize('content', [b'{', b'{"step": 2}', b'{"step": 2, "files": {"a": 3}}'])
def test_a_record_that_is_cut_or_of_another_form_is_damage(sources, content):
    mirror = Mirror('memory://bucket/run')
    mirror.write('step_00000002', 2, sources)
    STORE.pipe_file('/bucket/run/step_00000002/committed.json', content)
    with pytest.raises(DamagedCopyError, match=r'committed\.json cannot be read'):
        mirror.read_record('step_00000002')


def test_no_record_leads_out_of_the_directory(tmp_path):
    mirror = Mirror('memory://bucket/run')
    mirror.write('step_00000002', 2, make_files(tmp_path, {'a': b'1'}))
    record = STORE.cat_file('/bucket/run/step_00000002/committed.json')
    STORE.pipe_file('/bucket/run/step_00000002/committed.json', record.replace(b'"a"', b'"../a"'))
    with pytest.raises(DamagedCopyError, match=r"has a file outside of it, '\.\./a'"):
        mirror.fetch('step_00000002', tmp_path / 'back')


def test_the_newest_stay_and_unfinished_or_later_copies_go(mirror, sources):
    for step in range(1, 6):
        mirror.write(f'step_{step:08d}', step, sources)
    mirror.write('finished', 5, sources)
    store, root = url_to_fs(mirror.address)
    store.rm_file(f'{root}/step_00000002/committed.json')
    mirror.remove_others('step_00000004', keep=2)
    left = {path.removeprefix(f'{root}/').split('/')[0] for path in store.find(root)}
    assert left == {'step_00000003', 'step_00000004', 'finished'}


def test_a_file_that_grows_is_copied_to_its_size_at_the_start(tmp_path):
    """The record of a file must describe the stored bytes."""
    path = tmp_path / 'events.jsonl'
    path.write_bytes(b'12345')

    def grow():
        with path.open('ab') as file:
            file.write(b'6789')

    mirror = Mirror('memory://bucket/run', check=grow)
    mirror.write('step_00000002', 2, {'events.jsonl': path})
    mirror.fetch('step_00000002', tmp_path / 'back')
    assert (tmp_path / 'back' / 'events.jsonl').read_bytes() == b'12345'
