"""The config of a run: made from the declared fields, validated before any device is touched, and read with a record.

declarations.py says which fields there are. Experiment files call `default_config`, the command line and the sessions
call `validate`, and app/ builds a run from a `TrackedConfig`. The rules that join several fields are at the end: each
value is legal alone, together they cannot run. Rules of one field are in declarations.py, rules of one section in its
file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from ml_collections import config_dict

from areal_jax.config.addresses import OWN_HOST, split_address
from areal_jax.config.agent_fields import (
    find_agent_problems,
    find_code_problems,
    find_sandbox_problems,
    find_training_problems,
)
from areal_jax.config.cluster import describe_former, parse_engines, parse_learner
from areal_jax.config.declarations import (
    FIELDS,
    FREE,
    SECTIONS,
    find_declared,
    find_evaluation_problem,
    find_free,
    find_friction_problems,
    find_model_problems,
    find_simulation_problems,
    require_allowed,
)
from areal_jax.config.fields import (
    ChoiceOrOwn,
    Config,
    ConfigError,
    ConfigSection,
    Path,
    Purpose,
    Value,
    is_used,
    read_section,
    require_local,
)
from areal_jax.config.generation import (
    RolloutSection,
    cuts_softmax,
    find_engine_problems,
    find_length_problems,
    find_quantization_problems,
    find_route_problems,
    find_server_problems,
    find_sparing_problems,
)
from areal_jax.config.kinds import DEVICE, IN_PROCESS, find_channel, find_server, name_launched
from areal_jax.config.loss import (
    CriticSection,
    LossSection,
    find_critic_problems,
    find_group_problems,
    find_objective_problems,
    find_reference_problems,
)
from areal_jax.config.near_names import require_declared
from areal_jax.config.objectives import find_objective
from areal_jax.config.sources import find_source_problems, list_tasks, split_config
from areal_jax.config.splits import find_reallocation_problems
from areal_jax.config.training import (
    DiagnosticsSection,
    LearnerSection,
    OptimizerSection,
    StalenessSection,
    find_balance_problems,
    find_block_problems,
    find_brake_problems,
    find_client_problems,
    find_device_problems,
    find_room_problems,
    find_row_problems,
    find_schedule_problems,
    find_staleness_problems,
)

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
        if isinstance(declared := find_declared(path), Path):
            declared.require_allowed(path, value)
        elif isinstance(declared, ChoiceOrOwn):
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

    def list_tasks(self) -> dict[str, Config]:
        """Returns the tasks of the run by source, sorted by its name; {'': the section `task`} without sources."""
        return list_tasks(self._config, self.task, self._read.add)

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
        outer = {path.rpartition('.')[0], find_free(path)}  # of an option, also of a source's
        return path in self._read or bool(outer & self._read)

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


def find_record_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence if the channel's records cannot be sent or read, or publication.listen is malformed."""
    setting = f'publication.channel={c.publication.channel!r}'
    if c.publication.listen and split_address(c.publication.listen) is None:
        yield (
            f'publication.listen={c.publication.listen!r} must be a host or host:port, with brackets around a host of '
            'IPv6: name an interface of this machine'
        )
    if not find_channel(c.publication.channel).sends_records:
        return
    yield from _listen_problems(c)
    if not find_server(c.rollout.server).reads_records:
        yield (
            f'{setting} with rollout.server={c.rollout.server!r}: these servers load directories of files; use '
            "publication.channel='files', or rollout.server='own'"
        )


def _listen_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    listen, layout = c.publication.listen, parse_learner(c.cluster.learner)
    where = split_address(listen) if listen else None
    if where is not None and where[1] and layout.processes > 1:
        yield (
            f'publication.listen={listen!r} with cluster.learner={c.cluster.learner!r}: {layout.processes} processes '
            f'cannot listen at one port; use {OWN_HOST!r}, or no port'
        )


