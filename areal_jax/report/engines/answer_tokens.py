"""Which class of engines generated the tokens that updates trained on, at which policy version. Made from the events.

An answer that moves goes on behind the tokens that `move` tells. Where it changed its class otherwise, between two
turns, the log does not say behind which token, and its tokens belong to no class.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from areal_jax.events.schema import Event, FinishEvent
from areal_jax.labels import SCORED
from areal_jax.types import NOT_GENERATED, UNSCORED

_LOST = ('cancelled', 'lost', *UNSCORED)  # reasons of a finish without an answer
_Key = tuple[int, int]  # draw and sample
_Tokens = collections.Counter[tuple[str, int]]  # by class and version
UNKNOWN = ''  # class of tokens of which the log does not tell it


class BatchTokens(NamedTuple):
    """Tokens of the batch of one update."""

    update: int
    tokens: Mapping[tuple[str, int], int]  # by class and policy version


class _Path:
    """The classes that generated an answer, each from a token on."""

    def __init__(self, hardware: str):
        self.places = [(0, hardware)]  # (first token, class)
        self.moved_at: int | None = None  # tokens when it left an engine, until it has the next one
        self.is_clear = True

    def go_on(self, hardware: str) -> None:
        at, self.moved_at = self.moved_at, None
        if hardware == self.places[-1][1]:
            return
        self.is_clear = self.is_clear and at is not None
        self.places.append((at or 0, hardware))

    def split(self, event: FinishEvent) -> _Tokens:
        """The tokens of the answer by class and version."""
        found: _Tokens = collections.Counter()
        one_row = len(event.get('rows', ())) < 2
        clear = len(self.places) == 1 or (self.is_clear and one_row)
        ends = [*(first for first, _ in self.places[1:]), event['tokens'] + sum(event.get('lengths', ()))]
        begin = 0
        for version, length in zip(event['versions'], event.get('lengths', ()), strict=False):
            end = begin + length
            if version != NOT_GENERATED and not clear:
                found[UNKNOWN, version] += length
            elif version != NOT_GENERATED:
                for (first, hardware), last in zip(self.places, ends, strict=True):
                    found[hardware, version] += max(0, min(end, last) - max(begin, first))
            begin = end
        return +found


def split_batches(events: Sequence[Event], hardware: Mapping[str, str]) -> Iterator[BatchTokens]:
    """The batches in their order.

    Args:
      events: of training, without evaluations.
      hardware: class by engine.
    """
    paths: dict[_Key, _Path] = {}
    answers: dict[int, dict[int, _Tokens]] = {}  # of those that ended, by draw and sample
    for event in events:
        if event['kind'] == 'route':
            key, one = (event['draw'], event['sample']), hardware.get(event['engine'], UNKNOWN)
            if key in paths:
                paths[key].go_on(one)
            else:
                paths[key] = _Path(one)
        elif event['kind'] == 'move' and (path := paths.get(_read_key(event['request']))):
            path.moved_at = event['tokens']
        elif event['kind'] == 'finish':
            path = paths.pop((event['draw'], event['sample']), _Path(UNKNOWN))
            if event['reason'] not in _LOST:
                answers.setdefault(event['draw'], {})[event['sample']] = path.split(event)
        elif event['kind'] == 'reward' and event['label'] not in SCORED:
            answers.get(event['draw'], {}).pop(event['sample'], None)
        elif event['kind'] == 'drop':
            answers.pop(event['draw'], None)
        elif event['kind'] == 'consume':
            tokens: _Tokens = collections.Counter()
            for draw in event['draws']:
                for found in answers.pop(draw, {}).values():
                    tokens.update(found)
            yield BatchTokens(event['update'], tokens)


def _read_key(request: str) -> _Key:
    """'SEED/DRAW/SAMPLE', behind which the row of an episode may follow."""
    _, draw, sample, *_ = request.split('/')
    return int(draw), int(sample)
