"""Importance ratios over a run: by age, split by cause, and what routers of experts add to them, from the metrics.

Intervals take the updates as clusters: tokens of one update share weights, prompts and groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from areal_jax.report import aggregates
from areal_jax.report import report_keys as contents
from areal_jax.report.aggregates import Metrics
from areal_jax.report.statistics import ratio_interval
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import number
from areal_jax.telemetry.names import first_age
from areal_jax.telemetry.progress import format_number, format_percent

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
    """None where `diagnostics.ratio_sample` was 0."""
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


def summarize_experts(metrics: Metrics) -> contents.Experts | None:
    """None of a model without experts."""
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


def route_rows(experts: contents.Experts | None) -> list[tuple[str, ...]]:
    """Of the page's table."""
    return [
        (
            row['age'] or 'all',
            str(row['tokens']),
            format_percent(row['sets_changed']),
            format_percent(row['tokens_changed']),
            format_number(row['routing_rms']),
        )
        for row in (experts['routes'] if experts else [])
    ]


def describe_experts(experts: contents.Experts | None) -> str:
    """The sentence on loads and on what was recorded."""
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
    """The sentence on an identity that does not hold, '' where it does or was not measured."""
    error = split and split['identity_error']
    if not error or error <= _ROUNDING:
        return ''
    return (
        f'The parts of the importance ratio differ from the ratio by up to {error:.2g} nats: tokens were packed with '
        'another policy version than the one that generated them.'
    )


def age_rows(rows: Sequence[contents.AgeRow]) -> list[tuple[str, ...]]:
    """Of the page's table."""
    return [
        (
            row['age'],
            str(row['tokens']),
            format_number(row['effective_sample_size']),
            format_percent(row['clip_fraction']),
            format_number(row['kl']),
        )
        for row in rows
    ]


def split_rows(split: contents.RatioSplit | None) -> list[tuple[str, ...]]:
    """Of the page's table: all tokens, then by age, by update and by engine."""
    if split is None:
        return []
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
    """What follows the prefix, without the last word; ranges of ages in their order, engines by name."""
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
