"""Replays of whole runs, and one sentence for whatever cannot be replayed."""

from __future__ import annotations

import json
import lzma
import pathlib
import shutil
import subprocess
import sys

import pytest

from areal_jax import main_check_log, main_replay
from areal_jax.app.run.replay import describe_environment
from areal_jax.app.workdir import environment
from areal_jax.app.workdir.environment import describe_differences, read_environment
from areal_jax.app.workdir.records import note_start, pack, read_packed, read_starts, read_workdir, restore_config
from areal_jax.config import TrackedConfig, flatten
from areal_jax.config.fields import ConfigError
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import check_of
from areal_jax.errors import ExitCode
from areal_jax.telemetry.rollout_views import read_rollouts
from tests.app.small import SmallRun, small_config, train_until_killed
from tests.toys import LONGEST, ToyRun


def toy_events():
    real = lambda lanes, log, start_s: RealClock(lanes, log, 30.0, start_s)
    return ToyRun(make_clock=real, engines=2, groups_per_update=2, eta=4, max_running=4).run().log.events


@pytest.fixture(scope='module')
def lines():
    return [json.dumps(event) for event in toy_events()]


@pytest.fixture
def run(tmp_path, lines):
    """The files of a run that has finished, as far as a replay reads them before it begins."""
    return write_run(tmp_path / 'run', lines)


def write_run(workdir: pathlib.Path, lines, **fields) -> pathlib.Path:
    workdir.mkdir()
    toy = {'rollout__group_size': 2, 'rollout__max_new_tokens': LONGEST}  # what toy_events has
    config = TrackedConfig(small_config(run__clock='real', run__steps=6, staleness__eta=4.0, **toy, **fields))
    (workdir / 'config.json').write_text(json.dumps(config.as_dict()))
    (workdir / 'events.jsonl').write_text(''.join(f'{line}\n' for line in lines))
    (workdir / 'facts.json').write_text('{"weights_sha256": "abc"}')
    note_start(workdir, 0, config, None)
    return workdir


def change_json(path: pathlib.Path, change) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def refused(capsys, *arguments: str) -> str:
    """The one sentence of a replay that is refused."""
    assert main_replay.main(arguments) == ExitCode.USER_ERROR
    said = capsys.readouterr()
    (sentence,) = said.err.splitlines()
    assert 'Traceback' not in said.out
    return sentence.removeprefix('error: ')


@pytest.mark.parametrize(
    ('section', 'field', 'value', 'words'),
    [
        ('rollout', 'server', 'own', "has rollout.server='own': the tokens of servers come from outside and are not"),
        ('run', 'clock', 'virtual', "has run.clock='virtual', under which the same command repeats the run bit for"),
        ('loss', 'objective', 'sft', 'supervised training has no event log; the same command repeats it'),
        ('cluster', 'learner', 'hosts=2 x data=2', "has cluster.learner='hosts=2 x data=2': only runs of one process"),
    ],
)
def test_what_a_log_does_not_determine_is_refused(run, capsys, section, field, value, words):
    change_json(run / 'config.json', lambda config: config[section].update({field: value}))
    assert words in refused(capsys, f'--workdir={run}')
    assert words in refused(capsys, f'--workdir={run}', f'--portable={run.parent / "packed"}')
    assert sorted(path.name for path in run.parent.iterdir()) == ['run']


def edit_line(workdir, number, change):
    path = workdir / 'events.jsonl'
    lines = path.read_text().splitlines()
    event = json.loads(lines[number - 1])
    change(event)
    lines[number - 1] = json.dumps(event)
    path.write_text('\n'.join(lines) + '\n')


def first_line(lines, kind):
    return next(number for number, line in enumerate(lines, start=1) if json.loads(line)['kind'] == kind)


def test_an_edited_log_is_refused_before_anything_is_computed(run, lines, capsys):
    log, done = run / 'events.jsonl', first_line(lines, 'run_done')
    whole = log.read_text()
    edit_line(run, done, lambda event: event.update(seconds=event['seconds'] / 2))
    said = refused(capsys, f'--workdir={run}')
    assert said.startswith(f'{log}: line {done} has check=')
    assert said.endswith(': replay the log as the run wrote it')
    log.write_text(whole)
    edit_line(run, 9, lambda event: event.update(seq=12))
    assert f'{log}: line 9 has seq=12, where 8 is due' in refused(capsys, f'--workdir={run}')
    log.write_text(whole)
    edit_line(run, 9, lambda event: event.update(color='red'))
    assert f"{log}: line 9 has the unknown field color='red'" in refused(capsys, f'--workdir={run}')
    log.write_text(whole)
    edit_line(run, done, lambda event: event.pop('check'))
    assert f"{log}: line {done} has 'run_done' without a check sum" in refused(capsys, f'--workdir={run}')
    log.write_text('\n'.join([*lines[:5], lines[5][:20], *lines[6:]]) + '\n')
    assert f'{log}: line 6 of {len(lines)} is no JSON' in refused(capsys, f'--workdir={run}')
    log.write_text(whole)
    edit_line(run, 1, lambda event: event.update(version=99))
    assert f'{log}: line 1 says that the event log has version 99' in refused(capsys, f'--workdir={run}')
    edit_line(run, 1, lambda event: event.update(version=5))
    assert f'{log}: line 1 says that the event log has version 5, which lacks' in refused(capsys, f'--workdir={run}')
    assert not run.with_name('run.replay').exists()


