"""Answers of an engine that records routes, and log-probs of their tokens in packed rows of a learner's pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.learning.forward import SeenRoutes, predicting_states, score_targets
from areal_jax.learning.packing import pack
from areal_jax.learning.passes import training_rows
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import (
    GenerationRequest,
    Prompt,
    PublishedWeights,
    SamplingParams,
    Segment,
    Trajectory,
    TrajectoryGroup,
    Work,
)
from benchmarks.case import learner_settings

GROUPS, SAMPLES, PROMPT, NEW = 6, 4, 32, 64
_ROW = 512
_PRICES = {'decode': 0.01, 'prefill': 0.001, 'load': 0.001, 'wait': 1.0}


def make_config(layers: int = 4) -> ModelConfig:
    """Layers of 32 experts, 4 a token, width 256, of an expert 128."""
    return ModelConfig(
        vocab_size=512, d_model=256, n_layers=layers, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=256, rope_theta=1e4,
        family='qwen3_moe', qk_norm=True, tie_embeddings=False, experts=Experts(32, 4, 128),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Generated:
    """What an engine has generated, and how often it was disturbed meanwhile."""

    groups: list[TrajectoryGroup]
    interrupted: int  # answers, by new weights
    preempted: int  # answers, for want of blocks


def generate(config: ModelConfig, params: Any, dtype: str, seed: int) -> Generated:
    """Groups from an engine with too few blocks for its slots, which fetches the same weights twice meanwhile."""
    backend = JaxDecodeBackend(
        Decoder(config), slots=12, context_tokens=PROMPT + NEW, block_tokens=16, cache_blocks=42,
        prefill_buckets=(64, 256), decode_steps=4, batch_buckets=(12,), filtered=False, dtype=dtype,
        records_routes=True,
    )  # fmt: skip
    weights = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    log = EventLog()
    clock = VirtualClock({'engine/0': 1, 'publish/0': 1, 'wait': 1}, log, _PRICES)
    engine = LocalEngine(
        0, backend, clock, log, receive=lambda published: weights, version=0, params=weights,
        rollout=RolloutSection(decode_steps=4),
    )  # fmt: skip
    supervisor, segments = Supervisor(clock), {}
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(config.vocab_size, size=PROMPT).astype(np.int32) for _ in range(GROUPS)]
    sampling = SamplingParams(NEW, 1.0, 0, 1.0, ())

    async def collect(draw: int, sample: int) -> None:
        running = engine.generate(GenerationRequest(draw, sample, seed, prompts[draw], sampling))
        segments[draw, sample] = [segment async for segment in running]

    async def run() -> None:
        engine.start(supervisor)
        tasks = [supervisor.start(f'{d} {s}', collect(d, s)) for d in range(GROUPS) for s in range(SAMPLES)]
        for version in (1, 2):
            await clock.run('wait', lambda: None, Work('wait', 0.06))
            await engine.stage(PublishedWeights(version, '', None))
            await engine.swap(version)
        for task in tasks:
            await task

    clock.execute(supervisor.run(run()))
    count = lambda kind, of: sum(of(event) for event in log.events if event['kind'] == kind)
    groups = [
        TrajectoryGroup(d, tuple(_trajectory(prompts[d], d, s, segments[d, s]) for s in range(SAMPLES)))
        for d in range(GROUPS)
    ]
    return Generated(groups, count('interrupt', lambda e: len(e['requests'])), count('preempt', lambda e: 1))


def _trajectory(prompt: np.ndarray, draw: int, sample: int, segments: list[Segment]) -> Trajectory:
    return Trajectory(
        Prompt(draw, prompt, 'replay', {}), sample, tuple(segments), 0.0, 'length', 'engine/0', 0.0, 0.0
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compared:
    """Of all generated tokens."""

    difference: np.ndarray  # float64 [tokens], learner less engine
    sets_changed: float  # share of the (token, layer) sets that the learner's routers choose otherwise
    tokens_changed: float

    def describe(self) -> dict[str, float]:
        size = np.abs(self.difference)
        k3 = np.expm1(self.difference) - self.difference
        return {
            'mean': float(size.mean()), 'p99': float(np.quantile(size, 0.99)), 'max': float(size.max()),
            'k3': float(k3.mean()), 'sets': self.sets_changed, 'tokens': self.tokens_changed,
        }  # fmt: skip


def compare(config: ModelConfig, params: Any, groups: list[TrajectoryGroup], follows: bool) -> Compared:
    """A pass of the learner over packed rows that share prompts, with the recorded experts or its own."""
    decoder, ones = Decoder(config), [np.ones(len(group.trajectories), np.float32) for group in groups]
    batches, _ = pack(
        groups, ones, mode='shared_prompt', fill='first_fit', row_tokens=_ROW, row_loss_tokens=_ROW,
        rows_per_microbatch=1, n_minibatches=1, inputs=[config.routes],
    )  # fmt: skip
    rows, _ = training_rows(batches[0], learner_settings().objective)

    @jax.jit
    def score(params: Any, one: Any) -> tuple[jax.Array, SeenRoutes | None]:
        states, seen = predicting_states(decoder, params, one, follows=follows)
        return score_targets(decoder, params, states, one['targets'], 1.0)[0], seen

    differences, changed = [], []
    for number in range(len(rows['tokens'])):
        one = {name: jnp.asarray(array[number]) for name, array in rows.items()}
        logprobs, seen = score(params, one)
        assert seen is not None
        mask = np.asarray(one['loss_mask'])
        differences.append((np.asarray(logprobs, np.float64) - np.asarray(one['behavior_logprobs'], np.float64))[mask])
        changed.append(np.asarray(seen.differs)[mask])
    layers = np.concatenate(changed)
    return Compared(
        np.concatenate(differences), float(layers.mean() / config.n_expert_layers), float((layers > 0).mean())
    )


def count_bytes(groups: list[TrajectoryGroup]) -> float:
    """Bytes of routes of a generated token."""
    segments = [segment for group in groups for one in group.trajectories for segment in one.segments]
    size = sum(segment.columns[ROUTED_EXPERTS.name].nbytes for segment in segments)
    return size / sum(len(segment.tokens) for segment in segments)
