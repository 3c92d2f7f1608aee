"""A learner process of benchmarks/batches.py, which has everything but the model: INDEX COORDINATOR DIRECTORY BATCH."""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.app.parts.learner_builder import build_learner_settings
from areal_jax.config import TrackedConfig, default_config
from areal_jax.distributed.handshake import Hello, Listener
from areal_jax.distributed.remote_learner import follow
from areal_jax.learning.led_passes import STEP, PassCall, PassFollower, PassLeader, PassRows, Told
from areal_jax.learning.objective.counting import UpdatePrice
from areal_jax.learning.objective.objectives import require_advantages
from areal_jax.learning.passes import number_prompts, training_rows
from areal_jax.learning.row_layout import RowLayout
from areal_jax.models.families import Experts, ModelConfig
from areal_jax.sharding.rules import make_mesh
from areal_jax.types import TrajectoryGroup
from benchmarks.batches import CHOICES, DEADLINE_S, EXPERTS, PROCESSES, ROWS, VOCABULARY, Batch, note_largest

Numbers = dict[str, Any]


class StandIn:
    """A learner that packs, shares and places rows as SpmdLearner does, and runs no program on them.

    `update` and `repeat_passes` return CPU seconds and, if the version is 0, hashes of the rows.
    """

    def __init__(self, batch: Batch):
        config = default_config()
        config.learner.row_tokens, config.learner.row_loss_tokens = batch.row_tokens, batch.row_tokens
        config.learner.rows_per_microbatch = ROWS
        config.rollout.record_routes = bool(batch.layers)
        experts = Experts(EXPERTS, CHOICES, 8) if batch.layers else None
        model = ModelConfig(
            vocab_size=VOCABULARY, d_model=16, n_layers=max(batch.layers, 1), n_heads=2, n_kv_heads=2, head_dim=8,
            d_ff=16, rope_theta=1e4, family='qwen3_moe' if experts else 'qwen3', qk_norm=True, experts=experts,
        )  # fmt: skip
        self._settings, mesh = build_learner_settings(TrackedConfig(config)), make_mesh(fsdp=PROCESSES)
        self._layout = RowLayout(model, mesh, self._settings)
        self._largest = note_largest()

    def price(self) -> UpdatePrice:
        return UpdatePrice(self._layout.packing, 1, filters=False)

    def lead(self, send: Callable[[Sequence[Told]], None]) -> None:
        held = self._layout.rows_by_process()
        self._held = [held[index] for index in range(PROCESSES)]
        self._leader = PassLeader(send, self._held[1:])

    def follow(self, receive: Callable[[], Told]) -> None:
        self._follower = PassFollower(receive, self._layout.rows_by_process()[jax.process_index()])

    def update(self, groups: Sequence[TrajectoryGroup], version: int) -> Numbers:
        found: Numbers = {}
        if version % 2:  # before in one turn and after in the next: the second one may find a warm cache
            found['alone_s'] = self._pack(groups, version)[1]
        began_s = time.process_time()
        (rows, denominator), found['packing_s'] = self._pack(groups, version)
        before_s = time.thread_time()
        with self._leader.command():
            self._leader.share(PassCall(STEP, denominator=denominator, version=version), rows)
            found['sharing_s'] = time.thread_time() - before_s  # other threads encode, hash and send
            found['placing_s'] = self._place(rows)
        found |= {'cpu_s': time.process_time() - began_s, 'largest': self._largest()}
        found['tokens'] = int((rows.arrays['segment_ids'] > 0).sum())
        if version and not version % 2:
            found['alone_s'] = self._pack(groups, version)[1]
        return found if version else found | {'hashes': [_hash(rows.arrays, own) for own in self._held]}

    def repeat_passes(self) -> Numbers:
        began_s, hashed = time.process_time(), ''
        before_s, placing_s = time.thread_time(), 0.0
        for call, rows in self._follower.calls():
            sharing_s = time.thread_time() - before_s
            placing_s += self._place(rows)
            if not call.version:
                hashed = _hash(rows.arrays, None)
        cpu_s = time.process_time() - began_s
        return {
            'sharing_s': sharing_s, 'placing_s': placing_s, 'cpu_s': cpu_s, 'hash': hashed, 'largest': self._largest(),
        }  # fmt: skip

    def _pack(self, groups: Sequence[TrajectoryGroup], version: int) -> tuple[tuple[PassRows, float], float]:
        """((rows, denominator), CPU seconds)."""
        before_s, objective = time.thread_time(), self._settings.objective
        advantages = require_advantages(objective, groups)
        (batch,), _ = self._layout.pack(groups, advantages, n_minibatches=1, newest_version=version)
        rows, denominator = training_rows(batch, objective, prompts=number_prompts(groups))
        return (self._layout.fit(rows), denominator), time.thread_time() - before_s

    def _place(self, rows: PassRows) -> float:
        before_s = time.thread_time()
        for microbatch in self._layout.place_each(rows):
            jax.block_until_ready(microbatch)
        return time.thread_time() - before_s


def _hash(arrays: Mapping[str, np.ndarray], own: np.ndarray | None) -> str:
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(f'{name} {array.dtype}'.encode())
        for microbatch in array:
            found.update(np.ascontiguousarray(microbatch if own is None else microbatch[own]))
    return found.hexdigest()


def main(index: int, coordinator: str, directory: pathlib.Path, batch: Batch) -> None:
    jax.distributed.initialize(coordinator, num_processes=PROCESSES, process_id=index)
    learner = StandIn(batch)
    with Listener('127.0.0.1', 0, (directory / 'key').read_bytes(), Hello(f'learner {index}', '')) as listener:
        (directory / f'{index}.partial').write_text(listener.address)
        (directory / f'{index}.partial').rename(directory / f'address_{index}')
        connection = listener.accept(DEADLINE_S).connection
        follow(learner, connection, reports=True, listener=listener, deadline_s=DEADLINE_S)  # type: ignore[arg-type]


if __name__ == '__main__':
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), Batch(*json.loads(sys.argv[4])))
