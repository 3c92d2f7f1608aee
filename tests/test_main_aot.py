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


def compare(tmp_path, capsys, *flags):
    """The numbers and the text of a comparison that fits."""
    path = tmp_path / 'found.json'
    assert run('--layers=1', f'--json={path}', *flags) == ExitCode.FINISHED
    return json.loads(path.read_text()), capsys.readouterr().out


def test_two_sides_are_shown_side_by_side(tmp_path, capsys):
    found, said = compare(tmp_path, capsys, '--compare=model.d_ff=96')
    assert '1 programs for four, 1 layers only, model.d_ff=96\n' in said
    assert said.endswith('2 of 2 programs fit\n')
    table = said[said.index('\n      ') :].splitlines()
    assert table[1].split() == ['as', 'given', 'model.d_ff=96']
    assert [line.split()[0] for line in table[3:6]] == ['temporaries', 'peak', 'copies']
    measured = found['compared']['learner: apply']
    assert list(measured) == ['as given', found['other']['side']] == ['as given', 'model.d_ff=96']
    memory = found['other']['programs'][0]['memory']
    assert measured['model.d_ff=96']['temporaries'] == memory['temporaries']
    assert found['complete'] is found['other']['complete'] is True


def test_the_other_side_may_be_another_file_with_the_same_changes(tmp_path, capsys):
    file = tmp_path / 'other.py'
    file.write_text("""
from areal_jax.app.command_line import load_config


def get_config():
    config = load_config('configs/tiny_cpu.py')
    config.model.d_model = 32
    return config
""")
    found, _ = compare(tmp_path, capsys, f'--compare={file}', '--config.model.d_ff=32')
    sizes = [side['programs'][0]['memory']['arguments'] for side in (found, found['other'])]
    assert sizes[1] < 0.7 * sizes[0]


def test_flags_reach_the_compiler_and_are_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Topology, 'hardware', 'gpu')  # XLA for CPUs takes the same options
    found, said = compare(tmp_path, capsys, '--compare=cluster.xla_flags=off')
    assert 'cluster.xla_flags: auto, --xla_gpu_' in said
    assert 'cluster.xla_flags: off, none' in said
    assert found['xla_flags']['xla_gpu_enable_pipelined_all_gather'] == 'true'
    assert found['other']['xla_flags'] == {}
    assert run('--layers=1', '--config.cluster.xla_flags=xla_of_nobody=1') == ExitCode.USER_ERROR
    assert "does not compile: INVALID_ARGUMENT: No such compile option: 'xla_of_nobody'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (['--compare=configs/a.py', '--compare=tiny_cpu'], 'name one config file, or fields as SECTION.FIELD=VALUE'),
        (['--compare=cluster.xla_flag=off'], '--compare=cluster.xla_flag=off: cluster.xla_flag is not a field'),
        (['--compare=learner.dtype=int3'], "--compare=learner.dtype=int3: learner.dtype='int3'"),
        (['--compare=configs/nobody.py'], "there is no file 'configs/nobody.py'"),
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
