"""Small trajectories, a small decoder, and settings with the declared defaults, for the tests of this folder."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from areal_jax.app.parts.learner_builder import build_learner_settings
from areal_jax.config import TrackedConfig, default_config
from areal_jax.config.policy_choices import PolicyChoices
from areal_jax.config.training import OptimizerSection
from areal_jax.learning.learner import SpmdLearner
from areal_jax.learning.objective.objectives import PolicyObjective
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.optimizer import make_optimizer as make
from areal_jax.learning.settings import LearnerSettings
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import NOT_GENERATED, Prompt, Segment, Trajectory, TrajectoryGroup, Tree


def segment(tokens: Sequence[int], version: int, logprobs: Sequence[float] | None = None) -> Segment:
    values = [0.0 if version == NOT_GENERATED else -1.0] * len(tokens) if logprobs is None else logprobs
    return Segment(np.array(tokens, np.int32), np.array(values, np.float32), version)


def trajectory(
    prompt: Sequence[int], segments: Sequence[Segment], *, reward: float = 0.0, draw: int = 0, sample: int = 0
) -> Trajectory:
    return Trajectory(
        prompt=Prompt(draw, np.array(prompt, np.int32), 'test', {}),
        sample=sample,
        segments=tuple(segments),
        reward=reward,
        finish_reason='stop',
        engine='engine/0',
        admitted_s=0.0,
        finished_s=1.0,
    )


def group(
    prompt: Sequence[int],
    answers: Sequence[Sequence[int]],
    rewards: Sequence[float] | None = None,
    *,
    draw: int = 0,
    version: int = 0,
) -> TrajectoryGroup:
    rewards = [float(i % 2) for i in range(len(answers))] if rewards is None else rewards
    return TrajectoryGroup(
        draw,
        tuple(
            trajectory(prompt, [segment(a, version)], reward=r, draw=draw, sample=i)
            for i, (a, r) in enumerate(zip(answers, rewards, strict=True))
        ),
    )


def fork_rows(group: TrajectoryGroup, seed: int) -> TrajectoryGroup:
    """The group with a second row, of another prompt, for about half of its episodes."""
    rng, rows = np.random.default_rng(seed), []
    for first in group.trajectories:
        rows.append(first)
        if rng.random() < 0.5:
            prompt = dataclasses.replace(first.prompt, tokens=first.prompt.tokens[::-1][:2])
            rows.append(dataclasses.replace(first, prompt=prompt, segments=first.segments[-1:], row=1))
    return TrajectoryGroup(group.draw, tuple(rows))


def random_groups(seed: int, n: int, *, group_size: int = 4, vocabulary: int = 11) -> list[TrajectoryGroup]:
    """Groups of uneven lengths; behavior log-probs and versions 0..2 vary per token, rewards within the group."""
    rng = np.random.default_rng(seed)
    groups = []
    for draw in range(n):
        prompt = rng.integers(vocabulary, size=rng.integers(2, 6))
        trajectories = []
        for sample in range(group_size):
            spans = [
                segment(rng.integers(vocabulary, size=k), v, rng.normal(-2.0, 0.4, size=k))
                for v, k in enumerate(rng.integers(1, 4, size=rng.integers(1, 4)))
            ]
            if sample == 1:  # a tool's answer in the middle
                spans.insert(1, segment(rng.integers(vocabulary, size=2), NOT_GENERATED))
                spans.append(segment(rng.integers(vocabulary, size=1), 2, [-1.5]))
            reward = float(rng.normal())
            trajectories.append(trajectory(prompt, spans, reward=reward, draw=draw, sample=sample))
        groups.append(TrajectoryGroup(draw, tuple(trajectories)))
    return groups


def tiny_decoder(n_layers: int) -> Decoder:
    """Grouped queries, 11 tokens."""
    return Decoder(
        ModelConfig(
            vocab_size=11, d_model=16, n_layers=n_layers, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=24, rope_theta=1e4
        )
    )


def take_fields(kind: type, changes: dict[str, object]) -> dict[str, object]:
    """The changes that are fields of a dataclass, which it takes out."""
    return {field.name: changes.pop(field.name) for field in dataclasses.fields(kind) if field.name in changes}


def learner_settings(**changes: object) -> LearnerSettings:
    """The settings of the default config, but for `changes`; 'scan' is compiled for one micro-batch.

    Changes may also be choices of its policy objective, and fields of its sections.
    """
    settings = build_learner_settings(TrackedConfig(default_config()))
    choices = take_fields(PolicyChoices, changes)
    given = take_fields(LearnerSettings, changes)
    for section in ('learner', 'rollout', 'loss', 'staleness', 'diagnostics'):
        values = getattr(settings, section)
        changes[section] = dataclasses.replace(values, **take_fields(type(values), changes))
    changes |= given
    if choices:
        changes['objective'] = PolicyObjective(dataclasses.replace(settings.objective.choices, **choices))
    return dataclasses.replace(settings, **{'max_microbatches': 1, **changes})


@functools.cache
def tiny_params(n_layers: int) -> Tree:
    """Weights of the tiny decoder of so many layers."""
    return tiny_decoder(n_layers).init(seed=2, scale=2.0)


def make_learner(
    mesh: Mesh | None = None,
    *,
    decoder: Decoder | None = None,
    params: Tree | None = None,
    optimizer: Optimizer | None = None,
    learning_rate: float = 0.1,
    parts: Mapping[str, Any] = types.MappingProxyType({}),
    **settings: object,
) -> SpmdLearner:
    """A learner of a tiny decoder by plain SGD; `parts`: what else it may be given, e.g. a teacher."""
    return SpmdLearner(
        decoder or tiny_decoder(n_layers=1), tiny_params(1) if params is None else params, mesh or make_mesh(),
        optimizer=optimizer or make_optimizer('sgd', clip_norm=0), learning_rate=learning_rate,
        settings=learner_settings(**{'row_tokens': 40, 'row_loss_tokens': 24} | settings), **parts,
    )  # fmt: skip


def make_optimizer(name: str, **changes: object) -> Optimizer:
    """The optimizer of the default config, but for its name and `changes`."""
    others = {key: changes.pop(key) for key in ('compares', 'total_steps') if key in changes}
    return make(OptimizerSection(name=name, **changes), **{'total_steps': 20, **others})