def find_delta_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each setting with which deltas between versions cannot be sent or read."""
    publication, server = c.publication, c.rollout.server
    if not publication.delta:
        return
    channel, hosts = find_channel(publication.channel), parse_learner(c.cluster.learner).hosts
    for path, value, fits, why in (
        (
            *('publication.channel', publication.channel, channel.has_deltas),
            "it carries whole versions only; use publication.channel='files'",
        ),
        (
            *('publication.dtype', publication.dtype, publication.dtype != 'float32'),
            '99.8 % of the elements of float32 weights change in each update, so that no delta is smaller; use '
            "publication.dtype='bfloat16'",
        ),
        (
            *('cluster.learner', c.cluster.learner, hosts is None or channel.sends_records),
            'each process writes its own leaves, and a delta file needs the version before in one process; use '
            "publication.channel='stream'",
        ),
        (
            *('rollout.server', server, find_server(server).reads_deltas),
            "these servers load whole directories; use rollout.server='own'",
        ),
    ):
        if not fits:
            yield f'publication.delta=True with {path}={value!r}: {why}, or publication.delta=False'


def find_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """A sentence for each rule that `c` breaks: the fields, their values and the fix."""
    if not find_objective(c.loss.objective).generates:
        yield from _sft_problems(c)
    else:
        parse_engines(c.cluster.engines)
        yield from find_staleness_problems(c)
        yield from find_group_problems(c)
        yield from _signal_problems(c)
        yield from find_objective_problems(c)
        yield from _capacity_problems(c)
        yield from find_room_problems(c)
        yield from _evaluation_problems(c)
        yield from find_server_problems(c)
        yield from find_length_problems(c)
        yield from find_sparing_problems(c)
        yield from find_record_problems(c)
        yield from find_quantization_problems(c)
        yield from find_route_problems(c)
        yield from find_balance_problems(c)
        yield from find_delta_problems(c)
        yield from find_friction_problems(c)
        yield from find_agent_problems(c)
    yield from find_simulation_problems(c)
    for of_source, alone in split_config(c):
        yield from (f'{of_source}{problem}' for problem in find_training_problems(alone))
    yield from find_reference_problems(c)
    yield from find_critic_problems(c)
    yield from find_block_problems(c)
    yield from find_client_problems(c)
    yield from find_task_problems(c)
    yield from _file_problems(c)
    yield from find_device_problems(c)
    yield from find_reallocation_problems(c)
    yield from _telemetry_problems(c)
    yield from _export_problems(c)
    yield from find_schedule_problems(c)
    yield from find_row_problems(c)


def find_evaluation_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each rule that a config for evaluation alone breaks: rules of training do not apply."""
    parse_engines(c.cluster.engines)
    yield from find_evaluation_problem(c)
    yield from find_agent_problems(c)
    yield from find_engine_problems(c)
    yield from find_quantization_problems(c)
    yield from find_task_problems(c)
    if not c.evaluation.problems:
        yield 'evaluation.problems=0 leaves nothing to evaluate; set the number of problems'


def _sft_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    if c.sft.evaluate_every and not c.evaluation.problems:
        yield (
            f'sft.evaluate_every={c.sft.evaluate_every} measures nothing with evaluation.problems=0; set '
            'evaluation.problems, or sft.evaluate_every=0'
        )
    yield from find_brake_problems(c)


def _evaluation_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    if c.evaluation.every and not c.evaluation.problems:
        yield (
            f'evaluation.every={c.evaluation.every} measures nothing with evaluation.problems=0; set '
            'evaluation.problems, or evaluation.every=0'
        )
    if (own := c.evaluation.engines) and not c.evaluation.every:
        yield f'evaluation.engines={own} sets engines aside for evaluation.every=0; use evaluation.engines=0'
    elif own:
        yield from _evaluation_engine_problems(c)


def _evaluation_engine_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    own, engines = c.evaluation.engines, parse_engines(c.cluster.engines).count
    if parse_learner(c.cluster.learner).hosts is None or find_server(c.rollout.server).launch is None:
        yield (
            f'evaluation.engines={own} with rollout.server={c.rollout.server!r} and cluster.learner='
            f"{c.cluster.learner!r}: servers are set aside in runs in roles; use cluster.learner='hosts=1 x ...' and "
            f'rollout.server={name_launched()}, or evaluation.engines=0'
        )
    elif own >= engines:
        yield (
            f'evaluation.engines={own} leaves none of the {engines} engines of cluster.engines={c.cluster.engines!r} '
            'to training; raise cluster.engines'
        )


