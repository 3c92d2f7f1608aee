"""Checks an event log, line by line, against the promises of the loop.

aggregates.py has the rule of draws: each is in exactly one state and only moves forward. The other modules here have
the rules of parts of the loop; docs/events.md lists all rules.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from areal_jax.config.drawn_lengths import AnswerLimits
from areal_jax.config.kinds import find_server
from areal_jax.config.training import client_seed
from areal_jax.control.event_writer import find_edit
from areal_jax.events.schema import (
    AdmitEvent,
    ConsumeEvent,
    DecodeEvent,
    Event,
    FinishEvent,
    InterruptEvent,
    LoadEvent,
    RunDoneEvent,
    RunStartEvent,
)
from areal_jax.lanes import PUBLISH, is_engine_lane, is_publish_lane, short_name
from areal_jax.report.aggregates import DrawLedger
from areal_jax.report.rules.engine_rules import BatchRules, EngineRules
from areal_jax.report.rules.generation_rules import GenerationRules
from areal_jax.report.rules.request_rules import RequestRules, RewardRules
from areal_jax.types import NOT_GENERATED

_FIRST_VERSION = 6  # of the log from which on these rules hold, except the rules of runs and of `restore`
_SLACK_S = 1e-6  # of sums of clock seconds
_MADE_BY = {'train': 'the batch was formed', 'snapshot': 'it was trained', 'publish': 'it was copied'}


class _Run(NamedTuple):
    """A run under way."""

    lane: str | None
    work: str
    amount: float
    asked_s: float
    version: int | None  # the version that it is about, if the event has one


class RunRules:
    """Follows runs of lanes, versions on their way to the engines, and starts of the program.

    Args:
      in_process: whether the engines are in this process.
    """

    def __init__(self, *, in_process: bool):
        self._in_process = in_process
        self._is_covered = False
        self._runs: dict[int, _Run] = {}  # under way
        self._begun: set[int] = set()  # numbers of runs, unique in a log since version 2
        self._updates = self._published = 0
        self._made = {'train': 0, 'snapshot': 0, 'publish': 0}  # the last version for which this work is done
        self._fetched: set[tuple[str, int]] = set()  # lane and version
        self._starts = 0
        self._restores = False  # the program has started again; a `restore` must follow
        self._has_run = False  # a run has begun since the start of the program
        self._ended_by = ''  # a signal or an error
        self._evaluation: str | None = None  # phase of the evaluation that training waits for
        self._beside: int | None = None  # the version that is evaluated during training

    def apply(self, event: Event) -> Iterator[str]:
        """Yields a sentence for each rule that the event breaks."""
        if event['kind'] == 'run_start':
            yield from self._start_run(event)
        elif event['kind'] == 'run_done':
            yield from self._end_run(event)
        elif event['kind'] == 'log':
            self._start_anew(event['version'])
        elif event['kind'] == 'restore':
            yield from self._restore(event['update'])
        elif event['kind'] == 'consume':
            self._updates = event['update']
            yield from self._require_going('a batch is formed')
        elif event['kind'] == 'publish':
            if self._is_covered and event['version'] != self._made['publish']:
                yield f'version {event["version"]} is published, and {self._made["publish"]} is the last transferred'
            self._published = event['version']
        elif not self._is_covered:
            return
        elif event['kind'] == 'save':
            if (event['update'], event['update']) != (self._updates, self._published):
                yield (
                    f'a checkpoint has update={event["update"]}, and {self._updates} batches were formed and '
                    f'{self._published} versions published'
                )
        elif event['kind'] == 'draw':
            yield from self._require_going(f'draw {event["draw"]} is taken')
        elif event['kind'] == 'load':
            yield from self._require_fetched(event['engine'], event['version'], 'loads')
        elif event['kind'] == 'join':
            if self._has_run:  # an engine that joins before any run has the initial weights
                yield from self._require_fetched(event['engine'], event.get('version', 0), 'joins with')
        elif event['kind'] == 'signal':
            self._ended_by = self._ended_by or f'the signal {event["name"]}'
        elif event['kind'] == 'error':
            self._ended_by = 'an error'
        else:
            yield from self._evaluate(event)

    # The program.

    def _start_anew(self, version: int) -> None:
        self._is_covered = version >= _FIRST_VERSION
        self._starts += 1
        self._restores = self._starts > 1
        self._runs.clear()
        self._fetched.clear()
        self._ended_by, self._evaluation, self._beside, self._has_run = '', None, None, False
        if version < 2:
            self._begun.clear()

    def _restore(self, update: int) -> Iterator[str]:
        if update != self._updates:
            yield f'the run goes on after update {update}, and {self._updates} batches were formed'
        if self._is_covered and not self._restores:
            yield f'the run goes on after update {update}, and has begun before'
        self._restores, self._published = False, update
        self._made = dict.fromkeys(self._made, update)

    def _require_going(self, what: str) -> Iterator[str]:
        if self._is_covered and self._ended_by:
            yield f'{what} after {self._ended_by}'
        if self._is_covered and self._restores:
            yield f'{what}, and the program, which has started again, has not told where it goes on (no `restore`)'
            self._restores = False

    # Runs.

    def _start_run(self, event: RunStartEvent) -> Iterator[str]:
        number, work = event['run'], event['work']
        self._has_run = True
        if number in self._begun:
            yield f'run {number} begins a second time'
        self._begun.add(number)
        version = event.get('update', event.get('version'))
        self._runs[number] = _Run(event['lane'], work, event['amount'], event['time'], version)
        if version is not None and work in self._made:
            yield from self._require_made(work, version, f'run {number}')

    def _end_run(self, event: RunDoneEvent) -> Iterator[str]:
        number, end_s = event['run'], event['started'] + event['seconds']
        began = self._runs.pop(number, None)
        if began is None:
            yield f'run {number} ends, and it is not under way'
            return
        if began[:3] != (event['lane'], event['work'], event['amount']):
            yield (
                f'run {number} ends as {event["work"]!r} of {event["amount"]:g} on {event["lane"]!r}, and began '
                f'as {began.work!r} of {began.amount:g} on {began.lane!r}'
            )
        if end_s > event['time'] + _SLACK_S:
            yield f'run {number} took until {end_s}, after its end in the log'
        if event['seconds'] < 0 or event['started'] < began.asked_s - _SLACK_S:
            yield (
                f'run {number} has started={event["started"]} and seconds={event["seconds"]}, and was asked for at '
                f'{began.asked_s}'
            )
        if 'reply' in event and 'failure' in event:
            yield f'run {number} has a reply, and failure={event["failure"]!r}'
        self._note_done(began)

    def _note_done(self, run: _Run) -> None:
        lane, version = run.lane or '', run.version
        if version is None:
            return
        if run.work == 'load' and is_publish_lane(lane):
            self._fetched.add((lane.partition('/')[2], version))
        elif run.work in self._made:
            self._made[run.work] = version

    def _require_made(self, work: str, version: int, run: str) -> Iterator[str]:
        """Checks that this work is the version's next step. Training may be ahead of transfers."""
        done, made = self._made[work], self._made
        newest = {'train': self._updates, 'snapshot': made['train'], 'publish': made['snapshot']}[work]
        if self._is_covered and not (version == done + 1 and version <= newest):
            yield (
                f'{run} is {work!r} of version {version}, after that of version {done}, and {newest} is the last of '
                f'which {_MADE_BY[work]}'
            )

    def _require_fetched(self, engine: str, version: int, does: str) -> Iterator[str]:
        if self._in_process and is_engine_lane(engine) and (short_name(engine), version) not in self._fetched:
            yield f'{engine} {does} version {version}, and its lane {PUBLISH}/{short_name(engine)} has not fetched it'

    # Evaluations.

    def _evaluate(self, event: Event) -> Iterator[str]:
        if event['kind'] == 'evaluate':
            phase = event['phase'] if event['mode'] == 'start' else None
            if self._evaluation != (None if phase else event['phase']):
                under_way = f'that of phase {self._evaluation!r}' if self._evaluation else 'none'
                yield f'the evaluation of phase {event["phase"]!r} has mode={event["mode"]!r}, and {under_way} goes on'
            self._evaluation = phase
        elif event['kind'] == 'evaluation_start':
            if self._beside is not None:
                yield f'the evaluation of version {event["version"]} begins, and that of {self._beside} goes on'
            if event['version'] > self._published:
                yield f'version {event["version"]} is evaluated, and {self._published} is the last that was published'
            self._beside = event['version']
        elif event['kind'] == 'evaluation_done':
            if event['version'] != self._beside:
                yield f'the evaluation of version {event["version"]} ends, and that of {self._beside} goes on'
            self._beside = None
        elif event['kind'] == 'evaluation_decode':
            was_given_up = event.get('discarded') == event['tokens']  # the evaluation ended during the dispatch
            if event['version'] != self._beside and not was_given_up:
                yield (
                    f'dispatch {event["dispatch"]} of {event["engine"]} is of the evaluation of version '
                    f'{event["version"]}, and that of {self._beside} goes on'
                )


