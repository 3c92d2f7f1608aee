"""Builds the frictions of a run, and the workflow whose answers are drawn at another temperature. No jax here."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

from areal_jax import protocols
from areal_jax.app.parts.workflow_builder import WorkflowFactory
from areal_jax.config import TrackedConfig
from areal_jax.config.ranges import ConfigError
from areal_jax.control.frictions import LOGPROBS, TEMPERATURE, Frictions
from areal_jax.protocols import Generator, Workflow
from areal_jax.types import Prompt, SamplingParams


class TwoTemperatures:
    """A workflow of which some answers are another one's. Implements protocols.Workflow."""

    def __init__(self, usual: Workflow, other: Workflow, is_other: Callable[[int, int], bool]):
        self._usual, self._other, self._is_other = usual, other, is_other

    async def run(self, prompt: Prompt, episode: protocols.Episode) -> None:
        chosen = self._other if self._is_other(prompt.draw, episode.sample) else self._usual
        await chosen.run(prompt, episode)


def build_frictions(config: TrackedConfig, vocab_size: int) -> Frictions | None:
    """None where none is on; reads the fields of those that are.

    Raises ConfigError for a token that the model does not have.
    """
    friction, rewards = config.friction, {}
    for name in ('reward_share', 'unrewarded_share'):
        rewards[name] = getattr(friction, name)
    share = friction.actor_share
    if not share and not any(rewards.values()):
        return None
    frictions = Frictions(seed=config.run.seed, actor_share=share, **rewards)
    if not share:
        return frictions
    frictions = dataclasses.replace(frictions, actor=friction.actor)
    if friction.actor == LOGPROBS:
        return dataclasses.replace(frictions, actor_nats=friction.actor_nats)
    if friction.actor == TEMPERATURE:
        own = friction.actor_temperature
        return dataclasses.replace(frictions, actor_temperature=own, temperature=config.rollout.temperature)
    if friction.actor_token >= vocab_size:
        raise ConfigError(
            f'friction.actor_token={friction.actor_token} is no token of the model, which has {vocab_size}: use a '
            'smaller id'
        )
    return dataclasses.replace(frictions, actor_token=friction.actor_token)


def build_training_workflow(
    make: WorkflowFactory, frictions: Frictions | None, pool: Generator, sampling: SamplingParams, seed: int
) -> Workflow:
    """The workflow of training; evaluations make theirs without frictions."""
    usual = make(pool, sampling, seed)
    if frictions is None or not draws_otherwise(frictions):
        return usual
    scaled = dataclasses.replace(sampling, logit_scale=frictions.logit_scale)
    return TwoTemperatures(usual, make(pool, scaled, seed), frictions.is_hit)


def draws_otherwise(frictions: Frictions) -> bool:
    """Whether engines draw some tokens at another temperature than that of their log-probs."""
    return bool(frictions.actor_share) and frictions.actor == TEMPERATURE


def announce(frictions: Frictions) -> None:
    """On stderr, before anything is generated."""
    print(f'friction is on: {frictions.describe()}', file=sys.stderr, flush=True)
