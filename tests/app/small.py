"""A run of seconds under the virtual clock, with real decode engine and learner."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from areal_jax import config as schema
from areal_jax.app.library import LoopRun, build_run
from areal_jax.control.event_writer import check_types
from areal_jax.telemetry.metrics import read_metrics


def small_config(**fields):
    """The smallest run that is interrupted; `fields` like staleness__eta=0.0."""
    config = schema.default_config()
    config.run.steps = 5
    config.run.clock = 'virtual'
    config.run.export = False
    config.model.d_model, config.model.d_ff = 32, 64
    config.model.n_heads, config.model.n_kv_heads, config.model.head_dim = 2, 1, 16
    config.task.verifier = 'inline'
    config.rollout.slots = 6
    config.rollout.decode_steps = 2
    config.rollout.context_tokens = 16
    config.rollout.block_tokens = 8
    config.rollout.prefill_buckets = (16, 64)
    config.rollout.max_new_tokens = 8
    config.rollout.group_size = 4
    config.rollout.max_running_groups = 4
    config.learner.groups_per_update = 2
    config.learner.row_tokens = 64
    config.learner.row_loss_tokens = 32
    config.optimizer.learning_rate = 3e-3
    config.evaluation.problems = 0
    config.telemetry.progress = False
    config.telemetry.tensorboard = False
    config.telemetry.plots = False
    config.update_from_flattened_dict({name.replace('__', '.'): value for name, value in fields.items()})
    return config


class SmallRun:
    """A run that remembers what it trained on and the weights of every version."""

    def __init__(self, workdir: pathlib.Path, resume: bool = False, build_run=build_run, **fields):
        self.workdir = workdir
        self.session = build_run(small_config(**fields), workdir, resume=resume)
        self.version_at_start = self.session.context.config.run.steps
        if self.session.context.finished is None:
            host = self.session.program.parts.host
            host.log.listeners.append(check_types)
            self.version_at_start = host.origin.version
        self.batches, self.weights = [], {}
        learner = self.session.site.learner
        update, publish = learner.update, learner.publish
        learner.update = lambda groups, version: (self.batches.append(groups), update(groups, version))[1]

        def remember(version):
            copy = publish(version)
            self.weights[version] = to_host(copy)
            return copy

        learner.publish = remember
        self.weights[self.version_at_start] = to_host(publish(0))

    def train(self):
        self.report = self.session.train()
        return self

    @property
    def events(self):
        return [json.loads(line) for line in (self.workdir / 'events.jsonl').read_text().splitlines()]

    @property
    def final(self):
        return self.weights[max(self.weights)]


def to_host(params):
    import jax

    return jax.tree.map(np.array, params)


def equal(a, b):
    """Bit for bit."""
    import jax

    same = jax.tree.map(lambda x, y: x.dtype == y.dtype and x.tobytes() == y.tobytes(), a, b)
    return all(jax.tree.leaves(same))


def call_after(session: LoopRun, step: int, call: Callable[[], object]) -> None:
    """Has a run call this when update `step` is published and its row of metrics is written."""
    session.program.parts.metrics.listeners.append(lambda written, values: call() if written == step else None)


def train_until_killed(run: SmallRun, step: int) -> None:
    """Trains until update `step` is published, then ends the run without a checkpoint of its own."""

    def die() -> NoReturn:
        raise KeyboardInterrupt

    call_after(run.session, step, die)
    with pytest.raises(KeyboardInterrupt):
        run.train()


def resume_killed(directory: pathlib.Path, **fields) -> tuple[SmallRun, SmallRun]:
    """(a run in `directory`/whole, the same in `directory`/killed, resumed), which have equal weights and metrics."""
    whole = SmallRun(directory / 'whole', **fields).train()
    train_until_killed(SmallRun(directory / 'killed', **fields), 3)
    resumed = SmallRun(directory / 'killed', resume=True, **fields).train()
    assert resumed.report['weights_sha256'] == whole.report['weights_sha256']
    first, second = (read_metrics(directory / name / 'metrics.jsonl') for name in ('whole', 'killed'))
    assert first == second
    return whole, resumed
