"""Work of the engines: tokens generated, prefilled and rebuilt with their seconds, pauses of requests, preemptions.

Made from the events of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from statistics import median
from typing import TypeAlias, cast

import numpy as np

from areal_jax.events.schema import Event, PrefillEvent
from areal_jax.labels import CODE
from areal_jax.report import aggregates
from areal_jax.report import report_keys as contents
from areal_jax.report.aggregates import Metrics
from areal_jax.report.event_log import event_intervals, lane_intervals
from areal_jax.report.expert_balance import list_dead, summarize_ages, summarize_layers
from areal_jax.report.pages.blocks import Table, tabulate
from areal_jax.report.statistics import ratio_interval
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import RunFacts, visible_only_share
from areal_jax.telemetry.metrics import number
from areal_jax.telemetry.names import first_age
from areal_jax.telemetry.progress import format_number, format_percent


def summarize_code(metrics: Metrics, facts: RunFacts) -> contents.CodeVerdicts | None:
    """Summarizes the verdicts on code; None if no answer was code."""
    if aggregates.mean(metrics, names.CODE_CPU) is None:
        return None
    shares: dict[str, contents.ShareOfAnswers] = {}
    for label in ('ok', *CODE):
        name = f'{names.CODE}{label}'
        if mean := aggregates.mean(metrics, name):
            shares[label] = {**aggregates.ends(metrics, name), 'mean': mean}
    before, after = facts.evaluation_before, facts.evaluation_after
    return {
        'labels': shares,
        'cpu_seconds': aggregates.mean(metrics, names.CODE_CPU),
        'wall_seconds': aggregates.mean(metrics, names.CODE_WALL),
        'waiting': aggregates.mean(metrics, names.CODE_WAITING),
        'visible_only': {
            'before': visible_only_share(before.labels) if before else None,
            'after': visible_only_share(after.labels) if after else None,
        },
    }


def tabulate_code(found: contents.CodeVerdicts | None) -> Table:
    """Returns the page's table of verdicts; empty without code."""
    return Table(('answers of code', 'first update', 'last update', 'mean'), _code_rows(found) if found else [])


def _code_rows(found: contents.CodeVerdicts) -> list[tuple[str, ...]]:
    hidden = found['visible_only']
    rows: list[tuple[str, ...]] = [
        (label, *(format_percent(share) for share in (shares['first'], shares['last'], shares['mean'])))
        for label, shares in found['labels'].items()
    ]
    if hidden['before'] is not None or hidden['after'] is not None:
        shown = (format_percent(hidden['before']), format_percent(hidden['after']))
        rows.append(('held out: passes that fail a hidden test, before and after', *shown, ''))
    for name, value in (('CPU', found['cpu_seconds']), ('wall', found['wall_seconds'])):
        rows.append((f'{name} ms of a check', '', '', format_number(1000 * (value or 0.0))))
    return [*rows, ('answers that waited for a worker', '', '', format_number(found['waiting']))]


FIRST_WITH_REBUILDS = 4  # version of the log that distinguishes rebuilt tokens from prompts


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
            self.since.pop(event['request'], None)  # only the server knows how long it paused
        return []


def request_pauses(events: Sequence[Event]) -> contents.MedianMax:
    """Median and longest pause of a request for new weights."""
    found = RequestPauses()
    pauses = [pause for event in events for pause in found.apply(event)]
    return {'median': median(pauses) if pauses else None, 'max': max(pauses, default=None)}


def engine_work(events: Sequence[Event]) -> contents.EngineWork:
    """Tokens and lane seconds of all engines; the seconds of a mixed prefill are split by tokens."""
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
    """Tokens decoded in this process or received from servers."""
    return sum(event['tokens'] for event in events if event['kind'] in ('decode', 'receive'))


def attention_positions(events: Sequence[Event]) -> contents.AttentionPositions | None:
    """Positions that attention needed and read while decoding, in one layer; None if the log has no positions."""
    counted = [event for event in events if event['kind'] == 'decode' and 'positions_read' in event]
    if not counted:
        return None
    return {
        'live': sum(event['positions'] for event in counted),
        'read': sum(event['positions_read'] for event in counted),
    }


