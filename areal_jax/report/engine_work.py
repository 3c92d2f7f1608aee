"""What the engines did: tokens generated, prefilled and rebuilt with their seconds, pauses of requests, preemptions.

Made from the events of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import cast

from areal_jax.events.schema import Event, PrefillEvent
from areal_jax.report import report_keys as contents
from areal_jax.report.event_log import event_intervals, lane_intervals
from areal_jax.telemetry.progress import format_number

FIRST_WITH_REBUILDS = 4  # version of the log that tells rebuilt tokens from prompts


class RequestPauses:
    """Seconds from a swap of weights to the next token of each request that it interrupted, event by event.

    A request that is interrupted again before its next token has one pause, from the first swap on.
    """

    def __init__(self, since: Mapping[str, float] | None = None):
        self.since = dict(since or {})  # clock seconds of the swap, by request

    def apply(self, event: Event) -> list[float]:
        """The pauses that end with this event."""
        if event['kind'] == 'interrupt':
            for request in event['requests']:
                self.since.setdefault(request, event['time'])
        elif event['kind'] == 'decode' and self.since:
            resumed = [request for request in event['slots'] if request in self.since]
            return [event['time'] - self.since.pop(request) for request in resumed if request]
        elif event['kind'] == 'receive':
            self.since.pop(event['request'], None)  # how long it paused is known to the server alone
        return []


def request_pauses(events: Sequence[Event]) -> contents.MedianMax:
    """Median and longest pause of a request for new weights."""
    found = RequestPauses()
    pauses = [pause for event in events for pause in found.apply(event)]
    return {'median': median(pauses) if pauses else None, 'max': max(pauses, default=None)}


def engine_work(events: Sequence[Event]) -> contents.EngineWork:
    """Tokens and lane seconds of all engines; a prefill of both kinds is split by their tokens."""
    first, again = contents.Work(tokens=0, seconds=0.0), contents.Work(tokens=0, seconds=0.0)
    for event, interval in event_intervals(events, 'prefill'):
        event, seconds = cast(PrefillEvent, event), interval.end - interval.start
        rebuilt = event.get('rebuilt', 0)
        share = rebuilt / event['tokens'] if event['tokens'] else 0.0
        first['tokens'] += event['tokens'] - rebuilt
        again['tokens'] += rebuilt
        first['seconds'] += seconds * (1 - share)
        again['seconds'] += seconds * share
    known = any(event['kind'] == 'log' and event['version'] >= FIRST_WITH_REBUILDS for event in events)
    decoding = [interval for interval in lane_intervals(events) if interval.work == 'decode']
    generated = contents.Work(
        tokens=generated_tokens(events), seconds=sum(interval.end - interval.start for interval in decoding)
    )
    return {'generated': generated, 'prefilled': first, 'rebuilt': again if known else None}


def generated_tokens(events: Sequence[Event]) -> int:
    """Decoded in this process, or received from servers."""
    return sum(event['tokens'] for event in events if event['kind'] in ('decode', 'receive'))


def attention_positions(events: Sequence[Event]) -> contents.AttentionPositions | None:
    """Positions that attention of decoding needed and read, of one layer; None where the log has none."""
    counted = [event for event in events if event['kind'] == 'decode' and 'positions_read' in event]
    if not counted:
        return None
    return {
        'live': sum(event['positions'] for event in counted),
        'read': sum(event['positions_read'] for event in counted),
    }


def preemptions(events: Sequence[Event]) -> contents.Preemptions | None:
    """None without any."""
    found = [event['tokens'] for event in events if event['kind'] == 'preempt']
    return {'requests': len(found), 'tokens': sum(found)} if found else None


def work_rows(work: contents.EngineWork) -> list[tuple[str, str, str]]:
    """Of the page's table: what, tokens, seconds."""
    kinds = {
        'generated': work['generated'],
        'prompts prefilled': work['prefilled'],
        'rebuilt after an interruption or a preemption': work['rebuilt'],
    }
    seconds = lambda kind: format_number(kind['seconds'] or None)  # None: unknown for servers
    return [(name, str(kind['tokens']), seconds(kind)) for name, kind in kinds.items() if kind]


def describe_attention(positions: contents.AttentionPositions | None) -> str:
    """'1.21 of the positions needed'; '-' where none was counted."""
    if positions is None or not positions['live']:
        return '-'
    return f'{positions["read"] / positions["live"]:.2f} of the positions needed'
