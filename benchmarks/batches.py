"""The way of a batch to a learner of 4 processes: what packing costs all of them, and how large messages are.

    python -m benchmarks.batches --json=benchmarks/results/batches.json
    python -m benchmarks.batches --turns=0 --groups=24 --tokens=8192 --layers=48 --json=FILE

A controller (this process) sends the groups of an update to 4 real processes under jax.distributed, one CPU device
each. They run what learner processes run, except for the model (side_batches.py): process 0 packs and weighs the batch
and sends the others their rows, and all place each micro-batch on the mesh. No program reads it. In the first turn,
which is not measured, each process hashes its rows of every array, and process 0 hashes the same rows of the batch that
it packed: they must be equal.

  packing     CPU seconds of packing and sharing, summed over the processes
  sharing     its part for cutting rows for the others and putting received rows together
  alone       CPU seconds of packing in one process: process 0 packs once more, before its turn or after it
  placing     CPU seconds of placing rows on the mesh, summed over the processes
  transport   CPU seconds of the 4 processes without packing and placing: decoding, hashing and sockets
  controller  CPU seconds of this process for the call
  largest     bytes of the largest piece of a message that one of the processes sent

The exit code is 0 only if all rows are equal, no piece has more than 64 MB, and the median of packing is at most 1.1
times the median of alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from areal_jax.config.addresses import find_free_port
from areal_jax.distributed.handshake import Hello, connect
from areal_jax.distributed.messages import Command
from areal_jax.distributed.peers import Connection, Part, Peers
from areal_jax.distributed.remote_learner import RemoteLearner
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup
from benchmarks.report import write_report
from benchmarks.sides import ROOT

PROCESSES, ROWS, EXPERTS, CHOICES, PROMPT_TOKENS, VOCABULARY = 4, 8, 128, 8, 128, 150_000
PACKING_BAR, MESSAGE_BAR = 1.1, 64_000_000
DEADLINE_S = 1500.0


class Batch(NamedTuple):
    """The shape of a batch."""

    groups: int
    answers: int  # of a group
    tokens: int  # of an answer
    layers: int  # with experts, whose routes are recorded

    @property
    def row_tokens(self) -> int:
        return max(2048, -(-(self.tokens + PROMPT_TOKENS) // 64) * 64)


def make_groups(batch: Batch, seed: int) -> list[TrajectoryGroup]:
    """Answers of one segment each, with the routes of all tokens: views of one array, each from another token on."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, EXPERTS, (4 * batch.tokens, batch.layers, CHOICES), np.uint8)

    def routes(n: int) -> dict[str, np.ndarray]:
        first = int(rng.integers(len(drawn) - n))
        return {'routed_experts': drawn[first : first + n]} if batch.layers else {}

    made = []
    for draw in range(batch.groups):
        prompt, context = Prompt(draw, _draw(rng, PROMPT_TOKENS), 'math', {}), routes(PROMPT_TOKENS)
        rows = []
        for sample in range(batch.answers):
            behavior = -rng.random(batch.tokens, np.float32)
            segment = Segment(_draw(rng, batch.tokens), behavior, 0, routes(batch.tokens), context)
            rows.append(Trajectory(prompt, sample, (segment,), float(sample % 2), 'stop', '', 1.0, 2.0))
        made.append(TrajectoryGroup(draw, tuple(rows)))
    return made


def note_largest() -> Callable[[], int]:
    """Returns a function that tells the largest piece of a message that this process has sent, in bytes."""
    sizes, seal = [0], Connection.seal

    def note(connection: Connection, part: Part) -> bytes:
        prefix = seal(connection, part)
        sizes.append(max(sizes.pop(), len(prefix) + part.size))
        return prefix

    Connection.seal = note  # type: ignore[method-assign]
    return lambda: sizes[0]


def _draw(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, VOCABULARY, n, np.int32)


