"""Models with and without a window in their layers, on an engine whose window layers have a pool of their own.

Contexts are ten windows long, blocks shorter than a window, and the pool so small that parts are given away all along.
"""

import collections

import numpy as np
import pytest

from areal_jax.models.decoder import Decoder
from areal_jax.models.families import LayerKind
from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend
from areal_jax.rollout.window_blocks import size_windows
from tests.models import family_examples
from tests.models.family_examples import FULL, NEAR, WINDOW, tiny
from tests.rollout.decode.test_random_schedules import CONTEXT, FLOAT32_ERROR, STEPS, Schedule, checked_run

SIZES = {'block_tokens': 2, 'cache_tokens': 112}
NEEDED = size_windows(WINDOW, slots=4, cache_blocks=10**6, block_tokens=2, steps=STEPS, piece_tokens=16).blocks - 2 * 4
MODELS = {
    'gemma3': family_examples.CONFIGS['gemma3'],
    'gpt_oss': family_examples.CONFIGS['gpt_oss'],
    'olmo3': family_examples.CONFIGS['olmo3'],
    'one kernel a step': tiny('qwen3', kinds=(FULL, NEAR, NEAR)),
    'windows alone': tiny('qwen3', kinds=(NEAR,)),
}
CASES = [
    pytest.param('gemma3', 'loops', 'recompute', id='gemma3 loops', marks=pytest.mark.slow),
    pytest.param('gpt_oss', 'gather', 'keep', id='gpt_oss gather', marks=pytest.mark.slow),
    pytest.param('olmo3', 'auto', 'recompute', id='olmo3', marks=pytest.mark.slow),
    pytest.param('one kernel a step', 'auto', 'keep', id='a kernel a step, keep', marks=pytest.mark.slow),
    pytest.param('one kernel a step', 'auto', 'recompute', id='a kernel a step'),
    pytest.param('windows alone', 'auto', 'recompute', id='windows alone', marks=pytest.mark.slow),
]


@pytest.mark.parametrize(('name', 'attention', 'kv_policy'), CASES)
def test_random_schedules_give_what_the_model_gives_token_by_token(name, attention, kv_policy):
    config, occurred = MODELS[name], collections.Counter()
    pool = {'window_blocks': NEEDED, 'attention': attention}
    for seed in (1, 2):
        reference = family_examples.TokenByToken(config, CONTEXT)
        schedule, flips, checked = checked_run(
            seed, SIZES['block_tokens'], SIZES['cache_tokens'], kv_policy,
            decoder=Decoder(config), pool=pool, next_logits=reference.next_logits, error=FLOAT32_ERROR,
        )  # fmt: skip
        assert flips == 0
        assert checked > 100
        occurred += schedule.occurred
    assert {
        *('prefix hit', 'preempted answer goes on', 'block copied', 'resumed engine', 'swap', 'part is gone'),
        *('kept sequence gone on with', 'prefill behind cached positions', 'block shared'),
    } <= set(occurred)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['one kernel a step', 'gemma3'])
def test_a_pool_of_their_own_changes_no_bit(name):
    of_all = SIZES['cache_tokens'] // SIZES['block_tokens']
    decoder = Decoder(MODELS[name])
    run = lambda **pool: Schedule(3, **SIZES, kv_policy='recompute', decoder=decoder, **pool).run(25)
    one, two = run(window_blocks=0), run(window_blocks=of_all)
    assert one.backend.windows is None
    assert two.backend.windows is not None
    assert len(one.results) == len(two.results) > 5
    for (_, before, reason), (_, after, other) in zip(one.results, two.results, strict=True):
        assert reason == other
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.behavior_logprobs, b.behavior_logprobs)


def test_a_layer_with_a_window_of_1024_has_a_ninth_of_the_bytes_at_16k():
    config = tiny('gemma3_text', n_kv_heads=1, n_heads=1, head_dim=2, kinds=(LayerKind(1024), FULL, LayerKind(1024)))
    engine = JaxDecodeBackend(
        Decoder(config), slots=8, context_tokens=2**14, block_tokens=64, prefill_buckets=(64, 256), decode_steps=8,
        filtered=False, dtype='float32',
    )  # fmt: skip
    near, far, _ = (sum(side.nbytes for side in layer) for layer in engine.initial_state().layers)
    # 8 rows of 20 blocks, 4 for a piece of prefill, 4 windows of 17 for what is kept, padding and the part of zeros;
    # 8 sequences of 256 blocks and padding; a position of a layer has 16 bytes
    assert (near, far) == ((8 * 20 + 4 + 4 * 17 + 2) * 64 * 16, (8 * 256 + 1) * 64 * 16)
    assert near / far < 0.115
    assert engine.state_bytes == 2 * near + far
