"""The declaration of a command, the source of its help, of docs/commands.md and of the completion in shells.

A main_*.py has one `COMMAND`, calls `answer(COMMAND, argv)` first, and parses with the flags that `COMMAND` names.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import pathlib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from areal_jax.app.process.ending import RESUME, Interrupts, ProcessEnd, end_command
from areal_jax.errors import ExitCode, UserError
from areal_jax.files import describe_url, is_address
from areal_jax.installation import __version__

if TYPE_CHECKING:
    from absl import flags


PATHS = {'FILE': 'file', 'FILE.py': 'file', 'DIR': 'directory', 'RUN': 'directory', 'PATH': 'file'}  # by metavar
FIELDS_OF_TRAINING = (
    'run.steps', 'model.source', 'model.path', 'task.name', 'task.path', 'rollout.slots', 'rollout.group_size',
    'rollout.max_new_tokens', 'rollout.temperature', 'staleness.eta', 'learner.groups_per_update',
    'optimizer.learning_rate', 'loss.kl_coefficient', 'checkpoint.every', 'evaluation.problems',
)  # fmt: skip
FIELDS_OF_ROLES = (
    'cluster.learner', 'cluster.engines', 'cluster.strategy', 'rollout.server', 'publication.channel',
    'run.export_every', 'run.steps', 'model.source', 'model.path', 'task.name', 'task.path', 'staleness.eta',
    'learner.groups_per_update', 'checkpoint.every', 'evaluation.problems',
)  # fmt: skip
ROLES_OF_TINY = (  # flags of an example: the smallest run in roles
    '--config=configs/tiny_cpu.py --config.cluster.learner="hosts=1 x data=1" --config.rollout.server=own '
    '--config.publication.channel=files'
)
EXITS: Mapping[ExitCode, str] = {
    ExitCode.FINISHED: 'finished',
    ExitCode.BUG: 'a bug, with a traceback',
    ExitCode.USER_ERROR: 'an error that you can mend, in one sentence; also a check or a replay that failed',
    ExitCode.STOPPED: 'stopped by a signal',
}
EXITS_OF_TRAINING: Mapping[ExitCode, str] = {
    **EXITS,
    ExitCode.NOTHING_TRAINED: 'no optimizer step was made since update 0, resumed runs included',
    ExitCode.STOPPED: 'stopped by a signal or by a lost process: the same command with --resume goes on',
}
_METAVARS = {'integer': 'N', 'float': 'NUMBER', 'int': 'N', 'str': 'TEXT'}


@dataclasses.dataclass(frozen=True)
class Command:
    """The declaration of a command: purpose, usage, flags, examples.

    Args:
      program: 'areal-train', or 'python -m launch.local'.
      purpose: one sentence, shown in the list of commands.
      usage: one entry per form of the command, without the program; a flag outside brackets is required, and the text
        after its equals sign is its metavar.
      flags: makes the parser; a command with absl flags also takes --config.
      examples: lines for a shell in a clone, a comment with the purpose before each command.
      fields: the config fields that users of this command set most.
      choices: the values of a flag whose parser does not list them.
      exits: the meaning of each exit code.
      notes: further facts that a user must know before the first run.
    """

    program: str
    purpose: str
    usage: tuple[str, ...]
    flags: Callable[[], flags.FlagValues | argparse.ArgumentParser]
    examples: str
    fields: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    exits: Mapping[ExitCode, str] = dataclasses.field(default_factory=lambda: EXITS)
    notes: str = ''

    @property
    def word(self) -> str:
        """The name under `python -m areal_jax`, 'train' for areal-train; '' for a program without one."""
        return self.program.removeprefix('areal-') if self.program.startswith('areal-') else ''


def list_examples(command: Command) -> list[tuple[str, str]]:
    """Returns (purpose, line) of each example; a line has all words, the program first."""
    lines = [' '.join(line.split()) for line in command.examples.strip().splitlines()]
    return [(purpose.removeprefix('# '), line) for purpose, line in zip(lines[::2], lines[1::2], strict=True)]


def local_path(text: str) -> str:
    """The type of Parser arguments that are or contain a path (FIELD=PATH); raises ArgumentTypeError for a URL."""
    if reason := describe_url(text):
        raise argparse.ArgumentTypeError(f'={text} {reason}')
    return text


def run_path(text: str) -> str:
    """The type of Parser arguments that name a run: a path, or the address of its mirror."""
    return text if is_address(text) else local_path(text)


class Parser(argparse.ArgumentParser):
    """An argparse parser for a command without a config; its errors are one sentence."""

    def __init__(self, program: str):
        super().__init__(prog=program, add_help=False)

    def error(self, message: str) -> NoReturn:
        from areal_jax.errors import suggest

        if unknown := re.match('unrecognized arguments: (--[^ =]+)', message):
            known = [option for action in self._actions for option in action.option_strings]
            message = f'{unknown[1]} is not a flag{suggest(unknown[1], known)}'
        message = re.sub('^argument ([^ :]+): =', r'\1=', message)
        print(f'error: {message}; see {self.prog} --help', file=sys.stderr)
        raise SystemExit(ExitCode.USER_ERROR)


def parse(command: Command, words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the words after the program, None = of this process, with argparse; answers --help and --version."""
    words = sys.argv[1:] if words is None else words
    answer(command, words)
    parser = command.flags()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser.parse_intermixed_args(words)