def _signal_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for sampling that biases the training signal unintentionally."""
    if cuts_softmax(c) and c.loss.truncated_sampling == 'refuse':
        yield (
            f'rollout.top_k={c.rollout.top_k} and rollout.top_p={c.rollout.top_p} draw from a part of the softmax, but '
            "the learner's log-probs are those of all of it: set rollout.top_k=0 and rollout.top_p=1, or accept a bias "
            "by the mass kept with loss.truncated_sampling='full_softmax' (it is 'refuse')"
        )


def _capacity_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence if the buffer cannot hold a batch, or an engine's slot an answer."""
    learner = c.learner
    if c.buffer.capacity < learner.groups_per_update:
        yield (
            f'buffer.capacity={c.buffer.capacity} can never hold learner.groups_per_update='
            f'{learner.groups_per_update} groups; raise the capacity'
        )
    yield from find_engine_problems(c)


def find_task_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each broken rule of tasks and model alone."""
    yield from find_source_problems(c)
    for of_source, alone in split_config(c):
        yield from (f'{of_source}{problem}' for problem in _problems_of_one_task(alone))
    if c.task.filter == 'success_rate' and c.task.filter_low > c.task.filter_high:
        yield (
            f'task.filter_low={c.task.filter_low} above task.filter_high={c.task.filter_high} drops every group; lower '
            'task.filter_low or raise task.filter_high'
        )
    yield from find_model_problems(c)


def _problems_of_one_task(c: config_dict.ConfigDict) -> Iterator[str]:
    if c.task.name == 'jsonl' and not c.task.path:
        yield "task.name='jsonl' needs task.path: a file, or hf:ORG/NAME, with question and answer (sft: or messages)"
    if c.task.columns and c.task.name not in ('jsonl', 'code'):
        yield f'task.columns is read by the tasks jsonl and code alone, not by {c.task.name!r}: remove it'
    for name, column in c.task.columns.items():
        if not isinstance(column, str) or not column:
            yield f'task.columns.{name}={column!r} must be the name of a column'
    if c.task.name == 'jsonl' and c.task.answer == 'math' and c.task.verifier == 'inline':
        yield (
            "task.verifier='inline' cannot end a comparison that hangs, which task.answer='math' needs; use "
            "task.verifier='process'"
        )
    yield from find_sandbox_problems(c)
    yield from find_code_problems(c)


def _file_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each setting that writes a plain decoder to files: Hugging Face has no format for it."""
    if c.model.source != 'random' or c.model.family != 'plain':
        return
    channel, server = c.publication.channel, c.rollout.server
    for path, value, fix, asks in (
        ('run.export', c.run.export, False, c.run.export),
        ('publication.channel', channel, DEVICE.name, find_channel(channel).writes_files),
        ('rollout.server', server, IN_PROCESS.name, not find_server(server).in_process),
    ):
        if asks:
            yield (
                f"model.family='plain' cannot be written for other programs, which {path}={value!r} asks for: use "
                f'{path}={fix!r}'
            )


def _export_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence if exports during training have no exporter role, or no checkpoint to be made from."""
    if not (every := c.run.export_every):
        return
    if parse_learner(c.cluster.learner).hosts is None:
        yield (
            f'run.export_every={every} with cluster.learner={c.cluster.learner!r}: runs in roles have an exporter; '
            "use cluster.learner='hosts=1 x ...', or run.export_every=0 and python -m areal_jax.main_export"
        )
    elif not c.checkpoint.every or every % c.checkpoint.every:
        yield (
            f'run.export_every={every} must be a multiple of checkpoint.every={c.checkpoint.every}: checkpoints are '
            'what is exported'
        )


def _telemetry_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    steps = tuple(c.telemetry.profile_steps)
    if len(steps) > 2:
        yield f'telemetry.profile_steps={steps} must be the first and the last update of the trace, one update, or ()'
    elif steps and steps[-1] > c.run.steps:
        yield (
            f'telemetry.profile_steps={steps} ends after the last update, run.steps={c.run.steps}; lower it, or raise '
            'run.steps'
        )