def test_what_is_no_run_or_lacks_a_file_is_refused(run, tmp_path, capsys):
    assert 'holds no run of asynchronous RL' in refused(capsys, f'--workdir={tmp_path}')
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'file').write_text('mine')
    said = refused(capsys, f'--workdir={run}', f'--out={tmp_path / "out"}')
    assert said.endswith('out exists and is not empty: a replay writes nothing over; name another directory')
    assert (tmp_path / 'out' / 'file').read_text() == 'mine'
    assert 'task.length=3: task.length names no data' in refused(capsys, f'--workdir={run}', '--data=task.length=3')
    assert '--data=x must be FIELD=PATH' in refused(capsys, f'--workdir={run}', '--data=x')
    change_json(run / 'starts.json', lambda starts: starts['starts'][0].update(seq=7))
    assert 'line 1 begins a start that starts.json does not know' in refused(capsys, f'--workdir={run}')
    (run / 'starts.json').unlink()
    assert 'has no starts.json, which says how each start was made' in refused(capsys, f'--workdir={run}')


def test_a_run_of_another_version_names_the_field(run, capsys):
    change_json(run / 'starts.json', lambda starts: starts['starts'][0]['config']['rollout'].update(slotz=3))
    said = refused(capsys, f'--workdir={run}')
    assert 'starts.json is of another version of this program: rollout.slotz is not a field of the config' in said
    change_json(run / 'starts.json', lambda starts: starts['starts'][0]['config']['rollout'].pop('slotz'))
    change_json(run / 'starts.json', lambda starts: starts['starts'][0]['config']['rollout'].update(slots='many'))
    assert "starts.json: start 1 is not of a run: rollout.slots='many' must be a whole number" in refused(
        capsys, f'--workdir={run}'
    )


def test_data_is_named_by_its_digest(tmp_path, lines, capsys):
    data = tmp_path / 'problems.jsonl'
    data.write_text('{"question": "1+1=", "answer": "2"}\n')
    run = write_run(tmp_path / 'run', lines, task__name='jsonl', task__path=str(data))
    data.rename(tmp_path / 'elsewhere.jsonl')
    said = refused(capsys, f'--workdir={run}')
    assert said == f'task.path: the run read {data}, which is not here: give it with --data=task.path=FILE'
    other = tmp_path / 'other.jsonl'
    other.write_text('{"question": "1+2=", "answer": "3"}\n')
    said = refused(capsys, f'--workdir={run}', f'--data=task.path={other}')
    assert said.startswith(f'task.path: {other} is not the file that the run read (sha256 ')


def test_a_start_is_noted_with_its_config_and_replaces_what_was_cut_off(run):
    config = small_config(run__steps=7, staleness__eta=float('inf'))
    config.task.options.a = (1, 2)
    for seq in (40, 90, 60):
        note_start(run, seq, TrackedConfig(config), None)
    starts = read_starts((run / 'starts.json').read_bytes(), 'starts')
    assert [start['seq'] for start in starts] == [0, 40, 60]
    restored = restore_config(starts[-1]['config'], 'starts')
    assert dict(flatten(restored)) == dict(flatten(config))
    with pytest.raises(ConfigError, match='starts is of another version'):
        restore_config({'rollout': {'nothing': 1}}, 'starts')


