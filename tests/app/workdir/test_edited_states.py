"""Files of a run that were edited, cut short or overwritten: every reader says which in one sentence, or passes over.

No file makes a command end in a traceback (exit code 1).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import shutil
import traceback

import numpy as np
import pytest

from areal_jax import main_check_log, main_replay, main_report, main_runs
from areal_jax.app.workdir.records import STARTS, note_start
from areal_jax.app.workdir.run_directory import PROLONGATIONS, continue_run, prepare_workdir, read_report
from areal_jax.checkpoint.store import CONTENTS, CheckpointError, CheckpointStore
from areal_jax.config import CONFIG, TrackedConfig, default_config
from areal_jax.errors import ExitCode, UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.report.report import FILE as REPORT
from areal_jax.telemetry.facts import EVALUATIONS
from areal_jax.telemetry.facts import FILE as FACTS
from areal_jax.telemetry.metrics import FILE as METRICS
from tests.changed_json import changed
from tests.telemetry.logs import two_facts, two_metrics, two_updates

FEW, MANY = 2, 40  # changed values of each file
LENGTHS = [pytest.param(FEW, id='few'), pytest.param(MANY, id='many', marks=pytest.mark.slow)]
SCORES = {'greedy': [1.0, 0.0], 'sampled': [[1.0], [0.0]], 'most_frequent_answer_share': 0.5, 'labels': {'ok': 2}}
ENVIRONMENT = {
    'commit': None, 'versions': {'jax': '1'}, 'machine': 'x86_64', 'instructions': ['avx2'], 'devices': ['cpu:0'],
    'cores': 2, 'settings': {},
}  # fmt: skip
SANDBOX = {
    'level': 'landlock', 'landlock_abi': 4, 'user': 1000, 'own_processes': False, 'refused': ['open'], 'allowed': ['a'],
    'runners': ['scorer'],
}  # fmt: skip


def make_config():
    values = default_config()
    values.run.steps = 2
    return values


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    """A finished run as its files tell."""
    workdir = tmp_path_factory.mktemp('runs') / 'run'
    workdir.mkdir()
    config = make_config()
    (workdir / CONFIG).write_text(config.to_json_best_effort())
    for name, lines in ((EVENTS, two_updates()), (METRICS, two_metrics())):
        (workdir / name).write_text(''.join(json.dumps(line) + '\n' for line in lines))
    during = [{'version': 1, 'seconds': 0.5, **SCORES}]
    (workdir / EVALUATIONS).write_text(json.dumps({'before': SCORES, 'after': SCORES, 'during': during}))
    start = {'seq': 0, 'config': json.loads(config.to_json_best_effort()), 'environment': ENVIRONMENT, 'data': {}}
    (workdir / STARTS).write_text(json.dumps({'starts': [start | {'evaluations': None, 'sandbox': SANDBOX}]}))
    prolonged = [{'at_update': 1, 'from_steps': 1, 'to_steps': 2}]
    (workdir / PROLONGATIONS).write_text(json.dumps({'prolongations': prolonged}))
    facts = dataclasses.replace(
        two_facts(), planned_steps=2, sandbox=SANDBOX, prolonged=prolonged, hardware=ENVIRONMENT
    )
    facts.save(workdir)
    assert main_report.main([f'--workdir={workdir}', '--no-plots']) == ExitCode.FINISHED
    return workdir


def resume(workdir):
    """What a resumed run reads before it is built, as far as files tell it."""
    config = make_config()
    values = TrackedConfig(config).as_dict()
    prepare_workdir(workdir, values, resume=True)
    read_report(workdir, 2)
    continue_run(workdir, values, 1)
    note_start(workdir, 5, TrackedConfig(config), None, environment=ENVIRONMENT)


def call(command, workdir):
    """(exit code, what was said), as the console script ends."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = command(workdir)
        except SystemExit as end:
            code = end.code
        except UserError as error:
            code, _ = ExitCode.USER_ERROR, said.write(str(error))
        except Exception:
            code, _ = ExitCode.BUG, said.write(traceback.format_exc())
    return code or ExitCode.FINISHED, said.getvalue()


