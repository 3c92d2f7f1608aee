"""Describes a model without its weights: its origin, its shape, its tokenizer. Imports no jax."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re

from ml_collections import config_dict

from areal_jax import files
from areal_jax.app.workdir.mirrored_run import locate_run
from areal_jax.app.workdir.run_directory import CHECKPOINTS
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config import CONFIG, TrackedConfig, default_config, flatten, validate
from areal_jax.config.declarations import set_free
from areal_jax.config.fields import ConfigError
from areal_jax.config.near_names import with_former
from areal_jax.config.objectives import find_objective
from areal_jax.config.sources import SOURCES
from areal_jax.files import JsonObject
from areal_jax.formats.gguf import describe_gguf, find_package_file, read_gguf_shape
from areal_jax.formats.hf_config import read_hf_config
from areal_jax.hub import is_hub_name, locate_model
from areal_jax.installation import PACKAGE, locate_file
from areal_jax.models.families import FAMILIES, ExpertFields, ModelConfig, default_kinds
from areal_jax.models.layer_parts import DeltaNet, Experts, LatentAttention, SigmoidRouter
from areal_jax.tasks.token_reversal import characters
from areal_jax.text.chat_template import GivenTemplate
from areal_jax.text.file_tokenizers import GgufTokenizer, HfTokenizer
from areal_jax.text.tokenizer import CharacterTokenizer, Tokenizer

# The part of another run's config.json that describes its model.


FIELD = 'model.path'
# the fields of that run's config that determine its weights and tokenizer
_READ = ('model.', 'lora.', 'task.symbols', 'loss.objective', 'learner.row_tokens', 'rollout.context_tokens')


def split_checkpoint(path: str) -> tuple[pathlib.Path, str | None]:
    """Splits a path to either into (workdir, name of the checkpoint's directory); the name is None for a workdir.

    A run in a mirror is fetched first; see locate_run.
    """
    given = locate_run(path)
    whole = given.absolute()
    if whole.parent.name == CHECKPOINTS and re.fullmatch(r'step_\d+(_\d+)?', whole.name):
        return given.parent.parent if len(given.parts) > 2 else whole.parent.parent, whole.name
    return given, None


def read_run_config(path: str, field: str = FIELD) -> TrackedConfig:
    """Reads the config fields of a run that describe its model; raises ConfigError for a path that is no run."""
    workdir, _ = split_checkpoint(path)
    file, fix = workdir / CONFIG, 'restore the file as the run wrote it'
    values = files.read_json(file, fix) if file.is_file() else {}
    if not isinstance(values.get('model'), dict):  # a directory of Hugging Face has a config.json too
        files_of_a_model = "; a directory of Hugging Face files needs model.source='hf'" if field == FIELD else ''
        raise ConfigError(
            f'{field}={path!r} is no run: {workdir} has no {CONFIG} of one. Give the --workdir of a run, or one of its '
            f'checkpoints, WORKDIR/{CHECKPOINTS}/step_...{files_of_a_model}'
        )
    if values.get('simulation', {}).get('prices'):
        raise ConfigError(f'{field}={path!r} is a simulation, which has no weights: name a run of areal-train')
    config = default_config()
    known = dict(flatten(config))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in flatten(with_former(values))}
    for name in given:
        if name.startswith(f'{SOURCES}.'):
            set_free(config, name, given[name])
    try:
        config.update_from_flattened_dict(
            {name: value for name, value in given.items() if name.startswith(_READ) and name in known}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f'{file} holds a value of another type than its field ({error}): {fix}') from error
    return TrackedConfig(config)


def find_checkpoint(path: str) -> pathlib.Path:
    """Returns the checkpoint that the path names, or the newest one of that run; does not check whether it is intact.

    Raises ConfigError for a run without a checkpoint, CheckpointError for a checkpoint that does not exist.
    """
    workdir, name = split_checkpoint(path)
    store = CheckpointStore(workdir / CHECKPOINTS)
    newest = store.latest()
    if newest is None:
        raise ConfigError(
            f'{FIELD}={path!r} holds no checkpoint: let that run end, or stop it with Ctrl-C, which saves one'
        )
    return store.path(name or newest)


# The chat template that model.chat_template sets in place of the one that came with the weights.


_LARGEST_BYTES = 2**20


def read_given_template(config: TrackedConfig) -> GivenTemplate | None:
    """Looks for a template in the config, then in the run it starts from, recursively. None: the model has its own.

    Raises ConfigError for a file that is missing or cannot be read.
    """
    runs: list[str] = []
    while not (value := config.model.chat_template) and config.model.source == 'run' and config.model.path not in runs:
        runs.append(config.model.path)
        config = read_run_config(config.model.path)
    if not value:
        return None
    place = f'model.chat_template={value!r}'
    try:
        path = locate_file(value) if value.startswith(PACKAGE) else pathlib.Path(value)
        if not path.is_file():
            raise ConfigError(f'{place}: there is no file {str(path)!r}; name one with a template in jinja2')
        if (size := path.stat().st_size) > _LARGEST_BYTES:
            raise ConfigError(f'{place} has {size} bytes, more than {_LARGEST_BYTES}: name a file with a template')
        return GivenTemplate(path.read_text(encoding='utf-8'), place)
    except (OSError, ValueError) as error:  # also bytes that are no UTF-8, and a path that no file can have
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f'{place} cannot be read ({error}): name a text file in UTF-8') from error


# What the host side needs of a model: its shape, its tokenizer and the path of its weights. model.py loads them.


@dataclasses.dataclass(frozen=True)
class TextModel:
    """The shape of a model, and its tokenizer."""

    shape: ModelConfig
    tokenizer: Tokenizer
    companions: pathlib.Path | None = None  # Hugging Face directory with the files of the tokenizer


def describe_text_model(config: TrackedConfig) -> TextModel:
    """Returns the shape and tokenizer of the model that model.source names.

    Raises TokenizerError if the two do not fit, and ConfigError for a chat template that cannot be read.
    """
    own, config = config, find_origin(config)
    if config.model.source == 'gguf':
        file = gguf_file(config)
        shape, fields = describe_gguf(file)
        return TextModel(shape, gguf_tokenizer(own, fields, file))
    if config.model.source == 'hf':
        directory = hf_directory(config)
        return TextModel(read_hf_config(directory), hf_tokenizer(own, directory), directory)
    if (template := read_given_template(own)) is not None:
        raise ConfigError(f"{template.place} is of no use with model.source='random', which drew this model: remove it")
    tokenizer = character_tokenizer(config)
    return TextModel(random_shape(config, tokenizer.vocab_size), tokenizer)


def gguf_tokenizer(config: TrackedConfig, fields: JsonObject, file: pathlib.Path) -> GgufTokenizer:
    """Makes a tokenizer from a GGUF file's fields and the config; raises like `describe_text_model`."""
    template, all_ends = read_given_template(config), config.model.ends == 'all'
    return GgufTokenizer(fields, str(file), template, all_ends=all_ends, day=config.model.template_date)


def hf_tokenizer(config: TrackedConfig, directory: pathlib.Path) -> HfTokenizer:
    """Makes a tokenizer from a Hugging Face directory and the config; raises like `describe_text_model`."""
    template, all_ends = read_given_template(config), config.model.ends == 'all'
    return HfTokenizer(directory, template, all_ends=all_ends, day=config.model.template_date)


def read_shape(config: TrackedConfig) -> ModelConfig:
    """Reads the model's shape, without weights; raises ConfigError if it has fewer positions than a sequence."""
    origin = find_origin(config)
    if origin.model.source == 'gguf':
        return read_gguf_shape(gguf_file(origin))
    if origin.model.source == 'hf':
        return read_hf_config(hf_directory(origin))
    shape = random_shape(origin, character_tokenizer(origin).vocab_size)
    if shape.plain and _longest(config) > shape.context_tokens:
        raise ConfigError(
            f'model.path={config.model.path!r} has learned positions for {shape.context_tokens} tokens, and '
            f'{_longest_field(config)}={_longest(config)} asks for more: lower it'
        )
    return shape


def require_rules_of_origin(config: config_dict.ConfigDict) -> None:
    """Raises ConfigError if a run that starts from another run breaks a rule for the model of the first run."""
    if config.model.source == 'run':
        origin = find_origin(TrackedConfig(config))
        started = config.copy_and_resolve_references()
        started.model.update(origin.as_dict()['model'])
        validate(started)


def describe_loading(config: TrackedConfig) -> str:
    """Returns a phrase for `build_model`'s work: 'loading model.gguf'."""
    if config.model.source == 'random':
        return 'drawing weights'
    return f'loading {pathlib.PurePath(config.model.path.removeprefix("package:")).name}'


def find_source(config: TrackedConfig) -> pathlib.Path | None:
    """Returns the file or directory that holds the weights; None = they are drawn.

    Raises ConfigError for a run without a checkpoint.
    """
    if config.model.source == 'random':
        return None
    if config.model.source == 'gguf':
        return gguf_file(config)
    if config.model.source == 'hf':
        return hf_directory(config, weights=True)
    return find_checkpoint(config.model.path)


def describe_source(config: TrackedConfig, source: pathlib.Path | None) -> tuple[str, str]:
    """Returns (a name for weights that are not finite, the fix), for an error message."""
    if source is None:
        drawn = f'weights drawn with model.init_scale={config.model.init_scale:g}'
        if (scale := config.model.embedding_scale) != 1.0:
            return f'{drawn} and model.embedding_scale={scale:g}', 'lower one of them'
        return drawn, 'lower it'
    return f'model.path={str(source)!r}', 'get the files again or name another model'


def find_origin(config: TrackedConfig) -> TrackedConfig:
    """Follows model.source='run' to the first run of the chain; that run's config gives shape and tokenizer."""
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


def hf_directory(config: TrackedConfig, *, weights: bool = False) -> pathlib.Path:
    """Returns the directory of Hugging Face files; of a model of the Hub, in its cache. Raises HubError."""
    path = config.model.path
    return locate_model(FIELD, path, weights=weights) if is_hub_name(path) else pathlib.Path(path)


def character_tokenizer(config: TrackedConfig) -> CharacterTokenizer:
    known = config.model.characters or characters(max(task.symbols for task in config.list_tasks().values()))
    return CharacterTokenizer(known, has_eos=config.model.outputs == 'all')


def random_shape(config: TrackedConfig, vocab_size: int) -> ModelConfig:
    plain = config.model.family == 'plain'
    name = 'llama' if plain else config.model.family
    family, longest = FAMILIES[name], _longest(config)
    biases = {'qkv_bias': True, 'output_bias': True} if family.biased else {}
    latent = _random_latent(config, family.latent) if family.latent else None
    return ModelConfig(
        vocab_size=vocab_size,
        d_model=config.model.d_model,
        n_layers=config.model.n_layers,
        n_heads=config.model.n_heads,
        n_kv_heads=config.model.n_heads if latent else config.model.n_kv_heads,
        head_dim=latent.head_dim if latent else config.model.head_dim,
        d_ff=config.model.d_expert if family.experts and not family.experts.has_dense else config.model.d_ff,
        rope_theta=config.model.rope_theta,
        context_tokens=longest,
        family=name,
        plain=plain,
        output_size=config.task.symbols if config.model.outputs == 'symbols' else None,
        tie_embeddings=not plain,
        kinds=default_kinds(name, config.model.n_layers, max(1, longest // 4)),
        embedding_factor=math.sqrt(config.model.d_model) if family.scales_embedding else 1.0,
        experts=_random_experts(config, family.experts) if family.experts else None,
        rotary_dim=latent.rotated_dim if latent else _part_of(config.model.head_dim, family.rotary_fraction),
        latent=latent,
        score_scale=latent.scale if latent else None,
        delta=_random_delta(config) if family.delta else None,
        **family.switches | biases,
    )


def _random_experts(config: TrackedConfig, fields: ExpertFields) -> Experts:
    sizes = config.model.experts, config.model.experts_per_token, config.model.d_expert
    has_shared = fields.d_shared is not None or fields.shared is not None
    return Experts(
        *sizes,
        dense_layers=tuple(range(min(fields.dense_first or 0, config.model.n_layers - 1))),
        swiglu=fields.swiglu,
        d_shared=config.model.d_expert if has_shared else 0,
        sigmoid=fields.sigmoid and SigmoidRouter(scale=fields.sigmoid.scale),
    )


def _random_latent(config: TrackedConfig, default: LatentAttention) -> LatentAttention:
    """Heads as attention has them, with a rotated part behind each, and latents as long as two heads."""
    size = config.model.head_dim
    return LatentAttention(2 * size, size, max(2, size // 4 * 2), size, 2 * size if default.query_rank else 0)


def _random_delta(config: TrackedConfig) -> DeltaNet:
    """Heads as attention has them: values like its queries."""
    size = config.model.head_dim
    return DeltaNet(config.model.n_kv_heads, config.model.n_heads, size, size)


def _part_of(head_dim: int, fraction: float) -> int | None:
    """The numbers of a head that are rotated, an even number; None = all."""
    return None if fraction == 1.0 else max(2, int(head_dim * fraction) // 2 * 2)


def _longest(config: TrackedConfig) -> int:
    """The largest number of tokens in one sequence, even if nothing is trained."""
    config.note_used(('loss.objective', _longest_field(config)))
    return (
        config.rollout.context_tokens if find_objective(config.loss.objective).generates else config.learner.row_tokens
    )


def _longest_field(config: TrackedConfig) -> str:
    return 'learner.row_tokens' if not find_objective(config.loss.objective).generates else 'rollout.context_tokens'
