"""A run of several processes on one machine: a dead server comes back, and nothing outlives the launcher."""

import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from areal_jax.app.command_line import load_config
from areal_jax.config import flatten
from checks.processes import is_alive
from launch import local

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ['--config=configs/tiny_cpu.py', '--config.publication.channel=files', '--config.rollout.server=own']
TWO = '--config.cluster.engines=2 x shared'
_LONGEST_S = 60.0  # on a busy machine


class Run:
    """A launcher of stand-ins; a context manager that kills it and all that it started."""

    def __init__(self, workdir, *flags, **behaviour):
        self.workdir = workdir
        (workdir / 'behaviour.json').write_text(json.dumps(behaviour))
        command = [sys.executable, '-m', 'tests.launch.stand_in_launcher', *CONFIG, *flags, f'--workdir={workdir}']
        self.launcher = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.launcher.kill()
        self.launcher.wait()
        self.launcher.stdout.close()
        self.await_gone()

    def events(self, kind):
        """The words after `kind`, 'server start', of each such event."""
        path = self.workdir / 'events'
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(kind).split() for line in lines if line == kind or line.startswith(f'{kind} ')]

    def await_events(self, kind, count=1):
        wait_until(lambda: len(self.events(kind)) >= count, f'{count} x {kind}')
        return self.events(kind)

    def pids(self):
        """Of every program that was started, and of their descendants."""
        kinds = 'trainer start', 'trainer descendant', 'server start', 'server descendant'
        return [int(words[0]) for kind in kinds for words in self.events(kind)]

    def await_gone(self):
        wait_until(lambda: not any(is_alive(pid) for pid in self.pids()), 'no process')

    def finish(self):
        """(exit code, output) of the launcher, once it and all others are gone."""
        output, _ = self.launcher.communicate(timeout=_LONGEST_S)
        assert 'processes left: 0' in output
        assert not any(is_alive(pid) for pid in self.pids())
        return self.launcher.returncode, output


def wait_until(holds, what):
    end_s = time.monotonic() + _LONGEST_S
    while not holds():
        assert time.monotonic() < end_s, f'waited for {what}'
        time.sleep(0.02)


def keeper_of(pid):
    return int(pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])


def test_servers_run_beside_the_trainer_and_end_with_it(tmp_path):
    with Run(tmp_path, TWO, '--resume') as run:
        run.await_events('server descendant', 4)
        (tmp_path / 'end_trainer').write_text('3')
        code, output = run.finish()
    assert code == 3  # the trainer's own
    assert output == 'jax: False, processes left: 0\n'  # and nothing to say
    [[_, *trainer]], servers = run.events('trainer start'), run.events('server start')
    assert trainer == [*CONFIG, *TWO.split(), '--resume', f'--workdir={tmp_path}']
    own = [f'--config={tmp_path}/servers/config.py', '--port=0', f'--workdir={tmp_path}']
    assert sorted(words for _, *words in servers) == [[*own, f'--name={number}'] for number in '01']
    assert len(run.events('server SIGTERM')) == len(run.events('server ends')) == 2
    for number in '01':
        assert 'output of a server' in (tmp_path / 'servers' / f'{number}.log').read_text()


def test_servers_have_the_config_of_the_run_and_one_engine_each(tmp_path):
    overrides = ['--config.run.steps=3', '--config.staleness.eta=inf', '--config.rollout.prefill_buckets=(32,128)']
    with Run(tmp_path, TWO, *overrides) as run:
        run.await_events('server start', 2)
    config = dict(flatten(load_config(f'{tmp_path}/servers/config.py')))
    expected = dict(flatten(load_config('configs/tiny_cpu.py'))) | {
        'publication.channel': 'files',
        'rollout.server': 'own',
        'cluster.engines': '1 x shared',
        'run.steps': 3,
        'staleness.eta': math.inf,
        'rollout.prefill_buckets': (32, 128),
    }
    assert config == expected


def test_a_server_that_is_killed_comes_back(tmp_path):
    with Run(tmp_path, server={'stop_code': 7}) as run:
        run.await_events('server descendant', 2)
        for starts in range(1, 8):  # more often than it may fail by itself
            [*_, (pid, *_)] = run.await_events('server start', starts)
            run.await_events('server descendant', 2 * starts)
            os.kill(int(pid), signal.SIGKILL)
        [*_, (last, *_)] = run.await_events('server start', 8)
        wait_until(lambda: len([pid for pid in run.pids() if is_alive(pid)]) == 6, 'descendants of the dead to be gone')
        assert is_alive(int(last))
        (tmp_path / 'end_trainer').write_text('0')
        code, output = run.finish()
    assert code == 0
    assert re.search(
        r'server 0 was ended by SIGKILL after \d s: it is started again in \d s; see .*servers/0.log', output
    )


