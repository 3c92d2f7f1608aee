"""Which answers of a run are drawn at another temperature, and which fields a friction reads."""

from __future__ import annotations

import asyncio
import dataclasses
import types

import pytest

from areal_jax.app.parts.workflow_builder import build_frictions, build_training_workflow, load_workflow
from areal_jax.config import TrackedConfig
from areal_jax.config.drawn_lengths import AnswerLimits
from areal_jax.control.frictions import Frictions
from areal_jax.errors import UserError
from areal_jax.text.tokenizer import CharacterTokenizer
from areal_jax.types import SamplingParams
from tests.app.small import small_config
from tests.app.test_own_workflow import TWO_TURNS

SAMPLING = SamplingParams(4, 1.5, 0, 1.0, ())


class Recorder:
    """A workflow that notes the sampling of each answer."""

    def __init__(self, seen, sampling):
        self.seen, self.sampling = seen, sampling

    async def run(self, prompt, episode):
        self.seen[prompt.draw, episode.sample] = self.sampling.logit_scale


def scales_of(frictions):
    seen = {}
    make = lambda pool, sampling, seed: Recorder(seen, sampling)
    workflow = build_training_workflow(make, frictions, None, SAMPLING, 0, AnswerLimits(4))
    for draw in range(5):
        for sample in range(4):
            asyncio.run(workflow.run(types.SimpleNamespace(draw=draw), types.SimpleNamespace(sample=sample)))
    return seen


def test_only_answers_that_are_met_are_drawn_at_another_temperature():
    own = Frictions(seed=1, actor='temperature', actor_share=0.5, actor_temperature=0.5, temperature=1.5)
    scales = scales_of(own)
    assert scales == {place: 3.0 if own.is_hit(*place) else 1.0 for place in scales}
    assert set(scales.values()) == {1.0, 3.0}
    for other in (None, dataclasses.replace(own, actor='constant'), dataclasses.replace(own, actor_share=0.0)):
        assert set(scales_of(other).values()) == {1.0}


def test_fields_of_what_is_off_are_not_read():
    config = TrackedConfig(small_config(friction__reward_share=0.1, friction__actor='logprobs', run__seed=9))
    assert build_frictions(config, 4) == Frictions(seed=9, reward_share=0.1)
    assert [path for path, _ in config.unread() if path.startswith('friction.')] == ['friction.actor']
    assert build_frictions(TrackedConfig(small_config()), 4) is None


def test_a_workflow_that_is_no_agent_has_no_deadline_of_episodes():
    fields = {'rollout__workflow': TWO_TURNS, 'rollout__episode_deadline_s': 5.0}
    with pytest.raises(UserError, match=r'^rollout\.episode_deadline_s=5\.0: rollout\.workflow=.* is no agent'):
        load_workflow(TrackedConfig(small_config(**fields)), CharacterTokenizer('ab='))
