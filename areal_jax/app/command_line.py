"""The command line of every main_*.py: a config file, its overrides and flags, or one sentence that says what is wrong.

Nothing here imports jax, so a mistake is reported at once.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import inspect
import linecache
import os
import pathlib
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from absl import flags
from ml_collections import config_dict, config_flags

from areal_jax.app.process.setup import require_extras
from areal_jax.config import require_local_fields, validate
from areal_jax.config.cluster import describe_former
from areal_jax.config.declarations import FIELDS, FREE, SECTIONS
from areal_jax.config.fields import ConfigError, Field, Option, Options, Sources, Texts
from areal_jax.config.near_names import suggest_flag, unknown_field
from areal_jax.errors import UserError, suggest
from areal_jax.files import describe_url, is_address, require_local
from areal_jax.installation import PACKAGE, list_configs, locate_file


class ConfigFile(NamedTuple):
    """A config file as named by FILE, FILE:ARGUMENT, package:configs/FILE[:ARGUMENT] or NAME[:ARGUMENT]."""

    name: str  # without the argument: 'configs/a.py' as given, 'package:configs/tiny_cpu.py' for 'tiny_cpu'
    argument: str | None  # of get_config; None without a colon

    @property
    def source(self) -> str:
        """Names the same file and argument, even if the working directory has a file called NAME."""
        return self.name if self.argument is None else f'{self.name}:{self.argument}'

    @property
    def path(self) -> pathlib.Path:
        return locate_file(self.name) if self.name.startswith(PACKAGE) else pathlib.Path(self.name)

    @property
    def absolute_source(self) -> str:
        """`source` with an absolute path, for other working directories; a file of the package needs none."""
        if self.name.startswith(PACKAGE):
            return self.source
        return self._replace(name=str(self.path.absolute())).source


def find_config_file(source: str) -> ConfigFile:
    """Returns the file that `source` names; it need not exist. A file in the working directory comes before a NAME."""
    prefix = PACKAGE if source.startswith(PACKAGE) else ''
    rest, colon, argument = source.removeprefix(prefix).partition(':')
    name = prefix + rest
    if not pathlib.Path(name).is_file() and name in list_configs():
        name = f'{PACKAGE}configs/{name}.py'
    return ConfigFile(name, argument if colon else None)


def suggest_config(file: ConfigFile) -> str:
    """Returns '; did you mean NAME?' for a missing file, from the files in its folder and the package's configs."""
    path = file.path
    if near := suggest(path.name, [other.name for other in path.parent.glob('*.py')]):
        return near
    named = file.name.removeprefix(PACKAGE).removeprefix('configs/').removesuffix('.py')
    return suggest(named, list_configs()) or '; areal-config lists the configs that come with the package'


_OVERRIDE = re.compile(r'--?(?:no)?config\.([^=]*)(?:=(.*))?', re.DOTALL)
_ASSIGNED = re.compile(r"(\w+\.\w+)'? *[=:] *'?(\w+)")  # ('mesh.fsdp', '4') of 'config.mesh.fsdp = 4'
_NO_CONFIG = '--config is missing: name an experiment file, e.g. --config=configs/mine.py, or --config=tiny_cpu'

Result = TypeVar('Result')


class CommandLineError(UserError, ValueError):
    """A command line, or the config file it names, that cannot be used; the message names the part and the fix."""


class CommandLine(NamedTuple):
    """The config of a command, where it came from, and the fields that the command line sets."""

    config: config_dict.ConfigDict  # of the file, overrides applied, valid
    source: str  # FILE or FILE:ARGUMENT: as given, or package:configs/tiny_cpu.py for the name tiny_cpu
    overrides: tuple[str, ...]  # fields that the command line sets: 'rollout.slots'


def parse_train_command(argv: Sequence[str], values: flags.FlagValues, describes: bool = False) -> CommandLine:
    """Parses the command line of a run: a valid config and a --workdir that can be written; raises UserError.

    `describes`: with --dry_run the program writes nothing and needs no --workdir.
    """
    command = parse_command(argv, values)
    if not (describes and values['dry_run'].value):
        require_workdir(values['workdir'].value)
    validate(command.config)
    require_extras(command.config)
    return command


