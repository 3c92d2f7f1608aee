"""The rules of engines: how each joins, gets its weights, decodes and leaves, and the states of a server.

log_rules.py applies them; generation_rules.py has the rules of the computation in this process's engines.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from areal_jax.control.buffer import BY_REWARD, OVER_AGE
from areal_jax.control.frictions import REWARD, UNREWARDED
from areal_jax.events.schema import (
    ConsumeEvent,
    DecodeEvent,
    DropEvent,
    EngineStateEvent,
    EvaluationDecodeEvent,
    EvaluationPrefillEvent,
    Event,
    FinishEvent,
    FrictionEvent,
    InterruptEvent,
    JoinEvent,
    LoadEvent,
    PrefillEvent,
    ReallocateEvent,
    RewardEvent,
    SpareEvent,
    StageEvent,
)
from areal_jax.tasks.scoring.score_call import SCORED
from areal_jax.types import NOT_GENERATED

_FIRST_VERSION = 6  # of the log from which on these rules hold
_OUT = ('unknown', 'quarantined')  # states that a server leaves by a fence
_LATER: dict[str, tuple[str, ...]] = {  # allowed next states, by state
    'registered': ('syncing', *_OUT, 'gone'),
    'syncing': ('probing', 'serving', *_OUT, 'gone'),
    'probing': ('serving', 'syncing', *_OUT, 'gone'),
    'serving': ('draining', 'syncing', *_OUT, 'gone'),
    'draining': ('syncing', *_OUT, 'gone'),
    'unknown': ('syncing', 'quarantined', 'gone'),
    'quarantined': ('syncing', 'unknown', 'gone'),
    'gone': (),
}
_PHASES = ('stage', 'swap', 'acknowledge')  # of a commit, in their order


class EngineRules:
    """Follows engines, event by event.

    Args:
      in_process: whether the engines are in this process.
      in_order: whether engines load versions in ascending order.
    """

    def __init__(self, *, in_process: bool, in_order: bool):
        self._in_process, self._in_order = in_process, in_order
        self._is_covered = False
        self._published = 0
        self._pool: set[str] = set()  # engines that have joined
        self._states: dict[str, str] = {}  # of servers that are registered
        self._incarnations: dict[str, int] = {}
        self._joining = ''  # the server whose state is about to be `serving`
        self._commits: dict[str, tuple[int, int]] = {}  # version and done phases, by server
        self._fenced: set[str] = set()  # servers that were fenced since they went out of service
        self._probes: dict[str, str] = {}  # outcome of the last probe that counts, by server
        self._slots: dict[str, int] = {}  # by engine and kind of dispatch
        self._spared: set[str] = set()  # classes of hardware

    def apply(self, event: Event) -> Iterator[str]:
        """Yields a sentence for each rule that the event breaks."""
        kind = event['kind']
        if event['kind'] == 'log':
            self._start_anew(event['version'])
        elif event['kind'] == 'restore':
            self._published = event['update']
        elif event['kind'] == 'publish':
            self._published = event['version']
        elif not self._is_covered:
            return
        elif event['kind'] == 'decode' or event['kind'] == 'evaluation_decode':
            yield from self._decode(event)
        elif event['kind'] == 'prefill' or event['kind'] == 'evaluation_prefill':
            yield from _check_prefill(event)
        elif event['kind'] == 'interrupt':
            yield from self._interrupt(event)
        elif event['kind'] == 'load':
            yield from self._load(event)
        elif event['kind'] == 'join':
            yield from self._join(event)
        elif event['kind'] == 'spare':
            yield from self._spare(event)
        elif event['kind'] == 'reallocate':
            yield from self._reallocate(event)
        elif kind in ('leave', 'register', 'engine_state', 'stage', 'probe', 'fence'):
            yield from self._follow_server(event)

    def _start_anew(self, version: int) -> None:
        self._is_covered, self._joining = version >= _FIRST_VERSION, ''
        self._pool.clear()
        self._fenced.clear()
        self._states.clear()
        self._incarnations.clear()
        self._commits.clear()
        self._probes.clear()
        self._slots.clear()

    # Dispatches.

    def _decode(self, event: DecodeEvent | EvaluationDecodeEvent) -> Iterator[str]:
        slots, tokens, steps = event['slots'], event['tokens'], event['steps']
        rows = len(slots) - slots.count(None)
        name = f'dispatch {event["dispatch"]} of {event["engine"]}'
        if len(set(slots)) - (None in slots) != rows:
            yield f'{name} has slots={slots}, one request twice'
        if not rows <= tokens <= rows * steps:
            yield f'{name} has tokens={tokens}, and {rows} rows of {steps} steps make {rows} to {rows * steps}'
        if event['bucket'] < rows:
            yield f'{name} has bucket={event["bucket"]}, and {rows} requests are in its slots'
        if event.get('discarded', 0) > tokens:
            yield f'{name} has discarded={event["discarded"]}, of {tokens} tokens'
        of_kind = event['engine'] if event['kind'] == 'decode' else f'{event["engine"]} {event["kind"]}'
        if len(slots) != self._slots.setdefault(of_kind, len(slots)):
            yield f'{name} has {len(slots)} slots, and its engine had {self._slots[of_kind]} before'

    def _interrupt(self, event: InterruptEvent) -> Iterator[str]:
        before, after = event['from_version'], event['to_version']
        if before == after or (self._in_order and after < before):
            yield f'{event["engine"]} is interrupted in version {before} for version {after}, which is not newer'
        if after > self._published:
            yield (
                f'{event["engine"]} is interrupted for version {after}, and {self._published} is the last that was '
                'published'
            )

    def _load(self, event: LoadEvent) -> Iterator[str]:
        engine, version = event['engine'], event['version']
        if event['pause_seconds'] < 0:
            yield f'{engine} loads version {version} with pause_seconds={event["pause_seconds"]:g}'
        if not self._in_process and self._commits.pop(engine, None) != (version, len(_PHASES)):
            yield f'{engine} loads version {version}, which it has not staged, swapped in and acknowledged'

    # Engines that come and go.

    def _join(self, event: JoinEvent) -> Iterator[str]:
        engine, version = event['engine'], event.get('version', 0)
        if version > self._published:
            yield f'{engine} joins with version {version}, and {self._published} is the last that was published'
        if self._in_process:
            if engine in self._pool:
                yield f'{engine} joins, and is in the pool'
        else:
            if (state := self._states.get(engine)) not in ('syncing', 'probing'):
                yield f'{engine} joins, and is {state or "not registered"}'
            if self._probes.get(engine, 'passed') != 'passed':
                yield f'{engine} joins, and has not passed a probe (the last: {self._probes[engine]})'
            self._joining = engine
        self._pool.add(engine)

    def _spare(self, event: SpareEvent) -> Iterator[str]:
        is_out = event['hardware'] in self._spared
        if is_out == (event['mode'] == 'start'):
            yield f'engines of {event["hardware"]} {"are left out" if not is_out else "get requests"} a second time'
        (self._spared.discard if is_out else self._spared.add)(event['hardware'])

    def _reallocate(self, event: ReallocateEvent) -> Iterator[str]:
        for engine in event['joined']:
            if engine not in self._pool:
                yield f'devices have moved, {engine} is among joined={event["joined"]}, and it has not joined'
        for engine in set(event['left']) - set(event['joined']):
            if engine in self._pool:
                yield f'devices have moved, {engine} is among left={event["left"]}, and it has not left'

    # Servers.

    def _follow_server(self, event: Event) -> Iterator[str]:
        if event['kind'] == 'register':
            engine, incarnation = event['engine'], event['incarnation']
            if engine in self._states:
                yield f'{engine} is registered, and is {self._states[engine]}'
            if incarnation <= self._incarnations.get(engine, 0):
                yield f'{engine} has incarnation={incarnation} after {self._incarnations.get(engine, 0)}'
            self._states[engine], self._incarnations[engine] = 'registered', incarnation
            self._probes.pop(engine, None)
        elif event['kind'] == 'engine_state':
            yield from self._change_state(event)
        elif event['kind'] == 'stage':
            yield from self._stage(event)
        elif event['kind'] == 'probe':
            engine = event['engine']
            self._probes[engine] = event['outcome']
            if (state := self._states.get(engine)) not in ('probing', 'syncing', *_OUT):  # probing when asked
                yield f'{engine} has answered a probe ({event["outcome"]}), and is {state or "not registered"}'
        elif event['kind'] == 'fence':
            self._fenced.add(event['engine'])
        elif event['kind'] == 'leave':
            yield from self._leave(event['engine'])

    def _leave(self, engine: str) -> Iterator[str]:
        state = self._states.pop(engine, None)
        if self._in_process and engine not in self._pool:
            yield f'{engine} leaves, and is not in the pool'
        elif not self._in_process and state != 'gone':
            yield f'{engine} leaves, and is {state or "not registered"}'
        self._pool.discard(engine)
        self._slots.pop(engine, None)
        self._commits.pop(engine, None)

    def _change_state(self, event: EngineStateEvent) -> Iterator[str]:
        engine, state = event['engine'], event['state']
        if state == 'refused':  # `engine` is a name in the registry
            return
        before = self._states.get(engine)
        if before is None:
            yield f'{engine} is {state}, and is not registered'
        elif state not in _LATER.get(before, (state,)):
            yield f'{engine} is {state} after {before}'
        if before in _OUT and state == 'syncing' and engine not in self._fenced:
            yield f'{engine} is {state} after {before}, and nothing has ended what it did before (no `fence`)'
        if (state == 'serving') != (engine == self._joining):
            yield f'{engine} is {state}, and {f"{self._joining} has joined" if self._joining else "has not joined"}'
        if state in _OUT:
            self._fenced.discard(engine)
            if engine in self._probes:
                self._probes[engine] = 'none since it was out of service'
        self._states[engine], self._joining = state, ''

    def _stage(self, event: StageEvent) -> Iterator[str]:
        engine, version, phase = event['engine'], event['version'], event['phase']
        number = _PHASES.index(phase)
        if version > self._published:
            yield f'{engine} gets version {version} ({phase}), and {self._published} is the last that was published'
        if number and event['outcome'] != 'unknown' and self._commits.get(engine) != (version, number):
            yield f'{engine} ends {phase!r} of version {version}, and {_PHASES[number - 1]!r} of it was not done'
        if event['outcome'] == 'done':
            self._commits[engine] = version, number + 1
        else:
            self._commits.pop(engine, None)


def _check_prefill(event: PrefillEvent | EvaluationPrefillEvent) -> Iterator[str]:
    name, requests, tokens, bucket = event['engine'], event['requests'], event['tokens'], event['bucket']
    if len(set(requests)) != len(requests):
        yield f'{name} has a prefill with requests={requests}, one of them twice'
    if not 0 <= tokens <= bucket:
        yield f'{name} has a prefill with tokens={tokens}, and its bucket has {bucket}'


# The rules of groups that have ended: why a group is dropped, its age when trained, and the changes by a friction.
#
# log_rules.py applies them.


_OF_RUNNING = ('verifier_failed', 'cancelled', 'engine_lost', *BY_REWARD)  # reasons of groups that are not buffered


class BatchRules:
    """Follows answers from their end into a batch, event by event.

    Args:
      max_token_age: the age in versions above which a group is dropped; None = no group is.
    """

    def __init__(self, max_token_age: int | None):
        self._max_token_age = max_token_age
        self._updates = 0  # batches formed
        self._oldest: collections.defaultdict[int, dict[int, int]] = collections.defaultdict(dict)  # version, by answer
        self._paid: collections.defaultdict[int, dict[int, float]] = collections.defaultdict(dict)  # reward, by answer
        self._buffered: set[int] = set()
        self._batch: dict[int, dict[int, float]] = {}  # rewards by draw and sample, of the last batch

    def apply(self, event: Event) -> Iterator[str]:
        """Yields a sentence for each rule that the event breaks."""
        if event['kind'] == 'finish':
            self._note_versions(event)
        elif event['kind'] == 'reward':
            self._note_reward(event)
        elif event['kind'] == 'buffer':
            self._buffered.add(event['draw'])
        elif event['kind'] == 'drop':
            yield from self._drop(event)
        elif event['kind'] == 'consume':
            yield from self._consume(event)
        elif event['kind'] == 'friction':
            yield from self._disturb(event)

    def _note_versions(self, event: FinishEvent) -> None:
        versions = [version for version in event['versions'] if version != NOT_GENERATED]
        if versions:
            self._oldest[event['draw']][event['sample']] = min(versions)

    def _note_reward(self, event: RewardEvent) -> None:
        draw, sample = event['draw'], event['sample']
        if event['label'] in SCORED:
            self._paid[draw][sample] = event['value']
        else:  # the answer is left out of its group
            self._oldest[draw].pop(sample, None)

    def _age(self, draw: int) -> int:
        """The age of the group's oldest token, in versions."""
        paid = self._paid.get(draw, {})
        oldest = [version for sample, version in self._oldest.get(draw, {}).items() if sample in paid]
        return self._updates - min(oldest, default=self._updates)

    def _drop(self, event: DropEvent) -> Iterator[str]:
        draw, reason, detail = event['draw'], event['reason'], event['detail']
        is_buffered = draw in self._buffered
        if reason == OVER_AGE:
            due = f'age {self._age(draw)} > {self._max_token_age}'
            if not is_buffered:
                yield f'draw {draw} is dropped ({reason}), and is not in the buffer'
            elif self._max_token_age is None or self._age(draw) <= self._max_token_age or detail != due:
                limit = self._max_token_age
                yield (
                    f'draw {draw} is dropped ({reason}) with detail={detail!r}, and its age is {self._age(draw)}, with '
                    f'{"no bound" if limit is None else f"{limit} at most"} (staleness.max_token_age)'
                )
        elif reason not in _OF_RUNNING:
            yield f'draw {draw} is dropped with reason={reason!r}, which the loop does not have'
        elif is_buffered:
            yield f'draw {draw} is dropped ({reason}), and is in the buffer'
        self._forget(draw)

    def _consume(self, event: ConsumeEvent) -> Iterator[str]:
        limit, self._batch = self._max_token_age, {}
        for draw in event['draws']:
            if limit is not None and (age := self._age(draw)) > limit:
                yield f'draw {draw} is trained at age {age}, with {limit} at most (staleness.max_token_age)'
            self._batch[draw] = dict(self._paid.get(draw, {}))
            self._forget(draw)
        self._updates = event['update']

    def _forget(self, draw: int) -> None:
        self._oldest.pop(draw, None)
        self._paid.pop(draw, None)
        self._buffered.discard(draw)

    def _disturb(self, event: FrictionEvent) -> Iterator[str]:
        draw, sample, name, before = event['draw'], event['sample'], event['friction'], event['before']
        if len(before) != len(event['after']):
            yield f'the friction {name!r} of sample {sample} of draw {draw} turns {len(before)} values into others'
        if name not in (REWARD, UNREWARDED):
            if sample in self._oldest.get(draw, {}):
                yield f'the friction {name!r} of sample {sample} of draw {draw} comes after the answer has ended'
        elif (paid := self._batch.get(draw, {}).get(sample)) is None:
            yield f'the friction {name!r} of sample {sample} of draw {draw} is of no answer of the last batch'
        else:
            if before != [paid]:
                yield f'the friction {name!r} of sample {sample} of draw {draw} has before={before}, which got {paid:g}'
            self._batch[draw][sample] = event['after'][0]
