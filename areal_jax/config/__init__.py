"""The config of a run: made from the declared fields, validated before any device is touched, and read with a record.

declarations.py says which fields there are. Experiment files call `default_config`, the command line and the sessions
call `validate`, and app/ builds a run from a `TrackedConfig`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ml_collections import config_dict

from areal_jax.config.cluster import describe_former
from areal_jax.config.constraints import find_evaluation_problems, find_problems, find_task_problems
from areal_jax.config.declarations import FIELDS, FREE, SECTIONS, require_allowed
from areal_jax.config.fields import (
    ChoiceOrOwn,
    ConfigError,
    ConfigSection,
    Path,
    Purpose,
    Value,
    is_used,
    read_section,
    require_local,
)
from areal_jax.config.generation import RolloutSection
from areal_jax.config.loss import CriticSection, LossSection
from areal_jax.config.near_names import require_declared
from areal_jax.config.training import DiagnosticsSection, LearnerSection, OptimizerSection, StalenessSection

CONFIG = 'config.json'  # in the workdir: the resolved config of the run
DATACLASSES: Mapping[str, type[ConfigSection]] = {
    kind.section: kind
    for kind in (
        RolloutSection,
        StalenessSection,
        LearnerSection,
        LossSection,
        CriticSection,
        OptimizerSection,
        DiagnosticsSection,
    )
}
FieldValue: TypeAlias = Any  # has the type that the field declares, which a type checker cannot derive from the name


def default_config() -> config_dict.ConfigDict:
    """Returns every field with its default; experiment files start from a copy and set what differs."""
    sections = {name: {key: field.initial() for key, field in fields.items()} for name, fields in SECTIONS.items()}
    config = config_dict.ConfigDict(sections).lock()
    for path in FREE:
        section, field = path.split('.')
        config[section][field].unlock()
    return config


def flatten(config: Mapping[str, object], prefix: str = '') -> Iterator[tuple[str, FieldValue]]:
    """Yields ('rollout.slots', 8), ... for every leaf."""
    for key, value in config.items():
        path = f'{prefix}{key}'
        if isinstance(value, (config_dict.ConfigDict, dict)):
            yield from flatten(value, f'{path}.')
        else:
            yield path, value


def require_local_fields(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for a URL in any field that holds a path: the first check of every command with a config."""
    for path, value in flatten(config):
        if isinstance(FIELDS.get(path), Path | ChoiceOrOwn):
            require_local(path, value)


def validate(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError for a config that cannot run, naming the fields, their values and the fix."""
    _require_rules(config, find_problems)


def validate_evaluation(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError as `validate` does, by the rules of evaluation alone: an untrainable config may pass."""
    _require_rules(config, find_evaluation_problems)


def validate_scoring(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError as `validate` does, for a run that only scores answers: it neither trains nor generates."""
    _require_rules(config, find_task_problems)


def _require_rules(config: config_dict.ConfigDict, find: Callable[[config_dict.ConfigDict], Iterable[str]]) -> None:
    resolved = config.copy_and_resolve_references()
    if former := describe_former(dict(flatten(resolved))):
        raise ConfigError(former)
    require_declared(resolved)
    require_allowed(dict(flatten(resolved)))
    for problem in find(resolved):
        raise ConfigError(problem)


class TrackedConfig:
    """A read-only view of a resolved config that knows which fields are used.

    In a training run, a field of a section in DATACLASSES is used if its declaration says so (`used_if`) and it was
    not noted as idle (`note_idle`); a field of another section is used if it was read. In other runs, a field of a
    section in DATACLASSES is used if it is declared for that purpose (`also_for`) or was noted as used (`note_used`).

    Args:
      overrides: the fields that the command line sets, such as 'rollout.slots'; the run as built must use each.
    """

    rollout: RolloutSection
    staleness: StalenessSection
    learner: LearnerSection
    loss: LossSection
    critic: CriticSection
    optimizer: OptimizerSection
    diagnostics: DiagnosticsSection

    def __init__(
        self, config: config_dict.ConfigDict, overrides: Collection[str] = (), *, purpose: Purpose = Purpose.TRAINING
    ):
        self._config, self._purpose = config.copy_and_resolve_references(), purpose
        self._overrides = frozenset(overrides)
        self._read: set[str] = set()
        self._idle: set[str] = set()

    def __getattr__(self, section: str) -> Any:
        if kind := DATACLASSES.get(section):
            self.__dict__[section] = found = read_section(kind, self._config, self._purpose)
            return found
        return _TrackedSection(self._config[section], section, self._read)

    def as_dict(self) -> dict[str, dict[str, Value]]:
        """Returns a plain nested dict, without marking any field as read."""
        return json.loads(self._config.to_json_best_effort())

    def note_used(self, paths: Iterable[str]) -> None:
        """Marks fields, and all fields of whole sections, as used: other processes of the run read them."""
        self._read.update(_list_paths(paths))

    def note_idle(self, paths: Iterable[str]) -> None:
        """Marks fields, and all fields of whole sections, as idle: the user's own code could use them but does not."""
        self._idle.update(_list_paths(paths))

    def unread(self) -> list[tuple[str, Value]]:
        """Returns (field, value) of the fields that are not used although their value differs from the default."""
        return [
            (path, value)
            for path, value in flatten(self._config)
            if not self._is_read(path) and not (path in FIELDS and value == FIELDS[path].default)
        ]

    def _is_read(self, path: str) -> bool:
        """Whether the run uses the field: it is declared so, or it was read, or its free section was read."""
        section, name = path.split('.')[:2]
        if kind := DATACLASSES.get(section):
            if self._purpose is Purpose.TRAINING:
                return path not in self._idle and is_used(kind, name, self._config)
            if self._purpose in FIELDS[f'{section}.{name}'].also_for:
                return True
        return path in self._read or path.rpartition('.')[0] in self._read

    def idle_fields(self) -> list[str]:
        """Returns 'evaluation.samples=16', ... for the report: fields that are set but not used by the run as built."""
        return [f'{path}={value!r}' for path, value in self.unread()]

    def require_all_read(self) -> None:
        """Raises ConfigError when the command line sets a field that the run as built does not use.

        A config file may set such a field, because a switch on the command line can make it idle: it is only reported.
        """
        if unread := [(path, value) for path, value in self.unread() if path in self._overrides]:
            fields = ', '.join(f'{path}={value!r}' for path, value in unread)
            raise ConfigError(
                f'set but never read: {fields}. This run does not use '
                f'{"it" if len(unread) == 1 else "them"}: remove the setting or the one that makes it unused.'
            )


def _list_paths(paths: Iterable[str]) -> Iterator[str]:
    """Yields each named field, and every field of each named section."""
    for path in paths:
        yield from [path] if '.' in path else (f'{path}.{field}' for field in SECTIONS[path])


class _TrackedSection:
    def __init__(self, section: config_dict.ConfigDict, name: str, read: set[str]):
        self._section, self._name, self._read = section, name, read

    def __getattr__(self, field: str) -> FieldValue:
        value = self._section[field]
        self._read.add(f'{self._name}.{field}')
        return value
