"""The rules of groups that have ended: why one is dropped, how old a trained one may be, and what a friction changed.

log_rules.py puts events through them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from areal_jax.control.buffer import BY_REWARD
from areal_jax.control.frictions import REWARD, UNREWARDED
from areal_jax.events.schema import ConsumeEvent, DropEvent, Event, FinishEvent, FrictionEvent, RewardEvent
from areal_jax.tasks.scoring.score_call import SCORED
from areal_jax.types import NOT_GENERATED

KINDS = frozenset(('finish', 'reward', 'buffer', 'drop', 'consume', 'friction'))
_OVER_AGE = 'over_age'
_OF_RUNNING = ('verifier_failed', 'cancelled', 'engine_lost', *BY_REWARD)  # reasons of groups that are not buffered


class BatchRules:
    """Follows answers from their end into a batch, event by event.

    Args:
      max_token_age: in versions, beyond which a group is dropped; None = none is.
    """

    kinds = KINDS

    def __init__(self, max_token_age: int | None):
        self._max_token_age = max_token_age
        self._updates = 0  # batches formed
        self._oldest: collections.defaultdict[int, dict[int, int]] = collections.defaultdict(dict)  # version, by answer
        self._paid: collections.defaultdict[int, dict[int, float]] = collections.defaultdict(dict)  # likewise, rewards
        self._buffered: set[int] = set()
        self._batch: dict[int, dict[int, float]] = {}  # rewards by draw and sample, of the last batch

    def apply(self, event: Event) -> Iterator[str]:
        """Which rules the event breaks, each as a sentence."""
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
        """Versions that the weights are ahead of the oldest token of the group."""
        paid = self._paid.get(draw, {})
        oldest = [version for sample, version in self._oldest.get(draw, {}).items() if sample in paid]
        return self._updates - min(oldest, default=self._updates)

    def _drop(self, event: DropEvent) -> Iterator[str]:
        draw, reason, detail = event['draw'], event['reason'], event['detail']
        is_buffered = draw in self._buffered
        if reason == _OVER_AGE:
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
