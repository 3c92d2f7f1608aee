"""The host's loop at one size, a process of its own: what an earlier size leaves behind slows the garbage collector.

The real controller, pool, gate, clock and event log around the toys of host_toys.py; `pool` says which pool:
'in_process' (rollout/pool.py), or 'servers' (rollout/servers/server_pool.py), with a keeper for every engine that
asks it every 5 s of the clock how it is. An engine ends 8 answers in each dispatch of DISPATCH_S, so that with 25 open
requests an answer takes a minute, and checks of health weigh as much against answers as in a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from areal_jax.app.process.setup import space_full_collections
from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.loop import Block, Ready
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.controller import Controller, LoopSettings, StepRecord
from areal_jax.control.event_writer import EventLog
from areal_jax.control.gate import StalenessGate
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import DISK, LEARNER, REWARD, engine_lane, publish_lane
from areal_jax.protocols import Clock
from areal_jax.protocols import Pool as AnyPool
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.servers.member import ServerSettings
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.types import PublishedWeights, SamplingParams
from benchmarks.host_toys import (
    DIGEST,
    FastBackend,
    ToyChannel,
    ToyEngine,
    ToyLearner,
    ToyServer,
    ToyStream,
    ToyVerifier,
)
from benchmarks.sides import Call, Start, serve

GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS = 8, 64, 64
DISPATCH_S = 20.0  # of the clock
PRICES = dict.fromkeys(('prefill', 'train', 'publish', 'load', 'snapshot', 'reward', 'save'), 0.001)
SAMPLING = SamplingParams(max_new_tokens=1024, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=(0,))
NEVER = 10**6  # updates
LAG_GROUPS, LAG_UPDATES, LAG_SLOTS = 128, 3, 64


class TimedClock(VirtualClock):
    """Notes for how long the host's loop is busy between two looks at new completions."""

    def __init__(self, lanes: Mapping[str, int], log: EventLog, prices: Mapping[str, float]):
        self.busy_s: list[float] = []
        self._looked_s = time.monotonic()
        super().__init__(lanes, log, prices)

    def _release_next(self, block: Block) -> Ready:
        waited_s = 0.0

        def wait(timeout_s: float | None) -> Ready:
            nonlocal waited_s
            began_s = time.monotonic()
            ready = block(timeout_s)
            waited_s += time.monotonic() - began_s
            return ready

        ready = super()._release_next(wait)
        now_s = time.monotonic()
        self.busy_s.append(now_s - self._looked_s - waited_s)
        self._looked_s = now_s
        return ready


@dataclasses.dataclass
class Window:
    """What is measured, from the first update on: before it, the engines are filled."""

    log_path: pathlib.Path
    seconds: float  # of CPU, at least
    busy_s: list[float] = dataclasses.field(default_factory=list)  # see TimedClock
    updates: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    log_bytes: int = 0

    def note_update(self) -> bool:
        """Whether the window is long enough: it has two updates and the seconds."""
        found = time.process_time(), time.monotonic(), self.log_path.stat().st_size
        if not self.updates:
            self._start = found
            self.busy_s.clear()
        self.cpu_s, self.wall_s = found[0] - self._start[0], found[1] - self._start[1]
        self.log_bytes = found[2] - self._start[2]
        self.updates += 1
        return self.updates > 2 and self.cpu_s > self.seconds

    def checks(self, trajectories: int) -> dict[str, float]:
        """Of updates with so many trajectories; ratios.py reads the first three."""
        ended = trajectories * (self.updates - 1)
        parts = {'part_cpu_s': self.cpu_s, 'part_wall_s': self.wall_s}
        return {'tokens': ended, **parts, 'log_bytes': self.log_bytes / ended}


def describe_lag(busy_s: list[float]) -> dict[str, float]:
    """Milliseconds between two looks: the longest, and what a completion waits for at most in 99 of 100 cases.

    A completion that comes at a moment when the loop is busy waits for the next look: spells of length d hold
    max(0, d - x) seconds in which the wait is longer than x.
    """
    spells = np.sort(np.asarray(busy_s))[::-1]
    left_s = np.cumsum(spells) - spells * np.arange(1, len(spells) + 1)  # with waits above each spell
    place = int(np.searchsorted(left_s, 0.01 * spells.sum(), side='right'))  # spells that are longer than the wait
    wait_s = (spells[:place].sum() - 0.01 * spells.sum()) / place
    return {
        'lag_ms_p99': 1e3 * float(wait_s),
        'lag_ms_max': 1e3 * float(spells[0]),
        'spell_ms_p99': 1e3 * float(np.quantile(spells, 0.99)),
    }


def make_clock(engines: int, log: EventLog, dispatch_s: float) -> TimedClock:
    lanes = {LEARNER: 1, REWARD: 4, DISK: 1} | {
        lane(i): 1 for i in range(engines) for lane in (engine_lane, publish_lane)
    }
    return TimedClock(lanes, log, PRICES | {'decode': dispatch_s})


