"""The host's loop with servers behind HTTP: what a controller pays for an answer, a piece of one and a question.

The real controller, server pool, clients, real clock and event log; the servers come from stub_servers.py, on
another core. CPU seconds: this process, loop and I/O thread together.
"""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from areal_jax.app.process.setup import space_full_collections
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.controller import StepRecord
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import DISK, LEARNER, REWARD, control_lane, engine_lane, publish_lane, server_lanes
from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.http.clients.server import ServerLimits
from areal_jax.rollout.http.clients.vllm import OwnDialect
from areal_jax.types import SamplingParams
from benchmarks.side_host import GROUP_SIZE, NEVER, Window, make_controller, make_server_pool, opened
from benchmarks.sides import ROOT, Call, Start, serve

LIMITS = ServerLimits(slots=256, vocab_size=32_000, context_tokens=1 << 20)
CONTROL_CALLS = 4  # at the same time, to one server
STALL_S = 60.0
BATCH = 8  # groups
QUESTIONS = 300


@contextlib.contextmanager
def stub_servers(pieces: int, tokens: int, pause_s: float) -> Iterator[str]:
    """Their URL, without the number of a server."""
    command = [sys.executable, '-m', 'benchmarks.stub_servers', str(pieces), str(tokens), str(pause_s)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f'http://127.0.0.1:{int(process.stdout.readline())}'
        process.stdin.close()


def make_engines(url: str, count: int, clock: RealClock, log: EventLog) -> list[OwnEngine]:
    engines = []
    for index in range(count):
        for lane, width in ((engine_lane, LIMITS.slots + 1), (publish_lane, 1), (control_lane, CONTROL_CALLS)):
            clock.declare(lane(index), width)
        connection = Connection(f'{url}/{index}')
        engines.append(
            OwnEngine(
                server_lanes(index),
                OwnDialect(),
                connection,
                clock,
                log,
                locate=lambda published: 'DIR',
                limits=LIMITS,
                kv_policy='recompute',
            )
        )
    return engines


def measure_wire(
    engines: int, open_each: int, pieces: int, tokens: int, pause_s: float, seconds: float, path: pathlib.Path
) -> dict[str, float]:
    """Questions, one after another; then from the first update until there are two more and so many CPU seconds."""
    sampling = SamplingParams(pieces * tokens, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=())
    with opened(path) as log, stub_servers(pieces, tokens, pause_s) as url:
        clock = RealClock({LEARNER: 1, REWARD: 4, DISK: 1}, log, STALL_S)
        supervisor, window, ended = Supervisor(clock), Window(path, seconds), clock.event('end of the measurement')
        pool = make_server_pool(clock, log, supervisor)

        def on_step(step: StepRecord) -> None:
            if window.updates == 0:
                clock.restart()  # so that its lag covers the window alone
            if window.note_update():
                ended.set()

        groups = engines * open_each // GROUP_SIZE
        controller = make_controller(clock, log, supervisor, pool, groups, BATCH, NEVER, on_step, sampling)

        async def program() -> dict[str, float]:
            pool.start()
            for engine in (found := make_engines(url, engines, clock, log)):
                engine.start(supervisor)
                pool.join(engine, 1, url)
            await pool.await_serving(engines, STALL_S, controller.stop_requested)
            asked = await ask(found[0], path)
            supervisor.start('controller', controller.run())
            await clock.wait(ended)
            return window.checks(BATCH * GROUP_SIZE) | {'lag_ms_max': 1e3 * clock.max_lag_s} | asked

        return clock.execute(supervisor.run(program()))


async def ask(engine: OwnEngine, path: pathlib.Path) -> dict[str, float]:
    """CPU seconds, and bytes of the log, of a question what the server holds: a health check."""
    await engine.ask()
    began_s, began = time.process_time(), path.stat().st_size
    for _ in range(QUESTIONS):
        await engine.ask()
    seconds, nbytes = time.process_time() - began_s, path.stat().st_size - began
    return {'question_s': seconds / QUESTIONS, 'question_log_bytes': nbytes / QUESTIONS}


def prepare(arguments: dict[str, Any]) -> Start:
    space_full_collections()  # as the command of a controller does

    def start() -> tuple[Call, Callable[[], dict[str, Any]]]:
        def call() -> dict[str, float]:
            with tempfile.TemporaryDirectory() as folder:
                return measure_wire(**arguments, path=pathlib.Path(folder) / 'events.jsonl')

        return call, dict

    return start


if __name__ == '__main__':
    serve(prepare)
