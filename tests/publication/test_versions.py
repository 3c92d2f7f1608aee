"""Directories of versions: names, and the lock of a reader that may be another process and may die."""

import pathlib
import signal
import subprocess
import sys

import pytest

from areal_jax.publication.versions import PublicationError, keep_while_read, list_versions, remove_unread, version_path

ROOT = pathlib.Path(__file__).parents[2]
READER = """
import pathlib, sys
from areal_jax.publication.versions import keep_while_read
with keep_while_read(pathlib.Path(sys.argv[1])):
    print('reads', flush=True)
    sys.stdin.read()
"""


def make_version(directory, version, content='{}'):
    path = version_path(directory, version)
    path.mkdir()
    (path / 'manifest.json').write_text(content)
    return path


def test_complete_versions_are_listed_by_number(tmp_path):
    made = {version: make_version(tmp_path, version) for version in (10, 9, 1_000_000)}
    (tmp_path / 'v000011').mkdir()  # without a manifest
    for name in ('v12', 'version', '.v000013.partial'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'manifest.json').write_text('{}')
    assert list_versions(tmp_path) == {9: made[9], 10: made[10], 1_000_000: made[1_000_000]}
    assert list(list_versions(tmp_path)) == [9, 10, 1_000_000]
    assert list_versions(tmp_path / 'nowhere') == {}


def test_the_lock_of_a_reader_ends_with_its_process(tmp_path):
    path = make_version(tmp_path, 3)
    command = [sys.executable, '-c', READER, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout.readline() == b'reads\n'
        assert not remove_unread(path)
        assert path.exists()
        reader.send_signal(signal.SIGKILL)
        reader.wait()
    assert remove_unread(path)
    assert list(tmp_path.iterdir()) == []


def test_two_readers_share_a_version(tmp_path):
    path = make_version(tmp_path, 3)
    with keep_while_read(path) as one, keep_while_read(path) as other:
        assert one == other == b'{}'
    assert remove_unread(path)


def test_a_version_that_is_being_removed_is_not_read(tmp_path, monkeypatch):
    path = make_version(tmp_path, 3)

    def read_too_late(directory):
        with pytest.raises(PublicationError, match='v000003 is being removed: load a newer version'):
            keep_while_read(directory).__enter__()

    monkeypatch.setattr('areal_jax.files.remove_directory', read_too_late)
    assert remove_unread(path)


def test_a_file_system_without_locks_is_used_without_them(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError('no locks available')

    monkeypatch.setattr('fcntl.flock', refuse)
    path = make_version(tmp_path, 3)
    with keep_while_read(path) as content:
        assert content == b'{}'
    assert remove_unread(path)


def test_the_module_is_free_of_jax():
    program = 'import sys, areal_jax.publication.versions\nprint("jax" in sys.modules)'
    assert subprocess.check_output([sys.executable, '-c', program], cwd=ROOT, text=True) == 'False\n'
