"""What --resume does: after the end, before the first checkpoint, past a damaged one, with another config."""

import json
import shutil
import weakref

import jax
import pytest

from areal_jax.app.library import build_run
from areal_jax.checkpoint.shards import write_shards
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.config.fields import ConfigError
from tests.app.run.test_supervised import final, metrics, run, sft_config
from tests.app.small import SmallRun, equal, train_until_killed

FIELDS = {'run__steps': 2, 'evaluation__problems': 4, 'evaluation__samples': 1}


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    """A run by rewards that was never told to save."""
    return SmallRun(tmp_path_factory.mktemp('finished'), **FIELDS).train()


def copy(finished, tmp_path):
    return shutil.copytree(finished.workdir, tmp_path / 'copy')


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_finished_run_has_a_checkpoint_of_its_last_weights(finished):
    assert names(finished.workdir / 'checkpoints') == ['step_00000002']
    params = CheckpointStore(finished.workdir / 'checkpoints').restore_latest()[1]['params']
    assert equal(jax.tree.map(lambda stored: stored.__array__(), params), finished.final)
    kinds = [(e['kind'], e.get('update'), e.get('phase')) for e in finished.events if e['kind'] in ('save', 'evaluate')]
    assert kinds.index(('save', 2, None)) < kinds.index(('evaluate', None, 'after'))


def test_moments_are_let_go_when_they_are_written(tmp_path, monkeypatch):
    """The next update then has their memory, or donates them, before the checkpoint is whole."""
    alive = []

    def write(directory, leaves):
        moments = [weakref.ref(leaf) for name, leaf in leaves.items() if name.startswith('optimizer')]
        index = write_shards(directory, leaves)
        alive.append((len(moments) > 0, sum(moment() is not None for moment in moments)))
        return index

    monkeypatch.setattr('areal_jax.checkpoint.store.write_shards', write)
    SmallRun(tmp_path, **FIELDS, checkpoint__every=1).train()
    assert alive == [(True, 0)] * 2


def test_a_finished_run_that_is_resumed_gives_its_report_and_nothing_else(finished, tmp_path):
    workdir = copy(finished, tmp_path)
    before = {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()}
    resumed = SmallRun(workdir, resume=True, **FIELDS).train()
    assert resumed.report == json.loads((workdir / 'report.json').read_text())
    assert {path: path.read_bytes() for path in workdir.rglob('*') if path.is_file()} == before


def test_a_run_of_an_earlier_version_keeps_its_ends_and_the_clock_of_its_templates(finished, tmp_path):
    workdir = copy(finished, tmp_path)
    saved = json.loads((workdir / 'config.json').read_text())
    assert (saved['model'].pop('ends'), saved['model'].pop('template_date')) == ('all', '')
    (workdir / 'config.json').write_text(json.dumps(saved))
    for _ in range(2):  # the first of them writes the fields down
        with SmallRun(workdir, resume=True, **FIELDS | {'run__steps': 3}).session as session:
            model = session.context.config.model
            assert (model.ends, model.template_date) == ('eos', 'off')
    written = json.loads((workdir / 'config.json').read_text())['model']
    assert (written['ends'], written['template_date']) == ('eos', 'off')


def test_a_run_killed_before_its_report_makes_it_at_the_resume(finished, tmp_path):
    workdir = copy(finished, tmp_path)
    (workdir / 'report.json').unlink()
    (workdir / 'evaluations.json').write_text('{}')
    report = SmallRun(workdir, resume=True, **FIELDS).train().report
    assert report['accuracy']['greedy']['after'] == finished.report['accuracy']['greedy']['after']
    assert report['weights_sha256'] == finished.report['weights_sha256']


def test_a_run_killed_before_its_first_checkpoint_starts_again(finished, tmp_path, capsys):
    train_until_killed(SmallRun(tmp_path, **FIELDS), 1)
    assert not (tmp_path / 'checkpoints').exists()
    with pytest.raises(
        ConfigError, match=r'go on with --resume, which starts again at update 0, since it has no check'
    ):
        SmallRun(tmp_path, **FIELDS)
    with pytest.raises(ConfigError, match=r'run\.seed: 0 -> 1; use the same'):
        SmallRun(tmp_path, resume=True, run__seed=1, **FIELDS)
    events = (tmp_path / 'events.jsonl').read_bytes()
    again = SmallRun(tmp_path, resume=True, **FIELDS).train()
    assert equal(again.final, finished.final)
    assert again.events == finished.events
    assert (tmp_path / 'events.1.jsonl').read_bytes() == events
    assert len((tmp_path / 'metrics.1.jsonl').read_text().splitlines()) == 1
    assert list(json.loads((tmp_path / 'evaluations.1.json').read_text())) == ['before']
    assert 'starts at update 0; the records of the attempt before are now events.1.jsonl' in capsys.readouterr().out


