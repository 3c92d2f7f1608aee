"""A disk that is full at any moment ends the run in one sentence that names the file."""

import errno
import os
import pathlib
import subprocess
import sys

import psutil
import pytest

from areal_jax.app.library import build_run
from areal_jax.control.event_writer import EventLog
from areal_jax.errors import describe_disk_trouble
from areal_jax.telemetry.metrics import MetricsWriter
from tests.app.small import small_config
from tests.app.test_program_run import FIELDS, PROGRAM

ROOT = pathlib.Path(__file__).parents[2]


class FullDisk:
    """A raw file that holds no more than `room` bytes from when that is set."""

    def __init__(self, file):
        self._file, self.room = file, sys.maxsize

    def write(self, content):
        taken = content[: self.room]
        self.room -= len(taken)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(taken)

    def close(self):
        self._file.close()

    @property
    def closed(self):
        return self._file.closed


@pytest.fixture
def disks(monkeypatch):
    """By name, the files that are written line by line."""
    found, opened = {}, pathlib.Path.open

    def open_file(path, mode='r', *args, **kwargs):
        file = opened(path, mode, *args, **kwargs)
        return found.setdefault(path.name, FullDisk(file)) if mode == 'ab' else file

    monkeypatch.setattr(pathlib.Path, 'open', open_file)
    return found


def test_a_line_that_does_not_fit_names_its_file_and_nothing_comes_after_it(tmp_path, disks):
    log, metrics = EventLog(tmp_path / 'events.jsonl'), MetricsWriter(tmp_path, tensorboard=False)
    disks['events.jsonl'].room, disks['metrics.jsonl'].room = 100, 10
    log.write('draw', draw=0)
    for draw in (1, 2):
        with pytest.raises(OSError, match='No space left') as caught:
            log.write('draw', draw=draw)
        assert caught.value.filename == str(tmp_path / 'events.jsonl')
        disks['events.jsonl'].room = 1000  # there is room again, behind a part of a line
    with pytest.raises(OSError, match='No space left') as caught:
        metrics.write(1, {'loss/value': 1.0})
    assert caught.value.filename == str(tmp_path / 'metrics.jsonl')
    log.close()
    metrics.close()
    assert (tmp_path / 'events.jsonl').stat().st_size == 100


@pytest.mark.parametrize('room', [0, 300, 5000])
def test_the_first_error_of_a_run_wins_and_everything_is_closed(tmp_path, disks, room):
    session = build_run(small_config(), tmp_path)
    disks['events.jsonl'].room = room
    with pytest.raises(OSError, match='No space left') as caught:
        session.train()
    sentence = describe_disk_trouble(caught.value, f'writing to {tmp_path}')
    assert sentence == (
        f'writing to {tmp_path}, at {tmp_path}/events.jsonl: the disk is full: make room (No space left on device)'
    )
    assert [disks[name].closed for name in ('events.jsonl', 'metrics.jsonl')] == [True, True]


@pytest.mark.parametrize('room', [300, 30_000])
def test_a_run_of_programs_ends_with_its_programs(tmp_path, disks, room):
    (tmp_path / 'program.py').write_text(PROGRAM)
    command = f'{sys.executable} {tmp_path}/program.py {tmp_path}/turns'
    session = build_run(small_config(**FIELDS, agent__command=command), tmp_path / 'run')
    disks['events.jsonl'].room = room
    with pytest.raises(OSError, match='No space left'):
        session.train()
    assert (tmp_path / 'turns').exists() == (room == 30_000)  # programs ran before
    left = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert [words for words in left if 'program.py' in ' '.join(words) or 'fork_server.py' in ' '.join(words)] == []


@pytest.mark.slow
@pytest.mark.parametrize('limit', [7_000, 40_000])
def test_a_file_that_may_not_grow_is_one_sentence(tmp_path, limit):
    command = [sys.executable, '-m', 'areal_jax.main_train', '--config=configs/tiny_cpu.py', f'--workdir={tmp_path}']
    command += ['--config.run.steps=30', '--config.evaluation.problems=0']
    done = subprocess.run(
        ['sh', '-c', f'ulimit -f {limit // 512}; exec "$@"', 'sh', *command],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={k: v for k, v in os.environ.items() if not k.startswith('JAX_')},  # no cache of programs
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith('error: ')] == done.stderr.splitlines()
    assert f'{tmp_path}/' in done.stderr
    assert 'the file may not grow' in done.stderr
