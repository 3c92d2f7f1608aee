"""Sizes from shapes alone are those of the arrays that a run then makes, and what cannot fit is refused at once."""

from __future__ import annotations

import itertools
import math
import re

import jax
import pytest

from areal_jax.app.model.model import build_model
from areal_jax.app.model.text_model import read_shape
from areal_jax.app.parts import part_settings as build
from areal_jax.app.parts import sizes
from areal_jax.app.parts.engines import build_backend, build_evaluation_backends
from areal_jax.app.parts.learner_builder import build_learner
from areal_jax.config import TrackedConfig
from areal_jax.config.cluster import parse_engines
from areal_jax.config.fields import ConfigError
from areal_jax.formats.hf_export import plan_hf_files
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.layer_parts import Experts, LatentAttention, SigmoidRouter
from areal_jax.publication.export import write_hf_directory
from areal_jax.rollout.decode.generate import weight_shardings
from tests.app.small import small_config


def nbytes(tree):
    """On the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree) if leaf is not None)


def measured(**fields):
    config = TrackedConfig(small_config(**fields))
    return config, sizes.measure(config, read_shape(config), build.build_allocation(config))


FORMS = [
    {},
    {'learner__layers': 'stacked', 'optimizer__name': 'lion'},
    {'optimizer__name': 'adamw8bit', 'learner__dtype': 'bfloat16', 'publication__dtype': 'bfloat16'},
    {'lora__rank': 4, 'model__family': 'qwen2', 'loss__kl_coefficient': 0.1},
    {'optimizer__name': 'adafactor', 'model__d_ff': 256, 'model__d_model': 128, 'model__family': 'qwen3'},
    {'cluster__learner': 'fsdp=2,tensor=2', 'cluster__strategy': 'fsdp_tensor', 'learner__rows_per_microbatch': 2,
     'task__symbols': 6, 'model__n_kv_heads': 2},
    {'model__family': 'qwen3_moe', 'model__experts': 4, 'optimizer__name': 'adamw8bit'},
    {'model__family': 'qwen3_moe', 'model__experts': 4, 'optimizer__name': 'adamw8bit',
     'cluster__learner': 'fsdp=2,expert=2', 'learner__rows_per_microbatch': 4},
    {'model__family': 'gpt_oss', 'model__experts': 4, 'rollout__block_tokens': 1, 'rollout__prefill_buckets': (16,)},
    {'model__family': 'deepseek_v3', 'model__experts': 4},
    {'model__family': 'glm4_moe_lite', 'model__experts': 4, 'rollout__mla': 'expanded', 'learner__layers': 'stacked',
     'publication__dtype': 'bfloat16'},
]  # fmt: skip


@pytest.mark.parametrize('fields', FORMS, ids=lambda fields: ' '.join(fields) or 'default')
def test_sizes_are_those_of_the_arrays(fields):
    if len(jax.devices()) < 4 and 'cluster__learner' in fields:
        pytest.skip('needs four devices')
    config, found = measured(model__n_layers=3, **fields)
    model = build_model(config)
    learner = build_learner(config, model, build.build_mesh(config))
    assert found.learner['weights'] == nbytes(learner.state.params) + nbytes(learner.state.frozen)
    assert found.learner['gradients'] == nbytes(learner.programs.run('zeros', learner.state.params))
    assert found.learner['publication'] == nbytes(learner.publish(0))
    assert found.learner['optimizer'] == pytest.approx(nbytes(learner.state.optimizer), rel=0.01)
    if learner.state.reference is not None:
        assert found.learner['reference model'] == nbytes(learner.state.reference)
    if config.learner.dtype != 'float32':
        working = jax.tree.map(lambda leaf: leaf.astype(config.learner.dtype), learner.state.params)
        assert found.learner['working copy'] == nbytes(working)
    backend = build_backend(config, model.decoder, jax.devices()[:1])
    assert (backend.windows is not None) == (config.model.family == 'gpt_oss')
    assert found.engines['KV cache'] == nbytes(backend.initial_state()) * parse_engines(config.cluster.engines).count


def test_an_engine_that_cuts_its_experts_holds_a_part_of_them_and_the_whole_cache():
    experts = {'model__family': 'qwen3_moe', 'model__experts': 4, 'publication__channel': 'device'}
    (_, one), (config, two) = (measured(**experts, cluster__engines=f'1 x {axis}') for axis in ('tensor=1', 'expert=2'))
    assert two.engines['KV cache'] == one.engines['KV cache']
    decoder = Decoder(read_shape(config))
    cut = weight_shardings(decoder, jax.devices()[1:3], expert=2)
    held = jax.tree.map(lambda leaf, at: math.prod(at.shard_shape(leaf.shape)), decoder.abstract(), cut)
    saved = sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract())) - sum(jax.tree.leaves(held))
    assert saved > 0
    assert one.engines['publication'] - two.engines['publication'] == 2 * 4 * saved  # two versions of float32


@pytest.mark.parametrize('fields', [{}, {'publication__dtype': 'bfloat16', 'rollout__state_snapshots': 7}])
@pytest.mark.parametrize('tensor', [1, 2])
def test_the_cache_of_an_engine_of_a_hybrid_is_that_of_its_states_and_blocks(tensor, fields):
    heads = {'model__n_layers': 4, 'model__n_heads': 4, 'model__n_kv_heads': 2}
    config = TrackedConfig(
        small_config(model__family='qwen3_5_text', cluster__engines=f'1 x tensor={tensor}', **heads, **fields)
    )
    shape, devices = read_shape(config), tuple(jax.devices()[:tensor])
    assert shape.n_delta_layers == 3
    backend = build_backend(config, Decoder(shape), devices)
    told = sizes.cache_bytes(config, shape, devices)
    assert told == pytest.approx(nbytes(backend.initial_state()), rel=0.02)
    assert told == pytest.approx(backend.state_bytes / tensor, rel=0.02)


@pytest.mark.parametrize('mla', ['absorbed', 'expanded'])
@pytest.mark.parametrize('tensor', [1, 2])
def test_the_cache_of_an_engine_with_latent_attention_is_told_as_it_is_taken(tensor, mla):
    fields = {'model__n_heads': 4, 'model__experts': 4, 'rollout__mla': mla, 'publication__dtype': 'bfloat16'}
    config = TrackedConfig(small_config(model__family='deepseek_v3', cluster__engines=f'1 x tensor={tensor}', **fields))
    shape, devices = read_shape(config), tuple(jax.devices()[:tensor])
    backend = build_backend(config, Decoder(shape), devices)
    told = sizes.cache_bytes(config, shape, devices)
    assert told == nbytes(backend.initial_state())  # on each device
    assert backend.state_bytes == told * (1 if mla == 'absorbed' else tensor)  # every device has all latents


def test_a_token_of_deepseek_v3_takes_a_85th_in_latents():
    latent, layers = LatentAttention(512, 128, 64, 128, 1536), 61
    shape = ModelConfig(
        vocab_size=129280, d_model=7168, n_layers=layers, n_heads=128, n_kv_heads=128, head_dim=192, d_ff=18432,
        rope_theta=1e4, rotary_dim=64, latent=latent, score_scale=latent.scale, tie_embeddings=False,
        family='deepseek_v3', experts=Experts(256, 8, 2048, dense_layers=(0, 1, 2), d_shared=2048,
        sigmoid=SigmoidRouter(8, 4, 2.5)),
    )  # fmt: skip
    told = {}
    for mla, tensor in itertools.product(('absorbed', 'expanded'), (1, 2)):
        config = TrackedConfig(
            small_config(rollout__mla=mla, publication__dtype='bfloat16', cluster__engines=f'1 x tensor={tensor}')
        )
        positions = (config.rollout.count_cache_blocks(config.rollout.slots) + 1) * config.rollout.block_tokens
        told[mla, tensor] = sizes.cache_bytes(config, shape, tuple(jax.devices()[:tensor])) / positions
    assert told['absorbed', 1] == told['absorbed', 2] == 2 * layers * (512 + 64)  # every device has all latents
    # of each head a key of 192 numbers, and a value of 128 that is filled to as many
    assert told['expanded', 1] == 2 * told['expanded', 2] == 2 * layers * 128 * (192 + 192)
    assert told['expanded', 1] / told['absorbed', 1] == pytest.approx(85.3, abs=0.1)
    unfilled = 128 * (192 + 128)
    assert unfilled / (512 + 64) == pytest.approx(71.1, abs=0.1)


def test_gradients_and_moments_are_those_of_the_largest_block():
    config, found = measured(optimizer__blocks=3, model__n_layers=3)
    whole = measured(model__n_layers=3)[1].learner
    learner, trained, moments = build_learner(config, build_model(config), build.build_mesh(config)), [], []
    for version in range(3):
        learner.update([], version)  # turns to the block of the version
        trained.append(nbytes(learner.state.params))
        moments.append(nbytes(learner.state.optimizer))
    assert found.learner['gradients'] == max(trained) < whole['gradients'] == sum(trained)
    assert found.learner['optimizer'] == pytest.approx(max(moments), rel=0.01)
    assert found.learner['weights'] == whole['weights']
    assert found.host['moments of other blocks'] == 2 * whole['weights']


def test_the_parts_of_a_process_are_those_of_its_learner_engines_and_host():
    found = measured(rollout__slots=3)[1]
    parts = sizes.measure_parts(small_config(rollout__slots=3))
    shared = (*found.learner.items(), *found.engines.items(), *found.host.items())  # one device has them all
    assert sum(parts.values()) == sum(size for _, size in shared)
    assert parts['publication'] == found.learner['publication'] + found.engines['publication']
    assert parts['KV cache'] == found.engines['KV cache']


def test_the_ring_of_earlier_versions_is_counted():
    weights = measured()[1].learner['gradients']  # float32, of one version
    assert 'earlier versions' not in measured()[1].host
    ring = lambda **fields: measured(diagnostics__ratio_sample=0.5, **fields)[1].host['earlier versions']
    assert ring(run__steps=2) == 3 * weights
    assert ring(diagnostics__ring_bytes=weights) == weights


def test_a_budget_of_the_cache_is_kept_and_evaluation_has_its_own():
    # 6 slots of 16 positions in blocks of 8 are 12 blocks, and one that padding writes to; 40 positions are 5 blocks
    (_, whole), (config, found) = measured(), measured(rollout__cache_tokens=47)
    block = whole.engines['KV cache'] // 13
    assert found.engines['KV cache'] == 6 * block
    backend = build_backend(config, Decoder(read_shape(config)), jax.devices()[:1])
    assert (backend.cache_blocks, backend.state_bytes) == (5, 6 * block)
    # 2 slots for evaluation beside training can fill 4 blocks, 4 slots are bounded by the budget, 5
    for slots, blocks in ((2, 5), (4, 6)):
        beside = {'evaluation__every': 1, 'evaluation__problems': 4, 'evaluation__slots': slots}
        config, found = measured(rollout__cache_tokens=47, **beside)
        (backend,) = build_evaluation_backends(
            config, Decoder(read_shape(config)), build.build_allocation(config)
        ).values()
        assert backend.state_bytes == blocks * block
        assert found.engines['KV cache'] == (6 + blocks) * block


HUGE = {
    'wide and deep': ({'model__d_model': 65536, 'model__n_layers': 200}, r'weights [\d.]+ GB.*lower model\.n_layers'),
    'as large as a field': ({'model__d_model': 2**31 - 1, 'model__n_layers': 2**31 - 1}, r'lower model\.n_layers'),
    'slots': (
        {'rollout__slots': 2**31 - 1},
        r'KV cache [\d.e+]+ GB.*lower rollout\.slots, rollout\.context_tokens or .* rollout\.cache_tokens below',
    ),
    'cache': ({'rollout__cache_tokens': 2**31 - 1}, r'KV cache [\d.e+]+ GB.*To fit, lower rollout\.cache_tokens or'),
    'prefill': ({'rollout__prefill_buckets': (2**31 - 1,)}, r'prefill [\d.e+]+ GB.*lower rollout\.prefill_buckets'),
    'rows': ({'learner__row_tokens': 2**31 - 1}, r'rows [\d.e+]+ GB.*lower learner\.row_tokens or'),
    'group': (
        {'rollout__group_size': 2**31 - 1},
        r'answers [\d.e+]+ GB.*lower rollout\.group_size, rollout\.max_running_groups',
    ),
    'ring': (
        {'staleness__schedule': 'fixed(1000000000)', 'run__steps': 2**31 - 1},
        r'publication [\d.e+]+ GB.*lower the longest delay of staleness\.schedule',
    ),
    'optimizer': ({'model__d_model': 2**27}, r"optimizer [\d.]+ GB.*set optimizer\.name='adafactor' or 'adamw8bit'"),
    'heads': ({'model__head_dim': 2**31 - 2}, r'KV cache [\d.e+]+ GB.*To fit, '),
}


@pytest.mark.parametrize('case', HUGE)
def test_what_cannot_fit_is_refused_from_its_shapes(case, monkeypatch):
    fields, message = HUGE[case]
    monkeypatch.setattr(Decoder, 'init', lambda *_: pytest.fail('weights were drawn'))
    with pytest.raises(
        ConfigError, match=rf'^this run needs at least [\d.e+]+ GB, activations not.*{message}'
    ) as refused:
        sizes.require_room(small_config(**fields))
    assert '\n' not in str(refused.value)


@pytest.mark.parametrize('on_device', [False, True], ids=['the machine', 'an accelerator'])
def test_the_limit_is_95_percent_of_the_memory_of_the_machine_or_of_one_device(monkeypatch, on_device):
    _, found = measured()
    host = {} if on_device else found.host
    needed = sum(map(sum, (part.values() for part in (found.learner, found.engines, host))))
    of_machine = r'95% of the .* of this machine \(or the limit of its cgroup\) are'
    said = re.escape(f'of {jax.devices()[0].device_kind}') if on_device else of_machine

    def limit(size):
        monkeypatch.setattr(sizes, 'memory_limit_bytes', lambda: 1 if on_device else size)
        monkeypatch.setattr(sizes, 'device_memory', lambda _: size if on_device else None)

    limit(int(needed / 0.95) + 1)
    sizes.require_room(small_config())
    limit(int(needed / 0.95) - 1)
    with pytest.raises(ConfigError, match=said):
        sizes.require_room(small_config())


def test_supervised_training_counts_no_engines():
    _, found = measured(loss__objective='sft')
    assert found.engines == found.host == {}


def test_models_beside_the_trained_one_are_counted(tmp_path):
    _, pairs = measured(loss__objective='dpo')
    assert pairs.learner['reference model'] == pairs.learner['weights']
    config = TrackedConfig(small_config(model__n_layers=5))
    larger = build_model(config)
    write_hf_directory(tmp_path / 'teacher', plan_hf_files(jax.device_get(larger.params), larger.decoder.config))
    _, taught = measured(loss__objective='distillation', loss__teacher=str(tmp_path / 'teacher'))
    assert taught.learner['teacher'] == nbytes(larger.params) > taught.learner['weights']
    assert 'reference model' not in taught.learner


def test_a_cgroup_lowers_the_limit(tmp_path):
    groups = tmp_path / 'cgroup'
    groups.write_text('4:memory:/job/step\n1:cpu:/\n0::/user\n')
    assert sizes.cgroup_limits(groups, tmp_path) == []
    for directory, name, text in (
        ('memory', 'memory.limit_in_bytes', '9223372036854771712'),
        ('memory/job', 'memory.limit_in_bytes', '4000'),
        ('user', 'memory.max', 'max'),
        ('.', 'memory.max', '3000'),
    ):
        (tmp_path / directory).mkdir(parents=True, exist_ok=True)
        (tmp_path / directory / name).write_text(f'{text}\n')
    assert sorted(sizes.cgroup_limits(groups, tmp_path)) == [3000, 4000, 9223372036854771712]
    assert sizes.cgroup_limits(tmp_path / 'none', tmp_path) == []
    assert 0 < sizes.memory_limit_bytes() < 2**60


def test_engines_with_their_own_devices_are_counted_there(monkeypatch):
    if len(jax.devices()) < 4:
        pytest.skip('needs four devices')
    _, shared = measured(cluster__engines='2 x shared')
    config, own = measured(cluster__engines='2 x tensor=1')
    # two caches on one device, or one on each of two; there the weights in use and the next ones
    assert shared.engines['KV cache'] == 2 * own.engines['KV cache']
    weights = nbytes(build_model(config).params)
    assert own.engines['publication'] == 2 * weights
    largest = max(sum(own.learner.values()), sum(own.engines.values()))  # no device holds both
    monkeypatch.setattr(sizes, 'device_memory', lambda _: int(largest / 0.95) + 1)
    sizes.require_room(small_config(cluster__engines='2 x tensor=1'))
    with pytest.raises(ConfigError, match='this run needs at least'):
        sizes.require_room(small_config(cluster__engines='2 x shared'))
    monkeypatch.setattr(sizes, 'device_memory', lambda _: int(largest / 0.95) - 1)
    with pytest.raises(ConfigError, match='this run needs at least'):
        sizes.require_room(small_config(cluster__engines='2 x tensor=1'))


def test_an_engine_over_two_devices_has_half_of_everything_on_each():
    if len(jax.devices()) < 4:
        pytest.skip('needs four devices')
    fields = {'model__n_kv_heads': 2}
    (_, one), (_, two) = (
        measured(cluster__engines='1 x tensor=1', **fields),
        measured(cluster__engines='1 x tensor=2', **fields),
    )
    for name in ('transposed weights', 'KV cache', 'prefill'):
        assert one.engines[name] == 2 * two.engines[name] > 0
    norms = (2 * 2 + 1) * 32  # of two layers and behind them: whole on both; each holds two versions in float32
    assert one.engines['publication'] - 2 * norms * 4 == 2 * (two.engines['publication'] - 2 * norms * 4)
    with pytest.raises(ConfigError, match=r'tensor=3 of cluster\.engines does not divide the 2 query heads and 2 key'):
        measured(cluster__engines='1 x tensor=3', **fields)


def test_engines_in_8_bits_hold_a_quarter_of_the_matrices():
    (_, published), (_, quantized) = measured(), measured(rollout__weights='int8')
    assert quantized.engines['weights in 8 bits'] * 4 == published.engines['transposed weights'] > 0
    assert 'transposed weights' not in quantized.engines


def test_earlier_versions_are_held_where_the_learner_made_them():
    # the newest and, until engines have it, the one before; with fixed(2) up to three before it
    fields = {'staleness__schedule': 'fixed(2)', 'cluster__engines': '1 x tensor=1'}
    (_, shared), (_, natural), (_, fixed) = measured(), measured(cluster__engines='1 x tensor=1'), measured(**fields)
    assert natural.learner['publication'] == 2 * shared.learner['publication']
    assert fixed.learner['publication'] == 4 * shared.learner['publication']
    assert fixed.engines == natural.engines


def test_deltas_keep_the_last_version_on_the_host():
    fields = {'publication__channel': 'files', 'publication__dtype': 'bfloat16'}
    _, without = measured(**fields)
    _, found = measured(publication__delta=True, **fields)
    assert 'versions for deltas' not in without.host
    assert found.host['versions for deltas'] == found.learner['publication']  # of one device


def test_layers_with_and_without_experts_are_counted_as_they_are():
    experts = Experts(4, 2, 16, dense_layers=(1,))
    shape = ModelConfig(
        vocab_size=29, d_model=16, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=24, rope_theta=1e4,
        family='qwen3_moe', qk_norm=True, experts=experts,
    )  # fmt: skip
    config = TrackedConfig(small_config())
    found = sizes.measure(config, shape, build.build_allocation(config))
    assert found.learner['weights'] == 4 * Decoder(shape).parameter_count()
