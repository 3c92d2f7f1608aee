"""Simulated agents: the events of a real run, jumps that change nothing, a cache that keeps conversations, bounds."""

from __future__ import annotations

import collections
import json

import pytest

from areal_jax import main_check_log
from areal_jax.config.fields import ConfigError
from areal_jax.errors import ExitCode
from areal_jax.simulation.count_backend import result_tokens
from tests.app.simulate.test_simulated_run import (
    kill_and_resume,
    read_events,
    simulate,
    simulate_again,
    simulate_both_ways,
)
from tests.app.small import SmallRun

AGENT = """
async def look():
    return '='


async def agent(chat, call_tool, prompt):
    history = [{'role': 'user', 'content': prompt.problem['question']}]
    for turn in range(2 + prompt.draw % 3):
        reply = await chat(history)
        if reply.finish_reason == 'length' or turn == 1 + prompt.draw % 3:
            return
        await call_tool('tool', turn, look)
        result = {'role': 'tool', 'content': '==', 'tool_call_id': 'x', 'name': 'tool'}
        history = [*history, reply.message, result]
"""
EPISODES = {
    'simulation__turns': 'uniform(1, 4)', 'simulation__answers': 'lognormal(100, 0.75)',
    'simulation__results': 'uniform(20, 60)', 'simulation__tool': 'lognormal(300, 1)',
}  # fmt: skip


def episodes(workdir):
    return [event for event in read_events(workdir) if event['kind'] == 'finish']


def calls(workdir):
    return [e for e in read_events(workdir) if e['kind'] == 'run_done' and e['work'] == 'tool']


def most_at_once(spans):
    return max(sum(start <= at < end for start, end in spans) for at, _ in spans)


@pytest.fixture(scope='module')
def agents(tmp_path_factory):
    """The workdir of a real run of agents, and its config."""
    workdir = tmp_path_factory.mktemp('agents')
    (workdir / 'agent.py').write_text(AGENT)
    fields = {
        'task__verifier': 'process', 'task__symbols': 8, 'cluster__engines': '2 x shared', 'staleness__eta': 2.0,
        'learner__filter_equal_rewards': False, 'rollout__workflow': f'{workdir / "agent.py"}:agent',
        'rollout__max_new_tokens': 24, 'rollout__context_tokens': 64, 'agent__max_turn_tokens': 10,
        'agent__max_turns': 3, 'rollout__max_running_groups': 2,
    }  # fmt: skip
    return SmallRun(workdir / 'real', **fields).train(), fields


def test_a_simulation_of_agents_has_the_events_of_the_run_whose_turns_it_has(tmp_path, agents, monkeypatch):
    """Turns, results and budgets are those of the run, and every event comes at the same nanosecond."""
    of_run, again = simulate_again(*agents, tmp_path, monkeypatch)
    assert again == of_run
    assert {event['reason'] for event in episodes(tmp_path)} >= {'stop', 'turns'}
    assert any(event.get('kept', [0])[0] for event in again if event['kind'] == 'prefill')
    assert calls(tmp_path)


@pytest.mark.parametrize(
    'fields',
    [
        pytest.param({}, marks=pytest.mark.slow),
        {'rollout__kv_policy': 'keep'},
        pytest.param({'rollout__cache_tokens': 2048}, marks=pytest.mark.slow),
        {'agent__tool_calls': 1},
    ],
    ids=['recompute', 'keep', 'preempted', 'one tool at a time'],
)
def test_joined_dispatches_change_no_event_but_their_own(tmp_path, fields):
    simulate_both_ways(tmp_path, run__steps=4, **EPISODES, **fields)
    assert main_check_log.main([str(tmp_path / 'True')]) == ExitCode.FINISHED
    assert {event['turns'] for event in episodes(tmp_path / 'True')} == {1, 2, 3, 4}


