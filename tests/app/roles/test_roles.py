"""One process of a run in roles: what is refused with both values, and a controller that never imports jax."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from areal_jax.app.roles.roles import CONTROLLER, RoleProcess, await_controller, keep_name, parse_index
from areal_jax.config import default_config
from areal_jax.errors import LostPeerError, UserError
from areal_jax.installation import read_code_version
from areal_jax.main_role import main
from areal_jax.registry import Entry, Registration, read_entries

TINY = '--config=configs/tiny_cpu.py'
IN_ROLES = [
    TINY,
    '--config.rollout.server=own',
    '--config.publication.channel=files',
    '--config.cluster.learner=hosts=2 x data=2',
    '--config.cluster.engines=2 x tensor=1',
    '--config.learner.rows_per_microbatch=2',
]


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        (['--role=learn'], '--role=learn is none of controller, learner, engine, exporter; did you mean learner?'),
        ([], '--role= is none of controller, learner, engine'),
        (['--role=learner'], '--index is missing'),
        (['--role=learner', '--index=two'], "--index=two gives 'two', and a whole number from 0 is needed"),
        (['--role=learner', '--index=env:NO_SUCH'], '--index=env:NO_SUCH: there is no such variable'),
        (
            ['--role=learner', '--index=2'],
            "--role=learner --index=2, and cluster.learner='hosts=2 x data=2' has 2: indices go from 0 to 1",
        ),
        (['--role=learner', '--index=0', '--count=3'], "--count=3, and cluster.learner='hosts=2 x data=2' has 2 of"),
        (['--role=engine', '--index=0', '--count=8'], "--count=8, and cluster.engines='2 x tensor=1' has 2 of the"),
        (['--role=controller', '--index=1'], '--role=controller --index=1, and a run has 1: indices go from 0 to 0'),
        (['--role=learner', '--index=0', '--host=0.0.0.0'], '--host=0.0.0.0: name the interface at which the other'),
        (
            ['--role=engine', '--index=0', '--config.rollout.server=in_process'],
            "rollout.server='in_process': engines of a run in roles are servers; use rollout.server='own', 'vllm', "
            "'sglang' or 'jetstream'",
        ),
        (
            ['--role=controller', '--config.publication.channel=device'],
            "publication.channel='device' with rollout.server='own'",
        ),
        (['--role=controller', '--config.loss.objective=sft'], "loss.objective='sft' has neither engines nor a contr"),
        (['--role=controller', '--config.telemetry.profile_steps=(1,2)'], 'the learner of a run in roles is not'),
        (['--role=learner', '--index=0', '--config.cluster.learner=hosts=3 x data=2'], 'a mesh of 2 devices cannot be'),
    ],
)
def test_a_process_that_the_run_does_not_have_is_refused(tmp_path, flags, sentence):
    with pytest.raises(UserError) as refused:
        main(['main_role', *IN_ROLES, f'--workdir={tmp_path}', *flags], None)
    assert sentence in str(refused.value)
    assert '\n' not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_engines_of_others_are_no_role(tmp_path):
    urls = ['--config.rollout.server=external', "--config.rollout.urls=('vllm+http://h:1',)"]
    with pytest.raises(UserError, match=r"rollout.server='external' has no engines but those of rollout.urls"):
        main(['main_role', *IN_ROLES, *urls, f'--workdir={tmp_path}', '--role=engine', '--index=0'], None)


def test_a_workdir_that_is_a_url_is_refused():
    with pytest.raises(UserError, match='--workdir=gs://bucket/a is a URL'):
        main(['main_role', *IN_ROLES, '--workdir=gs://bucket/a', '--role=controller'], None)


def test_an_index_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv('SLURM_PROCID', '3')
    assert parse_index('env:SLURM_PROCID') == parse_index('3') == 3


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr('areal_jax.registry.PERIOD_S', 0.02)
    monkeypatch.setattr('areal_jax.registry.LOOK_S', 0.02)


def test_a_role_of_another_config_or_version_is_told_both(tmp_path, quick, monkeypatch):
    config, engine = default_config(), RoleProcess('engine', 3, tmp_path)
    config.staleness.eta = float('inf')
    with keep_name(RoleProcess('controller', 0, tmp_path), config, lambda error: None) as heartbeat:
        await_controller(engine, config, 10.0)
        other = config.copy_and_resolve_references()
        other.rollout.slots = 3
        with pytest.raises(
            UserError, match=r'^engine 3 has rollout.slots=3 and controller-0 \(process .* has 8: start'
        ):
            await_controller(engine, other, 10.0)
        heartbeat.update(code='9.9')
        with pytest.raises(
            UserError, match=rf'^engine 3 is areal_jax {re.escape(read_code_version())} and controller-0 .* 9.9'
        ):
            await_controller(engine, config, 10.0)


def test_a_directory_without_the_controller_is_told(tmp_path, quick):
    Registration(tmp_path, Entry(CONTROLLER, 0, ''))  # of a dead one
    with pytest.raises(LostPeerError, match=r'controller-0 has not come: start it, and give all roles a'):
        await_controller(RoleProcess('engine', 0, tmp_path), default_config(), 0.2)


ALONE = """
import sys
sys.modules['jax'] = None  # importing it raises ImportError
from areal_jax.app.process.ending import end_command
from areal_jax.app.process.ending import Interrupts
from areal_jax.main_role import main
with Interrupts() as interrupts:
    code = end_command(lambda: main(sys.argv, interrupts), doing='nothing')
print('code', code, 'jax' in sys.modules and sys.modules['jax'] is not None)
"""


def run_alone(workdir, *flags):
    flags = ('--config.distributed.command_deadline_s=0.5', *flags)
    return subprocess.run(
        [sys.executable, '-c', ALONE, *IN_ROLES, *flags, f'--workdir={workdir}'],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_an_engine_is_in_the_registry_before_it_is_built(tmp_path):
    done = run_alone(tmp_path, '--role=engine', '--index=0')
    assert done.stdout.splitlines()[-1] == 'code 75 False', done  # no controller came
    (entry,) = read_entries(tmp_path)
    assert (entry.name, entry.role, entry.index, entry.address) == ('engine-0', 'engine', 0, '')
    assert entry.is_leaving


def test_a_controller_does_not_import_jax(tmp_path):
    done = run_alone(tmp_path, '--config.task.verifier=process', '--role=controller')
    assert done.stdout.splitlines()[-1] == 'code 75 False', done
    assert 'waited 1 s for 2 learner processes to be built' in done.stderr or 'waited 0 s for 2 learn' in done.stderr
    assert 'learner-0, learner-1 has not come: start them with the same config' in done.stderr
    assert (tmp_path / 'config.json').exists()
