"""Workflows: turn a prompt into an answer through the pool. The controller and the evaluator run them.

`SingleTurn` is the default. A workflow of several turns is built from `generate_turn` and `append_environment`;
configs/templates/two_turns.py is an example.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from areal_jax.protocols import Episode, Generator
from areal_jax.types import (
    NOT_GENERATED,
    EngineFinish,
    GenerationRequest,
    Prompt,
    SamplingParams,
    Segment,
    concatenate,
)


class SingleTurn:
    """One prompt, one answer."""

    def __init__(self, pool: Generator, sampling: SamplingParams, seed: int):
        self._pool, self._sampling, self._seed = pool, sampling, seed

    async def run(self, prompt: Prompt, episode: Episode) -> None:
        """Generates until the answer ends or is cancelled; an episode with segments continues after them."""
        request = GenerationRequest(
            draw=prompt.draw,
            sample=episode.sample,
            seed=self._seed,
            prompt_tokens=prompt.tokens,
            sampling=self._sampling,
            prefix=tuple(episode.segments),
        )
        generation = self._pool.generate(request, prefer=episode.engine)
        episode.engine = generation.engine
        async for segment in generation:
            episode.append(segment)
        episode.engine = generation.engine  # it may have moved
        if generation.finish_reason != 'cancelled':
            episode.finish_reason = generation.finish_reason


async def generate_turn(
    pool: Generator, prompt: Prompt, episode: Episode, sampling: SamplingParams, seed: int, context_tokens: int
) -> EngineFinish | None:
    """Generates one turn of an episode, after all tokens that the episode has; returns how the turn ended.

    The segments since the last environment tokens are the turn under way: a resumed episode continues within it. The
    sampled tokens of all turns are at most `sampling.max_new_tokens`, the whole sequence at most `context_tokens`;
    'length' is also returned if no token is left. The noise of a token depends on its position in the whole
    sequence, so no turn repeats the noise of another. The caller sets the finish reason of the episode, and leaves it
    None for 'cancelled'.
    """
    begin = _begin_of_turn(episode)
    before, under_way = episode.segments[:begin], episode.segments[begin:]
    sampled = sum(len(segment.tokens) for segment in before if segment.policy_version != NOT_GENERATED)
    length = len(prompt.tokens) + sum(len(segment.tokens) for segment in before)
    room = min(sampling.max_new_tokens - sampled, context_tokens - length)
    if room <= sum(len(segment.tokens) for segment in under_way):
        return 'length'
    request = GenerationRequest(
        draw=prompt.draw,
        sample=episode.sample,
        seed=seed,
        prompt_tokens=concatenate([prompt.tokens, *(segment.tokens for segment in before)], np.int32),
        sampling=dataclasses.replace(sampling, max_new_tokens=room),
        prefix=tuple(under_way),
    )
    generation = pool.generate(request, prefer=episode.engine)
    episode.engine = generation.engine
    async for segment in generation:
        episode.append(segment)
    episode.engine = generation.engine  # it may have moved
    return generation.finish_reason


def append_environment(episode: Episode, tokens: ArrayLike) -> None:
    """Adds tokens that no policy generated, such as the next user turn or the output of a tool.

    Later turns read them; they are not trained (loss mask 0). `tokens`: int32 [n], n >= 1.
    """
    values = np.asarray(tokens, np.int32)
    if values.ndim != 1 or not len(values):
        raise ValueError(f'environment tokens must be a row of at least one id, not of the shape {values.shape}')
    episode.append(Segment(values, np.zeros(len(values), np.float32), NOT_GENERATED))


def count_turns(episode: Episode) -> int:
    """The number of segments of environment tokens: each one ends a turn that another turn follows."""
    return sum(segment.policy_version == NOT_GENERATED for segment in episode.segments)


def _begin_of_turn(episode: Episode) -> int:
    """Index of the first segment after the last environment tokens."""
    ends = [index + 1 for index, segment in enumerate(episode.segments) if segment.policy_version == NOT_GENERATED]
    return max(ends, default=0)
