"""Simulates a setting and measures what comes after the warm-up, from the events of the run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence

from areal_jax.app.command_line import load_config
from areal_jax.app.simulate.simulated_site import build_simulation
from areal_jax.events.schema import Event
from areal_jax.lanes import LEARNER, is_engine_lane
from areal_jax.report.event_log import load_events
from areal_jax.telemetry import names
from areal_jax.telemetry.metrics import Line, read_metrics
from benchmarks.simulation import constants
from benchmarks.simulation.setting import Setting, build_config


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one run, between two publications; or medians of several seeds."""

    update_s: float  # seconds an update
    tokens_s: float  # trained tokens a second
    generated_tokens_s: float
    engines_idle: float  # share of the time, mean over the engines: neither decoding nor prefill
    rebuilding: float  # share of the time that engines prefill
    learner_idle: float
    occupancy: float  # tokens of a dispatch over steps and slots
    token_age: float  # versions, mean
    age_max: float  # the same, oldest token
    wall_s: float = 0.0  # of the simulation itself


def simulate_file(config_file: str, fields: Mapping[str, object]) -> tuple[list[Line], list[Event]]:
    """(rows of metrics.jsonl, events) of the simulation of a config file with other fields."""
    config = load_config(config_file)
    with config.unlocked():
        config.update_from_flattened_dict({'telemetry.progress': False, 'telemetry.tensorboard': False, **fields})
    with tempfile.TemporaryDirectory() as directory:
        workdir = pathlib.Path(directory) / 'run'
        build_simulation(config, workdir).train()
        return read_metrics(workdir / 'metrics.jsonl'), load_events(workdir / 'events.jsonl')


class _Measured(Exception):
    """Ends a run whose measured updates are over."""


class _Meter:
    """A listener of events and rows of metrics."""

    def __init__(self, setting: Setting):
        self._setting = setting
        self._published: dict[int, float] = {}
        self._busy: list[tuple[str, str, float, float]] = []  # lane, work, start, end
        self._decoded: list[tuple[float, int, int]] = []  # time, tokens, steps
        self._rows: dict[int, Line] = {}

    def on_event(self, event: Event) -> None:
        if event['kind'] == 'publish':
            self._published[event['version']] = event['time']
        elif event['kind'] == 'run_done' and (is_engine_lane(event['lane'] or '') or event['lane'] == LEARNER):
            start = event['started']
            self._busy.append((event['lane'] or '', event['work'], start, start + event['seconds']))
        elif event['kind'] == 'decode':
            self._decoded.append((event['time'], event['tokens'], event['steps']))

    def on_row(self, step: int, row: Line) -> None:
        self._rows[step] = row
        if step == self._setting.warm_up + self._setting.updates:
            raise _Measured

    def measure(self) -> Measured:
        setting = self._setting
        first, last = setting.warm_up, setting.warm_up + setting.updates
        low, high = self._published[first], self._published[last]
        seconds = high - low
        busy: dict[str, float] = collections.Counter()
        prefill_s = 0.0
        for lane, work, start, end in self._busy:
            inside = max(0.0, min(end, high) - max(start, low))
            busy[lane] += inside
            prefill_s += inside * (work == 'prefill')
        decoded = [(tokens, steps) for at, tokens, steps in self._decoded if low < at <= high]
        rows = [self._rows[step] for step in range(first + 1, last + 1)]
        trained = [float(row[names.UPDATE_TOKENS]) for row in rows]
        engines_s = sum(busy[lane] for lane in busy if is_engine_lane(lane))
        ages = [float(row[names.TOKEN_AGE_MEAN]) for row in rows]
        return Measured(
            update_s=seconds / setting.updates,
            tokens_s=sum(trained) / seconds,
            generated_tokens_s=sum(tokens for tokens, _ in decoded) / seconds,
            engines_idle=1 - engines_s / (setting.engines * seconds),
            rebuilding=prefill_s / (setting.engines * seconds),
            learner_idle=1 - busy[LEARNER] / seconds,
            occupancy=sum(tokens for tokens, _ in decoded) / (setting.slots * sum(steps for _, steps in decoded)),
            token_age=sum(age * tokens for age, tokens in zip(ages, trained, strict=True)) / sum(trained),
            age_max=max(float(row[names.TOKEN_AGE_MAX]) for row in rows),
        )


def simulate(setting: Setting, seed: int) -> Measured:
    """One run, which ends with its measured updates."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        run = build_simulation(build_config(setting, seed), pathlib.Path(directory) / 'run')
        meter = _Meter(setting)
        run.program.parts.host.log.listeners.append(meter.on_event)
        run.program.parts.metrics.listeners.append(meter.on_row)
        with contextlib.suppress(_Measured):
            run.train()
    found = dataclasses.replace(meter.measure(), wall_s=time.monotonic() - began)
    eta = setting.describe()['eta']
    print(
        f'{setting.model}, {setting.engines} x {setting.tensor} + {setting.learner}, {setting.groups} groups, '
        f'eta {eta}, {setting.kv_policy}{", in turns" * setting.in_turns}, seed {seed}: {found}',
        file=sys.stderr, flush=True,
    )  # fmt: skip
    return found


class Simulations:
    """Runs settings with several seeds, each once, and none after its time is over.

    Args:
      until: of time.monotonic().
      kept: a file of runs, one a line, to which every run is added; those of the same setting, seed and constants are
        not made again.
    """

    def __init__(self, seeds: Sequence[int], until: float, kept: pathlib.Path | None = None):
        self.seeds, self._until, self._kept = list(seeds), until, kept
        self._runs: dict[Setting, dict[int, Measured]] = {}
        lines = kept.read_text().splitlines() if kept and kept.exists() else []
        self._known = {run['key']: Measured(**run['measured']) for run in map(json.loads, lines)}
        self._asked: set[Setting] = set()  # since the last `take`

    def add_seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def find(self, setting: Setting) -> Measured | None:
        """Medians over the seeds that there was time for; None where there was none for one."""
        runs = self._runs.setdefault(setting, {})
        self._asked.add(setting)
        for seed in self.seeds:
            if seed not in runs and (run := self._run(setting, seed)):
                runs[seed] = run
        return median(runs.values()) if runs else None

    def _run(self, setting: Setting, seed: int) -> Measured | None:
        key = json.dumps([setting.describe(), seed, constants.digest()])
        if key not in self._known and time.monotonic() < self._until:
            self._known[key] = measured = simulate(setting, seed)
            if self._kept:
                with self._kept.open('a') as file:
                    print(json.dumps({'key': key, 'measured': dataclasses.asdict(measured)}), file=file)
        return self._known.get(key)

    def seeds_of(self, setting: Setting) -> int:
        return len(self._runs.get(setting, ()))

    def take(self) -> list[dict[str, object]]:
        """Every run of the settings that were asked for since the last call, for the report."""
        asked, self._asked = self._asked, set()
        return [
            {'setting': setting.describe(), 'runs': {seed: dataclasses.asdict(run) for seed, run in runs.items()}}
            for setting, runs in self._runs.items()
            if setting in asked and runs
        ]


def median(runs: Iterable[Measured]) -> Measured:
    """Of each quantity by itself."""
    values: Mapping[str, list[float]] = collections.defaultdict(list)
    for run in runs:
        for name, value in dataclasses.asdict(run).items():
            values[name].append(value)
    return Measured(**{name: statistics.median(found) for name, found in values.items()})
