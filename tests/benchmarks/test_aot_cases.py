"""A pinned case turns red by a copy, an exchange or bytes too many, and names program and buffer."""

import copy
import dataclasses
import importlib.util
import json
import pathlib
import shlex

import pytest

from areal_jax import main_aot
from areal_jax.aot import topology
from areal_jax.app.command_line import parse_command
from areal_jax.commands.command import Command
from areal_jax.config import validate
from benchmarks import aot_cases
from benchmarks.aot_cases import Case, judge, measure, read_cases, record

GATHER = {'kind': 'all-gather', 'axes': 'fsdp', 'array': 'bf16[8,64]', 'bytes': 1024, 'times': 2, 'source': 'a.py:1'}
HEAD = GATHER | {'kind': 'reduce-scatter', 'array': 'f32[250,64]', 'bytes': 64000, 'times': 1, 'source': 'head.py:7'}
COPY = {'array': 'bf16[64,512]', 'bytes': 70_000_000, 'times': 3, 'source': 'b.py:2 (attend)'}
PROGRAM = {
    'part': 'learner', 'name': 'accumulate 8 x 64', 'seconds': 9.0, 'cpu_seconds': 12.0,
    'refusal': '', 'fits': True, 'flops': 8e9,
    'memory': {'arguments': 10, 'outputs': 0, 'temporaries': 5000, 'peak': 6000, 'beside': 0, 'results': 0},
    'expected': {'arguments': 10, 'outputs': 0, 'flops': 6e9},
    'collectives': [HEAD, GATHER], 'copies': [COPY], 'buffers': [COPY],
}  # fmt: skip
TOLD = {'complete': True, 'vocabulary': 1000, 'devices': 4, 'host_peak_bytes': 10**9, 'programs': [PROGRAM]}
NAME = 'learner: accumulate 8 x 64'
CASE = Case('small', 'a small case', ('--topology=v5e:2x2',), record(TOLD))


def changed(**fields):
    """What areal-aot tells of the program with other fields."""
    return TOLD | {'programs': [copy.deepcopy(PROGRAM) | fields]}


def test_a_program_is_measured_in_bytes_and_against_its_model():
    assert measure(PROGRAM, TOLD) == {
        'temporaries': 5000, 'peak': 6000, 'exchanges': 64000 + 2048, 'head': 64000, 'largest copy': 70_000_000,
        'copies': 210_000_000, 'arithmetic': pytest.approx(8 / 6, abs=1e-4),
    }  # fmt: skip


def test_what_was_recorded_holds():
    assert judge(CASE, TOLD) == []


MORE = {
    'a copy': ({'copies': [COPY, COPY | {'source': 'c.py:3'}]}, ['copies 0.42 GB over 0.21 GB', 'bf16[64,512] c.py:3']),
    'a larger copy': ({'copies': [COPY | {'bytes': 10**8, 'times': 1}]}, ['largest copy 0.1 GB over 70 MB; 1 x ']),
    'a gather': ({'collectives': [HEAD, GATHER | {'times': 3}]}, ['exchanges ', '3 x all-gather bf16[8,64] a.py:1']),
    'the whole head': (
        {'collectives': [HEAD | {'array': 'f32[1000,64]', 'bytes': 256000}, GATHER]},
        ['head 0.256 MB over 0.064 MB; 1 x reduce-scatter f32[1000,64] head.py:7'],
    ),
    'bytes': ({'memory': PROGRAM['memory'] | {'temporaries': 5100}}, ['temporaries 0.0051 MB over 0.005 MB; 3 x ']),
    'arithmetic': ({'flops': 9e9}, ['arithmetic 1.500 over 1.333']),
    'no room': ({'fits': False}, ['does not fit a device']),
    'a refusal': ({'memory': None, 'refusal': 'does not compile: no tiling'}, ['does not compile: no tiling']),
    'an hour': ({'cpu_seconds': 3600.0}, ['took 3600 s of the CPU to compile']),
}


@pytest.mark.parametrize('case', MORE)
def test_what_is_too_much_is_red_with_program_and_buffer(case):
    fields, said = MORE[case]
    faults = judge(CASE, changed(**fields))
    assert faults
    assert all(fault.startswith(f'small: {NAME}') for fault in faults)
    assert any(all(part in fault for part in said) for fault in faults), faults


def test_a_little_more_is_noise_of_the_compiler():
    assert judge(CASE, changed(memory=PROGRAM['memory'] | {'temporaries': 5040})) == []