COMMANDS = {
    'report': lambda workdir: main_report.main([f'--workdir={workdir}', '--no-plots']),
    'runs': lambda workdir: main_runs.main([str(workdir.parent)]),
    'check_log': lambda workdir: main_check_log.main([str(workdir)]),
    'replay': lambda workdir: main_replay.main([f'--workdir={workdir}', f'--portable={workdir / "packed"}']),
    'resume': resume,
}
# what reads a file
READERS = {
    CONFIG: tuple(COMMANDS), EVENTS: ('report', 'runs', 'check_log', 'replay'), METRICS: ('report', 'runs'),
    EVALUATIONS: ('report', 'runs', 'resume'), STARTS: ('report', 'replay', 'resume'), PROLONGATIONS: ('resume',),
    FACTS: ('report', 'replay'), REPORT: ('runs', 'resume'),
}  # fmt: skip
DAMAGED = (b'', b'{', b'[]', b'null', bytes(range(256)), b'[' * 100_000, b'{"a":' * 100_000, b'[' + b'9' * 5000 + b']')


def contents(path, most):
    """What the file may hold: damage, and the file with one place changed."""
    text = path.read_text()
    yield from (*(DAMAGED if most == MANY else DAMAGED[-2:]), text[: len(text) // 2].encode())
    if path.suffix == '.json':
        for one in changed(json.loads(text), most):
            yield json.dumps(one).encode()
        return
    lines = text.splitlines()
    for number in range(len(lines)) if most == MANY else (len(lines) // 2, len(lines) - 1):
        for one in changed(json.loads(lines[number]), most // 2, seed=number):
            yield '\n'.join([*lines[:number], json.dumps(one), *lines[number + 1 :], '']).encode()


@pytest.mark.parametrize('most', LENGTHS)
@pytest.mark.parametrize('name', READERS)
def test_an_edited_file_of_a_run_ends_no_command_in_a_traceback(run, tmp_path, name, most):
    faults, refused = [], 0
    for content in contents(run / name, most):
        for command in READERS[name]:
            workdir = tmp_path / 'runs' / 'run'
            shutil.copytree(run, workdir)
            (workdir / name).write_bytes(content)
            code, said = call(COMMANDS[command], workdir)
            shutil.rmtree(workdir)
            refused += code == ExitCode.USER_ERROR
            if code == ExitCode.BUG or 'Traceback' in said:
                faults.append((command, content[:300], said[-700:]))
    print(*faults, sep='\n')
    assert not faults
    assert refused


def test_the_commands_take_the_run_as_it_is(run, tmp_path):
    shutil.copytree(run, tmp_path / 'runs' / 'run')
    for name in COMMANDS.keys() - {'check_log'}:  # the log is made up
        code, said = call(COMMANDS[name], tmp_path / 'runs' / 'run')
        assert code == ExitCode.FINISHED, (name, said)


@pytest.mark.parametrize('most', LENGTHS)
def test_an_edited_checkpoint_is_passed_over_by_name(tmp_path, most):
    store = CheckpointStore(tmp_path / 'checkpoints')
    arrays = {'params': {'w': np.arange(6, dtype=np.float32).reshape(2, 3)}, 'step': np.zeros((), np.int32)}
    store.save(1, arrays, {'next_draw': 3})
    (path,) = (tmp_path / 'checkpoints').glob('step_*')
    index = path / CONTENTS
    text, refused = index.read_text(), 0
    for content in (*DAMAGED, *(json.dumps(one).encode() for one in changed(json.loads(text), 20 * most))):
        index.write_bytes(content)
        try:
            found, _ = store.restore(1)
            for leaf in (found['params']['w'], found['step']):
                np.asarray(leaf)
        except CheckpointError as error:
            refused += str(path) in str(error)
        except (KeyError, TypeError, IndexError):
            pass  # the tree has other names: who restores it compares them
    assert refused > 10
