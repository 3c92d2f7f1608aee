"""areal_jax.app.roles.server_program and its two programs: their command lines, and how they end without a server."""

import json
import sys

import pytest

from areal_jax.app.process.ending import STOPPED_CODE, code_of_stopped_server
from areal_jax.app.roles import server_program, sglang_server, vllm_server
from areal_jax.config import default_config
from areal_jax.errors import UserError

FLAGS = ['areal_jax.app.roles.vllm_server', '--workdir=run', '--name=0', '--publication=run/publication']
MODULES = [vllm_server, sglang_server]


@pytest.mark.parametrize(
    ('flags', 'said'),
    [(FLAGS[:1], '--workdir'), ([*FLAGS, '--slots=abc'], '--slots'), ([*FLAGS, '--slot=1'], "'slot'")],
)
def test_a_wrong_flag_is_one_sentence(flags, said):
    with pytest.raises(UserError, match=said):
        server_program.parse_flags(flags)


@pytest.mark.parametrize('module', MODULES)
def test_a_server_that_is_told_to_stop_before_the_first_version_ends_with_the_code_of_its_executor(monkeypatch, module):
    monkeypatch.setenv(module.PROGRAM.interpreter.variable, sys.executable)
    monkeypatch.setattr(server_program, 'await_version', lambda publication, wakeups: None)
    assert module.main(FLAGS) == 0
    monkeypatch.setenv(STOPPED_CODE, '75')
    assert module.main(FLAGS) == 75
    assert code_of_stopped_server() == 75


@pytest.mark.parametrize('module', MODULES)
def test_an_interpreter_that_is_not_there_is_named_with_the_script_that_makes_one(tmp_path, monkeypatch, module):
    program = module.PROGRAM.interpreter
    monkeypatch.setenv(program.variable, str(tmp_path / 'python'))
    says = rf'needs an interpreter that has {program.title}, and {tmp_path}/python is none: make one with `bash launch/'
    with pytest.raises(UserError, match=says):
        module.find_python()


def test_a_server_gets_nothing_that_would_make_it_import_this_project():
    kept = server_program.keep_environment({'PYTHONPATH': '/a', 'XLA_FLAGS': '--b', 'OMP_NUM_THREADS': '1'})
    assert kept == {'OMP_NUM_THREADS': '1'}


@pytest.mark.parametrize('on_gpu', [False, True])
def test_sglang_serves_on_a_cpu_where_its_torch_sees_no_gpu(tmp_path, monkeypatch, on_gpu):
    monkeypatch.setattr(sglang_server, 'has_gpu', lambda python: on_gpu)
    values = server_program.parse_flags([*FLAGS, '--context_tokens=16', '--slots=4'])
    command = sglang_server.build_command('python', tmp_path, 8000, values)
    assert ('--device' in command.words, 'SGLANG_USE_CPU_ENGINE' in command.variables) == (not on_gpu, not on_gpu)
    # 16 tokens fit beside what SGLang keeps free; four answers of them, and one token besides, in a cache of fixed size
    assert command.words[command.words.index('--context-length') + 1] == '24'
    assert on_gpu or command.words[command.words.index('--max-total-tokens') + 1] == '120'


def test_a_server_of_a_run_with_deltas_has_a_receiver(tmp_path):
    config = default_config()
    for delta in (False, True):
        config.publication.delta = delta
        words = sglang_server.PROGRAM.describe_command(config, tmp_path, 'engine-0')
        assert server_program.parse_flags(words[2:]).receiver is delta


@pytest.mark.parametrize('module', MODULES)
def test_a_server_of_a_run_that_records_routes_is_told_to_give_them(tmp_path, monkeypatch, module):
    monkeypatch.setattr(sglang_server, 'has_gpu', lambda python: True)
    config = default_config()
    for records in (False, True):
        config.rollout.record_routes = records
        values = server_program.parse_flags(module.PROGRAM.describe_command(config, tmp_path, 'engine-0')[2:])
        words = module.build_command('python', tmp_path, 8000, values).words
        assert ('--enable-return-routed-experts' in words) is records


def test_an_interpreter_without_torch_is_refused_by_name(tmp_path):
    python = tmp_path / 'python'
    python.write_text('#!/bin/bash\necho "ModuleNotFoundError: No module named torch" >&2\nexit 1\n')
    python.chmod(0o755)
    with pytest.raises(
        UserError, match=rf'{python} cannot import torch \(ModuleNotFoundError.*AREAL_JAX_SGLANG_PYTHON'
    ):
        sglang_server.has_gpu(str(python))


def answer_versions(tmp_path, monkeypatch, program, **versions):
    """An interpreter, in the place of the program's own, that has packages of these versions."""
    python = tmp_path / 'python'
    python.write_text(
        f"#!/bin/bash\necho '{json.dumps({name.replace('_', '-'): v for name, v in versions.items()})}'\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv(program.interpreter.variable, str(python))
    return python


@pytest.mark.parametrize('module', MODULES)
def test_an_interpreter_of_the_tested_version_is_accepted_on_its_devices(tmp_path, monkeypatch, module):
    program = module.PROGRAM
    gpu, cpu = program.packages[0], program.packages[-1]
    answer_versions(tmp_path, monkeypatch, program, **{gpu: program.version, 'torch': '2.14.1'})
    module.require_version(True)
    answer_versions(tmp_path, monkeypatch, program, **{cpu: f'{program.version}+x', 'torch': '2.13.0+cpu'})
    module.require_version(False)
    with pytest.raises(
        UserError, match=r'for CPUs \(torch 2\.13\.0\+cpu\), and the nodes have GPUs: make one with'
    ) as it:
        module.require_version(True)
    assert f'`bash {program.interpreter.script} --gpu FOLDER`' in str(it.value)


@pytest.mark.parametrize('module', MODULES)
def test_another_version_or_none_is_refused_with_the_command_that_makes_one(tmp_path, monkeypatch, module):
    program = module.PROGRAM
    fix = rf'make one with `bash {program.interpreter.script} --gpu`, or name one in {program.interpreter.variable}'
    for versions, has in (({program.packages[0]: '0.4.0'}, r'0\.4\.0'), ({'numpy': '2.0'}, 'no version')):
        python = answer_versions(tmp_path, monkeypatch, program, **versions)
        says = rf'{python} has {has} of {program.interpreter.title}, and {program.version} is .*: {fix}$'
        with pytest.raises(UserError, match=says):
            module.require_version(True)
    monkeypatch.setenv(program.interpreter.variable, str(tmp_path / 'nowhere'))
    with pytest.raises(UserError, match=rf'nowhere is none: {fix}$'):
        module.require_version(True)
    module.require_version(True, [f'export {program.interpreter.variable}=/only/on/nodes'])
