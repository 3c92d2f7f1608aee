"""A run in roles on one machine: who is started again with whom, and that nothing outlives the launcher."""

import os
import re
import signal

import pytest

from areal_jax.app.command_line import load_config
from launch.roles import find_cause, find_patience, plan_roles
from tests.launch.test_local import CONFIG, TWO, Run, is_alive

HOSTS = ['--config.cluster.learner=hosts=2 x data=4', '--config.learner.rows_per_microbatch=4', TWO]
NAMES = ['controller-0', 'learner-0', 'learner-1', 'engine-0', 'engine-1']


class Roles(Run):
    """The same with stand-ins for roles."""

    def __init__(self, workdir, *flags, **behaviour):
        super().__init__(
            workdir, *HOSTS, *flags, **{name.replace('_', '-'): value for name, value in behaviour.items()}
        )

    def pids(self):
        return [
            int(words[0])
            for name in NAMES
            for kind in ('start', 'descendant')
            for words in self.events(f'{name} {kind}')
        ]

    def await_starts(self, count=1, names=NAMES):
        """The newest process of each name, once it has started so often and has its descendants."""
        for name in names:
            self.await_events(f'{name} descendant', 2 * count)
        return {name: int(self.events(f'{name} start')[-1][0]) for name in names}


def end(workdir, name, code):
    (workdir / f'end_{name}').write_text(str(code))


def test_all_roles_run_until_the_controller_ends(tmp_path):
    with Roles(tmp_path) as run:
        run.await_starts()
        end(tmp_path, 'learner-0', 0)
        end(tmp_path, 'learner-1', 0)
        end(tmp_path, 'controller-0', 3)
        code, output = run.finish()
    assert code == 3
    assert 'last line of a role' in output  # of the controller
    [[_, *words]] = run.events('learner-1 start')
    assert words == [
        '--role=learner',
        '--index=1',
        '--count=2',
        *CONFIG,
        *' '.join(HOSTS).split(),
        f'--workdir={tmp_path}',
    ]
    assert run.events('learner-1 flags')[0][0].endswith('--xla_force_host_platform_device_count=2')
    assert [len(run.events(f'engine-{k} SIGTERM')) for k in (0, 1)] == [1, 1]
    logs = sorted(path.name for path in (tmp_path / 'logs').glob('*.log'))
    assert logs == sorted(f'{name}.1.log' for name in NAMES)


def test_a_dry_run_prints_one_command_a_line(tmp_path):
    with Roles(tmp_path, '--dry_run') as run:
        code, output = run.finish()
    lines = output.splitlines()[:-1]
    assert code == 0
    assert [re.search(r'--role=(\w+) --index=(\d)', line).groups() for line in lines] == [
        tuple(name.split('-')) for name in NAMES
    ]
    assert not any('--dry_run' in line for line in lines)
    assert lines[0].split(' -m ')[0].count('XLA_FLAGS') == 0
    assert run.pids() == []
    assert not (tmp_path / 'logs').exists()


def test_an_engine_that_is_killed_comes_back_alone(tmp_path):
    with Roles(tmp_path) as run:
        before = run.await_starts()
        os.kill(before['engine-1'], signal.SIGKILL)
        run.await_starts(2, ['engine-1'])
        assert all(is_alive(pid) for name, pid in before.items() if name != 'engine-1')
        end(tmp_path, 'controller-0', 0)
        code, output = run.finish()
    assert code == 0
    assert re.search(
        r'server engine-1 was ended by SIGKILL .*: it is started again in \d s; see .*engine-1.1.log', output
    )
    assert (tmp_path / 'logs' / 'engine-1.2.log').exists()


def test_an_exporter_comes_back_alone_and_may_finish_its_work(tmp_path):
    """It is told when the controller has ended, and gets longer than an engine to end."""
    with Roles(tmp_path, '--config.checkpoint.every=2', '--config.run.export_every=2') as run:
        before = run.await_starts(names=[*NAMES, 'exporter-0'])
        os.kill(before['exporter-0'], signal.SIGKILL)
        (exporter,) = run.await_starts(2, ['exporter-0']).values()
        assert all(is_alive(pid) for name, pid in before.items() if name != 'exporter-0')
        end(tmp_path, 'controller-0', 0)
        run.await_events('exporter-0 SIGTERM', 1)
        run.await_events('engine-0 SIGTERM', 1)
        code, output = run.finish()
    assert code == 0
    assert re.search(r'server exporter-0 was ended by SIGKILL .*: it is started again', output)
    assert not is_alive(exporter)


@pytest.mark.parametrize('lost', ['controller-0', pytest.param('learner-0', marks=pytest.mark.slow), 'learner-1'])
def test_controller_and_learners_start_again_together_and_engines_serve_on(tmp_path, lost):
    with Roles(tmp_path) as run:
        before = run.await_starts()
        os.kill(before[lost], signal.SIGKILL)
        after = run.await_starts(2, NAMES[:3])
        assert not any(is_alive(before[name]) for name in NAMES[:3])
        assert all(is_alive(before[name]) for name in NAMES[3:])
        assert all(is_alive(pid) for pid in after.values())
        end(tmp_path, 'controller-0', 0)
        code, output = run.finish()
    assert code == 0, output
    assert f'{lost} was ended by SIGKILL after ' in output
    assert 'controller and learners are started again in' in output


