"""What the host's loop costs: the real controller, pool, gate, clock and event log around engines that cost nothing.

    python -m benchmarks.host --out=benchmarks/results/host.json

For each number of engines and of open requests:

  us_request      CPU microseconds from a request's arrival at the pool to its end: routing, ledger, coroutine, clock
                  and log lines (route, finish);
  us_trajectory   CPU microseconds of the whole loop for each trajectory: admission, request, reward, buffer, batch,
                  publication, and all their log lines.

Under the virtual clock work runs inline, so the CPU time of the process is that of the loop. `lag_s_1m_tokens` is the
longest time for which the loop is busy without a look at new completions while it handles updates of 1,048,576 trained
tokens (1,024 answers of 1,024 tokens; 64 slots, 16 steps a dispatch, through the in-process engine), and
`log_bytes_token` the size of the same run's log for each generated token.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.controller import Controller, LoopSettings, StepRecord
from areal_jax.control.events import EventLog
from areal_jax.control.gate import StalenessGate
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import DISK, LEARNER, REWARD, engine_lane, publish_lane
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.pool import Pool
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.types import GenerationRequest, SamplingParams
from benchmarks.host_toys import FastBackend, ToyChannel, ToyEngine, ToyLearner, ToyStream, ToyVerifier

ENGINES, OPEN = (2, 32, 256), (64, 512, 4096)
GROUP_SIZE, PROMPT_TOKENS, ANSWER_TOKENS = 8, 64, 64
PRICES = dict.fromkeys(('decode', 'prefill', 'train', 'publish', 'load', 'snapshot', 'reward', 'save'), 0.001)
SAMPLING = SamplingParams(max_new_tokens=1024, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=(0,))


def make_clock(engines: int, log: EventLog) -> VirtualClock:
    lanes = {LEARNER: 1, REWARD: 4, DISK: 1} | {
        lane(i): 1 for i in range(engines) for lane in (engine_lane, publish_lane)
    }
    return VirtualClock(lanes, log, PRICES)


def measure_requests(engines: int, open_requests: int, seconds: float, folder: pathlib.Path) -> float:
    """CPU microseconds a request while `open_requests` are open."""
    log = EventLog(folder / 'requests.jsonl')
    clock = make_clock(engines, log)
    supervisor = Supervisor(clock)
    toys = [ToyEngine(i, clock, ANSWER_TOKENS) for i in range(engines)]
    pool = Pool(toys, clock, log, supervisor)
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    started, done, first = 0, 0, [0.0, 0]
    ended = clock.event('end')

    async def follow(number: int) -> None:
        nonlocal done
        request = GenerationRequest(number // GROUP_SIZE, number % GROUP_SIZE, 0, prompt, SAMPLING)
        generation = pool.generate(request)
        versions = [segment.policy_version async for segment in generation]
        log.write(
            'finish', draw=request.draw, sample=request.sample, tokens=ANSWER_TOKENS, reason=generation.finish_reason,
            versions=versions,
        )  # fmt: skip
        done += 1
        if done == open_requests:
            first[:] = time.process_time(), done
        if done > open_requests and time.process_time() - first[0] > seconds:
            ended.set()
        else:
            start_next()

    def start_next() -> None:
        nonlocal started
        supervisor.start(f'request {started}', follow(started))
        started += 1

    async def program() -> float:
        for toy in toys:
            toy.start(supervisor)
        for _ in range(open_requests):
            start_next()
        await clock.wait(ended)
        return (time.process_time() - first[0]) / (done - first[1])

    result = clock.execute(supervisor.run(program()))
    log.close()
    return 1e6 * result


def make_controller(
    clock: VirtualClock, log: EventLog, supervisor: Supervisor, pool: Pool, open_requests: int, batch: int, steps: int,
    on_step: Callable[[StepRecord], None],
) -> Controller:  # fmt: skip
    groups = open_requests // GROUP_SIZE
    gate = StalenessGate(
        groups_per_update=batch, eta=float('inf'), max_running=groups, buffer_capacity=groups + 2 * batch,
        max_admitted=steps * batch,
    )  # fmt: skip
    return Controller(
        LoopSettings(
            steps=steps,
            group_size=GROUP_SIZE,
            groups_per_update=batch,
            max_token_age=None,
            over_age='off',
            checkpoint_every=0,
            max_failed_groups=32,
        ),
        clock=clock,
        log=log,
        supervisor=supervisor,
        stream=ToyStream(PROMPT_TOKENS),
        pool=pool,
        workflow=SingleTurn(pool, SAMPLING, 0),
        verifier=ToyVerifier(clock),
        learner=ToyLearner(),
        channel=ToyChannel(),
        gate=gate,
        ring=None,
        update_tokens=lambda groups: 1,
        on_step=on_step,
        observer_state=dict,
        save_checkpoint=lambda *_: None,
        copy_version=lambda published: None,
    )


def measure_trajectories(engines: int, open_requests: int, steps: int, seconds: float, folder: pathlib.Path) -> float:
    """CPU microseconds of the loop for each trajectory, from the second update on."""
    log = EventLog(folder / 'trajectories.jsonl')
    clock = make_clock(engines, log)
    supervisor = Supervisor(clock)
    toys = [ToyEngine(i, clock, ANSWER_TOKENS) for i in range(engines)]
    pool, batch = Pool(toys, clock, log, supervisor), max(8, open_requests // GROUP_SIZE // 4)
    times: list[float] = []

    def on_step(step: StepRecord) -> None:
        times.append(time.process_time())
        if times[-1] - times[0] > seconds and len(times) > 2:
            controller.stop_requested.set()

    controller = make_controller(clock, log, supervisor, pool, open_requests, batch, steps, on_step)

    async def program() -> None:
        for toy in toys:
            toy.start(supervisor)
        await controller.run()

    clock.execute(supervisor.run(program()))
    log.close()
    return 1e6 * (times[-1] - times[0]) / ((len(times) - 1) * batch * GROUP_SIZE)


def measure_lag(folder: pathlib.Path, updates: int = 3) -> tuple[float, float]:
    """(longest time the loop is busy, bytes of log a generated token) at 1,024 answers of 1,024 tokens an update."""
    log = EventLog(folder / 'lag.jsonl')
    clock = make_clock(2, log)
    supervisor = Supervisor(clock)
    channel, batch = ToyChannel(), 1024 // GROUP_SIZE
    engines = [
        LocalEngine(
            i, FastBackend(64), clock, log, receive=channel.receive, version=0, params=0,
            kv_policy='recompute', decode_steps=16,
        )
        for i in range(2)
    ]  # fmt: skip
    pool = Pool(engines, clock, log, supervisor)
    tokens = 0
    busiest = [0.0, time.monotonic()]

    def on_step(step: StepRecord) -> None:
        nonlocal tokens
        tokens += sum(len(t.answer_tokens) for g in step.groups for t in g.trajectories)

    controller = make_controller(clock, log, supervisor, pool, 1024, batch, updates, on_step)
    release = clock._release_next

    def release_next(block: Callable[[float | None], list[object]]) -> list[object]:
        busiest[0] = max(busiest[0], time.monotonic() - busiest[1])
        ready = release(block)
        busiest[1] = time.monotonic()
        return ready

    clock._release_next = release_next  # type: ignore[method-assign]

    async def program() -> None:
        for engine in engines:
            engine.start(supervisor)
        await controller.run()

    clock.execute(supervisor.run(program()))
    log.close()
    size = (folder / 'lag.jsonl').stat().st_size
    return busiest[0], size / tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path, help='the JSON; printed in any case')
    parser.add_argument('--seconds', type=float, default=2.0, help='CPU seconds for each of the 18 numbers')
    parser.add_argument('--turns', type=int, default=3, help='repetitions; the median counts')
    args = parser.parse_args()
    cells = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        lags = []  # first: what the other measurements leave behind would make the garbage collector slow
        for turn in range(args.turns):
            (folder / f'lag_{turn}').mkdir()
            lags.append(measure_lag(folder / f'lag_{turn}'))
        for engines in ENGINES:
            for open_requests in OPEN:
                request, trajectory = [], []
                for turn in range(args.turns):
                    part = folder / f'{engines}_{open_requests}_{turn}'
                    part.mkdir()
                    request.append(measure_requests(engines, open_requests, args.seconds, part))
                    trajectory.append(measure_trajectories(engines, open_requests, 10**6, args.seconds, part))
                cells.append({
                    'engines': engines, 'open': open_requests,
                    'us_request': round(statistics.median(request), 1),
                    'us_trajectory': round(statistics.median(trajectory), 1),
                })  # fmt: skip
                print(cells[-1], flush=True)
    result = {
        'cells': cells,
        'lag_s_1m_tokens': round(statistics.median(lag for lag, _ in lags), 4),
        'log_bytes_token': round(lags[0][1], 4),
        'seconds': args.seconds,
        'turns': args.turns,
        'machine': {'processor': platform.processor() or platform.machine(), 'python': platform.python_version()},
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
