"""Tensors of models with gated delta nets: leaves that share a tensor, rows in groups, and leaves that stay float32."""

from __future__ import annotations

import functools
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from areal_jax.formats import hf_directory
from areal_jax.formats.hf_config import HfError, read_hf_config
from areal_jax.formats.hf_directory import from_hf_names, load_hf, load_hf_weights, map_hf_weights, to_hf_names
from areal_jax.formats.hf_parts import parts_of
from areal_jax.models.weights import is_float32, leaf_at, logical_axes, nest, weight_table
from areal_jax.publication.export import export_hf
from areal_jax.sharding.rules import make_mesh, param_shardings, path_name
from tests.models import family_examples, parity

NAMES = tuple(parity.HYBRIDS)
D_KEY, D_VALUE, KEY_HEADS, RATIO = 8, 12, 2, 2  # of all three; RATIO value heads for each key head
HEADS, HEAD_DIM = 4, 32


@functools.cache
def loaded(name):
    with tempfile.TemporaryDirectory() as folder:
        parity.write(directory := parity.pathlib.Path(folder), name)
        return load_hf(directory)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def rows_by_component(name, layer):
    """The rows of a layer's tensors by leaf, as lists of rows, by loops over heads."""
    tensors, found = parity.weights(name), {}
    own = f'model.layers.{layer}.linear_attn.'

    def take(leaf, row):
        found.setdefault(leaf, []).append(row)

    if name == 'qwen3_next':
        rows = iter(tensors[f'{own}in_proj_qkvz.weight'])
        for _ in range(KEY_HEADS):
            for leaf, count in (('query', D_KEY), ('key', D_KEY), ('value', RATIO * D_VALUE)):
                for _ in range(count):
                    take(leaf, next(rows))
            for _ in range(RATIO * D_VALUE):
                take('output_gate', next(rows))
        rows = iter(tensors[f'{own}in_proj_ba.weight'])
        for _ in range(KEY_HEADS):
            for leaf in ('beta', 'decay'):
                for _ in range(RATIO):
                    take(leaf, next(rows))
    else:
        rows = iter(tensors[f'{own}in_proj_qkv.weight'])
        for leaf, count in (('query', D_KEY), ('key', D_KEY), ('value', RATIO * D_VALUE)):
            for _ in range(KEY_HEADS * count):
                take(leaf, next(rows))
        for leaf, tensor in (('output_gate', 'z'), ('beta', 'b'), ('decay', 'a')):
            found[leaf] = list(tensors[f'{own}in_proj_{tensor}.weight'])
    return found


@pytest.mark.parametrize('name', NAMES)
def test_each_component_of_a_delta_net_is_a_leaf(name):
    delta = loaded(name)[1]['layers']['2']['delta']
    for leaf, rows in rows_by_component(name, 2).items():
        np.testing.assert_array_equal(delta[leaf]['weight'], np.array(rows).T, err_msg=leaf)
    tensors, own = parity.weights(name), 'model.layers.2.linear_attn.'
    taps = tensors[f'{own}conv1d.weight']
    keys, values = KEY_HEADS * D_KEY, KEY_HEADS * RATIO * D_VALUE
    assert taps.shape == (2 * keys + values, 1, 4)
    for channel in range(len(taps)):
        leaf = 'query' if channel < keys else 'key' if channel < 2 * keys else 'value'
        first = {'query': 0, 'key': keys, 'value': 2 * keys}[leaf]
        np.testing.assert_array_equal(delta[f'{leaf}_taps'][channel - first], taps[channel, 0])
    for leaf, tensor in (('log_rate', 'A_log'), ('rate_bias', 'dt_bias'), ('norm', 'norm.weight')):
        np.testing.assert_array_equal(delta[leaf], tensors[own + tensor])
    np.testing.assert_array_equal(delta['output']['weight'], tensors[f'{own}out_proj.weight'].T)


@pytest.mark.parametrize('name', NAMES)
def test_queries_and_gates_of_attention_alternate_by_head(name):
    layer = (
        parity.HYBRIDS[name].get('layer_types', ['linear_attention'] * 3 + ['full_attention']).index('full_attention')
    )
    config, params = loaded(name)
    assert [config.mixer(number) for number in range(4)].index('attention') == layer
    attention = params['layers'][str(layer)]['attention']
    tensor = parity.weights(name)[f'model.layers.{layer}.self_attn.q_proj.weight']
    for row in range(2 * HEADS * HEAD_DIM):
        head, place = divmod(row, 2 * HEAD_DIM)
        leaf = 'query' if place < HEAD_DIM else 'output_gate'
        column = head * HEAD_DIM + place % HEAD_DIM
        np.testing.assert_array_equal(attention[leaf]['weight'][:, column], tensor[row])