def parse_evaluation_command(argv: Sequence[str], values: flags.FlagValues) -> CommandLine:
    """Parses the command line of an evaluation, whose config evaluate.py checks; raises UserError."""
    command = parse_command(argv, values)
    require_workdir(values['workdir'].value)
    return command


def parse_command(argv: Sequence[str], values: flags.FlagValues) -> CommandLine:
    """Loads the file of --config, applies --config.section.field=value, and parses the other flags into `values`.

    Raises CommandLineError; ConfigError for a field that is unknown or of another type.
    """
    try:
        words = list(values.read_flags_from_files(argv, force_gnu=False))
    except flags.Error as error:
        raise CommandLineError(re.sub(r'^ERROR:: ', '', _first_line(error))) from error
    rest, source = _take_config(words)
    config = load_config(source)
    rest, options = take_options(rest, config)
    overrides = (*dict.fromkeys(path for path, _ in _overrides(rest)), *options)
    if former := describe_former(dict(_overrides(rest))):
        raise ConfigError(f'--config.{former}')
    for path, value in _overrides(rest):
        _require_field(path, value, config)
    config_flags.DEFINE_config_dict('config', config, 'FILE or FILE:ARGUMENT', values, sys_argv=rest)
    try:
        left = values(rest)
    except flags.Error as error:
        raise _describe(error, rest, values) from error
    if len(left) > 1:
        raise CommandLineError(f'unexpected argument {left[1]!r}: flags are written --name=value')
    require_local_fields(config)
    return CommandLine(config, find_config_file(source).source, overrides)


def parse_flags(argv: Sequence[str], values: flags.FlagValues) -> None:
    """Parses a command line without a config into `values`; raises CommandLineError."""
    try:
        left = values(list(argv))
    except flags.Error as error:
        raise _describe(error, argv, values) from error
    if len(left) > 1:
        raise CommandLineError(f'unexpected argument {left[1]!r}: flags are written --name=value')


class _PathParser(flags.ArgumentParser[str]):
    """Refuses a URL."""

    def parse(self, argument: str) -> str:
        if reason := describe_url(argument):
            raise ValueError(reason)
        return argument


class _AddressParser(_PathParser):
    """Refuses a URL that is no address of an object store."""

    def parse(self, argument: str) -> str:
        return argument if is_address(argument) else super().parse(argument)


class _PathsParser(flags.ListParser):
    """Refuses a URL in a list of paths."""

    def parse(self, argument: str | list[str]) -> list[str]:
        if isinstance(argument, str) and (reason := describe_url(argument)):
            raise ValueError(reason)
        return super().parse(argument)


def define_path(values: flags.FlagValues, name: str, meaning: str, default: str | None = None) -> None:
    """Adds a flag whose value is a path of this machine; refuses a URL. Every flag with a path is made here."""
    flags.DEFINE(_PathParser(), name, default, meaning, flag_values=values)


def define_paths(values: flags.FlagValues, name: str, meaning: str) -> None:
    """Adds a flag whose value is a list of paths of this machine, A,B; refuses a URL."""
    flags.DEFINE(_PathsParser(), name, [], meaning, flag_values=values, serializer=flags.ListSerializer(','))


def define_model(values: flags.FlagValues) -> None:
    """Adds --model, for commands that load weights (evaluation_config.choose_source)."""
    meaning = (
        'The --workdir or run.mirror of a run, one of its checkpoints, a directory of Hugging Face files, a GGUF file, '
        'or package:NAME/FILE; without it the model of the config.'
    )
    flags.DEFINE(_AddressParser(), 'model', None, meaning, flag_values=values)


