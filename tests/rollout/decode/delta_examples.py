"""A hybrid of delta nets and attention, or another family, in an engine, and its log-probs by the learner's pass."""

import functools

import jax
import numpy as np

from areal_jax.learning.forward import forward
from areal_jax.models.decoder import Decoder
from areal_jax.models.weights import leaf_dtype
from areal_jax.rollout.backend import PrefillPiece
from areal_jax.sharding.rules import path_name
from tests.models import family_examples
from tests.rollout.decode.examples import build, request
from tests.rollout.engine_rig import Rig, collect

CONFIG = family_examples.CONFIGS['qwen3_5']
DECODER = Decoder(CONFIG)
CONTEXT = 256
PROMPT = np.random.default_rng(3).integers(0, 300, 70)  # ends inside the second chunk
EXACT = 1e-5  # of log-probs that an engine computes in two ways, largest; of an engine and of a learner, mean


def assert_near(found, expected, largest=1e-4):
    """Log-probs of an engine and of another forward pass, which adds up in another order.

    A delta net divides what a head gives by its length, and latent attention a latent, and so both multiply rounding
    where that is small.
    """
    error = np.abs(np.asarray(found) - expected)
    assert error.mean() <= EXACT
    assert error.max() <= largest


@functools.cache
def weights(version=0, dtype='float32', config=CONFIG):
    cast = lambda path, leaf: leaf.astype(leaf_dtype(path_name(path), dtype))
    scale = 1.25 if config.latent else 1.5  # as in test_random_schedules: at 1.5 rounding is above EXACT
    drawn = family_examples.draw(config, version, scale)
    return jax.tree_util.tree_map_with_path(cast, jax.tree.map(jax.numpy.asarray, drawn))


def large(decoder=DECODER, **changed):
    """A backend of 16 slots, with room for every sequence."""
    sizes = {'slots': 16, 'context_tokens': CONTEXT, 'block_tokens': 16, 'prefill_buckets': (CONTEXT,)}
    return build(decoder, **{**sizes, 'decode_steps': 8, 'batch_buckets': (16,), **changed})


def small(decoder=DECODER, **changed):
    """A backend of four slots, whose blocks do not hold four long sequences."""
    sizes = {'slots': 4, 'context_tokens': 64, 'block_tokens': 4, 'cache_blocks': 24, 'prefill_buckets': (64,)}
    return build(decoder, **{**sizes, 'decode_steps': 4, 'batch_buckets': (4,), **changed})


def run(backend, script, params=None, decode_steps=4, config=CONFIG, **settings):
    """What `script` returns, run with an engine around the backend; no place of a state is leaked."""
    receive = lambda published: weights(published.handle, config=config)
    params = weights(config=config) if params is None else params
    rig = Rig(inner=backend, params=params, receive=receive, decode_steps=decode_steps, **settings)
    found = rig.run(script)
    rig.check_blocks()
    if backend.states:
        states = rig.engine.stream.cache.states
        assert states.free + states.snapshots == backend.states.places
    return found


def answers(backend, requests, **settings):
    """(tokens, log-probs) of the answers to these requests, which arrive at once."""

    async def script(rig):
        open_ = [rig.engine.generate(one) for one in requests]
        return [joined(await collect(one)) for one in open_]

    return run(backend, script, **settings)


def prefill_in_parts(decoding, name, cuts):
    """Computes what a started sequence has, once more and in parts."""
    sequence = decoding.sequences[name]
    tokens = np.array(sequence.tokens[:-1], np.int32)
    for start, stop in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        piece = PrefillPiece(tokens[start:stop], start, sequence.blocks, state=sequence.state)
        decoding.state = decoding.backend.prefill(decoding.params, decoding.state, [piece])


def interrupted(backend, kv_policy, handle, **settings):
    """Segments of three answers in whose midst the weights `handle` arrive."""

    async def script(rig):
        open_ = [rig.engine.generate(ask(sample, new=24)) for sample in range(3)]
        await rig.pass_time(0.35)
        await rig.load(1, handle)
        return [await collect(one) for one in open_]

    return run(backend, script, kv_policy=kv_policy, **settings)


def token_by_token(config, segments):
    """Log-probs of the answer to PROMPT in these segments, each token read by the weights of its segment.

    `config` has latent attention in the form of the engine. Absorbed, a latent is read by matrices of the weights of
    the token that reads it; expanded, its keys and values are of those that wrote it.
    """
    one, (tokens, _) = family_examples.TokenByToken(config, CONTEXT), joined(segments)
    versions = [0] * (len(PROMPT) - 1)
    for segment in segments:
        versions += [segment.policy_version] * len(segment.tokens)  # of the pass that read the token before
    tokens, found = [*PROMPT, *tokens], []
    for place in range(len(PROMPT), len(tokens)):
        by_version = {version: weights(version, config=config) for version in (0, 1)}
        logits = one.next_logits(by_version, tokens[:place], versions[:place])
        found.append(jax.nn.log_softmax(jax.numpy.asarray(logits, jax.numpy.float32))[tokens[place]])
    return np.array(found)


def joined(segments):
    tokens = [token for segment in segments for token in segment.tokens.tolist()]
    return tokens, np.concatenate([segment.behavior_logprobs for segment in segments])


def ask(sample=0, prompt=PROMPT, new=12, draw=0, **others):
    return request(draw, sample, prompt=prompt, new=new, **others)


def learner_logprobs(tokens, first, params=None, decoder=DECODER):
    """Log-probs of tokens [first, n) of a sequence, by the learner's forward pass in chunks."""
    found = _logprobs(decoder, weights() if params is None else params, *_row(tokens))
    return np.asarray(found)[first - 1 : len(tokens) - 1]


def _row(tokens):
    """(tokens, segments), int32 [1, T], T a multiple of 64."""
    row = np.zeros((2, 1, -(-len(tokens) // 64) * 64), np.int32)
    row[0, 0, : len(tokens)], row[1, 0, : len(tokens)] = tokens, 1
    return row


@functools.partial(jax.jit, static_argnums=0)
def _logprobs(decoder, params, tokens, segments):
    places = jax.numpy.arange(tokens.shape[1])[None]
    row = {'tokens': tokens, 'positions': places, 'segment_ids': segments, 'parent_ids': segments}
    row |= {'sources': places[:, :-1], 'targets': tokens[:, 1:]}
    return forward(decoder, params, row, 1.0, attention='blocked')[0][0]