@pytest.mark.parametrize(
    ('told', 'said'),
    [
        ({}, [f'small: {NAME} was not compiled', 'small: areal-aot ended before its last program']),
        (TOLD | {'complete': False}, ['small: areal-aot ended before its last program']),
        (TOLD | {'host_peak_bytes': 2**35}, ['small: the compilation took 34.36 GB of the host']),
        (changed(name='apply'), [f'small: {NAME} was not compiled', 'small: learner: apply has no bounds; --record']),
    ],
)
def test_a_case_that_did_not_run_whole_is_red(told, said):
    faults = judge(CASE, told)
    assert len(faults) == len(said)
    assert all(fault.startswith(part) for fault, part in zip(faults, said, strict=True))


# The table, and the command.


def test_every_case_of_the_table_is_a_command_that_can_be_parsed():
    cases = read_cases()
    assert {case.compiler for case in cases} == {'tpu', 'gpu'}
    assert len({case.name for case in cases}) == len(cases) >= 7
    for case in cases:
        command: Command = main_aot.COMMAND
        parsed = parse_command(['areal-aot', *case.flags], command.flags())
        validate(parsed.config)
        assert topology.describe_accelerator(parsed_topology(case), 0).devices
        assert all({'temporaries', 'peak', 'head', 'largest copy'} <= set(one) for one in case.bounds.values())


def test_a_case_without_bounds_must_compile_and_fit():
    unbounded = dataclasses.replace(CASE, bounds={})
    assert judge(unbounded, TOLD) == []
    assert judge(unbounded, changed(fits=False)) == [f'small: {NAME} does not fit a device']
    assert judge(unbounded, {}) == ['small: areal-aot ended before its last program']


def parsed_topology(case):
    [found] = [flag.partition('=')[2] for flag in case.flags if flag.startswith('--topology=')]
    return found


@pytest.fixture
def small_table(monkeypatch, tmp_path):
    """One case, which areal-aot tells of at once."""
    table = tmp_path / 'cases.json'
    aot_cases.write_cases([CASE], table)
    monkeypatch.setattr(aot_cases, 'read_cases', lambda: read_cases(table))
    monkeypatch.setattr(aot_cases, 'write_cases', lambda cases: table.write_text(repr(cases)))
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
    return table


def tell(monkeypatch, told):
    def compile_case(case, path):
        path.write_text(json.dumps(told))
        return told

    monkeypatch.setattr(aot_cases, 'compile_case', compile_case)


@pytest.mark.usefixtures('small_table')
def test_the_exit_code_is_0_only_if_every_case_held(monkeypatch, tmp_path, capsys):
    tell(monkeypatch, TOLD)
    assert aot_cases.main([f'--json={tmp_path / "found"}']) == 0
    assert (tmp_path / 'found' / 'small.json').exists()
    assert capsys.readouterr().out.endswith('1 of 1 cases held\n')
    tell(monkeypatch, changed(flops=9e9))
    assert aot_cases.main([]) == 1
    assert f'small: {NAME}: arithmetic 1.500 over 1.333' in capsys.readouterr().out


def test_new_bounds_are_recorded(monkeypatch, small_table):
    tell(monkeypatch, changed(flops=12e9))
    assert aot_cases.main(['--record']) == 0
    assert "'arithmetic': 2.0" in small_table.read_text()


def test_a_missing_compiler_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert aot_cases.main(['--only=qwen3_8b_h100']) == 2
    said = capsys.readouterr().err
    assert said == ("error: qwen3_8b_h100: jax_cuda13_plugin is not installed: pip install 'areal_jax[aot-gpu]'\n")


def test_an_unknown_case_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        aot_cases.main(['--only=qwen3_8b_v5'])
    assert ended.value.code == 2
    assert '--only=qwen3_8b_v5 is no case; did you mean qwen3_8b_v5' in capsys.readouterr().err


def test_the_table_is_written_as_it_is_read(tmp_path):
    cases = read_cases()
    aot_cases.write_cases(cases, tmp_path / 'again.json')
    assert read_cases(tmp_path / 'again.json') == cases
    assert (tmp_path / 'again.json').read_text() == aot_cases.TABLE.read_text()
    assert shlex.split(pathlib.Path('launch/test_aot.sh').read_text().splitlines()[-1])[-1] == '$@'
    assert dataclasses.asdict(cases[0])['name']