@contextlib.contextmanager
def started(batch: Batch) -> Iterator[Peers]:
    """The learner processes, connected."""
    with tempfile.TemporaryDirectory() as place:
        directory, key = pathlib.Path(place), secrets.token_bytes(32)
        (directory / 'key').write_bytes(key)
        coordinator = f'127.0.0.1:{find_free_port("127.0.0.1")}'
        command = [sys.executable, '-m', 'benchmarks.side_batches']
        environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
        processes = [
            subprocess.Popen([*command, str(index), coordinator, place, json.dumps(batch)], cwd=ROOT, env=environment)
            for index in range(PROCESSES)
        ]
        try:
            named = []
            for index in range(PROCESSES):
                address = _await(directory / f'address_{index}', processes)
                named.append((f'learner {index}', connect(address, key, Hello('controller', ''), 30).connection))
            peers = Peers(named, deadline_s=DEADLINE_S)
            yield peers
            peers.close()
            for process in processes:
                process.wait(60)
        finally:
            for process in processes:
                process.kill()


def _await(path: pathlib.Path, processes: Sequence[subprocess.Popen[bytes]]) -> str:
    end_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > end_s or any(process.poll() is not None for process in processes):
            raise RuntimeError(f'a learner process did not come to {path.name}: its own output says why')
        time.sleep(0.05)
    return path.read_text()


def update(peers: Peers, groups: Sequence[TrajectoryGroup], version: int) -> list[dict[str, Any]]:
    """What each process says of an update; the first one also what the controller paid."""
    cpu_s, wall_s = time.process_time(), time.monotonic()
    answers = peers.call_led(Command('update', (groups, version)), Command('repeat_passes'))
    paid = {'controller_s': time.process_time() - cpu_s, 'wall_s': time.monotonic() - wall_s}
    if failed := [str(answer.failure) for answer in answers if answer.failure]:
        raise RuntimeError(failed[0])
    return [answers[0].value | paid, *(answer.value for answer in answers[1:])]


def describe(turn: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of one measured turn."""
    first = turn[0]
    total = lambda name: sum(one[name] for one in turn)
    packing_s = first['packing_s'] + total('sharing_s')
    return {
        'packing_s': packing_s,
        'sharing_s': total('sharing_s'),
        'alone_s': first['alone_s'],
        'placing_s': total('placing_s'),
        'transport_s': total('cpu_s') - packing_s - total('placing_s'),
        'controller_s': first['controller_s'],
        'wall_s': first['wall_s'] - first['alone_s'],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=pathlib.Path, help='file for the numbers')
    parser.add_argument('--turns', type=int, default=5, help='measured ones, after one that compares the rows')
    parser.add_argument('--groups', type=int, default=128)
    parser.add_argument('--answers', type=int, default=16, help='of a group')
    parser.add_argument('--tokens', type=int, default=1024, help='of an answer')
    parser.add_argument('--layers', type=int, default=0, help='with experts, whose routes are recorded')
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    batch = Batch(args.groups, args.answers, args.tokens, args.layers)
    groups, own_largest = make_groups(batch, args.seed), note_largest()
    with started(batch) as peers:
        RemoteLearner(peers)
        compared, *measured = [update(peers, groups, version) for version in range(args.turns + 1)]
    turns = [describe(turn) for turn in measured]
    expected, found = compared[0]['hashes'], [one['hash'] for one in compared[1:]]
    largest = max(own_largest(), *(one['largest'] for turn in (compared, *measured) for one in turn))
    middle = {name: statistics.median(turn[name] for turn in turns) for name in (turns[0] if turns else ())}
    result = {
        'batch': batch._asdict() | {'tokens_in_rows': compared[0]['tokens']},
        'processes': PROCESSES,
        'equal_rows': found == expected[1:],
        'largest_bytes': largest,
        'first_turn_wall_s': round(compared[0]['wall_s'], 2),
        'turns': {name: [round(turn[name], 4) for turn in turns] for name in middle},
        'median': {name: round(value, 4) for name, value in middle.items()},
        'packing_ratio': round(middle['packing_s'] / middle['alone_s'], 3) if turns else None,
        'command': f'python -m benchmarks.batches {" ".join(sys.argv[1:])}'.strip(),
    }
    write_report(result, args.json)
    is_cheap = not turns or result['packing_ratio'] <= PACKING_BAR
    return 0 if result['equal_rows'] and largest <= MESSAGE_BAR and is_cheap else 2


if __name__ == '__main__':
    sys.exit(main())