def preemptions(events: Sequence[Event]) -> contents.Preemptions | None:
    """Counts preemptions; None if there were none."""
    found = [event['tokens'] for event in events if event['kind'] == 'preempt']
    return {'requests': len(found), 'tokens': sum(found)} if found else None


def tabulate_work(work: contents.EngineWork) -> Table:
    """Returns the page's table of the kinds of work."""
    kinds = {
        'generated': work['generated'],
        'prompts prefilled': work['prefilled'],
        'rebuilt after an interruption or a preemption': work['rebuilt'],
    }
    seconds = lambda kind: format_number(kind['seconds'] or None)  # None: unknown for servers
    rows = [(name, str(kind['tokens']), seconds(kind)) for name, kind in kinds.items() if kind]
    return Table(('work of the engines', 'tokens', 'lane seconds'), rows, 'Work of the engines')


def describe_attention(positions: contents.AttentionPositions | None) -> str:
    """'1.21 of the positions needed'; '-' if none was counted."""
    if positions is None or not positions['live']:
        return '-'
    return f'{positions["read"] / positions["live"]:.2f} of the positions needed'


# Importance ratios over a run: by age, by cause, and the routers' contribution to them. Made from the metrics.
#
# Intervals take the updates as clusters: tokens of one update share weights, prompts and groups.


_PARTS = ('total', 'mismatch', 'drift', 'inside')
_ROUNDING = 1e-6  # nats: a larger difference between a log-ratio and the sum of its parts is a wrong version


def ratios_by_age(metrics: Metrics) -> list[contents.AgeRow]:
    """One row for each range of ages, the youngest first."""
    return [
        {
            'age': label,
            'tokens': int(aggregates.total(metrics, f'{names.BY_AGE}{label}/tokens')),
            'effective_sample_size': _of_age(metrics, label, 'effective_sample_size'),
            'clip_fraction': _of_age(metrics, label, 'clip_fraction'),
            'kl': _of_age(metrics, label, 'kl'),
        }
        for label in _labels(metrics, names.BY_AGE)
    ]


def ratio_split(metrics: Metrics) -> contents.RatioSplit | None:
    """Sums up the split of the importance ratio; None if the run did not split it."""
    if not any(names.RATIO_TOKENS in line for line in metrics):
        return None
    seconds = aggregates.total(metrics, names.RATIO_SECONDS)
    pairs = [(number(line, names.RATIO_SECONDS), number(line, names.RATIO_SHARE)) for line in metrics]
    spent = sum(of / share for of, share in pairs if of and share)  # seconds of the updates, the split included
    return {
        'tokens': int(aggregates.total(metrics, names.RATIO_TOKENS)),
        'left_ring_tokens': int(aggregates.total(metrics, names.RATIO_LEFT_RING)),
        'identity_error': aggregates.largest(metrics, names.RATIO_ERROR),
        'parts': {part: _part(metrics, f'{names.RATIO}{part}', names.RATIO_TOKENS) for part in _PARTS},
        'by_age': _rows(metrics, names.RATIO_OF_AGE, ('mismatch', 'drift')),
        'by_update': _rows(metrics, names.RATIO_OF_UPDATE, ('drift',)),
        'by_engine': _rows(metrics, names.RATIO_OF_ENGINE, ('mismatch',)),
        'seconds': seconds,
        'share': seconds / spent if spent else None,
    }


