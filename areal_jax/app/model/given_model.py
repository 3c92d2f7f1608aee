"""Models beside the policy: a reference, a teacher or the start of a critic, each a Hugging Face directory."""

from __future__ import annotations

import dataclasses
import pathlib

from areal_jax.app.model.model import Model, cut_params
from areal_jax.config import TrackedConfig
from areal_jax.config.ranges import ConfigError
from areal_jax.formats.hf_config import HfError, read_hf_config
from areal_jax.formats.hf_directory import load_hf_weights
from areal_jax.formats.safetensors_file import SafetensorsError, ValueHead, read_value_head
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Params
from areal_jax.text.file_tokenizers import HfTokenizer
from areal_jax.text.tokenizer import TOKENIZER, Tokenizer, TokenizerError

_ASIDE = ('context_tokens', 'family')  # of a shape: change neither weights nor computation


@dataclasses.dataclass(frozen=True)
class GivenModel:
    """Where the model is, and its shape."""

    field: str  # of the config, that names the directory
    directory: pathlib.Path
    shape: ModelConfig

    def load(self, config: TrackedConfig, dtype: str) -> Params:
        """Its weights in list form and `dtype`, in the learner's sharding; raises ConfigError for bad files."""
        shardings = cut_params(config, self.shape)(Decoder(self.shape).abstract())
        try:
            return load_hf_weights(self.directory, self.shape, shardings=shardings, dtype=dtype)
        except HfError as error:
            raise ConfigError(f'{self.field}: {error}') from error

    def load_value_head(self) -> ValueHead | None:
        """The value head that was exported with it, or None; raises ConfigError for a bad file."""
        try:
            return read_value_head(self.directory, self.shape.d_model)
        except SafetensorsError as error:
            raise ConfigError(f'{self.field}: {error}') from error


def read_given_model(config: TrackedConfig, field: str, model: Model) -> GivenModel:
    """The model that `field` names; raises ConfigError for a directory that holds none, or one of other tokens."""
    given = describe_given_model(config, field)
    _require_same_tokens(given, model)
    return given


def describe_given_model(config: TrackedConfig, field: str) -> GivenModel:
    """The same before the trained model is known; raises ConfigError for a directory that holds none."""
    section, _, name = field.partition('.')
    value: str = getattr(getattr(config, section), name)
    directory = pathlib.Path(value)
    if not directory.is_dir():
        raise ConfigError(f'{field}={value!r} is no directory: name one of Hugging Face, with config.json and weights')
    try:
        return GivenModel(field, directory, read_hf_config(directory))
    except HfError as error:
        raise ConfigError(f'{field}={value!r}: {error}') from error


def require_same_shape(given: GivenModel, field: str, shape: ModelConfig) -> None:
    """Raises ConfigError where the model is another architecture than the trained one, or has other sizes."""
    theirs, ours = (
        {name: value for name, value in dataclasses.asdict(one).items() if name not in _ASIDE}
        for one in (given.shape, shape)
    )
    for name, value in theirs.items():
        if value != ours[name]:
            raise ConfigError(
                f'{field}={str(given.directory)!r} has {name}={value}, and the model that is trained '
                f'{ours[name]}: name a directory of the same architecture'
            )


def _require_same_tokens(given: GivenModel, model: Model) -> None:
    """Raises ConfigError for a vocabulary in which the ids of the trained model mean something else."""
    where, ours = f'{given.field}={str(given.directory)!r}', model.decoder.config.vocab_size
    if given.shape.vocab_size != ours:
        raise ConfigError(
            f'{where} has a vocabulary of {given.shape.vocab_size} tokens, and the model that is trained one of '
            f'{ours}: both read the same tokens; name a model with the same vocabulary'
        )
    if not (given.directory / TOKENIZER).is_file():
        return
    try:
        theirs = HfTokenizer(given.directory)
    except TokenizerError as error:
        raise ConfigError(f'{where}: {error}') from error
    if different := _find_difference(model.tokenizer, theirs):
        raise ConfigError(
            f'{where} has another vocabulary than the model that is trained: {different}; name a model with the same '
            'tokenizer'
        )


def _find_difference(ours: Tokenizer, theirs: HfTokenizer) -> str:
    """A token with two ids, in words; '' where there is none, or ours has no list of tokens."""
    vocabulary = getattr(ours, 'vocabulary', None)
    if vocabulary is None:
        return ''
    known, other = vocabulary(), theirs.vocabulary()
    for token, index in sorted(known.items(), key=lambda item: item[1]):
        if other.get(token) != index:
            return f'{token!r} is token {index} here and {other.get(token)} there'
    return ''
