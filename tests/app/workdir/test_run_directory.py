from __future__ import annotations

import datetime
import json

import pytest

from areal_jax.app.workdir.run_directory import (
    continue_run,
    note_weights,
    prepare_workdir,
    read_prolongations,
    sample_digest,
    settle_config,
    start_again,
)
from areal_jax.config import CONFIG, default_config
from areal_jax.config.fields import ConfigError

_VALUES = {
    'cluster': {'learner': 'fsdp=8', 'engines': '1 x shared'},
    'learner': {'layers': 'list', 'rows_per_microbatch': 8, 'epochs': 1},
    'run': {'steps': 6, 'compilation_cache': '', 'seed': 0},
    'optimizer': {'schedule': 'constant'},
    'task': {'verifier': 'inline', 'verifier_workers': 1, 'sandbox': 'auto'},
    'evaluation': {'problems': 4},
}


def _changed(section, **fields):
    return _VALUES | {section: _VALUES.get(section, {}) | fields}


@pytest.mark.parametrize(
    ('section', 'fields'),
    [
        ('cluster', {'learner': 'fsdp=2'}),
        ('learner', {'layers': 'stacked', 'rows_per_microbatch': 2}),
        ('run', {'steps': 7, 'compilation_cache': '/tmp/cache'}),
        ('task', {'verifier_workers': 3, 'sandbox': 'landlock'}),
        ('evaluation', {'problems': 5}),
        ('telemetry', {'plots': False}),
        ('checkpoint', {'every': 3}),
    ],
)
def test_what_may_change_on_the_way(tmp_path, section, fields):
    prepare_workdir(tmp_path, _VALUES, resume=False)
    prepare_workdir(tmp_path, _changed(section, **fields), resume=True)
    assert json.loads((tmp_path / 'config.json').read_text()) == _VALUES  # until a checkpoint is found
    continue_run(tmp_path, _changed(section, **fields), 3)
    assert json.loads((tmp_path / 'config.json').read_text()) == _changed(section, **fields)


@pytest.mark.parametrize(
    ('section', 'fields', 'message'),
    [
        ('learner', {'epochs': 2}, r'learner\.epochs: 1 -> 2; use the same, or start without --resume'),
        ('run', {'seed': 1}, r'run\.seed: 0 -> 1; use the same'),
        ('cluster', {'engines': '2 x shared'}, r"cluster\.engines: '1 x shared' -> '2 x shared'; use the same"),
        ('task', {'verifier': 'process'}, r"task\.verifier: 'inline' -> 'process'; use the same"),
        ('run', {'steps': 5}, r'run\.steps: 6 -> 5; it may only be raised: use 6 or more'),
    ],
)
def test_what_may_not_is_named(tmp_path, section, fields, message):
    prepare_workdir(tmp_path, _VALUES, resume=False)
    with pytest.raises(ConfigError, match=message):
        prepare_workdir(tmp_path, _changed(section, **fields), resume=True)


def test_a_run_of_an_earlier_version_is_one_sentence(tmp_path):
    earlier = {name: fields for name, fields in _VALUES.items() if name != 'cluster'}
    earlier |= {'mesh': {'data': 1, 'fsdp': 8, 'strategy': 'fsdp'}, 'rollout': {'engines': 2}}
    prepare_workdir(tmp_path, earlier, resume=False)
    with pytest.raises(
        ConfigError, match=r'config.json is of an earlier version. mesh.data=1, mesh.fsdp=8, .* use '
    ) as e:
        prepare_workdir(tmp_path, _VALUES, resume=True)
    assert "cluster.learner='fsdp=8', cluster.strategy='fsdp', cluster.engines='2 x shared' and start anew" in str(
        e.value
    )


@pytest.mark.parametrize('schedule', ['cosine', 'linear'])
def test_a_schedule_that_ends_with_the_run_cannot_be_prolonged(tmp_path, schedule):
    values = _changed('optimizer', schedule=schedule)
    prepare_workdir(tmp_path, values, resume=False)
    prepare_workdir(tmp_path, values, resume=True)
    with pytest.raises(ConfigError, match=rf"run\.steps: 6 -> 9, but optimizer\.schedule='{schedule}' has set"):
        prepare_workdir(tmp_path, values | {'run': _VALUES['run'] | {'steps': 9}}, resume=True)