def summarize_experts(metrics: Metrics, loads: Metrics = ()) -> contents.Experts | None:
    """Sums up the routing of experts; None for a model without experts. `loads` has their loads by update."""
    if not any(names.EXPERT_LOAD in line for line in metrics):
        return None
    labels = _labels(metrics, names.ROUTES_OF_AGE)
    prefixes = [('', names.ROUTES, names.RATIO), *((x, f'{names.ROUTES_OF_AGE}{x}/', _of(x)) for x in labels)]
    return {
        'load': aggregates.mean(metrics, names.EXPERT_LOAD),
        'dead': aggregates.ends(metrics, names.EXPERTS_DEAD),
        'recorded': aggregates.mean(metrics, names.ROUTES_RECORDED),
        'prompts_differ': int(aggregates.total(metrics, names.ROUTE_PROMPTS)),
        'routes': [_route_row(metrics, *one) for one in prefixes] if labels else [],
        'layers': summarize_layers(loads),
        'dead_experts': list_dead(loads),
        'ages': summarize_ages(loads),
    }


def _of(label: str) -> str:
    return f'{names.RATIO_OF_AGE}{label}/'


def _route_row(metrics: Metrics, age: str, prefix: str, ratio: str) -> contents.RouteRow:
    tokens = f'{prefix}tokens'
    return {
        'age': age,
        'tokens': int(aggregates.total(metrics, tokens)),
        'sets_changed': aggregates.weighted_mean(metrics, f'{prefix}sets_changed', tokens),
        'tokens_changed': aggregates.weighted_mean(metrics, f'{prefix}tokens_changed', tokens),
        'routing_rms': _part(metrics, f'{ratio}routing', f'{ratio}tokens')['rms'],
    }


def tabulate_routes(experts: contents.Experts | None) -> Table:
    """Returns the page's table of routes; empty without a record of them."""
    columns: dict[str, Callable[[contents.RouteRow], str]] = {
        'experts, age': lambda row: row['age'] or 'all',
        'tokens': lambda row: str(row['tokens']),
        'sets that differ': lambda row: format_percent(row['sets_changed']),
        'tokens with one': lambda row: format_percent(row['tokens_changed']),
        'routing, RMS (nats)': lambda row: format_number(row['routing_rms']),
    }
    return tabulate(experts['routes'] if experts else [], columns, 'Experts')


def describe_experts(experts: contents.Experts | None) -> str:
    """The sentence on the experts' loads and on the engines' record of routes."""
    if experts is None:
        return ''
    first, last = experts['dead']['first'], experts['dead']['last']
    load = (
        f'The fullest expert of a layer had {format_number(experts["load"])} times the mean of its layer; '
        f'{format_number(first)} experts had no token in the first update, {format_number(last)} in the last.'
    )
    if experts['recorded'] is None:
        return load
    return (
        f'{load} Engines recorded the experts of {format_percent(experts["recorded"])} of the trained tokens; for '
        f'{experts["prompts_differ"]} answers those of the prompt differ from the first answer of the group. The table '
        "compares what the learner's routers choose with the record: at age 0 numerics, above it also the updates."
    )


def warn_of_wrong_versions(split: contents.RatioSplit | None) -> str:
    """The sentence on parts that do not add up to the ratio; '' if they do or were not measured."""
    error = split and split['identity_error']
    if not error or error <= _ROUNDING:
        return ''
    return (
        f'The parts of the importance ratio differ from the ratio by up to {error:.2g} nats: tokens were packed with '
        'another policy version than the one that generated them.'
    )


def tabulate_ages(rows: Sequence[contents.AgeRow]) -> Table:
    """Returns the page's table of importance ratios by age."""
    columns: dict[str, Callable[[contents.AgeRow], str]] = {
        'age': lambda row: row['age'],
        'trained tokens': lambda row: str(row['tokens']),
        'effective sample size': lambda row: format_number(row['effective_sample_size']),
        'clipped': lambda row: format_percent(row['clip_fraction']),
        'KL': lambda row: format_number(row['kl']),
    }
    return tabulate(rows, columns, 'Ratios by age')


def tabulate_split(split: contents.RatioSplit | None) -> Table:
    """Returns the page's table: all tokens, then by age, by update and by engine; empty without a split."""
    head, title = ('importance ratio (nats)', 'tokens', 'mean', 'RMS'), 'Importance ratio by cause (nats)'
    return Table(head, _split_rows(split) if split else [], title)


