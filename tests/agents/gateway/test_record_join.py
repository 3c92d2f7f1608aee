"""Turns of the gateway and those in the record of an environment: equal ids, else equal text and calls of tools."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from areal_jax.agents.dialogue import Reply, Turn
from areal_jax.agents.gateway import join_record
from areal_jax.agents.programs.program_host import SaidTurn
from areal_jax.control.episode import Call
from areal_jax.types import Segment

CALL = Call('', '', 0, 0, True, (), '')


def turn(text, *ids, calls=()):
    functions = [{'id': 'c', 'function': {'name': name, 'arguments': arguments}} for name, arguments in calls]
    answer = tuple(Segment(np.array([token], np.int32), np.zeros(1, np.float32), 0) for token in ids)
    return Turn(CALL, Reply({'content': text, 'tool_calls': functions}, 'stop'), np.array([1], np.int32), answer)


def said(text, *ids, calls=()):
    return SaidTurn(text, calls, np.array(ids, np.int32) if ids else None)


def test_ids_decide_where_the_record_has_them():
    turns = {0: [turn('a', 5, 6)], 1: [turn('a', 7)]}
    assert join_record([said('a', 7), said('b', 5, 6)], turns) == ([], 0)
    assert join_record([said('a', 5)], turns) == ([0, 1], 1)


def test_text_and_calls_decide_elsewhere_and_arguments_are_compared_as_json():
    turns = {0: [turn('a', 5)], 1: [turn('a', 6, calls=[('add', '{"x": 1, "y": 2}')])]}
    assert join_record([said('a', calls=(('add', '{"y":2,"x":1}'),))], turns) == ([0], 0)
    assert join_record([said('a', calls=(('add', '{"x": 2}'),))], turns) == ([0, 1], 1)
    deep = '[' * 100_000  # no JSON, and no reason to stop
    assert join_record([said('a', calls=(('add', deep),))], {2: [turn('a', calls=[('add', deep)])]}) == ([], 0)
    assert join_record([said('a', calls=(('add', '{bad'),))], {2: [turn('a', calls=[('add', '{bad')])]}) == ([], 0)


def test_one_of_several_choices_is_enough():
    assert join_record([said('b')], {0: [turn('a', 1), turn('b', 2)]}) == ([], 0)


@given(st.lists(st.sampled_from('ab')), st.lists(st.sampled_from('ab')))
def test_each_turn_of_the_record_takes_one_of_the_gateway(recorded, sampled):
    left, strangers = join_record([said(text) for text in recorded], {i: [turn(t, 1)] for i, t in enumerate(sampled)})
    common = sum(min(recorded.count(text), sampled.count(text)) for text in 'ab')
    assert (len(left), strangers) == (len(sampled) - common, len(recorded) - common)