_RESTARTS_VERSION = 6  # of the log from which on a restart cuts it off at the last saved checkpoint
_DELAY = re.compile(r'(fixed|uniform|every)\((?:0, ?)?(\d+)\)')


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits that the config sets."""

    groups_per_update: int  # B
    eta: float  # eta of Eq. 3; in lock-step the longest delay of the schedule
    in_order: bool  # engines load versions in ascending order; not so in lock-step
    max_running: float  # inf if groups are admitted by need
    buffer_capacity: int
    max_admitted: int  # groups that the run can train in all
    in_process: bool  # engines load a version before it counts as published
    group_size: int
    answers: AnswerLimits  # the most tokens of each answer
    keeps_cache: bool  # answers keep their KV cache under new weights
    single_turn: bool  # an answer is one request
    max_token_age: int | None  # age above which a group is dropped; None = no group is
    is_inline: bool  # the scorer runs in the process of the run

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """Reads a resolved config, nested by section; raises KeyError or TypeError for any other mapping."""
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
            answers=_read_answer_limits(config),
            keeps_cache=rollout['kv_policy'] == 'keep',
            single_turn=rollout['workflow'] == 'single_turn' and not config.get('simulation', {}).get('turns'),
            max_token_age=config['staleness']['max_token_age'] if config['staleness']['over_age'] == 'drop' else None,
            is_inline=config['task']['verifier'] == 'inline',
        )


def _read_answer_limits(config: Mapping[str, Any]) -> AnswerLimits:
    most, text = int(config['rollout']['max_new_tokens']), config['rollout'].get('answer_lengths', '')
    if not text:
        return AnswerLimits(most)
    ours = config['distributed']
    return AnswerLimits.parse(text, most, client_seed(config['run']['seed'], ours['clients'], ours['client']))


def _longest_delay(schedule: str) -> float:
    """The longest delay in versions; infinite if a file lists the delays."""
    match = _DELAY.fullmatch(schedule)
    return math.inf if match is None else float(match[2]) - (match[1] == 'every')


class Rules(Protocol):
    """The rules of a part of the loop."""

    def apply(self, event: Event) -> Iterator[str]:
        """Yields a sentence for each rule that the event breaks; '' stands for no rule."""
        ...


class LogRules:
    """Follows a log event by event."""

    def __init__(self, limits: Limits):
        self._limits, self._ledger = limits, DrawLedger()
        self._before: Event | None = None
        self._admitted = 0  # N of Eq. 3, less the dropped groups
        self._version = self._published = 0  # version that admission uses; version of the last `publish`
        self._updates = 0  # batches formed
        self._next_draw = 0
        self._buffered: set[int] = set()
        self._engines: dict[str, int] = {}  # version by engine
        self._swapped: dict[str, int] = {}  # by server, the last version swapped in, perhaps never acknowledged
        self._left_out: set[str] = set()  # engines that get no new requests (rollout.slow_engines)
        self._parts = _build_parts(limits, self._ledger)

    def apply(self, event: Event) -> str:
        """Returns a sentence on the first rule that the event breaks; '' if it breaks no rule."""
        before, self._before = self._before, event
        broken = find_edit(event, before) or self._apply_ledger(event)
        for found in self._break_rules(event, before):
            broken = broken or found
        for rules in self._parts:
            for found in rules.apply(event):
                broken = broken or found
        return broken

    def _apply_ledger(self, event: Event) -> str:
        known = len(self._ledger.violations)
        self._ledger.apply(event)
        new = self._ledger.violations[known:]
        return new[0].partition(': ')[2] + ', and a draw is in one state and only moves forward' if new else ''

    def _break_rules(self, event: Event, before: Event | None) -> Iterator[str]:
        kind = event['kind']
        if event['kind'] == 'log':
            self._engines.clear()
            self._swapped.clear()
            if event['version'] >= _RESTARTS_VERSION and before is not None and before['kind'] != 'save':
                yield f'the program starts again after {before["kind"]!r}, and its log is cut off where one is saved'
        elif event['kind'] == 'restore':
            self._version = self._published = event['update']
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
        elif event['kind'] == 'stage':
            if event['phase'] == 'swap':
                self._swapped[event['engine']] = event['version']
        elif event['kind'] == 'spare':
            leave_out = self._left_out.update if event['mode'] == 'start' else self._left_out.difference_update
            leave_out(event['engines'])
        elif event['kind'] == 'route' and event['engine'] in self._left_out:
            yield f'{event["request"]} goes to {event["engine"]}, which gets no new requests'
        elif event['kind'] == 'finish':
            yield from self._finish(event)

    def _admit(self, event: AdmitEvent) -> Iterator[str]:
        limits, draw = self._limits, event['draw']
        running = self._ledger.count('running') - 1  # the ledger already counts the new group
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
        """Updates admission's version, which waits for all engines; in lock-step and with servers it does not wait."""
        waits = self._limits.in_order and self._limits.in_process
        self._version = min([self._published, *(self._engines.values() if waits else ())])

    def _follow_engine(self, event: Event) -> Iterator[str]:
        if event['kind'] == 'join':
            self._engines[event['engine']] = event.get('version', 0)
        elif event['kind'] == 'leave':
            self._engines.pop(event['engine'], None)
            self._swapped.pop(event['engine'], None)
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
        if has is not None and event['from_version'] not in (has, self._swapped.get(engine)):
            yield f'{engine} is interrupted in version {event["from_version"]}, and it decodes with {has}'

    def _decode(self, event: DecodeEvent) -> Iterator[str]:
        engine, has = event['engine'], self._engines.get(event['engine'])
        if has is not None and event['version'] not in (has, self._swapped.get(engine)):
            yield f'{engine} decodes with version {event["version"]}, and it has loaded {has}'

    def _finish(self, event: FinishEvent) -> Iterator[str]:
        versions = [version for version in event['versions'] if version != NOT_GENERATED]
        answer = f'sample {event["sample"]} of draw {event["draw"]}'
        if any(version > self._published for version in versions):
            yield f'{answer} has tokens of versions {versions}, and {self._published} is the last that was published'
        if versions != sorted(versions):
            yield f'{answer} has tokens of versions {versions}, which are not in order'


def _build_parts(limits: Limits, ledger: DrawLedger) -> list[Rules]:
    parts: list[Rules] = [
        RewardRules(limits.group_size, is_inline=limits.is_inline, single_turn=limits.single_turn),
        BatchRules(limits.max_token_age),
        RunRules(in_process=limits.in_process),
        EngineRules(in_process=limits.in_process, in_order=limits.in_order),
        RequestRules(
            ledger, in_process=limits.in_process, single_turn=limits.single_turn, group_size=limits.group_size,
            max_new_tokens=limits.answers.most,
        ),
    ]  # fmt: skip
    if limits.in_process:
        generation = GenerationRules(
            keeps_cache=limits.keeps_cache, single_turn=limits.single_turn, answers=limits.answers
        )
        parts.append(generation)
    return parts


def find_violation(events: Iterable[Event], limits: Limits) -> tuple[int, str] | None:
    """Returns (line, sentence on the broken rule) for the first line that breaks a rule; None if none does."""
    rules = LogRules(limits)
    for line, event in enumerate(events, start=1):
        if broken := rules.apply(event):
            return line, broken
    return None
