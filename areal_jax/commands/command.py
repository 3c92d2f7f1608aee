"""The declaration of a command, from which its help, docs/commands.md and the completion of shells are made.

A main_*.py has one `COMMAND`, calls `help.answer(COMMAND, argv)` first, and parses with the flags that `COMMAND` names.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from areal_jax.errors import ExitCode
from areal_jax.files import describe_url

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
ROLES_OF_TINY = (  # words of an example: the smallest run in roles
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
class Example:
    """A command line that can be run in a clone, and what it does."""

    purpose: str  # 'go on with it'
    line: str  # all words, the program first


@dataclasses.dataclass(frozen=True)
class Command:
    """What a command is for and how it is called.

    Args:
      program: 'areal-train', or 'python -m launch.local'.
      purpose: one sentence, which the list of commands shows.
      usage: one entry for each form of the command, without the program; a flag outside brackets is required, and what
        follows its equals sign is its metavar.
      flags: makes the parser; a command with absl flags takes --config as well.
      fields: of the config, those that users of this command set most.
      choices: the values of a flag whose parser does not list them.
      exits: what each exit code means.
      notes: what else a user must know before the first run.
    """

    program: str
    purpose: str
    usage: tuple[str, ...]
    flags: Callable[[], flags.FlagValues | argparse.ArgumentParser]
    examples: tuple[Example, ...]
    fields: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    exits: Mapping[ExitCode, str] = dataclasses.field(default_factory=lambda: EXITS)
    notes: str = ''

    @property
    def word(self) -> str:
        """'train' of areal-train: the name under `python -m areal_jax`; '' for a program that has none."""
        return self.program.removeprefix('areal-') if self.program.startswith('areal-') else ''


def local_path(text: str) -> str:
    """The type of every argument of a Parser that is a path, or has one in it, FIELD=PATH; refuses a URL."""
    if reason := describe_url(text):
        raise argparse.ArgumentTypeError(f'={text} {reason}')
    return text


class Parser(argparse.ArgumentParser):
    """argparse for a command without a config: an error is one sentence, and command.py shows the help."""

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


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag or argument of a command, as it is shown."""

    name: str  # '--workdir', or 'FILE' for an argument
    metavar: str  # of its value; '' for a flag without one
    meaning: str
    default: str  # '' = none
    required: bool = False
    choices: tuple[str, ...] = ()
    is_repeated: bool = False

    @property
    def form(self) -> str:
        """'--workdir=DIR'; '--compare RUN RUN ...' for a flag that takes words."""
        if not self.metavar:
            return self.name
        return f'{self.name} {self.metavar} ...' if self.is_repeated else f'{self.name}={self.metavar}'

    @property
    def kind(self) -> str:
        """What completes its value: 'choice', 'file', 'directory', 'text', or '' for a flag without a value."""
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
    meaning = (flag.help or '').partition(';\n    repeat this option')[0]  # which absl adds to a list
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
    """'DIR' of --workdir=DIR in the usage; '' where the usage does not have the flag."""
    found = re.search(rf'(?<!\S)\[*{re.escape(name)}[= ]([^\s\]-][^\s\]]*)', ' '.join(command.usage))
    return found[1] if found else ''


def _is_required(command: Command, name: str) -> bool:
    """Whether every form of the usage has the flag, outside brackets."""
    forms = [re.sub(r'\[[^\[\]]*\]', '', re.sub(r'\[(:[^\]]*)\]', r'\1', form)) for form in command.usage]
    return all(re.search(rf'(?<!\S){re.escape(name)}(?=[=\s]|$)', form) for form in forms)


def _show(default: object) -> str:
    """A default as the command line would give it; '' = none."""
    if isinstance(default, bool):
        return 'on' if default else 'off'
    if default == sys.executable:
        return 'that of this command'
    if default is None or default in ('', [], ()):
        return ''
    return (
        ', '.join(map(str, default)) if isinstance(default, Sequence) and not isinstance(default, str) else str(default)
    )
