"""The weights of another run: described by its config.json, held by one of its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np

from areal_jax.app.model.run_config import FIELD, read_run_config, split_checkpoint
from areal_jax.app.workdir.run_directory import CHECKPOINTS
from areal_jax.checkpoint.shards import StoredArray
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.config import CONFIG, TrackedConfig, default_config
from areal_jax.config.ranges import ConfigError
from areal_jax.files import Announce, announce_nothing
from areal_jax.learning.weights import trained_leaves as trees
from areal_jax.learning.weights.trained_leaves import CRITIC, policy_leaves
from areal_jax.models.decoder import Decoder
from areal_jax.models.shape import ModelConfig
from areal_jax.models.weights import Lora, Params, merge_adapters
from areal_jax.sharding.placement import place_regions
from areal_jax.sharding.rules import path_name

_SHAPE = ('family', 'n_layers', 'd_model', 'd_ff', 'n_heads', 'n_kv_heads', 'head_dim', 'rope_theta')
_PARAMS = 'params'  # in the arrays of a checkpoint


class EarlierRun:
    """The run of a workdir, at one of its checkpoints.

    A newer checkpoint that is damaged is passed over, said so on stderr.

    Args:
      path: the workdir, or one of its checkpoints, WORKDIR/checkpoints/step_00000012.
      step: which checkpoint; None = the one that `path` names, or the newest that is intact.
      field: what gave the path, for errors.

    Raises ConfigError for a path that is not of a run, and for a run without a checkpoint; CheckpointError for a step
    that is not there (naming those that are), for a damaged one, and where none is intact.
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
        """The run's weights in float32 and list form, with LoRA adapters merged.

        Each process reads only the shards of its own devices.

        Args:
          cut: maps a tree of shapes to the tree of their shardings.
          announce: hears of the bytes read, and of all.

        Raises ConfigError if their names or shapes differ from the decoder's weights, and CheckpointError for a
        damaged checkpoint.
        """
        lora = self.config.lora
        adapters = Lora(lora.rank, lora.alpha, tuple(lora.targets)) if lora.rank else None
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
        """The weights of its critic in float32 on the host, with the value head; None for a run without one."""
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
