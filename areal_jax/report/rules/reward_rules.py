"""The rules of rewards: each finished answer has one, it is what its verifier said, and the buffer holds no other.

log_rules.py puts every event through them.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Generator, Iterator

from areal_jax.control.group_filter import BY_REWARD, describe_drop
from areal_jax.events.episode_events import FinishEvent, RewardEvent
from areal_jax.events.schema import BufferEvent, DropEvent, Event, RunDoneEvent
from areal_jax.lanes import REWARD
from areal_jax.tasks.scoring.score_call import SCORED, Score, to_reward
from areal_jax.types import UNSCORED

_REWARDS_VERSION = 8  # of the log from which on `buffer` has the rewards
_UNSCORED = ('cancelled', 'lost', *UNSCORED)  # reasons of answers that no verifier sees
_Reply = tuple[int, float, str]  # attempt, reward, label


class RewardRules:
    """Follows answers from their end to the buffer, event by event.

    Args:
      group_size: answers of a group.
    """

    def __init__(self, group_size: int):
        self._group_size = group_size
        self._evaluating = False
        self._finished: dict[int, dict[int, str]] = {}  # reason by draw and sample, as the next
        self._rewards: collections.defaultdict[int, dict[int, RewardEvent]] = collections.defaultdict(dict)
        self._asked: dict[int, tuple[int, int]] = {}  # draw and attempt by run
        self._replies: collections.defaultdict[int, list[_Reply]] = collections.defaultdict(list)  # by draw
        self._has_rewards = False  # `buffer` has, by the version of the log
        self._has_replies = False  # of this start: the real clock logs what worker processes say

    def apply(self, event: Event) -> Iterator[str]:
        """Which rules the event breaks, each as a sentence."""
        if event['kind'] == 'log':
            self._evaluating = self._has_replies = False
            self._has_rewards = event['version'] >= _REWARDS_VERSION
            self._asked.clear()
            self._replies.clear()
        elif event['kind'] == 'evaluate':
            self._evaluating = event['mode'] == 'start'
        elif event['kind'] == 'finish':
            yield from self._finish(event)
        elif event['kind'] == 'run_start':
            if event['lane'] == REWARD and 'draw' in event and 'worker' not in event and not self._evaluating:
                self._asked[event['run']] = event['draw'], event.get('attempt', 1)
        elif event['kind'] == 'run_done':
            if event['run'] in self._asked and ('reply' in event or 'failure' in event):
                draw, attempt = self._asked.pop(event['run'])
                self._has_replies = True
                self._replies[draw].append((attempt, *_read_reply(event)))
        elif event['kind'] == 'reward':
            yield from self._reward(event)
        elif event['kind'] == 'buffer':
            yield from self._buffer(event)
        elif event['kind'] == 'drop' and event['reason'] != 'over_age':
            yield from self._drop(event)

    def _finish(self, event: FinishEvent) -> Iterator[str]:
        draw, sample, lengths = event['draw'], event['sample'], event.get('lengths')
        if sample in self._finished.setdefault(draw, {}):
            yield f'sample {sample} of draw {draw} is finished a second time'
        if lengths is not None and (len(lengths) != len(event['versions']) or sum(lengths) != event['tokens']):
            yield (
                f'sample {sample} of draw {draw} has {event["tokens"]} tokens, and {lengths} of versions '
                f'{event["versions"]}'
            )
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
        if event['label'] != 'ok' and value != 0:
            yield f'{name} has the reward {value:g} with the label {event["label"]!r}, which stands for 0'
        self._rewards[draw][sample] = event
        if self._has_replies:
            said = self._replies.get(draw, [])
            reply = event['attempts'], value, event['label']
            if reply in said:
                said.remove(reply)
            else:
                replies = ', '.join(f'{value:g} ({label})' for _, value, label in said) or 'nothing more'
                yield f'{name} has the reward {value:g} ({event["label"]}), and the verifier said {replies}'

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
        score = Score(to_reward(reply['reward']), reply.get('label', 'ok'))
    except (KeyError, TypeError, ValueError, OverflowError):  # `error` instead of a reward, or an invalid one
        return 0.0, 'error'
    return float(score), score.label
