"""Servers of both kinds around a small model, and the same engine in this process."""

from __future__ import annotations

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import server_lanes
from areal_jax.models.decoder import Decoder
from areal_jax.models.logprobs import logprob_of
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.http.clients.connection import Connection
from areal_jax.rollout.http.clients.own import OwnEngine
from areal_jax.rollout.http.clients.server import ServerLimits
from areal_jax.rollout.http.clients.vllm import OwnDialect
from areal_jax.rollout.jetstream.client import JetstreamDialect
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.text.tokenizer import CharacterTokenizer
from areal_jax.types import PublishedWeights
from tests.rollout.decode.examples import whole_attention
from tests.rollout.http.clients.checkpoints import CONFIG, make_params
from tests.rollout.http.server.rig import ToyServer, write_weights
from tests.rollout.jetstream.rig import JetstreamToyServer

SLOTS, STEPS, CONTEXT, LONGEST = 8, 8, 448, 400
DECODER = Decoder(CONFIG)
LIMITS = ServerLimits(SLOTS, CONFIG.vocab_size, CONTEXT, request_s=120, control_s=60, load_s=60)


@functools.cache
def build_backend() -> JaxDecodeBackend:
    """One bucket of prefill and one batch: equal requests run through equal programs, whatever their company."""
    return JaxDecodeBackend(
        DECODER, slots=SLOTS, context_tokens=CONTEXT, block_tokens=16, prefill_buckets=(CONTEXT,), decode_steps=STEPS,
        filtered=True, dtype='float32', batch_buckets=(SLOTS,),
    )  # fmt: skip


@functools.cache
def weights(seed):
    return make_params(seed)


class ModelServer:
    """Before a ToyServer: the model in the place of the toy."""

    context, vocabulary = CONTEXT, CONFIG.vocab_size

    def __init__(self):
        characters = ''.join(chr(0x4E00 + i) for i in range(CONFIG.vocab_size - 1))  # and EOS
        super().__init__(slots=SLOTS, decode_steps=STEPS, tokenizer=CharacterTokenizer(characters))

    def make_backend(self, slots, decode_steps):
        def receive(published):
            seed = int((pathlib.Path(published.handle.path) / 'w').read_text())
            published.handle.digest = f'digest of {seed}'
            return weights(seed)

        self.receive = receive
        return build_backend(), weights(0)


class OwnServer(ModelServer, ToyServer):
    """Over HTTP."""

    def client(self, clock, log):
        return _make(OwnDialect(), Connection(self.url, client='test'), clock, log)


class JetstreamServer(ModelServer, JetstreamToyServer):
    """Behind JetStream."""

    def client(self, clock, log):
        from areal_jax.rollout.jetstream.channel import JetstreamConnection

        return _make(JetstreamDialect(), JetstreamConnection(self.url, client='test'), clock, log)


class InProcess:
    """The engine itself."""

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def client(self, clock, log):
        return LocalEngine(
            0, build_backend(), clock, log, receive=lambda published: weights(int(published.handle)),
            version=0, params=weights(0), rollout=RolloutSection(decode_steps=STEPS),
        )  # fmt: skip


def _make(dialect, connection, clock, log):
    return OwnEngine(
        server_lanes(0), dialect, connection, clock, log,
        locate=lambda published: published.handle, limits=LIMITS, kv_policy='recompute',
    )  # fmt: skip


def drive(server, folder, script):
    """What `script(engine, clock, supervisor)` returns; a server holds version 0 as the run calls it."""
    log = EventLog()
    clock = RealClock({'engine/0': SLOTS + 1, 'publish/0': 1, 'control/0': 4}, log, 120.0)
    engine, supervisor = server.client(clock, log), Supervisor(clock)

    async def program():
        engine.start(supervisor)
        if isinstance(engine, OwnEngine):
            await engine.fence()
            await engine.stage(PublishedWeights(0, '', write_weights(folder / '0', 0)))
            await engine.swap(0)
        found = await script(engine, clock, supervisor)
        if isinstance(engine, OwnEngine):
            await engine.close()
        return found

    return clock.execute(supervisor.run(program()))


@jax.jit
def _logprobs(params, tokens):
    hidden, _ = DECODER.hidden(params, tokens, jnp.arange(len(tokens)), whole_attention)
    return logprob_of(DECODER.logits(params, hidden)[:-1], tokens[1:], 1.0)


def score(prompt, answer, versions, seeds):
    """float32 [n]: of each token of the answer by a plain forward under the weights of its version."""
    tokens = np.zeros(CONTEXT, np.int32)
    tokens[: len(prompt) + len(answer)] = [*prompt, *answer]
    found = {v: np.asarray(_logprobs(weights(s), tokens))[len(prompt) - 1 :][: len(answer)] for v, s in seeds.items()}
    return np.array([found[version][place] for place, version in enumerate(versions)])
