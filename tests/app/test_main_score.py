"""The command as its user meets it: the table, JSON, kill -9, signals, a file that may not grow, and bad input."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.tasks.process_table import all_end

ROOT = pathlib.Path(__file__).parents[2]
OWN = [f'--config.task.name={ROOT}/tests/app/score/own_scorer.py:build', '--config.task.verifier=process']


def command(answers, out, *arguments):
    words = [sys.executable, '-m', 'areal_jax.main_score', '--config=configs/tiny_cpu.py']
    return [*words, f'--answers={answers}', f'--out={out}', *arguments]


def score(answers, out, *arguments, before=()):
    return subprocess.run(
        [*before, *command(answers, out, *arguments)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def write(path, answers):
    path.write_text(''.join(f'{json.dumps({"task_id": f"own/{n}", "answer": text})}\n' for n, text in answers))
    return path


def read(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def many(tmp_path):
    """Answers that take seconds, and the file in which the scorer notes its process and what it scores."""
    notes = tmp_path / 'notes'
    flags = [*OWN, '--config.task.options.count=200', f'--config.task.options.notes={notes}']
    return write(tmp_path / 'a.jsonl', [(n, f'slow {n}') for n in range(200)]), notes, [*flags, '--workers=2']


def interrupt(number, answers, out, flags):
    """Sends the signal after some scores; what the process left."""
    with subprocess.Popen(
        command(answers, out, *flags), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        end = time.monotonic() + 60
        while not out.exists() or out.read_bytes().count(b'\n') < 10:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def processes(notes):
    return [int(line.split()[0]) for line in notes.read_text().splitlines()]


def scored(notes):
    return [int(line.split()[1]) for line in notes.read_text().splitlines()]


def test_the_table_is_printed_and_every_answer_has_a_reward(tmp_path):
    answers = write(tmp_path / 'a.jsonl', [(n, 'right') for n in range(4)])
    done = score(answers, tmp_path / 's.jsonl', *OWN)
    assert (done.returncode, done.stderr) == (0, '')
    table = done.stdout.partition('\n\n')[2]
    assert table.startswith('label  answers   share\nok           4  100.0%\n\nmean reward 1.5000\n4 answers in ')
    assert table.endswith(f' s\n{tmp_path}/s.jsonl\n')
    assert [line['task_id'] for line in read(tmp_path / 's.jsonl')] == [f'own/{n}' for n in range(4)]


def test_answers_that_cannot_be_scored_are_an_exit_code_and_json_is_alone_on_stdout(tmp_path):
    answers = write(tmp_path / 'a.jsonl', [(0, 'right'), (1, 'crash'), (2, 'raise')])
    done = score(answers, tmp_path / 's.jsonl', *OWN, '--json')
    summary = json.loads(done.stdout)
    assert done.returncode == 2
    assert (summary['labels'], summary['failed']) == ({'ok': 1, 'crash': 1, 'error': 1}, 2)
    assert done.stderr.splitlines()[-1].startswith(
        f'error: 2 of 3 answers have no reward (1 crash, 1 error): {tmp_path}/s.jsonl has the reason of each'
    )
    assert 'Traceback' not in done.stderr
    again = score(answers, tmp_path / 's.jsonl', *OWN, '--json')  # nothing is left to score
    assert again.returncode == 2
    assert json.loads(again.stdout) == summary | {'scored_before': 3, 'seconds': 0.0}


def test_it_goes_on_after_kill_9_and_scores_nothing_twice(tmp_path, many):
    answers, notes, flags = many
    code, _, _ = interrupt(signal.SIGKILL, answers, tmp_path / 's.jsonl', flags)
    assert code == -signal.SIGKILL
    assert all_end(processes(notes))
    kept = len((tmp_path / 's.jsonl').read_bytes().splitlines())
    assert 10 <= kept < 200
    with (tmp_path / 's.jsonl').open('a') as file:
        file.write('{"line": 1')
    called = len(scored(notes))
    done = score(answers, tmp_path / 's.jsonl', *flags)
    assert done.returncode == 0, done.stderr
    assert f'scoring {200 - kept} answers, {kept} more are scored already' in done.stdout
    assert f', {kept} of them before' in done.stdout
    assert sorted(scored(notes)[called:]) == list(range(kept, 200))
    whole = score(answers, tmp_path / 'whole.jsonl', *flags)
    assert whole.returncode == 0
    assert (tmp_path / 's.jsonl').read_bytes() == (tmp_path / 'whole.jsonl').read_bytes()
    assert [line['reward'] for line in read(tmp_path / 's.jsonl')] == [float(n) for n in range(200)]


@pytest.mark.parametrize('number', [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_it_with_its_workers_and_it_goes_on(tmp_path, many, number):
    answers, notes, flags = many
    code, output, errors = interrupt(number, answers, tmp_path / 's.jsonl', flags)
    kept = len((tmp_path / 's.jsonl').read_bytes().splitlines())
    assert (code, errors) == (75, '')
    assert f'{number.name}: keeping the scores; once more to quit at once' in output
    assert output.endswith(
        f'stopped: {kept} of 200 answers are scored in {tmp_path}/s.jsonl\nthe same command goes on\n'
    )
    assert all_end(processes(notes))
    assert score(answers, tmp_path / 's.jsonl', *flags).returncode == 0
    assert [line['reward'] for line in read(tmp_path / 's.jsonl')] == [float(n) for n in range(200)]


def test_a_signal_ends_inline_scoring_between_two_answers(tmp_path, many):
    answers, _, flags = many
    flags = [*flags[:-1], '--config.task.verifier=inline']
    code, output, _ = interrupt(signal.SIGTERM, answers, tmp_path / 's.jsonl', flags)
    assert code == 75
    assert 10 <= len(read(tmp_path / 's.jsonl')) < 200
    assert output.endswith('the same command goes on\n')


def test_a_file_that_may_not_grow_is_one_sentence_and_what_is_written_counts(tmp_path):
    answers = write(tmp_path / 'a.jsonl', [(n % 20, 'right') for n in range(200)])
    limited = ['sh', '-c', 'ulimit -f 8; exec "$@"', 'sh']  # blocks of 512 bytes, or of 1024
    done = score(answers, tmp_path / 's.jsonl', *OWN, before=limited)
    assert done.returncode == 2
    assert done.stderr == (
        f'error: writing the scores, at {tmp_path}/s.jsonl: the file may not grow: raise the limit (ulimit -f) '
        '(File too large)\n'
    )
    done = score(answers, tmp_path / 's.jsonl', *OWN)
    assert done.returncode == 0, done.stderr
    assert 'of them before' in done.stdout
    assert [line['line'] for line in read(tmp_path / 's.jsonl')] == list(range(1, 201))


def test_no_jax_is_imported(tmp_path):
    answers = write(tmp_path / 'a.jsonl', [(0, 'right')])
    python, *words = command(answers, tmp_path / 's.jsonl', *OWN)
    run = [python, '-X', 'importtime', *words]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    imported = {line.rpartition('|')[2].strip() for line in done.stderr.splitlines()}
    assert 'areal_jax.app.score.scoring' in imported
    assert not {'jax', 'flax'} & imported


@pytest.mark.parametrize(
    ('arguments', 'said'),
    [
        (['--answers='], '--answers is missing: name a file of JSON lines, e.g. --answers=answers.jsonl'),
        (['--answers=none.jsonl'], '--answers=none.jsonl cannot be read (No such file or directory); name a file'),
        (['--workers=two'], "--workers=two: invalid literal for int() with base 10: 'two'"),
        (['--config.run.steps=7'], 'set but never read: run.steps=7. This run does not use it: remove'),
        (
            ['--config.task.reward=none.py:score'],
            f"task.reward={ROOT}/none.py:score: there is no file '{ROOT}/none.py'",
        ),
        (['--answer=a.jsonl'], '--answer is not a flag; did you mean --answers?'),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, arguments, said):
    answers = write(tmp_path / 'a.jsonl', [(0, 'right')])
    done = score(answers, tmp_path / 's.jsonl', *OWN, *arguments)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(f'error: {said}')
    assert done.stderr.count('\n') == 1
    assert [path.name for path in tmp_path.iterdir()] == ['a.jsonl']
