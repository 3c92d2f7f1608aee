"""The tables of a sweep as files for other programs: results.csv and differences.csv.

results.csv has a row for each arm, unfinished ones too, and for each group the rows mean, low and high. Numbers have
all their digits; what is not known is empty.
"""

from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Iterator, Sequence

from areal_jax import files
from areal_jax.app.sweep.sweep_results import GroupResult, Results

RESULTS, DIFFERENCES = 'results.csv', 'differences.csv'
_HEAD = ('row', 'group', 'arm', 'seed', 'seeds', 'state', 'updates', 'planned_updates', 'reason')
_DIFFERENCE_HEAD = (
    *(
        'endpoint',
        'baseline',
        'group',
        'seeds',
        'difference',
        't_low',
        't_high',
        'bootstrap_low',
        'bootstrap_high',
        'p',
    ),
    *('p_holm', 'r', 'seeds_factor', 'error_factor', 'paired_error', 'unpaired_error'),
)


def write_tables(results: Results, workdir: pathlib.Path) -> None:
    """Writes both files, each whole or not at all."""
    endpoints = [endpoint.name for endpoint in results.endpoints]
    fields = list(dict.fromkeys(path for result in results.arms for path in result.arm.overrides))
    head = [*_HEAD, *fields, *endpoints, 'weights_sha256']
    rows = [row for group in results.groups for row in _group_rows(group, fields, endpoints)]
    files.write_text(workdir / RESULTS, _render(head, rows))
    files.write_text(workdir / DIFFERENCES, _render(_DIFFERENCE_HEAD, list(_difference_rows(results))))


def _group_rows(group: GroupResult, fields: list[str], endpoints: list[str]) -> Iterator[list[object]]:
    for result in group.arms:
        arm, state = result.arm, result.state
        head = [
            *('arm', group.name, arm.name, arm.seed, '', state.word, state.updates, arm.config.run.steps, state.reason)
        ]
        values = [result.values.get(name, '') for name in endpoints]
        yield [*head, *(arm.overrides.get(path, '') for path in fields), *values, result.weights]
    finished = len(group.finished)
    for row in ('mean', 'low', 'high'):
        means = [getattr(group.means[name], row) if name in group.means else '' for name in endpoints]
        yield [row, group.name, '', '', finished, *[''] * 4, *[''] * len(fields), *means, '']


def _difference_rows(results: Results) -> Iterator[list[object]]:
    for comparison in results.comparisons:
        found = comparison.difference
        pairing = found.pairing
        yield [
            *(comparison.endpoint, results.groups[0].name, comparison.group, found.n, found.mean),
            *((found.t.low, found.t.high) if found.t else ('', '')),
            *((found.bootstrap.low, found.bootstrap.high) if found.bootstrap else ('', '')),
            *('' if p is None else p for p in (found.p, comparison.holm_p)),
            *((pairing.r, pairing.seeds_factor, pairing.error_factor) if pairing else ('', '', '')),
            *((pairing.paired_error, pairing.unpaired_error) if pairing else ('', '')),
        ]


def _render(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow(head)
    writer.writerows([['' if cell is None else cell for cell in row] for row in rows])
    return text.getvalue()