def _split_rows(split: contents.RatioSplit) -> list[tuple[str, ...]]:
    labels = {'total': 'log π_θ - log μ', 'inside': 'inside the update', 'mismatch': 'mismatch', 'drift': 'drift'}
    rows = [_row(labels[part], split['tokens'], moments) for part, moments in split['parts'].items()]
    for kind, of in (('by_age', 'age'), ('by_update', 'updates back'), ('by_engine', '')):
        for row in split[kind]:  # type: ignore[literal-required]  # the three keys hold rows
            for part, moments in row['parts'].items():
                rows.append(_row(f'{part}, {of} {row["of"]}'.replace(',  ', ', '), row['tokens'], moments))
    return rows


def describe_split(split: contents.RatioSplit | None) -> str:
    """The sentence on the sample and its cost."""
    if split is None:
        return ''
    return (
        f'Split on {split["tokens"]} trained tokens; {split["left_ring_tokens"]} more were of a version that had left '
        f'the ring (diagnostics.ring_bytes). It took {format_number(split["seconds"])} s, '
        f'{format_percent(split["share"])} of the updates. The parts add up to the ratio within '
        f'{format_number(split["identity_error"])} nats.'
    )


def _row(name: str, tokens: int, moments: contents.Moments) -> tuple[str, ...]:
    mean, spread = moments['mean'], ''
    if mean and mean['low'] is not None:
        spread = f' [{format_number(mean["low"])}, {format_number(mean["high"])}]'
    return name, str(tokens), f'{format_number(mean["mean"] if mean else None)}{spread}', format_number(moments['rms'])


def _rows(metrics: Metrics, prefix: str, parts: Iterable[str]) -> list[contents.RatioRow]:
    rows: list[contents.RatioRow] = []
    for label in _labels(metrics, prefix):
        tokens = f'{prefix}{label}/tokens'
        found = {part: _part(metrics, f'{prefix}{label}/{part}', tokens) for part in parts}
        rows.append({'of': label, 'tokens': int(aggregates.total(metrics, tokens)), 'parts': found})
    return rows


def _of_age(metrics: Metrics, label: str, name: str) -> float | None:
    return aggregates.weighted_mean(metrics, f'{names.BY_AGE}{label}/{name}', f'{names.BY_AGE}{label}/tokens')


def _labels(metrics: Metrics, prefix: str) -> list[str]:
    """Labels between the prefix and the last '/' of the metrics' names; age ranges ascending, engines by name."""
    found = {
        name.removeprefix(prefix).rpartition('/')[0] for line in metrics for name in line if name.startswith(prefix)
    }
    return sorted(found, key=lambda label: (first_age(label), label))


def _part(metrics: Metrics, name: str, tokens: str) -> contents.Moments:
    """Mean with its interval, and root mean square, over all tokens of the run."""
    lines = [(number(line, f'{name}_mean'), number(line, f'{name}_rms'), number(line, tokens)) for line in metrics]
    known = [(mean, rms, count) for mean, rms, count in lines if mean is not None and rms is not None and count]
    if not known:
        return {'mean': None, 'rms': None}
    means, roots, counts = (np.array(values, np.float64) for values in zip(*known, strict=True))
    interval = ratio_interval(means * counts, counts)
    return {
        'mean': {'mean': interval.mean, 'low': interval.low, 'high': interval.high, 'n': interval.n},
        'rms': math.sqrt(float((roots**2 * counts).sum() / counts.sum())),
    }


# Computes the lengths of prompts from an event log, which does not hold them; used by generation_rules.py.
#
# A row that decodes c tokens after a prompt of P and an answer of g tokens sees c (P + g) + c (c - 1) / 2 positions,
# and a dispatch logs the sum over its rows: one linear equation in the P.


Key: TypeAlias = tuple[bool, int]  # (whether the problem is of an evaluation, draw)
_Check: TypeAlias = Callable[[Mapping[Key, int]], str]
_MOST_SUMS = 20_000  # of `can_sum` and `can_end`; above it, the rule is not checked


