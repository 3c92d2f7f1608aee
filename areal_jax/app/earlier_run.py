"""The weights of another run, for model.source='run': described by its config.json, held by its newest checkpoint."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import jax

from areal_jax.app.workdir import CHECKPOINTS
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config import CONFIG, TrackedConfig, default_config, flatten
from areal_jax.config.ranges import ConfigError
from areal_jax.learning import trees
from areal_jax.models.decoder import Decoder
from areal_jax.models.lora import Lora, merge_adapters
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Params
from areal_jax.sharding.placement import place_regions
from areal_jax.sharding.rules import path_name

_SHAPE = ('family', 'n_layers', 'd_model', 'd_ff', 'n_heads', 'n_kv_heads', 'head_dim', 'rope_theta')
# the fields of that run's config that say which weights and tokenizer it has
_READ = ('model.', 'lora.', 'task.symbols', 'loss.objective', 'learner.row_tokens', 'rollout.context_tokens')


class EarlierRun:
    """A workdir that model.path names.

    Raises ConfigError for a path that is not the workdir of a run, or a workdir without a checkpoint.
    """

    def __init__(self, path: str):
        self.workdir = pathlib.Path(path)
        self.config = read_run_config(self.workdir)
        store = CheckpointStore(self.workdir / CHECKPOINTS)
        step = store.latest()
        if step is None:
            raise ConfigError(
                f'model.path={path!r} holds no checkpoint: let that run end, or stop it with Ctrl-C, which saves one'
            )
        self.checkpoint = store.path(step)
        self._params = store.restore(step)[0]['params']

    def require_shape(self, config: TrackedConfig, shape: ModelConfig) -> None:
        """Raises ConfigError for a field of model.* that is set and differs from the shape of that run's model."""
        for field in _SHAPE:
            value, theirs = getattr(config.model, field), getattr(shape, field)
            if value not in (default_config().model[field], theirs):
                raise ConfigError(
                    f'model.{field}={value!r} is another architecture than that of model.path={str(self.workdir)!r}, '
                    f'which has {theirs!r}: remove the setting'
                )

    def read_weights(self, decoder: Decoder, cut: Callable[[Params], Params]) -> Params:
        """The run's weights in float32 and list form, with LoRA adapters merged.

        Each process reads only the shards of its own devices.

        Args:
          cut: maps a tree of shapes to the tree of their shardings.

        Raises ConfigError where their names or shapes are not those of the decoder, and CheckpointError for a
        checkpoint that is damaged.
        """
        lora = self.config.lora
        adapters = Lora(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank else None
        expected = Decoder(decoder.config, lora=adapters).abstract()
        self._require_leaves(self._params, expected)
        place = lambda leaf, sharding: place_regions(leaf.__getitem__, leaf.shape, sharding)
        params = trees.cast(jax.tree.map(place, self._params, cut(expected)), 'float32')
        return merge_adapters(params, adapters) if adapters else params

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


def read_run_config(workdir: pathlib.Path) -> TrackedConfig:
    """What the config of a run says about its model; raises ConfigError for a directory that is no workdir."""
    path = workdir / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"model.path={str(workdir)!r} has no {CONFIG}: for model.source='run' it must be the --workdir of a run; a "
            "directory of Hugging Face files needs model.source='hf'"
        )
    config = default_config()
    known = dict(flatten(config))
    saved = {name: value for name, value in flatten(json.loads(path.read_text())) if name.startswith(_READ)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
    config.update_from_flattened_dict({name: value for name, value in values.items() if name in known})
    return TrackedConfig(config)
