"""What each version took on its way to the engines: bytes, the share of weights that changed, seconds, pauses."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from statistics import median
from typing import TypedDict, cast

from areal_jax.events.schema import Event
from areal_jax.report.event_log import lane_intervals
from areal_jax.telemetry.progress import format_bytes, format_number

HEAD = (
    *('version sent as', 'versions', 'bytes', 'changed'),
    *('s to send, median / max', 's to stage, median / max', 'pause of an engine (s), median / max'),
)
_SEND, _STAGE = 'publish', 'load'  # kinds of work


class PublicationRow(TypedDict):
    """A version on its way to the engines; None where the channel or the log does not say."""

    version: int
    channel: str | None
    record: str | None  # 'whole' or 'delta'
    bytes: int | None  # as sent
    changed: float | None  # share of the elements with other bits than in the version before
    send_seconds: float | None  # on the learner's side, from the copy to what engines can fetch
    stage_seconds: float | None  # of the slowest engine, while it decodes
    pause_seconds: float | None  # the longest of an engine


def publication_rows(events: Sequence[Event]) -> list[PublicationRow]:
    """One for each version above 0, in their order; of a version published twice, by a resumed run, the last one."""
    seconds: dict[tuple[str, int], float] = collections.defaultdict(float)
    for interval in lane_intervals(events):
        if interval.work in (_SEND, _STAGE) and 'version' in interval.detail:
            key = interval.work, cast(int, interval.detail['version'])
            seconds[key] = max(seconds[key], interval.end - interval.start)
    rows: dict[int, PublicationRow] = {}
    for event in events:
        if event['kind'] == 'publish' and event['version'] > 0:
            version = event['version']
            rows[version] = {
                'version': version,
                'channel': event.get('channel'),
                'record': event.get('record'),
                'bytes': event.get('bytes'),
                'changed': event.get('changed'),
                'send_seconds': seconds.get((_SEND, version)),
                'stage_seconds': seconds.get((_STAGE, version)),
                'pause_seconds': None,
            }
        elif event['kind'] == 'load' and event['version'] in rows:
            row = rows[event['version']]
            row['pause_seconds'] = max(row['pause_seconds'] or 0.0, event['pause_seconds'])
    return [rows[version] for version in sorted(rows)]


def describe_publications(rows: Sequence[PublicationRow]) -> list[tuple[str, ...]]:
    """Of the page's table: a row for each channel and kind of record; none where the channel says no bytes."""
    found: dict[str, list[PublicationRow]] = collections.defaultdict(list)
    for row in rows:
        if row['bytes'] is not None:
            found[f'{row["channel"]}, {row["record"]}'].append(row)
    return [
        (
            name,
            str(len(some)),
            f'{format_bytes(int(median(row["bytes"] or 0 for row in some)))}, median',
            _median([row['changed'] for row in some]),
            *(_median_max([row[key] for row in some]) for key in ('send_seconds', 'stage_seconds', 'pause_seconds')),
        )
        for name, some in sorted(found.items())
    ]


def _median(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    return f'{100 * median(known):.2g}%, median' if known else 'unknown'


def _median_max(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f'{format_number(median(known))} / {format_number(max(known))}' if known else 'not measured'
