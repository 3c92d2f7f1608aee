"""One of two processes that save and restore a state that lies over both: INDEX PORT DIRECTORY; for test_shards.py.

Each writes DIRECTORY/INDEX.json: {'whole': bytes of the state, 'save': by how much the resident memory rose at most,
'restore': the same while a second state was read}.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'

import jax
import numpy as np
import psutil
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.checkpoint.shards import write_shards
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.distributed.peers import Peers
from areal_jax.distributed.remote_learner import COMMANDS, CommandLeader, follow
from areal_jax.distributed.rendezvous import accept_invitation, invite
from areal_jax.sharding.placement import copy_shards, place_regions
from areal_jax.sharding.rules import make_mesh

SHAPE, LEAVES = (4096, 4096), 16  # 64 MiB each, 1 GiB in all


class State:
    """The part of a learner that saves, and how much memory that takes here."""

    def __init__(self):
        self._sharding = NamedSharding(make_mesh(fsdp=8), PartitionSpec('fsdp'))
        fill = lambda number: lambda index: np.full((512, 4096), number, np.float32)
        self._leaves = {
            str(n): jax.make_array_from_callback(SHAPE, self._sharding, fill(n)) for n in range(LEAVES)
        }  # fmt: skip
        self.rises = {'whole': sum(leaf.nbytes for leaf in self._leaves.values())}

    def begin(self) -> None:
        pathlib.Path('/proc/self/clear_refs').write_text('5')  # the peak from here on
        self._before = psutil.Process().memory_info().rss

    def end(self, what: str) -> None:
        status = pathlib.Path('/proc/self/status').read_text()
        peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith('VmHWM'))
        self.rises[what] = peak - self._before

    def save(self):
        return {name: copy_shards(leaf) for name, leaf in self._leaves.items()}

    def restore(self, saved) -> None:
        read = {n: place_regions(leaf.__getitem__, leaf.shape, self._sharding) for n, leaf in saved.items()}
        for name, leaf in read.items():
            assert all((np.asarray(shard.data) == int(name)).all() for shard in leaf.addressable_shards)


def main(index: int, port: int, directory: pathlib.Path) -> None:
    jax.distributed.initialize(f'127.0.0.1:{port}', num_processes=2, process_id=index)
    state = State()
    write_shards(directory / f'import {index}', {'x': np.ones(1)})  # what orbax itself takes is not counted
    if index:
        follow(state, accept_invitation('', 60), commands=COMMANDS | {'begin', 'end'})
    else:
        leader = CommandLeader(state, Peers(invite('127.0.0.1', directory, '', 60), deadline_s=60))
        store = CheckpointStore(directory / 'store')
        leader.everywhere(state.begin)
        store.save(0, leader.save(), {}, leader.followers)
        leader.everywhere(state.end, 'save')
        leader.everywhere(state.begin)
        leader.restore(store.restore(0)[0])
        leader.everywhere(state.end, 'restore')
        leader.close()
    (directory / f'{index}.json').write_text(json.dumps(state.rises))


if __name__ == '__main__':
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