@pytest.mark.parametrize('name', NAMES[1:])
def test_the_expert_that_all_tokens_reach_is_read(name):
    mlp, tensors = loaded(name)[1]['layers']['2']['mlp'], parity.weights(name)
    own = 'model.layers.2.mlp.shared_expert'
    for part in ('gate', 'up', 'down'):
        np.testing.assert_array_equal(mlp['shared'][part]['weight'], tensors[f'{own}.{part}_proj.weight'].T)
    np.testing.assert_array_equal(mlp['shared_score']['weight'], tensors[f'{own}_gate.weight'].T)
    np.testing.assert_array_equal(mlp['router']['weight'], tensors['model.layers.2.mlp.gate.weight'].T)


@pytest.mark.parametrize('name', NAMES)
def test_names_are_those_of_the_files_and_come_back(name):
    config, params = loaded(name)
    for convert in (np.asarray, jnp.asarray):
        tensors = to_hf_names(jax.tree.map(convert, params), config)
        assert_equal(dict(tensors), parity.weights(name))
        assert_equal(from_hf_names(tensors, config), params)


@pytest.mark.parametrize('name', NAMES)
def test_all_ways_of_reading_give_the_same_leaves(tmp_path, monkeypatch, name):
    monkeypatch.setattr(hf_directory, 'BLOCK_BYTES', 4000)  # blocks end inside of heads
    config, params = loaded(name)
    export_hf(tmp_path / 'model', params, config, dtype='float32', file_bytes=9000)
    assert read_hf_config(tmp_path / 'model') == config
    assert_equal(load_hf(tmp_path / 'model')[1], params)
    assert_equal(map_hf_weights(tmp_path / 'model', config), params)
    assert_equal(load_hf_weights(tmp_path / 'model', config), params)
    files = sorted(tmp_path.glob('model/*.safetensors'))
    tensors = {key: value for path in files for key, value in load_file(path).items()}
    assert_equal(tensors, parity.weights(name))


@pytest.mark.parametrize('name', NAMES)
def test_shards_of_a_mesh_read_their_own_heads(tmp_path, name):
    config, params = loaded(name)
    parity.write(tmp_path, name)
    mesh = make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])
    leaves = [(path, leaf) for spec in weight_table(config).values() for path in spec.paths for leaf in [spec]]
    described = nest((path, jax.ShapeDtypeStruct(spec.shape, np.float32)) for path, spec in leaves)
    shardings = param_shardings(described, logical_axes(config), mesh, 'fsdp_tensor')
    found = load_hf(tmp_path, shardings=shardings)[1]
    assert_equal(found, params)
    query = found['layers']['0']['delta']['query']['weight']
    assert {shard.data.shape for shard in query.addressable_shards} == {(32, D_KEY)}


def test_grouped_rows_are_read_from_any_row_to_any_other(tmp_path):
    config, _ = loaded('qwen3_next')
    parity.write(tmp_path, 'qwen3_next')
    name = 'model.layers.0.linear_attn.in_proj_qkvz.weight'
    stored = hf_directory.list_tensors(tmp_path / 'model.safetensors')[name]
    for leaf in ('query', 'key', 'value', 'output_gate'):
        part = parts_of(config)[f'layers/*/delta/{leaf}/weight']
        rows, whole = part.find_in(stored), np.array(rows_by_component('qwen3_next', 0)[leaf])
        assert rows.nbytes == whole.nbytes
        for first in range(len(whole)):
            for end in range(first + 1, len(whole) + 1):
                np.testing.assert_array_equal(rows.read_rows(first, end), whole[first:end])


@pytest.mark.parametrize('name', parity.COMPOSITES)
@pytest.mark.parametrize('fused', [False, True])
def test_the_text_part_of_a_composite_directory_is_read(tmp_path, capsys, name, fused):
    config, params = loaded(name)
    parity.write_composite(tmp_path, name)
    path = tmp_path / 'model.safetensors'
    tensors = load_file(path) | {
        'model.visual.patch_embed.proj.weight': np.ones((4, 3), np.float32),
        'model.visual.blocks.0.norm1.weight': np.ones(4, np.float32),
        'mtp.fc.weight': np.ones((4, 8), np.float32),
    }
    if fused and name == 'qwen3_5_moe':
        fuse(tensors)
    save_file(tensors, path)
    found_config, found = load_hf(tmp_path)
    assert found_config == config
    assert_equal(found, params)
    assert_equal(map_hf_weights(tmp_path, config), params)
    said = capsys.readouterr().err
    assert 'are not part of the text model are not read: ' in said
    assert {'1 of mtp', '2 of visual'} == set(said.splitlines()[0].rpartition(': ')[2].split(', '))


