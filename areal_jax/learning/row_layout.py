"""The rows of a learner on its mesh: their shapes, the packing of groups into them, and their placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from areal_jax.columns import declared
from areal_jax.config.cluster import LEARNER
from areal_jax.config.fields import ConfigError
from areal_jax.learning import packed_rows
from areal_jax.learning.forward import require_heads
from areal_jax.learning.led_passes import PassRows
from areal_jax.learning.packing import empty_batch, pack
from areal_jax.learning.settings import LearnerSettings
from areal_jax.models.attention.backends import BACKENDS, shares_prompts
from areal_jax.models.attention.check import choose_checked
from areal_jax.models.experts import require_experts
from areal_jax.models.families import ModelConfig, require_delta_heads
from areal_jax.sharding.placement import describe, place, place_rows
from areal_jax.sharding.rules import data_shards, nearest_device, row_sharding, rows_by_process
from areal_jax.types import PackedBatch, TrajectoryGroup


class RowLayout:
    """Rows of one learner. Arrays are numpy, except for the jax arrays that `place` returns.

    Raises ConfigError for shapes that the mesh cannot share evenly, and AttentionError for an attention backend that
    was asked for by name and computes wrong values here.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, settings: LearnerSettings):
        self._config, self._mesh, self._settings = config, mesh, settings
        halves = packed_rows.tail_buckets(*settings.learner.row_room, 1 + settings.learner.tail_buckets)
        self._buckets = tuple(sorted({*halves, *packed_rows.smaller_rows(halves[-1], settings.learner.row_buckets)}))
        _require_model(config, mesh)
        for field, value, off in (
            ('rollout.record_routes', settings.records_routes, False),
            ('learner.router_aux_loss', settings.learner.router_aux_loss, 0),
        ):
            if value and config.experts is None:
                raise ConfigError(f'{field}={value} needs a model with experts; set it to {off}')
        self.expert_shape = (config.n_expert_layers, config.experts.count if config.experts else 0)
        _require_rows(self._buckets, settings.learner.rows_per_microbatch, mesh)
        self.attention, self.passed_over = choose_checked(
            settings.learner.attention,
            tokens=settings.learner.row_tokens,
            dtype=settings.learner.dtype,
            head_dim=config.head_dim,
            window=next((window for window in config.windows if window), None),
            slices=mesh.shape['context'] > 1,
            sinks=config.sinks,
            device=nearest_device(mesh),
        )
        # not every attention backend can show one prompt to several answers
        self.packing = settings.learner.packing if shares_prompts(self.attention) else 'ordinary'
        most = BACKENDS[self.attention].max_segments
        self._row_trajectories = most and most - 1  # the padding is a segment too
        self._cost = packed_rows.decoder_cost(config)
        self._columns = tuple(column for column in declared() if column.packed)
        self.inputs = config.columns if settings.records_routes else ()

    def pack(
        self,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[np.ndarray],
        *,
        n_minibatches: int,
        oldest_version: int | None = None,
        newest_version: int | None = None,
        round_microbatches: bool = False,
        masks_truncated: bool = False,
        keeps_groups: bool = False,
    ) -> tuple[list[PackedBatch], packed_rows.PackingReport]:
        """See packing.pack."""
        settings = self._settings
        return pack(
            groups,
            advantages,
            mode=self.packing,
            fill=settings.learner.fill,
            row_tokens=settings.learner.row_tokens,
            row_loss_tokens=settings.learner.row_loss_tokens,
            rows_per_microbatch=settings.learner.rows_per_microbatch,
            data_shards=data_shards(self._mesh),
            cost=self._cost,
            buckets=self._buckets,
            vocab_size=self._config.vocab_size,
            n_minibatches=n_minibatches,
            oldest_version=oldest_version,
            newest_version=newest_version,
            round_microbatches=round_microbatches,
            masks_truncated=masks_truncated,
            keeps_groups=keeps_groups,
            row_trajectories=self._row_trajectories,
            columns=self._columns,
            inputs=self.inputs,
        )

    def fit(self, rows: Mapping[str, np.ndarray]) -> PassRows:
        """Rows [M, R, ...] with the smallest declared shape that holds each micro-batch."""
        used = [{name: rows[name][m] for name in ('segment_ids', 'loss_mask')} for m in range(len(rows['tokens']))]
        return PassRows(rows, [packed_rows.tail_bucket(one, self._buckets) for one in used])

    def place_each(self, rows: PassRows) -> Iterator[dict[str, jax.Array]]:
        """Places each micro-batch on the mesh, trimmed to its shape, when it is asked for."""
        for m, shape in enumerate(rows.shapes):
            one = {name: array[m] for name, array in rows.arrays.items()}
            yield self.place(packed_rows.trim(one, shape), rows.own)

    def join_logprobs(self, logprobs: Sequence[jax.Array]) -> np.ndarray:
        """float32 [M, R, N] from one array per micro-batch, which has the N of its bucket; 0 in trimmed places."""
        settings = self._settings
        shape = (len(logprobs), settings.learner.rows_per_microbatch, settings.learner.row_loss_tokens)
        whole = np.zeros(shape, np.float32)
        for row, part in zip(whole, jax.device_get(list(logprobs)), strict=True):
            row[:, : part.shape[1]] = part
        return whole

    def place(self, rows: Mapping[str, np.ndarray], own: np.ndarray | None = None) -> dict[str, jax.Array]:
        """Places rows [R, ...] or [M, R, ...] on the mesh; `own`: see PassRows."""
        sharding = self._sharding(rows)
        if own is None:
            return place(dict(rows), sharding)
        axis, count = rows['tokens'].ndim - 2, self._settings.learner.rows_per_microbatch
        return {name: place_rows(array, axis, own, count, sharding) for name, array in rows.items()}

    def rows_by_process(self) -> dict[int, np.ndarray]:
        """See sharding.rules.rows_by_process."""
        return rows_by_process(self._mesh, self._settings.learner.rows_per_microbatch)

    def describe(self, rows: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes the result of `place`, also on a mesh of devices that are not there."""
        return describe(dict(rows), self._sharding(rows))

    def _sharding(self, rows: Mapping[str, np.ndarray]) -> NamedSharding:
        return row_sharding(self._mesh, leading_axes=rows['tokens'].ndim - 2)

    def empty_batches(self) -> Iterator[PackedBatch]:
        """Yields a batch of padding for every shape that an update may have."""
        settings = self._settings
        sizes = [1]  # micro-batches
        if settings.learner.accumulate == 'scan':
            sizes += [2 << i for i in range(max(settings.max_microbatches - 1, 0).bit_length())]
        for size in sizes:
            for bucket in self._buckets:
                yield empty_batch(size, settings.learner.rows_per_microbatch, *bucket, self._columns, self.inputs)


def _require_model(config: ModelConfig, mesh: Mesh) -> None:
    tensor = mesh.shape['tensor']
    require_experts(config, mesh.shape['expert'], LEARNER)
    require_heads(config.n_heads, config.n_kv_heads, tensor)
    require_delta_heads(config, tensor, LEARNER)
    if config.delta is not None and (context := mesh.shape['context']) > 1:
        raise ConfigError(
            f'context={context} of {LEARNER} cuts rows, and the states of delta nets do not travel between devices: '
            'use fsdp, tensor or data'
        )
    if config.vocab_size % tensor:
        raise ConfigError(
            f'tensor={tensor} of cluster.learner does not divide the {config.vocab_size} tokens of the vocabulary; '
            'use a divisor of it, or shard with fsdp'
        )


def _require_rows(buckets: Sequence[packed_rows.RowShape], rows_per_microbatch: int, mesh: Mesh) -> None:
    shards, context = data_shards(mesh), mesh.shape['context']
    if rows_per_microbatch % shards:
        raise ConfigError(
            f'learner.rows_per_microbatch={rows_per_microbatch} must be a multiple of the {shards} '
            'devices that rows lie over (data * fsdp * expert of cluster.learner)'
        )
    halves = 2 * context if context > 1 else 1  # each device has an early and a late slice of a row
    for bucket in buckets:
        if bucket.tokens % halves:
            raise ConfigError(
                f'learner.row_tokens (or a smaller row)={bucket.tokens} must be a multiple of {halves}, '
                f'twice context={context} of cluster.learner'
            )
        if bucket.loss_tokens % context:
            raise ConfigError(
                f'learner.row_loss_tokens (or that of a smaller row)={bucket.loss_tokens} must be a multiple of '
                f'context={context} of cluster.learner'
            )
