"""Arrow 7, the trainer that the controller drives: groups of one update in, weights of the next version out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from areal_jax.learning import diagnostics, trees, truncation
from areal_jax.learning.advantages import group_advantages, has_signal
from areal_jax.learning.balance import decoder_cost
from areal_jax.learning.denominators import denominator_scale
from areal_jax.learning.finiteness import require_finite
from areal_jax.learning.forward import require_heads
from areal_jax.learning.interchange import export_weights, match_snapshot, read_snapshot, take_snapshot
from areal_jax.learning.likelihood import finalize_likelihood, held_out_likelihood
from areal_jax.learning.losses import finalize_metrics, merge_metrics
from areal_jax.learning.optimizer import Optimizer, step_metrics
from areal_jax.learning.packing import PackingReport, count_tokens, empty_batch, pack, tail_bucket, tail_buckets, trim
from areal_jax.learning.settings import LearnerSettings
from areal_jax.learning.train_step import KnownLogprobs, Programs, training_rows, training_scalars
from areal_jax.models.attention import choose_checked, shares_prompts
from areal_jax.models.decoder import Decoder
from areal_jax.models.layers import stack_layers
from areal_jax.models.lora import is_adapter
from areal_jax.ranges import ConfigError
from areal_jax.sharding.placement import gather, place
from areal_jax.sharding.rules import data_shards, param_shardings, replicated, row_sharding
from areal_jax.telemetry.metrics import merge
from areal_jax.types import PackedBatch, TrajectoryGroup


class SpmdLearner:
    """Weights and optimizer state on a mesh, and the commands of `types.Learner`; blocking, for one lane's thread.

    The learner owns its buffers: `params` is copied, `publish` and `save` give copies, and the programs of an update
    replace weights and optimizer state in place. On a mesh that spans processes every process has a learner and calls
    the same commands in the same order (learning/commands.py); each packs the same groups to the same rows.
    """

    def __init__(
        self,
        decoder: Decoder,
        params: Any,
        mesh: Mesh,
        *,
        optimizer: Optimizer,
        learning_rate: float,
        settings: LearnerSettings,
    ):
        """Places a copy of `params`, a nested dict of arrays in list form that fits the decoder, on the mesh.

        Where the decoder has adapters (lora), only they are trained; the rest is kept in `settings.dtype`. The
        attention backend is compared with a dense one first.

        Raises ValueError, naming the config field, for what cannot work, and AttentionError for a backend that is
        wrong here.
        """
        self._decoder, self._mesh, self._settings = decoder, mesh, settings
        self._optimizer, self._learning_rate = optimizer, learning_rate
        self._require_shapes()
        self.attention = self._choose_attention()
        self._cost = decoder_cost(decoder.config)
        if decoder.layers == 'stacked':
            params = stack_layers(params)
        trained, frozen = trees.split(params, is_adapter if decoder.lora else lambda _: True)
        config = decoder.config
        units = {'heads': config.n_heads, 'kv_heads': config.n_kv_heads}
        cut = lambda tree: param_shardings(tree, mesh, settings.strategy, units)
        export = functools.partial(export_weights, decoder, settings.publish_dtype)
        self._programs = Programs(
            decoder,
            settings,
            optimizer,
            mesh,
            attention=self.attention,
            params=cut(trained),
            frozen=cut(frozen),
            state=optimizer.shardings(trained, cut(trained), replicated(mesh)),
            exported=cut(jax.eval_shape(export, trained, frozen)),
        )
        self._compiled: dict[Any, Any] = {}
        self._params = self._run('copy', place(trees.cast(trained, 'float32'), self._programs.params))
        self._frozen = place(trees.cast(frozen, settings.dtype), self._programs.frozen)
        self._state = self._run('initial_state', self._params)
        self._gradients = self._run('zeros', self._params) if settings.accumulate == 'dispatch' else None
        copy = 'copy' if settings.dtype == 'float32' else 'cast'
        self._reference = self._run(copy, self._params) if settings.kl_coefficient else None
        self._copy: Any = None  # of the weights, made by the last publication; None once they have changed

    announce: Callable[[int, int], None] = staticmethod(lambda done, total: None)  # of every program of `warm_up`

    def warm_up(self) -> int:
        """Compiles, and does not run, every program of updates and publications; returns how many there are."""
        programs = list(self._declared_programs())
        for done, (name, args) in enumerate(programs):
            self.announce(done, len(programs))
            self._program(name, *args)
        return len(self._compiled)

    def _declared_programs(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """(name, arguments) of what updates and publications run."""
        working = self._working()
        yield 'export', (self._params, self._frozen)
        for rows, scalars in self._empty_rows():
            if self._settings.accumulate == 'scan':
                whole = self._place_rows(rows, microbatches=True)
                yield 'scan', (self._params, self._state, self._frozen, whole, scalars, self._rate())
            one = self._place_rows({name: array[0] for name, array in rows.items()})
            if self._settings.accumulate == 'dispatch':
                yield 'accumulate', (self._gradients, working, self._frozen, one, scalars)
            if self._settings.recomputes or self._reference is not None or self._settings.objective == 'sft':
                yield 'logprobs', (working, self._frozen, one, scalars)
        if self._settings.accumulate == 'dispatch':
            yield 'apply', (self._params, self._state, self._gradients, self._rate())

    def update_tokens(self, groups: Sequence[TrajectoryGroup]) -> int:
        """Tokens that `update` would read, to price it beforehand: what the filter leaves, prompts shared or not."""
        return count_tokens(self._kept(groups), self.packing) * self._settings.epochs

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Mapping[str, Any]:
        """Trains on one batch with `n_minibatches * epochs` optimizer steps; `version` is that of the weights before.

        Nothing to train (no group, none with a signal, all tokens too old) leaves weights and optimizer state as they
        are, bit for bit. Metrics are floats, but for the histogram of token ages, a list; what is not defined (the
        mean over nothing) is absent.

        Raises ValueError for a trajectory that does not fit a row, a reward that is not finite, or a token of a version
        after `version`; weights are untouched then.
        """
        settings = self._settings
        if settings.truncated_sampling == 'refuse':
            truncation.require_full_softmax(groups)
        kept = self._kept(groups)
        oldest = None if settings.oldest_age is None else version - settings.oldest_age
        scale = denominator_scale(groups, kept, settings.aggregation) if settings.denominator == 'all' else 1.0
        batches, report = self._pack(
            kept,
            [self._advantages(group) for group in kept],
            n_minibatches=settings.n_minibatches,
            oldest_version=oldest,
            round_microbatches=settings.accumulate == 'scan',
        )
        return merge(
            data=diagnostics.data_metrics(groups, kept),
            ages=diagnostics.age_metrics(kept, batches, version),
            packing=report.metrics(),
            sampling=truncation.kept_mass_metrics(kept, oldest),
            training=self._train(batches, version, scale),
        )

    def evaluate(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Negative log-likelihood of the generated tokens, at the temperature of training; changes nothing.

        Returns:
          {'nll': nats per token, absent where there are none, 'tokens': their number}; independent of the packing.

        Raises ValueError for a trajectory that does not fit a row, NonFiniteError for a likelihood that is no number.
        """
        batches, _ = self._pack(groups, [np.ones(len(group.trajectories), np.float32) for group in groups])
        if not batches:
            return {'tokens': 0.0}
        (batch,) = batches  # one minibatch, all of whose tokens are in the loss
        return held_out_likelihood(self._logprobs(self._working(), batch, version=0)[batch.loss_mask])

    def publish(self, version: int) -> Any:
        """The weights in interchange form, adapters merged, in buffers that no later update touches.

        On this learner's devices, sharded as they are trained; on the host where the mesh spans processes.
        """
        copy = self._run('export', self._params, self._frozen)
        self._copy = copy if jax.process_count() == 1 else jax.tree.map(gather, copy)
        return self._copy

    def save(self) -> dict[str, Any]:
        """{'params': nested dict, 'optimizer': {path: leaf}} on the host, in memory that no later update touches.

        In interchange form, one leaf per layer, whatever form and mesh this learner has: numpy arrays, or, on a mesh
        that spans processes, HostShards of what this one has to write. In one process the weights are those of the
        last publication, if those are all and no update came after it, and then need no further copy.

        Raises NonFiniteError for weights or optimizer state with NaN or infinity: no checkpoint may hold them.
        """
        self.require_finite('the trained weights', 'lower optimizer.learning_rate')
        reusable = jax.process_count() == 1 and not self._decoder.lora and self._settings.publish_dtype == 'float32'
        copied = reusable and self._copy is not None
        params = {} if copied else trees.join(self._params, self._frozen)
        saved = take_snapshot(self._decoder, params, self._state)
        return saved | {'params': jax.device_get(self._copy)} if copied else saved

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Takes what `save` gave in one process, or what a checkpoint holds, on any mesh and in either form of layers.

        Every process reads what its own devices hold. Raises ValueError where names or shapes differ from this
        learner's; it is unchanged then. What it held is let go of before the rest is read, so that the devices need no
        room for both: a reader that fails leaves the learner empty. Raises NonFiniteError for what it has taken when
        that holds NaN or infinity.
        """
        programs = self._programs
        current = {'params': trees.join(self._params, self._frozen), 'optimizer': self._state}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), current)
        match_snapshot(self._decoder, saved, shapes)
        del current
        self._params = self._frozen = self._state = self._copy = None
        shardings = {'params': trees.join(programs.params, programs.frozen), 'optimizer': programs.state}
        new = read_snapshot(self._decoder, saved, shapes, shardings)
        self._params, self._frozen = trees.split(new['params'], is_adapter if self._decoder.lora else lambda _: True)
        self._state = new['optimizer']
        self.require_finite('the checkpoint', 'remove it to go on from the one before, or start again')

    def require_finite(self, what: str, fix: str) -> None:
        """Raises NonFiniteError for NaN or infinity in weights or optimizer state, see finiteness.require_finite."""
        held = trees.join(self._params, self._frozen) | {'optimizer': self._state}
        require_finite(held, self._mesh, what, fix)

    followers = ()  # learners of several processes have them (commands.py)

    def close(self) -> None:
        """Nothing to let go of; followers would be."""

    # What a run is built with.

    def _require_shapes(self) -> None:
        settings, mesh, config = self._settings, self._mesh, self._decoder.config
        shards, context, tensor = data_shards(mesh), mesh.shape['context'], mesh.shape['tensor']
        require_heads(config.n_heads, config.n_kv_heads, tensor)
        if config.vocab_size % tensor:
            raise ConfigError(
                f'tensor={tensor} of cluster.learner does not divide the {config.vocab_size} tokens of the vocabulary; '
                'use a divisor of it, or shard with fsdp'
            )
        if settings.rows_per_microbatch % shards:
            raise ConfigError(
                f'learner.rows_per_microbatch={settings.rows_per_microbatch} must be a multiple of the {shards} '
                'devices that rows lie over (data * fsdp of cluster.learner)'
            )
        self._buckets = tail_buckets(settings.row_tokens, settings.row_loss_tokens, 1 + settings.tail_buckets)
        halves = 2 * context if context > 1 else 1
        for bucket in self._buckets:
            if bucket.tokens % halves:
                raise ConfigError(
                    f'learner.row_tokens (or a tail bucket of it)={bucket.tokens} must be a multiple of {halves}, '
                    f'twice context={context} of cluster.learner'
                )
            if bucket.loss_tokens % context:
                raise ConfigError(
                    f'learner.row_loss_tokens (or a tail bucket of it)={bucket.loss_tokens} must be a multiple of '
                    f'context={context} of cluster.learner'
                )

    def _choose_attention(self) -> str:
        """The backend that passed its self-check here; sets how prompts are packed, which not every mask expresses."""
        settings, config = self._settings, self._decoder.config
        impl, self.passed_over = choose_checked(
            settings.attention,
            tokens=settings.row_tokens,
            dtype=settings.dtype,
            head_dim=config.head_dim,
            window=config.sliding_window,
            slices=self._mesh.shape['context'] > 1,
        )
        self.packing = settings.packing if shares_prompts(impl) else 'ordinary'
        return impl

    def _kept(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        everything = self._settings.objective == 'sft' or not self._settings.filter_equal_rewards
        return [g for g in groups if everything or has_signal(g)]

    def _advantages(self, group: TrajectoryGroup) -> np.ndarray:
        if self._settings.objective == 'sft':
            return np.ones(len(group.trajectories), np.float32)
        return group_advantages(group, self._settings.advantage)

    def _pack(
        self, groups: Sequence[TrajectoryGroup], advantages: Sequence[np.ndarray], **division: Any
    ) -> tuple[list[PackedBatch], PackingReport]:
        settings = self._settings
        return pack(
            groups,
            advantages,
            mode=self.packing,
            fill=settings.fill,
            row_tokens=settings.row_tokens,
            row_loss_tokens=settings.row_loss_tokens,
            rows_per_microbatch=settings.rows_per_microbatch,
            data_shards=data_shards(self._mesh),
            cost=self._cost,
            buckets=self._buckets,
            vocab_size=self._decoder.config.vocab_size,
            **division,
        )

    # An update.

    def _train(self, batches: Sequence[PackedBatch], version: int, scale: float) -> dict[str, Any]:
        settings = self._settings
        self._copy = None
        known = self._known_logprobs(batches, version)
        results: list[Any] = []
        for step in range(settings.epochs * len(batches)):
            index, first = step % len(batches), step == 0
            rows, denominator = training_rows(batches[index], settings.aggregation, known[index])
            step_rows = self._step(rows, self._scalars(denominator * scale, version, first))
            results.append(jax.device_get(step_rows))
            if first and settings.recomputes:
                known[0] = KnownLogprobs(np.reshape(results[0][2], batches[0].targets.shape), known[0].reference)
        metrics = step_metrics([step for step, _, _ in results])
        merged = merge_metrics([m for _, microbatches, _ in results for m in microbatches])
        if results:
            metrics['loss/value'] = merged['loss_sum'] / len(results)
        if settings.objective == 'sft':
            return merge(steps=metrics, likelihood=finalize_likelihood(merged))
        before = [np.reshape(logprobs, batches[0].targets.shape) for _, _, logprobs in results[:1]]
        before += [k.proximal for k in known[1:] if k.proximal is not None]
        mismatch = diagnostics.mismatch_metrics(batches[: len(before)], before, version)
        return merge(steps=metrics, loss=finalize_metrics(merged), mismatch=mismatch)

    def _known_logprobs(self, batches: Sequence[PackedBatch], version: int) -> list[KnownLogprobs]:
        """Per batch what the weights before the update say (the first step sees them itself), and the reference."""
        recompute = self._settings.recomputes
        working = self._working() if recompute and len(batches) > 1 else None
        return [
            KnownLogprobs(
                proximal=self._logprobs(working, batch, version) if recompute and index else None,
                reference=None if self._reference is None else self._logprobs(self._reference, batch, version),
            )
            for index, batch in enumerate(batches)
        ]

    def _step(self, rows: Mapping[str, np.ndarray], scalars: Any) -> tuple[Any, list[Any], Any]:
        """One optimizer step on a minibatch: (step metrics, metrics of its micro-batches, log-probs [M, R, N])."""
        if self._settings.accumulate == 'scan':
            whole = self._place_rows(rows, microbatches=True)
            self._params, self._state, step, metrics, logprobs = self._run(
                'scan', self._params, self._state, self._frozen, whole, scalars, self._rate()
            )
            return step, [metrics], logprobs
        all_metrics: list[Any] = []
        all_logprobs: list[Any] = []
        working = self._working()
        for one in self._microbatches(rows):
            if len(all_metrics) > 1:  # one running, one queued: programs of other lanes on these devices get between
                jax.block_until_ready(all_metrics[-2])
            self._gradients, metrics, logprobs = self._run(
                'accumulate', self._gradients, working, self._frozen, self._place_rows(one), scalars
            )
            all_metrics.append(metrics)
            all_logprobs.append(logprobs)
        self._params, self._state, self._gradients, step = self._run(
            'apply', self._params, self._state, self._gradients, self._rate()
        )
        return step, all_metrics, self._whole_rows(all_logprobs)

    def _logprobs(self, working: Any, batch: PackedBatch, version: int) -> np.ndarray:
        """float32 [M, R, N] of given weights."""
        rows, denominator = training_rows(batch, self._settings.aggregation)
        scalars = self._scalars(denominator, version, first=True)
        passes = [
            self._run('logprobs', working, self._frozen, self._place_rows(one), scalars)
            for one in self._microbatches(rows)
        ]
        return self._whole_rows(passes)

    def _microbatches(self, rows: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Each micro-batch, cut to the smallest declared shape that holds it."""
        for m in range(len(rows['tokens'])):
            one = {name: array[m] for name, array in rows.items()}
            yield trim(one, tail_bucket(one, self._buckets))

    def _whole_rows(self, logprobs: Sequence[Any]) -> np.ndarray:
        """Log-probs of micro-batches of any bucket as float32 [M, R, N]; what was cut off is 0."""
        whole = np.zeros(
            (len(logprobs), self._settings.rows_per_microbatch, self._settings.row_loss_tokens), np.float32
        )
        for row, part in zip(whole, jax.device_get(list(logprobs)), strict=True):
            row[:, : part.shape[1]] = part
        return whole

    def _working(self) -> Any:
        return self._params if self._settings.dtype == 'float32' else self._run('cast', self._params)

    def _empty_rows(self) -> Iterator[tuple[dict[str, np.ndarray], Any]]:
        """Rows of padding of every shape that an update may bring, with scalars."""
        settings = self._settings
        sizes = [1]
        if settings.accumulate == 'scan':
            sizes += [2 << i for i in range(max(settings.max_microbatches - 1, 0).bit_length())]
        for size in sizes:
            for bucket in self._buckets:
                empty = empty_batch(size, settings.rows_per_microbatch, *bucket)
                rows, denominator = training_rows(empty, settings.aggregation)
                yield rows, self._scalars(denominator, version=0, first=True)

    # Placing and running.

    def _place_rows(self, rows: Mapping[str, np.ndarray], microbatches: bool = False) -> Any:
        return place(dict(rows), row_sharding(self._mesh, leading_axes=int(microbatches)))

    def _scalars(self, denominator: float, version: int, first: bool) -> Any:
        scalars = training_scalars(
            denominator=denominator,
            version=version,
            temperature=self._settings.temperature,
            weights_are_proximal=first,
        )
        return place(scalars, replicated(self._mesh))

    def _rate(self) -> Any:
        return place(np.float32(self._learning_rate), replicated(self._mesh))

    def _program(self, name: str, *args: Any) -> Any:
        """The compiled program for arguments of these shapes; compiled ahead, so that warming up runs nothing."""
        shapes = tuple(arg['tokens'].shape for arg in args if isinstance(arg, dict) and 'tokens' in arg)
        if (name, shapes) not in self._compiled:
            self._compiled[name, shapes] = getattr(self._programs, name)().lower(*args).compile()
        return self._compiled[name, shapes]

    def _run(self, name: str, *args: Any) -> Any:
        return self._program(name, *args)(*args)
