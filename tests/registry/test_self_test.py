"""A directory that cannot hold the registry of a run is refused in one sentence."""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib

import pytest

from areal_jax.errors import UserError
from areal_jax.registry import require_usable


def test_an_ordinary_directory_passes_and_nothing_is_left_in_it(tmp_path):
    require_usable(tmp_path)
    assert list((tmp_path / 'registry').iterdir()) == []


def _raise(number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


def _listing_of_before(path):
    return []


@pytest.mark.parametrize(
    ('owner', 'name', 'broken', 'sentence'),
    [
        (pathlib.Path, 'rename', _raise(errno.ENOSYS), 'renaming a file over another does not work there (Function'),
        (os, 'listdir', _listing_of_before, 'listing what was renamed does not give what was put there'),
        (os, 'utime', _raise(errno.EPERM), 'setting the time of a file does not work there'),
        (fcntl, 'flock', _raise(errno.ENOLCK), 'locking a file does not work there (No locks available)'),
        (fcntl, 'flock', lambda file, how: None, 'gives one lock to two holders'),
        (os, 'utime', lambda path, ns: None, 'reading the time of a file does not give what was put there'),
    ],
)
def test_what_does_not_work_is_named(tmp_path, monkeypatch, owner, name, broken, sentence):
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, broken)
        with pytest.raises(UserError) as refused:
            require_usable(tmp_path)
    assert sentence in str(refused.value)
    assert str(refused.value).startswith(str(tmp_path / 'registry'))
    assert str(refused.value).endswith('NFS or Lustre for instance')
    assert list((tmp_path / 'registry').iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / 'registry').touch()
    with pytest.raises(UserError, match='making it does not work there'):
        require_usable(tmp_path)
