"""Every command has one form of help, quick and without jax; test_shown_commands.py parses its examples."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from areal_jax import __main__ as program
from areal_jax.commands.command import (
    Command,
    Parser,
    answer,
    describe_version,
    find_commands,
    list_examples,
    list_flags,
    list_words,
    render_help,
)
from areal_jax.config.declarations import FIELDS
from areal_jax.errors import ExitCode

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = dict(re.findall(r"'(areal-[\w-]+)=([\w.]+):\w+'", (ROOT / 'setup.py').read_text()))
COMMANDS = {command.program: command for command in find_commands()}
each_command = pytest.mark.parametrize('command', COMMANDS.values(), ids=list(COMMANDS))


def test_every_script_has_a_declaration():
    assert {name for name in COMMANDS if name.startswith('areal-')} == set(SCRIPTS)
    assert set(SCRIPTS.values()) == set(list_words().values()) - {'areal_jax.commands.completion'}


@each_command
def test_the_form_of_a_command(command):
    assert re.fullmatch(r'[A-Z][^\n]*\.', command.purpose)
    assert '. ' not in command.purpose, 'a purpose is one sentence'
    assert len(list_examples(command)) >= 2
    assert all(purpose and command.program in line for purpose, line in list_examples(command))
    assert {ExitCode.FINISHED, ExitCode.BUG, ExitCode.USER_ERROR, ExitCode.STOPPED} <= set(command.exits)
    flags = list_flags(command)
    assert flags
    for flag in flags:
        assert re.fullmatch(r'\S.*\.', flag.meaning), f'{flag.name}: {flag.meaning!r} is no sentence'
    known = {flag.name for flag in flags} | {flag.name.replace('--', '--no-', 1) for flag in flags}
    used = set(re.findall(r'--[\w.-]+', ' '.join(command.usage)))
    assert used <= known, 'the usage names a flag that the command does not have'
    if any(flag.name == '--config' for flag in flags):
        assert 10 <= len(command.fields) <= 15
        assert set(command.fields) <= set(FIELDS)


@each_command
@pytest.mark.parametrize('width', [80, 130])
def test_the_help_has_every_part_and_keeps_the_width(command, width):
    shown = render_help(command, width)
    heads = [line for line in shown.splitlines() if re.fullmatch(r'[A-Z][^.]*:', line)]
    parts = ['Usage:', 'Flags:', 'Examples, in a clone of the repository:', 'Exit codes:']
    assert [head for head in heads if head in parts] == parts
    assert ' '.join(shown.split()).startswith(command.purpose)
    for flag in list_flags(command):
        assert flag.form in shown
        assert not flag.default or f'Default: {flag.default}.' in ' '.join(shown.split()) or flag.required
    long = [line for line in shown.splitlines() if len(line) > width]
    assert [line for line in long if ' ' in line.strip()] == []
    if command.fields:
        assert all(f'{name}={FIELDS[name].default or ""}' in shown or f'{name}=' in shown for name in command.fields)


@pytest.mark.parametrize('words', [['--help'], ['-h'], ['--workdir=w', '--help'], ['--version']])
def test_a_question_is_answered_and_ends_the_process(words, capsys):
    with pytest.raises(SystemExit) as ended:
        answer(COMMANDS['areal-train'], words)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.strip() == (describe_version() if words == ['--version'] else render_help(COMMANDS['areal-train']))


def test_words_after_two_dashes_are_no_questions(capsys):
    answer(COMMANDS['areal-check-log'], ['--', '--help'])
    assert capsys.readouterr().out == ''


def test_the_version_names_what_decides_a_run():
    assert re.fullmatch(
        r'areal_jax \d+\.\d+\.\d+( \(commit [0-9a-f]{12}(-dirty)?\))?, jax \d[\w.]*, python \d+\.\d+\.\S+',
        describe_version(),
    )


def ask(*words: str) -> tuple[str, str]:
    """(what a command says, which of jax and numpy it has imported)."""
    spy = 'import atexit, sys; atexit.register(lambda: print({"jax", "numpy"} & set(sys.modules), file=sys.stderr))'
    run = f'{spy}\nimport runpy\nsys.argv = {list(words)!r}\nrunpy.run_module({words[0]!r}, run_name="__main__")'
    done = subprocess.run([sys.executable, '-c', run], capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout, done.stderr.strip()


@pytest.mark.parametrize('module', list(SCRIPTS.values()))
def test_help_is_quick_and_imports_neither_jax_nor_numpy(module):
    shown, imported = ask(module, '--help')
    assert 'Exit codes:' in shown
    assert imported == 'set()'


def test_version_is_quick_too():
    shown, imported = ask('areal_jax.main_train', '--version')
    assert shown == describe_version() + '\n'
    assert imported == 'set()'


def run_program(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, 'COLUMNS': '80'}
    command = [sys.executable, '-m', 'areal_jax', *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment)


def test_the_package_lists_its_commands_and_runs_one():
    listed = program.render_list(80)
    assert [name for name in COMMANDS if f'  {name}' not in listed] == []
    assert all(' '.join(command.purpose.split()[:3]) in listed for command in COMMANDS.values())
    assert run_program('train', '--help').stdout == render_help(COMMANDS['areal-train']) + '\n'
    assert run_program('help', 'check_log').stdout == render_help(COMMANDS['areal-check-log']) + '\n'
    refused = run_program('train', '--workdir=w')
    assert (refused.returncode, refused.stderr.startswith('error: --config is missing')) == (2, True)


@pytest.mark.parametrize(
    ('word', 'said'),
    [
        ('trian', "error: there is no command 'trian'; did you mean train?\n"),
        ('q', "error: there is no command 'q'; python -m areal_jax lists them all\n"),
    ],
)
def test_an_unknown_command_is_one_sentence(word, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['areal_jax', word])
    assert program.end_command(program.main, doing='') == ExitCode.USER_ERROR
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ('words', 'said'),
    [
        ([], 'error: the following arguments are required: --out; see areal-x --help\n'),
        (['--out=a', '--otu=b'], 'error: --otu is not a flag; did you mean --out?; see areal-x --help\n'),
        (['--out=a', '--zzz'], 'error: --zzz is not a flag; see areal-x --help\n'),
        (['--out=a', 'b'], 'error: unrecognized arguments: b; see areal-x --help\n'),
    ],
)
def test_a_wrong_word_is_one_sentence_without_the_usage(words, said, capsys):
    parser = Parser('areal-x')
    parser.add_argument('--out', required=True)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == ExitCode.USER_ERROR
    assert capsys.readouterr().err == said


def test_what_is_required_follows_from_the_usage():
    def build() -> Parser:
        parser = Parser('areal-x')
        for name in ('--a', '--b', '--c'):
            parser.add_argument(name, help='X.')
        return parser

    command = Command('areal-x', 'X.', ('--a=DIR --b=FILE [--c=N]', '--a=DIR [--c=N]'), build, ())
    flags = {flag.name: flag for flag in list_flags(command)}
    assert [name for name, flag in flags.items() if flag.required] == ['--a']
    assert [(flag.form, flag.kind) for flag in flags.values()] == [
        ('--a=DIR', 'directory'), ('--b=FILE', 'file'), ('--c=N', 'text'),
    ]  # fmt: skip
