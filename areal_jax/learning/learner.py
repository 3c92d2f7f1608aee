"""Arrow 7, the trainer that the controller drives: groups of one update in, weights of the next version out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from areal_jax.learning import diagnostics
from areal_jax.learning.advantages import ESTIMATORS, group_advantages, has_signal
from areal_jax.learning.losses import finalize_metrics, merge_metrics
from areal_jax.learning.optimizer import Optimizer
from areal_jax.learning.packing import MODES, count_tokens, empty_batch, pack
from areal_jax.learning.proximal import KINDS
from areal_jax.learning.train_step import Objective, PackedDecoder, Programs, training_rows, training_scalars
from areal_jax.sharding.rules import data_shards, param_shardings, path_name, replicated
from areal_jax.types import PackedBatch, TrajectoryGroup


class SpmdLearner:
    """Weights and optimizer state on a mesh, and the commands of `types.Learner`; blocking, for one lane's thread.

    The learner owns its buffers: `params` is copied, `publish` and `save` give copies, and the programs of an update
    replace weights and optimizer state in place.
    """

    def __init__(
        self,
        decoder: PackedDecoder,
        params: Any,
        mesh: Mesh,
        *,
        optimizer: Optimizer,
        learning_rate: float,
        row_tokens: int,
        row_loss_tokens: int,
        rows_per_microbatch: int = 1,
        n_minibatches: int = 1,
        packing: str = 'shared_prompt',
        accumulate: str = 'dispatch',
        max_microbatches: int = 1,
        filter_equal_rewards: bool = True,
        advantage: str = 'group',
        temperature: float = 1.0,
        clip_epsilon: float = 0.2,
        clip_epsilon_high: float | None = None,
        proximal: str = 'recompute',
        behavior_weight_cap: float | None = None,
        aggregation: str = 'token_mean',
        entropy_coefficient: float = 0.0,
        max_token_age: int | None = None,
        over_age: str = 'off',
        strategy: str = 'fsdp',
        vocab_chunk: int | None = None,
        attention: str = 'auto',
    ):
        """Places a copy of `params` (a nested dict of arrays) on the mesh.

        Args:
          row_tokens, row_loss_tokens: static shape of a row; a trajectory must fit one.
          rows_per_microbatch: rows over all devices, a multiple of the mesh's size.
          max_microbatches: 'scan' only: the most micro-batches of a minibatch for which `warm_up` compiles.
          max_token_age, over_age: with 'mask', older tokens leave the loss but stay in its denominator; dropping groups
            is the controller's.
          vocab_chunk, attention: of token_logprobs and packed_attention; None and 'auto' let them choose.

        Raises ValueError, naming the config field, for what cannot work.
        """
        _require('learner.packing', packing, MODES)
        _require('learner.accumulate', accumulate, ('dispatch', 'scan'))
        _require('loss.proximal', proximal, KINDS)
        _require('loss.advantage', advantage, tuple(ESTIMATORS))
        _require('loss.aggregation', aggregation, ('token_mean', 'sequence_mean'))
        _require('staleness.over_age', over_age, ('off', 'mask', 'drop'))
        if rows_per_microbatch % data_shards(mesh):
            raise ValueError(
                f'learner.rows_per_microbatch={rows_per_microbatch} must be a multiple of the {data_shards(mesh)} '
                'devices of the mesh (mesh.data * mesh.fsdp)'
            )
        if over_age == 'mask' and max_token_age is None:
            raise ValueError(
                "staleness.over_age='mask' needs staleness.max_token_age, which is None: set it or over_age='off'"
            )
        self._mesh, self._optimizer, self._learning_rate = mesh, optimizer, learning_rate
        self._mode, self._advantage, self._aggregation = packing, advantage, aggregation
        self._shape = (rows_per_microbatch, row_tokens, row_loss_tokens)
        self._n_minibatches, self._accumulate, self._max_microbatches = n_minibatches, accumulate, max_microbatches
        self._filter_equal_rewards, self._temperature = filter_equal_rewards, temperature
        self._max_token_age = max_token_age if over_age == 'mask' else None
        self._recomputes = proximal == 'recompute' and n_minibatches > 1
        objective = Objective(
            clip_epsilon, clip_epsilon_high, behavior_weight_cap, entropy_coefficient, proximal, vocab_chunk, attention
        )
        self._param_shardings = param_shardings(params, mesh, strategy)
        state_shardings = optimizer.shardings(params, self._param_shardings, replicated(mesh))
        self._programs = Programs(decoder, objective, optimizer, mesh, self._param_shardings, state_shardings)
        self._compiled: dict[Any, Any] = {}
        placed = jax.device_put(params, self._param_shardings)
        self._params = self._run('copy', placed)
        self._state = self._run('initial_state', self._params)
        self._gradients = self._run('zeros', self._params) if accumulate == 'dispatch' else None
        self._copy: Any = None  # of the weights, made by the last publication; None once they have changed

    def warm_up(self) -> int:
        """Compiles, and does not run, every program of updates and publications; returns how many there are."""
        sizes = [1]
        if self._accumulate == 'scan':
            sizes += [2 << i for i in range(max(self._max_microbatches - 1, 0).bit_length())]
        for size in sizes:
            rows, denominator = training_rows(empty_batch(size, *self._shape), self._aggregation)
            scalars = self._scalars(denominator, version=0, first=True)
            if self._accumulate == 'scan':
                whole = self._place_rows(rows, microbatches=True)
                self._program('scan', self._params, self._state, whole, scalars, self._rate())
        one = self._place_rows({name: array[0] for name, array in rows.items()})
        if self._accumulate == 'dispatch':
            self._program('accumulate', self._gradients, self._params, one, scalars)
            self._program('apply', self._params, self._state, self._gradients, self._rate())
        if self._recomputes:
            self._program('logprobs', self._params, one, scalars)
        return len(self._compiled)

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Tokens that `update` would read, to price it beforehand: what the filter leaves, prompts shared or not."""
        return count_tokens(self._kept(groups), self._mode)

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, Any]:
        """Trains on one batch with `n_minibatches` optimizer steps; `version` is that of the weights before it.

        Nothing to train (no group, none with a signal, all tokens too old) leaves weights and optimizer state as they
        are, bit for bit. Metrics are floats, but for the histogram of token ages, a list; what is not defined (the
        mean over nothing) is absent.

        Raises ValueError for a trajectory that does not fit a row, a reward that is not finite, or a token of a version
        after `version`; weights are untouched then.
        """
        kept = self._kept(groups)
        rows, row_tokens, row_loss_tokens = self._shape
        batches, report = pack(
            kept,
            [group_advantages(g, self._advantage) for g in kept],
            mode=self._mode,
            row_tokens=row_tokens,
            row_loss_tokens=row_loss_tokens,
            rows_per_microbatch=rows,
            n_minibatches=self._n_minibatches,
            oldest_version=None if self._max_token_age is None else version - self._max_token_age,
            round_microbatches=self._accumulate == 'scan',
        )
        metrics = diagnostics.data_metrics(groups, kept) | diagnostics.age_metrics(batches, version)
        return metrics | report.metrics() | self._train(batches, version)

    def publish(self, version: int) -> Any:
        """The weights, in buffers that no later update touches, on this learner's devices."""
        self._copy = self._run('copy', self._params)
        return self._copy

    def save(self) -> dict[str, Any]:
        """{'params': nested dict, 'optimizer': {path: array}} in numpy arrays that no later update touches.

        The weights are those of the last publication, if no update came after it, and then need no further copy.
        """
        leaves, _ = jax.tree_util.tree_flatten_with_path(self._state)
        copied = jax.tree.map(_to_host, self._params) if self._copy is None else jax.device_get(self._copy)
        return {
            'params': copied,
            'optimizer': {path_name(path): _to_host(leaf) for path, leaf in leaves},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes what `save` gave, on any number of devices.

        Raises ValueError where names or shapes differ from this learner's; it is unchanged then.
        """
        params = _like(saved['params'], self._params, 'params')
        leaves, structure = jax.tree_util.tree_flatten_with_path(self._state)
        paths = [path_name(path) for path, _ in leaves]
        flat = _like(saved['optimizer'], {p: leaf for p, (_, leaf) in zip(paths, leaves, strict=True)}, 'optimizer')
        state = jax.tree.unflatten(structure, [flat[path] for path in paths])
        self._copy = None
        self._params = jax.device_put(params, self._programs.params)
        self._state = jax.device_put(state, self._programs.state)

    def _kept(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [g for g in groups if has_signal(g) or not self._filter_equal_rewards]

    def _train(self, batches: Sequence[PackedBatch], version: int) -> dict[str, Any]:
        self._copy = None
        later = batches[1:] if self._recomputes else []
        recomputed = [self._logprobs_before(batch, version) for batch in later]
        results = []
        for index, batch in enumerate(batches):
            proximal = recomputed[index - 1] if index and recomputed else None
            rows, denominator = training_rows(batch, self._aggregation, proximal)
            results.append(self._step(rows, self._scalars(denominator, version, first=index == 0)))
        results = jax.device_get(results)
        metrics = _step_metrics([step for step, _, _ in results])
        merged = merge_metrics([m for _, microbatches, _ in results for m in microbatches])
        if results:
            metrics['loss/value'] = merged['loss_sum'] / len(results)
        seen_before = [np.reshape(logprobs, batches[0].targets.shape) for _, _, logprobs in results[:1]] + recomputed
        mismatch = diagnostics.mismatch_metrics(batches[: len(seen_before)], seen_before, version)
        return metrics | finalize_metrics(merged) | mismatch

    def _step(self, rows: Mapping[str, np.ndarray], scalars: Any) -> tuple[Any, list[Any], Any]:
        """One optimizer step on a minibatch: (step metrics, metrics and log-probs of its micro-batches)."""
        if self._accumulate == 'scan':
            whole = self._place_rows(rows, microbatches=True)
            self._params, self._state, step, metrics, logprobs = self._run(
                'scan', self._params, self._state, whole, scalars, self._rate()
            )
            return step, [metrics], logprobs
        all_metrics: list[Any] = []
        all_logprobs = []
        for m in range(len(rows['tokens'])):
            if m > 1:  # one running, one queued: programs of other lanes on these devices get between
                jax.block_until_ready(all_metrics[-2])
            one = self._place_rows({name: array[m] for name, array in rows.items()})
            self._gradients, metrics, logprobs = self._run('accumulate', self._gradients, self._params, one, scalars)
            all_metrics.append(metrics)
            all_logprobs.append(logprobs)
        self._params, self._state, self._gradients, step = self._run(
            'apply', self._params, self._state, self._gradients, self._rate()
        )
        return step, all_metrics, all_logprobs

    def _logprobs_before(self, batch: PackedBatch, version: int) -> np.ndarray:
        """float32 [M, R, N] of the weights in hand."""
        rows, denominator = training_rows(batch, self._aggregation)
        scalars = self._scalars(denominator, version, first=True)
        passes = []
        for m in range(len(batch.tokens)):
            one = self._place_rows({name: array[m] for name, array in rows.items()})
            passes.append(jax.device_get(self._run('logprobs', self._params, one, scalars)))
        return np.stack(passes)

    def _place_rows(self, rows: Mapping[str, np.ndarray], microbatches: bool = False) -> Any:
        return jax.device_put(dict(rows), self._programs.rows_sharding(microbatches))

    def _scalars(self, denominator: float, version: int, first: bool) -> Any:
        scalars = training_scalars(
            denominator=denominator, version=version, temperature=self._temperature, weights_are_proximal=first
        )
        return jax.device_put(scalars, replicated(self._mesh))

    def _rate(self) -> Any:
        return jax.device_put(np.float32(self._learning_rate), replicated(self._mesh))

    def _program(self, name: str, *args: Any) -> Any:
        """The compiled program for arguments of these shapes; compiled ahead, so that warming up runs nothing."""
        size = len(args[2]['tokens']) if name == 'scan' else None
        if (name, size) not in self._compiled:
            self._compiled[name, size] = getattr(self._programs, name)().lower(*args).compile()
        return self._compiled[name, size]

    def _run(self, name: str, *args: Any) -> Any:
        return self._program(name, *args)(*args)


def _require(field: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f'{field}={value!r} is unknown; use one of {", ".join(allowed)}')


def _step_metrics(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    skipped = sum(float(s['skip_count']) for s in steps)
    metrics = {'update/optimizer_steps': len(steps) - skipped, 'update/skipped_steps': skipped}
    if len(steps) > skipped:
        metrics['update/grad_norm'] = sum(float(s['grad_norm']) for s in steps) / (len(steps) - skipped)
        metrics['update/learning_rate'] = float(steps[-1]['learning_rate'])
    return metrics


def _to_host(leaf: Any) -> np.ndarray:
    """A copy: on CPU jax hands out views, and a buffer with a view cannot be reused by the next update."""
    return np.array(jax.device_get(leaf), copy=True)


def _like(saved: Any, current: Any, name: str) -> Any:
    """Copies of the saved leaves, in the dtypes of `current`, after a check of names and shapes."""
    saved_shapes = {path_name(p): np.shape(x) for p, x in jax.tree_util.tree_leaves_with_path(saved)}
    shapes = {path_name(p): x.shape for p, x in jax.tree_util.tree_leaves_with_path(current)}
    if saved_shapes != shapes:
        differing = sorted(set(saved_shapes.items()) ^ set(shapes.items()))
        raise ValueError(
            f"saved {name} differ from the learner's in {len(differing)} names or shapes, the first {differing[:2]}: "
            'restore with the model and optimizer of the run that saved'
        )
    return jax.tree.map(lambda s, c: np.array(s, c.dtype, copy=True), saved, current)
