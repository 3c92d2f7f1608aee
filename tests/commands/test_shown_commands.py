"""Every command that help, README or a page shows is taken by that command's own parser."""

import argparse
import functools
import pathlib
import re
import shlex

import pytest

from areal_jax.app.command_line import find_config_file, parse_command, parse_flags
from areal_jax.app.evaluate.evaluation_config import adapt_config
from areal_jax.commands.command import find_commands, list_examples, list_flags
from areal_jax.config import validate, validate_scoring
from areal_jax.config.declarations import FIELDS, FREE
from areal_jax.errors import UserError
from tests.test_docs import PAGES

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = {command.program: command for command in find_commands()}
BY_MODULE = {command.flags.__module__: command for command in COMMANDS.values()}
BLOCK = re.compile(r'^ *```([^`\n]*)\n(.*?)^ *```|((?:^    \S[^\n]*\n)+)', re.DOTALL | re.MULTILINE)
USERS = 'configs/tiny_cpu.py'  # stands in for a config file of the reader's own


def split_line(line):
    """The commands of a shell line, each a list of words without its variables; [] for a line that is no shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=';&|<>()')
    lexer.whitespace_split, lexer.commenters = True, '#'
    try:
        words = list(lexer)
    except ValueError:
        return []
    found = [[]]
    for word in words:
        if set(word) <= set(';&|<>()'):
            found.append([])
        else:
            found[-1].append(word)
    variable = re.compile(r'[A-Z_]+=.*|do|time|export')
    return [cut for part in found if (cut := [w for i, w in enumerate(part) if not is_before(part, i, variable)])]


def is_before(words, place, variable):
    """Whether a word is a variable or a keyword of the shell that stands before the command."""
    return all(variable.fullmatch(word) for word in words[: place + 1])


def find_command(words):
    """(command, its words) of a line that starts a command of this project; None for any other."""
    first = words[0].rpartition('/')[2]
    if first in COMMANDS:
        return COMMANDS[first], words[1:]
    if re.fullmatch(r'python[\d.]*', first) and words[1:2] == ['-m']:
        module = words[2].removeprefix('areal_jax.') if '.launch.' in words[2] else words[2]
        named = f'python -m {module}'
        if named in COMMANDS:
            return COMMANDS[named], words[3:]
        if f'{named} {" ".join(words[3:4])}' in COMMANDS:
            return COMMANDS[f'{named} {words[3]}'], words[4:]
        if module in BY_MODULE:
            return BY_MODULE[module], words[3:]
        assert not module.startswith(('areal_jax.main_', 'launch.')) or (ROOT / module.replace('.', '/')).is_dir(), (
            module
        )
    return None


def list_words(text):
    """The commands in the blocks of a page, of any program; a form of the usage, with brackets, is no command."""
    lines = [re.sub(r'\$\w+', '1', line) for line in list_lines(text)]  # the variable of a loop
    return [words for line in lines if not re.search(r'(^| )\[', line) for words in split_line(line)]


def list_lines(text):
    """The lines of a page for a shell: of blocks that are no code, after '$ ' in those with output."""
    lines = []
    for kind, fenced, indented in BLOCK.findall(text):
        block = re.sub(r'\\\n\s*', ' ', fenced or indented).splitlines()
        if kind == 'console':
            lines += [line.removeprefix('$ ') for line in block if line.startswith('$ ')]
        elif kind in ('', 'bash', 'text'):
            lines += [line.strip() for line in block]
    return lines


def list_shown(text):
    """The commands of this project in the blocks of a page."""
    found = [command for words in list_words(text) if (command := find_command(words))]
    return [(command, words) for command, words in found if '...' not in words]


def parse(command, words):
    """Raises what the command's own parser raises."""
    parser = command.flags()
    if 'completion' in command.program:
        assert words[0] in ('bash', 'zsh', 'fish', 'SHELL')
    elif isinstance(parser, argparse.ArgumentParser):
        parser.parse_args(words)
    elif command.program == 'areal-simulate' and words[0].startswith('--calibrate'):
        parse_flags([command.program, *words], parser)  # a form without a config
    else:
        parse_with_config(command, words, parser)


def parse_with_config(command, words, parser):
    given = next(word.removeprefix('--config=') for word in words if word.startswith('--config='))
    is_own = not find_config_file(given).path.is_file()
    if is_own:
        assert re.search(r'FILE|MY_|my_|mine|\.\.\.', given), f'{given} is no config of the project'
        words = [f'--config={USERS}' if word == f'--config={given}' else word for word in words]
    parsed = parse_command([command.program, *words], parser)
    if command.program == 'areal-eval':
        adapt_config(parsed.config, None, parsed.overrides)
    elif command.program == 'areal-score':
        validate_scoring(parsed.config)
    elif not is_own and command.program != 'areal-serve':
        validate(parsed.config)


