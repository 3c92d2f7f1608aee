"""The pool's side of a soak: 64 clients, new versions and pauses, and a record of everything that was answered."""

from __future__ import annotations

import dataclasses
import pathlib
import queue
import random
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.groups import RequestLostError
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import REGISTRY, control_lane, engine_lane, publish_lane, server_lanes
from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.http.clients.server import ServerLimits
from areal_jax.rollout.http.clients.vllm import OwnDialect
from areal_jax.rollout.servers.member import ProbeSettings, ServerSettings
from areal_jax.rollout.servers.server_entries import RegistryWatch, ServerEntry, read_registry
from areal_jax.rollout.servers.server_pool import ServerPool
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams, Segment, Work
from checks.soak.scores import TOLERANCE, Scores
from checks.soak.sender import SenderProcess
from checks.soak.servers import API_KEY, CHANNELS, CONTEXT

CHANNEL = 'channel'  # lane: versions are written in it
PROMPT_TOKENS, NEW_TOKENS = (2, 24), (1, 200)
CALLS = 64  # at once on a server: more than its slots, so that requests wait there too
CONTROL_CALLS = 4
Result = TypeVar('Result')
STALL_S, END_S = 300.0, 120.0  # without any completion; for the last answers


def make_settings(tolerance: float) -> ServerSettings:
    probe = ProbeSettings(np.array([1, 2, 1], np.int32), max_difference=tolerance, max_mean=tolerance, again_s=5.0)
    return ServerSettings(
        max_retries=1000, max_failures=3, stage_s=20.0, swap_s=60.0, pause_s=60.0, ask_s=5.0, probe_s=60.0,
        drain_s=5.0, retry_s=0.5, health_every_s=2.0, no_server_s=240.0, probe=probe,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Answered:
    """An answer that has ended, for the checks."""

    draw: int
    prompt: np.ndarray
    asked_tokens: int
    segments: list[Segment]


class SoakLoad:
    """`run` returns when the minutes are over and every answer has ended.

    Args:
      urls: of the servers as the pool reaches them, by the URL under which they register.
      channel: one of servers.CHANNELS.
    """

    def __init__(
        self, workdir: pathlib.Path, urls: dict[str, str], seed: int, seconds: float, clients: int, channel: str
    ):
        self._workdir, self._urls, self._seconds, self._clients = workdir, urls, seconds, clients
        self._random = random.Random(seed)
        self.dtype = str(CHANNELS[channel].get('publication.dtype', 'float32'))
        self._scores = Scores(self.dtype)
        self.log = EventLog(workdir / 'events.jsonl')
        self._engines: list[OwnEngine] = []
        self._indices: dict[str, int] = {}  # of engines, by the name under which they register
        engines = range(len(urls) + 1)  # one for the entry of the dead
        lanes = {engine_lane(i): CALLS + 1 for i in engines} | {publish_lane(i): 1 for i in engines}
        lanes |= {control_lane(i): CONTROL_CALLS for i in engines}
        self._clock = RealClock(lanes | {REGISTRY: 1, CHANNEL: 1}, self.log, STALL_S)
        self._supervisor = Supervisor(self._clock)
        self.sender = SenderProcess(workdir, channel)
        self.answered: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self.lost: list[str] = []
        self.faults: list[str] = []  # what should not have happened
        self.counts = dict.fromkeys(('started', 'ended', 'tokens', 'updates', 'pauses'), 0)
        self.slowest_s = dict.fromkeys(('answer', 'update', 'pause'), 0.0)
        self._is_ending = False
        self._left = clients
        self._ended, self._never = self._clock.event('the last client'), self._clock.event('time')

    def run(self) -> None:
        try:
            self._clock.execute(self._supervisor.run(self._program()))
        finally:
            self.faults += self.sender.end()
            self.log.close()

    async def _program(self) -> None:
        clock, supervisor = self._clock, self._supervisor
        settings = make_settings(TOLERANCE[self.dtype])
        self._pool = ServerPool(
            clock, self.log, supervisor, settings, published=await self._publish(0), score=self._score,
            on_no_server=self.faults.append,
        )  # fmt: skip
        self._pool.start()
        watch = RegistryWatch(clock, self._pool, self._read, self._make_engine, patience_s=5.0)
        supervisor.start('registry', watch.run())
        for client in range(self._clients):
            supervisor.start(f'client {client}', self._ask_again_and_again(client))
        supervisor.start('updates', self._update())
        supervisor.start('pauses', self._pause())
        await clock.wait(self._never, self._seconds)
        self._is_ending = True
        if not await clock.wait(self._ended, END_S):
            self.faults.append(f'{self._left} clients hang: {self._pool.states()}, {clock.describe_waits()[:2000]}')
        for engine in self._engines:
            await engine.close()

    async def _ask_again_and_again(self, client: int) -> None:
        while not self._is_ending:
            await self._ask(self.counts['started'])
        self._left -= 1
        if not self._left:
            self._ended.set()

    async def _ask(self, draw: int) -> None:
        """One answer; its draw is unique."""
        self.counts['started'] += 1
        prompt = np.array(
            [self._random.randrange(self._scores.vocab_size) for _ in range(self._random.randint(*PROMPT_TOKENS))],
            np.int32,
        )
        asked = min(self._random.randint(*NEW_TOKENS), CONTEXT - len(prompt))
        request = GenerationRequest(draw, 0, 0, prompt, SamplingParams(asked, 1.0, 0, 1.0, ()))
        generation, segments, began_s = self._pool.generate(request), [], self._clock.now()
        try:
            async for segment in generation:
                segments.append(segment)
        except RequestLostError as error:
            self.lost.append(f'draw {draw}: {error}')
            return
        self._note_end('answer', began_s)
        tokens = sum(len(segment.tokens) for segment in segments)
        self.log.write(
            'finish', draw=draw, sample=0, tokens=tokens, reason=generation.finish_reason,
            versions=[segment.policy_version for segment in segments],
        )  # fmt: skip
        self.counts['ended'] += 1
        self.counts['tokens'] += tokens
        self.answered.put(Answered(draw, prompt, asked, segments))

    def _note_end(self, kind: str, began_s: float) -> None:
        self.slowest_s[kind] = max(self.slowest_s[kind], self._clock.now() - began_s)

    async def _update(self) -> None:
        version = 0
        while not self._is_ending:
            await self._clock.wait(self._never, self._random.uniform(2.0, 6.0))
            version += 1
            published, began_s = await self._publish(version), self._clock.now()
            await self._pool.load_weights(published)
            self._note_end('update', began_s)
            pinned = self._pool.pinned_versions()
            await self._send(version, lambda version=version, pinned=pinned: self.sender.release(version, pinned))
            self.counts['updates'] += 1

    async def _pause(self) -> None:
        while not self._is_ending:
            await self._clock.wait(self._never, self._random.uniform(5.0, 15.0))
            began_s = self._clock.now()
            await self._pool.pause()
            self._note_end('pause', began_s)
            await self._clock.wait(self._never, self._random.uniform(0.0, 0.5))
            self._pool.resume()
            self.counts['pauses'] += 1

    async def _publish(self, version: int) -> PublishedWeights:
        return await self._send(version, lambda: self.sender.transfer(version))

    async def _send(self, version: int, work: Callable[[], Result]) -> Result:
        return await self._clock.run(CHANNEL, work, Work('publish', 1, {'version': version}))

    async def _score(self, version: int, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._scores.logprobs(version, prompt, tokens)

    def _read(self) -> list[ServerEntry]:
        """The registry, with the URLs of the proxies."""
        entries = read_registry(self._workdir)
        return [dataclasses.replace(entry, url=self._urls.get(entry.url, entry.url)) for entry in entries]

    def _make_engine(self, entry: ServerEntry) -> OwnEngine:
        index = self._indices.setdefault(entry.name, len(self._indices))
        engine = OwnEngine(
            server_lanes(index), OwnDialect(), Connection(entry.url, API_KEY, client='load'), self._clock, self.log,
            locate=lambda published: str(published.handle), kv_policy='recompute',
            limits=ServerLimits(
                CALLS, self._scores.vocab_size, CONTEXT, request_s=120.0, control_s=10.0, load_s=15.0, loads=2
            ),
        )  # fmt: skip
        engine.start(self._supervisor)
        self._engines.append(engine)
        return engine
