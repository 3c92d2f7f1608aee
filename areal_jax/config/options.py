"""Options on the command line: --config.task.options.digits=3 sets a key of a free section, declared or not.

fields.Options says what an option may hold.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ml_collections import config_dict

from areal_jax.config.declarations import FIELDS, FREE
from areal_jax.config.fields import ConfigError, Option

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
