"""The rules of requests: where each one is, from the engine that it is sent to until its answer has ended.

log_rules.py puts events through them. In this process a request is queued in the line after the one that tells its
engine; a server that is dead does not queue what it is sent, and the request goes on elsewhere.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from areal_jax.events.schema import ArriveEvent, Event, FinishEvent, InterruptEvent, MoveEvent, ReceiveEvent, RouteEvent
from areal_jax.lanes import evaluation_lanes, lane_group
from areal_jax.report.aggregates import DrawLedger

KINDS = frozenset(
    (
        'log', 'evaluate', 'join', 'leave', 'engine_state', 'route', 'arrive', 'move', 'receive', 'evaluation_receive',
        'interrupt', 'preempt', 'prefill', 'decode', 'finish', 'run_done',
    )
)  # fmt: skip
_FIRST_VERSION = 6  # of the log from which on these rules hold
_PROBE_DRAW = str(2**31 - 1)  # rollout/servers/keeper.py: a probe is no answer, and is sent by no route


class RequestRules:
    """Follows requests, event by event.

    Args:
      ledger: of draws, which has each event before these rules.
      in_process: whether the engines are in this process.
      single_turn: whether an answer is one request; a turn of an agent ends without an event.
      group_size: answers of a group.
      max_new_tokens: of an answer.
    """

    kinds = KINDS

    def __init__(
        self, ledger: DrawLedger, *, in_process: bool, single_turn: bool, group_size: int, max_new_tokens: int
    ):
        self._ledger, self._in_process, self._single_turn = ledger, in_process, single_turn
        self._group_size, self._max_new_tokens = group_size, max_new_tokens
        self._is_covered = self._evaluating = False
        self._engines: dict[str, str] = {}  # state by engine
        self._probed: set[str] = set()  # engines that were asked to answer a probe since they served last
        self._due: dict[str, str] = {}  # engine by request that was sent there and is not queued
        self._at: dict[str, str] = {}  # engine by request
        self._queued: set[tuple[str, str]] = set()  # (engine, request) since the start of the program
        self._attempts: dict[str, int] = {}  # engines that have failed a request
        self._kept: dict[str, int] = {}  # tokens of an answer that were received when it moved
        self._brought: collections.Counter[str] = collections.Counter()  # tokens of the calls of a request
        self._moved: set[str] = set()  # requests whose tokens are not those of their calls alone
        self._answers: dict[tuple[int, int], str] = {}  # request by draw and sample, of training
        self._ended: set[tuple[int, int]] = set()  # draw and sample

    def apply(self, event: Event) -> Iterator[str]:
        """Which rules the event breaks, each as a sentence."""
        if event['kind'] == 'log':
            self._start_anew(event['version'])
        elif not self._is_covered:
            return
        elif event['kind'] == 'run_done':
            if self._due and self._in_process:
                yield from self._refuse_unqueued()
        elif event['kind'] == 'decode':
            yield from self._require_there(event['engine'], event['slots'], 'decodes')
        elif event['kind'] == 'prefill':
            yield from self._require_there(event['engine'], event['requests'], 'computes the KV cache of')
        elif event['kind'] == 'preempt':
            yield from self._require_there(event['engine'], [event['request']], 'takes the slot of')
        elif event['kind'] == 'route':
            yield from self._route(event)
        elif event['kind'] == 'arrive':
            yield from self._arrive(event)
        elif event['kind'] == 'finish':
            yield from self._finish(event)
        elif event['kind'] == 'interrupt':
            yield from self._interrupt(event)
        elif event['kind'] == 'move':
            yield from self._move(event)
        elif event['kind'] == 'receive':
            yield from self._receive(event)
        elif event['kind'] == 'evaluation_receive':
            if not 0 <= event['tokens'] <= self._max_new_tokens:
                yield self._describe_tokens(f'a call to {event["engine"]} for {event["request"]}', event['tokens'])
        elif event['kind'] == 'evaluate':
            self._evaluating = event['mode'] == 'start'
            self._at = {request: self._at[request] for request in self._answers.values() if request in self._at}
        else:
            self._follow_engine(event)

    def _start_anew(self, version: int) -> None:
        """What was open is asked for again; what calls brought until the checkpoint stays with the answers."""
        self._is_covered, self._evaluating = version >= _FIRST_VERSION, False
        self._engines.clear()
        self._probed.clear()
        self._due.clear()
        self._at.clear()
        self._queued.clear()
        self._attempts.clear()

    def _follow_engine(self, event: Event) -> None:
        if event['kind'] == 'join':
            self._engines.setdefault(event['engine'], 'serving' if self._in_process else 'joined')
        elif event['kind'] == 'leave':
            self._engines.pop(event['engine'], None)
        elif event['kind'] == 'engine_state':
            self._engines[event['engine']] = event['state']
            if event['state'] == 'probing':
                self._probed.add(event['engine'])
            elif event['state'] == 'serving':
                self._probed.discard(event['engine'])

    # A request, in the order of its events.

    def _route(self, event: RouteEvent) -> Iterator[str]:
        request, engine, answer = event['request'], event['engine'], (event['draw'], event['sample'])
        if self._in_process:
            yield from self._refuse_unqueued()
        named = request.split('/')[1:3]
        if all(part.isdecimal() for part in named) and named != [*map(str, answer)]:
            yield f'{request} goes to {engine} as sample {answer[1]} of draw {answer[0]}'
        if (state := self._engines.get(engine)) != 'serving':
            yield f'{request} goes to {engine}, which {f"is {state}" if state else "is not in the pool"}'
        if self._single_turn and request in self._at:
            yield f'{request} goes to {engine}, and {self._at[request]} has it'
        if not self._evaluating:
            yield from self._require_running(answer, 'is asked for')
            self._answers[answer] = request
        self._due[request] = self._at[request] = engine

    def _arrive(self, event: ArriveEvent) -> Iterator[str]:
        request, lane = event['request'], event['lane'] or ''
        self._queued.add((lane, request))
        if _is_probe(request):
            if lane not in self._probed:
                yield f'{lane} queues the probe {request}, and is not being probed'
            return
        engine = self._due.pop(request, None)
        if engine is None:
            where = self._at.get(request)
            yield f'{lane} queues {request}, which {f"was queued on {where} before" if where else "no engine was sent"}'
        elif engine != lane:
            yield f'{lane} queues {request}, which was sent to {engine}'

    def _refuse_unqueued(self) -> Iterator[str]:
        for request, engine in self._due.items():
            yield f'{request} was sent to {engine}, which has not queued it'
        self._due.clear()

    def _require_there(self, engine: str, requests: list[str] | list[str | None], does: str) -> Iterator[str]:
        """Of engines in this process; a request that has ended may still be in a slot of the dispatch under way."""
        if not (self._in_process and self._single_turn):
            return
        at = self._at
        for request in requests:
            if request is not None and at.get(request, engine) != engine:
                yield f'{engine} {does} {request}, and {at[request]} has it'

    def _interrupt(self, event: InterruptEvent) -> Iterator[str]:
        engine = event['engine']
        if not self._single_turn or lane_group(engine) == lane_group(evaluation_lanes(0).engine):
            return
        for request in event['requests']:
            if self._at.get(request) != engine and not _is_probe(request):
                yield f'{engine} interrupts {request}, and {self._at.get(request, "no engine")} has it'

    def _move(self, event: MoveEvent) -> Iterator[str]:
        request, left, attempt = event['request'], event['from_engine'], event['attempt']
        before = self._attempts.get(request, 0)
        if self._at.pop(request, None) != left:
            yield f'{request} moves away from {left}, which does not have it'
        if event['lane'] != left:
            yield f'{request} moves away from {left}, in the lane {event["lane"]}'
        if not before <= attempt <= before + (not self._in_process):
            yield f'{request} moves with attempt={attempt}, after {before} engines had failed it'
        kept = self._kept.get(request, 0)
        if self._single_turn and not kept <= event['tokens'] <= self._max_new_tokens:
            yield (
                f'{request} moves with {event["tokens"]} tokens, had {kept} before and gets {self._max_new_tokens} at '
                'most (rollout.max_new_tokens)'
            )
        self._due.pop(request, None)
        self._attempts[request], self._kept[request] = attempt, event['tokens']
        self._moved.add(request)

    def _receive(self, event: ReceiveEvent) -> Iterator[str]:
        request, engine, tokens = event['request'], event['engine'], event['tokens']
        if (engine, request) not in self._queued:
            yield f'a call to {engine} for {request} has ended, and the engine did not queue it'
        if not 0 <= tokens <= self._max_new_tokens and not _is_probe(request):
            yield self._describe_tokens(f'a call to {engine} for {request}', tokens)
        self._brought[request] += tokens

    def _describe_tokens(self, call: str, tokens: int) -> str:
        return f'{call} brings {tokens} tokens, with {self._max_new_tokens} at most (rollout.max_new_tokens)'

    def _finish(self, event: FinishEvent) -> Iterator[str]:
        answer, tokens = (event['draw'], event['sample']), event['tokens']
        yield from self._require_running(answer, 'is finished')
        request = self._answers.pop(answer, '')
        self._ended.add(answer)
        is_whole = request not in self._moved and event['reason'] in ('stop', 'length')
        if self._due.pop(request, None) is not None and is_whole:
            yield f'sample {answer[1]} of draw {answer[0]} is finished, and no engine has queued its request'
        brought, is_of_calls = self._brought.pop(request, None), self._single_turn and is_whole
        if brought is not None and is_of_calls and brought != tokens:
            yield f'sample {answer[1]} of draw {answer[0]} has {tokens} tokens, and its calls brought {brought}'
        self._at.pop(request, None)
        self._attempts.pop(request, None)
        self._kept.pop(request, None)
        self._moved.discard(request)

    def _require_running(self, answer: tuple[int, int], does: str) -> Iterator[str]:
        name, state = f'sample {answer[1]} of draw {answer[0]}', self._ledger.states.get(answer[0])
        if not 0 <= answer[1] < self._group_size:
            yield f'{name} {does}, and a group has {self._group_size} answers (rollout.group_size)'
        elif state != 'running':
            yield f'{name} {does}, and the draw is {state or "unknown"}'
        elif answer in self._ended and does == 'is asked for':
            yield f'{name} {does}, and was finished before'


def _is_probe(request: str) -> bool:
    return request.split('/')[1:2] == [_PROBE_DRAW]
