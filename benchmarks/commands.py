"""What it costs a controller to send the batch of an update to a learner of 64 processes against one of 4.

    python -m benchmarks.commands --out=benchmarks/results/commands.json

One call of `RemoteLearner.update` with the groups of an update, from the arguments to the last answer, over TCP on this
machine: process 0 gets the groups, and the others the command to repeat its passes. The two sides are called in turns;
the median of the turns counts, with quartiles.

  cpu_s     CPU seconds of the calling process, user and system: what the controller's machine pays
  wall_s    seconds of the call. The stubs share the cores of this machine with the caller

Stub followers are threads in 4 processes without jax, and run what real ones run but for the learner: each checks and
decodes its command, and answers; benchmarks/batches.py measures how the rows get there. The exit code is 0 only if the
CPU seconds with 64 are less than 2 times those with 4.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from areal_jax.distributed.handshake import Hello, Listener, connect
from areal_jax.distributed.messages import LEARNER, Command, Message, encode_message
from areal_jax.distributed.peers import Peers
from areal_jax.distributed.remote_learner import RemoteLearner, follow
from areal_jax.learning.objective.counting import UpdatePrice
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup
from benchmarks.report import write_report
from benchmarks.sides import ROOT

FEW, MANY, BAR = 4, 64, 2.0
STUB_PROCESSES = 4
PROMPT_TOKENS = 128
DEADLINE_S = 300.0


def make_groups(groups: int, answers: int, tokens: int, seed: int) -> list[TrajectoryGroup]:
    """A batch as the loop gives it: one segment an answer, and every fourth answer saw a swap."""
    rng = np.random.default_rng(seed)
    made = []
    for draw in range(groups):
        prompt = Prompt(draw, rng.integers(0, 150_000, PROMPT_TOKENS, np.int32), 'math', {'answer': str(draw)})
        trajectories = []
        for sample in range(answers):
            cut = tokens // 2 if sample % 4 == 0 else tokens
            sizes = [size for size in (cut, tokens - cut) if size]
            segments = tuple(
                Segment(rng.integers(0, 150_000, size, np.int32), -rng.random(size, np.float32), version)
                for version, size in enumerate(sizes)
            )
            trajectories.append(Trajectory(prompt, sample, segments, float(sample % 2), 'stop', 'engine/0', 1.0, 2.0))
        made.append(TrajectoryGroup(draw, tuple(trajectories)))
    return made


class Stub:
    """A learner that costs nothing."""

    def price(self) -> UpdatePrice:
        return UpdatePrice('shared_prompt', 1, filters=False)

    def lead(self, send: object) -> None: ...

    def follow(self, receive: object) -> None: ...

    def repeat_passes(self) -> None: ...

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> None: ...


def serve_stubs(key: bytes, count: int) -> None:
    """Prints `count` addresses, accepts a controller at each, and follows it until all are closed."""
    listeners = [Listener('127.0.0.1', 0, key, Hello('stub', '')) for _ in range(count)]
    print(*(listener.address for listener in listeners), flush=True)
    threads = [threading.Thread(target=_follow, args=(listener,)) for listener in listeners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _follow(listener: Listener) -> None:
    met = listener.accept(DEADLINE_S)
    follow(Stub(), met.connection, reports=True, listener=listener, on_lost=lambda reason: None)


@contextlib.contextmanager
def started(followers: int) -> Iterator[RemoteLearner]:
    """So many stubs, connected."""
    key = secrets.token_bytes(32)
    share = followers // STUB_PROCESSES
    command = [sys.executable, '-m', 'benchmarks.commands', f'--stubs={share}']
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(STUB_PROCESSES)
    ]
    try:
        connections = []
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f'{key.hex()}\n')
            process.stdin.flush()
            addresses = process.stdout.readline().split()
            connections += [connect(address, key, Hello('controller', ''), 30).connection for address in addresses]
        peers = Peers([(f'stub {index}', each) for index, each in enumerate(connections)], deadline_s=DEADLINE_S)
        learner = RemoteLearner(peers)
        yield learner
        learner.close()
        for process in processes:
            process.wait(30)
    finally:
        for process in processes:
            process.kill()


def measure(learner: RemoteLearner, batch: Sequence[TrajectoryGroup], version: int) -> tuple[float, float]:
    """(CPU seconds of this process, seconds) of one call."""
    cpu, wall = time.process_time(), time.monotonic()
    learner.update(batch, version)
    return time.process_time() - cpu, time.monotonic() - wall


def describe(values: Sequence[float]) -> dict[str, object]:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method='inclusive')
    return {
        'median': round(middle, 4),
        'quartiles': [round(low, 4), round(high, 4)],
        'all': [round(v, 4) for v in values],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=pathlib.Path, help='the JSON; printed in any case')
    parser.add_argument('--groups', type=int, default=512)
    parser.add_argument('--answers', type=int, default=16, help='of a group')
    parser.add_argument('--tokens', type=int, default=256, help='of an answer')
    parser.add_argument('--turns', type=int, default=5)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--stubs', type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stubs:
        serve_stubs(bytes.fromhex(sys.stdin.readline()), args.stubs)
        return 0
    batch = make_groups(args.groups, args.answers, args.tokens, args.seed)
    size = sum(map(len, encode_message(Message(LEARNER, 0, Command('update', (batch, 1))))))
    found: dict[int, list[tuple[float, float]]] = {FEW: [], MANY: []}
    with started(FEW) as few, started(MANY) as many:
        sides = {FEW: few, MANY: many}
        for turn in range(args.turns + 1):
            for followers, learner in sides.items():
                cost = measure(learner, batch, turn)
                if turn:  # the first is a warm-up
                    found[followers].append(cost)
    result = {
        'batch': {'groups': args.groups, 'answers': args.answers, 'tokens': args.tokens, 'bytes': size},
        'followers': {
            str(followers): {'cpu_s': describe([cpu for cpu, _ in costs]), 'wall_s': describe([s for _, s in costs])}
            for followers, costs in found.items()
        },
        'cpu_ratio': round(_median(found[MANY], 0) / _median(found[FEW], 0), 3),
        'wall_ratio': round(_median(found[MANY], 1) / _median(found[FEW], 1), 3),
        'bar': BAR,
        'stubs': f'threads in {STUB_PROCESSES} processes without jax',
        'turns': args.turns,
        'seed': args.seed,
        'command': f'python -m benchmarks.commands {" ".join(sys.argv[1:])}'.strip(),
    }
    write_report(result, args.out)
    return 0 if result['cpu_ratio'] < BAR else 2


def _median(costs: Sequence[tuple[float, float]], index: int) -> float:
    return statistics.median(cost[index] for cost in costs)


if __name__ == '__main__':
    sys.exit(main())
