import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.logprobs import sum_blocks
from areal_jax.rollout.decode import sampling

draw_tokens = jax.jit(lambda z, *given: sampling.draw_tokens(z, *given, sum_blocks(z)))
cut_support = jax.jit(sampling.cut_support)
request_keys = jax.jit(sampling.request_keys)
sample_tokens = jax.jit(sampling.sample_tokens)
PROBABILITIES = np.array([0.1, 0.4, 0.2, 0.3], np.float32)


def keys(n, seed=0):
    words = np.zeros((n, 2), np.uint32)
    words[:, 1] = seed
    return request_keys(words, np.zeros(n, np.uint32), np.arange(n, dtype=np.uint32))


def draw(z, greedy=False, index=0, seed=0):
    n = z.shape[0]
    return np.asarray(draw_tokens(z, keys(n, seed), np.full(n, index, np.int32), np.full(n, 0.0 if greedy else 1.0)))


def kept(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logits=None):
    """Indices that are left, most probable first."""
    logits = np.log(PROBABILITIES) if logits is None else logits
    one = lambda value: np.array([value], np.float32)
    cut = cut_support(logits[None], one(temperature), np.array([top_k]), one(top_p), one(min_p))[0]
    survivors = np.flatnonzero(np.isfinite(cut))
    np.testing.assert_array_equal(cut[survivors], logits[survivors])
    return sorted(survivors.tolist(), key=lambda i: -logits[i])


@pytest.mark.parametrize('vocab', [4, 256, 600])
def test_frequencies_are_the_softmax(vocab):
    # n = 20 000 independent rows: a frequency strays from p by sqrt(p (1 - p) / n); six times that is out of reach.
    # 600 entries are three blocks, the last one padded.
    n = 20_000
    z = np.random.default_rng(vocab).normal(0, 2, vocab).astype(np.float32)
    p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    counts = np.bincount(draw(jnp.tile(z, (n, 1))), minlength=vocab)
    assert len(counts) == vocab
    assert np.all(np.abs(counts / n - p) < 6 * np.sqrt(p * (1 - p) / n) + 2 / n)


def test_both_levels_have_noise_of_their_own():
    # 512 equal logits, two blocks: block and place in it are independent, so of n = 4000 rows about 4000/512 = 8 fall
    # on each entry; with noise shared by the levels the places would depend on the block
    n = 4000
    tokens = draw(jnp.zeros((n, 512)))
    first, second = tokens[tokens < 256], tokens[tokens >= 256] - 256
    assert abs(len(first) / n - 0.5) < 6 * 0.5 / np.sqrt(n)
    for places in (first, second):  # means of uniform 0..255: 127.5, deviation 73.9 / sqrt(2000) = 1.65
        assert abs(places.mean() - 127.5) < 6 * 1.65


def test_a_token_without_probability_is_never_drawn():
    z = np.full((500, 700), -np.inf, np.float32)  # the first and last block have none at all
    z[:, [300, 310]] = 0.0
    assert set(draw(jnp.asarray(z)).tolist()) == {300, 310}


@pytest.mark.parametrize('best', [0, 255, 256, 699])
def test_greedy_is_the_first_argmax_without_noise(best):
    z = np.zeros((1, 700), np.float32)
    z[0, [best, 699]] = 1.0  # a tie goes to the first
    assert draw(jnp.asarray(z), greedy=True).tolist() == [best]


def test_a_small_error_in_the_logits_does_not_move_a_flat_distribution():
    # 50 000 equal logits, p = 2e-5 each, the first half raised by 1e-4: the cumulative sum moves by up to
    # 1e-4 / 4 = 2.5e-5, more than one entry, so inverting it would change most draws. Here a draw changes if the two
    # best noisy logits are within 1e-4: about one in 10 000.
    z = np.zeros((200, 50_000), np.float32)
    moved = z.copy()
    moved[:, :25_000] += 1e-4
    assert np.mean(draw(z) == draw(moved)) >= 0.99


def test_noise_changes_with_the_index_of_the_token_and_the_seed():
    z = jnp.zeros((8, 500))
    base = draw(z)
    assert (draw(z, index=1) != base).all()
    assert (draw(z, seed=1) != base).all()
    assert (draw(z) == base).all()


def test_keys_are_folded_from_seed_draw_and_sample():
    seed, draw_number, sample = 7 + (3 << 32), 5, 2
    words = np.array([[seed >> 32, seed & 0xFFFFFFFF]], np.uint32)
    [key] = sampling.request_keys(words, np.array([draw_number], np.uint32), np.array([sample], np.uint32))
    root = jax.random.wrap_key_data(jnp.array([3, 7], jnp.uint32), impl='threefry2x32')
    expected = jax.random.fold_in(jax.random.fold_in(root, draw_number), sample)
    np.testing.assert_array_equal(key, jax.random.key_data(expected))