def test_a_turn_finds_its_conversation_in_the_cache(tmp_path):
    """Of later prompts the results of tools alone are computed, where no new weights empty the cache."""
    fields = {'staleness__eta': 50.0, 'run__steps': 2, 'learner__groups_per_update': 6, 'rollout__slots': 16}
    report = simulate(tmp_path, **EPISODES, **fields, rollout__kv_policy='keep').train()
    events = read_events(tmp_path)
    first = next(event['time'] for event in events if event['kind'] == 'publish' and event['version'] == 1)
    computed = sum(e['prompt_tokens'] for e in events if e['kind'] == 'prefill' and e['time'] < first)
    kept = sum(sum(e.get('kept', ())) for e in events if e['kind'] == 'prefill' and e['time'] < first)
    assert kept > 2 * computed
    assert report['agents']['turns'] == pytest.approx(2.5, abs=0.6)
    assert report['agents']['tools']['tool']['calls'] == len(calls(tmp_path))


def test_tools_take_the_seconds_that_are_drawn_and_so_many_at_once(tmp_path):
    simulate(tmp_path, run__steps=2, **{**EPISODES, 'simulation__tool': 'constant(250)'}, agent__tool_calls=2).train()
    done = calls(tmp_path)
    assert {event['seconds'] for event in done} == {0.25}
    assert most_at_once([(event['started'], event['time']) for event in done]) == 2


@pytest.mark.parametrize('programs', [3, 64])
def test_programs_wait_for_a_place(tmp_path, programs):
    fields = {'rollout__workflow': 'program', 'agent__command': 'python agent.py', 'agent__programs': programs}
    simulate(tmp_path, run__steps=2, **EPISODES, **fields, rollout__episode_deadline_s=500.0).train()
    begun, spans = {}, []
    for event in read_events(tmp_path):
        if event['kind'] == 'route':
            begun.setdefault((event['draw'], event['sample']), event['time'])
        elif event['kind'] == 'finish':
            spans.append((begun[event['draw'], event['sample']], event['time']))
    most = most_at_once(spans)
    assert most == 3 if programs == 3 else most > 3


def test_an_episode_that_is_late_has_no_reward(tmp_path):
    (tmp_path / 'agent.py').write_text(AGENT)
    fields = {'rollout__workflow': f'{tmp_path / "agent.py"}:agent', 'rollout__episode_deadline_s': 5.0}
    run = {**EPISODES, 'simulation__tool': 'lognormal(3000, 1.5)', **fields}
    report = simulate(tmp_path / 'run', run__steps=2, **run).train()
    reasons = collections.Counter(event['reason'] for event in episodes(tmp_path / 'run'))
    assert reasons['deadline']
    assert reasons['stop']
    assert report['agents']['ended']['deadline'] == reasons['deadline']


def test_a_simulation_of_agents_that_is_killed_goes_on_as_one(tmp_path):
    kill_and_resume(tmp_path, 2, run__steps=4, checkpoint__every=1, **EPISODES)
    assert main_check_log.main([str(tmp_path / 'killed')]) == ExitCode.FINISHED


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'rollout__workflow': 'agent.py:agent'}, 'its code is not run; say how many turns an episode has'),
        ({'simulation__turns': 'constant(2)', 'simulation__answers': 'log(runs/one)'}, 'the run brings its own turns'),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        simulate(tmp_path, **fields).train()


def test_a_turn_is_known_by_the_result_before_it():
    assert result_tokens(3, 2).tolist() == [4, 4]
    with pytest.raises(ConfigError, match='an episode has more than 1024 turns'):
        result_tokens(1023, 1)


def test_the_log_of_agents_needs_their_config(tmp_path, agents):
    real, _ = agents
    with pytest.raises(ConfigError, match=r"have several turns, and rollout.workflow='single_turn'"):
        simulate(tmp_path / 'other', simulation__answers=f'log({real.workdir})')
    forked = tmp_path / 'forked'
    forked.mkdir()
    with (forked / 'events.jsonl').open('w') as file:
        for event in read_events(real.workdir):
            is_end = event['kind'] == 'finish'
            file.write(json.dumps(event | ({'rows': [1, 2], 'forks': ['history']} if is_end else {})) + '\n')
    with pytest.raises(ConfigError, match='has episodes of several rows'):
        simulate(tmp_path / 'rows', simulation__answers=f'log({forked})')
