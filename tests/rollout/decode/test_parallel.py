"""Engines over two of the eight virtual devices each, against one device."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest

from areal_jax.config.fields import ConfigError
from areal_jax.models.decoder import Decoder
from areal_jax.rollout.decode import generate as parallel
from areal_jax.sharding.placement import move_to
from tests.models import family_examples
from tests.models.family_examples import HYBRIDS
from tests.rollout.decode.delta_examples import assert_near
from tests.rollout.decode.examples import DECODER, Decoding, build, forward_logprobs, request, weights

PAIRS = jax.devices()[2:4], jax.devices()[4:6]  # '2 x tensor=2' behind a learner of two devices
SIZES = {'slots': 5, 'batch_buckets': (5,)}
PROMPT = np.arange(2, 12)  # 9 positions are prefilled: two blocks of 4 and one position


def company():
    return {
        0: request(0, prompt=PROMPT, new=12),
        1: request(1, prompt=[9], new=7, temperature=0.7, top_k=5),
        2: request(2, prompt=np.arange(10, 19), new=15, temperature=1.6, top_p=0.8),
        3: request(3, prompt=[2, 30], new=1),
    }


def over(devices, seed=0):
    """The weights as the engine on these devices receives them."""
    return move_to(weights(seed), parallel.weight_shardings(DECODER, devices))


@pytest.fixture(scope='module')
def engines():
    """One device, then two engines over two devices each; each with a function that gives its weights."""
    pairs = [
        (build(devices=pair, **SIZES, filtered=True), lambda seed=0, pair=pair: over(pair, seed)) for pair in PAIRS
    ]
    return [(build(**SIZES, filtered=True), weights), *pairs]


def use(engine, weights_of):
    """Four requests; their prompt is shared with a fifth, and new weights arrive half-way."""
    decoding = Decoding(engine, weights_of())
    decoding.start(company())
    shared = decoding.sequences[0]
    own = [decoding.free.pop() for _ in shared.blocks[2:]]
    decoding.sequences[4] = dataclasses.replace(
        shared, request=request(0, 1, prompt=PROMPT), tokens=PROMPT.tolist(), blocks=shared.blocks[:2] + own,
        logprobs=[], sampling_logprobs=[],
    )  # fmt: skip
    decoding.state = engine.copy(decoding.state, [(shared.blocks[2], own[0])])
    decoding.decode(3)
    decoding.params = engine.prepare(weights_of(1))
    decoding.rebuild(*(name for name, sequence in decoding.sequences.items() if sequence.live))
    return decoding.finish()


@pytest.mark.slow
def test_two_engines_over_two_devices_decode_what_one_device_does(engines):
    # no near ties under these seeds, so the tokens are the same
    expected, *found = (use(*engine) for engine in engines)
    assert sum(len(sequence.answer) for sequence in expected.sequences.values()) == 12 + 7 + 15 + 1 + 12
    for decoding in found:
        for name, sequence in decoding.sequences.items():
            alone = expected.sequences[name]
            assert sequence.tokens == alone.tokens
            np.testing.assert_allclose(sequence.logprobs, alone.logprobs, atol=2e-5)
            np.testing.assert_allclose(sequence.sampling_logprobs, alone.sampling_logprobs, atol=2e-5)


def test_logprobs_are_those_of_a_forward_pass(engines):
    engine, weights_of = engines[1]
    decoding = Decoding(engine, weights_of())
    decoding.start({0: request(prompt=PROMPT)})
    tokens = decoding.finish().tokens(0)
    np.testing.assert_allclose(decoding.logprobs(0), forward_logprobs(tokens, len(PROMPT)), atol=2e-5)


def test_every_device_holds_its_part(engines):
    # 5 slots of 6 blocks and the one for padding; 2 layers * (k, v) * 31 blocks * 4 positions * 1 of 2 heads of 4
    engine, weights_of = engines[1]
    assert engine.devices == tuple(map(str, PAIRS[0]))
    state = engine.initial_state()
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == 2 * 1984
    assert sum(leaf.addressable_data(0).size for leaf in jax.tree.leaves(state)) == 1984
    for tree in (weights_of(), engine.prepare(weights_of())):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path)
            assert leaf.addressable_data(0).size == leaf.size // (1 if 'norm' in name else 2), name


def moved(program):
    """Elements of what each exchange between devices but a sum gives."""
    found = []
    for line in program.as_text().splitlines():
        exchange = re.search(r' = (.*?) (all-gather|all-to-all|collective-permute)(-start)?\(', line)
        if exchange:
            shapes = re.findall(r'\w+\[([\d,]*)\]', exchange[1])
            found += [math.prod(int(size) for size in shape.split(',') if size) for shape in shapes]
    return found


def programs(engine, params):
    params = engine.prepare(params)
    yield engine.lower_generate(params, 5).compile()
    yield engine.lower_prefill(params, engine.declared_prefills[-1]).compile()
    yield engine.copy_program.lower(engine.initial_state(), *engine.no_copies()).compile()


def test_no_program_moves_the_cache_or_weights_between_devices(engines):
    # without cuts of the softmax devices exchange sums only, that which selects a block of the vocabulary included
    plain = build(devices=PAIRS[0], **SIZES)
    generate, prefill, copy = programs(plain, over(PAIRS[0]))
    assert moved(generate) == moved(prefill) == moved(copy) == []
    with_cuts, _, _ = programs(*(engines[1][0], over(PAIRS[0])))
    a_layer_of_one_device = 31 * 4 * 1 * 4  # elements
    assert max(moved(with_cuts), default=0) < a_layer_of_one_device


def test_the_count_of_exchanges_finds_a_gather():
    mesh = jax.make_mesh((2,), ('tensor',), devices=PAIRS[0])
    cut = jax.ShapeDtypeStruct((6, 8), 'float32', sharding=jax.NamedSharding(mesh, jax.P('tensor')))
    whole = jax.jit(lambda x: x * 2, out_shardings=jax.NamedSharding(mesh, jax.P()))
    assert moved(whole.lower(cut).compile()) == [6 * 8]


@pytest.mark.parametrize('devices', [3, 4])
def test_devices_that_do_not_divide_the_heads_are_refused(devices):
    # 4 divides the 4 query heads, but not the 2 key heads
    message = f'tensor={devices} of cluster.engines does not divide the 4 query heads and 2 key heads of the model'
    with pytest.raises(ConfigError, match=message):
        build(devices=jax.devices()[:devices])
    with pytest.raises(ConfigError, match=message):
        parallel.weight_shardings(DECODER, jax.devices()[:devices])


@pytest.mark.parametrize(
    ('name', 'expert'),
    [
        ('gpt_oss', 2),
        ('glm4_moe', 2),
        ('qwen3_5', 1),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ('gpt_oss', 'gemma3', *HYBRIDS[1:])),
    ],
)
def test_families_decode_over_two_devices_what_one_device_does(name, expert):
    config = family_examples.CONFIGS[name]
    decoder, params = Decoder(config), family_examples.draw(config)
    requests = {0: request(prompt=np.arange(40, 51), new=10), 1: request(3, prompt=[7], new=12)}
    found = []
    for devices in (jax.devices()[:1], PAIRS[0]):
        many = {'devices': devices, 'expert': expert} if len(devices) > 1 else {}
        placed = move_to(params, parallel.weight_shardings(decoder, devices, expert)) if many else params
        decoding = Decoding(build(decoder, **many), placed)
        decoding.start(requests)
        found.append(decoding.finish().results())
    for number in requests:
        (tokens, logprobs), (others, over_two) = (one[number] for one in found)
        assert tokens == others
        if config.delta:
            assert_near(over_two, np.array(logprobs))
        else:
            np.testing.assert_allclose(over_two, logprobs, atol=1e-5)
