"""Turns and forks of conversations on a real engine: the same as where nothing is shared."""

import dataclasses

import numpy as np

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import PublishedWeights
from tests.rollout.decode.examples import PROMPT, backend, request, weights
from tests.toys import PRICES


class Talk:
    """Two conversations of three turns, and two samples of a fork of the first, with an interruption in between."""

    def __init__(self, shares):
        self.shares, self.log, self.answers, self.cached = shares, EventLog(), {}, {}
        self.clock = VirtualClock({'engine/0': 1, 'publish/0': 1}, self.log, PRICES)
        self.engine = LocalEngine(
            0, backend(), self.clock, self.log, receive=lambda published: published.handle, version=0,
            params=weights(), rollout=RolloutSection(decode_steps=3),
        )  # fmt: skip
        self.supervisor = Supervisor(self.clock)

    def run(self):
        async def program():
            self.engine.start(self.supervisor)
            tasks = [self.supervisor.start(f'talk {draw}', self.talk(draw)) for draw in range(2)]
            for task in tasks:
                await task
            await self.engine.stage(PublishedWeights(1, '', weights(1)))
            await self.engine.swap(1)
            await self.talk(2)

        self.clock.execute(self.supervisor.run(program()))
        return self

    async def talk(self, draw):
        said = [*PROMPT[: 5 - draw % 2]]
        for turn in range(3):
            told = await self.ask(draw, turn, said)
            fork = [*said, *told[:2], 9]
            said = [*said, *told, 7, 8 + draw]
        for sample in range(2):
            await self.ask(draw, 3 + sample, fork)

    async def ask(self, draw, sample, said):
        one = request(draw, sample, prompt=said, new=4)
        running = self.engine.generate(
            one if self.shares else dataclasses.replace(one, cache_salt=f'{draw}/{sample}')
        )  # fmt: skip
        segments = [segment async for segment in running]
        self.answers[draw, sample] = tuple(
            np.concatenate([getattr(segment, name) for segment in segments]) for name in ('tokens', 'behavior_logprobs')
        )
        self.cached[draw, sample] = running.cached_tokens
        return self.answers[draw, sample][0].tolist()

    def prefilled(self):
        return sum(event['tokens'] for event in self.log.events if event['kind'] == 'prefill')


def test_turns_and_forks_are_those_of_an_engine_that_shares_nothing():
    shared, alone = Talk(True).run(), Talk(False).run()
    assert set(alone.cached.values()) == {0}
    # prompts of 5, 11 and 17 tokens; the fork of 20 shares the 16 of whole blocks with the third, and its second
    # sample finds its prompt. The third conversation begins as the first, under other weights
    assert [shared.cached[0, sample] for sample in range(5)] == [0, 8, 14, 16, 19]
    assert [shared.cached[2, sample] for sample in range(5)] == [0, 8, 14, 16, 19]
    assert shared.prefilled() < alone.prefilled() / 2
    exact = backend().attention == 'native'  # whose sums have one order wherever a piece begins
    for name, (tokens, logprobs) in alone.answers.items():
        assert shared.answers[name][0].tolist() == tokens.tolist()
        np.testing.assert_allclose(shared.answers[name][1], logprobs, rtol=0, atol=0 if exact else 1e-5)
