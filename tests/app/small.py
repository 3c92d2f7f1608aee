"""A run of seconds under the virtual clock, with real decode engine and learner."""

from __future__ import annotations

import json
import pathlib
import shutil
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
    config.task.sources = fields.pop('task__sources', {})
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


def train_until_killed(run: SmallRun | LoopRun, step: int) -> None:
    """Trains until update `step` is published, then ends the run without a checkpoint of its own."""

    def die() -> NoReturn:
        raise KeyboardInterrupt

    call_after(run.session if isinstance(run, SmallRun) else run, step, die)
    with pytest.raises(KeyboardInterrupt):
        run.train()


def start_killed_and_resumed(workdir: pathlib.Path, step: int, **fields) -> SmallRun:
    """A run that goes on after it was killed when update `step` was published; it has the weights of both starts."""
    killed = SmallRun(workdir, **fields)
    train_until_killed(killed, step)
    resumed = SmallRun(workdir, resume=True, **fields)
    resumed.weights = {**killed.weights, **resumed.weights}
    return resumed


def resume_killed(directory: pathlib.Path, **fields) -> tuple[SmallRun, SmallRun]:
    """(a run in `directory`/whole, the same in `directory`/killed, resumed), which have equal weights and metrics."""
    whole = SmallRun(directory / 'whole', **fields).train()
    resumed = start_killed_and_resumed(directory / 'killed', 3, **fields).train()
    assert resumed.report['weights_sha256'] == whole.report['weights_sha256']
    first, second = (read_metrics(directory / name / 'metrics.jsonl') for name in ('whole', 'killed'))
    assert first == second
    return whole, resumed


def resume_at(whole: SmallRun, workdir: pathlib.Path, step: int, **fields) -> SmallRun:
    """A run that goes on in a copy of a finished one without its checkpoints after `step` and published versions."""
    shutil.copytree(whole.workdir, workdir)
    shutil.rmtree(workdir / 'publication', ignore_errors=True)
    for path in (workdir / 'checkpoints').glob('step_*'):
        if int(path.name.removeprefix('step_')) > step:
            shutil.rmtree(path)
    resumed = SmallRun(workdir, resume=True, **fields)
    assert resumed.version_at_start == step
    return resumed


def open_episodes(resumed: SmallRun) -> list:
    """The episodes of a resumed run that were under way when it was saved."""
    running = resumed.session.program.parts.controller.snapshot()['running']
    return [episode for group in running for episode in group.episodes if not episode.finish_reason]


def require_same(resumed: SmallRun, whole: SmallRun) -> None:
    """Bit for bit: the weights, what the resumed run trained on, and the metrics of every update."""
    assert equal(resumed.final, whole.final)
    assert tokens_of(resumed.batches) == tokens_of(whole.batches[resumed.version_at_start :])
    assert lines_of(resumed) == lines_of(whole)


def tokens_of(batches):
    """With versions and log-probs, to the bit."""
    trajectories = [t for groups in batches for g in groups for t in g.trajectories]
    arrays = ('tokens', 'policy_versions', 'behavior_logprobs')
    return [[getattr(t, name).tobytes() for name in arrays] for t in trajectories]


def lines_of(run):
    """The metrics of every update; programs are compiled once a process, not once a run."""
    return [line | {'compilations': None} for line in read_metrics(run.workdir / 'metrics.jsonl')]