def load_config(source: str) -> config_dict.ConfigDict:
    """Returns the config that get_config() of FILE, or get_config(ARGUMENT) of FILE:ARGUMENT, returns.

    FILE is a path, or a config that comes with the package: 'package:configs/tiny_cpu.py', or its name 'tiny_cpu'.

    Raises CommandLineError that names the file and, where there is one, the line.
    """
    config = call_in_file(source, 'get_config', 'which returns the config')
    if not isinstance(config, config_dict.ConfigDict):
        kind = type(config).__name__
        raise CommandLineError(f'--config={source}: get_config() returns {kind}, not an ml_collections ConfigDict')
    # fails where a required placeholder has no value
    _guard(source, 'get_config', config.copy_and_resolve_references)
    return config.lock()


def call_in_file(source: str, function: str, purpose: str) -> object:
    """Calls a function of FILE without argument, or of FILE:ARGUMENT with ARGUMENT, and returns its result.

    Args:
      purpose: describes the function if the file lacks it: 'which returns the config'.

    Raises CommandLineError that names the file and, where there is one, the line.
    """
    file = find_config_file(source)
    name, path = file.name, file.path
    if not name or not path.exists():
        raise CommandLineError(f'--config={source}: there is no file {name!r}{suggest_config(file) if name else ""}')
    if not path.is_file():
        raise CommandLineError(f'--config={source}: {name} is not a file; name an experiment file in it')
    loader = importlib.machinery.SourceFileLoader('config_file', str(path))
    spec = importlib.util.spec_from_loader('config_file', loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    _guard(source, function, lambda: loader.exec_module(module))
    called = getattr(module, function, None)
    if not callable(called):
        raise CommandLineError(f'--config={source}: {name} has no function {function}(), {purpose}')
    given = () if file.argument is None else (file.argument,)
    try:
        inspect.signature(called).bind(*given)
    except TypeError as error:
        takes = 'takes no argument: leave out' if given else 'needs an argument: add'
        raise CommandLineError(
            f'--config={source}: {function}() of {name} {takes} :{file.argument or "ARGUMENT"}'
        ) from error
    return _guard(source, function, lambda: called(*given))


def defines(source: str, function: str) -> bool:
    """Whether FILE, or FILE of FILE:ARGUMENT, defines a function of this name; the file is parsed, not run."""
    try:
        tree = ast.parse(find_config_file(source).path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # the code that loads the file says why
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body)


def require_workdir(name: str | None) -> None:
    """Raises UserError for a --workdir that is missing, a URL, not a directory, or not writable; creates nothing."""
    if not name:
        raise CommandLineError('--workdir is missing: name a directory for what the run leaves, e.g. --workdir=runs/a')
    require_local('--workdir', name)
    try:
        os.fsencode(name).decode()
        path = pathlib.Path(name)
        existing = next((parent for parent in (path, *path.absolute().parents) if parent.exists()), path)
    except (UnicodeError, ValueError, OSError) as error:
        raise CommandLineError(f'--workdir={name!r} cannot be used as a path: {_first_line(error)}') from error
    if not existing.is_dir():
        raise CommandLineError(f'--workdir={name}: {existing} is a file, not a directory; choose another one')
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CommandLineError(f'--workdir={name}: {existing} is not writable; choose a directory of your own')


def _take_config(words: Sequence[str]) -> tuple[list[str], str]:
    """(the other words, value of --config)."""
    rest: list[str] = []
    sources: list[str] = []
    remaining = iter(words)
    for word in remaining:
        if word == '--':
            rest += [word, *remaining]
        elif match := re.fullmatch(r'--?config(?:=(.*))?', word, re.DOTALL):
            sources.append(next(remaining, '') if match[1] is None else match[1])
            if not sources[-1] or sources[-1].startswith('--'):
                raise CommandLineError(_NO_CONFIG)
        else:
            rest.append(word)
    if not sources:
        raise CommandLineError(_NO_CONFIG)
    require_local('--config', sources[0])
    if len(sources) > 1:
        raise CommandLineError(f'--config is given more than once: {", ".join(sources)}; use one')
    return rest, sources[0]


def _overrides(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yields ('rollout.slots', '3') for --config.rollout.slots=3; None if the value is the next word or a boolean."""
    for word in words:
        if word == '--':
            return
        if match := _OVERRIDE.fullmatch(word):
            yield match[1], match[2]


def _require_field(path: str, value: str | None, config: config_dict.ConfigDict) -> None:
    """Raises UserError for an override of something that is not a field of the config."""
    section, _, field = path.partition('.')
    if section not in config:
        raise unknown_field(path)
    if not isinstance(config[section], config_dict.ConfigDict):
        raise CommandLineError(f'--config.{path}: {section} is no section of this config')
    if not field:
        example = f'--config.{section}.{next(iter(config[section]), "FIELD")}=...'
        raise CommandLineError(
            f'--config.{path}={value}: {section} is a section; set one of its fields, e.g. {example}'
        )
    if path in FREE:
        raise CommandLineError(
            f'--config.{path}={value}: {path} is a section; set one of its keys, --config.{path}.KEY=VALUE'
        )
    if field not in config[section]:
        raise unknown_field(path)


def _describe(error: flags.Error, words: Sequence[str], values: flags.FlagValues) -> UserError:
    """Returns the error for a word that absl or ml_collections refuses."""
    if isinstance(error, flags.UnrecognizedFlagError):
        own = [f'--{name}' for name in ('config', *values) if not name.startswith('config.')]
        flag = f'--{error.flagname}'
        return CommandLineError(f'{flag} is not a flag{suggest_flag(flag, own) or "; see --help"}')
    if isinstance(error, flags.IllegalFlagValueError):
        for path, value in _overrides(words):
            if str(error).startswith(f'flag --config.{path}=') and path in FIELDS:
                kind = FIELDS[path].kind
                shown = re.match(rf'flag --config\.{re.escape(path)}=(.*?): ', str(error), re.DOTALL)
                return CommandLineError(f'--config.{path}={shown[1] if shown else value} must be {kind}')
    return CommandLineError(re.sub(r'^flag (--.*?): (?=is a URL)|^flag (?=--)', r'\1 ', _first_line(error)).lstrip())


def _guard(source: str, function: str, run: Callable[[], Result]) -> Result:
    """Returns `run()`; an exception becomes a CommandLineError that names the config file and the line."""
    path = find_config_file(source).path
    try:
        return run()
    except SyntaxError as error:
        where = f'line {error.lineno} of {error.filename or path}'
        raise CommandLineError(f'--config={source}: {where} is not Python: {error.msg}') from error
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f'line {lines[-1]} of {path}' if lines else f'{function}() of {path}'
        said = f'{type(error).__name__}: {_first_line(error)}'.rstrip(': ')
        line = linecache.getline(str(path), lines[-1] or 0) if lines else ''
        if former := describe_former(dict(_ASSIGNED.findall(line))):
            said = former
        elif unknown := re.search(r'Key "(\w+)" does not exist', str(error)):  # ml_collections lists all fields
            near = suggest(unknown[1], [field for fields in SECTIONS.values() for field in fields])
            said = f'{type(error).__name__}: {unknown[1]!r} is not a field of that section{near}'
        raise CommandLineError(f'--config={source}: {where} raises {said}') from error


def _first_line(error: BaseException) -> str:
    """The message of an exception on one line."""
    return ' '.join(str(error).split())


_WORDS = {'true': True, 'false': False}  # as flags of the command line are written


def take_options(words: Sequence[str], config: config_dict.ConfigDict) -> tuple[list[str], tuple[str, ...]]:
    """Sets the options that a command line names; returns its other words, and the fields set: 'task.options.digits'.

    A key that the config has keeps its type. Any other gets its text's value as a Python literal, else the text.
    Raises ConfigError for a key or a value that is not allowed.
    """
    rest: list[str] = []
    fields: dict[str, None] = {}
    for word, free, key, text in _read(words):
        options = _section(config, free)
        if options is None:
            rest.append(word)
            continue
        path = f'{free}.{key}'
        if isinstance(declared := FIELDS[free], Sources):
            _set_of_source(declared, options, free, key, text)
            declared.require_type(free, options)
            fields[path] = None
            continue
        if not key.isidentifier():
            raise ConfigError(f'--config.{path}={text}: the name of an option must be that of a parameter in Python')
        with options.unlocked(), options.ignore_type():
            options[key] = _convert(f'--config.{path}', text, options[key]) if key in options else parse_option(text)
        FIELDS[free].require_type(free, options)
        fields[path] = None
    return rest, tuple(fields)


def parse_option(text: str) -> object:
    """Returns 3 for '3', (1, 2) for '1,2', None for 'None', and the text itself if it is no Python literal."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


def _set_of_source(declared: Sources, sources: config_dict.ConfigDict, path: str, key: str, text: str) -> None:
    """Sets a field of a source that the config names, 'gsm8k.weight', or an option of it, 'gsm8k.columns.question'."""
    given = f'--config.{path}.{key}={text}'
    name, _, rest = key.partition('.')
    field, _, option = rest.partition('.')
    if name not in sources:
        known = f'; it has {", ".join(sources)}' if sources else ''
        raise ConfigError(
            f'{given}: {path} has no source {name!r}{suggest(name, sources)}{known}; add one in the config file'
        )
    if not field:
        raise ConfigError(f'{given}: {name} is a source; set one of its fields, --config.{path}.{name}.weight=VALUE')
    own, of_field = sources[name], declared.fields.get(field)
    with own.unlocked(), own.ignore_type():
        if isinstance(of_field, Options) and option:
            if not isinstance(own.get(field), config_dict.ConfigDict):
                own[field] = config_dict.ConfigDict()
            own[field][option] = parse_option(text)
        else:
            own[rest] = text if of_field is None else _parse_field(of_field, given, text)


def _parse_field(field: Field, given: str, text: str) -> object:
    """Parses the text of a declared field; raises ConfigError if it is of another type."""
    value: object = text
    if not isinstance(field.default, str):
        value = _WORDS.get(text, parse_option(text))
    if isinstance(field, Texts) and not isinstance(value, tuple):
        value = tuple(text.split(','))
    if isinstance(field.default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not field.has_type(value):
        raise ConfigError(f'{given} must be {field.kind}')
    return value


def _section(config: config_dict.ConfigDict, path: str) -> config_dict.ConfigDict | None:
    """Returns the free section `path`; None for '', or if the config lacks it, which validation refuses."""
    section, _, field = path.partition('.')
    found = config.get(section, {}).get(field) if path else None
    return found if isinstance(found, config_dict.ConfigDict) else None


def _convert(name: str, text: str, declared: Option) -> object:
    """The text as a value of the type of `declared`."""
    value = _WORDS.get(text, parse_option(text)) if isinstance(declared, bool) else parse_option(text)
    if isinstance(declared, str):
        return text
    if isinstance(declared, tuple) and not isinstance(value, tuple):
        value = (value,)  # '--config.task.options.sizes=3' is a tuple of one
    if isinstance(declared, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if declared is not None and type(value) is not type(declared):
        kinds = {bool: 'True or False', int: 'a whole number', float: 'a number', tuple: 'a tuple'}
        raise ConfigError(f'{name}={text} must be {kinds[type(declared)]}, as the config has {declared!r} there')
    return value


def _read(words: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Yields (word, free section or '', key, value) of each word; a value may be the next word."""
    remaining = iter(words)
    for word in remaining:
        if word == '--':
            yield from ((left, '', '', '') for left in [word, *remaining])
            return
        name, equals, text = word.lstrip('-').partition('=')
        free = next((path for path in FREE if word.startswith('-') and name.startswith(f'config.{path}.')), '')
        if free and not equals:
            following = next(remaining, None)
            if following is None or following.startswith('--'):
                raise ConfigError(f'--{name} needs a value: --{name}=VALUE')
            text = following
        yield word, free, name.removeprefix(f'config.{free}.'), text
