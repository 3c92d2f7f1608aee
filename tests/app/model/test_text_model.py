"""Chat templates in place of the model's own, and shapes of random models."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from areal_jax.app.model.model import build_model
from areal_jax.app.model.text_model import (
    describe_text_model,
    random_shape,
    read_given_template,
    read_run_config,
)
from areal_jax.app.workdir.records import restore_config
from areal_jax.config import TrackedConfig, default_config, validate
from areal_jax.config.fields import ConfigError, Purpose
from areal_jax.errors import UserError
from areal_jax.formats.hf_config import hf_config
from areal_jax.models.decoder import Decoder
from areal_jax.publication.export import export_hf
from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer
from areal_jax.text.tokenizer import chat_messages
from tests.publication.tiny import CONFIG
from tests.tasks import hf_directory
from tests.text.test_tokenizer import MINIMAL

OWN = '<|turn|>{{ messages[0].content }}'


def configure(source, path='', template=''):
    config = default_config()
    config.model.update({'source': source, 'path': str(path), 'chat_template': str(template)})
    return config


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / 'model'
    hf_directory.write(directory)
    (directory / 'config.json').write_text(json.dumps(hf_config(CONFIG, 'float32')))
    return directory


def prompt(config):
    return describe_text_model(TrackedConfig(config)).tokenizer.encode_chat(chat_messages('on')).tolist()


def test_the_file_goes_before_the_template_of_the_weights(directory, tmp_path):
    (tmp_path / 'own.jinja').write_text(OWN)
    assert prompt(configure('hf', directory, tmp_path / 'own.jinja')) == [260, 256]
    assert len(prompt(configure('hf', directory))) > 2


def write_run(workdir, config):
    workdir.mkdir()
    (workdir / 'config.json').write_text(json.dumps(config.to_dict()))
    return workdir


def test_a_run_from_another_run_has_its_template_unless_it_names_one(directory, tmp_path):
    (tmp_path / 'own.jinja').write_text(OWN)
    (tmp_path / 'other.jinja').write_text('{{ messages[0].content }}<|bos|>')
    first = write_run(tmp_path / 'first', configure('hf', directory, tmp_path / 'own.jinja'))
    second = write_run(tmp_path / 'second', configure('run', first))
    assert prompt(configure('run', second)) == [260, 256]
    assert prompt(configure('run', second, tmp_path / 'other.jinja')) == [256, 258]


def test_all_ends_of_the_files_count_unless_the_config_or_an_earlier_version_says_otherwise(tmp_path):
    wide = dataclasses.replace(CONFIG, vocab_size=261)
    directory = tmp_path / 'whole'
    export_hf(directory, Decoder(wide).init(0), wide, dtype='float32')
    hf_directory.write(directory, chat_template='{{ strftime_now("on") if strftime_now is defined else "1" }}')
    (directory / 'generation_config.json').write_text(json.dumps({'eos_token_id': [258]}))

    def ends(config):
        """Of the model with its weights and without."""
        tracked = TrackedConfig(config)
        found = {build(tracked).tokenizer.end_ids for build in (describe_text_model, build_model)}
        assert len(found) == 1
        return found.pop()

    found = configure('hf', directory)
    assert ends(found) == (259, 258)
    found.model.ends, found.model.template_date = 'eos', 'off'
    assert ends(found) == (259,)
    for build in (describe_text_model, build_model):
        assert build(TrackedConfig(found)).tokenizer.encode_chat(chat_messages('x')).tolist() == [ord('1') - ord('!')]
    saved = configure('hf', directory).to_dict()
    for field in ('ends', 'template_date'):
        del saved['model'][field]
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'config.json').write_text(json.dumps(saved))
    for model in (read_run_config(str(tmp_path / 'run')).model, restore_config(saved, 'x').model):
        assert (model.ends, model.template_date) == ('eos', 'off')


def test_the_one_that_comes_with_the_package_is_found_by_its_name():
    given = read_given_template(TrackedConfig(configure('gguf', 'x', 'package:configs/templates/hermes.jinja')))
    assert '<tool_response>' in given.source


FAULTS = {
    'nothing.jinja': "there is no file 'nothing.jinja'; name one with a template in jinja2",
    'package:nothing.jinja': "there is no file '/",
    '.': "there is no file '.'",
    'a\0b': r"there is no file 'a\x00b'",
    'latin.jinja': "cannot be read ('utf-8' codec",
    'large.jinja': 'has 1048577 bytes, more than 1048576',
    'broken.jinja': 'the chat template cannot be read: line 1',
}


@pytest.mark.parametrize('name', FAULTS)
def test_a_file_that_is_no_template_is_named_with_its_field(directory, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'latin.jinja').write_bytes(b'\xe9')
    (tmp_path / 'large.jinja').write_text('a' * (2**20 + 1))
    (tmp_path / 'broken.jinja').write_text('{% if %}')
    with pytest.raises(UserError) as error:
        describe_text_model(TrackedConfig(configure('hf', directory, name)))
    assert str(error.value).startswith(f'model.chat_template={name!r}')
    assert FAULTS[name] in str(error.value)
    assert '\n' not in str(error.value)


def test_a_model_of_characters_has_none(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.chat_template='x' is of no use with model\.source='random': remove"):
        validate(configure('random', template='x'))
    (tmp_path / 'own.jinja').write_text(OWN)
    drawn = write_run(tmp_path / 'drawn', configure('random'))
    with pytest.raises(ConfigError, match=r"is of no use with model\.source='random', which drew this model"):
        describe_text_model(TrackedConfig(configure('run', drawn, tmp_path / 'own.jinja')))


def test_the_export_has_the_template_that_was_trained_with(directory, tmp_path):
    (tmp_path / 'own.jinja').write_text(OWN)
    given = read_given_template(TrackedConfig(configure('hf', directory, tmp_path / 'own.jinja')))
    assert HfTokenizer(directory, given).hf_files() == {'chat_template.jinja': OWN}
    assert HfTokenizer(directory).hf_files() == {}
    for name, text in GgufTokenizer(MINIMAL, 'f', given).hf_files().items():
        (directory / name).write_text(text)
    assert HfTokenizer(directory).encode_chat(chat_messages('ab')).tolist()[-1] == 2  # of MINIMAL: 'ab'
    assert json.loads((directory / 'tokenizer_config.json').read_text())['chat_template'] == OWN


# Shapes of random models, by the fields of the config.


VOCABULARY = 11


def params_of(**fields):
    config = default_config()
    config.model.update(
        {'d_model': 8, 'n_layers': 1, 'n_heads': 2, 'n_kv_heads': 1, 'head_dim': 4, 'd_ff': 16, **fields}
    )
    return config, Decoder(random_shape(TrackedConfig(config), VOCABULARY)).init(seed=0)


def test_a_plain_decoder_has_positions_and_a_head_of_its_own_and_neither_gate_nor_final_norm():
    config, params = params_of(family='plain')
    _, llama = params_of()
    assert set(params) == {'embedding', 'positions', 'layers', 'head'}
    assert set(params['layers']['0']['mlp']) == {'up', 'down'}
    assert params['positions'].shape == (config.rollout.context_tokens, 8)
    assert params['head'].shape == params['embedding'].shape == (VOCABULARY, 8)
    assert not np.array_equal(params['head'], params['embedding'])
    np.testing.assert_array_equal(params['embedding'], llama['embedding'])
    _, symbols = params_of(family='plain', outputs='symbols')
    assert symbols['embedding'].shape == (VOCABULARY, 8)
    assert symbols['head'].shape == (2, 8)  # a and b
    # what writes to the residual stream is drawn as any other matrix, elsewhere divided by sqrt(2 n_layers)
    for path in (('attention', 'output'), ('mlp', 'down')):
        own, scaled = (tree['layers']['0'][path[0]][path[1]]['weight'] for tree in (params, llama))
        np.testing.assert_allclose(own, scaled * np.sqrt(2), rtol=1e-6)


def test_an_evaluation_of_a_supervised_model_may_set_the_length_of_its_rows():
    config = configure('random')
    config.loss.objective = 'sft'
    config.learner.row_tokens = 512
    tracked = TrackedConfig(config, ['learner.row_tokens'], purpose=Purpose.EVALUATION)
    assert describe_text_model(tracked).shape.context_tokens == 512
    assert 'learner.row_tokens' not in dict(tracked.unread())
