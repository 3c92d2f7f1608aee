"""A decoder of two layers, a backend for it, and its log-probs by a plain forward over the whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.rollout.backend import SlotInit
from areal_jax.rollout.decode.backend import JaxDecodeBackend
from areal_jax.types import GenerationRequest, SamplingParams

CONTEXT = 24
DECODER = Decoder(
    ModelConfig(vocab_size=32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, rope_theta=1e4)
)
WINDOWED = Decoder(dataclasses.replace(DECODER.config, sliding_window=4))
PARTLY_WINDOWED = Decoder(dataclasses.replace(DECODER.config, sliding_window=4, first_window_layer=1))
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


@functools.cache
def weights(seed=0, dtype='float32'):
    exact = DECODER.init(seed, scale=2.0)  # far from uniform: a wrong context shows
    return jax.tree.map(lambda leaf: leaf.astype(dtype), exact)


@functools.cache
def backend(filtered=False, slots=4, decoder=DECODER, dtype='float32'):
    return JaxDecodeBackend(
        decoder,
        slots=slots,
        context_tokens=CONTEXT,
        prefill_buckets=(8, CONTEXT),
        decode_steps=5,
        decode_widths=(12, CONTEXT),
        filtered=filtered,
        dtype=dtype,
    )


def request(draw=0, sample=0, *, seed=11, prompt=PROMPT, new=12, temperature=1.0, top_k=0, top_p=1.0, stop=()):
    sampling = SamplingParams(new, temperature, top_k, top_p, tuple(stop))
    return GenerationRequest(draw, sample, seed, np.asarray(prompt, np.int32), sampling)


class Decoding:
    """Slots of a backend and what each has generated: what an engine does, without its coroutine."""

    def __init__(self, backend, params=None):
        self.backend, self.weights = backend, weights() if params is None else params
        self.state = backend.initial_state()
        self.requests, self.tokens, self.logprobs, self.sampling_logprobs = {}, {}, {}, {}

    def start(self, requests):
        """Prefill each distinct prompt once and put the requests, {slot: request}, into their slots."""
        for slot, wanted in requests.items():
            self.requests[slot], self.tokens[slot] = wanted, [*wanted.prompt_tokens]
            self.logprobs[slot], self.sampling_logprobs[slot] = [], []
        self._build(requests)

    def rebuild(self, *slots):
        """The KV of what the slots have so far, computed anew under the present weights."""
        self.state = self.backend.release(self.state, slots)
        self._build(slots)

    def _build(self, slots):
        by_tokens = {}
        for slot in slots:
            tokens = np.array(self.tokens[slot], np.int32)
            limit = len(self.requests[slot].prompt_tokens) + self.requests[slot].sampling.max_new_tokens
            by_tokens.setdefault(tokens[:-1].tobytes(), []).append(SlotInit(slot, self.requests[slot], tokens, limit))
        members = list(by_tokens.values())
        prefixes = self.backend.prefill(self.weights, [inits[0].tokens[:-1] for inits in members])
        for prefix, inits in zip(prefixes, members, strict=True):
            self.state = self.backend.insert(prefix, self.state, inits)

    def decode(self, steps, width=CONTEXT):
        self.state, output = self.backend.generate(self.weights, self.state, steps, width)
        for slot in self.tokens:
            valid = output.valid[:, slot]
            self.tokens[slot] += output.tokens[valid, slot].tolist()
            self.logprobs[slot] += output.logprobs[valid, slot].tolist()
            if output.sampling_logprobs is not None:
                self.sampling_logprobs[slot] += output.sampling_logprobs[valid, slot].tolist()
        return output

    def finish(self):
        for _ in range(CONTEXT):
            if not self.decode(5).valid.any():
                return self
        raise AssertionError(f'slots live on after {CONTEXT} dispatches')

    def answer(self, slot):
        return self.tokens[slot][len(self.requests[slot].prompt_tokens) :]


def generate(wanted, slot=0, **kwargs):
    """(tokens, log-probs) of one request alone."""
    decoding = Decoding(backend(**kwargs))
    decoding.start({slot: wanted})
    decoding.finish()
    return decoding.answer(slot), decoding.logprobs[slot]


def whole_attention(q, k, v, _, window):
    """`attend` of a whole sequence."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum('qhd,khd->hqk', q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    back = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
    seen = (back >= 0) & (back < (window or len(q)))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum('hqk,khd->qhd', weights, v), None


@functools.partial(jax.jit, static_argnums=(2, 3))
def _forward(params, tokens, decoder, attend):
    hidden, _ = decoder.hidden(params, tokens, jnp.arange(len(tokens)), attend)
    return decoder.logits(params, hidden)


def next_token_logits(tokens, params=None, decoder=DECODER, attend=whole_attention):
    """float32 [T, V] of T tokens: row t scores token t + 1."""
    padded = np.zeros(CONTEXT, np.int32)
    padded[: len(tokens)] = tokens
    params = weights() if params is None else params
    return np.asarray(_forward(params, padded, decoder, attend))[: len(tokens)]


def forward_logprobs(tokens, prompt_length, params=None, temperature=1.0, **kwargs):
    """log softmax(logits / temperature) of every token behind the prompt."""
    z = next_token_logits(tokens, params, **kwargs).astype(np.float64) / temperature
    z -= np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) + z.max(-1, keepdims=True)
    return np.array([z[t - 1, tokens[t]] for t in range(prompt_length, len(tokens))])