def run_command(main: Callable[[Sequence[str], Interrupts], int], doing: str, again: str = RESUME) -> NoReturn:
    """Runs a command that a signal may stop, and ends the process with its exit code; for the arguments: end_command.

    `main` imports what is slow, jax above all, after the signal handlers are set and the command line is parsed.
    """
    end = ProcessEnd()
    with Interrupts(again) as interrupts:
        sys.exit(end.note(end_command(lambda: main(sys.argv, interrupts), doing, again)))


def require_place(option: str, path: pathlib.Path) -> None:
    """Raises UserError for a file that cannot be made: its path is a directory, or in none."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f'{option}={path} is a directory, or in none; name a file in a directory that exists')


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag or argument of a command, as displayed."""

    name: str  # '--workdir', or 'FILE' for an argument
    metavar: str  # of its value; '' for a flag without one
    meaning: str
    default: str  # '' = none
    required: bool = False
    choices: tuple[str, ...] = ()
    is_repeated: bool = False

    @property
    def form(self) -> str:
        """'--workdir=DIR'; '--compare RUN RUN ...' for a flag that takes several words."""
        if not self.metavar:
            return self.name
        return f'{self.name} {self.metavar} ...' if self.is_repeated else f'{self.name}={self.metavar}'

    @property
    def kind(self) -> str:
        """The kind of its value, for completion: 'choice', 'file', 'directory', 'text'; '' without a value."""
        if self.choices:
            return 'choice'
        return PATHS.get(re.split(r'[|\[]', self.metavar)[0], 'text') if self.metavar else ''


def list_flags(command: Command) -> list[Flag]:
    """The flags of a command in the order of their definition, --config and its fields first."""
    parser = command.flags()
    if isinstance(parser, argparse.ArgumentParser):
        return [_of_action(action, command) for action in parser._actions]  # argparse has no public list
    return [*_config_flags(command), *(_of_flag(parser[name], command) for name in parser)]


def _config_flags(command: Command) -> list[Flag]:
    source = 'Experiment file, for example configs/tiny_cpu.py; ARGUMENT goes to its get_config().'
    return [
        Flag('--config', 'FILE[:ARGUMENT]', source, '', _is_required(command, '--config')),
        Flag('--config.SECTION.FIELD', 'VALUE', 'Sets a field of the config; may be given for many fields.', ''),
    ]


def _of_flag(flag: flags.Flag, command: Command) -> Flag:
    name = f'--{flag.name}'
    kind = flag.flag_type()
    metavar = '' if kind == 'bool' else _find_metavar(command, name) or _METAVARS.get(kind, 'TEXT')
    choices = command.choices.get(flag.name, ())
    meaning = (flag.help or '').partition(';\n    repeat this option')[0]  # absl adds this to list flags
    return Flag(name, metavar, meaning, _show(flag.default), _is_required(command, name), choices)


def _of_action(action: argparse.Action, command: Command) -> Flag:
    meaning = (action.help or '').replace('%(default)s', str(action.default))
    choices = tuple(map(str, action.choices or ())) or command.choices.get(action.dest, ())
    if not action.option_strings:
        return Flag(
            str(action.metavar or action.dest), '', meaning, _show(action.default), action.nargs != '?', choices
        )
    name = next(option for option in action.option_strings if option.startswith('--'))
    takes_value = action.nargs != 0
    kind = getattr(action.type, '__name__', 'str')
    metavar = _find_metavar(command, name) or str(action.metavar or _METAVARS.get(kind, 'TEXT'))
    return Flag(
        name,
        metavar if takes_value else '',
        meaning,
        _show(action.default),
        _is_required(command, name),
        choices,
        action.nargs == '+',
    )


