"""The servers that a run generated with: what each delivered, how its log-probs differ, how often it failed.

Used by report.py and page.py. Made from all events and the metrics of the updates.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal_jax.events import Event
from areal_jax.report.aggregates import Metrics, total, weighted_mean
from areal_jax.report.contents import ServerRow
from areal_jax.telemetry.names import MISMATCH_OF
from areal_jax.telemetry.numerals import format_number

HEAD = ('engine', 'server', 'tokens received', 'log-prob mismatch, mean (n)', 'starts', 'taken out of service')
_OUT = ('unknown', 'quarantined')


def server_rows(events: Sequence[Event], metrics: Metrics) -> list[ServerRow]:
    """One for each engine in another process, in the order of their names; none where the run had no servers."""
    found: dict[str, ServerRow] = {}
    for event in events:
        if event['kind'] == 'register':
            engine = event['engine']
            row = found.setdefault(engine, _new_row(engine, metrics))
            row['url'], row['starts'] = event['url'], row['starts'] + 1
        elif event['kind'] == 'receive':
            found[event['engine']]['tokens'] += event['tokens']
        elif event['kind'] == 'engine_state' and event['state'] in _OUT:
            row = found[event['engine']]
            row['failures'], row['last_failure'] = row['failures'] + 1, event['reason']
    return [found[engine] for engine in sorted(found)]


def _new_row(engine: str, metrics: Metrics) -> ServerRow:
    count = f'{MISMATCH_OF}{engine}/n'
    measured = [line for line in metrics if line.get(count)]
    return {
        'engine': engine,
        'url': '',
        'starts': 0,
        'tokens': 0,
        'mismatch_mean': weighted_mean(measured, f'{MISMATCH_OF}{engine}/mean_abs', count),
        'mismatch_n': int(total(measured, count)),
        'failures': 0,
        'last_failure': '',
    }


def describe_servers(rows: Sequence[ServerRow]) -> list[tuple[str, ...]]:
    """Of the page's table."""
    return [
        (
            row['engine'],
            row['url'],
            str(row['tokens']),
            f'{format_number(row["mismatch_mean"])} nats ({row["mismatch_n"]})',
            str(row['starts']),
            f'{row["failures"]}, the last time: {row["last_failure"]}' if row['failures'] else '0',
        )
        for row in rows
    ]
