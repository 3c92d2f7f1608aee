"""Packed prefill against a plain forward pass of each sequence, and the packing by arithmetic."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import LayerKind, ModelConfig
from areal_jax.rollout.backend import PrefillBucket, PrefillPiece, Span
from areal_jax.rollout.decode import generate, prefill
from areal_jax.rollout.decode.attention.choose import NativeAttention
from areal_jax.rollout.decode.attention.loops import GatherAttention, LoopAttention
from areal_jax.rollout.decode.decode_rows import EngineState
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.decode.prefill import (
    BLOCKED_ROWS,
    MAX_BUCKETS,
    bucket_for,
    choose_row_attention,
    declared_buckets,
    pack_pieces,
    prefill_pieces,
)
from tests.native import needs_kernels
from tests.rollout.decode.examples import DECODER as TWO_LAYERS
from tests.rollout.decode.examples import whole_attention

SIZES, CONTEXT = (64, 128), 400
BLOCKS = 40  # of a cache
ATTENTION = GatherAttention(1)
CONFIG = dataclasses.replace(TWO_LAYERS.config, n_layers=3)  # the keys of the third show the attention of the second
DECODER = Decoder(CONFIG)
WINDOWED = Decoder(dataclasses.replace(CONFIG, kinds=(LayerKind(40),)))
PARTLY_WINDOWED = Decoder(dataclasses.replace(CONFIG, kinds=(LayerKind(), LayerKind(40), LayerKind(40))))
any_block = pytest.mark.parametrize(
    'block_tokens', [*(pytest.param(n, marks=pytest.mark.slow) for n in (16, 64)), 24, 100]
)


def tokens_of(name, length):
    return np.random.default_rng(name).integers(1, 32, length).astype(np.int32)


@functools.cache
def weights():
    return DECODER.init(0, scale=2.0)


@functools.cache
def program(decoder=DECODER, attention=ATTENTION):
    return jax.jit(functools.partial(prefill_pieces, decoder, attention, BLOCKED_ROWS))


@functools.cache
def native_attention():
    return NativeAttention()


class Sequences:
    """A cache, and the blocks of each sequence in it; blocks are taken from the end, so that they are out of order."""

    def __init__(self, block_tokens, fill=0.0, decoder=DECODER, attention=ATTENTION):
        c, self.attention = decoder.config, attention
        empty = lambda: attention.empty(BLOCKS + 1, c.n_kv_heads, block_tokens, c.head_dim, jnp.float32)
        layers = jax.tree.map(lambda x: x + fill, tuple(empty() for _ in range(c.n_layers)))
        self.cache = EngineState(layers, {})
        self.block_tokens, self.decoder, self.free, self.blocks = block_tokens, decoder, list(range(BLOCKS)), {}

    def piece(self, name, start, stop):
        """Positions start to stop of the sequence `name`, which gets the blocks it lacks."""
        blocks = self.blocks.setdefault(name, [])
        while len(blocks) * self.block_tokens < stop:
            blocks.append(self.free.pop())
        return PrefillPiece(tokens_of(name, CONTEXT)[start:stop], start, list(blocks))

    def prefill(self, *spans, bucket=None):
        """One prefill of (name, start, stop)."""
        pieces = [self.piece(*span) for span in spans]
        bucket = bucket or bucket_for([piece.span for piece in pieces], SIZES, self.block_tokens, CONTEXT, 'cpu')
        packed = pack_pieces(pieces, bucket, self.block_tokens, BLOCKS)
        self.cache = program(self.decoder, self.attention)(weights(), self.cache, packed)

    def read(self, name, start, stop):
        """[layers, k or v, stop - start, K, D] of what the cache holds."""
        layers = [self.attention.read(layer, jnp.array(self.blocks[name])) for layer in self.cache.layers]
        return np.array(layers)[:, :, start:stop]


@functools.partial(jax.jit, static_argnums=1)
def forward(tokens, decoder):

    def attend(q, k, v, _, window):
        return whole_attention(q, k, v, None, window)[0], (k, v)

    return decoder.hidden(weights(), tokens, jnp.arange(CONTEXT), attend)[1]


def expected(name, length, decoder=DECODER):
    """The same by a forward pass over the whole sequence."""
    return np.array(forward(tokens_of(name, CONTEXT), decoder))[:, :, :length]


def assert_is_forward(sequences, name, length):
    found = sequences.read(name, 0, length)
    np.testing.assert_allclose(found, expected(name, length, sequences.decoder), atol=1e-4)


# Against a forward pass.


@any_block
def test_packed_pieces_have_the_keys_and_values_of_a_forward_pass_of_each(block_tokens):
    sequences = Sequences(block_tokens)
    sequences.prefill((1, 0, 33), (2, 0, 5), (3, 0, 64))
    for name, length in ((1, 33), (2, 5), (3, 64)):
        assert_is_forward(sequences, name, length)


@any_block
def test_a_long_sequence_in_several_pieces_with_and_without_company(block_tokens):
    sequences = Sequences(block_tokens)
    sequences.prefill((1, 0, 128))
    sequences.prefill((1, 128, 210), (2, 0, 40))
    sequences.prefill((2, 40, 75), (1, 210, 301))
    assert_is_forward(sequences, 1, 301)
    assert_is_forward(sequences, 2, 75)


@any_block
def test_samples_that_share_a_prompt_which_ends_inside_a_block(block_tokens):
    # 37 tokens of prompt: sample 2 shares the whole blocks of sample 1 and has a copy of the one that is not full
    sequences, prompt = Sequences(block_tokens), 37
    sequences.prefill((1, 0, prompt))
    whole = prompt // block_tokens
    sequences.blocks[2] = [*sequences.blocks[1][:whole], sequences.free.pop()]
    at = lambda blocks: jnp.array([blocks[whole]])
    layers = sequences.cache.layers
    copied = tuple(ATTENTION.copy(layer, at(sequences.blocks[1]), at(sequences.blocks[2])) for layer in layers)
    sequences.cache = EngineState(copied, {})
    # both continue as sequence 1 does, so both must be its forward pass
    pieces = [sequences.piece(1, prompt, 80), sequences.piece(2, prompt, 80)]
    pieces[1] = dataclasses.replace(pieces[1], tokens=pieces[0].tokens)
    bucket = bucket_for([piece.span for piece in pieces], SIZES, block_tokens, CONTEXT, 'cpu')
    packed = pack_pieces(pieces, bucket, block_tokens, BLOCKS)
    sequences.cache = program()(weights(), sequences.cache, packed)
    for name in (1, 2):
        np.testing.assert_allclose(sequences.read(name, 0, 80), expected(1, 80), atol=1e-4)


@pytest.mark.parametrize(
    ('decoder', 'block_tokens'), [(WINDOWED, 24), (PARTLY_WINDOWED, 64)], ids=['all layers', 'the second layer']
)
def test_a_sliding_window_reaches_into_the_prior(decoder, block_tokens):
    sequences = Sequences(block_tokens, decoder=decoder)
    sequences.prefill((1, 0, 70), (2, 0, 41))
    sequences.prefill((2, 41, 60), (1, 70, 150))
    assert_is_forward(sequences, 1, 150)
    assert_is_forward(sequences, 2, 60)
    assert np.abs(expected(1, 150, decoder) - expected(1, 150)).max() > 1e-2


@needs_kernels
@pytest.mark.parametrize('decoder', [DECODER, PARTLY_WINDOWED], ids=['whole', 'windows'])
@any_block
def test_the_attention_in_cpp_reads_the_cache_in_place(block_tokens, decoder):
    sequences = Sequences(block_tokens, fill=np.nan, decoder=decoder, attention=native_attention())
    sequences.prefill((1, 0, 70), (2, 0, 5))
    sequences.prefill((2, 5, 75), (1, 70, 101), (3, 0, 1))
    assert_is_forward(sequences, 1, 101)
    assert_is_forward(sequences, 2, 75)
    assert_is_forward(sequences, 3, 1)


# Bit for bit.


@needs_kernels
def test_the_attention_in_cpp_gives_a_token_the_same_bits_in_any_piece():
    whole, cut = (Sequences(24, attention=native_attention()) for _ in range(2))
    bucket = PrefillBucket(128, 432)
    whole.prefill((2, 0, 3), (1, 0, 101), bucket=bucket)
    cut.prefill((1, 0, 38), bucket=bucket)
    cut.prefill((1, 38, 39), (2, 0, 11), bucket=bucket)
    cut.prefill((3, 0, 7), (1, 39, 101), bucket=bucket)
    np.testing.assert_array_equal(cut.read(1, 0, 101), whole.read(1, 0, 101))


@any_block
def test_no_unused_position_of_the_cache_shows(block_tokens):
    clean, poisoned = Sequences(block_tokens), Sequences(block_tokens, fill=np.nan)
    for sequences in (clean, poisoned):
        sequences.prefill((1, 0, 33), (2, 0, 64))
        sequences.prefill((2, 64, 65), (1, 33, 100))
    for name, length in ((1, 100), (2, 65)):
        np.testing.assert_array_equal(poisoned.read(name, 0, length), clean.read(name, 0, length))


def test_a_broken_sequence_stays_alone():
    clean, broken = Sequences(24), Sequences(24)
    for sequences in (clean, broken):
        sequences.prefill((1, 0, 40), (2, 0, 40))
    broken.cache = jax.tree.map(lambda x: x.at[broken.blocks[1][0]].set(np.nan), broken.cache)
    for sequences in (clean, broken):
        sequences.prefill((1, 40, 60), (2, 40, 60), (3, 0, 20))
    for name in (2, 3):
        np.testing.assert_array_equal(broken.read(name, 0, 20), clean.read(name, 0, 20))
    np.testing.assert_array_equal(broken.read(2, 40, 60), clean.read(2, 40, 60))
    assert np.isnan(broken.read(1, 40, 60)[1]).all()


@any_block
def test_a_piece_does_not_depend_on_company_or_place(block_tokens):
    bucket = declared_buckets(SIZES, block_tokens, CONTEXT, 'cpu')[-1]

    def second_part(*before, after=()):
        sequences = Sequences(block_tokens)
        sequences.prefill((1, 0, 45), bucket=bucket)
        for name, _, stop in (*before, *after):
            sequences.prefill((name, 0, stop), bucket=bucket)
        own = [(name, stop, stop + length) for name, length, stop in before]
        others = [(name, stop, stop + length) for name, length, stop in after]
        sequences.prefill(*own, (1, 45, 82), *others, bucket=bucket)
        return sequences.read(1, 45, 82)

    alone = second_part()
    for before, after in (
        [((2, 33, 70),), ()],
        [((2, 1, 1), (3, 60, 100)), ()],
        [(), ((4, 64, 7),)],
        [((5, 17, 90),), ((6, 9, 31), (7, 11, 64))],
    ):
        np.testing.assert_array_equal(second_part(*before, after=after), alone)


def test_first_pieces_do_not_depend_on_company_or_place():
    alone, together = Sequences(24), Sequences(24)
    bucket = PrefillBucket(128, 0)
    alone.prefill((1, 0, 40), bucket=bucket)
    together.prefill((2, 0, 35), (3, 0, 7), (1, 0, 40), (4, 0, 30), bucket=bucket)
    np.testing.assert_array_equal(together.read(1, 0, 40), alone.read(1, 0, 40))


# Programs and their memory.


def test_one_program_for_each_bucket():
    traced = []

    @jax.jit
    def fresh(*args):
        traced.append(args)
        return prefill_pieces(DECODER, ATTENTION, BLOCKED_ROWS, *args)

    sequences = Sequences(24)
    buckets = [PrefillBucket(64, 0), PrefillBucket(128, 144)]
    for bucket in buckets:
        for name, spans in enumerate(([(0, 5)], [(0, 33), (0, 20)], [(0, 60)], [])):
            pieces = [sequences.piece(10 * name + i, *span) for i, span in enumerate(spans)]
            fresh(weights(), sequences.cache, pack_pieces(pieces, bucket, 24, BLOCKS))
    assert len(traced) == len(buckets)


def memory(attention, bucket, context_tokens, slots=8, block_tokens=64):
    """(temporary bytes, bytes of the cache, bytes of it that are written in place) of two layers of width 256."""
    decoder = Decoder(
        ModelConfig(
            vocab_size=512, d_model=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, d_ff=768, rope_theta=1e4
        )
    )
    blocks = slots * context_tokens // block_tokens
    layer = lambda: attention.empty(blocks + 1, 2, block_tokens, 64, jnp.float32)
    cache = EngineState(jax.eval_shape(lambda: (layer(), layer())), {})
    packed = pack_pieces([], bucket, block_tokens, blocks)
    traced = functools.partial(prefill_pieces, decoder, attention, BLOCKED_ROWS)
    compiled = jax.jit(traced, donate_argnums=1).lower(decoder.abstract(), cache, packed).compile()
    used = compiled.memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    return used.temp_size_in_bytes, size, used.alias_size_in_bytes


@pytest.mark.parametrize('attention', [GatherAttention(1), LoopAttention()], ids=['gather', 'loops'])
@pytest.mark.parametrize('context_tokens', [4096, 16384])
def test_memory_is_that_of_one_row_and_the_cache_is_written_in_place(attention, context_tokens):
    *_, bucket = declared_buckets((128, 512), 64, context_tokens, 'cpu')
    assert bucket == (512, context_tokens)
    temporary, cache, in_place = memory(attention, bucket, context_tokens)
    # activations of the 512 tokens, and 4 copies of the row's keys and values, of which 2 heads of 64 are 1,024 bytes
    row = 512 * 4 * 4096 + 4 * (context_tokens + 768) * 1024
    # 8 MB + 70 MB at 16,384, where the scores of 4 heads alone would be 4 * 4 * 768 * 17,152 = 211 MB
    assert temporary < row < 80e6
    assert in_place == cache


# Packing.


def spans(*pairs):
    return [Span(*pair) for pair in pairs]


def test_at_most_six_buckets_hold_every_piece_of_a_sequence():
    for sizes in ((128,), (128, 512), (64, 256, 1024), (16, 32, 64, 128, 256)):
        for context in (24, 192, 2048, 16384):
            for block in (4, 24, 64, 192):
                found = declared_buckets(sizes, block, context, 'cpu')
                assert len(found) <= MAX_BUCKETS
                assert [
                    b.tokens for b in found if b == bucket_for([Span(0, b.tokens)], sizes, block, context, 'cpu')
                ] == [*sizes]
                for length in sizes:
                    last = Span(max(0, context - 1 - length), context - 1)
                    assert bucket_for([last], sizes, block, context, 'cpu') is not None


def test_buckets_of_a_short_and_of_a_long_context():
    # a prior of up to twice the row costs nothing on a CPU, so there is no second program without
    assert declared_buckets((128, 512), 64, 192, 'cpu') == ((128, 192), (512, 512))
    whole, part = 16384, 4096
    assert declared_buckets((128, 512), 64, 16384, 'cpu') == (
        (128, 0), (128, part), (128, whole), (512, 0), (512, part), (512, whole),
    )  # fmt: skip


def test_the_smallest_bucket_that_holds_all_spans():
    choose = lambda *pairs: bucket_for(spans(*pairs), (128, 512), 64, 16384, 'cpu')
    assert choose((0, 128)) == (128, 0)  # exact fit
    assert choose((0, 129)) == (512, 0)
    assert choose((0, 100), (0, 28)) == (128, 0)
    assert choose((64, 65), (0, 127)) == (128, 4096)
    assert choose((4096, 4097), (0, 127)) == (128, 4096)
    assert choose((4097, 4098)) == (128, 16384)
    # 8,193 positions lie in 129 blocks, two of them are 16,512 positions
    assert choose((8193, 8194)) == (128, 16384)
    assert choose((8193, 8194), (8193, 8194)) is None
    assert choose((0, 512)) == (512, 0)
    assert choose((0, 512), (0, 1)) is None
    # 128 tokens have 192 places in tiles of 32: six pieces of a token fill them, seven need the 768 of 512 tokens
    assert choose(*[(0, 1)] * 6) == (128, 0)
    assert choose(*[(0, 1)] * 7) == (512, 0)
    assert choose(*[(0, 1)] * 24) == (512, 0)
    assert choose(*[(0, 1)] * 25) is None


@pytest.mark.parametrize('seed', range(20))
def test_no_place_is_used_twice(seed):
    rng = np.random.default_rng(seed)
    block_tokens = int(rng.choice([5, 16, 64, 100]))
    bucket = PrefillBucket(128, 960)
    pieces, next_block = [], 0
    while True:
        start, length = int(rng.integers(0, 150)) * int(rng.integers(0, 2)), int(rng.integers(1, 60))
        count = -(-(start + length) // block_tokens)
        more = [*pieces, PrefillPiece(tokens_of(seed, length), start, range(next_block, next_block + count))]
        try:
            packed = pack_pieces(more, bucket, block_tokens, 999)
        except ValueError as error:
            message = str(error)
            break
        pieces, next_block, kept = more, next_block + count, packed
    assert message.startswith(f'piece {len(pieces)}: Span(')
    prior = len(kept.segments) - len(kept.sources)
    # runs of 60 positions on 64 places, of 64 on 64, of 100 on 128
    assert prior == {5: 16 * 64, 16: 960, 64: 960, 100: 9 * 128}[block_tokens]
    at = 0
    for piece in pieces:
        own = slice(at, at + len(piece.tokens))
        places = kept.places[own]
        assert places[0] % 32 == 0
        np.testing.assert_array_equal(kept.sources[places], np.arange(at, own.stop))
        np.testing.assert_array_equal(kept.positions[own], np.arange(*piece.span))
        [mine] = set(kept.segments[prior + places])
        seen = np.flatnonzero(kept.segments == mine)
        np.testing.assert_array_equal(kept.row_positions[seen[: piece.start]], np.arange(piece.start))
        # whole tiles are one segment: that of the gap behind the piece too, or its tile would meet others
        tiles = np.arange(places[0], places[0] + -(-len(piece.tokens) // 32) * 32)
        np.testing.assert_array_equal(seen[piece.start :], prior + tiles)
        np.testing.assert_array_equal(kept.tokens[own], piece.tokens)
        at = own.stop
    assert (kept.blocks[at:] == 999).all()


@pytest.mark.parametrize(
    ('pieces', 'message'),
    [
        ([PrefillPiece(np.zeros(0, np.int32), 3, [0])], 'piece 0: 0 tokens from position 3; give 1 or more'),
        ([PrefillPiece(np.ones(2, np.int32), -1, [0])], 'piece 0: 2 tokens from position -1; give 1 or more'),
        ([PrefillPiece(np.ones(30, np.int32), 30, [0, 1])], 'piece 0: 2 blocks of 24 tokens do not hold its 60'),
        (
            [PrefillPiece(np.ones(2, np.int32), 0, [0]), PrefillPiece(np.ones(127, np.int32), 0, range(1, 8))],
            r'piece 1: Span\(start=0, stop=127\) has no room in PrefillBucket\(tokens=128, prior=48\) beside',
        ),
        ([PrefillPiece(np.ones(2, np.int32), 49, [0, 1, 2])], r'piece 0: Span\(start=49, stop=51\) has no room'),
        (
            [PrefillPiece(np.ones(2, np.int32), 0, [4]), PrefillPiece(np.ones(3, np.int32), 23, [5, 4])],
            'piece 1: position 24 is written to place 0 of block 4, and so is another',
        ),
    ],
)
def test_a_wrong_piece_is_named(pieces, message):
    with pytest.raises(ValueError, match=message):
        pack_pieces(pieces, PrefillBucket(128, 48), 24, 99)


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ((), r'prefill_buckets=\(\) must be ascending'),
        ((64, 64), r'prefill_buckets=\(64, 64\) must be ascending'),
        ((1, 2, 3, 4, 5, 6), 'are too many; declare at most 5'),
    ],
)
def test_wrong_sizes_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        declared_buckets(sizes, 64, 128, 'cpu')


# The attention of rows.


def test_the_attention_of_rows_is_chosen_once_for_each_kind_and_before_any_program(monkeypatch):
    # inside of a program, the check of a kernel fails
    asked = []

    def choose(impl, **demand):
        asked.append((demand['window'] is not None, demand['slices']))
        return 'blocked', (('cudnn is missing',) if demand['slices'] else ())

    gpu = types.SimpleNamespace(platform='gpu')
    monkeypatch.setattr(generate, 'choose_row_attention', lambda *asked: choose_row_attention(*asked[:2], gpu))
    monkeypatch.setattr(prefill, 'choose_checked', choose)
    backend = JaxDecodeBackend(
        PARTLY_WINDOWED, slots=2, context_tokens=64, block_tokens=16, prefill_buckets=(32,), decode_steps=1,
        filtered=False, dtype='float32', attention='gather',
    )  # fmt: skip
    assert asked == [(False, False), (False, True), (True, False), (True, True)]
    assert backend.passed_over == ('cudnn is missing',)
    backend.lower_prefill(backend.prepare(PARTLY_WINDOWED.init(0)), backend.declared_prefills[-1])
    assert len(asked) == 4


def test_on_a_cpu_rows_are_blocked():
    assert choose_row_attention(PARTLY_WINDOWED.config, 'float32', jax.devices()[0]) == (BLOCKED_ROWS, ())
    assert set(BLOCKED_ROWS.values()) == {'blocked'}
