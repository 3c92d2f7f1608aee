"""Texts of answers of byte-fallback and byte-level vocabularies: streamed = whole for any ids, cut anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.rollout.http.server.bridge import Texts
from areal_jax.rollout.http.wire.exchange import CallSampling, Finish
from areal_jax.text.file_tokenizers import HfTokenizer
from tests.text import vocabularies

LENGTH = Finish('length')
BUILT = {'bpe': vocabularies.llama2, 'unigram': lambda: vocabularies.llama2('unigram'), 'bytes': vocabularies.gpt2}


@pytest.fixture(params=BUILT)
def library(request):
    return BUILT[request.param]()


@pytest.fixture
def texts(library, tmp_path):
    return Texts(HfTokenizer(vocabularies.write(tmp_path, library)))


def stream(texts, ids, ends, finish=LENGTH, **sampling):
    """The texts of the pieces that end at `ends`."""
    text = texts.answer(CallSampling(max_new_tokens=None, temperature=1.0, **sampling))
    *before, last = np.split(ids, ends)
    return [text.extend(part) for part in before] + [text.extend(last, finish)]


def test_emoji_are_text_whole_and_streamed(texts, library):
    for text in vocabularies.TEXTS:
        ids = np.array(library.encode(text, add_special_tokens=False).ids, np.int32)
        assert texts.decode(ids, skip_special=True) == library.decode(ids.tolist()) == text
        for step in (1, 3):
            assert ''.join(stream(texts, ids, range(step, len(ids), step))) == text


@pytest.mark.parametrize('skip', [True, False])
def test_any_ids_cut_anywhere_give_the_whole(texts, library, skip):
    rng = np.random.default_rng(0)
    for _ in range(40):
        ids = vocabularies.draw_ids(rng, library, int(rng.integers(1, 60)))
        whole = texts.decode(ids, skip_special=skip)
        for _ in range(5):
            ends = np.sort(rng.integers(0, len(ids) + 1, int(rng.integers(0, len(ids) + 1))))
            assert ''.join(stream(texts, ids, ends, skip_special_tokens=skip)) == whole
