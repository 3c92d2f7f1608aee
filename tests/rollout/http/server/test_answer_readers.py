"""Marks are found in the vocabulary of a model: tokens of their own, or text."""

import json

import numpy as np
import pytest

from areal_jax.rollout.http.server.bridge import AnswerReaders, Texts
from areal_jax.rollout.http.wire import chat
from areal_jax.rollout.http.wire.exchange import Finish
from areal_jax.text.file_tokenizers import HfTokenizer
from tests.rollout.http.server.scripted import ARGUMENTS, CALL, TOOL

MARKS = ('<tool_call>', '</tool_call>')


def texts_of(folder, added=(), special=False):
    """Of a tokenizer of bytes."""
    tokenizers = pytest.importorskip('tokenizers')
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    found.add_special_tokens(['<eos>'])
    found.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False) for text in added])
    found.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': '<eos>'}))
    return Texts(HfTokenizer(folder)), found


@pytest.mark.parametrize(('added', 'special'), [((), False), (MARKS, False), (MARKS, True), (MARKS[:1], False)])
def test_a_call_is_read_whatever_the_marks_are_in_the_vocabulary(tmp_path, added, special):
    texts, tokenizer = texts_of(tmp_path, added, special)
    call = chat.parse({'messages': [{'role': 'user', 'content': 'x'}], 'tools': [TOOL]})
    ids = np.array([*tokenizer.encode(f'é {CALL}').ids, tokenizer.token_to_id('<eos>')], np.int32)
    assert len(ids) - 1 == len(f'é {CALL}'.encode()) - sum(len(mark) - 1 for mark in added)
    for size in (1, 3, len(ids)):
        reader, parts = AnswerReaders(texts).open(call), [*np.split(ids, range(size, len(ids), size))]
        last = Finish('stop', int(ids[-1]))
        readings = [reader.extend(part, last if i == len(parts) - 1 else None) for i, part in enumerate(parts)]
        assert ''.join(reading.text for reading in readings) == 'é'
        assert [found.arguments for reading in readings for found in reading.calls] == [ARGUMENTS]


def test_the_spelled_mark_of_a_model_that_has_a_token_is_text(tmp_path):
    texts, tokenizer = texts_of(tmp_path, MARKS)
    spelled = [tokenizer.token_to_id(c) for c in CALL.replace('\n', '').replace(' ', '')]
    call = chat.parse({'messages': [{'role': 'user', 'content': 'x'}], 'tools': [TOOL]})
    reading = AnswerReaders(texts).open(call).extend(np.array(spelled, np.int32), Finish('length'))
    assert (reading.text, reading.calls, reading.unparsed) == (CALL.replace('\n', '').replace(' ', ''), (), 0)
