"""Parses `cluster.reallocate`: the splits of the devices between learner and engines during a run.

It does not need jax. control/reallocation.py moves the devices between two updates.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from collections.abc import Iterator, Mapping

from ml_collections import config_dict

from areal_jax.config.cluster import (
    ENGINES,
    LEARNER,
    USE_EQUAL,
    DeviceSplit,
    EnginesLayout,
    LearnerLayout,
    parse_engines,
    parse_learner,
)
from areal_jax.config.fields import ConfigError
from areal_jax.config.kinds import DEVICE, IN_PROCESS, find_channel, find_server
from areal_jax.config.objectives import find_objective
from areal_jax.config.training import find_device_problems, list_unmoved

FIELD = 'cluster.reallocate'
OFF, AUTO = 'off', 'auto'
_PLAN = re.compile(r'plan\((.+)\)')
_LINE = '{"update": 4, "learner": "fsdp=2", "engines": "6 x tensor=1"}'
Plan = Mapping[int, DeviceSplit]  # split by its first update, ascending


def plan_file(text: str) -> pathlib.Path | None:
    """Returns FILE of 'plan(FILE)'; None for another text."""
    match = _PLAN.fullmatch(text)
    return pathlib.Path(match[1]) if match else None


def read_plan(text: str) -> Plan:
    """Reads the splits of 'plan(FILE)', whose file has one JSON object a line.

    Raises ConfigError that names the line and its fault.
    """
    file = plan_file(text)
    assert file is not None
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f'{FIELD}={text!r}: the file cannot be read ({reason})') from error
    if not lines:
        raise ConfigError(f'{FIELD}={text!r}: the file is empty; write lines such as {_LINE}')
    plan: dict[int, DeviceSplit] = {}
    for number, line in enumerate(lines, start=1):
        where = f'{FIELD}={text!r}, line {number}'
        update, split = _read_line(line, where)
        least = max(plan, default=1) + 1
        if update < least:
            raise ConfigError(
                f'{where}: update {update} must be {least} or later: updates ascend, and those before the first one '
                f'have {LEARNER} and {ENGINES}'
            )
        plan[update] = split
    return plan


def _read_line(line: str, where: str) -> tuple[int, DeviceSplit]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    kinds = {'update': int, 'learner': str, 'engines': str}
    if not isinstance(found, dict) or {name: type(value) for name, value in found.items()} != kinds:
        raise ConfigError(f'{where} is {line.strip()!r}; write {_LINE}')
    return found['update'], DeviceSplit(found['learner'], found['engines'])


def initial_split(c: config_dict.ConfigDict) -> DeviceSplit:
    """The split that cluster.learner and cluster.engines set."""
    return DeviceSplit(str(parse_learner(c.cluster.learner)), str(parse_engines(c.cluster.engines)))


def list_splits(c: config_dict.ConfigDict) -> list[DeviceSplit]:
    """Returns every split that the run may have: in the order of a plan, or for 'auto' the smallest learner first."""
    if plan_file(c.cluster.reallocate) is not None:
        return [initial_split(c), *read_plan(c.cluster.reallocate).values()]
    return list_rungs(c) if c.cluster.reallocate == AUTO else [initial_split(c)]


def list_rungs(c: config_dict.ConfigDict) -> list[DeviceSplit]:
    """Returns the splits that 'auto' chooses from: the config's devices divided anew, the smallest learner first.

    Engines keep their size. One axis of the learner's mesh grows and shrinks: fsdp, or data if cluster.learner sets
    data and not fsdp. Splits whose learner cannot divide the rows evenly are left out.
    """
    learner, engines = parse_learner(c.cluster.learner), parse_engines(c.cluster.engines)
    axis = 'data' if learner.data > 1 and learner.fsdp == 1 else 'fsdp'
    others, total = learner.devices // getattr(learner, axis), learner.devices + engines.devices
    found = []
    for count in range(total // engines.devices_each, 0, -1):
        size, rest = divmod(total - count * engines.devices_each, others)
        if rest or not size:
            continue
        layout = dataclasses.replace(learner, **{axis: size})
        if c.learner.rows_per_microbatch % layout.data_shards == 0:
            found.append(DeviceSplit(str(layout), str(engines.resize(count))))
    return found


def parse_split(split: DeviceSplit) -> tuple[LearnerLayout, EnginesLayout]:
    """Parses both texts of a split; raises ConfigError for a text of another form."""
    return parse_learner(split.learner), parse_engines(split.engines)


def replace_split(c: config_dict.ConfigDict, split: DeviceSplit) -> config_dict.ConfigDict:
    """Returns a copy of the config with this split."""
    changed = c.copy_and_resolve_references()
    changed.cluster.learner, changed.cluster.engines = split.learner, split.engines
    return changed


def find_reallocation_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each setting that excludes moving devices between generation and training."""
    reallocate = c.cluster.reallocate
    if reallocate == OFF:
        return
    if reallocate != AUTO and plan_file(reallocate) is None:
        yield f"{FIELD}={reallocate!r} is not known; use 'off', 'auto' or 'plan(FILE)', see docs/reallocation.md"
        return
    if not find_objective(c.loss.objective).generates:
        yield f'{FIELD}={reallocate!r}: supervised training has no engines to move; use {FIELD}={OFF!r}'
        return
    yield from _fixed_problems(c)
    if not _moves_here(c):
        return
    splits = list_splits(c)
    if len(set(splits)) < 2:
        yield (
            f'{FIELD}={reallocate!r}: {LEARNER}={c.cluster.learner!r} and {ENGINES}={c.cluster.engines!r} are the only '
            f'split of these devices that learner.rows_per_microbatch={c.learner.rows_per_microbatch} allows; raise '
            f'that, or use {FIELD}={OFF!r}'
        )
    for split in splits[1:]:
        yield from _split_problems(c, split)


