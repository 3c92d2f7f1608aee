"""An episode as JSON: conversations along the calls of each row, results of tools, and how it ended."""

from __future__ import annotations

import json

import numpy as np

from areal_jax.checkpoint.store import decode_running, encode_running
from areal_jax.control.episode import Call, Episode, Row, RunningGroup, describe_episode
from areal_jax.types import NOT_GENERATED, Prompt, Segment

ASKED, AGAIN = {'role': 'user', 'content': 'q'}, {'role': 'user', 'content': 'again'}


def reply(text):
    return {'role': 'assistant', 'content': text}


def call(messages, after, text, *, row=0, follows=''):
    told = None if text is None else reply(text)
    return Call('', '', row, 0, not follows, messages=messages, follows=follows, reply=told, after=after)


def test_the_conversations_of_rows_follow_their_calls():
    calls = [
        call([ASKED], 'a', 'A'),
        call([AGAIN], 'b', 'B', follows='a'),
        call([AGAIN], 'c', 'C', row=1, follows='a'),  # the first turn, continued another time
        call([AGAIN], '', None, row=1, follows='c'),  # under way
    ]
    results = [{'call': '0f', 'name': 'add', 'arguments': '{}', 'text': '3', 'failed': False}]
    outcome = {'reward': 0.5, 'rewards': {'right': 0.5}}
    episode = Episode(0, 'length', rows=[Row(), Row()], calls=calls, results=results, label='turns', outcome=outcome)
    found = describe_episode(episode)
    both = [[ASKED, reply('A'), AGAIN, reply(last)] for last in 'BC']
    assert found == {
        'sample': 0, 'label': 'turns', 'turns': 3, 'messages': both[1], 'conversations': both,
        'tools': [{'name': 'add', 'arguments': '{}', 'text': '3', 'failed': False}], 'outcome': outcome,
    }  # fmt: skip
    group = RunningGroup(Prompt(0, np.zeros(1, np.int32), 'own', {}), 0.0, [episode])
    (restored,) = decode_running(json.loads(json.dumps(encode_running(group)))).episodes
    assert describe_episode(restored) == found


def test_an_episode_without_calls_has_no_conversation():
    one = Segment(np.array([1], np.int32), np.zeros(1, np.float32), 0)
    between = Segment(np.array([2], np.int32), np.zeros(1, np.float32), NOT_GENERATED)
    episode = Episode(0, 'stop', rows=[Row(segments=[one, between, one])])
    found = describe_episode(episode)
    assert (found['label'], found['turns'], found['messages'], found['conversations']) == ('stop', 2, [], [])
