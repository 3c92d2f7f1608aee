"""Summary of the agents of a run: how episodes ended, why rows began, and how long tools took."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import TypedDict, cast

from areal_jax.events.schema import Event, FinishEvent
from areal_jax.report.event_log import lane_intervals
from areal_jax.report.pages.blocks import Table
from areal_jax.telemetry.progress import format_number, format_percent

_CACHED = 'the others were prefilled; room for the open conversations: rollout.cache_tokens'
_COUNTED = {  # other names need no explanation: 'overridden/temperature'
    'tool_calls': 'calls of tools in answers',
    'unparsed': 'broken calls, which stayed text',
    'hidden': 'calls after the first, where one was wanted',
    'malformed': 'requests that were refused for their body',
    'refused': 'requests that no turn was sampled for',
    'retried': 'retries, answered from the record',
    'undelivered': 'turns that no program got, taken out',
}


class ToolSummary(TypedDict):
    calls: int
    median_seconds: float
    max_seconds: float


class AgentSummary(TypedDict):
    """Summary of the agent episodes that have ended."""

    ended: dict[str, int]  # by label
    turns: float  # of an episode, mean
    rows: float  # of an episode, mean
    forks: dict[str, int]  # rows beyond the first one of an episode, by reason
    tools: dict[str, ToolSummary]  # by name
    counts: dict[str, int]  # summed over the episodes, by name (_COUNTED)
    cached_prompts: float | None  # share of the prompt tokens whose KV was cached; None if no prefill was logged


def summarize_agents(events: Sequence[Event]) -> AgentSummary | None:
    """Summarizes the episodes of agents; None if no episode was an agent's."""
    ends = [cast(FinishEvent, event) for event in events if event['kind'] == 'finish' and 'turns' in event]
    if not ends:
        return None
    forks = collections.Counter(reason for event in ends for reason in event.get('forks', ()))
    return {
        'ended': dict(sorted(collections.Counter(event['reason'] for event in ends).items())),
        'turns': mean(event['turns'] for event in ends),
        'rows': mean(len(event.get('rows', (0,))) for event in ends),
        'forks': dict(sorted(forks.items())),
        'tools': _summarize_tools(events),
        'counts': _sum_counts(ends),
        'cached_prompts': _share_cached(events),
    }


def tabulate_agents(summary: AgentSummary | None) -> Table:
    """Returns the page's table; empty without agents."""
    return Table(('agents', 'number', ''), _rows(summary) if summary else [])


def _rows(summary: AgentSummary) -> list[tuple[str, ...]]:
    episodes, forked = sum(summary['ended'].values()), sum(summary['forks'].values())
    means = f'{format_number(summary["turns"])} turns and {format_number(summary["rows"])} rows, mean'
    cached = summary['cached_prompts']
    return [
        ('episodes', str(episodes), means),
        *([] if cached is None else [('tokens of prompts in the cache', format_percent(cached), _CACHED)]),
        *_share_rows('ended by', summary['ended'], episodes),
        *_share_rows('rows begun for', summary['forks'], forked),
        *(
            (
                f'calls of {name}',
                str(tool['calls']),
                f'{format_number(tool["median_seconds"])} / {format_number(tool["max_seconds"])} s, median / max',
            )
            for name, tool in summary['tools'].items()
        ),
        *((_COUNTED.get(name, name), str(count), '') for name, count in summary['counts'].items()),
    ]


def _share_cached(events: Sequence[Event]) -> float | None:
    prefills = [event for event in events if event['kind'] == 'prefill']
    found = sum(sum(event.get('kept', ())) for event in prefills)
    computed = sum(event['tokens'] - event.get('rebuilt', 0) for event in prefills)
    return found / (found + computed) if prefills else None


def _sum_counts(ends: Sequence[FinishEvent]) -> dict[str, int]:
    found = collections.Counter[str]()
    for event in ends:
        found.update({cast(str, name): cast(int, count) for name, count in event.get('counts', ())})
    return dict(sorted(found.items()))


def _share_rows(what: str, counts: Mapping[str, int], total: int) -> list[tuple[str, ...]]:
    return [(f'{what} {name}', str(count), format_percent(count / total)) for name, count in counts.items()]


def _summarize_tools(events: Sequence[Event]) -> dict[str, ToolSummary]:
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    for interval in lane_intervals(events):
        if interval.work == 'tool':
            seconds[cast(str, interval.detail['tool'])].append(interval.end - interval.start)
    return {
        name: {'calls': len(taken), 'median_seconds': median(taken), 'max_seconds': max(taken)}
        for name, taken in sorted(seconds.items())
    }
