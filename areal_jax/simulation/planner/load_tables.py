"""The tables of docs/cluster/plan.md: runs on 8, 64 and 512 accelerators, and what each asks of controller and disk.

    python -m areal_jax.simulation.planner.load_tables                               prints the tables
    python -m areal_jax.simulation.planner.load_tables --page=docs/cluster/plan.md   writes them into the page

Nothing of this has run at these sizes. Speeds follow from an H800's peaks and published shares of them, so that they
are the most that the accelerators can ask of everything else; areal-plan simulates what they reach.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence

from areal_jax.simulation.planner.cluster_load import (
    DECODE_STEPS,
    MEASURED,
    NODE,
    PIECES,
    HostCosts,
    Layout,
    Load,
    Pace,
    read_costs,
)
from areal_jax.simulation.prices import (
    H800,
    R1_DISTILL_1_5B,
    R1_DISTILL_7B,
    R1_DISTILL_32B,
    Reached,
    Roofline,
    step_overhead_s,
)

_MARK = 'python -m areal_jax.simulation.planner.load_tables'
REACHED = Reached(bandwidth=0.6, prefill=0.5, mfu=0.40)  # the docstring of Reached gives the reasons
PASSES = 4  # forward passes of a trained token: 3 for the update, 1 for the proximal log-probs
MEAN_TOKENS, PROMPT_TOKENS = 9_000, 512  # of answers of at most 27,648 tokens, lognormal with sigma 0.75
LIVE_POSITIONS = 6_642 + PROMPT_TOKENS  # of a slot on average: E[L^2] / (2 E[L]) of these lengths, and the prompt
MOST_SLOTS = 256
LAYOUTS = (
    Layout(R1_DISTILL_1_5B, 'hosts=1 x fsdp=2', '6 x tensor=1', 64 * 16),
    Layout(R1_DISTILL_7B, 'hosts=3 x data=3,fsdp=8', '40 x tensor=1', 256 * 16),
    Layout(R1_DISTILL_32B, 'hosts=20 x data=5,fsdp=8,tensor=4', '88 x tensor=4', 512 * 16),
)


@dataclasses.dataclass(frozen=True)
class Peak:
    """The highest speed of a layout, with all slots full and no version to load."""

    layout: Layout

    @property
    def engine(self) -> Roofline:
        model, overhead_s = self.layout.model, step_overhead_s(H800, self.layout.model, REACHED)
        return Roofline(H800, model, REACHED, self.layout.engines_layout.devices_each, overhead_s)

    @property
    def slots(self) -> int:
        return min(MOST_SLOTS, self.engine.cache_tokens() // LIVE_POSITIONS)

    @property
    def generated_s(self) -> float:
        """Tokens a second of all engines, without prefills."""
        engines = self.layout.engines_layout.count
        return engines * self.slots / self.engine.step_s(self.slots, self.slots * LIVE_POSITIONS)

    @property
    def trained_s(self) -> float:
        """Tokens a second that the learner can train on."""
        learner = Roofline(H800, self.layout.model, REACHED, self.layout.learner_layout.devices)
        return 1 / learner.train_s(1, LIVE_POSITIONS, PASSES)

    def load(self, costs: HostCosts, decode_steps: int = DECODE_STEPS) -> Load:
        """The load at the pace of the slower side."""
        pace = Pace(min(self.generated_s, self.trained_s), MEAN_TOKENS, LIVE_POSITIONS, self.slots)
        return Load(self.layout, pace, costs, decode_steps)


def number(value: float) -> str:
    """Formats a number with three digits, and separates thousands."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f'{float(f"{value:.3g}"):,.{digits}f}'


def percent(share: float) -> str:
    return f'{100 * share:.2g}%' if share < 0.0995 else f'{100 * share:,.0f}%'


def tell_cpu(steps: int, load: Load) -> str:
    """Formats the controller's CPU share with `steps` tokens in a piece."""
    return percent(dataclasses.replace(load, decode_steps=steps).controller_cpu)


