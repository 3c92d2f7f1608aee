"""An agent of two turns with a tool, end to end: what is trained, under which log-probs, and that a resume is exact."""

from __future__ import annotations

import json

import numpy as np
import pytest

from areal_jax import main_check_log
from areal_jax.plugins import load_module
from areal_jax.report.event_log import load_events
from areal_jax.telemetry.rollout_views import read_rollouts
from areal_jax.types import NOT_GENERATED
from tests.app.small import SmallRun, open_episodes, require_same, resume_at
from tests.app.test_rollouts import require_equal
from tests.app.test_session import logprob_gaps
from tests.report.pages.test_slot_timeline import require_drawn

AGENT = """
import json

from areal_jax.tasks import token_reversal

CALLS, EPISODES = [], []

async def agent(chat, call_tool, problem):
    history = [{'role': 'user', 'content': problem['question']}]
    first = await chat(history)
    if first.finish_reason == 'length':
        return

    async def look_up():
        CALLS.append(problem['question'])
        return '='

    mark = await call_tool('look_up', {'text': first.text}, look_up)
    second = await chat([*history, first.message, {'role': 'user', 'content': mark}])
    if problem['question'].startswith('a') and second.finish_reason == 'stop':
        await chat(history)  # once more from the beginning: another row

def score(problem, text, finish_reason, episode):
    EPISODES.append(json.dumps(episode))
    return token_reversal.score(problem, text, finish_reason)
"""
EOS = 0
FIELDS = {
    'rollout__max_new_tokens': 11, 'agent__max_turn_tokens': 6,
    'checkpoint__every': 1, 'checkpoint__keep': 6, 'run__steps': 5,
}  # fmt: skip


@pytest.fixture(scope='module')
def fields(tmp_path_factory):
    path = tmp_path_factory.mktemp('agent') / 'agent.py'
    path.write_text(AGENT)
    return {**FIELDS, 'rollout__workflow': f'{path}:agent', 'task__reward': f'{path}:score'}


@pytest.fixture(scope='module')
def whole(tmp_path_factory, fields):
    run = SmallRun(tmp_path_factory.mktemp('run') / 'whole', **fields).train()
    run.described = take_described(fields)
    return run


def take_described(fields):
    """What the scorer has got since the last time, less the trial at the start."""
    episodes = load_module(fields['task__reward'], 'task.reward').EPISODES
    found = episodes[1:]
    episodes.clear()
    return found


def episodes(run):
    return [rows for groups in run.batches for group in groups for rows in group.episodes]


def test_kept_answers_have_the_turns_and_what_the_environment_said(whole):
    """telemetry.rollouts: every row of an episode, null and blanks where nothing was generated."""
    records = read_rollouts(whole.workdir)
    require_equal(records, whole.batches, whole.session.program.parts.host.model.tokenizer)
    rows = [answer for record in records for answer in record['answers']]
    assert any(answer['row'] for answer in rows)
    assert any(version == NOT_GENERATED for answer in rows for _, version in answer['versions'])


def test_turns_are_rows_with_tokens_of_the_environment_between_them(whole):
    several = [rows for rows in episodes(whole) if len(rows) > 1]
    assert len(several) > 3
    assert {len({row.reward for row in rows}) for rows in several} == {1}
    for rows in episodes(whole):
        for row in rows:
            kinds = [s.policy_version == NOT_GENERATED for s in row.segments]
            assert not kinds[0]
            answer = row.answer_tokens
            if any(kinds):
                (place,) = np.flatnonzero(~row.loss_mask[len(row.prompt.tokens) :])
                assert answer[place - 1] == EOS  # the first turn had ended by itself
            assert row.prompt.tokens.tolist() == rows[0].prompt.tokens.tolist()


def test_recomputed_logprobs_of_all_rows_equal_the_recorded_ones(whole):
    gaps, _ = logprob_gaps(whole)
    assert len(gaps) == sum(row.loss_mask.sum() for rows in episodes(whole) for row in rows)
    assert gaps.max() < 1e-5
    assert whole.report['mismatch']['max'] < 1e-4


def test_the_log_tells_rows_forks_and_calls_of_tools(whole):
    ends = [event for event in whole.events if event['kind'] == 'finish']
    forked = [event for event in ends if 'forks' in event]
    assert len(forked) > 3
    assert {tuple(event['forks']) for event in forked} == {('resampled',)}
    assert all(sum(event['rows']) == len(event['lengths']) for event in forked)
    assert {event['reason'] for event in ends} <= {'stop', 'length', 'turns'}
    started = [event for event in whole.events if event['kind'] == 'run_start' and event['work'] == 'tool']
    assert {event['tool'] for event in started} == {'look_up'}


@pytest.mark.parametrize('step', [1, 3])
def test_a_resumed_run_is_the_same_bit_for_bit_and_calls_no_tool_again(whole, fields, tmp_path, step):
    resumed = resume_at(whole, tmp_path / 'at', step, **fields)
    under_way = [episode for episode in open_episodes(resumed) if episode.calls]
    require_same(resumed.train(), whole)
    assert any(any(call.reply for call in e.calls) for e in under_way)  # some had had an answer
    assert any(e.results for e in under_way)
    described = take_described(fields)
    assert described == whole.described[-len(described) :]
    assert described


def test_the_scorer_gets_each_episode_as_messages(whole):
    rewards = [event for event in whole.events if event['kind'] == 'reward']
    described = [json.loads(text) for text in whole.described]
    assert len(described) == len(rewards)
    both = [episode for episode in described if episode['turns'] > 1]
    assert len(both) > 10
    for episode in both:
        question, first, mark, second = episode['conversations'][0]
        assert (question['role'], mark) == ('user', {'role': 'user', 'content': '='})
        assert first['role'] == second['role'] == 'assistant'
        (tool,) = episode['tools']
        assert tool == {'name': 'look_up', 'arguments': {'text': first['content'] or ''}, 'text': '=', 'failed': False}
    assert {len(episode['conversations']) for episode in both} == {1, 2}  # some began another row


def test_the_log_keeps_the_rules_of_the_loop(whole):
    assert main_check_log.main([str(whole.workdir)]) == 0


def test_what_the_timeline_draws_of_it_happened_then(whole):
    require_drawn(load_events(whole.workdir / 'events.jsonl'))