def test_a_server_that_cannot_start_ends_the_run_with_a_sentence(tmp_path):
    with Run(tmp_path, server={'fails': True}, trainer={'stop_code': 75}) as run:
        code, output = run.finish()
    assert code == 2
    assert len(run.events('server start')) == 5
    assert re.search(
        r'server 0 ended with code 1 after \d s, 5 failures in a row: it is not started again; see ', output
    )
    assert 'no server is left: the trainer is told to save and stop' in output
    assert run.events('trainer SIGTERM') == [[]]


def test_a_server_that_would_fail_again_is_not_started_again(tmp_path):
    with Run(tmp_path, TWO, server={'fails': True, 'code': 2}, trainer={'stop_code': 75}) as run:
        code, output = run.finish()
    assert code == 2
    assert len(run.events('server start')) == 2
    assert re.search(r'ended with code 2 after \d s, as it would again: it is not started again; see ', output)


def test_a_dry_run_leaves_the_config_of_servers_that_run(tmp_path, capsys):
    workdir = tmp_path / 'run'
    flags = [*CONFIG, TWO, f'--workdir={workdir}', '--dry_run']
    assert local.main(['launch.local', *flags]) == 0
    assert '/servers/config.py' in capsys.readouterr().out
    assert not workdir.exists()


def test_a_server_that_was_told_to_stop_stays_away_and_the_others_go_on(tmp_path):
    with Run(tmp_path, TWO) as run:
        [[first, *_], _] = run.await_events('server start', 2)
        run.await_events('server descendant', 4)
        os.kill(int(first), signal.SIGTERM)
        run.await_events('server ends')
        time.sleep(0.5)
        assert len(run.events('server start')) == 2
        (tmp_path / 'end_trainer').write_text('0')
        code, output = run.finish()
    assert code == 0
    assert 'it was told to stop' in output


def test_ctrl_c_lets_the_trainer_save_while_the_servers_live(tmp_path):
    with Run(tmp_path, TWO, trainer={'stop_s': 0.5, 'stop_code': 75}) as run:
        run.await_events('server descendant', 4)
        os.killpg(run.launcher.pid, signal.SIGINT)  # as a terminal does
        code, _ = run.finish()
    assert code == 75
    lines = (tmp_path / 'events').read_text().splitlines()
    ends = [line for line in lines if 'SIG' in line or 'ends' in line]
    assert ends[:2] == ['trainer SIGINT', 'trainer ends']
    assert (
        sorted(ends[2:]) == ['server SIGTERM', 'server SIGTERM', 'server ends', 'server ends']
        or ends[2:]
        == [
            'server SIGTERM',
            'server ends',
        ]
        * 2
    )


def test_no_server_is_started_again_while_the_trainer_saves(tmp_path):
    with Run(tmp_path, trainer={'stop_s': 1.5, 'stop_code': 75}) as run:
        [[pid, *_]] = run.await_events('server start')
        run.await_events('server descendant', 2)
        run.launcher.send_signal(signal.SIGTERM)
        run.await_events('trainer SIGTERM')
        os.kill(int(pid), signal.SIGKILL)
        assert run.finish()[0] == 75
    assert len(run.events('server start')) == 1


def test_the_third_signal_kills_everything(tmp_path):
    with Run(tmp_path, trainer={'ignores_signals': True}, server={'ignores_signals': True}) as run:
        run.await_events('server descendant', 2)
        for count in (1, 2):
            run.launcher.send_signal(signal.SIGINT)
            run.await_events('trainer SIGINT', count)
        run.launcher.send_signal(signal.SIGTERM)
        code, output = run.finish()
    assert code == 75
    assert 'SIGTERM: everything is killed' in output
    assert len(run.events('trainer SIGINT')) == 2


def test_a_server_that_hangs_at_its_end_is_killed(tmp_path):
    with Run(tmp_path, server={'ignores_signals': True}) as run:
        run.await_events('server descendant', 2)
        (tmp_path / 'end_trainer').write_text('0')
        assert run.finish()[0] == 0
    assert run.events('server SIGTERM') == [[]]


@pytest.mark.parametrize('stopped', [False, True])
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path, stopped):
    with Run(tmp_path, TWO, trainer={'ignores_signals': True}) as run:
        pid, *_ = run.await_events('server start', 2)[0]
        run.await_events('server descendant', 4)
        assert all(is_alive(pid) for pid in run.pids())
        if stopped:
            os.kill(int(pid), signal.SIGSTOP)
        run.launcher.kill()
        run.await_gone()
        assert len(run.pids()) == 9
    assert run.events('trainer ends') == []


