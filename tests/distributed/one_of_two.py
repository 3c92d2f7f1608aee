"""One of two processes of four CPU devices each, for test_two_processes.py: INDEX PORT DIRECTORY WHAT.

WHAT is 'train', or 'routes', the same update made with all groups in both processes and then led by process 0, with
recorded routes; or 'not finite' weights on process 1, or 'leader dies' | 'follower dies' | 'follower hangs' in the
middle of an update; or, with steps in the store DIRECTORY/store, 'restore', or 'follower dies writing' | 'follower may
not write' its shards of the second. 'publish' writes versions of the weights to files; 'remote' waits for a controller
that has no learner.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import pickle
import signal
import sys
import time

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'

import jax
import numpy as np

DEADLINE_S = 120.0
SHORT_DEADLINE_S = 15.0


def main(index: int, port: int, directory: pathlib.Path, what: str) -> None:
    jax.distributed.initialize(f'127.0.0.1:{port}', num_processes=2, process_id=index)
    from areal_jax.distributed.peers import Peers
    from areal_jax.distributed.remote_learner import CommandLeader, follow
    from areal_jax.distributed.rendezvous import accept_invitation, invite
    from tests.learning.test_meshes import ADAM, GROUPS, PARAMS, SGD, make_learner

    params = PARAMS
    if what == 'not finite':  # in the last row, which process 1 alone holds
        params = PARAMS | {'embedding': PARAMS['embedding'].at[-1, 0].set(np.nan)}
    shares = {'publication': 'leaves' if what in ('publish', 'remote') else 'gathered'}
    optimizer = ADAM if what == 'restore' else SGD
    if what == 'routes':
        _compare(index, directory)
        return
    learner = make_learner(fsdp=8, layers='stacked', params=params, optimizer=optimizer, changes=shares)
    if shares['publication'] == 'leaves':
        _publish(index, directory, learner, what)
        return
    if index:
        _arrange(learner, what)
        follow(learner, accept_invitation('', DEADLINE_S))
        return
    from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
    from areal_jax.learning.weights import NonFiniteError

    followers = invite('127.0.0.1', directory, '', DEADLINE_S)
    deadline_s = SHORT_DEADLINE_S if what == 'follower hangs' else DEADLINE_S
    leader = CommandLeader(learner, Peers(followers, deadline_s=deadline_s))
    (directory / 'ready').touch()
    if what == 'leader dies':
        os._exit(9)
    store = CheckpointStore(directory / 'store', keep=9)
    save = lambda step: store.save(step, leader.save(), {}, leader.followers)
    results = {}
    if what == 'restore':
        leader.restore(store.restore_latest()[1])
        save(store.latest() + 1)
    elif what == 'not finite':
        for command in (lambda: leader.require_finite('model.path', 'mend it'), leader.save):
            try:
                command()
            except NonFiniteError as error:
                results.setdefault('errors', []).append(str(error))
    elif 'writ' in what:
        save(0)
        try:
            save(1)
        except CheckpointError as error:
            results['error'] = str(error)
            results['metrics'] = dict(leader.update(GROUPS, 2))  # commands go on
    else:
        save(0)
        results = {'metrics': dict(leader.update(GROUPS, 2)), 'published': leader.publish(3)}
        save(1)
        leader.restore(store.restore(0)[0])
        save(2)
    leader.close()
    (directory / 'results.pickle').write_bytes(pickle.dumps(jax.tree.map(np.asarray, results)))


def _compare(index: int, directory: pathlib.Path) -> None:
    """Notes the metrics of both updates, as process 0 has them, and this process's shards after them."""
    from areal_jax.distributed.peers import Peers
    from areal_jax.distributed.remote_learner import CommandLeader, follow
    from areal_jax.distributed.rendezvous import accept_invitation, invite
    from tests.learning.test_routes import FOREIGN, make_learner

    make = lambda: make_learner(fsdp=8, rows_per_microbatch=8, n_minibatches=2, kl_coefficient=0.1)
    everywhere, led = make(), make()
    metrics = [dict(everywhere.update(FOREIGN, 2))]
    if index:
        follow(led, accept_invitation('', DEADLINE_S), deadline_s=DEADLINE_S)
    else:
        leader = CommandLeader(led, Peers(invite('127.0.0.1', directory, '', DEADLINE_S), deadline_s=DEADLINE_S))
        metrics.append(dict(leader.update(FOREIGN, 2)))
        leader.close()
    leaves = [jax.tree.leaves((each.state.params, each.state.optimizer)) for each in (everywhere, led)]
    shards = [[np.asarray(shard.data) for leaf in each for shard in leaf.addressable_shards] for each in leaves]
    (directory / f'compared_{index}.pickle').write_bytes(pickle.dumps((metrics, shards)))


