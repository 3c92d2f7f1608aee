"""The contract put to a real server: AREAL_JAX_SERVER, 'vllm+http://host:port', and AREAL_JAX_SERVER_CHECKPOINTS.

The latter is a folder of checkpoints.py that the server sees too. launch/test_external.sh sets both; without them these
tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config.kinds import EXTERNAL
from areal_jax.control.clocks.real import RealClock
from areal_jax.lanes import server_lanes
from areal_jax.models.decoder import Decoder
from areal_jax.models.logprobs import logprob_of
from areal_jax.rollout.http.clients.connection import Connection, NoReplyError
from areal_jax.rollout.http.clients.engine import ServerEngine
from areal_jax.rollout.http.clients.server import ServerLimits
from areal_jax.rollout.http.clients.sglang import SglangDialect
from areal_jax.rollout.http.clients.vllm import VllmDialect
from areal_jax.rollout.http.wire.exchange import Call, CallSampling
from areal_jax.rollout.servers.member import OutcomeUnknownError
from areal_jax.rollout.servers.server_entries import read_address
from areal_jax.types import PublishedWeights, Work
from tests.rollout.decode.examples import whole_attention
from tests.rollout.engine_contract import CHECKS, Bench, Setting, Subject
from tests.rollout.http.clients.checkpoints import CONFIG, make_params

ADDRESS = os.environ.get('AREAL_JAX_SERVER')
CHECKPOINTS = pathlib.Path(os.environ.get('AREAL_JAX_SERVER_CHECKPOINTS', ''))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ADDRESS, reason='AREAL_JAX_SERVER names no server: bash launch/test_external.sh vllm'),
]
SLOTS = 2
# tokens of an answer. SGLang on a CPU makes 250 a second at most: a second after its begin an answer is not over
LONGEST = 500 if (ADDRESS or '').startswith('sglang') else 1500
TOLERANCE = 3e-5  # of a log-prob: float32 over so many positions, summed in another order
LIMITS = ServerLimits(
    slots=SLOTS, vocab_size=CONFIG.vocab_size, context_tokens=CONFIG.context_tokens,
    request_s=120, control_s=60, load_s=60, loads=2,
)  # fmt: skip
DECODER = Decoder(CONFIG)
PROMPT = np.arange(5, 11, dtype=np.int32)


def make_clock(log):
    return RealClock({'engine/0': SLOTS + 1, 'publish/0': 1, 'control/0': 4}, log, 120.0)


def published(version, equal=False):
    return PublishedWeights(version, '', str(CHECKPOINTS / f'v{0 if equal else min(version, 1)}'))


def score(prompt, answer, versions):
    """By a plain forward of our model under each version's weights."""
    tokens = np.zeros(LONGEST + len(prompt), np.int32)  # one shape for all
    tokens[: len(prompt) + len(answer)] = [*prompt, *answer]
    found = [logprobs_of(make_params(seed), tokens)[len(prompt) - 1 :][: len(answer)] for seed in (0, 1)]
    return np.where(versions == 0, *map(np.asarray, found))


@jax.jit
def logprobs_of(params, tokens):
    """float32 [T - 1]: of each token but the first, after all before it."""
    hidden, _ = DECODER.hidden(params, tokens, jnp.arange(len(tokens)), whole_attention)
    return logprob_of(DECODER.logits(params, hidden)[:-1], tokens[1:], 1.0)


class CutsRepliesToUpdates(Connection):
    """Loses so many replies to loads of weights, after the server has done them."""

    cuts = 0

    async def request(self, method, path, body=None):
        reply = await super().request(method, path, body)
        if path in ('/collective_rpc', '/update_weights_from_disk') and self.cuts:
            self.cuts -= 1
            raise NoReplyError('cut by the test')
        return reply


def make_call(name, n, seed=None):
    sampling = CallSampling(max_new_tokens=n, ignore_eos=True, seed=seed)
    return Call((PROMPT,), 'prompt', (sampling,), (name,), logprobs=True)


