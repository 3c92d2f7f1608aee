"""Damaged checkpoint directories: every fault of a file ends in a UserError or in a model, never in a traceback."""

from __future__ import annotations

import copy
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from areal_jax.errors import UserError
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.formats.hf_directory import INDEX, WEIGHTS, load_hf
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.ropes import Llama3Scaling
from areal_jax.publication.export import export_hf
from areal_jax.text.file_tokenizers import HfTokenizer
from areal_jax.text.tokenizer import chat_messages
from tests.tasks import hf_directory

SHAPE = ModelConfig(
    vocab_size=300, d_model=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, d_ff=12, rope_theta=1e4,
    rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 16),
)  # fmt: skip
ODD_VALUES = (None, 'x', -1, 0, 1e308, [], {}, True, 10**30, 2**31 - 1, 0.5, [{}], {'a': {'b': []}}, '\ud800')


@pytest.fixture(scope='module')
def whole(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp('hf') / 'model'
    export_hf(directory, Decoder(SHAPE).init(0), SHAPE, dtype='float32')
    hf_directory.write(directory)
    return directory


@pytest.fixture
def directory(whole, tmp_path) -> pathlib.Path:
    return shutil.copytree(whole, tmp_path / 'model')


def refusals(attempts: Iterator[None], use: Callable[[], Any]) -> list[str]:
    """What was said in each attempt that `use` refused; any other exception passes."""
    said = []
    for _ in attempts:
        try:
            use()
        except UserError as error:
            said.append(str(error))
    return said


def odd_fields(path: pathlib.Path) -> Iterator[None]:
    """The JSON file with every field, and every field of an object in it, replaced by every odd value, or removed."""
    content = json.loads(path.read_text())
    places = [(name,) for name in content]
    places += [(name, inner) for name, value in content.items() if isinstance(value, dict) for inner in value]
    for *outer, name in places:
        for value in (*ODD_VALUES, ...):
            changed = copy.deepcopy(content)
            holder = changed[outer[0]] if outer else changed
            holder[name] = value
            if value is ...:
                del holder[name]
            path.write_text(json.dumps(changed))
            yield


def torn(path: pathlib.Path) -> Iterator[None]:
    """The file cut short, empty, of another kind, and with bits flipped in its first 2000 bytes."""
    content = path.read_bytes()
    for size in (0, 1, 7, 8, 9, *(len(content) * k // 10 for k in range(1, 10)), len(content) - 1):
        path.write_bytes(content[:size])
        yield
    for other in (
        b'<!DOCTYPE html>',
        b'\xff' * 100,
        bytes(100),
        b'[' * 100_000,
        b'{"a":' * 100_000,
        b'null',
        b'[]',
        b'{}',
    ):
        path.write_bytes(other)
        yield
    numbers = np.random.default_rng(0)
    for place in numbers.integers(0, min(len(content), 2000), 100):
        flipped = bytearray(content)
        flipped[place] ^= 1 << numbers.integers(8)
        path.write_bytes(flipped)
        yield


def encode(directory: pathlib.Path) -> None:
    """Everything that a run does with a tokenizer, but chats, whose template costs a process each time."""
    tokenizer = HfTokenizer(directory)
    tokenizer.fits(SHAPE.vocab_size)
    tokenizer.decode(tokenizer.encode('on 1<|turn|> naïve'))


def test_the_directory_is_read_as_it_is(directory):
    assert load_hf(directory)[0] == SHAPE
    encode(directory)
    assert len(HfTokenizer(directory).encode_chat(chat_messages('on'))) > 2


def test_odd_fields_of_the_config(directory):
    said = refusals(odd_fields(directory / 'config.json'), lambda: read_hf_config(directory))
    assert len(said) > 200
    assert all('config.json' in sentence and '\n' not in sentence for sentence in said)


@pytest.mark.parametrize('name', ['num_hidden_layers', 'vocab_size', 'hidden_size', 'intermediate_size', 'head_dim'])
@pytest.mark.parametrize('value', [1, 3, 1000, 2**31 - 1])
def test_sizes_that_the_weights_do_not_have(directory, name, value):
    config = json.loads((directory / 'config.json').read_text())
    (directory / 'config.json').write_text(json.dumps(config | {name: value}))
    assert len(refusals(iter([None]), lambda: load_hf(directory))) == 1


@pytest.mark.parametrize('name', ['config.json', WEIGHTS])
def test_torn_files_of_the_model(directory, name):
    said = refusals(torn(directory / name), lambda: load_hf(directory))
    assert len(said) > 50
    assert all(str(directory) in sentence for sentence in said)


def test_odd_indices(directory):
    (directory / WEIGHTS).rename(directory / 'part.safetensors')
    places = dict.fromkeys(('model.norm.weight', 'model.embed_tokens.weight'), 'part.safetensors')
    (directory / INDEX).write_text(json.dumps({'metadata': {}, 'weight_map': places}))
    load_hf(directory)  # an index need not be complete
    both = iter([*odd_fields(directory / INDEX), *torn(directory / INDEX)])
    assert refusals(both, lambda: load_hf(directory))


@pytest.mark.parametrize('name', ['tokenizer_config.json', 'tokenizer.json'])
@pytest.mark.parametrize('damage', [odd_fields, torn])
def test_damaged_tokenizers(directory, name, damage):
    said = refusals(damage(directory / name), lambda: encode(directory))
    assert len(said) > 30
    assert all(str(directory) in sentence and '\n' not in sentence for sentence in said)