def test_another_environment_is_said(run, monkeypatch):
    here = read_environment()
    assert here['instructions'] == sorted(set(here['instructions']))
    assert describe_differences(here, here) == []
    there = {
        **here, 'versions': {**here['versions'], 'jaxlib': '0.0.1'}, 'cores': 99, 'devices': ['TPU_0 (TPU v9)'],
        'instructions': [*here['instructions'], 'avx9000'], 'settings': {'XLA_FLAGS': '--x'}, 'commit': 'abc',
    }  # fmt: skip
    found = '; '.join(describe_differences(there, here))
    for words in ('jaxlib 0.0.1 -> ', 'cores 99 -> ', 'devices TPU_0 (TPU v9) -> ', 'this CPU lacks avx9000',
                  'XLA_FLAGS --x -> ', 'commit abc -> '):  # fmt: skip
        assert words in found
    assert describe_differences({**here, 'machine': 'riscv'}, here) == [f'instruction set riscv -> {here["machine"]}']
    recorded = read_workdir(run)
    assert describe_environment(recorded, recorded.starts) == []
    monkeypatch.setattr(environment, 'package_versions', lambda: {**here['versions'], 'jax': '9.9'})
    (sentence,) = describe_environment(recorded, recorded.starts)
    assert sentence.startswith('warning: this is not where the run was made (jax ')
    assert sentence.endswith(' -> 9.9): equal numbers are promised only where all of that is equal')


def test_a_run_is_packed_into_one_small_file(run, tmp_path, capsys):
    packed = tmp_path / 'run.xz'
    assert main_replay.main([f'--workdir={run}', f'--portable={packed}']) == ExitCode.FINISHED
    assert packed.stat().st_size < (run / 'events.jsonl').stat().st_size / 3
    there, here = read_packed(packed), read_workdir(run)
    assert (there.events, there.starts, there.config, there.weights_sha256) == (
        here.events, here.starts, here.config, here.weights_sha256,
    )  # fmt: skip
    capsys.readouterr()
    assert 'exists: name another file' in refused(capsys, f'--workdir={run}', f'--portable={packed}')
    assert 'use --workdir instead of --from' in refused(capsys, f'--from={packed}', f'--portable={tmp_path / "b"}')


