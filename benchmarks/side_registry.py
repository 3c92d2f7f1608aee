"""The registry of a run with so many engines: what its files cost who writes them, and the controller that reads them.

Entries lie in a real directory. A process of its own sets the time of every entry once a second, as the heartbeats of
the engines do; the controller's part is the real RegistryWatch under the real clock, which looks once a second.

    python -m benchmarks.side_registry --beat DIR      that process, until its standard input ends
"""

from __future__ import annotations

import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, cast

import areal_jax
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import REGISTRY
from areal_jax.registry import REGISTRY as DIRECTORY
from areal_jax.registry import Registration
from areal_jax.rollout.servers.keeper import ServerFacts
from areal_jax.rollout.servers.server_entries import RegistryWatch, ServerEntry, describe_server, read_registry
from areal_jax.rollout.servers.server_pool import ServerPool
from benchmarks.host_toys import ToyServer
from benchmarks.sides import ROOT, Call, Start, serve

PERIOD_S = 1.0  # of heartbeats and of looks
LAST = 16  # engines that register while their starts are timed
STALL_S = 60.0
FACTS = ServerFacts('recompute', 40_960, 'bfloat16', 'processed')


class NoPool:
    """Notes nothing but how many engines have joined: a pool's own work with them is measured elsewhere."""

    joined = 0

    def join(self, engine: ToyServer, incarnation: int, url: str) -> None:
        self.joined += 1

    def suspect(self, name: str, reason: str) -> None:
        raise RuntimeError(f'{name}: {reason}: the heartbeats are too slow for this machine')


def register(workdir: pathlib.Path, engines: int) -> float:
    """Makes the entries; returns CPU seconds of one start, among as many entries."""
    entry = describe_server('engine-0', 'http://10.0.0.1:30000', 'own', FACTS, index=0, code=areal_jax.__version__)
    first = Registration(workdir, entry)
    content = json.loads(first.path.read_text())
    for index in range(1, engines - LAST):
        name = f'engine-{index}'
        path = first.path.with_name(first.path.name.replace('engine-0', name))
        path.write_text(json.dumps(content | {'name': name, 'index': index}, indent=1) + '\n')
    began_s = time.process_time()
    for index in range(engines - LAST, engines):
        entry = describe_server(f'engine-{index}', content['address'], 'own', FACTS, index=index)
        Registration(workdir, entry)
    return (time.process_time() - began_s) / LAST


def measure_looks(workdir: pathlib.Path, engines: int, looks: int) -> dict[str, float]:
    """CPU and wall seconds of a look of the controller, after two that everything joins in."""
    log = EventLog(None, keeps=False)
    clock, pool, times = RealClock({REGISTRY: 1}, log, STALL_S), NoPool(), []
    supervisor, ended = Supervisor(clock), clock.event('end of the measurement')

    def read() -> list[ServerEntry]:
        times.append((time.process_time(), time.monotonic()))
        if len(times) > looks + 2:
            ended.set()
        return read_registry(workdir)

    make = lambda entry: cast(Any, ToyServer(entry.index or 0, clock, 1))
    watch = RegistryWatch(clock, cast(ServerPool, pool), read, make, every_s=PERIOD_S)

    async def program() -> None:
        supervisor.start('watch', watch.run())
        await clock.wait(ended)

    clock.execute(supervisor.run(program()))
    if pool.joined != engines:
        raise RuntimeError(f'{pool.joined} engines joined, and {engines} registered')
    cpu_s, wall_s = (times[-1][i] - times[2][i] for i in range(2))
    spans = len(times) - 3
    return {'look_cpu_s': cpu_s / spans, 'looks_a_s': spans / wall_s}


def beat(directory: pathlib.Path) -> None:
    """Sets the time of every entry once a second; in the end prints CPU seconds of one."""
    beats, cpu_s = 0, 0.0
    while not select.select([sys.stdin], [], [], PERIOD_S)[0]:
        began_s, names = time.process_time(), os.listdir(directory)
        for name in names:
            os.utime(directory / name)
        beats, cpu_s = beats + len(names), cpu_s + time.process_time() - began_s
    print(cpu_s / max(beats, 1))


def measure_registry(engines: int, looks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        workdir = pathlib.Path(folder)
        start_s = register(workdir, engines)
        command = [sys.executable, '-m', 'benchmarks.side_registry', '--beat', str(workdir / DIRECTORY)]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as beats:
            found = measure_looks(workdir, engines, looks)
            beat_s = float(beats.communicate()[0])
    return found | {'start_cpu_s': start_s, 'beat_cpu_s': beat_s}


def prepare(arguments: dict[str, Any]) -> Start:
    def start() -> tuple[Call, Callable[[], dict[str, Any]]]:
        return lambda: measure_registry(**arguments), dict

    return start


if __name__ == '__main__':
    if sys.argv[1] == '--beat':
        beat(pathlib.Path(sys.argv[2]))
    else:
        serve(prepare)
