"""A decoder of two layers, a backend for it, and its log-probs by a plain forward over the whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.decoder import Decoder
from areal_jax.models.delta_rule import run_rows
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.rollout.backend import DecodeRow, PrefillPiece
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend, share_backend
from areal_jax.types import GenerationRequest, SamplingParams

CONTEXT = 24
DECODER = Decoder(
    ModelConfig(vocab_size=32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=24, rope_theta=1e4)
)
WINDOWED = Decoder(dataclasses.replace(DECODER.config, kinds=(LayerKind(4),)))
PARTLY_WINDOWED = Decoder(dataclasses.replace(DECODER.config, kinds=(LayerKind(), LayerKind(4))))
PROMPT = np.array([3, 1, 4, 1, 5], np.int32)


@functools.cache
def weights(seed=0, dtype='float32'):
    exact = DECODER.init(seed, scale=2.0)  # far from uniform: a wrong context shows
    return jax.tree.map(lambda leaf: leaf.astype(dtype), exact)


def build(decoder=DECODER, **changed):
    sizes = {
        'slots': 4, 'context_tokens': CONTEXT, 'block_tokens': 4, 'prefill_buckets': (8, CONTEXT), 'decode_steps': 5,
        'batch_buckets': (4,), 'filtered': False, 'dtype': 'float32',
    }  # fmt: skip
    sizes |= {name: tuple(value) if name == 'devices' else value for name, value in changed.items()}
    if decoder.layers != 'list':
        return JaxDecodeBackend(decoder, **sizes)
    return share_backend(decoder.config, decoder.lora, **sizes)


backend = functools.cache(build)


def request(
    draw=0, sample=0, *, seed=11, prompt=PROMPT, new=12, temperature=1.0, top_k=0, top_p=1.0, stop=(), **others
):  # fmt: skip
    sampling = SamplingParams(new, temperature, top_k, top_p, tuple(stop), **others)
    return GenerationRequest(draw, sample, seed, np.asarray(prompt, np.int32), sampling)


@dataclasses.dataclass
class Sequence:
    """What one request has so far."""

    request: GenerationRequest
    tokens: list
    blocks: list
    logprobs: list = dataclasses.field(default_factory=list)
    sampling_logprobs: list = dataclasses.field(default_factory=list)
    live: bool = True
    state: int = 0  # the place of its state, in models with delta nets

    @property
    def limit(self):
        return len(self.request.prompt_tokens) + self.request.sampling.max_new_tokens

    @property
    def answer(self):
        return self.tokens[len(self.request.prompt_tokens) :]

    def row(self):
        position = len(self.tokens) - 1
        return DecodeRow(
            self.request, self.tokens[-1], position, self.limit, self.blocks, self.tokens, state=self.state
        )


class Decoding:
    """Sequences of a backend by a name each: what an engine does, without its coroutine."""

    def __init__(self, backend, params=None):
        self.backend, self.params = backend, backend.prepare(weights() if params is None else params)
        self.state = backend.initial_state()
        self.free = list(range(backend.cache_blocks))
        self.places = list(range(backend.states.places)) if backend.states else []
        self.sequences = {}

    def start(self, requests):
        """Prefills the requests, {name: request}, together."""
        for name, wanted in requests.items():
            needed = len(wanted.prompt_tokens) + wanted.sampling.max_new_tokens - 1
            blocks = [self.free.pop() for _ in range(-(-needed // self.backend.block_tokens))]
            state = self.places.pop() if self.places else 0
            self.sequences[name] = Sequence(wanted, [*map(int, wanted.prompt_tokens)], blocks, state=state)
        self.rebuild(*requests)

    def rebuild(self, *names):
        """The keys and values of what the sequences have so far, computed anew under the present weights."""
        pieces = []
        for name in names:
            tokens = np.array(self.sequences[name].tokens[:-1], np.int32)
            if len(tokens):
                sequence = self.sequences[name]
                pieces.append(PrefillPiece(tokens, 0, sequence.blocks, state=sequence.state))
        while pieces:  # as many as fit at once
            count = next(
                n for n in range(len(pieces), 0, -1) if self.backend.prefill_bucket([p.span for p in pieces[:n]])
            )
            self.state = self.backend.prefill(self.params, self.state, pieces[:count])
            pieces = pieces[count:]

    def cancel(self, name):
        sequence = self.sequences.pop(name)
        self.free += sequence.blocks
        self.places += [sequence.state] if self.backend.states else []

    def decode(self, steps, order=None):
        """One dispatch of the live sequences, in the order of their names in `order`; None = as they were started."""
        names = order or [name for name, sequence in self.sequences.items() if sequence.live]
        rows = [self.sequences[name].row() for name in names]
        self.state, output = self.backend.generate(self.params, self.state, rows, steps)
        for place, name in enumerate(names):
            sequence, valid = self.sequences[name], output.valid[:, place]
            sequence.tokens += output.tokens[valid, place].tolist()
            sequence.logprobs += output.logprobs[valid, place].tolist()
            drawn = output.columns.get('sampling_logprobs', output.logprobs)
            sequence.sampling_logprobs += drawn[valid, place].tolist()
            stopped = sequence.tokens[-1] in sequence.request.sampling.stop_tokens
            sequence.live = not stopped and len(sequence.tokens) < sequence.limit
        return output

    def finish(self, steps=5):
        for _ in range(CONTEXT):
            if not any(sequence.live for sequence in self.sequences.values()):
                return self
            self.decode(steps)
        raise AssertionError(f'sequences live on after {CONTEXT} dispatches')

    def answer(self, name):
        return self.sequences[name].answer

    def tokens(self, name):
        return self.sequences[name].tokens

    def logprobs(self, name):
        return self.sequences[name].logprobs

    def results(self):
        """{name: (tokens, log-probs)}."""
        return {name: (sequence.tokens, sequence.logprobs) for name, sequence in self.sequences.items()}


def finished(requests, **changed):
    decoding = Decoding(backend(**changed))
    decoding.start(requests)
    return decoding.finish()


def generate(wanted, **changed):
    """(tokens, log-probs) of one request alone."""
    decoding = finished({0: wanted}, **changed)
    return decoding.answer(0), decoding.logprobs(0)


def whole_attention(q, k, v, _, window):
    """`attend` of a whole sequence."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum('qhd,khd->hqk', q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
    back = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
    seen = (back >= 0) & (back < (window or len(q)))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum('hqk,khd->qhd', weights, v), None


def _recur_whole(length):
    """`recur` of a whole sequence."""
    one = jnp.ones((1, length), jnp.int32)
    return lambda inputs, _: (run_rows(inputs.map_tokens(lambda x: x[None]), one, one)[0], None)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _forward(params, tokens, decoder, attend):
    recur = _recur_whole(len(tokens)) if decoder.config.delta else None
    hidden, _ = decoder.hidden(params, tokens, jnp.arange(len(tokens)), attend, recur=recur)
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
