"""A path with a scheme is refused by every command before anything is made: gs://bucket/run is no directory here."""

import pathlib
import re
import time

import pytest

import areal_jax
from areal_jax.app.evaluate.evaluation_config import choose_source
from areal_jax.commands.command import PATHS, find_commands, list_flags
from areal_jax.config import default_config, require_local_fields, validate
from areal_jax.config.declarations import FIELDS
from areal_jax.config.fields import Address, ChoiceOrOwn, ConfigError, Path, Text
from areal_jax.errors import UserError
from areal_jax.files import describe_url, require_local

COMMANDS = {command.program: command for command in find_commands()}
OF_MIRRORS = {('areal-eval', '--model'), ('areal-serve', '--model'), ('areal-export', '--workdir')}
WITHOUT_PATHS = {'areal-config', 'python -m areal_jax completion'}
URLS = ('gs://bucket/a', 's3://bucket/a', 'hf://owner/name', 'file:///tmp/a', 'memory+x.y-z://a', 'GS://bucket/a')
NEEDED = {  # what a command line must have before the flag that is tried
    'areal-plan': ['--cluster=1 x H800', '--answers=8'], 'areal-export': [], 'areal-replay': [], 'areal-report': [],
}  # fmt: skip


def find_paths(command):
    """The flags and arguments of a command that take a path, by the words that its usage has for them."""
    usage = ' '.join(command.usage)
    return [
        flag
        for flag in list_flags(command)
        if set(re.split(r'[|\[\]=,: ]+', flag.metavar)) & set(PATHS) or (flag.name in PATHS and flag.name in usage)
    ]


def words_of(command, flag, value):
    """A command line with one path in it."""
    if flag.name in PATHS:
        return [value]
    given = f'{flag.name}={value}' if not flag.is_repeated else None
    words = [*NEEDED.get(command.program, ()), *([given] if given else [flag.name, value, value])]
    if flag.name == '--config' or not any(one.name == '--config' for one in list_flags(command)):
        return words
    return ['--config=configs/tiny_cpu.py', *words]


def call(command, words):
    """Runs the main of a command, which raises UserError or ends with exit code 2."""
    module = __import__(command.flags.__module__, fromlist=['main'])
    takes_argv = any(one.name == '--config' for one in list_flags(command))
    arguments = ([command.program, *words],) if takes_argv else (words,)
    if takes_argv and command.flags.__module__.startswith('areal_jax.main_'):
        arguments = (*arguments, None)
    return module.main(*arguments)


CASES = [(name, flag.name) for name, command in COMMANDS.items() for flag in find_paths(command)]


def test_all_commands_but_two_take_a_path():
    assert set(COMMANDS) - {name for name, _ in CASES} == WITHOUT_PATHS
    assert len(COMMANDS) >= 19
    assert {('areal-train', '--workdir'), ('areal-serve', '--model'), ('areal-plan', '--lengths')} <= set(CASES)
    assert {('areal-simulate', '--calibrate'), ('areal-replay', '--data'), ('areal-runs', 'DIR')} <= set(CASES)


@pytest.mark.parametrize(('program', 'name'), CASES)
def test_a_flag_with_a_url_is_refused_and_makes_nothing(program, name, tmp_path, monkeypatch, capsys):
    (tmp_path / 'configs').symlink_to(pathlib.Path('configs').absolute())
    monkeypatch.chdir(tmp_path)
    command = COMMANDS[program]
    flag = next(flag for flag in find_paths(command) if flag.name == name)
    url = 'az://bucket/a' if (program, name) in OF_MIRRORS else 'gs://bucket/a'
    value = f'task.path={url}' if '=' in flag.metavar else url
    begun = time.monotonic()
    with pytest.raises((UserError, SystemExit)) as refused:
        call(command, words_of(command, flag, value))
    assert time.monotonic() - begun < 1
    said = capsys.readouterr().err if isinstance(refused.value, SystemExit) else str(refused.value)
    assert f'{name}={value} is a URL, and a run needs a directory' in said, said
    if isinstance(refused.value, SystemExit):
        assert refused.value.code == 2
    assert [path.name for path in tmp_path.iterdir()] == ['configs']


PATH_FIELDS = [path for path, field in FIELDS.items() if isinstance(field, Path | ChoiceOrOwn)]


def test_the_fields_with_paths_are_all_there():
    # every text whose meaning speaks of a file, a directory or a run
    words = re.compile(r'\b(FILE|file|files|directory|workdir|RUN)\b')
    named = {path for path, field in FIELDS.items() if isinstance(field, Text) and words.search(field.meaning)}
    assert named - set(PATH_FIELDS) == set()
    assert {'task.path', 'model.path', 'run.compilation_cache', 'staleness.schedule', 'loss.teacher'} <= set(
        PATH_FIELDS
    )
    assert len(PATH_FIELDS) > 25


@pytest.mark.parametrize('path', PATH_FIELDS)
def test_a_field_with_a_url_is_refused(path):
    config = default_config()
    section, name = path.split('.')
    url = 'az://bucket/a' if isinstance(FIELDS[path], Address) else 'gs://bucket/a'
    for value in (url, 'log(s3://bucket/a)', 'hf://owner/name/task.py:build'):
        config[section][name] = value
        for check in (require_local_fields, validate):
            with pytest.raises(ConfigError, match=re.escape(f'{path}={value!r} is a URL, and a run needs a directory')):
                check(config)


@pytest.mark.parametrize('url', URLS)
def test_every_scheme_is_one(url):
    for value in (url, f' {url}', f'a,{url}', f'task.path={url}', f'plan({url})'):
        assert describe_url(value).startswith('is a URL')
    with pytest.raises(UserError, match=r'^--out='):
        require_local('--out', url)


@pytest.mark.parametrize(
    'path', ['runs/a', '/runs/gs:/a', 'C:/runs', 'a.py:build', 'package:a/b.gguf', 'a//b', '', 'x:y']
)
def test_paths_of_this_machine_are_none(path):
    assert describe_url(path) == ''


def test_the_fix_is_that_of_the_scheme():
    assert 'gcsfuse' in describe_url('gs://a')
    assert 'hf download' in describe_url('hf://a/b')
    assert 'without file://' in describe_url('file:///a')


def test_addresses_of_servers_stay_addresses():
    config = default_config()
    config.rollout.urls = ('own+http://host:8000',)
    config.agent.mcp_servers = ('http://host:8000/mcp',)
    config.task.system_prompt = 'https://example.org is a page.'
    require_local_fields(config)


def test_the_library_refuses_urls_as_the_commands_do(tmp_path):
    for call, named in (
        (lambda: areal_jax.train('tiny_cpu', 'gs://bucket/a'), '--workdir'),
        (lambda: areal_jax.train('gs://bucket/a', tmp_path / 'run'), 'config'),
        (lambda: areal_jax.evaluate('tiny_cpu', 'gs://bucket/a'), '--workdir'),
        (lambda: areal_jax.export(tmp_path, 'gs://bucket/a'), 'out'),
    ):
        with pytest.raises(UserError, match=f'^{named}=gs://bucket/a is a URL'):
            call()
    for call, named in (
        (lambda: areal_jax.export('az://bucket/a', tmp_path / 'out'), 'workdir'),
        (lambda: choose_source('az://bucket/a'), '--model'),
    ):
        with pytest.raises(UserError, match=f'^{named}=az://bucket/a is a URL'):
            call()
    assert list(tmp_path.iterdir()) == []