def test_every_prolongation_is_noted_once(tmp_path):
    prepare_workdir(tmp_path, _VALUES, resume=False)
    for update, steps in ((4, 6), (6, 8), (7, 8), (8, 9)):
        continue_run(tmp_path, _changed('run', steps=steps), update)
    notes = [{'at_update': 6, 'from_steps': 6, 'to_steps': 8}, {'at_update': 8, 'from_steps': 8, 'to_steps': 9}]
    assert read_prolongations(tmp_path) == notes
    continue_run(tmp_path, _changed('run', steps=9), 5)  # the checkpoints of 6 and 8 were damaged
    assert [note['at_update'] for note in read_prolongations(tmp_path)] == [5, 5]


def test_the_score_of_the_last_weights_goes_when_there_are_later_ones(tmp_path):
    prepare_workdir(tmp_path, _VALUES, resume=False)
    scores = tmp_path / 'evaluations.json'
    scores.write_text('{"before": {}, "after": {"greedy": []}}')
    continue_run(tmp_path, _VALUES, 6)
    assert set(json.loads(scores.read_text())) == {'before', 'after'}
    continue_run(tmp_path, _changed('run', steps=7), 6)
    assert set(json.loads(scores.read_text())) == {'before'}


def test_records_of_every_attempt_without_a_checkpoint_are_kept(tmp_path):
    for number in (1, 2):
        (tmp_path / 'events.jsonl').write_text(f'{number}')
        if number == 2:
            (tmp_path / 'tensorboard').mkdir()
        start_again(tmp_path, _VALUES)
    assert [(tmp_path / f'events.{number}.jsonl').read_text() for number in (1, 2)] == ['1', '2']
    assert (tmp_path / 'tensorboard.2').is_dir()
    assert not (tmp_path / 'events.jsonl').exists()


def test_a_workdir_that_holds_a_run_says_from_where_it_would_go_on(tmp_path):
    (tmp_path / 'checkpoints' / 'step_00000012').mkdir(parents=True)
    with pytest.raises(ConfigError, match=r'go on with --resume, from update 12; or give another --workdir'):
        prepare_workdir(tmp_path, _VALUES, resume=False)


def test_a_run_does_not_go_on_from_other_weights_of_the_same_size(tmp_path):
    weights = tmp_path / 'model'
    weights.mkdir()
    shard = weights / 'model.safetensors'
    values = bytearray(range(256)) * 8192  # 2 MiB, twice what is sampled
    shard.write_bytes(values)
    note_weights(tmp_path, weights, resume=False)
    note_weights(tmp_path, weights, resume=True)
    shard.write_bytes(bytes(value ^ 1 for value in values))
    with pytest.raises(ConfigError, match=r'model.path=.* are not those that the run in .* started from'):
        note_weights(tmp_path, weights, resume=True)


def test_a_digest_of_samples_sees_both_ends_and_the_size(tmp_path):
    file = tmp_path / 'small.gguf'
    digests = set()
    for content in (b'', b'a', b'a' * 5000, b'b' + b'a' * 4999, b'a' * 4999 + b'b', b'a' * 5001):
        file.write_bytes(content)
        digests.add(sample_digest(file))
    assert len(digests) == 6


def test_a_run_keeps_the_day_of_its_first_start_and_its_ends(tmp_path):
    config = default_config()
    assert settle_config(config, tmp_path, (), resume=False).model.template_date == ''  # a drawn model has no template
    config.model.source, config.model.path = 'hf', 'x'
    began = settle_config(config, tmp_path, (), resume=False)
    assert datetime.date.fromisoformat(began.model.template_date) <= datetime.date.today()
    began.model.template_date, began.model.ends = '2020-02-29', 'eos'
    (tmp_path / CONFIG).write_text(json.dumps(began.to_dict()))
    resumed = settle_config(config, tmp_path, (), resume=True).model
    assert (resumed.template_date, resumed.ends) == ('2020-02-29', 'eos')
    config.model.template_date = 'off'
    set_by_hand = settle_config(config, tmp_path, ['model.ends'], resume=True).model
    assert (set_by_hand.template_date, set_by_hand.ends) == ('off', 'all')  # which is refused as another config
