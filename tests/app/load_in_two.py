"""One process of several that load a Hugging Face directory, for test_processes.py: INDEX PORT MODEL REPORT.

Compares, bit for bit, the shards that it holds with what one process alone loads, and writes {'shards': their number,
'held': values of distinct shards, 'whole': values of the model, 'read': {tensor: share of its rows read}} to REPORT;
process 0 does so also with the weights that a learner publishes.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import sys

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'

import jax
import numpy as np

from areal_jax.app.model.model import build_model
from areal_jax.app.parts.learner_builder import build_learner
from areal_jax.app.parts.part_settings import build_mesh
from areal_jax.app.roles.learner_role import join_processes
from areal_jax.config import TrackedConfig, default_config
from areal_jax.formats.hf_directory import load_hf
from areal_jax.formats.safetensors_file import StoredTensor


def main(index: int, port: int, directory: str, report: pathlib.Path) -> None:
    config = default_config()
    config.model.source, config.model.path = 'hf', directory
    config.cluster.learner, config.cluster.strategy = 'hosts=2 x fsdp=4,tensor=2', 'fsdp_tensor'
    config.learner.rows_per_microbatch, config.learner.layers = 4, 'stacked'
    config.distributed.coordinator = f'127.0.0.1:{port}'
    join_processes(config, index)
    rows = count_rows()
    tracked = TrackedConfig(config)
    model = build_model(tracked)
    read = {name: len(seen) / size for name, (seen, size) in rows.items()}
    held = require_equal_shards(model.params, whole := jax.device_get(load_hf(directory)[1]))
    published = build_learner(tracked, model, build_mesh(tracked)).publish(0)
    jax.tree.map(np.testing.assert_array_equal, published, whole)
    sizes = {'held': held, 'whole': sum(leaf.size for leaf in jax.tree.leaves(whole)), 'read': read}
    report.write_text(json.dumps(sizes))


def count_rows() -> dict[str, tuple[set[int], int]]:
    """Which rows of which tensor are read from here on: {name: (numbers, how many there are)}."""
    rows: dict[str, tuple[set[int], int]] = collections.defaultdict(lambda: (set(), 0))
    read = StoredTensor.read_rows

    def counted(tensor: StoredTensor, first: int, end: int) -> np.ndarray:
        rows[tensor.name] = (rows[tensor.name][0] | set(range(first, end)), tensor.shape[0])
        return read(tensor, first, end)

    StoredTensor.read_rows = counted
    return rows


def require_equal_shards(params: dict, whole: dict) -> int:
    """Values in distinct shards of this process, each equal to its part of the whole."""
    held = 0
    for leaf, expected in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        assert leaf.dtype == expected.dtype
        assert not leaf.is_fully_addressable
        parts = {str(shard.index): shard for shard in leaf.addressable_shards}
        for shard in parts.values():
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()
            held += shard.data.size
    return held


if __name__ == '__main__':
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4]))
