"""One engine around the toy backend (tests/toys.py) or another under the virtual clock, and a script that drives it."""

import numpy as np

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.virtual import VirtualClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.stream import IN_TRAINING
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Work
from tests.toys import PRICES, STOP, ToyBackend

SAMPLING = SamplingParams(max_new_tokens=7, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=(STOP,))
DRAW = 4  # samples 1, 3 and 5 of draw 4 have 3, 2 and 1 tokens; sample 0 has 7


def request(sample, draw=DRAW, prefix=(), prompt=(1, 2, 3), sampling=SAMPLING):
    return GenerationRequest(draw, sample, 0, np.array(prompt, np.int32), sampling, prefix)


class Rig:
    """One engine under the virtual clock and a script that drives it."""

    def __init__(
        self,
        slots=4,
        kv_policy='recompute',
        decode_steps=1,
        token_bytes=None,
        receive=lambda published: published.handle,
        prices=PRICES,
        failure=IN_TRAINING,
        on_failed_dispatch=None,
        inner=None,
        params=(0, 0),
        **backend,
    ):
        self.log = EventLog()
        self.clock = VirtualClock({'engine/0': 1, 'publish/0': 1, 'script': 1}, self.log, prices | {'script': 1.0})
        self.supervisor, self.backend = Supervisor(self.clock), inner or ToyBackend(slots, **backend)
        self.engine = LocalEngine(
            0, self.backend, self.clock, self.log, receive=receive, version=0, params=params,
            rollout=RolloutSection(kv_policy=kv_policy, decode_steps=decode_steps),
            token_bytes=token_bytes, failure=failure,
            on_failed_dispatch=on_failed_dispatch,
        )  # fmt: skip

    def run(self, script):
        async def program():
            self.engine.start(self.supervisor)
            return await script(self)

        return self.clock.execute(self.supervisor.run(program()))

    async def load(self, version, handle):
        """`handle` is (w, version by which a stale cache shows)."""
        await self.engine.stage(PublishedWeights(version, '', handle))
        return await self.engine.swap(version)

    async def pass_time(self, seconds):
        await self.clock.run('script', lambda: None, Work('script', seconds))

    def kinds(self, kind):
        return [e for e in self.log.events if e['kind'] == kind]

    def check_blocks(self):
        """Asserts that every block is held by what is known to hold it, and by one request where it is written."""
        stream = self.engine.stream
        stream.cache.check(stream.table.open_requests())


async def collect(running):
    return [segment async for segment in running]
