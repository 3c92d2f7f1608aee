"""A gateway of agents (agents/gateway/) whose turns are there at once, for benchmarks of what its front costs.

    python -m benchmarks.side_gateway

For each line of standard input, a number, it ends its episodes, opens so many and prints {url, keys} as a line of JSON.
Its process has the settings of a run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence

import numpy as np

from areal_jax.agents.dialogue import Reply, Turn
from areal_jax.agents.gateway import Gateway, GatewaySettings, Session
from areal_jax.agents.programs.program_host import Ending, Job
from areal_jax.app.process.setup import set_up_process
from areal_jax.control.episode import Call
from areal_jax.rollout.http.server.limits import BodyBound
from areal_jax.types import Prompt, SamplingParams, Segment

CONTEXT = 1024
_SAMPLING = SamplingParams(max_new_tokens=8, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=(0,))
_PROMPT = Prompt(0, np.zeros(1, np.int32), 'task', {})


class IdleHost:
    """Programs that do nothing: what they would ask comes from outside."""

    def __init__(self) -> None:
        self.environments: asyncio.Queue[Mapping[str, str]] = asyncio.Queue()

    async def run(self, job: Job) -> Ending:
        await self.environments.put(job.environment)
        await asyncio.Event().wait()
        raise AssertionError('it waits for ever')

    async def close(self) -> None:
        """Nothing runs."""


def make_turn() -> Turn:
    """Four tokens."""
    segment = Segment(np.arange(4, dtype=np.int32), np.full(4, -1.0, np.float32), 0)
    reply = Reply({'role': 'assistant', 'content': 'abcd'}, 'stop')
    return Turn(Call('', '', 0, 0, True, (), ''), reply, _PROMPT.tokens, (segment,))


async def answer(session: Session) -> None:
    """All calls of an episode."""
    while (event := await session.next())['event'] == 'call':
        session.answer(event['number'], [make_turn()] * event['n'])


def render(messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]]) -> np.ndarray:
    return np.zeros(1, np.int32)


async def main() -> None:
    host = IdleHost()
    settings = GatewaySettings(CONTEXT, 256, 'wish', render, str, BodyBound(CONTEXT, 8, 16))
    gateway, tasks, sessions = Gateway(host, settings), [], []
    while line := await asyncio.to_thread(sys.stdin.readline):
        for task, session in zip(tasks, sessions, strict=True):
            task.cancel()
            session.close()  # else what all turns have asked stays, and is searched for garbage
        sessions = [gateway.open(_SAMPLING, _PROMPT, sample) for sample in range(int(line))]
        tasks = [asyncio.create_task(answer(session)) for session in sessions]
        found = [await host.environments.get() for _ in sessions]
        keys = [environment['OPENAI_API_KEY'] for environment in found]
        print(json.dumps({'url': found[0]['ANTHROPIC_BASE_URL'], 'keys': keys}), flush=True)


if __name__ == '__main__':
    set_up_process()
    asyncio.run(main())
