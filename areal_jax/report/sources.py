"""The sources of a mixture in the report: draws, groups, rewards, lengths and held-out scores of each."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

from areal_jax.control.buffer import BY_REWARD
from areal_jax.events.schema import Event
from areal_jax.report import aggregates
from areal_jax.report.aggregates import Metrics
from areal_jax.report.limit import compare_scores, format_interval
from areal_jax.report.pages.blocks import Table, tabulate
from areal_jax.report.report_keys import SourceMeasures, SourceRow
from areal_jax.telemetry import names
from areal_jax.telemetry.facts import EvaluationScores
from areal_jax.telemetry.progress import format_number, format_percent


def summarize_sources(
    events: Sequence[Event],
    metrics: Metrics,
    before: EvaluationScores | None,
    after: EvaluationScores | None,
) -> list[SourceRow]:
    """Returns a row for each source, sorted by name; [] for a run of one task."""
    source_of = {
        event['draw']: source for event in events if event['kind'] == 'draw' and (source := event.get('source'))
    }
    if not source_of:
        return []
    drawn, draws = collections.Counter(source_of.values()), aggregates.ledger(events)
    trained = collections.Counter(source for draw, source in source_of.items() if draws.states[draw] == 'trained')
    kept = collections.Counter(source_of[event['draw']] for event in events if event['kind'] == 'buffer')
    reasons: dict[str, collections.Counter[str]] = {source: collections.Counter() for source in drawn}
    for draw, reason in draws.reasons.items():
        reasons[source_of[draw]][reason] += 1
    tokens = {source: _total(metrics, source, names.SOURCE_TOKENS) for source in drawn}
    rows: list[SourceRow] = []
    for source in sorted(drawn):
        filtered = sum(reasons[source][reason] for reason in BY_REWARD)
        rows.append(
            {
                'source': source,
                'drawn': drawn[source],
                'drawn_share': drawn[source] / len(source_of),
                'trained': trained[source],
                'dropped': dict(sorted(reasons[source].items())),
                'filtered_rate': filtered / (filtered + kept[source]) if filtered else None,
                **_measure(metrics, source),
                'token_share': tokens[source] / total if (total := sum(tokens.values())) else None,
                'accuracy': compare_scores(_of(before, source), _of(after, source)),
            }
        )
    return rows


def _measure(metrics: Metrics, source: str) -> SourceMeasures:
    """Sums up the metrics of the source over the updates."""
    groups = _total(metrics, source, names.SOURCE_GROUPS)
    length, of_groups = _name(source, names.SOURCE_LENGTH), _name(source, names.SOURCE_GROUPS)
    return {
        'equal_rewards': _total(metrics, source, names.SOURCE_EQUAL) / groups if groups else None,
        'reward': aggregates.ends(metrics, _name(source, names.SOURCE_REWARD)),
        'answer_tokens_mean': aggregates.weighted_mean(metrics, length, of_groups),
    }


def tabulate_sources(rows: Sequence[SourceRow]) -> Table:
    """Returns the page's table of draws, groups and rewards."""
    columns: dict[str, Callable[[SourceRow], str]] = {
        'source': lambda row: row['source'],
        'drawn': lambda row: f'{row["drawn"]} ({format_percent(row["drawn_share"])})',
        'trained': lambda row: str(row['trained']),
        'dropped': lambda row: ', '.join(f'{reason}: {count}' for reason, count in row['dropped'].items()) or '0',
        'equal rewards in the batch': lambda row: format_percent(row['equal_rewards']),
        'reward, first to last': lambda row: (
            f'{format_number(row["reward"]["first"])} to {format_number(row["reward"]["last"])}'
        ),
        'tokens of an answer': lambda row: format_number(row['answer_tokens_mean']),
        'share of the tokens': lambda row: format_percent(row['token_share']),
    }
    return tabulate(rows, columns)


def tabulate_source_scores(rows: Sequence[SourceRow]) -> Table:
    """Returns the page's table of held-out scores by source; empty if nothing was evaluated."""
    cells = []
    for row in rows:
        if (accuracy := row['accuracy']) is None:
            continue
        greedy, sampled = accuracy['greedy'], accuracy['sampled']
        for kind, found, gain in (('greedy', greedy, None), ('sampled', sampled, sampled['gain'])):
            if found['before'] or found['after']:
                scores = (format_interval(found['before']), format_interval(found['after']))
                cells.append((f'{row["source"]}, {kind}', *scores, format_interval(gain, '+') if gain else ''))
    return Table(('held-out accuracy', 'before', 'after', 'gain'), cells, 'Held-out accuracy by source')


def _name(source: str, quantity: str) -> str:
    return f'{names.SOURCE}{source}/{quantity}'


def _total(metrics: Metrics, source: str, quantity: str) -> float:
    return aggregates.total(metrics, _name(source, quantity))


def _of(scores: EvaluationScores | None, source: str) -> EvaluationScores | None:
    found: Mapping[str, EvaluationScores] = scores.by_source() if scores else {}
    return found.get(source)