def _find_metavar(command: Command, name: str) -> str:
    """The flag's metavar in the usage, 'DIR' for --workdir=DIR; '' if the usage lacks the flag."""
    found = re.search(rf'(?<!\S)\[*{re.escape(name)}[= ]([^\s\]-][^\s\]]*)', ' '.join(command.usage))
    return found[1] if found else ''


def _is_required(command: Command, name: str) -> bool:
    """Whether every form of the usage has the flag, outside brackets."""
    forms = [re.sub(r'\[[^\[\]]*\]', '', re.sub(r'\[(:[^\]]*)\]', r'\1', form)) for form in command.usage]
    return all(re.search(rf'(?<!\S){re.escape(name)}(?=[=\s]|$)', form) for form in forms)


def _show(default: object) -> str:
    """Formats a default as on the command line; '' = no default."""
    if isinstance(default, bool):
        return 'on' if default else 'off'
    if default == sys.executable:
        return 'that of this command'
    if default is None or default in ('', [], ()):
        return ''
    return (
        ', '.join(map(str, default)) if isinstance(default, Sequence) and not isinstance(default, str) else str(default)
    )


# All commands: one in every main_*.py of the package; launch/ has the commands that start runs in several processes.


_LAUNCHERS = ('local', 'slurm', 'ray.main', 'jobset')


def list_words() -> dict[str, str]:
    """{'train': 'areal_jax.main_train', ...}, without importing a module."""
    files = sorted(pathlib.Path(__file__).parents[1].glob('main_*.py'))
    words = {file.stem.removeprefix('main_').replace('_', '-'): f'areal_jax.{file.stem}' for file in files}
    return {**words, 'completion': 'areal_jax.commands.completion'}


def find_commands() -> list[Command]:
    """The declarations of all commands, this package's first; does not import jax."""
    return [_read(module) for module in (*list_words().values(), *list_launchers())]


def list_launchers() -> tuple[str, ...]:
    """Modules of launch/, in the installed package or in the current directory if it is a clone; else ()."""
    packages = (name for name in ('areal_jax.launch', 'launch') if importlib.util.find_spec(name))
    package = next(packages, '')
    return tuple(f'{package}.{name}' for name in _LAUNCHERS) if package else ()


def _read(module: str) -> Command:
    command = importlib.import_module(module).COMMAND
    assert isinstance(command, Command)
    return command


# --help and --version of every command, in one form and without importing jax.


WIDTH = 80  # columns without a terminal
_HELP = ('--help', '-help', '-h', '-?', '--helpfull', '--helpshort')
_NARROW, _INDENT, _MOST_TERM = 40, 2, 30
_DIGITS = 12  # of a commit


def answer(command: Command, words: Sequence[str]) -> None:
    """Prints the help or the version if the words after the program ask for it, and then ends the process."""
    words = words[: words.index('--')] if '--' in words else words
    if any(word in _HELP for word in words):
        print(render_help(command, find_width()))
    elif '--version' in words:
        print(describe_version())
    else:
        return
    raise SystemExit(ExitCode.FINISHED)


def find_width() -> int:
    """The width of the terminal in columns, at least _NARROW."""
    return max(_NARROW, shutil.get_terminal_size((WIDTH, 24)).columns)


def describe_version() -> str:
    """'areal_jax 0.2.0 (commit 1f0c52b6a9de), jax 0.10.2, python 3.11.9'."""
    import importlib.metadata  # imported here, as the next two: half of the time of a --help
    import platform

    from areal_jax.app.workdir.environment import git_commit

    commit = git_commit()
    shown = f' (commit {commit[:_DIGITS]}{"-dirty" if commit.endswith("-dirty") else ""})' if commit else ''
    try:
        jax = importlib.metadata.version('jax')
    except importlib.metadata.PackageNotFoundError:
        jax = 'not installed'
    return f'areal_jax {__version__}{shown}, jax {jax}, python {platform.python_version()}'


