"""Episodes of a server that speaks the wire of verifiers: their turns are rows of ids, their reward is the server's."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import pathlib
import sys

import pytest
import zmq

from areal_jax.agents.environment_host import EnvironmentHost
from areal_jax.agents.programs.program_host import Ending, Job
from areal_jax.tasks.environments.verifiers_task import PROGRAM_FILE, describe_environment
from tests.agents.gateway_rig import PROMPT, Run
from tests.agents.programs.loop_thread import is_alive, wait_for
from tests.agents.toy_format import ids_of

TOY = pathlib.Path(__file__).parent / 'toy'


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setenv('PYTHONPATH', str(TOY))


def make_host():
    return EnvironmentHost(sys.executable, PROGRAM_FILE, describe_environment('verifiers:toy', '', {}))


def make_job(do, **fields):
    environment = {'OPENAI_BASE_URL': 'http://127.0.0.1:9/v1', 'OPENAI_MODEL': 'policy'}
    return Job(environment, {'prompt': 'q', 'then': [], 'do': do, **fields})


def list_open_contexts():
    """Of ZMQ, by identity; those of other tests too."""
    return {id(one) for one in gc.get_objects() if isinstance(one, zmq.Context) and not one.closed}


async def run_together(host, jobs):
    return await asyncio.gather(*map(host.run, jobs))


def run_episode(*answers, prompt='q', then=('again',), **fields):
    problem = {'prompt': prompt, 'then': list(then), **fields}
    run_fields = {name: problem.pop(name) for name in ('deadline_s', 'pool', 'max_turns') if name in problem}
    return Run(None, *answers, host=make_host(), prompt=dataclasses.replace(PROMPT, problem=problem), **run_fields)


def test_the_turns_of_an_environment_are_one_row_and_its_reward_is_in_the_episode():
    run = run_episode(ids_of('a'), ids_of('b'))
    ((first, between, second),) = run.rows
    assert (first, second) == (ids_of('a'), ids_of('b'))
    assert run.pool.requests[1].prompt_tokens.tolist() == [*PROMPT.tokens, *first, *between]
    outcome = {
        'reward': 1.0,
        'rewards': {'long': 0.5, 'none': 1.0},
        'metrics': {'turns': 2.0},
        'stop': 'agent_completed',
    }
    assert (run.ends, run.episode.counts, run.episode.outcome) == (('stop', 'stop'), {'joined': 2}, outcome)


@pytest.mark.parametrize(
    ('do', 'said'),
    [
        ('die', 'the server of the environment ended: it was killed by SIGKILL'),
        ('raise', 'the environment: OSError: the box is gone'),
        ('unscored', 'the environment gave no reward: long did not score'),
        ('infinite', 'the environment gave the reward inf'),
        ('two', 'its episode has 2 traces, and one agent is trained'),
        ('lacks', 'the record of an episode lacks messages that its server counts'),
        ('fails', 'the environment: ValueError: no such task'),
        ('rewrite', '2 turns in the record of its environment were never sampled'),
        ('garbage', 'a message of 3 frames cannot be read'),
        ('number', 'a message holds a int, and no object'),
    ],
)
def test_what_an_environment_does_wrong_ends_its_episode_without_a_reward(do, said):
    run = run_episode(ids_of('a'), ids_of('b'), do=do)
    assert (run.episode.label, run.episode.outcome) == ('env_error', None)
    (error,) = run.errors
    assert str(error).startswith(said)


def test_a_turn_that_is_not_in_the_record_is_not_trained():
    run = run_episode(ids_of('a'), ids_of('b'), do='forget')
    assert (run.rows, run.ends) == ([[]], ('agent_error', None))
    assert run.episode.counts == {'undelivered': 2}


def test_a_spent_budget_is_told_in_words_that_clients_know():
    run = run_episode(ids_of('a'), ids_of('b'), max_turns=1)
    assert run.episode.label == 'env_error'
    assert 'this episode has had all its turns' in str(run.errors[0])
    run = run_episode(ids_of('a'), prompt='q' * 500, then=())
    assert 'maximum context length' in str(run.errors[0])


def test_a_late_episode_ends_and_so_does_its_server_with_the_run():
    run = run_episode(ids_of('a'), do='hang', deadline_s=2.0)
    assert run.episode.label == 'deadline'
    assert not is_alive(run.host.pid)


def test_a_cancelled_episode_is_cancelled_in_its_server_which_serves_others(loop, tmp_path):
    host = make_host()
    hanging = loop.start(host.run(make_job('hang', file=str(tmp_path / 'cancelled'))))
    assert loop.run(host.run(make_job('raise'))).detail == 'the environment: OSError: the box is gone'
    hanging.cancel()
    wait_for((tmp_path / 'cancelled').exists)
    loop.run(host.close())
    assert loop.run(host.run(make_job('raise'))) == Ending('failed', 'the run has ended')


def test_a_close_that_is_given_up_leaves_no_socket_open(loop):
    """A context of ZMQ with an open socket hangs the thread that collects it; its process may take long to end."""
    host, before = make_host(), list_open_contexts()
    assert loop.run(host.run(make_job('raise'))).status == 'lost'

    async def begin():
        closing = asyncio.create_task(host.close())
        await asyncio.sleep(0)
        found = list_open_contexts()
        closing.cancel()
        await asyncio.wait([closing])
        return found

    assert loop.run(begin()) <= before
    loop.run(host.close())
    assert not is_alive(host.pid)


def test_another_server_takes_the_place_of_one_that_died(loop):
    host = make_host()
    endings = loop.run(run_together(host, [make_job('hang'), make_job('die')]))
    died = 'the server of the environment ended: it was killed by SIGKILL, which the kernel sends where memory runs out'
    assert endings == [Ending('lost', died)] * 2
    first = host.pid
    assert loop.run(host.run(make_job('raise'))).detail == 'the environment: OSError: the box is gone'
    assert (is_alive(first), is_alive(host.pid)) == (False, True)
    loop.run(host.close())
    assert not is_alive(host.pid)


def test_a_server_that_cannot_start_says_why_without_its_key(monkeypatch):
    monkeypatch.setenv('SAYS', 'no such harness')
    run = run_episode(ids_of('a'))
    said = str(run.errors[0])
    assert said.startswith('the server of the environment ended: it ended with exit code 3; its last line: no such')
    assert '*** {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}' in said
