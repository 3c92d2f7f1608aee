"""Decoding: one answer in each slot to one prompt, against the bytes that a step must read; and the pause of a swap.

    python -m benchmarks.gpu_parts.decode SLOTS CONTEXT [--tiny] OUT

The programs are the ones that a run uses (rollout/decode/jax_backend.py), with weights and cache in bfloat16.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.learning import weights as trees
from areal_jax.learning.forward import forward
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Params
from areal_jax.publication.files_channel import DeviceChannel
from areal_jax.rollout.backend import DecodeOutput, DecodeRow, PrefillPiece, Span
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.types import GenerationRequest, SamplingParams
from benchmarks.gpu_parts.cells import Cells, run_part, summarize
from benchmarks.gpu_parts.kernels import trace_kernels
from benchmarks.gpu_parts.shapes import DecodeCase, decode_bytes, decode_case, find_peak, key_bytes, mean_positions

SEED = 0
BLOCK_TOKENS = 64
_CHECKED = {
    'slots': 4, 'context_tokens': 48, 'prompt_tokens': 9, 'new_tokens': 32, 'decode_steps': 8, 'prefill_tokens': 16,
}  # fmt: skip


def measure(cells: Cells, slots: str, context_tokens: str, *, tiny: bool) -> None:
    case = decode_case(int(slots), int(context_tokens), tiny)
    params = jax.block_until_ready(trees.cast(Decoder(case.model).init(SEED), 'bfloat16'))
    decoding = Decoding(case, params, 'bfloat16')
    backend = decoding.backend
    sizes = {'slots': case.slots, 'context_tokens': case.context_tokens, 'prompt_tokens': case.prompt_tokens}
    cells.add('case', {**sizes, 'attention': backend.attention, 'passed_over': list(backend.passed_over)})
    began = time.perf_counter()
    decoding.prefill()
    cells.add('prefill_first_s', time.perf_counter() - began)
    began = time.perf_counter()
    decoding.step()
    cells.add('compile_s', time.perf_counter() - began)
    seconds = []
    while decoding.generated < case.new_tokens:
        began = time.perf_counter()
        decoding.step()
        seconds.append(time.perf_counter() - began)
    cells.add('dispatch', {**summarize(seconds), 'steps': case.decode_steps})
    cells.add('decode', _rates(case, seconds, decoding.outputs[1:]))
    cells.attempt('swap', lambda: _measure_swap(decoding, params))
    cells.attempt('kernels', lambda: trace_kernels(decoding.repeat))
    cells.attempt('kernels of a rebuild', lambda: trace_kernels(decoding.rebuild, calls=1))
    cells.add('prefill_attention', sorted(set(backend.placement.row_attention.values())))


def _measure_swap(decoding: Decoding, params: Params) -> dict[str, float]:
    """Seconds of new weights that arrive when all rows are at their longest.

    stage: a copy of the weights, as the learner publishes it on this device, in the form for decoding; engines decode
    on meanwhile. The pause is the rest: swap (the exchange of references, and freeing the old weights), rebuild (keys
    and values of all rows anew), and the first dispatch.
    """
    channel = DeviceChannel(jax.local_devices()[0], verify=False)
    for version in (1, 2):  # the first compiles the copies
        began = time.perf_counter()
        received = channel.receive(channel.transfer(version, jax.tree.map(jnp.copy, params)))
        staged = decoding.backend.prepare(received)
        at_stage = time.perf_counter()
        channel.release(version)
    decoding.params = staged
    at_swap = time.perf_counter()
    tokens = decoding.rebuild()
    at_rebuild = time.perf_counter()
    decoding.step(steps=1)
    return {
        'stage_s': at_stage - began,
        'swap_s': at_swap - at_stage,
        'rebuild_s': at_rebuild - at_swap,
        'rebuilt_tokens': tokens,
        'rebuilt_tokens_per_second': tokens / (at_rebuild - at_swap),
        'first_step_s': time.perf_counter() - at_rebuild,
        'pause_s': time.perf_counter() - at_stage,
    }


class Decoding:
    """Every slot answers the same prompt with noise of its own, until it has all its new tokens."""

    def __init__(self, case: DecodeCase, params: Params, dtype: str):
        self._case = case
        self.backend = JaxDecodeBackend(
            Decoder(case.model),
            slots=case.slots,
            context_tokens=case.context_tokens,
            block_tokens=BLOCK_TOKENS,
            prefill_buckets=(case.prefill_tokens,),
            decode_steps=case.decode_steps,
            filtered=False,
            dtype=dtype,
            batch_buckets=(case.slots,),
        )
        self.params = self.backend.prepare(params)
        self._state = self.backend.initial_state()
        rng = np.random.default_rng(SEED)
        self.prompt = rng.integers(8, case.model.vocab_size, case.prompt_tokens).astype(np.int32)
        sampling = SamplingParams(case.new_tokens + 1, 1.0, 0, 1.0, ())
        self._requests = [GenerationRequest(slot, 0, SEED, self.prompt, sampling) for slot in range(case.slots)]
        per_row = -(-case.context_tokens // BLOCK_TOKENS)
        self._blocks = [range(slot * per_row, (slot + 1) * per_row) for slot in range(case.slots)]
        self._tokens = np.full(case.slots, self.prompt[-1])
        self.outputs: list[DecodeOutput] = []
        self.generated = 0

    def prefill(self) -> None:
        """One prompt, whose blocks are copied to all rows."""
        backend, first = self.backend, self._blocks[0]
        self.compute([self.prompt[:-1]])
        held = -(-(self._case.prompt_tokens - 1) // BLOCK_TOKENS)
        for own in self._blocks[1:]:
            self._state = backend.copy(self._state, [*zip(first[:held], own[:held], strict=True)])
        jax.block_until_ready(self._state)

    def rebuild(self) -> int:
        """Keys and values of all rows anew; returns their number of tokens."""
        answers = np.concatenate([output.tokens for output in self.outputs]).T
        whole = np.concatenate([np.tile(self.prompt, (self._case.slots, 1)), answers], axis=1)[:, :-1]
        self.compute(list(whole))
        return whole.size

    def compute(self, sequences: list[np.ndarray]) -> None:
        """Prefills sequences of one length, a slot each, as many at once as a bucket holds."""
        backend, length = self.backend, len(sequences[0])
        for start in range(0, length, backend.largest_piece):
            span = Span(start, min(length, start + backend.largest_piece))
            at_once = next(n for n in range(len(sequences), 0, -1) if backend.prefill_bucket([span] * n))
            for first in range(0, len(sequences), at_once):
                pieces = [
                    PrefillPiece(sequences[row][slice(*span)], start, self._blocks[row])
                    for row in range(first, min(first + at_once, len(sequences)))
                ]
                self._state = backend.prefill(self.params, self._state, pieces)

    def wait(self) -> None:
        """Until the cache has all that was computed."""
        jax.block_until_ready(self._state)

    def repeat(self) -> None:
        """The last dispatch once more; its tokens are not added to the answers."""
        self.generated -= self._case.decode_steps
        self.step()
        self.outputs.pop()

    def step(self, steps: int | None = None) -> None:
        """One dispatch; its tokens are on the host when it returns."""
        case, limit = self._case, self._case.prompt_tokens + self._case.new_tokens + 1
        steps = steps or case.decode_steps
        position = case.prompt_tokens - 1 + self.generated
        rows = [
            DecodeRow(request, int(token), position, limit, own)
            for request, token, own in zip(self._requests, self._tokens, self._blocks, strict=True)
        ]
        self._state, output = self.backend.generate(self.params, self._state, rows, steps)
        if not output.valid.all():
            raise RuntimeError(f'rows ended after {self.generated} tokens')
        self.outputs.append(output)
        self._tokens = output.tokens[-1]
        self.generated += steps


def _rates(case: DecodeCase, seconds: list[float], outputs: list[DecodeOutput]) -> dict[str, Any]:
    """Of all dispatches but the first; a step reads what it must, and the positions that attention rounds up to."""
    steps = len(seconds) * case.decode_steps
    step_s = sum(seconds) / steps
    read = sum(output.positions_read for output in outputs) / steps / case.slots
    must, does = decode_bytes(case, mean_positions(case)), decode_bytes(case, read)
    peak = find_peak(jax.local_devices()[0].device_kind)
    bound_s = peak and must / peak.bytes_per_second
    return {
        'tokens_per_second': case.slots / step_s,
        'step_ms': 1e3 * step_s,
        'bytes_a_step_must_read': must,
        'bytes_a_step_reads': does,
        'weights_bytes': must - case.slots * mean_positions(case) * key_bytes(case.model),
        'bytes_per_second': does / step_s,
        'bound_step_ms': bound_s and 1e3 * bound_s,
        'share_of_bandwidth_bound': bound_s and bound_s / step_s,
        'share_of_bandwidth_read': peak and does / step_s / peak.bytes_per_second,
    }


def decode_errors(model: ModelConfig, dtype: str, attention: str = 'dense') -> dict[str, Any]:
    """|log-prob recorded while decoding - log-prob of the learner's forward pass| over sampled tokens, in nats."""
    case = DecodeCase(model, **_CHECKED)
    decoder = Decoder(model)
    params = trees.cast(decoder.init(SEED, scale=2.0), dtype)  # far from uniform: a wrong context shows
    decoding = Decoding(case, params, dtype)
    decoding.prefill()
    while decoding.generated < case.new_tokens:
        decoding.step()
    tokens, logprobs = (
        np.concatenate([getattr(output, name) for output in decoding.outputs]).T for name in ('tokens', 'logprobs')
    )  # [slots, new tokens]
    whole = np.concatenate([np.tile(decoding.prompt, (case.slots, 1)), tokens], axis=1)
    rows = {
        'tokens': whole,
        'positions': np.tile(np.arange(whole.shape[1], dtype=np.int32), (case.slots, 1)),
        'segment_ids': np.ones_like(whole),
        'parent_ids': np.ones_like(whole),
        'sources': np.tile(np.arange(case.new_tokens, dtype=np.int32) + case.prompt_tokens - 1, (case.slots, 1)),
        'targets': tokens,
    }
    score = jax.jit(lambda params, rows: forward(decoder, params, rows, 1.0, attention=attention)[0])
    differences = np.abs(np.asarray(score(params, rows)) - logprobs)
    return {
        'mean_difference': float(differences.mean()),
        'largest_difference': float(differences.max()),
        'tokens': int(differences.size),
    }


if __name__ == '__main__':
    run_part(measure)