def fuse(tensors):
    for layer in range(4):
        own = f'model.language_model.layers.{layer}.mlp.experts.'
        part = lambda name, e, own=own: tensors.pop(f'{own}{e}.{name}.weight')
        both = [np.concatenate([part('gate_proj', e), part('up_proj', e)]) for e in range(8)]
        tensors[f'{own}gate_up_proj'] = np.stack(both)
        tensors[f'{own}down_proj'] = np.stack([part('down_proj', e) for e in range(8)])


def test_a_head_that_is_not_tied_and_not_there_is_refused(tmp_path):
    parity.write_composite(tmp_path, 'qwen3_5')
    path = tmp_path / 'config.json'
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {'tie_word_embeddings': False}))  # the copy of the text part says true
    with pytest.raises(HfError, match=r'missing lm_head\.weight'):
        load_hf(tmp_path)


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_leaves_that_are_exponentiated_stay_float32(tmp_path, name, dtype):
    config, params = loaded(name)
    export_hf(tmp_path / 'half', params, config, dtype=dtype)
    assert json.loads((tmp_path / 'half' / 'config.json').read_text())['dtype'] == dtype
    stored = hf_directory.list_tensors(tmp_path / 'half' / 'model.safetensors')
    kept = {key for key, tensor in stored.items() if tensor.stored_as == 'F32'}
    assert kept == {key for key in stored if key.endswith(('.A_log', '.dt_bias'))}
    parity.write(tmp_path / 'whole', name)
    ways = {
        'asked for': load_hf(tmp_path / 'whole', dtype=dtype)[1],
        'as in the file': load_hf_weights(tmp_path / 'half', config),
        'mapped': map_hf_weights(tmp_path / 'half', config),
    }
    for way, found in ways.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            own, expected = path_name(path), np.asarray(leaf_at(params, path_name(path)))
            assert leaf.dtype == ('float32' if is_float32(own) else dtype), (way, own)
            np.testing.assert_array_equal(leaf, expected.astype(leaf.dtype), err_msg=f'{way} {own}')


def test_leaves_that_stay_float32_are_read_from_files_that_have_them_in_16_bits(tmp_path):
    # published files of Qwen3-Next have all tensors in bfloat16
    config, params = loaded('qwen3_next')
    parity.write(tmp_path, 'qwen3_next')
    half = {key: tensor.astype(jnp.bfloat16) for key, tensor in parity.weights('qwen3_next').items()}
    save_file(half, tmp_path / 'model.safetensors')
    for found in (
        load_hf(tmp_path, dtype='bfloat16')[1],
        load_hf_weights(tmp_path, config),
        map_hf_weights(tmp_path, config),
    ):
        delta = found['layers']['0']['delta']
        assert (delta['log_rate'].dtype, delta['norm'].dtype) == (np.float32, jnp.bfloat16)
        expected = np.asarray(params['layers']['0']['delta']['log_rate']).astype(jnp.bfloat16)
        np.testing.assert_array_equal(delta['log_rate'], expected.astype(np.float32))


@pytest.mark.parametrize('name', NAMES)
def test_an_export_is_what_transformers_has(tmp_path, name):
    torch = pytest.importorskip('torch')
    pytest.importorskip('transformers')
    from tests.models import record_parity

    config, params = loaded(name)
    export_hf(tmp_path / 'export', params, config, dtype='float32', file_bytes=30_000)
    parity.write(tmp_path / 'source', name)
    exported, source = (record_parity.load(tmp_path / where) for where in ('export', 'source'))
    own, other = (model.config.to_dict() for model in (exported, source))
    differ = {key for key in own if own[key] != other.get(key)}
    assert differ <= {'bos_token_id', 'eos_token_id', 'pad_token_id', 'router_aux_loss_coef', '_name_or_path'}
    for key, tensor in source.state_dict().items():
        assert torch.equal(tensor, exported.state_dict()[key]), key
    if name in parity.COMPOSITES:
        parity.write_composite(tmp_path / 'composite', name)
        whole = record_parity.load(tmp_path / 'composite').state_dict()
        assert all(torch.equal(tensor, whole[key]) for key, tensor in source.state_dict().items())


@pytest.mark.parametrize('name', family_examples.HYBRIDS)
def test_drawn_weights_of_a_hybrid_come_back_from_their_directory(tmp_path, name):
    config = family_examples.CONFIGS[name]
    params = family_examples.draw(config)
    export_hf(tmp_path / 'model', params, config, dtype='float32')
    found_config, found = load_hf(tmp_path / 'model')
    assert found_config == config
    assert_equal(found, params)
