"""Fits prices to the logs of real runs, and predicts runs that were left out with them."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

from areal_jax.app.simulate.simulated_site import build_simulation
from areal_jax.app.workdir.records import restore_config
from areal_jax.config import CONFIG
from areal_jax.config.cluster import parse_engines
from areal_jax.config.fields import ConfigError
from areal_jax.config.near_names import read_saved
from areal_jax.errors import UserError
from areal_jax.events.schema import FILE as EVENTS
from areal_jax.events.schema import Event
from areal_jax.files import read_json
from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.report.event_log import busy_share, lane_intervals, load_events, of_training, window
from areal_jax.simulation.calibration import Table, calibrate, write_table

# a prediction leaves nothing to look at but its log
_QUIET = {
    'telemetry.progress': False, 'telemetry.plots': False, 'telemetry.tensorboard': False, 'telemetry.hook': '',
    'telemetry.tracker': 'none', 'telemetry.project': '', 'simulation.prompts': 'task',
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pace:
    """The pace of a run, measured from its log; a prediction is compared with it."""

    update_s: float  # median seconds between publications; the first interval begins at the first admission
    engines_idle: float  # share of the window, mean over the engines
    learner_idle: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A run that was left out of the calibration, and its simulation."""

    run: str
    real: Pace
    simulated: Pace

    @property
    def error(self) -> float:
        """The relative error of the seconds per update, as a share of the real seconds."""
        return self.simulated.update_s / self.real.update_s - 1

    def describe(self) -> str:
        real, simulated = self.real, self.simulated
        return (
            f'{self.run}: {simulated.update_s:.2f} s an update, really {real.update_s:.2f} ({100 * self.error:+.0f}%); '
            f'engines idle {100 * simulated.engines_idle:.0f}%, really {100 * real.engines_idle:.0f}%; '
            f'learner idle {100 * simulated.learner_idle:.0f}%, really {100 * real.learner_idle:.0f}%'
        )


def calibrate_runs(runs: Sequence[pathlib.Path], out: pathlib.Path) -> Table:
    """Fits prices to the logs of the runs and writes them to `out`.

    Raises UserError for a directory without a log, or with the log of a simulation.
    """
    table = calibrate([(run.name, load_log(run)) for run in runs])
    write_table(table, out)
    return table


def load_log(run: pathlib.Path) -> list[Event]:
    """Loads the events of a real run; raises UserError for a simulation or for engines of unequal size."""
    if not (run / EVENTS).is_file():
        raise UserError(f'{run} has no {EVENTS}: name the workdir of a run')
    config = read_saved(run / CONFIG, 'name the workdir of a run')
    if config.get('simulation', {}).get('prices'):
        raise UserError(f'{run} is a simulation: prices are fitted to real runs')
    if not parse_engines(engines := config.get('cluster', {}).get('engines', '1 x shared')).has_equal_engines:
        raise UserError(
            f'{run} has cluster.engines={engines!r}, and one price is fitted for all engines: name runs whose engines '
            'are of one size'
        )
    return load_events(run / EVENTS)


def predict_run(run: pathlib.Path, table: pathlib.Path) -> Prediction:
    """Simulates the run with the prices of the table, its own config and the lengths and rewards of its log."""
    events = load_log(run)
    config = restore_config(read_json(run / CONFIG, 'name the workdir of a run'), str(run / CONFIG))
    with config.unlocked():
        config.update_from_flattened_dict(
            {**_QUIET, 'simulation.prices': str(table), 'simulation.answers': f'log({run})', 'checkpoint.every': 0}
        )
    with tempfile.TemporaryDirectory() as directory:
        build_simulation(config, pathlib.Path(directory) / 'run').train()
        simulated = load_events(pathlib.Path(directory) / 'run' / EVENTS)
    return Prediction(run.name, measure_pace(events), measure_pace(simulated))


def measure_pace(events: Sequence[Event]) -> Pace:
    """Measures the pace of one log; raises ConfigError for a log without an update."""
    within, intervals = window(events), of_training(lane_intervals(events))
    published = [event['time'] for event in events if event['kind'] == 'publish' and event['version'] > 0]
    if not published:
        raise ConfigError('a log without a publication says nothing of an update: name a longer run')
    times = [within.spans[0][0], *published]
    seconds = [high - low for low, high in itertools.pairwise(times)]
    engines = sorted({one.lane for one in intervals if is_engine_lane(one.lane)})
    busy = [busy_share(intervals, lane, within) or 0.0 for lane in engines]
    learner = busy_share(intervals, LEARNER, within) or 0.0
    return Pace(statistics.median(seconds), 1 - statistics.mean(busy), 1 - learner)


def describe_table(table: Table) -> str:
    """Renders the residuals, one line per kind of work, and the contention."""
    rows = [
        f'| {kind} | {found["n"]:.0f} | {found["mean_s"]:.4g} | {100 * found["median_error"]:.0f}% |'
        for kind, found in table.residuals.items()
    ]
    head = ['| work | pieces | mean (s) | median error |', '|---|---|---|---|']
    slower = table.contention
    shared = (
        f'While another lane is busy, work of an engine takes {slower.engines:.2f} times as long, and that of the '
        f'learner {slower.learner:.2f} times.'
    )
    return '\n'.join([*head, *rows, '', shared])


def as_json(table: Table, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Returns the results of the command."""
    return {
        'table': dataclasses.asdict(table),
        'predictions': [dataclasses.asdict(one) | {'error': one.error} for one in predictions],
    }
