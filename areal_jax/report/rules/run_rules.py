"""The rules of lanes and of the program: each run begins and ends once, and what follows from one comes after it.

log_rules.py puts events through them. A version is trained, copied and transferred, in this order, before it is
published; a signal closes admission; a start of the program goes on where the last checkpoint was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from areal_jax.events.schema import Event, RunDoneEvent, RunStartEvent
from areal_jax.lanes import PUBLISH, is_engine_lane, is_publish_lane, short_name

KINDS = frozenset(
    (
        'log', 'restore', 'save', 'signal', 'error', 'draw', 'consume', 'publish', 'join', 'load', 'run_start',
        'run_done', 'evaluate', 'evaluation_start', 'evaluation_done', 'evaluation_skip', 'evaluation_lost',
        'evaluation_decode',
    )
)  # fmt: skip
_FIRST_VERSION = 6  # of the log from which on these rules hold, those of runs and of `restore` excepted
_SLACK_S = 1e-6  # of sums of clock seconds
_MADE_BY = {'train': 'the batch was formed', 'snapshot': 'it was trained', 'publish': 'it was copied'}


class _Run(NamedTuple):
    """A run under way."""

    lane: str | None
    work: str
    amount: float
    asked_s: float
    version: int | None  # that it is about, where it tells one


class RunRules:
    """Follows runs of lanes, versions on their way to the engines, and starts of the program.

    Args:
      in_process: whether the engines are in this process.
    """

    kinds = KINDS

    def __init__(self, *, in_process: bool):
        self._in_process = in_process
        self._is_covered = False
        self._runs: dict[int, _Run] = {}  # under way
        self._begun: set[int] = set()  # numbers of runs, unique in a log since version 2
        self._updates = self._published = 0
        self._made = {'train': 0, 'snapshot': 0, 'publish': 0}  # the last version of which this is done
        self._fetched: set[tuple[str, int]] = set()  # lane and version
        self._starts = 0
        self._restores = False  # the start goes on from a checkpoint, which `restore` is to tell
        self._has_run = False  # anything since the start of the program
        self._ended_by = ''  # a signal or an error
        self._evaluation: str | None = None  # the phase of the evaluation for which training waits
        self._beside: int | None = None  # the version that is evaluated beside training

    def apply(self, event: Event) -> Iterator[str]:
        """Which rules the event breaks, each as a sentence."""
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
            if self._has_run:  # else it has the weights that the program starts from
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
        """Whether the version has come so far that this work is next. Training may be ahead of transfers."""
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
            was_given_up = event.get('discarded') == event['tokens']  # the evaluation, while the dispatch was under way
            if event['version'] != self._beside and not was_given_up:
                yield (
                    f'dispatch {event["dispatch"]} of {event["engine"]} is of the evaluation of version '
                    f'{event["version"]}, and that of {self._beside} goes on'
                )
