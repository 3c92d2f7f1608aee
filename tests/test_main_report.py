"""The command that makes a report again: of any run, finished or not, and a sentence for what is no run."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
from typing import Any

import jax
import pytest

from areal_jax import main_report
from areal_jax.app.workdir.environment import git_commit, read_environment
from areal_jax.config import default_config
from areal_jax.errors import ExitCode
from areal_jax.report.report import write_report
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, train_until_killed
from tests.telemetry.logs import two_facts, two_metrics, two_updates

FILES = ('report.json', 'report.md', 'report.html', 'timeline.json', 'plots/slots.png')


def write_run(workdir: pathlib.Path, **config: Any) -> None:
    """The files of a run that was killed after its second update."""
    values = default_config()
    values.run.steps = 4
    values.update_from_flattened_dict({name.replace('__', '.'): value for name, value in config.items()})
    (workdir / 'config.json').write_text(values.to_json_best_effort())
    for name, lines in (('events.jsonl', two_updates()), ('metrics.jsonl', two_metrics())):
        (workdir / name).write_text(''.join(json.dumps(line) + '\n' for line in lines))


def rebuild(workdir: pathlib.Path, *arguments: str) -> dict[str, Any]:
    """The report that the command leaves."""
    assert main_report.main([f'--workdir={workdir}', *arguments]) == ExitCode.FINISHED
    return json.loads((workdir / 'report.json').read_text())


def test_the_report_of_a_finished_run_comes_out_equal(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path)
    two_facts().save(tmp_path)
    written = write_report(tmp_path, two_facts())
    for name in FILES:
        (tmp_path / name).unlink()
    assert rebuild(tmp_path) == written
    assert capsys.readouterr().out.strip() == f'{tmp_path}/report.md'
    assert all((tmp_path / name).stat().st_size for name in FILES)


def test_a_killed_run_says_where_it_stands(tmp_path: pathlib.Path):
    write_run(tmp_path, run__seed=7, staleness__eta=1.0, loss__objective='grpo')
    report = rebuild(tmp_path, '--no-plots')
    assert report['objective'].startswith(
        'grpo (DeepSeekMath, arXiv 2402.03300): ratio token, ratio_denominator proximal'
    )
    assert report['warnings'][-1].startswith("loss.surrogate='clip' (of loss.objective='grpo') over")
    assert (report['finished'], report['steps'], report['planned_steps']) == (False, 2, 4)
    assert (report['seed'], report['eta'], report['token_age']['max']) == (7, 1.0, 1)
    assert report['warnings'][0].startswith(
        'The run has not finished: it stands at update 2 of 4, and it was killed. --resume goes on from update 0. '
        'Missing here: held-out scores before training, held-out scores after training, memory, lag of the event loop,'
    )
    assert report['missing'][:2] == ['held-out scores before training', 'held-out scores after training']
    page = (tmp_path / 'report.md').read_text()
    assert 'seed 7, eta 1, real clock: 2 of 4 updates' in page
    assert 'weights not recorded' in page


def test_a_small_run_that_was_killed_and_then_finished(tmp_path: pathlib.Path):
    fields = {'checkpoint__every': 2, 'run__steps': 4, 'evaluation__problems': 4, 'evaluation__samples': 1}
    killed = SmallRun(tmp_path, **fields)
    train_until_killed(killed, 3)
    unfinished = rebuild(tmp_path, '--no-plots')
    assert (unfinished['finished'], unfinished['steps']) == (False, 3)
    assert unfinished['accuracy']['greedy']['before']['n'] == 4
    assert unfinished['missing'][0] == 'held-out scores after training'
    assert unfinished['hardware'] == {name: read_environment()[name] for name in ('cores', 'machine', 'devices')}
    assert unfinished['versions']['jax'] == jax.__version__
    assert git_commit() is None or 'not recorded, weights' not in (tmp_path / 'report.md').read_text()
    assert 'it ended with an error. --resume goes on from its checkpoint of update 2.' in unfinished['warnings'][0]
    page = (tmp_path / 'report.md').read_text()
    assert 'held-out accuracy before training' in page
    assert 'has not made yet' in page
    finished = SmallRun(tmp_path, resume=True, **fields).train().report
    assert (finished['finished'], finished['steps'], finished['attempts']) == (True, 4, 2)
    # what the run writes at its start is known in the report of one that has not finished
    for name in ('cores', 'machine'):
        assert unfinished['hardware'][name] == finished['hardware'][name]
    assert len(unfinished['hardware']['devices']) == len(finished['hardware']['devices'])
    assert (unfinished['versions'], unfinished['git_commit']) == (finished['versions'], finished['git_commit'])
    assert rebuild(tmp_path, '--no-plots') == finished


def test_an_evaluation_that_is_still_to_come_is_not_called_unwanted(tmp_path: pathlib.Path):
    write_run(tmp_path)
    rebuild(tmp_path)
    page = (tmp_path / 'report.html').read_text()
    assert 'No evaluation before or after training has finished yet.' in page
    assert 'The run was not evaluated' not in page
    assert 'No evaluation on held-out problems has finished yet' in (tmp_path / 'report.md').read_text()
    write_run(tmp_path, evaluation__problems=0)
    rebuild(tmp_path)
    assert 'The run was not evaluated' in (tmp_path / 'report.html').read_text()


def test_a_small_run_that_was_stopped(tmp_path: pathlib.Path):
    stopped = SmallRun(tmp_path).session
    log, stop = stopped.program.parts.host.log, stopped.program.parts.controller.stop_requested
    log.listeners.append(lambda e: stop.set() if e['kind'] == 'publish' else None)
    log.write('signal', name='SIGTERM')
    assert stopped.train() is None
    report = rebuild(tmp_path, '--no-plots')
    assert 0 < report['steps'] < report['planned_steps'] == 5
    sentence = (
        f'stands at update {report["steps"]} of 5, and it was stopped by a signal. --resume goes on from its checkpoint'
    )
    assert f'{sentence} of update {report["steps"]}.' in report['warnings'][0]


def test_lock_step_warns_of_nothing_that_its_schedule_rules_out(tmp_path: pathlib.Path):
    report = SmallRun(tmp_path, staleness__schedule='fixed(2)').train().report
    assert (report['eta'], report['schedule'], report['interruptions']) == (None, 'fixed(2)', 0)
    assert not [w for w in report['warnings'] if 'interrupted' in w or 'eta' in w]
    assert set(report['admission_held']) <= {'schedule', 'max_running_groups', 'steps'}
    assert rebuild(tmp_path, '--no-plots') == report


def test_supervised_training_finished_and_killed(tmp_path: pathlib.Path):
    from areal_jax.app.library import build_run

    written = build_run(sft_config(), tmp_path).train()
    (tmp_path / 'report.json').unlink()
    assert rebuild(tmp_path) == json.loads(json.dumps(written))
    page = (tmp_path / 'report.md').read_text()
    (tmp_path / 'facts.json').unlink()
    lines = (tmp_path / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (tmp_path / 'metrics.jsonl').write_text(''.join(lines[:4]) + lines[4][:30])  # killed while it wrote update 5
    report = rebuild(tmp_path)
    assert (report['finished'], report['steps'], report['planned_steps']) == (False, 4, 6)
    assert report['train_nll']['first'] == written['train_nll']['first']
    assert 'The run has not finished: it stands at update 4 of 6' in (tmp_path / 'report.md').read_text() != page
    assert 'it was stopped or killed. --resume goes on from its checkpoint of update 6.' in report['warnings'][0]
    (tmp_path / 'metrics.jsonl').unlink()
    shutil.rmtree(tmp_path / 'checkpoints')
    report = rebuild(tmp_path)
    assert (report['steps'], report['running']) == (0, False)
    assert 'update 0 of 6, and it was stopped or killed. --resume goes on from update 0.' in report['warnings'][0]


def replace_line(path: pathlib.Path, number: int, text: str) -> None:
    lines = path.read_text().splitlines()
    lines[number - 1] = text
    path.write_text('\n'.join(lines) + '\n')


@pytest.mark.parametrize('name', ['events.jsonl', 'metrics.jsonl'])
@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('{"seq": 1, "ti', 'line 2 of {count} is no JSON'),
        ('7', 'line 2 of {count} holds a int, not an object'),
        ('{}', 'line 2 has no '),
        ('{"seq": 1, "time": "soon", "kind": "draw", "step": "two"}', "line 2 has (time='soon'|step='two')"),
        ('{"seq": 1, "time": 0, "kind": "decode", "step": 1}', "line 2 (has no 'lane'|has kind='decode')"),
    ],
)
def test_a_torn_or_edited_line_is_named(tmp_path: pathlib.Path, capsys, name: str, text: str, message: str):
    write_run(tmp_path)
    path = tmp_path / name
    path.write_text(path.read_text() + '{"seq": 99, "ti')  # torn at the end: left out
    if name == 'metrics.jsonl':
        path.write_text(''.join(json.dumps({'step': step}) + '\n' for step in (1, 2, 3)))
    rebuild(tmp_path, '--no-plots')
    count = len(path.read_text().splitlines())
    replace_line(path, 2, text)
    assert main_report.main([f'--workdir={tmp_path}']) == ExitCode.USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith(f'error: {path}: ')
    assert error.count('\n') == 1
    import re

    assert re.search(message.format(count=count), error), error


@pytest.mark.parametrize('values', [{'reward/mean': [0.5]}, {'staleness/token_age_histogram': 3}, {'time': 'late'}])
def test_a_metric_of_another_kind_is_named(tmp_path: pathlib.Path, capsys, values: dict[str, Any]):
    write_run(tmp_path)
    replace_line(tmp_path / 'metrics.jsonl', 2, json.dumps({'step': 2, **values}))
    assert main_report.main([f'--workdir={tmp_path}']) == ExitCode.USER_ERROR
    ((name, value),) = values.items()
    assert f'line 2 has {name}={value!r}' in capsys.readouterr().err


def test_a_repeated_update_is_named(tmp_path: pathlib.Path, capsys):
    write_run(tmp_path)
    replace_line(tmp_path / 'metrics.jsonl', 2, '{"step": 1}')
    assert main_report.main([f'--workdir={tmp_path}']) == ExitCode.USER_ERROR
    assert 'line 2 is of update 1, after one of update 1' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('name', 'text', 'message'),
    [
        ('config.json', None, 'holds no run: there is no config.json; give the --workdir of a run'),
        ('config.json', '{"run": {"steps": 4', 'config.json is no JSON'),
        ('config.json', '[1, 2]', 'config.json holds a list, not an object'),
        (
            'config.json',
            '{"name": "another program"}',
            "config.json has name='another program', which is no section with fields",
        ),
        ('facts.json', '{"config": "x', 'facts.json is no JSON'),
        ('facts.json', '{"config": "x"}', 'facts.json was written by another version'),
        (
            'evaluations.json',
            '{"before": {}}',
            "evaluations.json: 'before' does not hold the scores of an evaluation",
        ),
    ],
)
def test_what_is_no_run_or_not_whole_is_one_sentence(tmp_path: pathlib.Path, capsys, name, text, message):
    write_run(tmp_path)
    if text is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(text)
    assert main_report.main([f'--workdir={tmp_path}', '--no-plots']) == ExitCode.USER_ERROR
    error = capsys.readouterr().err
    assert message in error
    assert str(tmp_path) in error
    assert 'Traceback' not in error


def test_a_run_killed_at_any_moment_has_a_report(tmp_path: pathlib.Path):
    """Copies of the workdir, as kill -9 leaves it: before the first event, while evaluating, around a checkpoint."""
    run = SmallRun(tmp_path / 'run', checkpoint__every=2, evaluation__problems=4, evaluation__samples=1)
    moments: list[tuple[str, pathlib.Path]] = []

    def copy(event: dict[str, Any]) -> None:
        if event['kind'] in ('evaluate', 'save', 'publish', 'consume', 'signal') or event['seq'] in (1, 2, 30):
            to = tmp_path / f'at_{event["seq"]}'
            shutil.copytree(tmp_path / 'run', to, ignore=shutil.ignore_patterns('.lock', 'arrays'))
            moments.append((event['kind'], to))

    run.session.program.parts.host.log.listeners.append(copy)
    run.train()
    steps = set()
    for _, workdir in moments:
        for name in ('events.jsonl', 'metrics.jsonl'):  # the last line is torn: it was being written
            with (workdir / name).open('r+b') as file:
                file.truncate(max(0, file.seek(0, 2) - 7))
        report = rebuild(workdir, '--no-plots')
        assert (report['finished'], report['running'], report['planned_steps']) == (False, False, 5)
        assert f'stands at update {report["steps"]} of 5, and it was killed.' in report['warnings'][0]
        assert 'hash of the weights' in report['missing']
        steps.add(report['steps'])
    assert steps == {0, 1, 2, 3, 4}  # the line of the last whole update is torn too
    assert [kind for kind, _ in moments].count('evaluate') == 4


def test_a_run_killed_while_it_was_built_has_a_report(tmp_path: pathlib.Path):
    write_run(tmp_path)
    for name in ('events.jsonl', 'metrics.jsonl'):
        (tmp_path / name).unlink()
    report = rebuild(tmp_path)
    assert (report['steps'], report['planned_steps'], report['finished']) == (0, 4, False)
    (tmp_path / 'events.jsonl').write_text('')
    (tmp_path / 'metrics.jsonl').write_text('')
    assert rebuild(tmp_path) == report


def test_a_run_that_is_still_running_is_reported_and_not_disturbed(tmp_path: pathlib.Path):
    run, reports = SmallRun(tmp_path), []

    def report(event: dict[str, Any]) -> None:
        if (event['kind'], event.get('version')) == ('publish', 3):
            reports.append(rebuild(tmp_path, '--no-plots'))

    run.session.program.parts.host.log.listeners.append(report)
    run.train()
    (report_at_3,) = reports
    assert (report_at_3['running'], report_at_3['finished']) == (True, False)
    assert f'it is still running (process {os.getpid()} on ' in report_at_3['warnings'][0]
    assert '--resume' not in report_at_3['warnings'][0]
    assert run.report['finished'] is True
    assert json.loads((tmp_path / 'report.json').read_text()) == run.report


def test_a_report_of_the_unfinished_run_is_not_taken_for_its_own(tmp_path: pathlib.Path):
    """Killed after the last update, reported, resumed: the run writes the report of its end."""
    killed = SmallRun(tmp_path, evaluation__problems=4)
    killed.session.program.report = lambda: (_ for _ in ()).throw(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert rebuild(tmp_path, '--no-plots')['steps'] == 5
    report = SmallRun(tmp_path, resume=True, evaluation__problems=4).train().report
    assert (report['finished'], report['steps']) == (True, 5)
    assert json.loads((tmp_path / 'report.json').read_text())['finished'] is True


def test_report_json_is_copied(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / 'run').mkdir()
    write_run(tmp_path / 'run')
    report = rebuild(tmp_path / 'run', '--no-plots', f'--json={tmp_path}/copy.json')
    assert json.loads((tmp_path / 'copy.json').read_text()) == report
    (tmp_path / 'run' / 'report.json').unlink()
    for wrong in (tmp_path, tmp_path / 'nowhere' / 'copy.json'):
        assert main_report.main([f'--workdir={tmp_path}/run', f'--json={wrong}']) == ExitCode.USER_ERROR
        assert f'error: --json={wrong} is a directory, or in none' in capsys.readouterr().err
    assert not (tmp_path / 'run' / 'report.json').exists()  # nothing half done


@pytest.mark.slow
def test_kill_9_of_the_command(tmp_path: pathlib.Path):
    """A report while the command runs, and one of what kill -9 leaves of it."""
    from tests.app.test_main_train import QUICK, ROOT, command, environment, wait_for_steps

    options = [*QUICK, '--config.run.steps=500', '--config.checkpoint.every=5']
    process = subprocess.Popen(command(tmp_path, *options), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    try:
        wait_for_steps(tmp_path, 8, process)
        assert rebuild(tmp_path, '--no-plots')['running'] is True
    finally:
        process.kill()
        process.wait()
    report = rebuild(tmp_path, '--no-plots')
    assert (report['running'], report['finished']) == (False, False)
    assert report['steps'] >= 8
    assert 'and it was killed. --resume goes on from its checkpoint of update ' in report['warnings'][0]