def _publish(index: int, directory: pathlib.Path, learner, what: str) -> None:
    """Two versions, before and after an update; each process notes the bytes that it has fetched to its host."""
    from areal_jax.distributed.remote_learner import follow
    from areal_jax.publication.export import PartWriter
    from areal_jax.sharding import placement
    from areal_jax.sharding.rules import SharedLeaf
    from tests.learning.test_meshes import CONFIG

    fetched, join = [], SharedLeaf.join
    SharedLeaf.join = lambda leaf: fetched.append(leaf.dtype.itemsize * int(np.prod(leaf.shape))) or join(leaf)
    placement.multihost_utils = None  # nothing is gathered
    serve = functools.partial(follow, learner, versions=PartWriter(CONFIG))
    if what == 'remote':
        _serve_controller(serve, index, directory)
    elif index:
        from areal_jax.distributed.rendezvous import accept_invitation

        serve(accept_invitation('', DEADLINE_S))
    else:
        _lead_publication(directory, learner)
    (directory / f'fetched_{index}.json').write_text(json.dumps(fetched))


def _serve_controller(serve, index: int, directory: pathlib.Path) -> None:
    from areal_jax.distributed.handshake import Hello, Listener, key_path, load_key

    with Listener('127.0.0.1', 0, load_key(key_path(directory)), Hello(f'learner {index}', '')) as listener:
        (directory / f'address_{index}.partial').write_text(listener.address)
        (directory / f'address_{index}.partial').rename(directory / f'address_{index}')
        met = listener.accept(DEADLINE_S)
        serve(met.connection, met.hello.role, reports=index == 0, listener=listener, deadline_s=DEADLINE_S)


def _lead_publication(directory: pathlib.Path, learner) -> None:
    from areal_jax.checkpoint.store import CheckpointStore
    from areal_jax.distributed.peers import Peers
    from areal_jax.distributed.remote_learner import CommandLeader
    from areal_jax.distributed.rendezvous import invite
    from areal_jax.publication.files_channel import FilesChannel
    from tests.learning.test_meshes import CONFIG, GROUPS

    leader = CommandLeader(learner, Peers(invite('127.0.0.1', directory, '', DEADLINE_S), deadline_s=DEADLINE_S))
    channel = FilesChannel(directory / 'versions', CONFIG, verify=True, writers=leader.writers)
    channel.transfer(0, leader.publish(0))
    leader.update(GROUPS, 2)
    channel.transfer(1, leader.publish(1))
    CheckpointStore(directory / 'store').save(1, leader.save(), {}, leader.followers)
    leader.close()


def _arrange(learner, what: str) -> None:
    """Makes this follower's next update, or its second write, go wrong."""
    from areal_jax.checkpoint import shards
    from areal_jax.distributed import remote_learner

    if what == 'follower dies':
        learner.repeat_passes = lambda: os._exit(9)
    if what == 'follower hangs':
        learner.repeat_passes = lambda: time.sleep(3600)
    whole = remote_learner.write_shards

    def second(directory, leaves):
        remote_learner.write_shards = fail
        return whole(directory, leaves)

    def fail(directory, leaves):
        if what == 'follower dies writing':
            shards.sync_tree = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # its files are there, nobody knows
        else:
            os.seteuid(65534)  # nobody
        return whole(directory, leaves)

    if 'writ' in what:
        remote_learner.write_shards = second


if __name__ == '__main__':
    main(int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]), sys.argv[4])
