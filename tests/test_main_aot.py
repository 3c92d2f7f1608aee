"""areal-aot from its command line, with devices of this CPU in the place of a described topology."""

import json
import os

import jax
import pytest

from areal_jax import main_aot
from areal_jax.aot import topology
from areal_jax.aot.topology import Topology
from areal_jax.app.process.ending import Interrupts
from areal_jax.errors import ExitCode, UserError
from areal_jax.simulation.prices import V5E

TINY = ['areal-aot', '--config=configs/tiny_cpu.py', '--topology=four', '--programs=learner: apply']


@pytest.fixture(autouse=True)
def four_devices(monkeypatch):
    monkeypatch.setattr(os, 'environ', os.environ.copy())  # the command sets what compilers read
    monkeypatch.setattr(topology, 'describe_topology', lambda text: Topology(text, V5E, tuple(jax.devices()[:4])))


def run(*flags):
    return main_aot.main([*TINY, *flags], Interrupts())


def test_a_program_is_told_and_written(tmp_path, capsys):
    path = tmp_path / 'found.json'
    assert run(f'--json={path}', '--layers=1') == ExitCode.FINISHED
    said = capsys.readouterr().out
    assert '1 programs for four, 1 layers only' in said
    assert 'self-checks of kernels: not run' in said
    assert 'learner: apply  fits: ' in said
    assert said.endswith('1 of 1 programs fit\n')
    found = json.loads(path.read_text())
    [program] = found['programs']
    assert (found['topology'], found['layers'], found['complete'], program['fits']) == ('four', 1, True, True)
    assert program['memory']['arguments'] > 0


def test_a_program_without_room_ends_with_2(monkeypatch, capsys):
    monkeypatch.setattr(Topology, 'memory_bytes', 1000)
    assert run('--layers=1') == ExitCode.USER_ERROR
    assert 'DOES NOT FIT' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (['--layers=99'], '--layers=99: the model has 2 layers; use 1 to 2'),
        (['--programs=train'], "--programs='train' is in the name of no program; this run has learner: export, "),
        (['--config.cluster.learner=fsdp=8', '--config.learner.rows_per_microbatch=8'], 'needs 8 devices'),
        (['--config.run.steps=-1'], 'run.steps=-1'),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(flags, said):
    with pytest.raises(UserError) as caught:
        run(*flags)
    assert said in str(caught.value)


def test_a_missing_topology_is_asked_for():
    with pytest.raises(UserError, match="--topology is missing: name the devices, as 'v5p:2x4x4' or '8 x H100'"):
        main_aot.main(TINY[:2], Interrupts())