def test_tokens_and_logprobs_are_those_of_the_tempered_logits():
    # temperature 2: weights sqrt(.1), sqrt(.4), sqrt(.2), sqrt(.3) = .3162 .6325 .4472 .5477, sum 1.9436
    n = 20_000
    logits = jnp.tile(jnp.log(PROBABILITIES), (n, 1))
    tokens, logprobs, _ = sample_tokens(logits, keys(n), np.zeros(n, np.int32), np.full(n, 2.0, np.float32))
    tokens = np.asarray(tokens)
    p = np.array([0.3162, 0.6325, 0.4472, 0.5477]) / 1.9436
    np.testing.assert_allclose(logprobs, np.log(p)[tokens], atol=2e-4)
    # p of token 0 is .163 and not .1: sqrt(.163 * .837 / 20 000) = .0026
    np.testing.assert_allclose(np.bincount(tokens) / n, p, atol=6 * 0.0035)


@pytest.mark.parametrize(
    ('filters', 'expected'),
    [
        ({}, [1, 3, 2, 0]),
        ({'top_k': 1}, [1]),
        ({'top_k': 2}, [1, 3]),
        ({'top_k': 9}, [1, 3, 2, 0]),
        ({'top_p': 1e-6}, [1]),
        ({'top_p': 0.35}, [1]),  # .4 reaches it
        ({'top_p': 0.6}, [1, 3]),  # .4 < .6 <= .7
        ({'top_p': 0.75}, [1, 3, 2]),  # .7 < .75 <= .9
        ({'top_p': 0.95}, [1, 3, 2, 0]),
        ({'top_p': 0.42}, [1, 3]),  # .4 < .42
        ({'top_p': 0.42, 'top_k': 3}, [1]),  # of what top-k leaves: .4 / .9 = .444 >= .42
        ({'top_p': 0.35, 'temperature': 2.0}, [1, 3]),  # .6325 / 1.9436 = .325 < .35
        ({'top_p': 0.35, 'top_k': 1, 'min_p': 1.0, 'temperature': 0.0}, [1, 3, 2, 0]),  # greedy needs no cut
        ({'min_p': 0.2}, [1, 3, 2, 0]),  # of .4: .08 < .1
        ({'min_p': 0.3}, [1, 3, 2]),  # .1 < .12 <= .2
        ({'min_p': 0.6}, [1, 3]),  # .2 < .24 <= .3
        ({'min_p': 1.0}, [1]),
        ({'min_p': 0.6, 'temperature': 2.0}, [1, 3, 2]),  # weights .3162 .6325 .4472 .5477: .3162 < .3795 <= .4472
        ({'min_p': 0.6, 'top_k': 1}, [1]),
        ({'min_p': 0.6, 'top_p': 0.55}, [1]),  # of what min-p leaves: .4 / .7 = .571 >= .55
    ],
)
def test_support_by_hand(filters, expected):
    assert kept(**filters) == expected


def test_a_cut_support_has_renormalised_logprobs_beside_those_of_the_full_softmax():
    # top-2 of .4 .3 .2 .1: log(.4 / .7) and log(.3 / .7) beside log .4 and log .3
    logits = jnp.tile(jnp.log(PROBABILITIES), (64, 1))
    cut = cut_support(logits, jnp.ones(64), jnp.full(64, 2), jnp.ones(64), jnp.zeros(64))
    tokens, full, renormalised = sample_tokens(logits, keys(64), jnp.zeros(64, jnp.int32), jnp.ones(64), cut)
    tokens = np.asarray(tokens)
    assert set(tokens.tolist()) == {1, 3}
    np.testing.assert_allclose(full, np.log(np.where(tokens == 1, 0.4, 0.3)), atol=1e-5)
    np.testing.assert_allclose(renormalised, np.log(np.where(tokens == 1, 4 / 7, 3 / 7)), atol=1e-5)


def test_without_a_cut_there_is_one_kind_of_logprobs():
    assert sample_tokens(jnp.zeros((2, 4)), keys(2), jnp.zeros(2, jnp.int32), jnp.ones(2))[2] is None


def test_tied_tokens_at_the_threshold_are_all_kept():
    assert sorted(kept(top_k=2, logits=np.array([1.0, 3.0, 1.0, -2.0], np.float32))) == [0, 1, 2]


def test_the_threshold_tells_neighbouring_floats_apart_whatever_the_range():
    above = np.nextafter(np.float32(1), np.float32(2))
    assert kept(top_k=1, logits=np.array([1.0, above, -1e30, -above], np.float32)) == [1]
    assert kept(top_k=3, logits=np.array([-1.0, -above, 1e30, 1e-30], np.float32)) == [2, 3, 0]


@pytest.mark.parametrize('seed', range(4))
def test_support_is_that_of_a_sort(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, 300).astype(np.float32) * np.float32(10.0 ** rng.integers(-2, 2))
    top_k, top_p = int(rng.integers(1, 300)), float(rng.uniform(0.05, 0.99))
    order = np.argsort(-logits)
    mass = np.exp((logits[order] - logits.max()).astype(np.float64))[:top_k]
    cumulative = np.cumsum(mass) / mass.sum()
    assert kept(top_k=top_k, logits=logits) == order[:top_k].tolist()
    assert kept(top_k=top_k, top_p=top_p, logits=logits) == order[: np.searchsorted(cumulative, top_p) + 1].tolist()
