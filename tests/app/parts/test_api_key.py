"""The key of servers: the user's, or that of a run, which its processes share and nobody else reads."""

import stat
import threading

import pytest

from areal_jax.app.parts.api_key import API_KEY, find_key, require_key
from areal_jax.distributed.handshake import KeyFileError, key_path, load_key
from areal_jax.errors import UserError
from areal_jax.rollout.http.server.thread import bind


@pytest.fixture(autouse=True)
def without_a_key(monkeypatch):
    monkeypatch.delenv(API_KEY, raising=False)


def test_the_key_of_the_user_wins_over_that_of_a_run(tmp_path, monkeypatch):
    assert find_key() == ''
    own = find_key(tmp_path)
    monkeypatch.setenv(API_KEY, 'mine')
    assert (find_key(), find_key(tmp_path)) == ('mine', 'mine')
    monkeypatch.setenv(API_KEY, '')
    assert find_key(tmp_path) == own


def test_all_processes_of_a_run_that_start_at_the_same_time_have_one_key_that_nobody_else_reads(tmp_path):
    keys, start = [], threading.Barrier(8)

    def find():
        start.wait(5)
        keys.append(find_key(tmp_path))

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    file = tmp_path / 'registry' / 'api_key'
    assert (len(keys), len(set(keys)), len(keys[0])) == (8, 1, 64)
    assert (file.read_text().strip(), stat.S_IMODE(file.stat().st_mode)) == (keys[0], 0o600)
    assert find_key(tmp_path / 'other') != keys[0] != load_key(key_path(tmp_path)).hex()


def test_a_key_that_others_could_read_is_refused(tmp_path):
    find_key(tmp_path)
    (tmp_path / 'registry' / 'api_key').chmod(0o644)
    with pytest.raises(KeyFileError, match='api_key has mode 644, so that others may know the key'):
        find_key(tmp_path)


@pytest.mark.parametrize('host', ['127.0.0.1', '127.8.9.1', 'localhost'])
def test_a_server_of_this_machine_alone_needs_no_key(host):
    with bind(host, 0) as listener:
        require_key(listener, '', is_insecure=False)


def test_a_server_that_other_machines_reach_needs_a_key_unless_that_is_meant():
    with bind('0.0.0.0', 0) as listener:
        require_key(listener, 'secret', is_insecure=False)
        require_key(listener, '', is_insecure=True)
        with pytest.raises(
            UserError, match=r'^--host=0\.0\.0\.0 lets other machines .*: set AREAL_JAX_API_KEY, or add --i'
        ):
            require_key(listener, '', is_insecure=False)
