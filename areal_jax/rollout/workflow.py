"""How a prompt becomes an answer; the controller and the evaluator run workflows, which generate through the pool."""

from __future__ import annotations

from areal_jax.protocols import Episode, Generator
from areal_jax.types import GenerationRequest, Prompt, SamplingParams


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
        if generation.finish_reason != 'cancelled':
            episode.finish_reason = generation.finish_reason