def test_a_role_that_can_never_run_ends_all_and_its_last_lines_are_quoted(tmp_path):
    with Roles(tmp_path, learner_1={'code': 2}) as run:
        code, output = run.finish()
    assert code == 2
    assert f'learner-1 ended with code 2; the end of {tmp_path}/logs/learner-1.1.log:\n' in output
    assert '  last line of a role' in output


@pytest.mark.parametrize(
    ('codes', 'cause'),
    [
        ({'learner-0': 75, 'learner-1': 137, 'controller-0': 75}, ('learner-1', False)),
        ({'learner-0': 1, 'learner-1': 137}, ('learner-1', False)),  # an error after a death is no bug of its own
        ({'learner-0': 0, 'controller-0': 75}, ('controller-0', False)),
        ({'learner-0': 75, 'learner-1': 1}, ('learner-0', False)),
        ({'learner-1': 1, 'learner-0': 75}, ('learner-1', True)),
        ({'learner-1': 137, 'learner-0': 2}, ('learner-0', True)),
        ({'controller-0': 1, 'learner-0': 75, 'learner-1': 134}, ('controller-0', True)),  # jax aborts the last one
        ({'learner-1': 134, 'controller-0': 75, 'learner-0': 75}, ('learner-1', False)),
    ],
)
def test_the_cause_of_an_end(codes, cause):
    assert find_cause(codes) == cause


def test_nobody_waits_long_for_the_others_of_one_that_was_killed():
    """At start-up they are not yet connected, and would notice at their deadlines."""
    killed, lost_a_peer = find_patience(128 + signal.SIGKILL), find_patience(75)
    assert killed <= 2 < lost_a_peer


def test_restarts_in_a_row_are_counted(tmp_path):
    with Roles(tmp_path, learner_0={'code': 75}) as run:
        code, output = run.finish()
    assert code == 75
    assert len(run.events('learner-0 start')) == 3  # one, and the two restarts of the stand-in
    assert 'learner-0 ended with code 75' in output
    assert output.count('are started again') == 2
    assert 'the same command with --resume goes on' in output


def test_a_signal_goes_to_the_controller_which_saves(tmp_path):
    with Roles(tmp_path, controller_0={'stop_s': 0.3, 'stop_code': 75}) as run:
        run.await_starts()
        os.killpg(run.launcher.pid, signal.SIGINT)
        code, _ = run.finish()
    assert code == 75
    lines = (tmp_path / 'events').read_text().splitlines()
    ends = [line for line in lines if 'SIG' in line or 'ends' in line]
    assert ends[:2] == ['controller-0 SIGINT', 'controller-0 ends']
    assert not any(line.startswith('learner') for line in ends)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    with Roles(tmp_path) as run:
        run.await_starts()
        assert len([pid for pid in run.pids() if is_alive(pid)]) == 15
        run.launcher.kill()
        run.await_gone()


def test_a_learner_whose_heart_stops_is_killed_and_all_start_again(tmp_path):
    with Roles(tmp_path) as run:
        before = run.await_starts()
        os.kill(before['learner-1'], signal.SIGSTOP)
        run.await_starts(2, NAMES[:3])
        assert not is_alive(before['learner-1'])
        end(tmp_path, 'controller-0', 0)
        code, output = run.finish()
    assert code == 0
    assert 'learner-1 has given no sign of life for a long time: it is killed' in output


@pytest.mark.slow
def test_a_learner_that_hangs_before_it_registers_is_killed_and_all_start_again(tmp_path, monkeypatch):
    monkeypatch.setenv('STAND_IN_REGISTER_S', '2')
    with Roles(tmp_path, learner_1={'hangs': True}) as run:
        [[hung, *_], _] = run.await_events('learner-1 start', 2)
        assert not is_alive(int(hung))
        end(tmp_path, 'controller-0', 0)
        code, output = run.finish()
    assert code == 0
    assert 'learner-1 has given no sign of life for a long time: it is killed' in output


@pytest.mark.parametrize(('server', 'at_start'), [('own', True), ('vllm', False), ('sglang', False)])
def test_a_server_of_others_registers_when_it_serves(server, at_start):
    config = load_config('configs/tiny_cpu.py')
    config.cluster.learner, config.rollout.server = 'hosts=2 x data=4', server
    assert [role.registers for role in plan_roles(config, [])] == [True, True, True, at_start]


@pytest.mark.parametrize(('flag', 'begun', 'sentence'), [
    ('--noresume', True, 'holds a run already: go on with --resume, or give another --workdir'),
    ('--resume', False, 'holds no run yet: start without --resume'),
])  # fmt: skip
def test_a_workdir_is_used_as_asked(tmp_path, flag, begun, sentence):
    if begun:
        (tmp_path / 'config.json').write_text('{}')
    with Roles(tmp_path, flag) as run:
        code, output = run.finish()
    assert code == 2
    assert output.startswith(f'error: {tmp_path} {sentence}')


def test_flags_of_the_environment_are_kept_but_for_the_devices():
    config = load_config('configs/tiny_cpu.py')
    config.cluster.learner, config.rollout.server, config.cluster.engines = 'hosts=2 x data=4', 'own', '1 x tensor=3'
    given = {'XLA_FLAGS': '--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2'}
    controller, learner, _, engine = plan_roles(config, [], given)
    assert controller.variables == {}
    assert learner.variables == {'XLA_FLAGS': '--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=2'}
    assert engine.variables['XLA_FLAGS'].endswith('=3')
