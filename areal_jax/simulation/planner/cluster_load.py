"""The load of a run on its controller, registry, disk and network: arithmetic on measured costs.

`MEASURED` has the measured costs; the pace of the run comes from a simulation, or from peaks. The second half makes the
tables of docs/cluster/plan.md, of runs on 8, 64 and 512 accelerators:

    python -m areal_jax.simulation.planner.cluster_load                               prints the tables
    python -m areal_jax.simulation.planner.cluster_load --page=docs/cluster/plan.md   writes them into the page

These runs were not made. Speeds follow from an H800's peaks and published shares of them, so that
they are the most that the accelerators can ask of everything else; areal-plan simulates what they reach.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_jax.config.cluster import EnginesLayout, LearnerLayout, parse_engines, parse_learner
from areal_jax.simulation.prices import (
    H800,
    R1_DISTILL_1_5B,
    R1_DISTILL_7B,
    R1_DISTILL_32B,
    WEIGHT_BYTES,
    ModelShape,
    Reached,
    Roofline,
    StreamLinks,
    step_overhead_s,
    stream_version,
)
from areal_jax.simulation.stream_prices import LINK_BYTES_S, NODE, StreamedVersion

# bytes, CPU seconds and tokens of a batch of 512 groups of 16 answers of 256 tokens, sent to 64 learner processes
_BATCH_BYTES, _BATCH_CPU_S, _BATCH_TOKENS = 17.9e6, 0.092, 512 * 16 * 256


@dataclasses.dataclass(frozen=True)
class HostCosts:
    """Costs of the host, in seconds of one core unless stated otherwise."""

    answer_s: float
    piece_s: float  # of a piece of an answer, without its tokens
    token_s: float
    question_s: float
    entry_s: float  # of an entry, each time the registry is read
    batch_byte_s: float  # of a batch that goes to the learner
    batch_token_bytes: float
    log_bytes: float  # of an answer
    question_log_bytes: float
    write_byte_s: float  # of a version, by the learner
    read_byte_s: float  # of a version, by an engine


MEASURED = HostCosts(
    answer_s=827.1e-6, piece_s=116.0e-6, token_s=3.424e-6, question_s=349.1e-6, entry_s=59.8e-6,
    batch_byte_s=_BATCH_CPU_S / _BATCH_BYTES, batch_token_bytes=_BATCH_BYTES / _BATCH_TOKENS,
    log_bytes=1461.0, question_log_bytes=311.8,
    write_byte_s=0.5814 / 269104460, read_byte_s=0.509 / 269104460,
)  # fmt: skip


def read_costs(host: pathlib.Path) -> HostCosts:
    """Reads the costs from the results of benchmarks/host.py, of this machine or another."""
    rows = json.loads(host.read_text())['rows']
    wire, registry = _find(rows, 'wire'), _find(rows, 'registry', engines=64)
    version = _find(rows, 'publication', dtype='bfloat16')
    return dataclasses.replace(
        MEASURED,
        answer_s=1e-6 * wire['us_answer'], piece_s=1e-6 * wire['us_piece'], token_s=1e-6 * wire['us_token'],
        question_s=1e-6 * wire['us_question'], entry_s=1e-6 * registry['us_entry_read'],
        log_bytes=wire['log_bytes'], question_log_bytes=wire['question_log_bytes'],
        write_byte_s=version['write_cpu_s'] / version['bytes_written'],
        read_byte_s=version['read_cpu_s'] / version['bytes_written'],
    )  # fmt: skip


def _find(rows: Sequence[Mapping[str, Any]], row: str, **fields: object) -> Mapping[str, Any]:
    wanted = {'row': row, **fields}
    return next(found for found in rows if all(found.get(name) == value for name, value in wanted.items()))


DECODE_STEPS = 16  # rollout.decode_steps: tokens of an answer in a piece
PIECES = (DECODE_STEPS, 64, 256)
CHECK_EVERY_S, LOOK_EVERY_S = 5.0, 1.0  # ServerSettings.health_every_s, RegistryWatch.every_s
FILE_SERVER_BYTES_S = 10e9  # read by all nodes together from the shared file system: yours will differ
TOKEN_BYTES = 8  # of an answer in the controller: token and log-prob
DAY_S = 86_400
_BUSY = 0.8  # of one core: the controller's load must be below it for the pieces that `choose_pieces` takes


@dataclasses.dataclass(frozen=True)
class Layout:
    """A run: its layout as in the config, and the number of answers of an update."""

    model: ModelShape
    learner: str  # cluster.learner
    engines: str  # cluster.engines
    answers: int  # of an update

    @property
    def learner_layout(self) -> LearnerLayout:
        return parse_learner(self.learner)

    @property
    def engines_layout(self) -> EnginesLayout:
        return parse_engines(self.engines)

    @property
    def accelerators(self) -> int:
        return self.learner_layout.devices + self.engines_layout.devices


@dataclasses.dataclass(frozen=True)
class Pace:
    """The speed of a run, and the sizes of its answers."""

    tokens_s: float  # generated, and as many trained
    mean_tokens: float  # of an answer
    live_positions: float  # of a slot on average, its prompt included
    slots: int  # of an engine


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of a layout at a pace."""

    layout: Layout
    pace: Pace
    costs: HostCosts
    decode_steps: int = DECODE_STEPS

    @property
    def answers_s(self) -> float:
        return self.pace.tokens_s / self.pace.mean_tokens

    @property
    def pieces_s(self) -> float:
        return self.pace.tokens_s / self.decode_steps

    @property
    def update_s(self) -> float:
        return self.layout.answers / self.answers_s

    # The controller, in cores: one is all that its Python can use.

    @property
    def answers_cpu(self) -> float:
        return self.answers_s * self.costs.answer_s

    @property
    def pieces_cpu(self) -> float:
        return self.pieces_s * self.costs.piece_s

    @property
    def tokens_cpu(self) -> float:
        return self.pace.tokens_s * self.costs.token_s

    @property
    def upkeep_cpu(self) -> float:
        """The cores used by health checks and reads of the registry."""
        engines = self.layout.engines_layout.count
        return engines * (self.costs.question_s / CHECK_EVERY_S + self.costs.entry_s / LOOK_EVERY_S)

    @property
    def batch_cpu(self) -> float:
        return self.batch_bytes * self.costs.batch_byte_s / self.update_s

    @property
    def controller_cpu(self) -> float:
        return self.answers_cpu + self.pieces_cpu + self.tokens_cpu + self.upkeep_cpu + self.batch_cpu

    @property
    def batch_bytes(self) -> float:
        return self.layout.answers * self.pace.mean_tokens * self.costs.batch_token_bytes

    @property
    def memory_bytes(self) -> float:
        """Memory of the controller: running answers in all slots, complete answers of an update, and its command."""
        open_tokens = self.layout.engines_layout.count * self.pace.slots * self.pace.live_positions
        return TOKEN_BYTES * (open_tokens + self.layout.answers * self.pace.mean_tokens) + self.batch_bytes

    # Files.

    @property
    def log_bytes_day(self) -> float:
        checks = self.layout.engines_layout.count / CHECK_EVERY_S * self.costs.question_log_bytes
        return DAY_S * (self.answers_s * self.costs.log_bytes + checks)

    @property
    def registry_operations_s(self) -> float:
        """Heartbeats of all roles, and the controller's reads: a listing, and time and content of each entry."""
        entries = 1 + self.layout.learner_layout.processes + self.layout.engines_layout.count
        return entries + (1 + 2 * entries) / LOOK_EVERY_S

    @property
    def version_bytes(self) -> float:
        """Bytes of a version with publication.dtype='bfloat16'."""
        return WEIGHT_BYTES * self.layout.model.parameters

    @property
    def written_bytes(self) -> float:
        """Bytes of a version that each learner process writes."""
        return self.version_bytes / self.layout.learner_layout.processes

    @property
    def engine_hosts(self) -> int:
        return -(-self.layout.engines_layout.devices // NODE)

    @property
    def read_bytes(self) -> float:
        """Bytes of a version read over the network: each node reads it once for all its engines."""
        return self.engine_hosts * self.version_bytes

    @property
    def network_s(self) -> float:
        """Seconds of a publication in which all nodes read the version."""
        return self.read_bytes / FILE_SERVER_BYTES_S

    @property
    def write_s(self) -> float:
        """Seconds of a publication in which each learner process writes its part on one core."""
        return self.written_bytes * self.costs.write_byte_s

    @property
    def read_s(self) -> float:
        """Seconds of a publication in which every engine reads and checks it all on one core, while decoding."""
        return self.version_bytes * self.costs.read_byte_s

    # What breaks first.

    def shares(self) -> dict[str, float]:
        """The used share of each limit."""
        return {
            'one core of the controller': self.controller_cpu,
            'reading a version from the shared file system, of the time of an update': self.network_s / self.update_s,
            'writing a version on one core of each learner process, of an update': self.write_s / self.update_s,
            'reading and checking a version on one core of an engine, of an update': self.read_s / self.update_s,
        }


def choose_pieces(load: Load) -> Load:
    """The load with the least `decode_steps` of PIECES that leaves part of the controller's core free, or the most."""
    loads = [dataclasses.replace(load, decode_steps=steps) for steps in PIECES]
    return next((one for one in loads if one.controller_cpu < _BUSY), loads[-1])


_MARK = 'python -m areal_jax.simulation.planner.cluster_load'
REACHED = Reached(bandwidth=0.6, prefill=0.5, mfu=0.40)  # the docstring of Reached gives the reasons
PASSES = 4  # forward passes of a trained token: 3 for the update, 1 for the proximal log-probs
MEAN_TOKENS, PROMPT_TOKENS = 9_000, 512  # of answers of at most 27,648 tokens, lognormal with sigma 0.75
LIVE_POSITIONS = 6_642 + PROMPT_TOKENS  # of a slot on average: E[L^2] / (2 E[L]) of these lengths, and the prompt
MOST_SLOTS = 256
LAYOUTS = (
    Layout(R1_DISTILL_1_5B, 'hosts=1 x fsdp=2', '6 x tensor=1', 64 * 16),
    Layout(R1_DISTILL_7B, 'hosts=3 x data=3,fsdp=8', '40 x tensor=1', 256 * 16),
    Layout(R1_DISTILL_32B, 'hosts=22 x data=11,fsdp=8,tensor=2', '42 x tensor=8', 512 * 16),
)

HALF_NODES = dataclasses.replace(LAYOUTS[-1], engines='84 x tensor=4')  # twice as many readers of a version


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
        return min(MOST_SLOTS, self.engine.cache_tokens(LIVE_POSITIONS) // LIVE_POSITIONS)

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


def stream(load: Load) -> StreamedVersion:
    """A version with publication.channel='stream' in place of files."""
    links = StreamLinks(load.layout.learner_layout.processes, LINK_BYTES_S)
    return stream_version(links, Peak(load.layout).engine, load.layout.engines_layout.count)


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


def receive_once(load: Load) -> StreamedVersion:
    """A version that one engine of each node receives, for the others too."""
    return dataclasses.replace(stream(load), engines=load.engine_hosts, engines_of_host=1)


def pass_on(load: Load) -> StreamedVersion:
    """A version that leaves the learner once, and that each node sends on while it receives it: the least time."""
    return dataclasses.replace(stream(load), engines=1, engines_of_host=1)


STREAM: Lines = (
    ('`cluster.engines`', lambda load: f'`{load.layout.engines}`'),
    ('sent by each learner process, GB', lambda load: number(stream(load).sent_bytes / 1e9)),
    ('received by each node of engines, GB', lambda load: number(stream(load).received_bytes / 1e9)),
    ('s to prepare a version', lambda load: number(stream(load).prepare_s)),
    ('s to send and receive it', lambda load: number(stream(load).transfer_s)),
    ('s to load it', lambda load: number(stream(load).load_s)),
    ('s until engines have it', lambda load: f'**{number(stream(load).late_s)}**'),
    ('of an update', lambda load: percent(stream(load).late_s / load.update_s)),
    ('s if each node received it once', lambda load: number(receive_once(load).late_s)),
    ('s if nodes also passed it on to each other', lambda load: number(pass_on(load).late_s)),
    ('cores of each learner process, sending', lambda load: number(stream(load).sending_cores)),
    ('cores of each node of engines, receiving', lambda load: number(stream(load).receiving_cores)),
    ('s more if engines digest on the host', lambda load: number(stream(load).host_digest_s)),
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
    streamed = [*loads, Peak(HALF_NODES).load(costs)]
    return {name: make_table(lines, loads) for name, lines in tables.items()} | {
        'sockets': make_table(STREAM, streamed)
    }


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