class Factory:
    # A token takes 2 to 8 ms: answers are well begun and far from their end after the 0.2 to 0.4 s that checks wait,
    # also where the machine stops this process for a second. Checks can not wait for tokens, which the client delivers
    # at the end of a call. Greedy: an interruption changes the noise.
    setting = Setting(make_clock, pace=8.0, longest=LONGEST, temperature=0.0, slack=SLOTS - 1)

    def __call__(self, clock, log):
        entry = read_address(ADDRESS, EXTERNAL.clients)
        dialect = {'sglang': SglangDialect, 'vllm': VllmDialect}[entry.kind]()
        self.connection = CutsRepliesToUpdates(entry.url)
        engine = ServerEngine(
            server_lanes(0), dialect, self.connection, clock, log,
            locate=lambda published: published.handle, limits=LIMITS,
        )  # fmt: skip

        async def prepare():
            await engine.fence()
            await engine.stage(published(0))
            await engine.swap(0)
            # the first sampled tokens of a server take longer than checks wait; the reply shows whether it has spans
            seed = 1 if dialect.seeds else None
            first = lambda: dialect.generate(self.connection, make_call('first', 8, seed), CONFIG.vocab_size)
            await clock.call('engine/0', first, Work('generate'), LIMITS.request_s)

        return Subject(engine, engine.start, published, prepare, engine.close, score, TOLERANCE)


@pytest.mark.parametrize('check', CHECKS, ids=lambda check: check.__name__)
def test_the_contract_holds(check):
    check(Factory())


@pytest.mark.parametrize('cuts', [1, LIMITS.loads])
def test_an_update_under_load_whose_reply_is_lost_is_settled(cuts):
    factory = Factory()

    async def script(bench):
        found = bench.collect(0, 1, 2, temperature=1.0)
        await bench.pass_time(0.03)
        factory.connection.cuts = cuts
        try:
            await bench.load(1)
        except OutcomeUnknownError:
            assert cuts == LIMITS.loads
            assert bench.engine.status().policy_version == -1
        assert (await bench.engine.ask()).version == 1
        await bench.end_of(*found)
        for one in found:
            recorded = np.concatenate([segment.behavior_logprobs for segment in one.segments])
            expected = score(np.array([1, 2, 3]), np.array(one.tokens()), np.array(one.versions()))
            assert np.abs(recorded - expected).max() < bench.subject.tolerance
        assert {version for one in found for version in one.versions()} == {0, 1}

    Bench(factory).run(script)


# mode of a pause in which version 1 is loaded: whether answers go on, and whether under a KV cache of the new weights
PAUSES = {'abort': (False, True), 'retract': (True, True), 'in_place': (True, False)}


async def answer_over_an_update(mode, server):
    """The answer to PROMPT, which is under way while SGLang is paused in `mode` and loads version 1 over version 0."""
    dialect, call = SglangDialect(), make_call(f'pause/{mode}', LONGEST)
    await server.require('POST', '/pause_generation', {'mode': 'abort'})
    await dialect.update(server, str(CHECKPOINTS / 'v0'), '0')
    await dialect.resume(server)
    generating = asyncio.create_task(dialect.generate(server, call, CONFIG.vocab_size))
    await asyncio.sleep(0.4)
    await server.require('POST', '/pause_generation', {'mode': mode})
    body = {'model_path': str(CHECKPOINTS / 'v1'), 'weight_version': '1', 'flush_cache': mode != 'in_place'}
    await server.require('POST', '/update_weights_from_disk', body)
    await dialect.resume(server)
    return await generating


@pytest.mark.skipif('sglang' not in (ADDRESS or ''), reason='pause modes of SGLang')
@pytest.mark.parametrize('mode', PAUSES)
def test_an_answer_over_an_update_is_as_the_mode_of_the_pause_says(mode):
    """One answer alone, so that no other request hides what the pause does."""
    goes_on, is_exact = PAUSES[mode]

    async def script():
        connection = Connection(read_address(ADDRESS, EXTERNAL.clients).url)
        try:
            return await answer_over_an_update(mode, connection)
        finally:
            await connection.close()

    answer = asyncio.run(script())
    versions = np.array([int(piece.version) for piece in answer.pieces for _ in piece.tokens])
    assert answer.finish.reason == ('length' if goes_on else 'abort')
    assert [piece.version for piece in answer.pieces] == ['0', '1'][: 1 + goes_on]
    off = np.abs(answer.logprobs - score(PROMPT, answer.tokens, versions))
    assert off[versions == 0].max() < TOLERANCE
    assert off[versions == 1].max(initial=0.0) < TOLERANCE or not is_exact
    assert is_exact or off[versions == 1].max() > 1e-2  # the old KV goes on being used
