"""The model of a run: its decoder, its weights from the place that model.source names, and its tokenizer.

formats/ reads the files, text_model.py has what needs no jax.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from areal_jax.app.model.earlier_run import EarlierRun
from areal_jax.app.model.text_model import (
    character_tokenizer,
    describe_text_model,
    gguf_file,
    gguf_tokenizer,
    hf_tokenizer,
    random_shape,
)
from areal_jax.app.parts.part_settings import build_mesh
from areal_jax.config import TrackedConfig
from areal_jax.files import Announce, announce_nothing
from areal_jax.formats.gguf import load_gguf
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.formats.hf_directory import load_hf_weights
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Params, logical_axes
from areal_jax.sharding.rules import param_shardings
from areal_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass
class Model:
    """A decoder with its initial weights and its tokenizer."""

    decoder: Decoder
    params: Params | None  # None: not loaded, or the learner has taken them
    tokenizer: Tokenizer
    source: pathlib.Path | None = None  # file or directory of the weights; None = drawn
    companions: pathlib.Path | None = None  # Hugging Face directory with the files of the tokenizer

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size


def build_model(config: TrackedConfig, announce: Announce = announce_nothing) -> Model:
    """Weights and tokenizer as model.source says; raises TokenizerError when the two do not fit.

    `announce` hears of the bytes that are read, and of all.
    """
    if config.model.source == 'gguf':
        file = gguf_file(config)
        model_config, params, fields = load_gguf(file, announce)
        tokenizer: Tokenizer = gguf_tokenizer(config, fields, file)
        model = Model(Decoder(model_config), params, tokenizer, file)
    elif config.model.source == 'hf':
        model = _load_hf_model(config, pathlib.Path(config.model.path), announce)
    elif config.model.source == 'run':
        model = _load_run_model(config, announce)
    else:
        tokenizer = character_tokenizer(config)
        decoder = Decoder(random_shape(config, tokenizer.vocab_size))
        params = decoder.init(config.run.seed, config.model.init_scale, config.model.embedding_scale)
        model = Model(decoder, params, tokenizer)
    model.tokenizer.fits(model.decoder.config.vocab_size)
    return model


def _load_hf_model(config: TrackedConfig, directory: pathlib.Path, announce: Announce) -> Model:
    """Loads each weight onto the learner's devices directly, in the learner's sharding."""
    decoder = Decoder(read_hf_config(directory))
    shardings = cut_params(config, decoder.config)(decoder.abstract())
    params = load_hf_weights(directory, decoder.config, shardings=shardings, announce=announce)
    return Model(decoder, params, hf_tokenizer(config, directory), directory, companions=directory)


def _load_run_model(config: TrackedConfig, announce: Announce) -> Model:
    """The weights of another run, with the tokenizer that it was trained with, unless model.chat_template is set."""
    run = EarlierRun(config.model.path)
    model = describe_model(config)
    run.require_shape(config, model.decoder.config)
    model.params = run.read_weights(model.decoder, cut_params(config, model.decoder.config), announce)
    model.source = run.checkpoint
    return model


def describe_model(config: TrackedConfig) -> Model:
    """Decoder and tokenizer that `build_model` would give, without weights; raises TokenizerError like it."""
    text = describe_text_model(config)
    return Model(Decoder(text.shape), None, text.tokenizer, companions=text.companions)


def cut_params(config: TrackedConfig, shape: ModelConfig) -> Callable[[Params], Params]:
    """A function from a tree in list form to the learner's sharding of each leaf."""
    return lambda tree: param_shardings(tree, logical_axes(shape), build_mesh(config), config.cluster.strategy)