def _moves_here(c: config_dict.ConfigDict) -> bool:
    """Whether learner and engines are in one process, and engines have separate devices, equally many each."""
    hosts, engines = parse_learner(c.cluster.learner).hosts, parse_engines(c.cluster.engines)
    own = not engines.shared and engines.has_equal_engines
    return find_server(c.rollout.server).in_process and hosts is None and own


def _fixed_problems(c: config_dict.ConfigDict) -> Iterator[str]:
    """Yields a sentence for each field that fixes the devices of learner or engines; the fix is always 'off'."""
    hosts, engines = parse_learner(c.cluster.learner).hosts, parse_engines(c.cluster.engines)
    for path, value, fits, why in (
        (LEARNER, c.cluster.learner, hosts is None, 'a learner of several processes cannot change them while it runs'),
        (
            *('rollout.server', c.rollout.server, find_server(c.rollout.server).in_process),
            f'servers keep their devices, only rollout.server={IN_PROCESS.name!r} gives them up',
        ),
        (ENGINES, c.cluster.engines, not engines.shared, 'engines on the device of the learner have none to give'),
        (ENGINES, c.cluster.engines, engines.has_equal_engines, 'devices move between engines of one size'),
        (
            *('publication.channel', c.publication.channel, find_channel(c.publication.channel) is DEVICE),
            f'engines that join get the weights through publication.channel={DEVICE.name!r} alone',
        ),
        ('staleness.schedule', c.staleness.schedule, c.staleness.schedule == 'natural', 'in lock-step nothing is idle'),
        ('evaluation.every', c.evaluation.every, not c.evaluation.every, 'its weights are kept by engines that stay'),
        ('loss.teacher', c.loss.teacher, not c.loss.teacher, 'the weights of a teacher are not moved'),
        *list_unmoved(c),
    ):
        if not fits:
            yield f'{FIELD}={c.cluster.reallocate!r} with {path}={value!r}: {why}; use {FIELD}={OFF!r}'


def _split_problems(c: config_dict.ConfigDict, split: DeviceSplit) -> Iterator[str]:
    """Yields a sentence for each rule of cluster.learner and cluster.engines that a later split breaks."""
    learner, engines = parse_split(split)
    where = f'{FIELD}={c.cluster.reallocate!r}'
    if learner.hosts is not None or engines.shared:
        yield f"{where} has the split {split}: a split has neither hosts= nor 'shared'"
        return
    if not engines.has_equal_engines:
        yield f'{where} has the split {split}: devices move between engines of one size; {USE_EQUAL}'
        return
    for problem in find_device_problems(replace_split(c, split)):
        yield f'{where} has the split {split}: {problem}'
