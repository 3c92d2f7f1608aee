"""What the sides of a comparison load: a model directory, and work whose log-probs are that model's."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.app.parts.learner_builder import build_learner_settings, build_optimizer
from areal_jax.config import TrackedConfig, default_config
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.learning.forward import forward
from areal_jax.learning.objective.advantages import group_advantages
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.packing import pack
from areal_jax.learning.passes import training_rows
from areal_jax.learning.settings import LearnerSettings
from areal_jax.models.attention.backends import packed_attention
from areal_jax.models.decoder import Decoder
from areal_jax.types import Prompt, Segment, Trajectory, TrajectoryGroup
from benchmarks.workload import Work, Workload


def make_work(decoder: Decoder, params: Any, workload: Workload) -> Work:
    """Answers as if the weights had sampled them; every other answer of a group is rewarded."""
    answers = tuple(answer for group in workload.answers() for answer in group)
    rewards = np.arange(len(answers), dtype=np.float32) % 2
    unknown = tuple(np.zeros(len(a), np.float32) for a in answers)
    nothing = np.zeros(len(answers), np.float32)
    work = Work(workload.prompts(), answers, unknown, rewards, nothing, workload.limit_tokens)
    groups = make_groups(work)
    return dataclasses.replace(
        work,
        behavior_logprobs=_logprobs(decoder, params, work, groups),
        advantages=np.concatenate([group_advantages(group, PolicyChoices()) for group in groups]),
    )


def make_groups(work: Work) -> list[TrajectoryGroup]:
    """The work as a learner gets it."""
    groups = []
    for draw, prompt_tokens in enumerate(work.prompts):
        prompt = Prompt(draw, prompt_tokens, 'benchmark', {})
        trajectories = []
        for sample in range(work.group_size):
            i = draw * work.group_size + sample
            segment = Segment(work.answers[i], work.behavior_logprobs[i], 0)
            trajectories.append(Trajectory(prompt, sample, (segment,), float(work.rewards[i]), 'stop', '', 0.0, 0.0))
        groups.append(TrajectoryGroup(draw, tuple(trajectories)))
    return groups


def give_routes(groups: list[TrajectoryGroup], decoder: Decoder, params: Any) -> list[TrajectoryGroup]:
    """The groups with the experts that the routers choose, recorded for every token."""
    column = decoder.config.routes
    longest = max(len(one.tokens) for group in groups for one in group.trajectories)
    ones, positions = jnp.ones(longest, jnp.int32), jnp.arange(longest)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, entry: Any, window: int | None) -> tuple[jax.Array, Any]:
        scale = q.shape[-1] ** -0.5
        return packed_attention(q, k, v, ones, ones, scale=scale, positions=positions, window=window), entry

    @jax.jit
    def choose(tokens: jax.Array) -> jax.Array:
        routed = decoder.hidden_and_routes(params, tokens, positions, attend)[2]
        assert routed is not None
        return jnp.moveaxis(routed.live, 0, 1)

    def give(one: Trajectory) -> Trajectory:
        tokens = np.zeros(longest, np.int32)
        tokens[: len(one.tokens)] = one.tokens
        live = np.asarray(choose(jnp.asarray(tokens)))[: len(one.tokens) - 1].astype(column.dtype)
        whole, start = np.concatenate([column.blank(1), live]), len(one.prompt.tokens)
        (segment,) = one.segments
        told = dataclasses.replace(
            segment, columns={column.name: whole[start:]}, context={column.name: whole[:start]}
        )  # fmt: skip
        return dataclasses.replace(one, segments=(told,))

    return [TrajectoryGroup(group.draw, tuple(map(give, group.trajectories))) for group in groups]


def learner_settings(**changes: object) -> LearnerSettings:
    """The settings of the default config, but for `changes`; 'scan' is compiled for one micro-batch."""
    settings = build_learner_settings(TrackedConfig(default_config()))
    names = {field.name for field in dataclasses.fields(settings.learner)}
    of_rows = {name: value for name, value in changes.items() if name in names}
    others = {name: value for name, value in changes.items() if name not in names}
    learner = dataclasses.replace(settings.learner, **of_rows)
    return dataclasses.replace(settings, **{'max_microbatches': 1, 'learner': learner, **others})


def default_optimizer() -> Optimizer:
    """AdamW as the default config has it."""
    return build_optimizer(TrackedConfig(default_config()))


def save_work(directory: str | pathlib.Path, work: Work) -> str:
    path = pathlib.Path(directory) / 'work.npz'
    work.save(str(path))
    return str(path)


def _logprobs(decoder: Decoder, params: Any, work: Work, groups: list[TrajectoryGroup]) -> tuple[np.ndarray, ...]:
    """Of one trajectory per row, at temperature 1."""
    longest = max(len(a) for a in work.answers)
    batches, _ = pack(
        groups,
        [np.zeros(work.group_size, np.float32) for _ in groups],
        mode='ordinary',
        fill='padded',
        row_tokens=work.prompts.shape[1] + longest,
        row_loss_tokens=longest,
        rows_per_microbatch=work.group_size,
        n_minibatches=1,
    )
    rows, _ = training_rows(batches[0], learner_settings().objective)
    score = jax.jit(lambda params, rows: forward(decoder, params, rows, 1.0)[0])
    logprobs = np.concatenate([score(params, {k: x[m] for k, x in rows.items()}) for m in range(len(rows['tokens']))])
    return tuple(row[: len(answer)] for row, answer in zip(logprobs, work.answers, strict=False))
