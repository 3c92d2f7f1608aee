"""Two processes of four devices, under jax.distributed, against one of eight; led by one of them or by a controller
without a learner; and what becomes of the others when one is gone."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import re
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.distributed.handshake import Hello, connect, key_path, load_key
from areal_jax.distributed.peers import Peers
from areal_jax.distributed.remote_learner import RemoteChannel, RemoteLearner
from areal_jax.publication.files_channel import FilesChannel, find_version, load_version
from tests.learning.test_meshes import ADAM, CONFIG, GROUPS, PARAMS, make_learner, update_once


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def _start(tmp_path, what: str) -> list[subprocess.Popen]:
    command = [sys.executable, '-m', 'tests.distributed.one_of_two']
    port = str(_free_port())
    return [
        subprocess.Popen([*command, str(i), port, str(tmp_path), what], stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    processes = _start(tmp_path, 'train')
    expected, weights = update_once(make_learner(fsdp=8))
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], errors
    results = pickle.loads((tmp_path / 'results.pickle').read_bytes())
    for name, value in expected.items():
        np.testing.assert_allclose(results['metrics'][name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    initial, saved, again = (_read(tmp_path, step) for step in range(3))
    for tree in (results['published'], saved['params']):
        for found, one, before in zip(*map(jax.tree.leaves, (tree, weights, PARAMS)), strict=True):
            assert np.linalg.norm(found - one) <= 1e-5 * np.linalg.norm(one - np.asarray(before))
    jax.tree.map(np.testing.assert_array_equal, again, initial)
    jax.tree.map(np.testing.assert_array_equal, initial['params'], jax.device_get(PARAMS))


@pytest.mark.slow
def test_rows_from_process_0_make_the_update_of_two_processes_that_each_pack_everything(tmp_path):
    processes = _start(tmp_path, 'routes')
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], errors
    for index in range(2):
        metrics, (everywhere, led) = pickle.loads((tmp_path / f'compared_{index}.pickle').read_bytes())
        assert metrics[0] == metrics[-1]
        assert metrics[0]['routes/recorded'] == 1
        assert len(everywhere) == len(led) > 20
        for expected, found in zip(everywhere, led, strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
def test_what_one_process_holds_is_refused_by_all(tmp_path):
    processes = _start(tmp_path, 'not finite')
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], errors
    loaded, saved = map(str, pickle.loads((tmp_path / 'results.pickle').read_bytes())['errors'])
    assert loaded == "model.path: 1 of the 1024 values of 'embedding' are NaN or infinite; mend it"
    assert saved.startswith("the trained weights: 1 of the 1024 values of 'embedding'")


def _read(tmp_path, step: int):
    return jax.tree.map(np.asarray, CheckpointStore(tmp_path / 'store').restore(step)[0])


@pytest.mark.slow
def test_a_checkpoint_of_one_process_is_that_of_two_and_back(tmp_path):
    make = lambda: make_learner(optimizer=ADAM, fsdp=2, tensor=2, strategy='fsdp_tensor')
    one, other = make(), make()
    update_once(one)
    store = CheckpointStore(tmp_path / 'store', keep=9)
    store.save(0, saved := one.save(), {})
    processes = _start(tmp_path, 'restore')  # stacked, on fsdp=8; saves what it has restored
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], errors
    arrays = store.restore(1)[0]
    pieces = [piece for leaf in jax.tree.leaves(arrays) for piece in leaf.pieces]
    assert {piece.tree.split('/')[0] for piece in pieces} == {'writer_0000', 'writer_0001'}
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, arrays), saved)
    other.restore(arrays)
    jax.tree.map(np.testing.assert_array_equal, other.save(), saved)


def _require_versions(tmp_path):
    """The files of both versions hold what one process would have written, and no process fetched more than its part.

    The checkpoint has the weights of version 1 as each process holds its shards.
    """
    trained = _read(tmp_path, 1)['params']
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(trained))
    for version, params in enumerate((jax.device_get(PARAMS), trained)):
        alone = FilesChannel(tmp_path / 'alone', CONFIG, verify=True).transfer(version, jax.device_put(params))
        written = find_version(tmp_path / 'versions' / f'v{version:06d}', version)
        assert written.manifest_hash == alone.manifest_hash
        expected = load_file(pathlib.Path(alone.handle) / 'model.safetensors')
        files = sorted(pathlib.Path(written.handle).glob('model-*.safetensors'))
        assert [file.name for file in files] == [f'model-0000{n}-of-00002.safetensors' for n in (1, 2)]
        found = [load_file(file) for file in files]
        assert sum(map(len, found)) == len(expected)
        for name, values in (item for file in found for item in file.items()):
            assert values.tobytes() == expected[name].tobytes(), name
        load_version(written, CONFIG, verify=True)  # every digest
    fetched = [sum(json.loads((tmp_path / f'fetched_{index}.json').read_text())) for index in range(2)]
    assert sum(fetched) == 2 * total  # two versions
    assert max(fetched) - min(fetched) <= 2 * max(leaf.nbytes for leaf in jax.tree.leaves(trained))


@pytest.mark.slow
def test_two_processes_publish_the_files_of_one_and_neither_holds_all(tmp_path):
    processes = _start(tmp_path, 'publish')
    errors = [p.communicate(timeout=300)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], errors
    _require_versions(tmp_path)


@pytest.mark.slow
def test_a_controller_without_a_learner_drives_two_processes(tmp_path):
    processes = _start(tmp_path, 'remote')
    expected, weights = update_once(make_learner(fsdp=8))
    try:
        hello, key = Hello('controller', ''), load_key(key_path(tmp_path))
        addresses = [_wait_for(tmp_path / f'address_{index}', processes) for index in range(2)]
        named = [(f'learner {i}', connect(each, key, hello, 60).connection) for i, each in enumerate(addresses)]
        peers = Peers(named, deadline_s=120, on_lost=print)
        learner, channel = RemoteLearner(peers), RemoteChannel(peers, tmp_path / 'versions')
        store = CheckpointStore(tmp_path / 'store', keep=9)
        save = lambda step: store.save(step, learner.save(), {'step': step}, learner.followers)
        assert learner.warm_up() > 1
        save(0)
        channel.transfer(0, learner.publish(0))
        assert learner.update_tokens(GROUPS) == make_learner(fsdp=8).update_tokens(GROUPS)
        metrics = learner.update(GROUPS, 2)
        copy = learner.publish(1)
        later = learner.update(GROUPS, 3)  # does not touch what was published
        learner.restore(store.restore(0)[0])
        again = learner.update(GROUPS, 2)
        channel.transfer(1, copy)
        save(1)
        answer = GROUPS[0].trajectories[0]
        scored = learner.score(3, answer.prompt.tokens, answer.answer_tokens)
        learner.close()
        errors = [p.communicate(timeout=60)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], errors
    assert again == metrics != later
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert scored.shape == answer.answer_tokens.shape
    for found, one, before in zip(*map(jax.tree.leaves, (_read(tmp_path, 1)['params'], weights, PARAMS)), strict=True):
        assert np.linalg.norm(found - one) <= 1e-5 * np.linalg.norm(one - np.asarray(before))
    _require_versions(tmp_path)


def _wait_for(path: pathlib.Path, processes) -> str:
    end = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < end
        assert all(p.poll() is None for p in processes), [p.communicate() for p in processes if p.poll() is not None]
        time.sleep(0.05)
    return path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('what', 'survivor', 'message'),
    [
        ('follower dies', 0, 'follower 1 is gone; the run ends here, go on from the last checkpoint with --resume'),
        ('follower hangs', 0, 'took more than 15 s; the run ends here'),
        ('leader dies', 1, 'process 0 is gone'),
        ('follower dies writing', 0, 'follower 1 is gone; the run ends here'),
    ],
)
def test_one_that_is_gone_ends_the_other(tmp_path, what, survivor, message):
    processes = _start(tmp_path, what)
    try:
        error = processes[survivor].communicate(timeout=180)[1]
    finally:
        for p in processes:
            p.kill()
    assert processes[survivor].returncode == 75, error
    assert message in error
    if what == 'follower dies writing':
        assert CheckpointStore(tmp_path / 'store').latest() == 0  # the step before stands and can be read
        assert (tmp_path / 'store' / '.step_00000001.partial' / 'arrays' / 'writer_0001').exists()
        jax.tree.map(np.testing.assert_array_equal, _read(tmp_path, 0)['params'], jax.device_get(PARAMS))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason='only root can become another user')
def test_a_follower_that_may_not_write_is_named_and_the_step_before_stands(tmp_path):
    processes = _start(tmp_path, 'follower may not write')
    errors = [p.communicate(timeout=180)[1] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], errors
    results = pickle.loads((tmp_path / 'results.pickle').read_bytes())
    expected = (
        r'saving step 1 to .*/store failed \(follower 1: PermissionError: .*The checkpoint of step 0 is untouched'
    )
    assert re.match(expected, str(results['error']))
    assert 'loss/value' in results['metrics']
    assert [path.name for path in (tmp_path / 'store').iterdir()] == ['step_00000000']
