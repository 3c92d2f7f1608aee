"""`telemetry.hook` in a run: every row arrives, nothing of the run waits, a bad hook is refused before it starts."""

from __future__ import annotations

import json
import pathlib

import pytest

from areal_jax.app.library import build_run
from areal_jax.errors import UserError
from areal_jax.telemetry.metrics import read_metrics
from tests.app.run.test_supervised import sft_config
from tests.app.small import SmallRun, start_killed_and_resumed

KEEPS = """
import json, time

def log(row, step, workdir):
    config = json.loads((workdir / 'config.json').read_text())
    with (workdir / 'rows.jsonl').open('a') as file:
        print(json.dumps({'step': step, 'seed': config['run']['seed'], **row}), file=file)

def block(row, step, workdir):
    if step == 2:
        time.sleep(2.0)
    log(row, step, workdir)
    if step == 3:
        raise ConnectionError('no route to host')
"""


@pytest.fixture
def hook_file(tmp_path: pathlib.Path) -> pathlib.Path:
    file = tmp_path / 'keeps.py'
    file.write_text(KEEPS)
    return file


def rows(workdir: pathlib.Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / 'rows.jsonl').read_text().splitlines()]


def written(workdir: pathlib.Path) -> list[dict[str, object]]:
    """The lines of metrics.jsonl as a hook gets them."""
    lines = [dict(line) for line in read_metrics(workdir / 'metrics.jsonl')]
    return [{k: v for k, v in line.items() if isinstance(v, (int, float))} for line in lines]


def test_a_hook_gets_every_row_and_changes_nothing(tmp_path: pathlib.Path, hook_file: pathlib.Path):
    plain = SmallRun(tmp_path / 'plain').train()
    hooked = SmallRun(tmp_path / 'hooked', telemetry__hook=f'{hook_file}:log').train()
    assert rows(tmp_path / 'hooked') == [{**line, 'seed': 0} for line in written(tmp_path / 'hooked')]
    assert hooked.report['weights_sha256'] == plain.report['weights_sha256']
    assert hooked.report['hook'] == {'calls': 5, 'failed': 0, 'left_out': 0, 'first_error': ''}
    assert plain.report['hook'] == {}


def test_a_hook_that_blocks_and_raises_holds_nothing_up(tmp_path: pathlib.Path, hook_file: pathlib.Path, capsys):
    workdir, spec = tmp_path / 'run', f'{hook_file}:block'
    run = SmallRun(workdir, telemetry__hook=spec, run__clock='real').train()
    assert run.report['event_loop_lag_seconds']['max'] < 0.2
    assert [row['step'] for row in rows(workdir)] == [1, 2, 3, 4, 5]  # also those that came after it raised
    assert (run.report['hook']['calls'], run.report['hook']['failed']) == (5, 1)
    sentence = f'telemetry.hook={spec}: line 14 of {hook_file} raises ConnectionError: no route to host'
    assert capsys.readouterr().err.count(sentence) == 1
    (warning,) = [w for w in run.report['warnings'] if 'telemetry.hook' in w]
    assert warning.startswith(f'telemetry.hook failed for 1 of 5 rows (the first: {sentence}), and 0 more')


def test_a_resumed_run_repeats_no_row(tmp_path: pathlib.Path, hook_file: pathlib.Path):
    workdir = tmp_path / 'run'
    fields = {'telemetry__hook': f'{hook_file}:log', 'checkpoint__every': 2}
    start_killed_and_resumed(workdir, 3, **fields).train()
    assert [row['step'] for row in rows(workdir)] == [1, 2, 3, 4, 5]


def test_supervised_training_calls_the_hook_too(tmp_path: pathlib.Path, hook_file: pathlib.Path):
    report = build_run(sft_config(telemetry__hook=f'{hook_file}:log'), tmp_path / 'run').train()
    assert [row['step'] for row in rows(tmp_path / 'run')] == [1, 2, 3, 4, 5, 6]
    assert report is not None
    assert report['hook']['calls'] == 6


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ('keeps.py', "telemetry.hook='keeps.py' must name a function"),
        ('{}:lag', "there is no function 'lag' in {}"),
        ('{}x:log', "there is no file '{}x'"),
    ],
)
def test_a_hook_that_cannot_be_loaded_is_refused_before_anything_is_written(tmp_path, hook_file, spec, message):
    with pytest.raises(UserError) as refused:
        SmallRun(tmp_path / 'run', telemetry__hook=spec.format(hook_file))
    assert message.format(hook_file) in str(refused.value)
    assert not (tmp_path / 'run').exists()