def render_help(command: Command, width: int = WIDTH) -> str:
    """Renders purpose, usage, flags with defaults, fields of the config, examples and exit codes."""
    parts = [
        _wrap(command.purpose, width),
        _render_usage(command, width),
        *([_wrap(command.notes, width)] if command.notes else []),
        _render_section('Flags', [(flag.form, describe_flag(flag)) for flag in list_flags(command)], width),
        *(_render_fields(command, width) if command.fields else []),
        _render_examples(command, width),
        _render_section('Exit codes', [(str(int(code)), text) for code, text in sorted(command.exits.items())], width),
    ]
    return '\n\n'.join(parts)


def describe_flag(flag: Flag) -> str:
    """Sentences on a flag: its meaning, its choices, and 'Required.' or its default."""
    listed = f' One of {", ".join(flag.choices)}.' if flag.choices else ''
    default = f' Default: {flag.default}.' if flag.default else ''
    return f'{flag.meaning}{listed}{" Required." if flag.required else default}'


def describe_sections() -> str:
    """'run 10, model 14, ...': the sections of the config, with their numbers of fields."""
    from areal_jax.config.declarations import SECTIONS

    return ', '.join(f'{name} {len(fields)}' for name, fields in SECTIONS.items())


def list_fields(command: Command) -> list[tuple[str, str]]:
    """('run.steps=20', meaning) of the fields that users of a command set most, with their defaults."""
    from areal_jax.config.declarations import FIELDS

    return [(f'{name}={_show_value(FIELDS[name].default)}', FIELDS[name].meaning) for name in command.fields]


def _show_value(value: object) -> str:
    """Formats a value as on the command line."""
    if isinstance(value, tuple):
        return ','.join(map(str, value))
    return str(value) or "''"


def _render_usage(command: Command, width: int) -> str:
    module = f'\n{" " * _INDENT}(the same: python -m areal_jax {command.word} ...)' if command.word else ''
    lines = [
        textwrap.fill(
            f'{command.program} {form}'.strip(),
            width,
            initial_indent=' ' * _INDENT,
            subsequent_indent=' ' * 3 * _INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for form in command.usage
    ]
    return '\n'.join(['Usage:', *lines]) + module


def _render_fields(command: Command, width: int) -> list[str]:
    sections = (
        f'Sections of the config, with their numbers of fields: {describe_sections()}. areal-config FIELD explains a '
        'field, and docs/config.md lists them all.'
    )
    title = f'Fields most used, with their defaults (--config.{list_fields(command)[0][0]})'
    return [_wrap(sections, width), _render_section(title, list_fields(command), width)]


def _render_examples(command: Command, width: int) -> str:
    """Renders the examples; a line that continues ends with a backslash, for a shell."""
    lines = ['Examples, in a clone of the repository:']
    for meaning, line in list_examples(command):
        purpose = textwrap.wrap(meaning, width - 2 * _INDENT, break_long_words=False)
        lines += [f'{" " * _INDENT}# {part}' for part in purpose]
        lines += _break_line(line, width - _INDENT)
    return '\n'.join(lines)


def _break_line(line: str, width: int) -> list[str]:
    """Breaks a command into lines, but not within quotes."""
    words, lines = re.findall(r'(?:[^\s"]|"[^"]*")+', line), ['']
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += ' \\'
            lines.append(' ' * _INDENT + word)
        else:
            lines[-1] += f' {word}' if lines[-1] else word
    return [' ' * _INDENT + part for part in lines]


def _render_section(title: str, rows: Sequence[tuple[str, str]], width: int) -> str:
    return '\n'.join([f'{title}:', *render_rows(rows, width)])


def render_rows(rows: Sequence[tuple[str, str]], width: int) -> Iterable[str]:
    """Renders two columns; a term longer than its column gets a separate line."""
    longest = max((len(term) for term, _ in rows), default=0)
    column = longest if longest <= max(_MOST_TERM, width // 2) else _MOST_TERM
    if width - column < _NARROW:
        column = min(column, _INDENT)
    indent = ' ' * (2 * _INDENT + column)
    for term, text in rows:
        lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False) or ['']
        if len(term) > column:
            yield f'{" " * _INDENT}{term}'
            yield from (f'{indent}{line}' for line in lines)
        else:
            yield f'{" " * _INDENT}{term:<{column}}{" " * _INDENT}{lines[0]}'.rstrip()
            yield from (f'{indent}{line}' for line in lines[1:])


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
