"""The command as its user meets it: the table, Ctrl-C and kill -9 with --resume, a benchmark, and bad input."""

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.app.test_main_train import ROOT, environment
from tests.native import drop_compiler_warning

FEW = ['--config.task.symbols=8', '--config.evaluation.problems=64', '--config.evaluation.samples=2']
# which take some seconds: long enough to be interrupted
MANY = [*FEW, '--config.evaluation.problems=1024']


def command(workdir, *arguments):
    words = [sys.executable, '-m', 'areal_jax.main_eval', '--config=configs/tiny_cpu.py', *arguments]
    return words if workdir is None else [*words, f'--workdir={workdir}']


def evaluate(workdir, *arguments):
    return subprocess.run(
        command(workdir, *arguments), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )


def measured(workdir):
    results = json.loads((workdir / 'results.json').read_text())
    return {name: value for name, value in results.items() if name not in ('seconds', 'tokens_per_second')}


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('whole')
    return workdir, evaluate(workdir, *MANY)


def test_the_table_is_printed(tmp_path):
    workdir, done = tmp_path, evaluate(tmp_path, *FEW)
    assert done.returncode == 0, done.stderr
    assert drop_compiler_warning(done.stderr) == ''
    assert 'random weights, version 0: 64 problems of token_reversal, one greedy answer and 2 samples' in done.stdout
    metrics = measured(workdir)['metrics']
    for name in ('greedy', 'avg@2', 'pass@2', 'maj@2'):
        assert f'{name:6}  {metrics[name]["mean"]:.3f}   {metrics[name]["low"]:.3f} to' in done.stdout
    assert done.stdout.endswith(f'{workdir}/results.json\n')


@pytest.mark.slow
@pytest.mark.parametrize('end', [signal.SIGINT, signal.SIGKILL], ids=['ctrl-c', 'kill -9'])
def test_an_evaluation_that_was_ended_resumes(whole, tmp_path, end):
    process = subprocess.Popen(
        command(tmp_path / 'run', *MANY), cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE
    )
    answers, deadline = tmp_path / 'run' / 'answers.jsonl', time.monotonic() + 120
    while not answers.exists() or answers.read_bytes().count(b'\n') < 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(end)
    output, _ = process.communicate(timeout=60)
    complete = answers.read_bytes().count(b'\n')
    assert complete < 1024
    if end == signal.SIGINT:
        assert process.returncode == 75
        assert f'stopped: {complete} of 1024 problems are complete' in output
        assert 'the same command with --resume goes on' in output
    assert not (tmp_path / 'run' / 'results.json').exists()
    done = evaluate(tmp_path / 'run', *MANY, '--resume', f'--json={tmp_path}/copy.json')
    assert done.returncode == 0, done.stderr
    assert f'evaluating {1024 - complete} problems, {complete} more are complete already' in done.stdout
    assert measured(tmp_path / 'run') == measured(whole[0])
    assert (tmp_path / 'copy.json').read_bytes() == (tmp_path / 'run' / 'results.json').read_bytes()


def test_a_benchmark_is_one_flag(tmp_path):
    lines = [{'question': f'{"ab"[i % 2]}{"ab"[i // 2]}=', 'answer': str(i)} for i in range(4)]
    (tmp_path / 'lines.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    done = evaluate(tmp_path / 'run', f'--benchmark={tmp_path}/lines.jsonl', '--config.evaluation.samples=0')
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / 'run' / 'answers.jsonl').read_text().splitlines()]
    assert sorted(line['problem']['question'] for line in found) == sorted(line['question'] for line in lines)
    assert measured(tmp_path / 'run')['metrics'].keys() == {'greedy'}


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--json=nowhere/file.json'], '--json=nowhere/file.json cannot be written: name a file in a directory that'),
        pytest.param(
            ['--config.run.steps=7'],
            'set but never read: run.steps=7. This run does not use it: remove',
            marks=pytest.mark.slow,
        ),
        (['--modle=runs/a'], '--modle is not a flag; did you mean --model?'),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, arguments, message):
    done = evaluate(tmp_path / 'run', *arguments)
    assert done.returncode == 2, done.stdout
    said = drop_compiler_warning(done.stderr)
    assert said.startswith(f'error: {message}')
    assert said.count('\n') == 1
    assert not (tmp_path / 'run').exists()