def test_a_packed_run_that_is_not_whole_is_refused(run, tmp_path, capsys):
    packed = tmp_path / 'run.xz'
    pack(read_workdir(run), packed)
    whole = packed.read_bytes()
    cases = {
        'is no packed run, or is cut short': whole[: len(whole) // 2],
        'is no packed run': b'PK\x03\x04 something else',
        'is not what was packed': lzma.compress(lzma.decompress(whole).replace(b'"publish"', b'"publisg"')),
    }
    for words, content in cases.items():
        packed.write_bytes(content)
        assert words in refused(capsys, f'--from={packed}')
    assert f'{tmp_path / "none"} cannot be read (No such file' in refused(capsys, f'--from={tmp_path / "none"}')


def check(*arguments: str) -> int:
    return main_check_log.main(list(arguments))


def test_the_command_checks_a_log(run, lines, tmp_path, capsys):
    log = run / 'events.jsonl'
    assert (check(str(log)), check(str(run))) == (0, 0)
    assert f'{log}: {len(lines)} events keep every rule' in capsys.readouterr().out
    pack(read_workdir(run), tmp_path / 'packed')
    assert check(str(tmp_path / 'packed')) == 0
    capsys.readouterr()
    number = first_line(lines, 'consume')
    edit_line(run, number, lambda event: event.update(draws=event['draws'][::-1]))
    assert check(str(log)) == ExitCode.USER_ERROR
    assert f'{log}: line {number}: draws ' in capsys.readouterr().err
    shutil.copy(log, tmp_path / 'alone.jsonl')
    assert check(str(tmp_path / 'alone.jsonl')) == ExitCode.USER_ERROR
    assert 'has no config.json beside it' in capsys.readouterr().err
    assert check(str(tmp_path / 'nothing.jsonl')) == ExitCode.USER_ERROR
    assert 'nothing.jsonl cannot be read' in capsys.readouterr().err
    (run / 'config.json').write_text('{}')
    assert check(str(log)) == ExitCode.USER_ERROR
    assert 'config.json is of no run of asynchronous RL' in capsys.readouterr().err
    log.write_text('')
    assert check(str(run)) == ExitCode.USER_ERROR


# Whole runs.

REAL = {
    'run__clock': 'real', 'run__steps': 6, 'cluster__engines': '2 x shared', 'checkpoint__every': 2,
    'task__verifier': 'process', 'task__verifier_workers': 2, 'evaluation__problems': 2, 'evaluation__samples': 1,
    'evaluation__every': 2, 'staleness__max_token_age': 0, 'staleness__over_age': 'drop',
}  # fmt: skip


def weights_of(workdir: pathlib.Path) -> str:
    return json.loads((workdir / 'facts.json').read_text())['weights_sha256']


def replays(capsys, *arguments: str) -> str:
    code = main_replay.main(list(arguments))
    said = capsys.readouterr()
    assert code == ExitCode.FINISHED, said.err
    return said.out


@pytest.fixture(scope='module')
def killed_twice(tmp_path_factory):
    """A run of the real clock with two engines, killed after updates 3 and 5, and resumed."""
    workdir = tmp_path_factory.mktemp('killed') / 'run'
    train_until_killed(SmallRun(workdir, **REAL), 3)
    train_until_killed(SmallRun(workdir, resume=True, **REAL), 5)
    shutil.copytree(workdir, workdir.with_name('unfinished'))
    SmallRun(workdir, resume=True, **REAL).train()
    return workdir


@pytest.mark.slow
def test_a_run_that_was_killed_twice_is_replayed(killed_twice, tmp_path, capsys):
    out = tmp_path / 'out'
    said = replays(capsys, f'--workdir={killed_twice}', f'--out={out}', f'--json={tmp_path / "found.json"}')
    assert f'equal: weights_sha256 {weights_of(killed_twice)}' in said
    assert weights_of(out) == weights_of(killed_twice)
    assert (out / 'events.jsonl').read_text() == (killed_twice / 'events.jsonl').read_text()
    kept = read_rollouts(killed_twice)
    assert 0 < len(kept) == len({record['draw'] for record in kept})  # none twice after two kills
    assert read_rollouts(out) == kept
    found = json.loads((tmp_path / 'found.json').read_text())
    assert (found['starts'], found['finished']) == (3, True)
    kinds = {json.loads(line)['kind'] for line in (out / 'events.jsonl').read_text().splitlines()}
    assert {'interrupt', 'drop', 'restore', 'evaluate'} <= kinds
    assert check(str(killed_twice)) == 0


@pytest.mark.slow
def test_a_run_that_has_not_finished_is_replayed_as_far_as_it_came(killed_twice, tmp_path, capsys):
    unfinished = killed_twice.with_name('unfinished')
    said = replays(capsys, f'--workdir={unfinished}', f'--out={tmp_path / "out"}')
    assert 'the run ended there with KeyboardInterrupt' in said
    lines = (unfinished / 'events.jsonl').read_text().splitlines()
    assert (tmp_path / 'out' / 'events.jsonl').read_text().splitlines() == lines[:-1]  # the last is the error


@pytest.mark.slow
def test_a_packed_run_is_replayed_elsewhere_and_an_edit_is_found(killed_twice, tmp_path, capsys):
    replays(capsys, f'--workdir={killed_twice}', f'--portable={tmp_path / "packed"}')
    said = replays(capsys, f'--from={tmp_path / "packed"}', f'--out={tmp_path / "out"}')
    assert weights_of(killed_twice) in said
    edited = shutil.copytree(killed_twice, tmp_path / 'edited')
    lines = (edited / 'events.jsonl').read_text().splitlines()
    begun = first_line(lines, 'admit')  # replies before it are of an evaluation, which has no event `reward`
    number = next(n for n, line in enumerate(lines, start=1) if n > begun and json.loads(line).get('reply'))
    change = lambda event: event.update(reply='{"reward": 0.125}')
    edit_line(edited, number, change)
    edit_line(edited, number, lambda event: event.update(check=check_of(event)))
    assert 'reward' in refused(capsys, f'--workdir={edited}', f'--out={tmp_path / "second"}')
    cut = shutil.copytree(killed_twice, tmp_path / 'cut')
    (cut / 'events.jsonl').write_text('\n'.join(lines[:-3]) + '\n')
    said = refused(capsys, f'--workdir={cut}', f'--out={tmp_path / "third"}')
    assert said.endswith('its last lines were lost')
    assert f'ends with line {len(lines) - 3}, and the replay goes on' in said


@pytest.mark.slow
def test_tiny_cpu_under_the_real_clock_is_replayed(tmp_path):
    """In another process; with two engines, interruptions, evaluation before and after, and a report."""
    from areal_jax.app.command_line import load_config
    from areal_jax.app.library import build_run

    config = load_config('configs/tiny_cpu.py')
    config.update_from_flattened_dict(
        {'run.clock': 'real', 'run.steps': 40, 'run.export': False, 'cluster.engines': '2 x shared'}
        | {'telemetry.plots': False, 'telemetry.tensorboard': False, 'telemetry.progress': False}
    )
    run = tmp_path / 'run'
    report = build_run(config, run).train()
    assert report is not None
    command = [sys.executable, '-m', 'areal_jax.main_replay', f'--workdir={run}']
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f'equal: weights_sha256 {report["weights_sha256"]}' in done.stdout
    again = json.loads((tmp_path / 'run.replay' / 'report.json').read_text())
    assert again['accuracy'] == report['accuracy']
    assert '"kind":"interrupt"' in (run / 'events.jsonl').read_text()
