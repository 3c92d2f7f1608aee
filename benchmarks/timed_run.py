"""A run of main_train, with servers or without, that is timed from one update to another."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from areal_jax.app.command_line import load_config
from areal_jax.config import default_config, flatten
from areal_jax.events.schema import Event
from areal_jax.lanes import LEARNER
from areal_jax.report.event_log import LaneInterval, lane_intervals
from benchmarks.sides import ROOT, children_cpu_seconds

LOOK_S = 0.05
END_S = 60.0  # for a server to end
CONFIG_FILE = """from areal_jax.config import default_config


def get_config():
    config = default_config()
    config.update_from_flattened_dict({values!r})
    return config
"""


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to run: overrides of the config, and the cores of the trainer and of each server."""

    name: str
    overrides: Mapping[str, object]
    cores: tuple[int, ...]
    servers: tuple[tuple[int, ...], ...] = ()


def run_arm(
    arm: Arm, config: str, overrides: Mapping[str, object], workdir: pathlib.Path, first: int
) -> dict[str, Any]:
    """From the publication of version `first` to the publication of the last one, as sides.py has a call.

    Raises RuntimeError with the last words of the trainer where it fails.
    """
    workdir.mkdir(parents=True)
    values = {**overrides, **arm.overrides}
    given = [f'--config={write_config(workdir, config, values)}', f'--workdir={workdir}']
    began = time.monotonic()
    with contextlib.ExitStack() as parts:
        for number, cores in enumerate(arm.servers):
            parts.enter_context(started('main_serve', [*given, '--port=0'], cores, workdir / f'server_{number}.log'))
        trainer = parts.enter_context(started('main_train', given, arm.cores, workdir / 'trainer.log'))
        cpu = watch_cpu(trainer, workdir / 'metrics.jsonl', first, int(str(values['run.steps'])))
        if trainer.wait():
            raise RuntimeError(f'{arm.name} ended with {trainer.returncode}:\n{last_words(workdir)}')
    wall_s, tokens, waited_s = read_events(workdir / 'events.jsonl', first)
    checks = {'tokens': tokens, 'part_wall_s': wall_s, 'part_cpu_s': cpu, 'publication_wait_share': waited_s / wall_s}
    return {'wall_s': time.monotonic() - began, 'cpu_s': cpu, 'checks': checks}


def write_config(workdir: pathlib.Path, config: str, overrides: Mapping[str, object]) -> pathlib.Path:
    """A config file, since a program refuses overrides on its command line that another one reads."""
    default = dict(flatten(default_config()))
    loaded = flatten(load_config(str(ROOT / config)).copy_and_resolve_references())
    changed = {path: value for path, value in loaded if path not in default or value != default[path]}
    path = workdir / 'config.py'
    path.write_text(CONFIG_FILE.format(values={**changed, **overrides}))
    return path


@contextlib.contextmanager
def started(
    module: str, arguments: Sequence[str], cores: Collection[int], log: pathlib.Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A program of ours on these cores; told to stop at the end, and killed where it does not."""
    with log.open('wb') as output:
        process = subprocess.Popen(
            [sys.executable, '-m', f'areal_jax.{module}', *arguments], cwd=ROOT, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, env={'JAX_COMPILATION_CACHE_DIR': str(log.parent.parent / 'cache'), **os.environ},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def watch_cpu(trainer: subprocess.Popen[bytes], metrics: pathlib.Path, first: int, last: int) -> float:
    """CPU seconds of all processes between the metrics of updates `first` and `last`."""
    at: dict[int, float] = {}
    while trainer.poll() is None and last not in at:
        updates = metrics.read_bytes().count(b'\n') if metrics.exists() else 0
        for update in (first, last):
            if updates >= update and update not in at:
                at[update] = children_cpu_seconds()
        time.sleep(LOOK_S)
    return at[last] - at[first] if len(at) == 2 else float('nan')


def read_events(path: pathlib.Path, first: int) -> tuple[float, float, float]:
    """(seconds from the publication of `first` to the last one, tokens trained meanwhile, wait for publication)."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    published = {event['version']: event['time'] for event in events if event['kind'] == 'publish'}
    lengths: dict[int, int] = {}
    for event in events:
        if event['kind'] == 'finish':
            lengths[event['draw']] = lengths.get(event['draw'], 0) + event['tokens']
    tokens = sum(
        sum(lengths[draw] for draw in event['draws'])
        for event in events
        if event['kind'] == 'consume' and event['update'] > first
    )
    return max(published.values()) - published[first], float(tokens), publication_wait(events, first)


def publication_wait(events: Sequence[Event], first: int) -> float:
    """Seconds that the learner did not train because of the publication of versions above `first`.

    It copies the weights of a version, and hands them over when the version before is on its way.
    """
    intervals = lane_intervals(events)
    copied = {_number(i, 'update'): i for i in intervals if i.lane == LEARNER and i.work == 'snapshot' and i.detail}
    taken = {_number(i, 'version'): i.start for i in intervals if i.work == 'publish'}
    waited = 0.0
    for version, copy in copied.items():
        if version > first:
            waited += copy.end - copy.start + max(0.0, taken.get(version - 1, 0.0) - copy.end)
    return waited


def _number(interval: LaneInterval, name: str) -> int:
    return int(str(interval.detail.get(name, -1)))


def last_words(workdir: pathlib.Path) -> str:
    return '\n'.join(f'{log.name}: {log.read_text(errors="replace")[-2000:]}' for log in sorted(workdir.glob('*.log')))
