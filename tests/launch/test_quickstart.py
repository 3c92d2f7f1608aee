"""The answers that the quickstart keeps, read while it runs, after kill -9 and after --resume. Slow: six minutes."""

from __future__ import annotations

import json
import os
import pathlib
import resource
import signal
import subprocess
import time

import pytest

from checks.processes import RunningCommand, python

UPDATES, KILLED_AT = 16, 10  # after the checkpoint of update 8, so that two updates are made again
MOST_BYTES, MOST_SHARE = 20 * 10**6, 0.01
RUN = ('-m', 'areal_jax.main_train', '--config=configs/quickstart.py')
COMPILED = {'XLA_FLAGS': '', 'JAX_COMPILATION_CACHE_DIR': ''}  # a run as users have it, not a quick one


def read(workdir: pathlib.Path) -> list[dict]:
    """The groups that areal-rollouts shows; [] while it has nothing to show."""
    command = python('-m', 'areal_jax.main_rollouts', str(workdir), '--json')
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 2), done.stderr
    return json.loads(done.stdout) if done.returncode == 0 else []


def wait_for_update(run: RunningCommand, workdir: pathlib.Path, update: int) -> list[dict]:
    """What is shown when the update is."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and run.is_alive():
        if (groups := read(workdir)) and groups[-1]['update'] >= update:
            assert run.is_alive(), run.wait().stderr[-2000:]
            return groups
        time.sleep(1)
    raise AssertionError(run.wait(1).stderr[-2000:])


@pytest.mark.slow
def test_answers_are_read_under_way_after_a_kill_and_each_draw_once_after_a_resume(tmp_path):
    workdir = tmp_path / 'run'
    environment = COMPILED | {'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'cache')}
    with RunningCommand(python(*RUN, f'--workdir={workdir}'), tmp_path, environment) as run:
        under_way = wait_for_update(run, workdir, KILLED_AT)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    killed = read(workdir)
    assert killed[: len(under_way)] == under_way
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with RunningCommand(python(*RUN, f'--workdir={workdir}', '--resume'), tmp_path, environment) as run:
        ending = run.wait(900)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ending.exit_code == 0, ending.stderr[-2000:]
    groups = read(workdir)
    assert [group['update'] for group in groups] == [update for update in range(1, UPDATES + 1) for _ in range(4)]
    draws = [group['draw'] for group in groups]
    assert len(set(draws)) == len(draws)
    kept = [group for group in killed if group['update'] <= 8]
    assert groups[: len(kept)] == kept  # what the checkpoint holds is not written again
    assert all(answer['text'] for group in groups for answer in group['answers'])
    assert sum(path.stat().st_size for path in (workdir / 'rollouts').iterdir()) <= MOST_BYTES
    spent = json.loads((workdir / 'facts.json').read_text())['rollouts']['cpu_seconds']
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert 0 < spent <= MOST_SHARE * whole
    print(f'writer: {spent:.2f} of {whole:.0f} CPU s')
