"""How a prompt becomes an answer."""

from __future__ import annotations

from areal_jax.control.episode import Episode
from areal_jax.rollout.pool import Pool
from areal_jax.types import GenerationRequest, Prompt, SamplingParams


class SingleTurn:
    """One prompt, one answer."""

    def __init__(self, pool: Pool, sampling: SamplingParams, seed: int):
        self._pool, self._sampling, self._seed = pool, sampling, seed

    async def run(self, prompt: Prompt, episode: Episode) -> None:
        """Generate until the answer ends; an episode that has segments already goes on after them."""
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
        episode.finish_reason = generation.finish_reason
