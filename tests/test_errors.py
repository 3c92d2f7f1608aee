"""What a user can mend is one sentence with exit code 2; everything else keeps its traceback and exits with 1."""

import errno

import pytest

from areal_jax.app.process.ending import end_command
from areal_jax.config.fields import ConfigError
from areal_jax.errors import LostPeerError, UserError, describe_disk_trouble

ENDINGS = {
    'user': (ConfigError('run.steps=0 must be at least 1'), 2, 'error: run.steps=0 must be at least 1\n'),
    'lost peer': (LostPeerError('process 1 is gone'), 75, 'error: process 1 is gone\n'),
    'full disk': (OSError(errno.ENOSPC, 'No space left on device', 'x/m.jsonl'), 2, 'x/m.jsonl: the disk is full'),
    'device memory': (RuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nx'), 2, 'allocating 9'),
    'host memory': (MemoryError(), 2, 'error: out of memory (no memory is left): lower learner.rows_per_microbatch'),
    'ctrl-c': (KeyboardInterrupt(), 75, 'error: stopped\n'),
    'bug': (RuntimeError('injected'), 1, 'Traceback'),
    'ValueError of a library': (ValueError('shapes do not match'), 1, 'Traceback'),
    'missing file': (FileNotFoundError(errno.ENOENT, 'No such file', 'x'), 1, 'Traceback'),
}  # fmt: skip


@pytest.mark.parametrize('case', ENDINGS)
def test_every_exception_has_its_ending(case, capsys):
    error, code, text = ENDINGS[case]

    def command():
        raise error

    assert end_command(command, doing='writing to runs/x') == code
    shown = capsys.readouterr().err
    assert text in shown
    assert ('Traceback' in shown) == (code == 1)


def test_ctrl_c_tells_how_to_go_on_only_where_the_command_can(capsys):
    def command():
        raise KeyboardInterrupt

    end_command(command, doing='')
    end_command(command, doing='', again='the same command with --resume goes on')
    assert capsys.readouterr().err == ('error: stopped\nerror: stopped; the same command with --resume goes on\n')


def test_a_command_that_returns_keeps_its_exit_code():
    assert end_command(lambda: 3, doing='') == 3


def test_an_error_without_a_file_name_says_what_was_going_on():
    sentence = describe_disk_trouble(OSError(errno.EROFS, 'Read-only file system'), 'writing to runs/x')
    assert sentence == 'writing to runs/x: the disk is read-only: use another workdir (Read-only file system)'
    assert describe_disk_trouble(UserError('x'), 'writing') == ''
