"""A server around a small model with experts whose engine records routes, and the same engine in this process."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS
from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import server_lanes
from areal_jax.models.decoder import Decoder
from areal_jax.models.layer_parts import Experts
from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.http.clients.server import ServerLimits
from areal_jax.rollout.http.clients.vllm import OwnDialect
from areal_jax.rollout.http.wire.exchange import RouteForm, list_forms
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.types import GenerationRequest, PublishedWeights, SamplingParams
from tests.rollout.decode.examples import CONTEXT, DECODER, build
from tests.rollout.http.server.rig import ToyServer

VOCABULARY = 10  # that of the tokenizer of the toy
MIXED = dataclasses.replace(
    DECODER.config, vocab_size=VOCABULARY, n_layers=3, family='qwen3_moe', qk_norm=True,
    experts=Experts(8, 3, 16, dense_layers=(1,)),
)  # fmt: skip
FORM = RouteForm.of(MIXED)
FORMS = list_forms(MIXED)
NAME = ROUTED_EXPERTS.name
PROMPT = np.array([1, 2, 3, 4, 5], np.int32)
NEW = 8
LIMITS = ServerLimits(4, VOCABULARY, CONTEXT, FORMS, request_s=60, control_s=30, load_s=30)


@functools.cache
def build_backend():
    """One bucket of prefill and one batch: equal requests run through equal programs, whatever their company."""
    return build(Decoder(MIXED), records_routes=True, prefill_buckets=(CONTEXT,), decode_steps=3)


@functools.cache
def weights(seed):
    return Decoder(MIXED).init(seed, scale=2.0)


def request(sample=0, prefix=()):
    return GenerationRequest(0, sample, 7, PROMPT, SamplingParams(NEW, 1.0, 0, 1.0, ()), tuple(prefix))


class ExpertServer(ToyServer):
    """The weights of version `v` are those that are drawn with the seed `v`."""

    context, vocabulary = CONTEXT, VOCABULARY

    def __init__(self):
        super().__init__(slots=4, decode_steps=3, recorded=(NAME,))

    def make_backend(self, slots, decode_steps):
        def receive(published):
            published.handle.digest = f'digest of {published.handle.path}'
            return weights(int(published.handle.path))

        self.receive = receive
        return build_backend(), weights(0)

    def client(self, clock, log):
        return OwnEngine(
            server_lanes(0), OwnDialect(), Connection(self.url, client='test'), clock, log,
            locate=lambda published: published.handle, limits=LIMITS, kv_policy='recompute',
        )  # fmt: skip


class InProcess:
    """The engine itself."""

    def client(self, clock, log):
        return LocalEngine(
            0, build_backend(), clock, log, receive=lambda published: weights(int(published.handle)),
            version=0, params=weights(0), rollout=RolloutSection(decode_steps=3),
        )  # fmt: skip


def drive(subject, script):
    """What `script(engine)` returns; a server holds version 0 as the run calls it."""
    log = EventLog()
    clock = RealClock({'engine/0': LIMITS.slots + 1, 'publish/0': 1, 'control/0': 4}, log, 60.0)
    engine, supervisor = subject.client(clock, log), Supervisor(clock)

    async def program():
        engine.start(supervisor)
        if isinstance(engine, OwnEngine):
            await engine.fence()
            await engine.stage(PublishedWeights(0, '', '0'))
            await engine.swap(0)
        found = await script(engine)
        if isinstance(engine, OwnEngine):
            await engine.close()
        return found

    return clock.execute(supervisor.run(program()))


async def take(generation, note_segment=lambda: None):
    segments = []
    async for segment in generation:
        segments.append(segment)
        note_segment()
    return segments


@functools.cache
def in_process(sample=0):
    """(tokens [n], rows [prompt + n - 1, layers, choices]) of an answer of the engine in this process."""
    segments = drive(InProcess(), lambda engine: take(engine.generate(request(sample))))
    columns = [segments[0].context[NAME], *(segment.columns[NAME] for segment in segments)]
    return [token for segment in segments for token in segment.tokens.tolist()], np.concatenate(columns)[1:]
