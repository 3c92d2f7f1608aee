"""Sources of a mixture in the config: fallbacks, rules, the command line, a saved config."""

from __future__ import annotations

import json
import pathlib

import pytest
from absl import flags

from areal_jax.app.command_line import parse_command
from areal_jax.app.sweep.arms import _require_field
from areal_jax.app.workdir import records
from areal_jax.app.workdir.records import data_files, restore_config
from areal_jax.config import TrackedConfig, default_config, flatten, validate
from areal_jax.config.declarations import OF_SOURCE, SECTIONS
from areal_jax.config.fields import ConfigError
from areal_jax.config.sources import find_path, list_tasks, split_config
from areal_jax.errors import UserError

FILE = """from areal_jax.config import default_config
def get_config():
    config = default_config()
    config.task.system_prompt = 'Think.'
    config.task.columns.question = 'common'
    config.task.sources.sums = {'weight': 1.0, 'name': 'running_sums', 'length': 3}
    config.task.sources.lines = {'weight': 0.5, 'name': 'jsonl', 'path': 'a.jsonl', 'columns': {'question': 'problem'}}
    return config
"""


@pytest.fixture
def parse(tmp_path):
    (tmp_path / 'experiment.py').write_text(FILE)

    def parse(*settings):
        return parse_command(['main', f'--config={tmp_path}/experiment.py', *settings], flags.FlagValues())

    return parse


def mixed(**sources):
    config = default_config()
    config.task.sources = {'a': {'weight': 1.0}, **sources}
    return config


def refused(config, words):
    with pytest.raises(UserError) as error:
        validate(config)
    assert words in str(error.value), str(error.value)


def test_a_source_has_its_own_fields_and_the_common_ones_that_it_leaves_out(parse):
    tasks = list_tasks(parse().config)
    assert list(tasks) == ['lines', 'sums']  # sorted: a saved config keeps no other order
    assert (tasks['sums'].length, tasks['lines'].length) == (3, 4)
    assert tasks['lines'].system_prompt == 'Think.'
    assert tasks['lines'].columns.to_dict() == {'question': 'problem'}
    assert dict(tasks['sums'].columns) == {}  # columns belong to one file
    assert [find_path(tasks[name], 'path') for name in tasks] == ['task.sources.lines.path', 'task.path']


def test_without_sources_the_task_is_the_section():
    config = default_config()
    assert list_tasks(config) == {'': config.task}
    assert [(prefix, alone is config) for prefix, alone in split_config(config)] == [('', True)]
    assert 'task.sources' not in dict(flatten(config))


def test_every_field_of_a_source_is_a_field_of_the_section():
    assert set(OF_SOURCE) < set(SECTIONS['task'])


@pytest.mark.parametrize(
    ('sources', 'words'),
    [
        ({'b': {'weight': 0.0}}, 'task.sources.b.weight=0.0 must be above 0 and at most 1e6; to leave a source out,'),
        ({'b': {'weight': -1}}, 'task.sources.b.weight=-1 must be above 0'),
        ({'b': {'weight': 'x'}}, "task.sources.b.weight='x' must be a number"),
        ({'b': {}}, 'task.sources.b has no weight: set task.sources.b.weight=1.0'),
        ({'b': {'weight': 1.0, 'wieght': 2.0}}, 'b.wieght=2.0: a source has no such field; did you mean weight?'),
        ({'b': {'weight': 1.0, 'verifier': 'inline'}}, "task.sources.b.verifier='inline': a source has no such field"),
        ({'b': 3}, 'task.sources.b=3 must be the fields of a source'),
        ({'b c': {'weight': 1.0}}, 'task.sources.b c: the name of a source must be letters, digits and _'),
        ({'b': {'weight': 1.0, 'name': 'jsonl'}}, "task.sources.b: task.name='jsonl' needs task.path"),
        ({'b': {'weight': 1.0, 'answer': 'any'}}, "task.sources.b.answer='any' is not known; use one of integer"),
        ({'b': {'weight': 1.0, 'path': 'https://a.b/c'}}, "task.sources.b.path='https://a.b/c'"),
        ({'b': {'weight': 1.0, 'name': 'verifiers:x'}}, "task.sources.b.name='verifiers:x': an environment runs"),
        ({'b': {'weight': 1.0, 'show_tests': True}}, "task.sources.b: task.show_tests=True is for task.name='code'"),
    ],
)  # fmt: skip
def test_what_a_source_may_not_be_is_said_with_its_name(sources, words):
    refused(mixed(**sources), words)


def test_what_is_no_section_is_said():
    config = default_config()
    with pytest.raises(ConfigError, match=r'task\.sources=3 must be a section of sources'):
        SECTIONS['task']['sources'].require_type('task.sources', 3)
    config.task.sources = {'a': {'weight': 1.0}}
    config.loss.objective = 'sft'
    refused(config, "task.sources and loss.objective='sft': given answers come from one task")


