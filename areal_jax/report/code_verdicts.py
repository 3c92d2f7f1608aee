"""What the answers of code came to: the share of each label over the run, and what a check took."""

from __future__ import annotations

from areal_jax.labels import CODE
from areal_jax.report import aggregates
from areal_jax.report import report_keys as contents
from areal_jax.report.aggregates import Metrics
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import RunFacts, visible_only_share
from areal_jax.telemetry.progress import format_number, format_percent

HEAD = ('answers of code', 'first update', 'last update', 'mean')


def summarize_code(metrics: Metrics, facts: RunFacts) -> contents.CodeVerdicts | None:
    """None where no answer was code."""
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


def describe_code(found: contents.CodeVerdicts | None) -> list[tuple[str, ...]]:
    """Rows of the page's table; none without code."""
    if found is None:
        return []
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
