"""A workflow whose answers have lengths that are drawn beforehand, so that runs of any schedule do the same work.

    --config.rollout.workflow=benchmarks/drawn_lengths.py:equal      every answer has MEAN tokens
    --config.rollout.workflow=benchmarks/drawn_lengths.py:heavy      lognormal, sigma 1, up to rollout.max_new_tokens

The length is a function of the draw and the sample alone; no token ends an answer.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.protocols import Episode, Generator
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.types import Prompt, SamplingParams

MEAN, SIGMA = 32, 1.0
LONGEST = 6 * MEAN  # rollout.max_new_tokens


class DrawnLengths:
    """SingleTurn, with a limit of its own for each answer."""

    def __init__(self, pool: Generator, sampling: SamplingParams, seed: int, sigma: float):
        self._pool, self._sampling, self._seed, self._sigma = pool, sampling, seed, sigma

    async def run(self, prompt: Prompt, episode: Episode) -> None:
        length = draw_length(prompt.draw, episode.sample, self._sigma, self._sampling.max_new_tokens)
        sampling = dataclasses.replace(self._sampling, max_new_tokens=length, stop_tokens=())
        await SingleTurn(self._pool, sampling, self._seed).run(prompt, episode)


def draw_length(draw: int, sample: int, sigma: float, longest: int) -> int:
    """Tokens, 1 to `longest`; of mean MEAN before they are cut off."""
    if not sigma:
        return min(MEAN, longest)
    normal = np.random.default_rng((draw, sample)).standard_normal()
    return int(np.clip(round(MEAN * np.exp(sigma * normal - sigma**2 / 2)), 1, longest))


def equal(pool: Generator, sampling: SamplingParams, seed: int) -> DrawnLengths:
    return DrawnLengths(pool, sampling, seed, 0.0)


def heavy(pool: Generator, sampling: SamplingParams, seed: int) -> DrawnLengths:
    return DrawnLengths(pool, sampling, seed, SIGMA)