Lines = Sequence[tuple[str, Callable[[Load], str]]]
LAYOUT: Lines = (
    ('model', lambda load: load.layout.model.name),
    ('`cluster.learner`', lambda load: f'`{load.layout.learner}`'),
    ('`cluster.engines`', lambda load: f'`{load.layout.engines}`'),
    ('nodes of 8', lambda load: str(load.layout.accelerators // NODE)),
    ('answers of an update', lambda load: f'{load.layout.answers:,}'),
    ('slots of an engine (`rollout.slots`)', lambda load: str(load.pace.slots)),
    ('tokens a second that engines could generate', lambda load: number(Peak(load.layout).generated_s)),
    ('tokens a second that the learner could train on', lambda load: number(Peak(load.layout).trained_s)),
    ('tokens a second of the run', lambda load: number(load.pace.tokens_s)),
    ('answers a second', lambda load: number(load.answers_s)),
    ('seconds of an update', lambda load: number(load.update_s)),
)
CONTROLLER: Lines = (
    ('answers: loop, HTTP, log', lambda load: percent(load.answers_cpu)),
    ('their pieces', lambda load: percent(load.pieces_cpu)),
    ('their tokens', lambda load: percent(load.tokens_cpu)),
    ('health checks and registry', lambda load: percent(load.upkeep_cpu)),
    ('the batch to the learner', lambda load: percent(load.batch_cpu)),
    ('together', lambda load: f'**{percent(load.controller_cpu)}**'),
    *((f'together, with pieces of {steps} tokens', functools.partial(tell_cpu, steps)) for steps in PIECES[1:]),
    ('pieces a second', lambda load: number(load.pieces_s)),
    ('memory for answers and batch, GB', lambda load: number(load.memory_bytes / 1e9)),
)
FILES: Lines = (
    ('registry, operations a second', lambda load: number(load.registry_operations_s)),
    ('event log, GB a day', lambda load: number(load.log_bytes_day / 1e9)),
    ('a version, GB', lambda load: number(load.version_bytes / 1e9)),
    ('written by each learner process, GB', lambda load: number(load.written_bytes / 1e9)),
    ('read by all engines, GB', lambda load: number(load.layout.engines_layout.count * load.version_bytes / 1e9)),
    ('of it over the network, once a node, GB', lambda load: number(load.read_bytes / 1e9)),
    ('s of a publication on the network', lambda load: number(load.network_s)),
    ('CPU s of each learner process', lambda load: number(load.write_s)),
    ('CPU s of each engine', lambda load: number(load.read_s)),
    ('batch to the learner, MB an update', lambda load: number(load.batch_bytes / 1e6)),
)


def tell_share(name: str, load: Load) -> str:
    return percent(load.shares()[name])


def make_table(lines: Lines, loads: Sequence[Load]) -> str:
    head = ['| accelerators |' + ''.join(f' {load.layout.accelerators} |' for load in loads)]
    head.append('|---|' + '---|' * len(loads))
    return '\n'.join([*head, *(f'| {name} |' + ''.join(f' {tell(load)} |' for load in loads) for name, tell in lines)])


def make_tables(costs: HostCosts) -> dict[str, str]:
    """Makes the tables, by the names of their marks in the page."""
    loads = [Peak(layout).load(costs) for layout in LAYOUTS]
    limits = [(name, functools.partial(tell_share, name)) for name in loads[0].shares()]
    tables: dict[str, Lines] = {'layout': LAYOUT, 'controller': CONTROLLER, 'storage': FILES, 'limits': limits}
    return {name: make_table(lines, loads) for name, lines in tables.items()}


def fill(page: str, tables: Mapping[str, str]) -> str:
    """Returns the page with each table between its marks; raises ValueError for a missing mark."""
    for name, table in tables.items():
        begin, end = f'<!-- {name}: {_MARK} -->', '<!-- end -->'
        before, mark, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not mark or not closed:
            raise ValueError(f'the page has no place for the table {name!r}: {begin} ... {end}')
        page = f'{before}{begin}\n\n{table}\n\n{end}{after}'
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--host', type=pathlib.Path, help='results of benchmarks/host.py, of another machine')
    parser.add_argument('--page', type=pathlib.Path, help='the page whose tables are replaced')
    options = parser.parse_args()
    tables = make_tables(read_costs(options.host) if options.host else MEASURED)
    if options.page:
        options.page.write_text(fill(options.page.read_text(), tables))
    print('\n\n'.join(tables.values()))


if __name__ == '__main__':
    main()
