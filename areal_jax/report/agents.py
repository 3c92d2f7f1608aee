"""Summary of the agents of a run: how episodes ended, why rows began, and how long tools took."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple, TypedDict, cast

from areal_jax.events.schema import Event, FinishEvent
from areal_jax.labels import BY_TOOL, CALLED, ERRORS, WELL_FORMED
from areal_jax.report.event_log import LaneInterval, lane_intervals
from areal_jax.report.pages.blocks import Table
from areal_jax.telemetry.progress import format_number, format_percent

_MOST_TOOLS, _OTHERS = 12, 'other names'
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
    """A tool: its runs by `call_tool`, and its calls in answers."""

    calls: int  # that ran; a program runs its tools itself
    median_seconds: float | None  # of a run; None without any
    max_seconds: float | None
    errors: int  # runs whose result began with 'error:'
    written: int  # calls in answers, of a tool that the agent offered
    well_formed: int  # of them, whose arguments fit its definition
    episodes: int  # that used it, with a reward
    reward: float | None  # mean over these episodes


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
    counts = _sum_counts(ends)
    forks = collections.Counter(reason for event in ends for reason in event.get('forks', ()))
    return {
        'ended': dict(sorted(collections.Counter(event['reason'] for event in ends).items())),
        'turns': mean(event['turns'] for event in ends),
        'rows': mean(len(event.get('rows', (0,))) for event in ends),
        'forks': dict(sorted(forks.items())),
        'tools': _summarize_tools(events, ends, counts),
        'counts': {name: count for name, count in counts.items() if not name.startswith(BY_TOOL)},
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
        *(row for name, tool in summary['tools'].items() for row in _tool_rows(name, tool)),
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


def _tool_rows(name: str, tool: ToolSummary) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    if tool['written']:
        fit = f'{format_percent(tool["well_formed"] / tool["written"])} fit its definition'
        rows.append((f'calls of {name} in answers', str(tool['written']), fit))
    if tool['median_seconds'] is not None and tool['max_seconds'] is not None:
        seconds = f'{format_number(tool["median_seconds"])} / {format_number(tool["max_seconds"])} s, median / max'
        errors = f'{format_percent(tool["errors"] / tool["calls"])} errors'
        rows.append((f'calls of {name}', str(tool['calls']), f'{seconds}; {errors}'))
    if tool['reward'] is not None:
        used = f'mean of {tool["episodes"]} episodes'
        rows.append((f'reward with {name}', format_number(tool['reward']), used))
    return rows


def _summarize_tools(
    events: Sequence[Event], ends: Sequence[FinishEvent], counts: Mapping[str, int]
) -> dict[str, ToolSummary]:
    """By name; tools with fewer runs and calls than the first _MOST_TOOLS, whose names a model may write, in one."""
    uses = [_Use(_of(interval.detail), str(interval.detail['tool']), interval) for interval in _tool_intervals(events)]
    uses += [
        _Use(_of(cast(Mapping[str, object], end)), str(name).removeprefix(CALLED), None)
        for end in ends
        for name, _ in end.get('counts', ())
        if str(name).startswith(CALLED)
    ]
    used = collections.Counter(use.tool for use in uses)
    kept = {name for name, _ in used.most_common(_MOST_TOOLS)}
    rewards = {_of(cast(Mapping[str, object], event)): event['value'] for event in events if event['kind'] == 'reward'}
    found: dict[str, ToolSummary] = {}
    for shown in sorted(kept) + [_OTHERS] * (len(used) > len(kept)):
        names = {shown} if shown in kept else used.keys() - kept
        mine = [use for use in uses if use.tool in names]
        seconds = [use.interval.end - use.interval.start for use in mine if use.interval is not None]
        scored = [rewards[of] for of in {use.of for use in mine} if of in rewards]
        total = {prefix: sum(counts.get(prefix + name, 0) for name in names) for prefix in BY_TOOL}
        found[shown] = {
            'calls': len(seconds),
            'median_seconds': median(seconds) if seconds else None,
            'max_seconds': max(seconds, default=None),
            'errors': total[ERRORS],
            'written': total[CALLED],
            'well_formed': total[WELL_FORMED],
            'episodes': len(scored),
            'reward': mean(scored) if scored else None,
        }
    return found


class _Use(NamedTuple):
    """A run of a tool, or its calls in the answers of an episode (without an interval)."""

    of: tuple[object, object]  # draw and sample of the episode
    tool: str
    interval: LaneInterval | None


def _of(fields: Mapping[str, object]) -> tuple[object, object]:
    return fields['draw'], fields['sample']


def _tool_intervals(events: Sequence[Event]) -> list[LaneInterval]:
    return [interval for interval in lane_intervals(events) if interval.work == 'tool']