def make_controller(
    clock: Clock, log: EventLog, supervisor: Supervisor, pool: AnyPool, groups: int, batch: int, steps: int,
    on_step: Callable[[StepRecord], None], sampling: SamplingParams = SAMPLING,
) -> Controller:  # fmt: skip
    """Has so many groups open, and trains on `batch` of them in each update."""
    gate = StalenessGate(
        groups_per_update=batch, eta=float('inf'), max_running=groups, buffer_capacity=groups + 2 * batch,
        max_admitted=steps * batch,
    )  # fmt: skip
    return Controller(
        LoopSettings(
            steps=steps, group_size=GROUP_SIZE, groups_per_update=batch, oldest_kept=None,
            checkpoint_every=0, max_failed_groups=32, slots=groups,
        ),
        clock=clock, log=log, supervisor=supervisor, stream=ToyStream(PROMPT_TOKENS), pool=pool,
        workflow=SingleTurn(pool, sampling, 0), verifier=ToyVerifier(clock), learner=ToyLearner(),
        channel=ToyChannel(), gate=gate, ring=None, update_tokens=lambda groups: 1, on_step=on_step,
        observer_state=dict, save_checkpoint=lambda *_: None,
    )  # fmt: skip


def make_server_pool(clock: Clock, log: EventLog, supervisor: Supervisor) -> ServerPool:
    async def score(version: int, prompt: np.ndarray, answer: np.ndarray) -> None:
        return None  # never asked: there is no probe

    def fail(sentence: str) -> None:
        raise RuntimeError(sentence)

    return ServerPool(
        clock, log, supervisor, ServerSettings(), published=PublishedWeights(0, DIGEST, 0), score=score,
        on_no_server=fail,
    )  # fmt: skip


def measure_loop(pool: str, engines: int, open_each: int, seconds: float, path: pathlib.Path) -> dict[str, float]:
    """From the first update until there are two more and so many CPU seconds; an update takes a quarter of the open."""
    groups = engines * open_each // GROUP_SIZE
    batch = max(8, groups // 4)
    with opened(path) as log:
        clock = make_clock(engines, log, DISPATCH_S)
        supervisor, window = Supervisor(clock), Window(path, seconds, clock.busy_s)
        toys = [(ToyServer if pool == 'servers' else ToyEngine)(i, clock, ANSWER_TOKENS) for i in range(engines)]
        servers = make_server_pool(clock, log, supervisor) if pool == 'servers' else None

        def on_step(step: StepRecord) -> None:
            if window.note_update():
                controller.stop_requested.set()

        routed: AnyPool = servers or Pool(toys, clock, log, supervisor)
        controller = make_controller(clock, log, supervisor, routed, groups, batch, NEVER, on_step)

        async def program() -> float:
            began_s = time.process_time()
            for toy in toys:
                toy.start(supervisor)
            if servers:
                servers.start()
                for toy in toys:
                    servers.join(cast(ToyServer, toy), 1, '')
                await servers.await_serving(engines, 600.0, controller.stop_requested)
            start_s = time.process_time() - began_s
            await controller.run()
            return start_s

        start_s = clock.execute(supervisor.run(program()))
    return window.checks(batch * GROUP_SIZE) | describe_lag(window.busy_s) | {'start_cpu_s': start_s}


def measure_answers(path: pathlib.Path) -> dict[str, float]:
    """Updates of 1,048,576 tokens in answers of 1,024, through the in-process engine: 64 slots, 16 steps a dispatch."""
    tokens = 0

    def on_step(step: StepRecord) -> None:
        nonlocal tokens
        tokens += sum(len(t.answer_tokens) for g in step.groups for t in g.trajectories)

    with opened(path) as log:
        clock = make_clock(2, log, 0.001)
        supervisor, channel = Supervisor(clock), ToyChannel()
        engines = [
            LocalEngine(
                i, FastBackend(LAG_SLOTS), clock, log, receive=channel.receive, version=0, params=0,
                rollout=RolloutSection(decode_steps=16),
            )
            for i in range(2)
        ]  # fmt: skip
        pool = Pool(engines, clock, log, supervisor)
        controller = make_controller(clock, log, supervisor, pool, LAG_GROUPS, LAG_GROUPS, LAG_UPDATES, on_step)

        async def program() -> None:
            for engine in engines:
                engine.start(supervisor)
            await controller.run()

        clock.execute(supervisor.run(program()))
    return {'lag_ms_max': 1e3 * max(clock.busy_s), 'log_bytes_token': path.stat().st_size / tokens}


@contextlib.contextmanager
def opened(path: pathlib.Path) -> Iterator[EventLog]:
    log = EventLog(path)
    try:
        yield log
    finally:
        log.close()


def prepare(arguments: dict[str, Any]) -> Start:
    space_full_collections()  # as the command of a controller does

    def start() -> tuple[Call, Callable[[], dict[str, Any]]]:
        def call() -> dict[str, float]:
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / 'events.jsonl'
                return measure_loop(**arguments, path=path) if arguments else measure_answers(path)

        return call, dict

    return start


if __name__ == '__main__':
    serve(prepare)
