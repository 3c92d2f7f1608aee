"""The tables of docs/cluster/plan.md: runs on 8, 64 and 512 accelerators, and what each asks of controller and disk.

    python -m benchmarks.plan                               prints the tables
    python -m benchmarks.plan --page=docs/cluster/plan.md   writes them into the page, between its marks

Nothing of this has run at these sizes: cluster_load.py says what is arithmetic and what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from benchmarks.cluster_load import NODE, PLANS, Load, Measured, read_measured

LARGER_PIECES = (64, 256)
RESULTS = pathlib.Path(__file__).parent / 'results'


def number(value: float) -> str:
    """Three digits, with thousands separated."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f'{float(f"{value:.3g}"):,.{digits}f}'


def percent(share: float) -> str:
    return f'{100 * share:.2g}%' if share < 0.0995 else f'{100 * share:,.0f}%'


def tell_cpu(steps: int, load: Load) -> str:
    """The controller's with so many tokens in a piece."""
    return percent(dataclasses.replace(load, decode_steps=steps).controller_cpu)


Lines = Sequence[tuple[str, Callable[[Load], str]]]
LAYOUT: Lines = (
    ('model', lambda load: load.plan.model.name),
    ('`cluster.learner`', lambda load: f'`{load.plan.learner}`'),
    ('`cluster.engines`', lambda load: f'`{load.plan.engines}`'),
    ('nodes of 8', lambda load: str(load.plan.accelerators // NODE)),
    ('answers of an update', lambda load: f'{load.plan.answers:,}'),
    ('slots of an engine (`rollout.slots`)', lambda load: str(load.slots)),
    ('tokens a second that engines could generate', lambda load: number(load.generated_s)),
    ('tokens a second that the learner could train on', lambda load: number(load.trained_s)),
    ('tokens a second of the run', lambda load: number(load.tokens_s)),
    ('answers a second', lambda load: number(load.answers_s)),
    ('seconds of an update', lambda load: number(load.update_s)),
)  # fmt: skip
CONTROLLER: Lines = (
    ('answers: loop, HTTP, log', lambda load: percent(load.answers_cpu)),
    ('their pieces', lambda load: percent(load.pieces_cpu)),
    ('their tokens', lambda load: percent(load.tokens_cpu)),
    ('health checks and registry', lambda load: percent(load.upkeep_cpu)),
    ('the batch to the learner', lambda load: percent(load.batch_cpu)),
    ('together', lambda load: f'**{percent(load.controller_cpu)}**'),
    *((f'together, with pieces of {steps} tokens', functools.partial(tell_cpu, steps)) for steps in LARGER_PIECES),
    ('pieces a second', lambda load: number(load.pieces_s)),
    ('memory for answers and batch, GB', lambda load: number(load.memory_bytes / 1e9)),
)
FILES: Lines = (
    ('registry, operations a second', lambda load: number(load.registry_operations_s)),
    ('event log, GB a day', lambda load: number(load.log_bytes_day / 1e9)),
    ('a version, GB', lambda load: number(load.version_bytes / 1e9)),
    ('written by each learner process, GB', lambda load: number(load.written_bytes / 1e9)),
    ('read by all engines, GB', lambda load: number(load.plan.engines_layout.count * load.version_bytes / 1e9)),
    ('of it over the network, once a node, GB', lambda load: number(load.read_bytes / 1e9)),
    ('s of a publication on the network', lambda load: number(load.network_s)),
    ('CPU s of each learner process', lambda load: number(load.write_s)),
    ('CPU s of each engine', lambda load: number(load.read_s)),
    ('batch to the learner, MB an update', lambda load: number(load.batch_bytes / 1e6)),
)  # fmt: skip


def tell_share(name: str, load: Load) -> str:
    return percent(load.shares()[name])


def make_table(lines: Lines, loads: Sequence[Load]) -> str:
    head = ['| accelerators |' + ''.join(f' {load.plan.accelerators} |' for load in loads)]
    head.append('|---|' + '---|' * len(loads))
    return '\n'.join([*head, *(f'| {name} |' + ''.join(f' {tell(load)} |' for load in loads) for name, tell in lines)])


def make_tables(measured: Measured) -> dict[str, str]:
    """By the name of their marks in the page."""
    loads = [Load(plan, measured) for plan in PLANS]
    limits = [(name, functools.partial(tell_share, name)) for name in loads[0].shares()]
    tables = {'layout': LAYOUT, 'controller': CONTROLLER, 'files': FILES, 'limits': limits}
    return {name: make_table(lines, loads) for name, lines in tables.items()}


def fill(page: str, tables: Mapping[str, str]) -> str:
    """The page with each table between its marks; raises ValueError for a mark that is not there."""
    for name, table in tables.items():
        begin, end = f'<!-- {name}: python -m benchmarks.plan -->', '<!-- end -->'
        before, mark, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not mark or not closed:
            raise ValueError(f'the page has no place for the table {name!r}: {begin} ... {end}')
        page = f'{before}{begin}\n\n{table}\n\n{end}{after}'
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--host', type=pathlib.Path, default=RESULTS / 'host.json')
    parser.add_argument('--page', type=pathlib.Path, help='the page whose tables are replaced')
    options = parser.parse_args()
    tables = make_tables(read_measured(options.host))
    if options.page:
        options.page.write_text(fill(options.page.read_text(), tables))
    print('\n\n'.join(tables.values()))


if __name__ == '__main__':
    main()
