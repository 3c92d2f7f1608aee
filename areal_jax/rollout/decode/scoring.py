"""The compiled passes that score sequences: packed as for a prefill, through the decoder, to log-probs.

Sequences are concatenated in one row, as in prefill.py, and each reads its own tokens alone: its numbers do not depend
on the others, bit for bit where attention runs in C++, else to rounding. Their keys and values live in a scratch cache
inside the program, one layer at a time. Only tokens that predict a scored one reach the head, whose logits exist for a
part of the vocabulary at a time. A program is declared for each row of SIZES that the context allows, and for one
alternative or MOST_ALTERNATIVES; it is compiled when it is first needed, because a server of a run scores nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.experts import Routing
from areal_jax.models.logprobs import Ranking
from areal_jax.rollout.backend import PrefillBucket, PrefillPiece, Span
from areal_jax.rollout.decode import prefill
from areal_jax.rollout.decode.decode_rows import CacheSizes
from areal_jax.rollout.decode.decode_weights import PreparedWeights
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.decode.prefill import PackedPieces
from areal_jax.rollout.scoring import ScoringRequest
from areal_jax.types import MOST_ALTERNATIVES, TokenScores, Tree

SIZES = (256, 1024)  # tokens of rows, besides the context; several sequences share a row of the largest at most
_BLOCK_TOKENS = 16  # of the scratch cache: a sequence begins at a block
_KINDS = (1, MOST_ALTERNATIVES)


class Program(NamedTuple):
    """A declared shape."""

    tokens: int  # of the row, padding included
    alternatives: int


class ScoredPlaces(NamedTuple):
    """Which tokens of a row predict scored ones, int32 [C]; from `wanted` on it is padding."""

    sources: np.ndarray
    targets: np.ndarray
    temperatures: np.ndarray  # float32 [C]
    wanted: np.ndarray  # int32 []


class JaxScoring:
    """scoring.ScoringBackend on the devices of a decode backend, with the weights that it prepared."""

    def __init__(self, backend: JaxDecodeBackend):
        self._placement, self._dtype = backend.placement, backend.dtype
        context = backend.context_tokens
        self._sizes = tuple(sorted({*(size for size in SIZES if size < context), context}))
        self._shared = min(SIZES[-1], context)  # tokens of sequences that share a row
        self._compiled: dict[Program, jax.stages.Compiled] = {}

    @property
    def programs(self) -> int:
        return len(self._compiled)

    @property
    def declared(self) -> tuple[Program, ...]:
        return tuple(Program(size, kind) for kind in _KINDS for size in self._sizes)

    def program_for(self, lengths: Sequence[int], alternatives: int) -> Program | None:
        if len(lengths) > 1 and sum(lengths) > self._shared:
            return None
        spans = [Span(0, length - 1) for length in lengths]  # nothing is predicted by the last token
        kind = next(kind for kind in _KINDS if alternatives <= kind)
        for size in self._sizes:
            if prefill.holds(spans, PrefillBucket(size, 0), _BLOCK_TOKENS):
                return Program(size, kind)
        return None

    def is_compiled(self, program: Hashable) -> bool:
        return program in self._compiled

    def compile(self, program: Hashable, weights: PreparedWeights) -> None:
        assert isinstance(program, Program)
        where = self._placement
        run = jax.jit(
            functools.partial(self._run, program), in_shardings=(where.prepared, where.rows, where.rows),
            out_shardings=where.rows,
        )  # fmt: skip
        self._compiled[program] = run.lower(weights, *self._pack(program, [])).compile()

    def score(
        self, program: Hashable, weights: PreparedWeights, requests: Sequence[ScoringRequest]
    ) -> list[TokenScores]:
        assert isinstance(program, Program)
        if program not in self._compiled:
            self.compile(program, weights)
        ranking = jax.device_get(self._compiled[program](weights, *self._pack(program, requests)))
        found, end = [], 0
        for request in requests:
            start, end = end, end + len(request.tokens) - request.first
            own = slice(start, end)
            ids, largest = (side[own, : request.alternatives] for side in (ranking.ids, ranking.largest))
            found.append(TokenScores(ranking.logprobs[own], ids, largest))
        return found

    def _scratch(self, program: Program) -> CacheSizes:
        """A sequence takes whole blocks, so that each may leave one that is not full."""
        blocks = -(-program.tokens // _BLOCK_TOKENS) + prefill.MAX_PIECES
        return CacheSizes(program.tokens, _BLOCK_TOKENS, blocks)

    def _pack(
        self, program: Program, requests: Sequence[ScoringRequest]
    ) -> tuple[PackedPieces[np.ndarray], ScoredPlaces]:
        pieces, block = [], 0
        sources, targets = (np.zeros(program.tokens, np.int32) for _ in range(2))
        temperatures = np.ones(program.tokens, np.float32)
        token = place = 0
        for request in requests:
            length = len(request.tokens) - 1
            blocks = -(-length // _BLOCK_TOKENS)
            pieces.append(PrefillPiece(request.tokens[:-1], 0, range(block, block + blocks)))
            scored = slice(place, place + len(request.tokens) - request.first)
            sources[scored] = np.arange(token + request.first - 1, token + length)
            targets[scored] = request.tokens[request.first :]
            temperatures[scored] = request.temperatures
            token, place, block = token + length, scored.stop, block + blocks
        bucket = PrefillBucket(program.tokens, 0)
        packed = prefill.pack_pieces(pieces, bucket, _BLOCK_TOKENS, self._scratch(program).padding_block)
        return packed, ScoredPlaces(sources, targets, temperatures, np.array(place, np.int32))

    def _run(
        self, program: Program, weights: PreparedWeights, packed: PackedPieces[jax.Array], scored: ScoredPlaces
    ) -> Ranking:
        where, params = self._placement, weights.params
        decoder, given = where.decoder, PackedPieces(*map(jnp.asarray, packed))
        attend_layer = where.over_heads(prefill.attend_pieces(where.attention, where.row_attention, given))
        scratch: Tree = where.empty_cache(self._scratch(program), self._dtype)[0]  # each layer writes over the last

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, entry: Tree, window: int | None) -> tuple[jax.Array, Tree]:
            nonlocal scratch
            out, scratch = attend_layer(q, k, v, scratch, window)
            return out, entry

        hidden, _ = decoder.hidden(
            params, given.tokens, given.positions, attend, wanted=given.wanted, routing=Routing(where.mix)
        )
        sources, targets, temperatures, wanted = map(jnp.asarray, scored)
        predicting = jnp.take(hidden, sources, axis=decoder.token_axis, mode='clip')
        return decoder.rank(params, predicting, targets, temperatures, program.alternatives, wanted)
