"""areal-runs: what the files of a workdir say of its run, damaged ones included, and what differs between runs."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from areal_jax import main_runs
from areal_jax.app.workdir import run_list
from areal_jax.app.workdir.run_list import (
    RunEntry,
    Score,
    as_json,
    find_differences,
    list_runs,
    render_runs,
    select_runs,
)
from areal_jax.config import default_config, flatten
from areal_jax.errors import UserError
from areal_jax.files import DirectoryLock

DEFAULTS = dict(flatten(default_config()))


def write_run(path: pathlib.Path, updates: int = 0, *, end: str = '', report: bool = False, **fields: object) -> None:
    """A workdir as a run of 10 updates leaves it."""
    path.mkdir(parents=True)
    config = default_config()
    config.update_from_flattened_dict({'run.steps': 10} | {k.replace('__', '.'): v for k, v in fields.items()})
    (path / 'config.json').write_text(json.dumps(config.to_dict()))
    rows = [json.dumps({'step': step, 'reward/mean': step / 10}) for step in range(1, updates + 1)]
    (path / 'metrics.jsonl').write_text(''.join(f'{row}\n' for row in rows))
    events = [{'seq': 0, 'kind': 'draw'}] if updates else []
    events += [{'seq': 1, 'kind': end, 'message': 'OSError: no room'}] if end else []
    (path / 'events.jsonl').write_text(''.join(f'{json.dumps(event)}\n' for event in events))
    if report:
        gain = {'mean': 0.5, 'low': 0.25, 'high': 0.75}
        told = {'steps': 10, 'finished': True, 'wall_seconds': 90.0, 'accuracy': {'sampled': {'gain': gain}}}
        (path / 'report.json').write_text(json.dumps(told))


def states(directory: pathlib.Path) -> dict[str, tuple[str, int]]:
    return {entry.name: (entry.state, entry.updates) for entry in list_runs(directory)}


def test_the_state_of_each_run(tmp_path: pathlib.Path):
    write_run(tmp_path / 'done', 10, report=True)
    write_run(tmp_path / 'stopped', 4, end='signal')
    write_run(tmp_path / 'failed', 3, end='error')
    write_run(tmp_path / 'killed', 5)
    write_run(tmp_path / 'resumed_and_killed', 5, end='restore')
    write_run(tmp_path / 'new')
    write_run(tmp_path / 'deep' / 'er' / 'running', 2)
    lock = DirectoryLock(tmp_path / 'deep' / 'er' / 'running')
    try:
        assert states(tmp_path) == {
            'done': ('finished', 10), 'stopped': ('stopped', 4), 'failed': ('failed', 3), 'killed': ('killed', 5),
            'resumed_and_killed': ('killed', 5), 'new': ('never began', 0), 'deep/er/running': ('running', 2),
        }  # fmt: skip
    finally:
        lock.release()
    (failed,) = [entry for entry in list_runs(tmp_path) if entry.name == 'failed']
    assert failed.reason == 'OSError: no room'
    (done,) = list_runs(tmp_path / 'done')
    assert (done.score, done.reward, done.wall_seconds) == (Score('gain', 0.5, 0.25, 0.75), 1.0, 90.0)


def test_a_run_that_was_prolonged_or_reported_early_has_not_finished(tmp_path: pathlib.Path):
    write_run(tmp_path / 'a', 10, report=True, run__steps=20)
    assert states(tmp_path) == {'a': ('killed', 10)}


@pytest.mark.parametrize(
    ('file', 'content', 'reason'),
    [
        ('config.json', b'{"run": {', 'config.json is no JSON'),
        ('config.json', None, 'there is no config.json'),
        ('metrics.jsonl', b'{"step": 1}\n\xff\xfe\n', 'metrics.jsonl is no JSON'),
        ('metrics.jsonl', b'[1]\n', 'metrics.jsonl holds a list, not an object'),
        ('report.json', b'', 'report.json is no JSON'),
        ('report.json', b'{"steps": 10, "accuracy": {"sampled": {"gain": {"mean": 1}}}}', "a file of it lacks 'low'"),
        ('evaluations.json', b'{"before": {"sampled": []}}', "a file of it lacks 'greedy'"),
    ],
)
def test_a_damaged_workdir_is_listed_with_a_reason(
    tmp_path: pathlib.Path, file: str, content: bytes | None, reason: str
):
    write_run(tmp_path / 'good', 3)
    write_run(tmp_path / 'bad', 3)
    (tmp_path / 'bad' / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / 'bad' / file).write_bytes(content)
    bad, good = list_runs(tmp_path)
    assert (good.name, good.state) == ('good', 'killed')
    assert (bad.name, bad.state) == ('bad', 'damaged')
    assert reason in bad.reason


def test_a_torn_last_line_is_left_out(tmp_path: pathlib.Path):
    write_run(tmp_path / 'a', 3)
    with (tmp_path / 'a' / 'metrics.jsonl').open('a') as file:
        file.write('{"step": 4, "rewa')
    assert states(tmp_path) == {'a': ('killed', 3)}


def test_evaluations_models_and_arms_of_a_sweep(tmp_path: pathlib.Path):
    for eta in (0.0, 4.0):
        write_run(tmp_path / 'sweep' / f'eta{eta:g}', 10, report=True, staleness__eta=eta)
    (tmp_path / 'sweep' / 'sweep.json').write_text('{}')
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / 'config.json').write_text('{"model_type": "llama"}')
    write_run(tmp_path / 'held_out', evaluation__problems=5)
    (tmp_path / 'held_out' / 'answers.jsonl').write_text('{}\n{}\n')
    entries = list_runs(tmp_path)
    assert [(entry.name, entry.group, entry.kind) for entry in entries] == [
        ('held_out', '', 'evaluation'), ('sweep/eta0', 'sweep', 'rl'), ('sweep/eta4', 'sweep', 'rl'),
    ]  # fmt: skip
    assert (entries[0].state, entries[0].updates, entries[0].planned) == ('stopped', 2, 5)
    lines = render_runs(entries[1:], find_differences(entries[1:]), DEFAULTS, time.time(), None).splitlines()
    assert lines[1] == 'sweep:'
    assert lines[2].startswith('  eta0  finished  10/10')
    assert 'gain +0.50 [+0.25, +0.75]' in lines[2]
    assert [line.split()[-1] for line in lines[2:4]] == ['staleness.eta=0', 'staleness.eta=4']
    assert lines[-1] == '2 runs: 2 finished'


def entry(name: str, **fields: object) -> RunEntry:
    return RunEntry(pathlib.Path(name), name, '', config={**DEFAULTS, **fields}, state='finished')


def test_differences_are_between_the_runs_or_against_the_defaults():
    runs = [
        entry('a', **{'staleness.eta': 0.0, 'run.seed': 5}),
        entry('b', **{'run.seed': 5, 'telemetry.plots': False}),
    ]
    assert find_differences(runs) == {'a': {'staleness.eta': 0.0}, 'b': {'staleness.eta': 4.0}}
    assert find_differences(runs, DEFAULTS) == {'a': {'run.seed': 5, 'staleness.eta': 0.0}, 'b': {'run.seed': 5}}


def test_runs_with_little_in_common_show_what_is_not_the_default():
    others = {
        field: value + 1 for field, value in DEFAULTS.items() if type(value) is int and field.startswith('model.')
    }
    assert len(others) > 5
    others |= {'run.seed': 7, 'run.steps': 3, 'lora.rank': 2, 'rollout.slots': 3}
    runs = [entry('a'), entry('b', **others)]
    first, second = render_runs(runs, find_differences(runs), DEFAULTS, 0.0, None).splitlines()[1:3]
    assert '=' not in first
    assert 'run.seed=7' in second


def test_filters_keep_what_they_name():
    runs = [entry('tiny_a', **{'staleness.eta': 0.0}), entry('tiny_b'), entry('other')]
    keep = lambda *words: [run.name for run in select_runs(runs, words)]
    assert keep('staleness.eta=4') == ['tiny_b', 'other']
    assert keep('staleness.eta=4', 'name=tiny*') == ['tiny_b']
    assert keep('state=failed') == []
    with pytest.raises(UserError, match="'failed' is no filter: write FIELD=VALUE"):
        keep('failed')
    with pytest.raises(UserError, match=r'no run has the field staleness\.etta'):
        keep('staleness.etta=1')


def test_the_last_column_is_cut_at_the_width_of_the_terminal():
    runs = [entry('a', **{'task.system_prompt': 'x' * 500}), entry('b')]
    lines = render_runs(runs, find_differences(runs), DEFAULTS, 0.0, 120).splitlines()
    assert len(lines[1]) == 120
    assert lines[1].endswith('…')


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / 'a', 10, report=True, staleness__eta=float('inf'))
    write_run(tmp_path / 'b', 4)
    assert main_runs.main([str(tmp_path), '--sort=reward', 'state=*']) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ['run', 'a', 'b', '2']
    assert main_runs.main([str(tmp_path), '--json']) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first['differences'], second['differences']) == ({'staleness.eta': 'inf'}, {'staleness.eta': 4.0})
    assert main_runs.main([str(tmp_path / 'nothing')]) == 2
    assert 'nothing is no directory: name one' in capsys.readouterr().err
    (tmp_path / 'empty').mkdir()
    assert main_runs.main([str(tmp_path / 'empty')]) == 2
    assert 'holds no run' in capsys.readouterr().err
    assert as_json([], {}) == []


def test_hundreds_of_workdirs_take_seconds_and_no_jax(tmp_path: pathlib.Path):
    for number in range(200):
        write_run(tmp_path / f'run{number:04}', 10, report=bool(number % 2), run__seed=number)
    program = (
        'import sys\nfrom areal_jax import main_runs\nmain_runs.main(sys.argv[1:])\nassert "jax" not in sys.modules'
    )
    before = os.times()
    done = subprocess.run([sys.executable, '-c', program, str(tmp_path)], capture_output=True, text=True, check=True)
    after = os.times()
    assert done.stdout.splitlines()[-1] == '200 runs: 100 finished, 100 killed'
    assert after.children_user - before.children_user < 3  # of a processor: others may use the machine


def test_what_is_inside_a_workdir_is_not_listed(tmp_path: pathlib.Path):
    write_run(tmp_path / 'a', 3)
    write_run(tmp_path / 'a' / 'copy', 3)
    assert list(states(tmp_path)) == ['a']
    assert run_list.DAMAGED == 'damaged'
