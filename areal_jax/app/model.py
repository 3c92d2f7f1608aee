"""The model of a run: its decoder, its weights from the place that model.source names, and its tokenizer.

Used by run.py, processes.py and sizes.py; formats/ reads the files.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from areal_jax.app.build import build_mesh
from areal_jax.app.earlier_run import EarlierRun, read_run_config
from areal_jax.config import TrackedConfig
from areal_jax.config.ranges import ConfigError
from areal_jax.formats.gguf import describe_gguf, find_package_file, load_gguf, read_gguf_shape
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.formats.hf_directory import load_hf_weights
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Params, logical_axes
from areal_jax.sharding.rules import param_shardings
from areal_jax.tasks.token_reversal import characters
from areal_jax.tasks.tokenizer import CharacterTokenizer, GgufTokenizer, HfTokenizer, Tokenizer


@dataclasses.dataclass
class Model:
    """A decoder with its initial weights and its tokenizer."""

    decoder: Decoder
    params: Params | None  # None: not loaded, or the learner has taken them
    tokenizer: Tokenizer
    source: pathlib.Path | None = None  # file or directory of the weights; None = drawn
    companions: pathlib.Path | None = None  # Hugging Face directory with the files of the tokenizer


def read_shape(config: TrackedConfig) -> ModelConfig:
    """The shape of the model, without its weights."""
    config = _find_origin(config)
    if config.model.source == 'gguf':
        return read_gguf_shape(_gguf_file(config))
    if config.model.source == 'hf':
        return read_hf_config(pathlib.Path(config.model.path))
    return _random_shape(config, _character_tokenizer(config).vocab_size)


def _gguf_file(config: TrackedConfig) -> pathlib.Path:
    path = config.model.path
    return find_package_file(path) if path.startswith('package:') else pathlib.Path(path)


def describe_loading(config: TrackedConfig) -> str:
    """'loading model.gguf': what `build_model` does."""
    if config.model.source == 'random':
        return 'drawing weights'
    return f'loading {pathlib.PurePath(config.model.path.removeprefix("package:")).name}'


def build_model(config: TrackedConfig) -> Model:
    """Weights and tokenizer as model.source says; raises TokenizerError when the two do not fit."""
    if config.model.source == 'gguf':
        file = _gguf_file(config)
        model_config, params, fields = load_gguf(file)
        model = Model(Decoder(model_config), params, GgufTokenizer(fields, str(file)), file)
    elif config.model.source == 'hf':
        model = _load_hf_model(config, pathlib.Path(config.model.path))
    elif config.model.source == 'run':
        model = _load_run_model(config)
    else:
        decoder, tokenizer = _random_decoder(config)
        model = Model(decoder, decoder.init(config.run.seed, config.model.init_scale), tokenizer)
    model.tokenizer.fits(model.decoder.config.vocab_size)
    return model


def _load_hf_model(config: TrackedConfig, directory: pathlib.Path) -> Model:
    """Loads each weight onto the learner's devices directly, in the learner's sharding."""
    decoder = Decoder(read_hf_config(directory))
    shardings = _cut_params(config, decoder.config)(decoder.abstract())
    params = load_hf_weights(directory, decoder.config, shardings=shardings)
    return Model(decoder, params, HfTokenizer(directory), directory, companions=directory)


def _load_run_model(config: TrackedConfig) -> Model:
    """The weights of another run, with the tokenizer that it was trained with."""
    run = EarlierRun(config.model.path)
    model = describe_model(run.config)
    run.require_shape(config, model.decoder.config)
    model.params = run.read_weights(model.decoder, _cut_params(config, model.decoder.config))
    model.source = run.checkpoint
    return model


def _find_origin(config: TrackedConfig) -> TrackedConfig:
    """Follows model.source='run' to the first run of the chain; its config gives shape and tokenizer."""
    runs: list[str] = []
    while config.model.source == 'run':
        path = config.model.path
        if path in runs:
            raise ConfigError(f'{runs[-1]} started from {path}, which started from it: their config.json were changed')
        runs.append(path)
        config = read_run_config(path)
    return config


def describe_model(config: TrackedConfig) -> Model:
    """Decoder and tokenizer that `build_model` would give, without weights; raises TokenizerError like it."""
    config = _find_origin(config)
    if config.model.source == 'gguf':
        file = _gguf_file(config)
        shape, fields = describe_gguf(file)
        return Model(Decoder(shape), None, GgufTokenizer(fields, str(file)))
    if config.model.source == 'hf':
        directory = pathlib.Path(config.model.path)
        return Model(Decoder(read_hf_config(directory)), None, HfTokenizer(directory), companions=directory)
    decoder, tokenizer = _random_decoder(config)
    return Model(decoder, None, tokenizer)


def _cut_params(config: TrackedConfig, shape: ModelConfig) -> Callable[[Params], Params]:
    """A function from a tree in list form to the learner's sharding of each leaf."""
    return lambda tree: param_shardings(tree, logical_axes(shape), build_mesh(config), config.cluster.strategy)


def _random_decoder(config: TrackedConfig) -> tuple[Decoder, Tokenizer]:
    tokenizer = _character_tokenizer(config)
    return Decoder(_random_shape(config, tokenizer.vocab_size)), tokenizer


def _character_tokenizer(config: TrackedConfig) -> CharacterTokenizer:
    return CharacterTokenizer(config.model.characters or characters(config.task.symbols))


def _random_shape(config: TrackedConfig, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=config.model.d_model,
        n_layers=config.model.n_layers,
        n_heads=config.model.n_heads,
        n_kv_heads=config.model.n_kv_heads,
        head_dim=config.model.head_dim,
        d_ff=config.model.d_ff,
        rope_theta=config.model.rope_theta,
        context_tokens=_longest(config),
        family=config.model.family,
        qkv_bias=config.model.family == 'qwen2',
        qk_norm=config.model.family == 'qwen3',
        learned_positions=config.model.positions == 'learned',
        tie_embeddings=config.model.tie_embeddings,
    )


def _longest(config: TrackedConfig) -> int:
    """The most tokens of one sequence."""
    return config.learner.row_tokens if config.loss.objective == 'sft' else config.rollout.context_tokens