def test_nothing_outlives_a_keeper_that_is_killed(tmp_path):
    with Run(tmp_path) as run:
        [[pid, *_]] = run.await_events('server start')
        run.await_events('server descendant', 2)
        first = [int(pid), *(int(words[0]) for words in run.events('server descendant'))]
        os.kill(keeper_of(pid), signal.SIGKILL)
        run.await_events('server start', 2)
        wait_until(lambda: not any(map(is_alive, first)), 'what the keeper kept to be gone')
        run.await_events('server descendant', 4)
        (tmp_path / 'end_trainer').write_text('0')
        assert run.finish()[0] == 0


def test_a_program_dies_with_its_keeper_also_without_the_launcher(tmp_path):
    with Run(tmp_path) as run:
        [[pid, *_]] = run.await_events('server start')
        run.await_events('server descendant', 2)
        keeper = keeper_of(pid)
        run.launcher.send_signal(signal.SIGSTOP)
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: not is_alive(int(pid)), 'the program to be gone')
        run.launcher.send_signal(signal.SIGCONT)
        run.await_events('server start', 2)  # and the launcher clears up


def test_a_server_that_hangs_is_started_again(tmp_path):
    with Run(tmp_path, TWO) as run:
        [[hung, *_], [other, *_]] = run.await_events('server start', 2)
        run.await_events('server descendant', 4)
        time.sleep(1.5)  # longer than the launcher's patience with a silent one
        assert len(run.events('server start')) == 2
        os.kill(int(hung), signal.SIGSTOP)
        run.await_events('server start', 3)
        assert not is_alive(int(hung))
        assert is_alive(int(other))
        run.await_events('server descendant', 6)
        (tmp_path / 'end_trainer').write_text('0')
        code, output = run.finish()
    assert code == 0
    assert re.search(r'server \d has given no sign of life for a long time: it is killed', output)
    assert len(run.events('server start')) == 3


@pytest.mark.slow
def test_a_server_that_hangs_before_it_registers_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv('STAND_IN_REGISTER_S', '4')  # it takes that long to begin on a busy machine
    with Run(tmp_path, server={'hangs': True}) as run:
        [[hung, *_], *_] = run.await_events('server start', 2)
        assert not is_alive(int(hung))
        (tmp_path / 'end_trainer').write_text('0')
        code, output = run.finish()
    assert code == 0
    assert 'server 0 has given no sign of life for a long time: it is killed' in output


def test_a_trainer_that_is_killed_can_be_resumed(tmp_path):
    with Run(tmp_path) as run:
        run.await_events('server descendant', 2)
        [[pid, *_]] = run.events('trainer start')
        os.kill(int(pid), signal.SIGKILL)
        code, output = run.finish()
    assert code == 75
    assert 'the trainer was ended by SIGKILL: the same command with --resume goes on' in output


def test_two_launchers_of_a_workdir_are_refused(tmp_path):
    with Run(tmp_path) as run:
        run.await_events('trainer start')
        other = Run(tmp_path).launcher
        output, _ = other.communicate(timeout=_LONGEST_S)
        assert other.returncode == 2
        assert output.startswith(f'error: {tmp_path}/servers is in use by process {run.launcher.pid} on ')
        assert len(run.events('trainer start')) == 1


@pytest.mark.parametrize(
    ('flag', 'sentence'),
    [
        ('--config.publication.channel=device', "use publication.channel='files'"),
        (
            '--config.rollout.server=in_process',
            'has no servers that launch.local starts',
        ),
        ('--config.rollout.server=vllm', 'needs an interpreter that has vLLM'),
        ('--config.rollout.server=sglang', 'needs an interpreter that has SGLang'),
        ('--config.rollout.slots=0', 'rollout.slots=0 must be'),
    ],
)
def test_a_run_that_cannot_start_is_refused_by_name(tmp_path, flag, sentence):
    with Run(tmp_path, flag) as run:
        code, output = run.finish()
    assert code == 2
    assert sentence in output
    assert output.startswith('error: ')
    assert run.events('trainer start') == []


def test_no_module_of_the_package_imports_jax():
    names = [f'launch.{path.stem}' for path in (ROOT / 'launch').glob('*.py')]
    program = f'import sys\nfor name in {names}: __import__(name)\nprint({{"jax", "flax"}} & set(sys.modules))'
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == 'set()\n'
    assert len(names) > 6
