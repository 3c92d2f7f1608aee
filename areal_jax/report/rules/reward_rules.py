"""The rules of rewards: each finished answer has one, it is what its verifier said, and the buffer holds no other.

log_rules.py puts events through them. An attempt at verification is a call of a worker process, or the start of one
that died before it could be called.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Generator, Iterator

from areal_jax.control.buffer import BY_REWARD, describe_drop
from areal_jax.events.schema import BufferEvent, DropEvent, Event, FinishEvent, RewardEvent, RunDoneEvent, RunStartEvent
from areal_jax.lanes import REWARD
from areal_jax.tasks.scoring.score_call import MEASURED, SCORED, Score, check_score, to_reward
from areal_jax.types import UNSCORED

_REWARDS_VERSION = 8  # of the log from which on `buffer` has the rewards
_UNSCORED = ('cancelled', 'lost', *UNSCORED)  # reasons of answers that no verifier sees
_Reply = tuple[int, float, str]  # attempt, reward, label
KINDS = frozenset(
    ('log', 'evaluate', 'finish', 'run_start', 'run_done', 'reward', 'check', 'audit', 'buffer', 'drop')
)  # fmt: skip
_FAILED = ('timeout', 'crash', 'sandbox', 'error')  # labels of attempts without a reward
_REASONS = ('stop', 'length', 'cancelled', 'lost')  # why an answer of one request ended


class RewardRules:
    """Follows answers from their end to the buffer, event by event.

    Args:
      group_size: answers of a group.
      is_inline: whether the scorer runs in this process, which takes one attempt.
      single_turn: whether an answer is one request; own workflows may have more reasons why one ended.
    """

    kinds = KINDS

    def __init__(self, group_size: int, *, is_inline: bool, single_turn: bool):
        self._group_size, self._is_inline, self._single_turn = group_size, is_inline, single_turn
        self._evaluating = False
        self._finished: dict[int, dict[int, str]] = {}  # reason by draw and sample, as the next
        self._rewards: collections.defaultdict[int, dict[int, RewardEvent]] = collections.defaultdict(dict)
        self._checked: dict[tuple[int, int], set[str]] = {}  # kinds of what was told of a verdict, by draw and sample
        self._asked: dict[int, tuple[int, int, bool]] = {}  # draw, attempt, and whether a worker starts, by run
        self._attempts: collections.Counter[tuple[int, int]] = collections.Counter()  # not yet used, by draw and number
        self._has_attempts = False  # of this start: its runs tell of which answer they are an attempt
        self._replies: collections.defaultdict[int, list[_Reply]] = collections.defaultdict(list)  # by draw
        self._has_rewards = False  # `buffer` has, by the version of the log
        self._has_replies = False  # of this start: the real clock logs what worker processes say

    def apply(self, event: Event) -> Iterator[str]:
        """Which rules the event breaks, each as a sentence."""
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
        elif event['kind'] == 'drop' and event['reason'] != 'over_age':
            yield from self._drop(event)

    def _ask(self, event: RunStartEvent) -> None:
        draw, attempt, starts = event['draw'], event.get('attempt', 1), 'worker' in event
        self._asked[event['run']] = draw, attempt, starts
        self._has_attempts = True
        if not starts:
            self._attempts[draw, attempt] += 1

    def _note_reply(self, event: RunDoneEvent) -> None:
        """A worker that dies while it starts, in place of one that died before, ends the attempt as well."""
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
        """Each attempt of an answer was asked for; of how many there may be, the config of a later start may differ."""
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
        """Returns the rewards by sample, and how many answers have none."""
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
    """Reward and label of the attempt that a call of a worker process was; as tasks/scoring/verifier.py reads it."""
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
