"""The command that makes a report again: of any run, finished or not, and a sentence for what is no run."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from areal_jax import main_report
from areal_jax.config import default_config
from areal_jax.errors import ExitCode
from areal_jax.report.report import write_report
from tests.app.small import SmallRun
from tests.app.test_sft import sft_config
from tests.telemetry.logs import two_facts, two_metrics, two_updates

FILES = ('report.json', 'report.md', 'timeline.json', 'plots/slots.png')


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
    write_run(tmp_path, run__seed=7, staleness__eta=1.0)
    report = rebuild(tmp_path, '--no-plots')
    assert (report['finished'], report['steps'], report['planned_steps']) == (False, 2, 4)
    assert (report['seed'], report['eta'], report['token_age']['max']) == (7, 1.0, 1)
    assert report['warnings'][0].startswith(
        'The run has not finished: it stands at update 2 of 4, and it was killed or is still running.'
    )
    page = (tmp_path / 'report.md').read_text()
    assert 'seed 7, eta 1, real clock: 2 of 4 updates' in page
    assert 'weights not recorded' in page


def test_a_small_run_that_was_killed_and_then_finished(tmp_path: pathlib.Path):
    fields = {'checkpoint__every': 2, 'run__steps': 4, 'evaluation__problems': 4, 'evaluation__samples': 1}
    killed = SmallRun(tmp_path, **fields)
    on_step = killed.session.controller._on_step

    def die(record):
        on_step(record)
        if record.step == 3:
            raise KeyboardInterrupt

    killed.session.controller._on_step = die
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    unfinished = rebuild(tmp_path, '--no-plots')
    assert (unfinished['finished'], unfinished['steps']) == (False, 3)
    assert unfinished['accuracy']['greedy']['before']['n'] == 4
    finished = SmallRun(tmp_path, resume=True, **fields).train().report
    assert (finished['finished'], finished['steps'], finished['attempts']) == (True, 4, 2)
    assert rebuild(tmp_path, '--no-plots') == finished


def test_a_small_run_that_was_stopped(tmp_path: pathlib.Path):
    stopped = SmallRun(tmp_path).session
    stopped.log.listeners.append(lambda e: stopped.controller.stop_requested.set() if e['kind'] == 'publish' else None)
    stopped.log.write('signal', name='SIGTERM')
    assert stopped.train() is None
    report = rebuild(tmp_path, '--no-plots')
    assert 0 < report['steps'] < report['planned_steps'] == 5
    assert f'stands at update {report["steps"]} of 5, and it was stopped by a signal' in report['warnings'][0]


def test_lock_step_warns_of_nothing_that_its_schedule_rules_out(tmp_path: pathlib.Path):
    report = SmallRun(tmp_path, staleness__schedule='fixed(2)').train().report
    assert (report['eta'], report['schedule'], report['interruptions']) == (None, 'fixed(2)', 0)
    assert not [w for w in report['warnings'] if 'interrupted' in w or 'eta' in w]
    assert set(report['admission_held']) <= {'schedule', 'max_running_groups', 'steps'}
    assert rebuild(tmp_path, '--no-plots') == report


def test_supervised_training_finished_and_killed(tmp_path: pathlib.Path):
    from areal_jax.app.sft import SftSession

    written = SftSession(sft_config(), tmp_path).train()
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
        ('config.json', '{"name": "another program"}', 'config.json holds loss.objective=None'),
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
