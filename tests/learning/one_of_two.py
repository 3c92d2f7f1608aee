"""One of two processes of four CPU devices each, for test_commands.py: INDEX PORT DIRECTORY WHAT.

WHAT is 'train', or 'leader dies' | 'follower dies' | 'follower hangs' | 'follower fails' in the middle of an update.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
import time

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'

import jax
import numpy as np

DEADLINE_S = 120.0
SHORT_DEADLINE_S = 15.0


def main(index: int, port: int, directory: pathlib.Path, what: str) -> None:
    jax.distributed.initialize(f'127.0.0.1:{port}', num_processes=2, process_id=index)
    from areal_jax.learning import commands
    from tests.learning.test_meshes import _GROUPS, _learner

    learner = _learner(fsdp=8)
    if index:
        _arrange(learner, what)
        commands.follow(learner, commands.accept_invitation())
        return
    followers = commands.invite('127.0.0.1', DEADLINE_S)
    deadline_s = SHORT_DEADLINE_S if what == 'follower hangs' else DEADLINE_S
    leader = commands.CommandLeader(learner, followers, deadline_s=deadline_s)
    (directory / 'ready').touch()
    if what == 'leader dies':
        os._exit(9)
    initial = leader.save()
    results = {'metrics': dict(leader.update(_GROUPS, 2)), 'published': leader.publish(3), 'saved': leader.save()}
    leader.restore(initial)
    results['restored'] = leader.save()
    leader.close()
    (directory / 'results.pickle').write_bytes(pickle.dumps(jax.tree.map(np.asarray, results)))


def _arrange(learner, what: str) -> None:
    """Makes this follower's next update go wrong."""
    if what == 'follower dies':
        learner.update = lambda *_: os._exit(9)
    if what == 'follower hangs':
        learner.update = lambda *_: time.sleep(3600)
    if what == 'follower fails':
        whole = learner.save

        def fail():
            whole()
            raise OSError('no space left')

        learner.save = fail


if __name__ == '__main__':
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4])
