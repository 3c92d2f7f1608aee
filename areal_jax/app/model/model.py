"""The models of a run: the trained one, with weights and tokenizer, and others that the config names."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from areal_jax.app.model.text_model import (
    FIELD,
    character_tokenizer,
    describe_text_model,
    gguf_file,
    gguf_tokenizer,
    hf_directory,
    hf_tokenizer,
    random_shape,
    read_run_config,
    split_checkpoint,
)
from areal_jax.app.workdir.run_directory import CHECKPOINTS
from areal_jax.checkpoint.shards import StoredArray
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config import CONFIG, TrackedConfig, default_config
from areal_jax.config.cluster import parse_learner
from areal_jax.config.fields import ConfigError
from areal_jax.config.loss import COPIED_CRITIC
from areal_jax.files import Announce, announce_nothing
from areal_jax.formats.gguf import load_gguf
from areal_jax.formats.hf_config import HfError, read_hf_config
from areal_jax.formats.hf_directory import load_hf_weights
from areal_jax.formats.safetensors_file import SafetensorsError, ValueHead, read_value_head
from areal_jax.hub import is_hub_name, locate_model
from areal_jax.learning import weights as trees
from areal_jax.learning.objective.objective import FROM_TEACHER, REFERENCE
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.weights import CRITIC, VALUE_HEAD, make_value_head, policy_leaves
from areal_jax.models.decoder import Decoder
from areal_jax.models.families import ModelConfig
from areal_jax.models.weights import Lora, Params, logical_axes, merge_adapters
from areal_jax.sharding.placement import place_regions
from areal_jax.sharding.rules import mesh_of, param_shardings, path_name
from areal_jax.text.file_tokenizers import HfTokenizer
from areal_jax.text.tokenizer import TOKENIZER, Tokenizer, TokenizerError

_SHAPE = ('family', 'n_layers', 'd_model', 'd_ff', 'n_heads', 'n_kv_heads', 'head_dim', 'rope_theta')
_PARAMS = 'params'  # in the arrays of a checkpoint


class EarlierRun:
    """The run of a workdir, at one of its checkpoints.

    A newer checkpoint that is damaged is skipped, with a message on stderr.

    Args:
      path: the workdir, or one of its checkpoints, WORKDIR/checkpoints/step_00000012.
      step: which checkpoint; None = the one that `path` names, or the newest that is intact.
      field: the config field or flag that gave the path, for errors.

    Raises ConfigError for a path that is not of a run, and for a run without a checkpoint; CheckpointError for a step
    that does not exist (it names the existing ones), for a damaged checkpoint, and if no checkpoint is intact.
    """

    def __init__(self, path: str, step: int | None = None, field: str = FIELD):
        self.workdir, name = split_checkpoint(path)
        self.config = read_run_config(path, field)
        store = CheckpointStore(self.workdir / CHECKPOINTS)
        if store.latest() is None:
            raise ConfigError(
                f'{field}={path!r} holds no checkpoint: let that run end, or stop it with Ctrl-C, which saves one'
            )
        if name and step is not None:
            raise ConfigError(f'{field}={path!r} names a checkpoint already, and the step {step}: give one of them')
        if (chosen := name or step) is None:
            self.checkpoint, arrays = store.read_latest(_PARAMS)
        else:
            self.checkpoint, arrays = store.path(chosen), store.restore(chosen)[0]
        self.step = int(self.checkpoint.name.split('_')[1])
        self._params = policy_leaves(arrays[_PARAMS])
        self._critic = arrays[_PARAMS].get(CRITIC)

    def require_shape(self, config: TrackedConfig, shape: ModelConfig) -> None:
        """Raises ConfigError for a field of model.* that is set and differs from the shape of that run's model."""
        for field in _SHAPE:
            value, theirs = getattr(config.model, field), getattr(shape, field)
            if value not in (default_config().model[field], theirs):
                raise ConfigError(
                    f'model.{field}={value!r} is another architecture than that of {FIELD}={str(self.workdir)!r}, '
                    f'which has {theirs!r}: remove the setting'
                )

    def read_weights(
        self, decoder: Decoder, cut: Callable[[Params], Params], announce: Announce = announce_nothing
    ) -> Params:
        """Reads the run's weights in float32 and list form, with LoRA adapters merged.

        Each process reads only the shards of its devices.

        Args:
          cut: maps a tree of shapes to the tree of their shardings.
          announce: is called with the bytes read and the total.

        Raises ConfigError if the stored names or shapes differ from the decoder's weights, and CheckpointError for a
        damaged checkpoint.
        """
        adapters = build_lora(self.config)
        expected = Decoder(decoder.config, lora=adapters).abstract()
        self._require_leaves(self._params, expected)
        count = lambda leaf: 4 * math.prod(leaf.shape)  # float32
        done, total = 0, sum(map(count, jax.tree.leaves(self._params)))

        def place(leaf: StoredArray, sharding: jax.sharding.Sharding) -> jax.Array:
            nonlocal done
            announce(done, total)
            done += count(leaf)
            return place_regions(leaf.__getitem__, leaf.shape, sharding)

        params = trees.cast(jax.tree.map(place, self._params, cut(expected)), 'float32')
        return merge_adapters(params, adapters) if adapters else params

    def read_critic(self) -> Params | None:
        """Returns the critic's weights in float32 on the host, with the value head; None for a run without a critic."""
        whole = lambda leaf: leaf[tuple(slice(0, size) for size in leaf.shape)]
        return jax.tree.map(lambda leaf: np.asarray(whole(leaf), np.float32), self._critic)

    def _require_leaves(self, stored: Params, expected: Params) -> None:
        found, wanted = (
            {path_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
            for tree in (stored, expected)
        )
        if different := sorted(set(found.items()) ^ set(wanted.items())):
            raise ConfigError(
                f'{self.checkpoint} does not hold the model that {self.workdir / CONFIG} describes; '
                f'{len(different)} names or shapes differ, the first {different[0]}'
            )


def build_lora(config: TrackedConfig) -> Lora | None:
    """Returns the section `lora` as the decoder takes it; None without adapters."""
    lora = config.lora
    return Lora(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank else None


# The model of a run. formats/ reads the files; text_model.py has the part that needs no jax.


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
    """Builds the weights and tokenizer that model.source names; raises TokenizerError if the two do not fit.

    `announce` is called with the bytes read and the total.
    """
    if config.model.source == 'gguf':
        file = gguf_file(config)
        model_config, params, fields = load_gguf(file, announce)
        tokenizer: Tokenizer = gguf_tokenizer(config, fields, file)
        model = Model(Decoder(model_config), params, tokenizer, file)
    elif config.model.source == 'hf':
        model = _load_hf_model(config, hf_directory(config, weights=True), announce)
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
    """Returns the decoder and tokenizer of `build_model`, without weights; raises TokenizerError like it."""
    text = describe_text_model(config)
    return Model(Decoder(text.shape), None, text.tokenizer, companions=text.companions)


def cut_params(config: TrackedConfig, shape: ModelConfig) -> Callable[[Params], Params]:
    """Returns a function that maps a tree in list form to the learner's sharding of each leaf."""
    mesh = mesh_of(parse_learner(config.cluster.learner))
    return lambda tree: param_shardings(tree, logical_axes(shape), mesh, config.cluster.strategy)


# Other models than the policy: a reference, a teacher or the start of a critic, each a Hugging Face directory.


_ASIDE = ('context_tokens', 'family')  # fields of a shape that change neither weights nor computation


@dataclasses.dataclass(frozen=True)
class GivenModel:
    """The directory of a model that the config names, and its shape."""

    field: str  # of the config, names the directory
    directory: pathlib.Path
    shape: ModelConfig

    def load(self, config: TrackedConfig, dtype: str) -> Params:
        """Loads its weights in list form and `dtype`, in the learner's sharding; raises ConfigError for bad files."""
        shardings = cut_params(config, self.shape)(Decoder(self.shape).abstract())
        try:
            return load_hf_weights(self.directory, self.shape, shardings=shardings, dtype=dtype)
        except HfError as error:
            raise ConfigError(f'{self.field}: {error}') from error

    def load_value_head(self) -> ValueHead | None:
        """Returns the value head that was exported with it, or None; raises ConfigError for a bad file."""
        try:
            return read_value_head(self.directory, self.shape.d_model)
        except SafetensorsError as error:
            raise ConfigError(f'{self.field}: {error}') from error


@dataclasses.dataclass(frozen=True)
class OtherModels:
    """Weights that a learner reads in addition to the policy; None if its objective does not read them."""

    reference: Params | None  # None also: the policy's initial weights
    teacher: tuple[Decoder, Params] | None  # may be of another architecture
    critic: Params | None  # a value head, with the critic's weights if it is a separate model


def load_other_models(config: TrackedConfig, model: Model, settings: LearnerSettings) -> OtherModels:
    """Loads loss.reference, loss.teacher and critic.model if the objective reads them.

    Raises ConfigError for a directory without a model, and for a model with other tokens or sizes.
    """
    reference = teacher = None
    reads, dtype = settings.objective.reads, settings.learner.dtype
    if REFERENCE in reads and config.loss.reference:
        reference = _read_same_shape(config, 'loss.reference', model).load(config, dtype)
    if reads & FROM_TEACHER and config.loss.teacher:
        given = read_given_model(config, 'loss.teacher', model)
        teacher = Decoder(given.shape, layers=settings.learner.layers), given.load(config, dtype)
    critic = None if settings.critic is None else _load_critic(config, model, own_model=settings.critic.own_model)
    return OtherModels(reference, teacher, critic)


def _load_critic(config: TrackedConfig, model: Model, *, own_model: bool) -> Params:
    head = make_value_head(model.decoder.config.d_model)
    if not own_model:
        return {VALUE_HEAD: head}
    assert model.params is not None, 'a learner has taken the weights already'
    if config.critic.model == COPIED_CRITIC:
        return {**model.params, VALUE_HEAD: head}
    given = _read_same_shape(config, 'critic.model', model)
    return {**given.load(config, 'float32'), VALUE_HEAD: given.load_value_head() or head}


def _read_same_shape(config: TrackedConfig, field: str, model: Model) -> GivenModel:
    given = read_given_model(config, field, model)
    require_same_shape(given, field, model.decoder.config)
    return given


def read_given_model(config: TrackedConfig, field: str, model: Model) -> GivenModel:
    """Describes the model that `field` names; raises ConfigError if it is no model or has other tokens."""
    given = describe_given_model(config, field)
    _require_same_tokens(given, model)
    return given


def describe_given_model(config: TrackedConfig, field: str) -> GivenModel:
    """Describes the model that `field` names, tokens unchecked; raises ConfigError for a directory without a model."""
    section, _, name = field.partition('.')
    value: str = getattr(getattr(config, section), name)
    directory = locate_model(field, value, weights=True) if is_hub_name(value) else pathlib.Path(value)
    if not directory.is_dir():
        raise ConfigError(
            f'{field}={value!r} is no directory: name hf:ORG/NAME, or a directory with config.json and weights'
        )
    try:
        return GivenModel(field, directory, read_hf_config(directory))
    except HfError as error:
        raise ConfigError(f'{field}={value!r}: {error}') from error


def require_same_shape(given: GivenModel, field: str, shape: ModelConfig) -> None:
    """Raises ConfigError if the model has another architecture or other sizes than the trained one."""
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
    """Raises ConfigError if a token id means something else in this vocabulary than in the trained model's."""
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
    """Describes a token with two ids; '' if there is no such token, or if `ours` lists no tokens."""
    vocabulary = getattr(ours, 'vocabulary', None)
    if vocabulary is None:
        return ''
    known, other = vocabulary(), theirs.vocabulary()
    for token, index in sorted(known.items(), key=lambda item: item[1]):
        if other.get(token) != index:
            return f'{token!r} is token {index} here and {other.get(token)} there'
    return ''