EXAMPLES = [(command, line) for command in COMMANDS.values() for _, line in list_examples(command)]


@pytest.mark.parametrize(('command', 'line'), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_of_the_help_parses(command, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    [(found, words)] = [shown for words in split_line(line) if (shown := find_command(words))][:1]
    assert found is command
    parse(command, words)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command, words in list_shown(page.read_text()):
        try:
            parse(command, words)
        except (UserError, SystemExit, StopIteration) as error:
            pytest.fail(f'{command.program} {shlex.join(words)}: {error or type(error).__name__}')


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_scripts_of_a_page_exist_and_know_their_options(page):
    for words in list_words(page.read_text()):
        if words[0] == 'bash' and words[1:] and words[1].endswith('.sh'):
            script = (ROOT / words[1]).read_text()
            options = [word.partition('=')[0] for word in words[2:] if word.startswith('--')]
            # test_gpu.sh gives its options to benchmarks/gpu.py
            known = script + (ROOT / 'benchmarks' / 'gpu.py').read_text() if 'benchmarks.gpu' in script else script
            assert [option for option in options if option not in known] == [], shlex.join(words)


@functools.cache
def flag_names(program):
    names = {flag.name for flag in list_flags(COMMANDS[program])} | {'--help', '--version'}
    return (
        names | {name.replace('--', '--no', 1) for name in names} | {name.replace('--', '--no-', 1) for name in names}
    )


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_flags_of_a_command_in_a_sentence_exist(page):
    """A sentence may name a command with one of its flags alone, which no parser would take."""
    prose = BLOCK.sub('', page.read_text())
    for span in re.findall(r'(?<!`)`([^`\n]+)`(?!`)', prose):
        for words in split_line(span):
            if shown := find_command(words):
                command, rest = shown
                given = {word.partition('=')[0] for word in rest if word.startswith('--')}
                unknown = {name for name in given - flag_names(command.program) if not is_field(name)}
                assert unknown == set(), span


def is_field(name):
    path = name.removeprefix('--config.')
    return name.startswith('--config.') and (path in FIELDS or path.rpartition('.')[0] in FREE)


def test_the_number_of_commands_that_are_parsed():
    """So that a change of the pages' form does not leave them unread."""
    by_page = {page.name: len(list_shown(page.read_text())) for page in PAGES}
    assert by_page['README.md'] >= 4
    assert by_page['commands.md'] >= len(COMMANDS)
    assert sum(by_page.values()) >= 150


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        ('```bash\nareal-train --config=a.py \\\n    --workdir=b   # why\n```\n', [('areal-train', 2)]),
        (
            '```\nA=1 areal-runs runs && python -m launch.local --config=a.py --workdir=b > log\n```\n',
            [('areal-runs', 1), ('python -m launch.local', 2)],
        ),
        ('so:\n\n    python -m areal_jax.main_report --workdir=runs/a\n\nand `areal-train`\n', [('areal-report', 1)]),
        ('```bash\nfor n in 0 1; do\n  areal-train --config=a.py --workdir=r/$n\ndone\n```\n', [('areal-train', 2)]),
        ('```text\nareal-plan --answers=N [--seed=N]\nls runs\n```\n', []),
        ('```console\n$ areal-runs runs\nareal-runs prints\n```\n', [('areal-runs', 1)]),
        ('```python my_task.py\na\n```\nareal-runs b\n   ```bash\n   areal-runs c\n   ```\n', [('areal-runs', 1)]),
    ],
)
def test_what_is_a_command_of_a_page(text, found):
    assert [(command.program, len(words)) for command, words in list_shown(text)] == found


@pytest.mark.parametrize(
    'line',
    [
        'areal-train --config=configs/tiny_cpu.py --workdir=a --config.run.stepz=2',
        'areal-train --config=configs/tiny_cpu.py --workdir=a --resum',
        'areal-plan --cluster="1 x H100" --answers=8 --model=Qwen3-8B --sizes="constant(9)"',
        'python -m launch.slurm --config=configs/tiny_cpu.py --workdir=a --gpus_per_nod=8',
    ],
)
def test_a_wrong_command_is_seen(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    [(command, words)] = list_shown(f'```bash\n{line}\n```\n')
    with pytest.raises((UserError, SystemExit)):
        parse(command, words)