def test_fields_of_code_hold_for_the_sources_that_run_code():
    config = mixed(b={'weight': 1.0, 'name': 'code'})
    config.task.packages, config.task.show_tests = ('numpy', 'scipy'), True
    validate(config)
    config.task.sources.b.name = 'token_reversal'
    validate(config)  # nothing reads them, which a run reports


def test_an_own_scorer_and_code_are_not_confined_together():
    config = mixed(a={'weight': 1.0, 'name': 'my.py:build'}, b={'weight': 1.0, 'name': 'code'})
    validate(config)
    config.task.sandbox = 'landlock'
    refused(config, "task.sandbox='landlock' with task.sources.a and task.sources.b: a worker that is confined")


def test_the_command_line_sets_fields_of_the_sources_of_the_file(parse):
    command = parse(
        '--config.task.sources.sums.weight=3', '--config.task.sources.lines.columns.answer=solution',
        '--config.task.sources.lines.held_out_fraction=1', '--config.task.sources.sums.datasets=a,b',
        '--config.task.sources.lines.partial_credit=true', '--config.task.sources.sums.symbols', '5',
    )  # fmt: skip
    sources = command.config.task.sources
    assert (sources.sums.weight, type(sources.sums.weight), sources.sums.symbols) == (3.0, float, 5)
    assert sources.lines.columns.to_dict() == {'question': 'problem', 'answer': 'solution'}
    assert (sources.lines.held_out_fraction, sources.sums.datasets, sources.lines.partial_credit) == (
        1.0,
        ('a', 'b'),
        True,
    )
    assert command.overrides[0] == 'task.sources.sums.weight'


@pytest.mark.parametrize(
    ('setting', 'words'),
    [
        ('sumz.weight=1', "task.sources has no source 'sumz'; did you mean sums?; it has lines, sums"),
        ('sums=1', 'sums is a source; set one of its fields, --config.task.sources.sums.weight=VALUE'),
        ('sums.weight=x', '--config.task.sources.sums.weight=x must be a number'),
        ('sums.weihgt=1', "task.sources.sums.weihgt='1': a source has no such field; did you mean weight?"),
        ('sums.show_tests=2', '--config.task.sources.sums.show_tests=2 must be True or False'),
    ],
)
def test_a_wrong_setting_is_one_sentence(parse, setting, words):
    with pytest.raises(UserError) as error:
        parse(f'--config.task.sources.{setting}')
    assert words in str(error.value), str(error.value)


def test_a_saved_config_has_the_same_sources(parse, monkeypatch):
    config = parse().config
    saved = json.loads(json.dumps(TrackedConfig(config).as_dict()))
    restored = restore_config(saved, 'config.json')
    assert restored.task.sources.to_dict() == config.task.sources.to_dict()
    assert list(data_files(saved)) == ['task.sources.lines.path']
    saved['task']['path'] = 'common.jsonl'  # read by the source sums, if it reads a file at all
    assert sorted(data_files(saved)) == ['task.path', 'task.sources.lines.path']
    saved['task']['sources']['sums']['path'] = 'b.jsonl'  # then nothing reads the common one
    assert sorted(data_files(saved)) == ['task.sources.lines.path', 'task.sources.sums.path']
    monkeypatch.setattr(records, 'locate_dataset', lambda field, name: [pathlib.Path(f'{field} of {name}')])
    saved['task']['sources']['sums']['path'] = 'hf:org/sums'
    assert data_files(saved)['task.sources.sums.path'] == [pathlib.Path('task.sources.sums.path of hf:org/sums')]
    saved['task']['sources'] = {}
    assert list(data_files(saved)) == ['task.path']


def test_a_field_that_no_task_reads_is_found(parse):
    tracked = TrackedConfig(parse('--config.task.sources.sums.symbols=5').config, ('task.sources.sums.symbols',))
    tasks = tracked.list_tasks()
    assert [(task.name, task.weight) for task in tasks.values()] == [('jsonl', 0.5), ('running_sums', 1.0)]
    assert (tasks['lines'].path, tasks['sums'].length, dict(tasks['lines'].columns)) == (
        'a.jsonl', 3, {'question': 'problem'}
    )  # fmt: skip
    unread = [path for path, _ in tracked.unread() if path.startswith('task.')]
    assert unread == ['task.columns.question', 'task.sources.sums.symbols', 'task.system_prompt']
    with pytest.raises(ConfigError, match=r'set but never read: task\.sources\.sums\.symbols=5\.'):
        tracked.require_all_read()


def test_a_sweep_may_set_a_field_of_a_source():
    _require_field('task.sources.sums.weight', 2.0)
    with pytest.raises(ConfigError, match=r"task\.sources\.sums\.weight='x' must be a number"):
        _require_field('task.sources.sums.weight', 'x')
