"""An episode whose program is a coroutine of the test, which talks to the gateway over HTTP."""

from __future__ import annotations

import asyncio

import aiohttp

from areal_jax.agents.agent_workflow import AgentWorkflow, ProgramAgent
from areal_jax.agents.dialogue import Budgets, Dialogue
from areal_jax.agents.gateway import Gateway, GatewaySettings
from areal_jax.agents.programs.program_host import Ending
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.clocks.virtual import ReplayClock
from areal_jax.control.episode import Episode
from areal_jax.control.event_writer import EventLog, Recording
from areal_jax.control.supervisor import Supervisor
from areal_jax.errors import UserError
from areal_jax.rollout.http.server.limits import BodyBound, Limits
from areal_jax.types import Prompt, SamplingParams
from tests.agents.toy_format import ToyFormat, ToyPool, user

PROMPT = Prompt(5, ToyFormat().render([user('q')], ()), 'task', {'question': 'q'})
SAMPLING = SamplingParams(max_new_tokens=40, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=(3,))
BUDGETS = Budgets(max_turns=12, max_turn_tokens=0, context_tokens=400, tool_deadline_s=5.0, tool_bytes=10)
LIMITS = Limits(body_bytes=1 << 16, body_s=0.3)
CHAT = '/chat/completions'


def make_gateway(host, required='wish', chat_format=None):
    render = (chat_format or ToyFormat()).render
    return Gateway(host, GatewaySettings(400, 8, required, render, chr, BodyBound(400, 1, 1), LIMITS))


class CoroutineHost:
    """Runs `program(client)`; what it raises is how a program fails, and a UserError that none can run."""

    def __init__(self, program):
        self.program, self.jobs, self.is_closed = program, [], False

    async def run(self, job):
        self.jobs.append(job)
        async with Client(job.environment) as client:
            try:
                await self.program(client)
            except UserError:
                raise
            except Exception as error:
                return Ending('failed', f'{type(error).__name__}: {error}')
        return Ending('ended', '')

    async def close(self):
        self.is_closed = True


class Client:
    """What a program does over HTTP."""

    def __init__(self, environment):
        self.url, self.key = environment['OPENAI_BASE_URL'], environment['OPENAI_API_KEY']

    async def __aenter__(self):
        self.http = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_):
        await self.http.close()

    async def post(self, body, path=CHAT, key=None, **headers):
        """(status, JSON or text of the reply)."""
        headers = {'Authorization': f'Bearer {self.key if key is None else key}', **headers}
        async with self.http.post(self.url + path, json=body, headers=headers) as reply:
            is_json = reply.content_type == 'application/json'
            return reply.status, await reply.json() if is_json else await reply.text()

    async def chat(self, *messages, **fields):
        """The message of the reply."""
        status, reply = await self.post({'model': 'm', 'messages': list(messages), **fields})
        assert status == 200, reply
        return reply['choices'][0]['message']


class Run:
    """One episode: its program, and the ids that the pool answers with.

    `recorded`: the events of another one, which this one replays without a program.
    """

    def __init__(
        self,
        program,
        *answers,
        episode=None,
        pool=None,
        deadline_s=60.0,
        required='wish',
        host=None,
        prompt=PROMPT,
        chat_format=None,
        sampling=SAMPLING,
        recorded=None,
        **budgets,
    ):
        self.episode, self.errors, self.log = episode or Episode(2), [], EventLog()
        self.pool, self.host = pool or ToyPool(*answers), host or CoroutineHost(program)
        lanes = {'program': 64, 'tools': 2}
        if recorded is None:
            clock = RealClock(lanes, self.log, 30.0, end_of_work_s=1.0)
        else:
            recording = Recording(recorded, 0, len(recorded), 'log')
            clock = ReplayClock(lanes, self.log, recording, failures={})
        gateway = make_gateway(self.host, required, chat_format)

        def make(prompt, episode):
            return Dialogue(
                self.pool, clock, prompt, episode, sampling=sampling, seed=7, chat_format=chat_format or ToyFormat(),
                budgets=Budgets(**{**vars(BUDGETS), **budgets}), lane='tools',
            )  # fmt: skip

        agent = ProgramAgent(
            clock, lambda prompt, sample: gateway.open(sampling, prompt, sample), 'program', deadline_s
        )
        workflow = AgentWorkflow(agent, make, lambda prompt, error: self.errors.append(error), clock, deadline_s)
        supervisor = Supervisor(clock)
        clock.execute(supervisor.run(workflow.run(prompt, self.episode)))

    @property
    def rows(self):
        return [[s.tokens.tolist() for s in row.segments] for row in self.episode.rows]

    @property
    def ends(self):
        return self.episode.label, self.episode.finish_reason


async def never():
    await asyncio.Event().wait()
