"""The rules of requests: which engine has each request, from its routing to the end of its answer.

log_rules.py applies them. An engine in this process queues a request in the next line of the log; a dead server does
not queue the requests that it is sent, and they move to another server.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Generator, Iterator

from areal_jax.control.buffer import BY_REWARD, OVER_AGE, describe_drop
from areal_jax.events.schema import (
    ArriveEvent,
    BufferEvent,
    DropEvent,
    Event,
    FinishEvent,
    InterruptEvent,
    MoveEvent,
    ReceiveEvent,
    RewardEvent,
    RouteEvent,
    RunDoneEvent,
    RunStartEvent,
)
from areal_jax.lanes import REWARD, evaluation_lanes, lane_group
from areal_jax.report.aggregates import DrawLedger
from areal_jax.tasks.scoring.score_call import MEASURED, SCORED, Score, check_score, to_reward
from areal_jax.types import UNSCORED

_FIRST_VERSION = 6  # of the log from which on these rules hold
_PROBE_DRAW = str(2**31 - 1)  # rollout/servers/keeper.py: a probe has no answer and no `route` event


class RequestRules:
    """Follows requests, event by event.

    Args:
      ledger: the ledger of draws; gets each event before these rules.
      in_process: whether the engines are in this process.
      single_turn: whether an answer is one request; a turn of an agent ends without an event.
      group_size: answers of a group.
      max_new_tokens: the bound on the tokens of an answer.
    """

    def __init__(
        self, ledger: DrawLedger, *, in_process: bool, single_turn: bool, group_size: int, max_new_tokens: int
    ):
        self._ledger, self._in_process, self._single_turn = ledger, in_process, single_turn
        self._group_size, self._max_new_tokens = group_size, max_new_tokens
        self._is_covered = self._evaluating = False
        self._engines: dict[str, str] = {}  # state by engine
        self._probed: set[str] = set()  # engines that were sent a probe since they last served
        self._due: dict[str, str] = {}  # by request that was sent but is not queued yet: the engine
        self._at: dict[str, str] = {}  # engine by request
        self._queued: set[tuple[str, str]] = set()  # (engine, request) since the start of the program
        self._attempts: dict[str, int] = {}  # by request: engines that have failed it
        self._kept: dict[str, int] = {}  # tokens of an answer that were received when it moved
        self._brought: collections.Counter[str] = collections.Counter()  # tokens of the calls of a request
        self._moved: set[str] = set()  # requests whose tokens come from more than their calls
        self._answers: dict[tuple[int, int], str] = {}  # request by draw and sample, of training
        self._ended: set[tuple[int, int]] = set()  # draw and sample

    def apply(self, event: Event) -> Iterator[str]:
        """Yields a sentence for each rule that the event breaks."""
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
        """Forgets open requests, which are sent again; tokens that calls brought before the checkpoint still count."""
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
        """Engines in this process only. An ended request may still be in a slot of the dispatch under way."""
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


# The rules of rewards: each finished answer has one, it is what its verifier said, and the buffer holds no other.
#
# log_rules.py applies them. An attempt at verification is a call of a worker process, or the start of a worker that
# died before it could be called.


_REWARDS_VERSION = 8  # of the log; since then `buffer` has the rewards
_UNSCORED = ('cancelled', 'lost', *UNSCORED)  # reasons of answers that no verifier sees
_Reply = tuple[int, float, str]  # attempt, reward, label
_FAILED = ('timeout', 'crash', 'sandbox', 'error')  # labels of attempts without a reward
_REASONS = ('stop', 'length', 'cancelled', 'lost')  # why an answer of one request ended


class RewardRules:
    """Follows answers from their end to the buffer, event by event.

    Args:
      group_size: answers of a group.
      is_inline: whether the scorer runs in this process, where it gets one attempt.
      single_turn: whether an answer is one request; other workflows may have more reasons for an end.
    """

    def __init__(self, group_size: int, *, is_inline: bool, single_turn: bool):
        self._group_size, self._is_inline, self._single_turn = group_size, is_inline, single_turn
        self._evaluating = False
        self._finished: dict[int, dict[int, str]] = {}  # reason, by draw and sample
        self._rewards: collections.defaultdict[int, dict[int, RewardEvent]] = collections.defaultdict(dict)
        self._checked: dict[tuple[int, int], set[str]] = {}  # kinds of events of a verdict, by draw and sample
        self._asked: dict[int, tuple[int, int, bool]] = {}  # by run: draw, attempt, whether a worker starts
        self._attempts: collections.Counter[tuple[int, int]] = collections.Counter()  # not yet used, by draw and number
        self._has_attempts = False  # runs of this start name the answer that they verify
        self._replies: collections.defaultdict[int, list[_Reply]] = collections.defaultdict(list)  # by draw
        self._has_rewards = False  # `buffer` has rewards in this version of the log
        self._has_replies = False  # this start logs the replies of worker processes (real clock)

    def apply(self, event: Event) -> Iterator[str]:
        """Yields a sentence for each rule that the event breaks."""
        if event['kind'] == 'log':
            self._evaluating = self._has_replies = self._has_attempts = False
            self._has_rewards = event['version'] >= _REWARDS_VERSION
            self._asked.clear()
            self._replies.clear()
            self._attempts.clear()
        elif event['kind'] == 'evaluate':
            self._evaluating = event['mode'] == 'start'
        elif event['kind'] == 'finish':
            yield from self._finish(event)
        elif event['kind'] == 'run_start':
            if event['lane'] == REWARD and 'draw' in event and not self._evaluating:
                self._ask(event)
        elif event['kind'] == 'run_done':
            if event['run'] in self._asked:
                self._note_reply(event)
        elif event['kind'] == 'reward':
            yield from self._reward(event)
        elif event['kind'] == 'check':
            yield from self._note_of_verdict(event['kind'], event['draw'], event['sample'])
            for name in ('cpu_s', 'wall_s', 'waiting'):
                if event[name] < 0:
                    yield f'the check of sample {event["sample"]} of draw {event["draw"]} has {name}={event[name]:g}'
        elif event['kind'] == 'audit':
            yield from self._note_of_verdict(event['kind'], event['draw'], event['sample'])
        elif event['kind'] == 'buffer':
            yield from self._buffer(event)
        elif event['kind'] == 'drop' and event['reason'] != OVER_AGE:
            yield from self._drop(event)

    def _ask(self, event: RunStartEvent) -> None:
        draw, attempt, starts = event['draw'], event.get('attempt', 1), 'worker' in event
        self._asked[event['run']] = draw, attempt, starts
        self._has_attempts = True
        if not starts:
            self._attempts[draw, attempt] += 1

    def _note_reply(self, event: RunDoneEvent) -> None:
        """Notes a verifier's reply. A replacement worker that dies while it starts ends the attempt as well."""
        draw, attempt, starts = self._asked.pop(event['run'])
        if starts and 'failure' in event:
            self._attempts[draw, attempt] += 1
        if 'failure' in event or ('reply' in event and not starts):
            self._has_replies = True
            self._replies[draw].append((attempt, *_read_reply(event)))

    def _finish(self, event: FinishEvent) -> Iterator[str]:
        draw, sample, lengths = event['draw'], event['sample'], event.get('lengths')
        if sample in self._finished.setdefault(draw, {}):
            yield f'sample {sample} of draw {draw} is finished a second time'
        if lengths is not None and (len(lengths) != len(event['versions']) or sum(lengths) != event['tokens']):
            yield (
                f'sample {sample} of draw {draw} has {event["tokens"]} tokens, and {lengths} of versions '
                f'{event["versions"]}'
            )
        if (self._single_turn and event['reason'] not in _REASONS) or event['tokens'] < 0:
            yield f'sample {sample} of draw {draw} has tokens={event["tokens"]} and reason={event["reason"]!r}'
        self._finished[draw][sample] = event['reason']

    def _reward(self, event: RewardEvent) -> Iterator[str]:
        draw, sample, value = event['draw'], event['sample'], event['value']
        name, reason = f'sample {sample} of draw {draw}', self._finished.get(draw, {}).get(sample)
        if reason is None:
            yield f'{name} is scored before it was finished'
        if reason in _UNSCORED:
            yield f'{name} is scored, and it was {reason}'
        if sample in self._rewards[draw]:
            yield f'{name} is scored a second time'
        if event['label'] not in (*SCORED, *_FAILED):
            yield f'{name} has the label {event["label"]!r}, which no verifier gives'
        if event['label'] != 'ok' and value != 0:
            yield f'{name} has the reward {value:g} with the label {event["label"]!r}, which stands for 0'
        yield from self._take_attempts(event, name)
        self._rewards[draw][sample] = event
        if self._has_replies:
            said = self._replies.get(draw, [])
            reply = event['attempts'], value, event['label']
            if reply in said:
                said.remove(reply)
            else:
                replies = ', '.join(f'{value:g} ({label})' for _, value, label in said) or 'nothing more'
                yield f'{name} has the reward {value:g} ({event["label"]}), and the verifier said {replies}'

    def _take_attempts(self, event: RewardEvent, name: str) -> Iterator[str]:
        """Checks that each attempt was asked for. Its bound is not checked: the config of a later start may differ."""
        attempts = event['attempts']
        if attempts < 1 or (attempts > 1 and self._is_inline and not self._has_attempts):
            most = ' (task.verifier=inline)' if self._is_inline else ' or more'
            yield f'{name} has attempts={attempts}, and a verdict takes 1{most}'
        elif self._has_attempts:
            for number in range(1, attempts + 1):
                if not self._attempts[event['draw'], number]:
                    yield f'{name} has attempts={attempts}, and attempt {number} was not asked for'
                    return
                self._attempts[event['draw'], number] -= 1

    def _note_of_verdict(self, kind: str, draw: int, sample: int) -> Iterator[str]:
        told = self._checked.setdefault((draw, sample), set())
        if sample not in self._rewards.get(draw, {}) or kind in told:
            again = 'a second time' if kind in told else 'before its reward'
            yield f'the {kind} of sample {sample} of draw {draw} is told {again}'
        told.add(kind)

    def _buffer(self, event: BufferEvent) -> Iterator[str]:
        draw = event['draw']
        scored, failed = yield from self._close(draw)
        if not scored:
            yield f'draw {draw} enters the buffer without a reward'
        if event['partial'] != bool(failed):
            yield f'draw {draw} enters the buffer with partial={event["partial"]}, and {failed} answers have no reward'
        if event.get('rewards', None if self._has_rewards else scored) != scored:
            yield f'draw {draw} enters the buffer with the rewards {event.get("rewards")}, and its answers got {scored}'

    def _drop(self, event: DropEvent) -> Iterator[str]:
        draw, reason = event['draw'], event['reason']
        reasons = set(self._finished.get(draw, {}).values())
        scored, _ = yield from self._close(draw)
        if reason in BY_REWARD and event['detail'] != describe_drop(reason, scored):
            yield f'draw {draw} is dropped ({reason}), {event["detail"]}, and its answers got {scored}'
        elif reason in ('verifier_failed', 'cancelled') and scored:
            yield f'draw {draw} is dropped ({reason}), and its answers got {scored}'
        elif (reason == 'engine_lost') != ('lost' in reasons):
            yield f'draw {draw} is dropped ({reason}), and its answers ended by {sorted(reasons)}'

    def _close(self, draw: int) -> Generator[str, None, tuple[list[float], int]]:
        """Returns the rewards in order of samples, and the number of answers without one."""
        finished, rewards = self._finished.pop(draw, {}), self._rewards.pop(draw, {})
        self._replies.pop(draw, None)
        for sample in range(self._group_size):
            self._checked.pop((draw, sample), None)
            if sample not in finished:
                yield f'the group of draw {draw} is complete, and its sample {sample} was not finished'
            elif sample not in rewards and finished[sample] not in _UNSCORED:
                yield f'the group of draw {draw} is complete, and its sample {sample} was not scored'
        scored = [rewards[sample]['value'] for sample in sorted(rewards) if rewards[sample]['label'] in SCORED]
        return scored, self._group_size - len(scored)


def _read_reply(event: RunDoneEvent) -> tuple[float, str]:
    """Reward and label of a call of a worker process, read as in tasks/scoring/verifier.py."""
    if 'failure' in event:
        return 0.0, 'timeout' if event['failure'] == 'TimeoutError' else 'crash'
    try:
        reply = json.loads(event['reply'])
        if 'fault' in reply:
            return 0.0, 'sandbox'
        measured = {name: reply[name] for name in MEASURED if name in reply}
        reward = to_reward(reply['reward'])
        score = check_score(Score(reward, reply.get('label', 'ok'), **measured), reward)
    except (KeyError, TypeError, ValueError, OverflowError):  # `error` instead of a reward, or an invalid one
        return 0.0, 'error'
    return float(score), score.label