def test_a_damaged_checkpoint_leads_to_the_one_before_and_the_same_end(finished, tmp_path, capfd):
    workdir = tmp_path / 'run'
    whole = SmallRun(workdir, checkpoint__every=1, **FIELDS).train()
    assert names(workdir / 'checkpoints') == ['step_00000001', 'step_00000002']  # checkpoint.keep=2
    (workdir / 'checkpoints' / 'step_00000002' / 'contents.json').write_text('')
    (workdir / 'checkpoints' / '.step_00000003.partial').mkdir()
    events = whole.events
    resumed = SmallRun(workdir, resume=True, checkpoint__every=1, **FIELDS).train()
    assert resumed.version_at_start == 1
    assert 'step_00000002 is damaged (JSONDecodeError' in capfd.readouterr().err
    assert names(workdir / 'checkpoints') == ['damaged_step_00000002', 'step_00000001', 'step_00000002']
    assert equal(resumed.final, whole.final)
    done = [[e['draws'] for e in run if e['kind'] == 'consume'] for run in (resumed.events, events)]
    assert done[0] == done[1]
    assert resumed.report['steps'] == 2


def test_a_last_checkpoint_that_fails_does_not_cost_the_report(tmp_path, monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise CheckpointError('the disk is full')

    monkeypatch.setattr(CheckpointStore, 'save', refuse)
    message = 'the checkpoint after the last update of .* failed: the disk is full. The same command with --resume'
    with pytest.raises(CheckpointError, match=message):
        SmallRun(tmp_path / 'rl', run__steps=1).train()
    with pytest.raises(CheckpointError, match=message):
        run(tmp_path / 'sft', run__steps=1)
    assert json.loads((tmp_path / 'rl' / 'report.json').read_text())['steps'] == 1
    assert json.loads((tmp_path / 'sft' / 'report.json').read_text())['steps'] == 1
    assert capsys.readouterr().err.count('warning: the checkpoint after the last update failed; the report foll') == 2


def test_a_prolonged_run_with_other_problems(finished, tmp_path):
    workdir = copy(finished, tmp_path)
    fields = FIELDS | {'run__steps': 3, 'evaluation__problems': 3, 'checkpoint__keep': 1}
    longer = SmallRun(workdir, resume=True, **fields).train()
    assert longer.version_at_start == 2
    assert (longer.report['steps'], len(longer.batches)) == (3, 1)
    assert list(json.loads((workdir / 'evaluations.json').read_text())) == ['after']  # no score of other problems
    assert list(json.loads((workdir / 'evaluations.1.json').read_text())) == ['before', 'after']
    note = {'at_update': 2, 'from_steps': 2, 'to_steps': 3}
    assert json.loads((workdir / 'facts.json').read_text())['prolonged'] == [note]
    assert json.loads((workdir / 'report.1.json').read_text()) == finished.report
    with pytest.raises(ConfigError, match=r'run\.steps: 3 -> 2; it may only be raised: use 3 or more'):
        SmallRun(workdir, resume=True, **FIELDS)


# Supervised runs, which have no admission: prolonged ones equal those of the larger number of updates from the start.


@pytest.fixture(scope='module')
def supervised(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('supervised')
    return workdir, *run(workdir, run__steps=4)


@pytest.mark.parametrize('stop_after', [None, 1])
def test_a_prolonged_supervised_run_equals_the_longer_one(supervised, tmp_path, stop_after):
    shorter = build_run(sft_config(run__steps=2, checkpoint__every=1), tmp_path)
    update = shorter.site.learner.update
    if stop_after is not None:
        shorter.site.learner.update = lambda *args: update(*args) if shorter.program.step < stop_after else 1 / 0
        with pytest.raises(ZeroDivisionError):
            shorter.train()
    else:
        shorter.train()
    session, report = run(tmp_path, resume=True, run__steps=4)
    assert equal(final(session), final(supervised[1]))
    note = {'at_update': stop_after or 2, 'from_steps': 2, 'to_steps': 4}
    assert session.context.config.run.steps == report['steps'] == 4
    assert report['prolonged'] == [note]
    assert set(report['held_out_nll']) == ({'0', '4'} if stop_after else {'0', '2', '4'})


def test_a_finished_supervised_run_is_not_trained_further_and_may_be_measured_on_others(supervised, tmp_path):
    workdir = shutil.copytree(supervised[0], tmp_path / 'copy')
    assert names(workdir / 'checkpoints') == ['step_00000004']
    assert run(workdir, resume=True, run__steps=4)[1] == json.loads((workdir / 'report.json').read_text())
    session, report = run(workdir, resume=True, run__steps=4, evaluation__problems=2)
    assert (report['demonstrations']['held_out'], list(report['held_out_nll'])) == (2, ['4'])
    assert equal(final(session), final(supervised[1]))


def test_a_supervised_run_killed_before_its_first_checkpoint_starts_again(supervised, tmp_path):
    killed = build_run(sft_config(run__steps=4), tmp_path)
    update = killed.site.learner.update
    killed.site.learner.update = lambda *args: update(*args) if killed.program.step < 2 else 1 / 0
    with pytest.raises(ZeroDivisionError):
        killed.train()
    session, _ = run(tmp_path, resume=True, run__steps=4)
    assert equal(final(session), final(supervised[1]))
    assert metrics(tmp_path) == metrics(supervised[0])
    assert len((tmp_path / 'metrics.1.jsonl').read_text().splitlines()) == 2
