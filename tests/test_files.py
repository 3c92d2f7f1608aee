"""Files are whole or absent."""

import errno
import fcntl
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from areal_jax import files
from areal_jax.errors import UserError


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / 'a.json'
    files.write_json(path, {'a': 1})
    files.write_json(path, {'a': 2})
    assert json.loads(path.read_text()) == {'a': 2}
    assert os.listdir(tmp_path) == ['a.json']


def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    path = tmp_path / 'a.txt'
    files.write_text(path, 'old')

    def fail(_):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(OSError, match='No space left') as caught:
        files.write_text(path, 'new')
    assert caught.value.filename == str(path)
    assert path.read_text() == 'old'
    assert os.listdir(tmp_path) == ['a.txt']


def test_infinity_is_written_only_where_it_is_allowed(tmp_path):
    with pytest.raises(ValueError, match='JSON compliant'):
        files.write_json(tmp_path / 'a.json', float('inf'))
    files.write_json(tmp_path / 'a.json', float('inf'), allow_nan=True)
    assert json.loads((tmp_path / 'a.json').read_text()) == float('inf')


def test_a_directory_has_one_user_at_a_time(tmp_path):
    first = files.DirectoryLock(tmp_path / 'run')
    with pytest.raises(UserError, match=rf'run is in use by process {os.getpid()} on .*--workdir'):
        files.DirectoryLock(tmp_path / 'run')
    first.release()
    files.DirectoryLock(tmp_path / 'run').release()


def test_a_killed_user_leaves_no_lock(tmp_path):
    program = """
import pathlib, sys, time
from areal_jax.files import DirectoryLock
lock = DirectoryLock(pathlib.Path(sys.argv[1]))
print('held', flush=True)
time.sleep(60)
"""
    held = subprocess.Popen([sys.executable, '-c', program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert held.stdout.readline() == 'held\n'
    with pytest.raises(UserError, match=f'process {held.pid} on {socket.gethostname()}'):
        files.DirectoryLock(tmp_path)
    held.kill()
    held.communicate()
    files.DirectoryLock(tmp_path).release()


def test_a_file_system_without_locks_is_said_so(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, 'No locks available')

    monkeypatch.setattr(fcntl, 'flock', refuse)
    files.DirectoryLock(tmp_path).release()
    assert 'has no locks (No locks available): nothing keeps a second run' in capsys.readouterr().err


def test_a_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / 'run').write_text('')
    with pytest.raises(UserError, match='run is a file: choose another directory'):
        files.DirectoryLock(tmp_path / 'run')


BROKEN = {
    b'{"a": 1,\n "b"': r'is no JSON: line 2: Expecting',
    b'': r'is no JSON: Expecting value',
    b'{"a": "\xff"}': r'is no JSON: it is not UTF-8',
    b'{\n\n"a": "\xff"}': r'is no JSON: line 3: it is not UTF-8',
    b'[1]': r'holds a list, not an object',
    b'null': r'holds a NoneType, not an object',
    b'{"a": ' + b'[' * 200_000: r'is no JSON that can be read \(RecursionError',
    b'{"a": ' + b'1' * 5000 + b'}': r'is no JSON that can be read \(ValueError: Exceeds the limit',
}


@pytest.mark.parametrize('content', BROKEN, ids=list(range(len(BROKEN))))
def test_json_that_cannot_be_used_is_named_with_its_line_and_the_fix(tmp_path, content):
    path = tmp_path / 'a.json'
    path.write_bytes(content)
    with pytest.raises(files.FileError, match=rf'^{path} {BROKEN[content]}.*; make it new$') as refused:
        files.read_json(path, 'make it new')
    assert '\n' not in str(refused.value)


def test_a_json_file_that_is_missing_or_a_directory_is_named(tmp_path):
    for path in (tmp_path / 'none.json', tmp_path):
        with pytest.raises(files.FileError, match=rf'^{path} cannot be read \(.*; restore it or remove it$'):
            files.read_json(path)
    (tmp_path / 'a.json').write_text('{"a": 1}')
    assert files.read_json(tmp_path / 'a.json') == {'a': 1}


def test_pipes_and_files_without_an_end_are_not_read(tmp_path, at_once, monkeypatch):
    os.mkfifo(tmp_path / 'pipe')
    (tmp_path / 'endless').symlink_to('/dev/zero')
    for path in (tmp_path / 'pipe', tmp_path / 'endless'):
        with pytest.raises(files.FileError, match=rf'^{path} cannot be read \(it is no regular file\); mend it$'):
            files.read_regular(path, 'mend it')
    (tmp_path / 'large').write_bytes(b'1234')
    assert files.read_regular(tmp_path / 'large', most_bytes=4) == b'1234'
    with pytest.raises(files.FileError, match='has more than 3 bytes; restore it or remove it'):
        files.read_regular(tmp_path / 'large', most_bytes=3)
    assert b'MemTotal' in files.read_regular(pathlib.Path('/proc/meminfo'))  # has no size of its own
    monkeypatch.setattr(files, 'READ_S', -1.0)
    with pytest.raises(files.FileError, match='was not read within -1 s'):
        files.read_regular(tmp_path / 'large')


def test_a_look_at_a_workdir_keeps_no_run_from_using_it(tmp_path):
    """A look has the lock for an instant: whoever wants the directory tries again."""
    files.DirectoryLock(tmp_path).release()
    with (tmp_path / files.LOCK).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.07, fcntl.flock, [looking, fcntl.LOCK_UN]).start()
        files.DirectoryLock(tmp_path).release()
        fcntl.flock(looking, fcntl.LOCK_SH)
        with pytest.raises(UserError, match='is in use by'):
            files.DirectoryLock(tmp_path)


def test_a_value_from_outside_is_json_or_a_value_error():
    assert files.decode_json(b'{"a": [1]}') == {'a': [1]}
    for content in (b'[' * 100_000, '{"a":' * 50_000, b'\xff', '', '9' * 5000):
        with pytest.raises(ValueError, match=r'nested|codec|Expecting|digits'):
            files.decode_json(content)
