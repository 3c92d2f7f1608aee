"""The rules that every event log keeps, checked line by line: what the loop promises, as its log shows it.

draw_ledger.py has the rule of draws: each is in exactly one state and only moves forward.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from areal_jax.config.kinds import find_server
from areal_jax.control.recording import find_edit
from areal_jax.events.schema import (
    AdmitEvent,
    ConsumeEvent,
    DecodeEvent,
    Event,
    FinishEvent,
    InterruptEvent,
    LoadEvent,
    RunDoneEvent,
)
from areal_jax.report.draw_ledger import DrawLedger
from areal_jax.report.rules.generation_rules import GenerationRules
from areal_jax.report.rules.reward_rules import RewardRules
from areal_jax.types import NOT_GENERATED

_DELAY = re.compile(r'(fixed|uniform|every)\((?:0, ?)?(\d+)\)')


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the config promises."""

    groups_per_update: int  # B
    eta: float  # of Eq. 3; in lock-step the longest delay of the schedule
    in_order: bool  # engines load versions in ascending order; not so in lock-step
    max_running: float  # inf where groups are admitted by need
    buffer_capacity: int
    max_admitted: int  # groups that the run can train in all
    in_process: bool  # engines load a version before it counts as published
    group_size: int
    max_new_tokens: int
    keeps_cache: bool  # answers keep their KV cache under new weights
    single_turn: bool  # an answer is one request

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """From a resolved config, nested by section; raises KeyError or TypeError for any other mapping."""
        schedule, batch = config['staleness']['schedule'], int(config['learner']['groups_per_update'])
        rollout = config['rollout']
        natural = schedule == 'natural'
        return cls(
            groups_per_update=batch,
            eta=float(config['staleness']['eta']) if natural else _longest_delay(schedule),
            in_order=natural,
            max_running=int(rollout['max_running_groups']) or math.inf,
            buffer_capacity=int(config['buffer']['capacity']),
            max_admitted=int(config['run']['steps']) * batch,
            in_process=find_server(rollout['server']).in_process,
            group_size=int(rollout['group_size']),
            max_new_tokens=int(rollout['max_new_tokens']),
            keeps_cache=rollout['kv_policy'] == 'keep',
            single_turn=rollout['workflow'] == 'single_turn' and not config.get('simulation', {}).get('turns'),
        )


def _longest_delay(schedule: str) -> float:
    """Versions; infinite where a file says them."""
    match = _DELAY.fullmatch(schedule)
    return math.inf if match is None else float(match[2]) - (match[1] == 'every')


