"""The key of a run is made once, whoever is first, and read from a file that is private only."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from areal_jax.distributed.handshake import KeyFileError, key_path, load_key


def test_all_who_come_at_the_same_time_have_one_key_that_nobody_else_can_read(tmp_path):
    path, keys, start = key_path(tmp_path), [], threading.Barrier(8)

    def load():
        start.wait(5)
        keys.append(load_key(path))

    threads = [threading.Thread(target=load) for _ in range(8)]
    mask = os.umask(0)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    finally:
        os.umask(mask)
    assert len(keys) == 8
    assert len(set(keys)) == 1
    assert len(keys[0]) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ['key']
    assert path == tmp_path / 'registry' / 'key'


def test_a_key_is_made_where_files_cannot_be_linked(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(os, 'link', refuse)
    assert load_key(key_path(tmp_path)) == load_key(key_path(tmp_path))
    assert [entry.name for entry in (tmp_path / 'registry').iterdir()] == ['key']


def test_another_run_has_another_key(tmp_path):
    assert load_key(key_path(tmp_path / 'one')) != load_key(key_path(tmp_path / 'other'))


@pytest.mark.parametrize('mode', [0o644, 0o660, 0o400])
def test_a_key_that_others_could_read_is_refused(tmp_path, mode):
    path = key_path(tmp_path)
    load_key(path)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match=rf'{path} has mode {mode:o}, .*: remove it, or chmod 600'):
        load_key(path)


def test_a_key_of_another_user_is_refused(tmp_path, monkeypatch):
    path = key_path(tmp_path)
    load_key(path)
    monkeypatch.setattr(os, 'geteuid', lambda: 4242)
    with pytest.raises(KeyFileError, match=r'belongs to user \d+, and this process to user 4242: .* as one user'):
        load_key(path)


@pytest.mark.parametrize('content', [b'short', b'x' * 70, b'ab' * 33])
def test_a_file_that_holds_no_key_is_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr('areal_jax.distributed.handshake.BEING_WRITTEN_S', 0.1)
    path = key_path(tmp_path)
    load_key(path)
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match=r'holds no key of 32 bytes: remove it'):
        load_key(path)
