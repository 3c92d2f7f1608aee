"""References and teachers: directories that hold none, another architecture, another vocabulary."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.app.model.given_model import read_given_model, require_same_shape
from areal_jax.app.model.model import Model
from areal_jax.config import TrackedConfig, default_config, validate
from areal_jax.config.ranges import ConfigError
from areal_jax.formats.hf_export import plan_hf_files
from areal_jax.models.decoder import Decoder
from areal_jax.publication.export import write_hf_directory
from areal_jax.text.file_tokenizers import HfTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.learning.examples import tiny_decoder
from tests.tasks import hf_directory

DECODER = tiny_decoder(n_layers=1)
MODEL = Model(DECODER, None, CharacterTokenizer('abcdefghij'))


def write(directory, decoder=DECODER, seed=1):
    params = jax.device_get(decoder.init(seed))
    write_hf_directory(directory, plan_hf_files(params, decoder.config, separate_head=False))
    return params


def reshaped(**sizes):
    return Decoder(dataclasses.replace(DECODER.config, **sizes))


def read(directory, model=MODEL, field='loss.reference'):
    config = default_config()
    config.update_from_flattened_dict({field: str(directory)})
    tracked = TrackedConfig(config)
    return read_given_model(tracked, field, model), tracked


def test_the_weights_of_a_directory_are_read_in_the_dtype_of_passes(tmp_path):
    params = write(tmp_path / 'other')
    given, config = read(tmp_path / 'other')
    require_same_shape(given, 'loss.reference', DECODER.config)
    jax.tree.map(np.testing.assert_array_equal, given.load(config, 'float32'), params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(given.load(config, 'bfloat16'))} == {'bfloat16'}


def test_a_directory_that_holds_no_model_is_named_with_its_field(tmp_path):
    with pytest.raises(ConfigError, match=r"loss\.teacher='.*none' is no directory: name one of Hugging Face"):
        read(tmp_path / 'none', field='loss.teacher')
    with pytest.raises(ConfigError, match=r"loss\.reference='.*': .*config\.json"):
        read(tmp_path)
    write(tmp_path / 'cut')
    (tmp_path / 'cut' / 'model.safetensors').unlink()
    given, config = read(tmp_path / 'cut')
    with pytest.raises(ConfigError, match=r'loss\.reference: .*cut has neither model\.safetensors nor'):
        given.load(config, 'float32')


def test_another_vocabulary_is_refused(tmp_path):
    write(tmp_path / 'wide', reshaped(vocab_size=12))
    with pytest.raises(ConfigError, match=r'has a vocabulary of 12 tokens, and the model that is trained one of 11'):
        read(tmp_path / 'wide')


def test_equally_many_tokens_with_other_ids_are_another_vocabulary(tmp_path):
    hf_directory.write(tmp_path / 'ours')
    tokenizer = HfTokenizer(tmp_path / 'ours')
    decoder = reshaped(vocab_size=tokenizer.vocab_size)
    write(tmp_path / 'theirs', decoder)
    hf_directory.write(tmp_path / 'theirs')
    model = Model(decoder, None, tokenizer)
    read(tmp_path / 'theirs', model)
    file = tmp_path / 'theirs' / 'tokenizer.json'
    text = file.read_text()
    swapped = text.replace('"on": 256', '"on": 257').replace('"Ġ1": 257', '"Ġ1": 256')
    assert swapped != text
    file.write_text(swapped)
    with pytest.raises(ConfigError, match=r"has another vocabulary than .*: 'on' is token 256 here and 257 there"):
        read(tmp_path / 'theirs', model)


@pytest.mark.parametrize('sizes', [{'d_ff': 32}, {'n_layers': 2}, {'rope_theta': 10.0}], ids=str)
def test_another_architecture_is_no_reference_but_may_teach(tmp_path, sizes):
    write(tmp_path / 'other', reshaped(**sizes))
    given, _ = read(tmp_path / 'other')
    ((name, value),) = sizes.items()
    with pytest.raises(ConfigError, match=rf"loss\.reference='.*' has {name}={value}.*: name a directory of the same"):
        require_same_shape(given, 'loss.reference', DECODER.config)
    read(tmp_path / 'other', field='loss.teacher')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'loss.objective': 'distillation'}, r"loss\.objective='distillation' needs loss\.teacher"),
        (
            {'loss.objective': 'dpo', 'loss.reference': 'x', 'lora.rank': 4},
            r"loss\.reference='x' with lora\.rank=4: the frozen weights are kept once",
        ),
        (
            {'loss.objective': 'dpo', 'optimizer.blocks': 3},
            r"optimizer\.blocks=3 with loss\.objective='dpo': a model beside the trained one",
        ),
        ({'loss.objective': 'dpo', 'loss.dpo_beta': 0.0}, r'loss\.dpo_beta=0\.0 must be'),
    ],
)
def test_what_does_not_go_together_is_refused(fields, message):
    config = default_config()
    config.update_from_flattened_dict(fields)
    with pytest.raises(ConfigError, match=message):
        validate(config)