class PromptLengths:
    """Solves the equations of the dispatches by elimination, as they come."""

    def __init__(self) -> None:
        self.known: dict[Key, int] = {}
        self._rows: dict[Key, tuple[dict[Key, Fraction], Fraction]] = {}  # by pivot, which has the coefficient 1
        self._waiting: list[tuple[frozenset[Key], _Check]] = []
        self._has_news = False  # a length became known since the last `apply_waiting`

    def learn(self, counts: Mapping[Key, int], total: int) -> bool:
        """Adds the equation: the sum of `counts` times the lengths is `total`. False if it contradicts earlier ones."""
        rest, left = total, {}
        for key, count in counts.items():
            if key in self.known:
                rest -= count * self.known[key]
            elif count:
                left[key] = count
        if not left:
            return rest == 0
        coefficients, right = {key: Fraction(count) for key, count in left.items()}, Fraction(rest)
        for pivot in list(coefficients):
            if pivot in self._rows:
                coefficients, right = _subtract(coefficients, right, coefficients[pivot], *self._rows[pivot])
        if not coefficients:
            return right == 0
        pivot = next(iter(coefficients))
        scale = coefficients[pivot]
        new = {key: value / scale for key, value in coefficients.items()}, right / scale
        for other, (row, value) in list(self._rows.items()):
            if pivot in row:
                self._rows[other] = _subtract(row, value, row[pivot], *new)
        self._rows[pivot] = new
        return self._take_solved()

    def _take_solved(self) -> bool:
        solved = {pivot: right for pivot, (row, right) in self._rows.items() if len(row) == 1}
        for pivot, length in solved.items():
            del self._rows[pivot]
            if length.denominator != 1 or length < 1:
                return False
            self.known[pivot] = int(length)
            self._has_news = True
        return True

    def check(self, keys: Iterable[Key], check: _Check) -> str:
        """Returns the finding of `check` if the lengths of `keys` are known; else defers it to `apply_waiting`."""
        missing = frozenset(key for key in keys if key not in self.known)
        if not missing:
            return check(self.known)
        self._waiting.append((missing, check))
        return ''

    def apply_waiting(self) -> Iterator[str]:
        """Runs the deferred checks whose lengths are now known; yields their findings."""
        if not self._has_news:
            return
        waiting, self._waiting, self._has_news = self._waiting, [], False
        for missing, check in waiting:
            if all(key in self.known for key in missing):
                yield check(self.known)
            else:
                self._waiting.append((missing, check))


def can_sum(total: int, parts: Iterable[tuple[int, int]]) -> bool:
    """Whether `total` is a sum of `parts` (size, most), each used 0 to `most` times; True if sums are too many."""
    sums = {0}
    for size, most in parts:
        sums = {one + size * times for one in sums for times in range(most + 1) if one + size * times <= total}
        if len(sums) > _MOST_SUMS:
            return True
    return total in sums


def can_end(tokens: int, positions: int, lengths: Iterable[int], steps: int) -> bool:
    """Whether rows of `lengths` that each decode 1 to `steps` tokens can make `tokens` tokens and `positions`."""
    sums = {(0, 0)}
    for length in lengths:
        sums = {
            (n + count, seen + count * length + count * (count - 1) // 2)
            for n, seen in sums
            for count in range(1, steps + 1)
        }
        if len(sums) > _MOST_SUMS:
            return True
    return (tokens, positions) in sums


def _subtract(
    row: Mapping[Key, Fraction], right: Fraction, times: Fraction, other: Mapping[Key, Fraction], other_right: Fraction
) -> tuple[dict[Key, Fraction], Fraction]:
    """Returns the row minus `times` times the other row."""
    new = {key: row.get(key, Fraction(0)) - times * other.get(key, Fraction(0)) for key in {**row, **other}}
    return {key: value for key, value in new.items() if value}, right - times * other_right
