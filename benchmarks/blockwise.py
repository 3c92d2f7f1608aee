"""Training in blocks: bytes of a version, memory, the wall of a round of two clients, and reward at equal tokens.

    python -m benchmarks.blockwise --minutes=60 --seed=0 --json=benchmarks/results/blockwise.json
    python -m benchmarks.blockwise --small --minutes=5     # a small model, few updates: to try the command

  bytes    SmolLM2-135M, 4 blocks, float32: bytes that the device channel carries for each version of a round, against
           all; gradients and moments in device memory, against training all leaves. Bar: a version carries at most 1.1
           times the bytes of the largest block
  round    two clients in processes of one core each. The link is slowed down until communication (send a block, fetch
           the mean) takes 0.8 of the computation; what it takes without a limit is measured first. Wall of a round with
           overlap, against the larger of computation and communication, and against their sum; the wall without overlap
           beside it. Computation is measured with both clients running, and communication is the one measured without
           overlap
  reward   configs/tiny_cpu.py under the virtual clock, two clients of --steps updates: mean reward of the last quarter,
           overlapped less standard, paired by seed, with Student's interval. Beside it, training all leaves in one run
           of 2 * --steps updates, which is as many tokens

--minutes bounds the time: parts that have not begun are left out, and named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.report.statistics import paired_interval
from areal_jax.telemetry import names
from benchmarks.report import write_report
from benchmarks.sides import ROOT

BLOCKS, COMMUNICATION, BAR = 4, 0.8, 1.1
TINY_BLOCKS = 3  # of the model of tiny_cpu, which has two layers
_ALONE = {
    'run.clock': 'virtual', 'run.export': False, 'evaluation.problems': 0, 'telemetry.plots': False,
    'telemetry.tensorboard': False,
}  # fmt: skip
_UNLIMITED = 1e15  # bytes per second
_MEMORY = pathlib.Path('/dev/shm')
_TRANSFERS = 3  # of a block, one after the other: a client sends its own, one fetches the others', all fetch the mean


def measure_bytes(small: bool) -> dict[str, Any]:
    """Bytes of a version and of memory, from the arrays; nothing is trained."""
    import jax

    from areal_jax.app.model.model import build_model
    from areal_jax.app.parts.learner_builder import build_learner
    from areal_jax.app.parts.part_settings import build_mesh
    from areal_jax.config import TrackedConfig
    from areal_jax.publication.files_channel import DeviceChannel
    from benchmarks.side_blockwise import make_config

    nbytes = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    model = build_model(TrackedConfig(make_config(small=small, blocks=BLOCKS)))
    config = TrackedConfig(make_config(small=small, blocks=BLOCKS))
    learner = build_learner(config, model, build_mesh(config))
    channel, carried, moments, trained = DeviceChannel(verify=False), [], [], []
    channel.transfer(0, learner.publish(0))
    whole = channel.carried_bytes
    for version in range(BLOCKS):
        learner.update([], version)  # no data: it turns to the block, and publishes its leaves
        channel.transfer(version + 1, learner.publish(version + 1))
        channel.release(version + 1)
        carried.append(channel.carried_bytes)
        trained.append(nbytes(learner.state.params))
        moments.append(nbytes(learner.state.optimizer))
    del learner, channel
    config = TrackedConfig(make_config(small=small, blocks=1))
    every = build_learner(config, model, build_mesh(config))
    largest = max(trained)
    return {
        'whole_version_bytes': whole,
        'carried_bytes': carried,
        'block_bytes': trained,
        'most_carried_over_largest_block': max(carried) / largest,
        'bar': BAR,
        'holds': max(carried) <= BAR * largest,
        'most_carried_over_whole': max(carried) / whole,
        'gradient_and_moment_bytes': largest + max(moments),
        'gradient_and_moment_bytes_of_all': nbytes(every.state.params) + nbytes(every.state.optimizer),
    }


class Clients:
    """Two clients in processes that are asked at the same time."""

    def __init__(self, small: bool, seed: int):
        words = ['--seed', str(seed), '--blocks', str(BLOCKS), *(['--small'] if small else [])]
        self._processes = [
            subprocess.Popen(
                [sys.executable, '-m', 'benchmarks.side_blockwise', '--client', str(client), *words],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            )
            for client in range(2)
        ]  # fmt: skip
        self._answers()  # they are built and compiled

    def ask(self, **words: object) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(words) + '\n')
            process.stdin.flush()
        return self._answers()

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(60)

    def _answers(self) -> list[dict[str, Any]]:
        found = []
        for process in self._processes:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, '')
            found.append(json.loads(next(line for line in lines if line.startswith('{'))))
        return found


def measure_round(small: bool, seed: int, rounds: int, block_bytes: Sequence[int]) -> dict[str, Any]:
    clients = Clients(small, seed)
    # in memory, where there is a file system of it: the link is simulated, and no disk of this machine is a part of it
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as directory:
        ask = lambda mode, speed: clients.ask(
            mode=mode, bytes_per_s=speed, directory=f'{directory}/{mode}_{speed:.0f}', rounds=rounds
        )
        compute = ask('compute', _UNLIMITED)
        turn_s = statistics.mean(second for one in compute for second in one['turn_s'])
        unlimited_s = statistics.mean(one['average_s'] for one in ask('standard', _UNLIMITED))
        speed = _TRANSFERS * statistics.mean(block_bytes) / max(COMMUNICATION * turn_s - unlimited_s, 0.1 * turn_s)
        standard, overlapped = ask('standard', speed), ask('overlapped', speed)
    clients.close()
    wall = lambda found: statistics.median(second for one in found for second in one['round_s'])
    computation, communication = wall(compute), BLOCKS * statistics.mean(one['average_s'] for one in standard)
    return {
        'rounds': rounds,
        'bytes_per_s': speed,
        'unlimited_average_s': unlimited_s,
        'computation_s': computation,
        'communication_s': communication,
        'communication_over_computation': communication / computation,
        'overlapped_s': wall(overlapped),
        'standard_s': wall(standard),
        'overlapped_over_larger': wall(overlapped) / max(computation, communication),
        'standard_over_overlapped': wall(standard) / wall(overlapped),
        'sum_over_larger': (computation + communication) / max(computation, communication),
        'clients': {'compute': compute, 'standard': standard, 'overlapped': overlapped},
    }


def train(workdirs: Sequence[pathlib.Path], steps: int, seed: int, **fields: object) -> list[float]:
    """Runs of tiny_cpu at the same time, one for each workdir; returns the reward of the last quarter of each."""
    processes = []
    for client, workdir in enumerate(workdirs):
        own = {'distributed.client': client} if len(workdirs) > 1 else {}
        given = {'run.steps': steps, 'run.seed': seed, **_ALONE, **fields, **own}
        words = [f'--config.{field}={value}' for field, value in given.items()]
        command = [sys.executable, '-m', 'areal_jax.main_train', '--config=configs/tiny_cpu.py', f'--workdir={workdir}']
        with workdir.with_suffix('.log').open('w') as log:
            processes.append(subprocess.Popen([*command, *words], cwd=ROOT, stdout=log, stderr=log))
    for process, workdir in zip(processes, workdirs, strict=True):
        if process.wait():
            told = workdir.with_suffix('.log').read_text()
            raise RuntimeError(f'{workdir.name} ended with {process.returncode}: {told}')
    return [_last_reward(workdir) for workdir in workdirs]


def _last_reward(workdir: pathlib.Path) -> float:
    rows = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    return float(np.mean([row[names.REWARD_MEAN] for row in rows[-max(len(rows) // 4, 1) :]]))


def measure_reward(seeds: Sequence[int], steps: int, end_s: float) -> dict[str, Any]:
    """By seed, as long as there is time; pairs of runs of the same seed."""
    found: list[dict[str, Any]] = []
    for seed in seeds:
        if found and time.monotonic() > end_s:
            break
        with tempfile.TemporaryDirectory() as directory:
            home, row = pathlib.Path(directory), {'seed': seed}
            for name, overlap in (('standard', False), ('overlapped', True)):
                blocks = {'optimizer.blocks': TINY_BLOCKS, 'distributed.clients': 2, 'distributed.overlap': overlap}
                means = {'distributed.average_directory': home / f'{name}_means'}
                row[name] = train([home / f'{name}_{i}' for i in range(2)], steps, seed, **blocks, **means)
            row['all_leaves'] = train([home / 'all_leaves'], 2 * steps, seed)
        found.append(row)
        print(row, file=sys.stderr, flush=True)
    paired = lambda a, b: dataclasses.asdict(paired_interval([row[a] for row in found], [row[b] for row in found]))
    return {
        'seeds': [row['seed'] for row in found],
        'updates_of_a_client': steps,
        'rewards': found,
        'overlapped_less_standard': paired('standard', 'overlapped'),
        'overlapped_less_all_leaves': paired('all_leaves', 'overlapped'),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = 'parts, and seeds of the last one, that have not begun by then are left out'
    parser.add_argument('--minutes', type=float, default=60.0, help=told)
    parser.add_argument('--seed', type=int, default=0, help='the first one')
    parser.add_argument('--seeds', type=int, default=5, help='of the runs by rewards; 0 = none')
    parser.add_argument('--steps', type=int, default=198, help='updates of a client in the runs by rewards')
    parser.add_argument('--rounds', type=int, default=3, help='that are timed')
    parser.add_argument('--json', type=pathlib.Path, help='where the report is written')
    parser.add_argument('--small', action='store_true', help='a small model, two seeds, 12 updates')
    options = parser.parse_args(arguments)
    if options.small:
        options.seeds, options.steps, options.rounds = min(options.seeds, 2), 12, 1
    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    end_s = time.monotonic() + 60 * options.minutes
    numbers: dict[str, Any] = {'options': {**vars(options), 'json': str(options.json)}, 'left_out': []}
    parts = {
        'bytes': lambda: measure_bytes(options.small),
        'round': lambda: measure_round(options.small, options.seed, options.rounds, numbers['bytes']['block_bytes']),
        'reward': lambda: measure_reward(range(options.seed, options.seed + options.seeds), options.steps, end_s),
    }
    if not options.seeds:
        del parts['reward']
    for name, measure in parts.items():
        if time.monotonic() > end_s:
            numbers['left_out'].append(name)
        else:
            numbers[name] = measure()
            print(f'{name}: {json.dumps(numbers[name])}', file=sys.stderr, flush=True)  # a later part may be cut off
    covered = [name for name in parts if name in numbers]
    seeds = len(numbers['reward']['seeds']) if 'reward' in numbers else 0
    print(f'covered: {", ".join(covered)}; {seeds} of {options.seeds} seeds', file=sys.stderr, flush=True)
    return write_report(numbers, options.json)


if __name__ == '__main__':
    main()
