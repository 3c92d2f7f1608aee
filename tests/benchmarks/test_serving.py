"""benchmarks/serving.py: what it counts in the event log while weights are exchanged, its clients, and its options."""

import asyncio
import itertools

import numpy as np
import pytest

from areal_jax.errors import UserError
from benchmarks import serving
from benchmarks.http_clients import answer, ask_all, make_bodies
from benchmarks.side_update import UpdateWatch
from benchmarks.workload import Requests
from tests.rollout.http.server.rig import ToyServer

REQUESTS = Requests((np.array([1, 2, 3]), np.array([2, 1])), (5, 7))


def decode(version, tokens=2, time=0.0):
    return {'kind': 'decode', 'time': time, 'version': version, 'tokens': tokens, 'slots': ['a', None]}


def watch(*events):
    found = UpdateWatch(slots=2)
    for event in events:
        found(event)
    return found.updates


STAGED = {'kind': 'run_done', 'work': 'load', 'time': 3.0}
SWAPPED = {'kind': 'interrupt', 'time': 4.0, 'requests': ['a']}
LOADED = {'kind': 'load', 'time': 5.5, 'version': 1, 'pause_seconds': 1.5}


def test_dispatches_of_old_weights_are_counted_from_staged_to_loaded():
    [update] = watch(decode(0), STAGED, decode(0), decode(0), SWAPPED, LOADED, decode(1))
    assert update == {
        'dispatches': 2.0,
        'old_tokens': 0.0,
        'interrupted': 1.0,
        'staged_to_swapped_s': 1.0,
        'rebuild_s': 1.5,
    }


def test_an_update_of_an_idle_server_is_no_measurement():
    with pytest.raises(RuntimeError, match='no load'):
        watch(decode(0), STAGED, LOADED)


def test_a_token_of_old_weights_after_the_load_is_seen():
    [update] = watch(STAGED, SWAPPED, LOADED, decode(1), decode(0, tokens=3))
    assert update['old_tokens'] == 3.0


def test_clients_get_all_answers_from_a_server():
    with ToyServer() as server:
        found = answer(server.url, REQUESTS, clients=2, temperature=1.0)
    assert found['tokens'] == 12.0
    assert found['mean_logprob'] <= 0


def test_clients_read_a_stream_as_they_read_a_reply():
    with ToyServer() as server:
        whole, streamed = (
            answer(server.url, REQUESTS, clients=1, temperature=0.0, stream=stream) for stream in (False, True)
        )
    assert streamed['tokens'] == whole['tokens'] == 12.0
    assert streamed['mean_logprob'] == pytest.approx(whole['mean_logprob'])  # the toy's depends on the position alone


def test_a_client_names_what_a_server_refused():
    with ToyServer() as server, pytest.raises(RuntimeError, match='answered 400'):
        answer(server.url, Requests((np.array([10**6]),), (3,)), clients=1, temperature=1.0)


def test_clients_share_the_bodies():
    """However many they are, each body is asked for once."""
    with ToyServer() as server:
        bodies = itertools.islice(itertools.cycle(make_bodies(REQUESTS, 1.0)), 9)
        assert asyncio.run(ask_all(server.url, bodies, 4))['answers'] == 9.0


@pytest.mark.parametrize(
    ('arguments', 'says'),
    [(['--rows=5'], '5'), (['--rows=4'], '--before'), (['--rows=1'], '--vllm_python'), (['--vllm_modes=fast'], 'fast')],
)
def test_options_that_cannot_be_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        serving.read_options(arguments)


def test_both_servers_get_the_sizes_of_the_engine():
    options = serving.read_options(['--prefill_buckets=64,512', '--vllm_python=v'])
    ours = serving.our_server(options, 'requests', 32).arguments
    theirs = serving.vllm_server(options, 'model', 'requests', 'eager').arguments
    assert {'--config.rollout.slots=32', '--config.rollout.context_tokens=640'} <= set(ours['command'])
    assert ours['command'].count('--config.rollout.prefill_buckets=(64,512)') == 1
    assert ours['engine']['prefill_buckets'] == [64, 512]
    assert (ours['flush'], theirs['flush']) == ('/flush_cache', '')
    assert {'--enforce-eager', '--no-enable-prefix-caching'} <= set(theirs['command'])
    assert theirs['environment']['VLLM_CPU_OMP_THREADS_BIND'] == 'nobind'
    assert theirs['command'][theirs['command'].index('--max-num-seqs') + 1] == '32'
