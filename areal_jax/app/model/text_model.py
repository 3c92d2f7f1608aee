"""What the host side needs of a model: its shape, its tokenizer and where its weights are. Needs no jax.

model.py adds decoder and weights.
"""

from __future__ import annotations

import dataclasses
import pathlib

from ml_collections import config_dict

from areal_jax.app.model.given_template import read_given_template
from areal_jax.app.model.run_config import find_checkpoint, read_run_config
from areal_jax.config import TrackedConfig, validate
from areal_jax.config.objectives import find_objective
from areal_jax.config.ranges import ConfigError
from areal_jax.files import JsonObject
from areal_jax.formats.gguf import describe_gguf, find_package_file, read_gguf_shape
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.models.families import FAMILIES
from areal_jax.models.shape import Experts, ModelConfig
from areal_jax.tasks.token_reversal import characters
from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class TextModel:
    """The shape of a model, and its tokenizer."""

    shape: ModelConfig
    tokenizer: Tokenizer
    companions: pathlib.Path | None = None  # Hugging Face directory with the files of the tokenizer


def describe_text_model(config: TrackedConfig) -> TextModel:
    """Shape and tokenizer of the model that model.source names.

    Raises TokenizerError where the two do not fit, and ConfigError for a chat template that cannot be read.
    """
    own, config = config, find_origin(config)
    if config.model.source == 'gguf':
        file = gguf_file(config)
        shape, fields = describe_gguf(file)
        return TextModel(shape, gguf_tokenizer(own, fields, file))
    if config.model.source == 'hf':
        directory = pathlib.Path(config.model.path)
        return TextModel(read_hf_config(directory), hf_tokenizer(own, directory), directory)
    if (template := read_given_template(own)) is not None:
        raise ConfigError(f"{template.place} is of no use with model.source='random', which drew this model: remove it")
    tokenizer = character_tokenizer(config)
    return TextModel(random_shape(config, tokenizer.vocab_size), tokenizer)


def gguf_tokenizer(config: TrackedConfig, fields: JsonObject, file: pathlib.Path) -> GgufTokenizer:
    """Of the fields of a file, as the config of a run wants it; raises as `describe_text_model` does."""
    template, all_ends = read_given_template(config), config.model.ends == 'all'
    return GgufTokenizer(fields, str(file), template, all_ends=all_ends, day=config.model.template_date)


def hf_tokenizer(config: TrackedConfig, directory: pathlib.Path) -> HfTokenizer:
    """The same of a Hugging Face directory."""
    template, all_ends = read_given_template(config), config.model.ends == 'all'
    return HfTokenizer(directory, template, all_ends=all_ends, day=config.model.template_date)


def read_shape(config: TrackedConfig) -> ModelConfig:
    """The shape of the model, without its weights; raises ConfigError where it has fewer positions than a sequence."""
    origin = find_origin(config)
    if origin.model.source == 'gguf':
        return read_gguf_shape(gguf_file(origin))
    if origin.model.source == 'hf':
        return read_hf_config(pathlib.Path(origin.model.path))
    shape = random_shape(origin, character_tokenizer(origin).vocab_size)
    if shape.plain and _longest(config) > shape.context_tokens:
        raise ConfigError(
            f'model.path={config.model.path!r} has learned positions for {shape.context_tokens} tokens, and '
            f'{_longest_field(config)}={_longest(config)} asks for more: lower it'
        )
    return shape


def require_rules_of_origin(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError where a run from another run breaks a rule of the model which that one drew."""
    if config.model.source == 'run':
        origin = find_origin(TrackedConfig(config))
        started = config.copy_and_resolve_references()
        started.model.update(origin.as_dict()['model'])
        validate(started)


def describe_loading(config: TrackedConfig) -> str:
    """'loading model.gguf': what `build_model` does."""
    if config.model.source == 'random':
        return 'drawing weights'
    return f'loading {pathlib.PurePath(config.model.path.removeprefix("package:")).name}'


def find_source(config: TrackedConfig) -> pathlib.Path | None:
    """The file or directory that holds the weights; None = they are drawn.

    Raises ConfigError for a run without a checkpoint.
    """
    if config.model.source == 'random':
        return None
    if config.model.source == 'gguf':
        return gguf_file(config)
    if config.model.source == 'hf':
        return pathlib.Path(config.model.path)
    return find_checkpoint(config.model.path)


def describe_source(config: TrackedConfig, source: pathlib.Path | None) -> tuple[str, str]:
    """(what weights that are not finite are called, what to do then)."""
    if source is None:
        drawn = f'weights drawn with model.init_scale={config.model.init_scale:g}'
        if (scale := config.model.embedding_scale) != 1.0:
            return f'{drawn} and model.embedding_scale={scale:g}', 'lower one of them'
        return drawn, 'lower it'
    return f'model.path={str(source)!r}', 'get the files again or name another model'


def find_origin(config: TrackedConfig) -> TrackedConfig:
    """Follows model.source='run' to the first run of the chain; its config gives shape and tokenizer."""
    runs: list[str] = []
    while config.model.source == 'run':
        path = config.model.path
        if path in runs:
            raise ConfigError(f'{runs[-1]} started from {path}, which started from it: their config.json were changed')
        runs.append(path)
        config = read_run_config(path)
    return config


def gguf_file(config: TrackedConfig) -> pathlib.Path:
    path = config.model.path
    return find_package_file(path) if path.startswith('package:') else pathlib.Path(path)


def character_tokenizer(config: TrackedConfig) -> CharacterTokenizer:
    known = config.model.characters or characters(config.task.symbols)
    return CharacterTokenizer(known, has_eos=config.model.outputs == 'all')


def random_shape(config: TrackedConfig, vocab_size: int) -> ModelConfig:
    plain = config.model.family == 'plain'
    family = FAMILIES.get(config.model.family, FAMILIES['llama'])
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=config.model.d_model,
        n_layers=config.model.n_layers,
        n_heads=config.model.n_heads,
        n_kv_heads=config.model.n_kv_heads,
        head_dim=config.model.head_dim,
        d_ff=config.model.d_expert if family.experts and not family.experts.has_dense_layers else config.model.d_ff,
        rope_theta=config.model.rope_theta,
        context_tokens=_longest(config),
        family='llama' if plain else config.model.family,
        plain=plain,
        output_size=config.task.symbols if config.model.outputs == 'symbols' else None,
        tie_embeddings=not plain,
        experts=_random_experts(config) if family.experts else None,
        **family.switches,
    )


def _random_experts(config: TrackedConfig) -> Experts:
    return Experts(config.model.experts, config.model.experts_per_token, config.model.d_expert)


def _longest(config: TrackedConfig) -> int:
    """The most tokens of one sequence."""
    return (
        config.learner.row_tokens
        if not find_objective(config.loss.objective).generates
        else config.rollout.context_tokens
    )


def _longest_field(config: TrackedConfig) -> str:
    return 'learner.row_tokens' if not find_objective(config.loss.objective).generates else 'rollout.context_tokens'