class LogRules:
    """Follows a log event by event."""

    def __init__(self, limits: Limits):
        self._limits, self._ledger = limits, DrawLedger()
        self._parts: list[GenerationRules | RewardRules] = [RewardRules(limits.group_size)]
        if limits.in_process:
            generation = GenerationRules(
                keeps_cache=limits.keeps_cache, single_turn=limits.single_turn, max_new_tokens=limits.max_new_tokens
            )
            self._parts.append(generation)
        self._before: Event | None = None
        self._admitted = 0  # N of Eq. 3: groups that were dropped left it
        self._version = self._published = 0  # that admission counts with; of the last `publish`
        self._updates = 0  # batches formed
        self._next_draw = 0
        self._buffered: set[int] = set()
        self._engines: dict[str, int] = {}  # version by engine
        self._left_out: set[str] = set()  # engines that get no new requests (rollout.slow_engines)
        self._runs: dict[int, tuple[str | None, str, float]] = {}  # under way: lane, work, amount
        self._begun: set[int] = set()  # numbers of runs, unique in a log since version 2

    def apply(self, event: Event) -> str:
        """Which rule the event breaks, as a sentence; '' for none."""
        edit, self._before = find_edit(event, self._before), event
        broken = [edit or self._apply_ledger(event), *self._break_rules(event)]
        for part in self._parts:
            broken += part.apply(event)
        return next(filter(None, broken), '')

    def _apply_ledger(self, event: Event) -> str:
        known = len(self._ledger.violations)
        self._ledger.apply(event)
        new = self._ledger.violations[known:]
        return new[0].partition(': ')[2] + ', and a draw is in one state and only moves forward' if new else ''

    def _break_rules(self, event: Event) -> Iterator[str]:
        kind = event['kind']
        if event['kind'] == 'log':
            self._runs.clear()
            self._engines.clear()
            if event['version'] < 2:
                self._begun.clear()
        elif event['kind'] == 'restore':
            self._version = self._published = event['update']
            yield from self._restored(event['update'])
        elif event['kind'] == 'draw':
            if event['draw'] != self._next_draw:
                yield f'draw {event["draw"]} is taken, where {self._next_draw} is the next of the stream'
            self._next_draw = event['draw'] + 1
        elif event['kind'] == 'admit':
            yield from self._admit(event)
        elif event['kind'] == 'buffer':
            self._buffered.add(event['draw'])
        elif event['kind'] == 'drop':
            self._admitted -= 1
            self._buffered.discard(event['draw'])
        elif event['kind'] == 'consume':
            yield from self._consume(event)
        elif event['kind'] == 'publish':
            if event['version'] != self._published + 1:
                yield f'version {event["version"]} is published after {self._published}'
            if event['version'] > self._updates:
                yield f'version {event["version"]} is published, and {self._updates} batches were formed'
            self._published = event['version']
            self._note_version()
        elif kind in ('join', 'leave', 'load', 'interrupt', 'decode'):
            yield from self._follow_engine(event)
        elif event['kind'] == 'spare':
            leave_out = self._left_out.update if event['mode'] == 'start' else self._left_out.difference_update
            leave_out(event['engines'])
        elif event['kind'] == 'route' and event['engine'] in self._left_out:
            yield f'{event["request"]} goes to {event["engine"]}, which gets no new requests'
        elif event['kind'] == 'finish':
            yield from self._finish(event)
        elif event['kind'] == 'run_start':
            if event['run'] in self._begun:
                yield f'run {event["run"]} begins a second time'
            self._begun.add(event['run'])
            self._runs[event['run']] = event['lane'], event['work'], event['amount']
        elif event['kind'] == 'run_done':
            yield from self._end_run(event)

    def _restored(self, update: int) -> Iterator[str]:
        if update != self._updates:
            yield f'the run goes on after update {update}, and {self._updates} batches were formed'

    def _admit(self, event: AdmitEvent) -> Iterator[str]:
        limits, draw = self._limits, event['draw']
        running = self._ledger.count('running') - 1  # the ledger has the new one already
        self._admitted += 1
        if (self._admitted - 1) // limits.groups_per_update > self._version + limits.eta:
            yield (
                f'draw {draw} is admitted against Eq. 3: floor(({self._admitted} - 1) / {limits.groups_per_update}) > '
                f'{self._version} + {limits.eta:g} (version + eta)'
            )
        if running >= limits.max_running:
            yield f'draw {draw} is admitted while {running} groups run (rollout.max_running_groups)'
        if running + len(self._buffered) >= limits.buffer_capacity:
            yield f'draw {draw} is admitted while {running} groups run and {len(self._buffered)} wait (buffer.capacity)'
        if event.get('open', 0) >= event.get('wanted', 1):
            yield f'draw {draw} is admitted with {event["open"]} open answers, where {event["wanted"]} are enough'
        if self._admitted > limits.max_admitted:
            yield f'draw {draw} is admitted, and run.steps trains {limits.max_admitted} groups'

    def _consume(self, event: ConsumeEvent) -> Iterator[str]:
        draws, lowest = event['draws'], sorted(self._buffered)[: len(event['draws'])]
        if event['update'] != self._updates + 1:
            yield f'the batch of update {event["update"]} is formed after that of {self._updates}'
        if len(draws) != self._limits.groups_per_update:
            yield f'a batch of {len(draws)} groups is formed (learner.groups_per_update)'
        if draws != lowest:
            yield f'draws {draws} are trained, where the lowest in the buffer are {lowest}'
        self._updates = event['update']
        self._buffered -= set(draws)

    def _note_version(self) -> None:
        """Admission counts a version when every engine of the process has it; in lock-step, and of servers, at once."""
        waits = self._limits.in_order and self._limits.in_process
        self._version = min([self._published, *(self._engines.values() if waits else ())])

    def _follow_engine(self, event: Event) -> Iterator[str]:
        if event['kind'] == 'join':
            self._engines[event['engine']] = event.get('version', 0)
        elif event['kind'] == 'leave':
            self._engines.pop(event['engine'], None)
        elif event['kind'] == 'load':
            yield from self._load(event)
        elif event['kind'] == 'interrupt':
            yield from self._interrupt(event)
        elif event['kind'] == 'decode':
            yield from self._decode(event)

    def _load(self, event: LoadEvent) -> Iterator[str]:
        engine, version = event['engine'], event['version']
        if version > self._published:
            yield f'{engine} loads version {version}, and {self._published} is the last that was published'
        if self._limits.in_order and version <= self._engines.get(engine, -1):
            yield f'{engine} loads version {version} after {self._engines[engine]}'
        self._engines[engine] = version
        self._note_version()

    def _interrupt(self, event: InterruptEvent) -> Iterator[str]:
        engine, has = event['engine'], self._engines.get(event['engine'])
        if has is not None and event['from_version'] != has:
            yield f'{engine} is interrupted in version {event["from_version"]}, and it decodes with {has}'

    def _decode(self, event: DecodeEvent) -> Iterator[str]:
        engine, has = event['engine'], self._engines.get(event['engine'])
        if has is not None and event['version'] != has:
            yield f'{engine} decodes with version {event["version"]}, and it has loaded {has}'

    def _finish(self, event: FinishEvent) -> Iterator[str]:
        versions = [version for version in event['versions'] if version != NOT_GENERATED]
        answer = f'sample {event["sample"]} of draw {event["draw"]}'
        if any(version > self._published for version in versions):
            yield f'{answer} has tokens of versions {versions}, and {self._published} is the last that was published'
        if versions != sorted(versions):
            yield f'{answer} has tokens of versions {versions}, which are not in order'

    def _end_run(self, event: RunDoneEvent) -> Iterator[str]:
        began = self._runs.pop(event['run'], None)
        if began is None:
            yield f'run {event["run"]} ends, and it is not under way'
        elif began != (event['lane'], event['work'], event['amount']):
            yield (
                f'run {event["run"]} ends as {event["work"]!r} of {event["amount"]:g} on {event["lane"]!r}, and began '
                f'as {began[1]!r} of {began[2]:g} on {began[0]!r}'
            )
        if event['started'] + event['seconds'] > event['time'] + 1e-6:
            yield f'run {event["run"]} took until {event["started"] + event["seconds"]}, after its end in the log'


def find_violation(events: Iterable[Event], limits: Limits) -> tuple[int, str] | None:
    """(line, which rule it breaks) of the first line that breaks one; None where all are kept."""
    rules = LogRules(limits)
    for line, event in enumerate(events, start=1):
        if broken := rules.apply(event):
            return line, broken
    return None
