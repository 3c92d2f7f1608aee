"""The servers that a run generated with: where each was, what it delivered, how often it failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from areal_jax.events.schema import Event

HEAD = ('engine', 'server', 'tokens received', 'starts', 'taken out of service')
_OUT = ('unknown', 'quarantined')


class ServerRow(TypedDict):
    """One server that answers came from."""

    engine: str
    url: str  # where it served last
    starts: int  # times that it registered
    tokens: int  # received, including evaluations and probes
    failures: int  # times that it was taken out of service
    last_failure: str  # why, the last time; '' = never


def server_rows(events: Sequence[Event]) -> list[ServerRow]:
    """One for each engine in another process, in the order of their names; none where the run had no servers."""
    found: dict[str, ServerRow] = {}
    for event in events:
        if event['kind'] == 'register':
            row = found.setdefault(event['engine'], _new_row(event['engine']))
            row['url'], row['starts'] = event['url'], row['starts'] + 1
        elif event['kind'] == 'receive' or (event['kind'] == 'decode' and event['engine'] in found):
            found[event['engine']]['tokens'] += event['tokens']  # `decode` is of a simulation
        elif event['kind'] == 'engine_state' and event['state'] in _OUT:
            row = found[event['engine']]
            row['failures'], row['last_failure'] = row['failures'] + 1, event['reason']
    return [found[engine] for engine in sorted(found)]


def _new_row(engine: str) -> ServerRow:
    return {'engine': engine, 'url': '', 'starts': 0, 'tokens': 0, 'failures': 0, 'last_failure': ''}


def describe_servers(rows: Sequence[ServerRow]) -> list[tuple[str, ...]]:
    """Of the page's table."""
    return [
        (
            row['engine'],
            row['url'],
            str(row['tokens']),
            str(row['starts']),
            f'{row["failures"]}, the last time: {row["last_failure"]}' if row['failures'] else '0',
        )
        for row in rows
    ]
