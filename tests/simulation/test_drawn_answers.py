"""Answers that a log has: lengths, turns, results and the seconds of tools."""

from __future__ import annotations

import pathlib
from typing import Any, cast

import pytest

from areal_jax.config.drawn_lengths import parse_lengths
from areal_jax.config.fields import ConfigError
from areal_jax.events.schema import Event
from areal_jax.simulation.drawn_answers import LoggedAnswers, read_groups

RUN = pathlib.Path('runs/one')
EVERY = parse_lengths('constant(500)', 1 << 20)


def finish(sample: int, tokens: int, reason: str = 'stop', **fields: Any) -> dict[str, Any]:
    return {'kind': 'finish', 'draw': 0, 'sample': sample, 'tokens': tokens, 'reason': reason, **fields}


def reward(sample: int) -> dict[str, Any]:
    return {'kind': 'reward', 'draw': 0, 'sample': sample, 'value': float(sample)}


def tool(run: int, sample: int, start: float, end: float) -> list[dict[str, Any]]:
    work = {'lane': 'tool', 'seq': run, 'run': run, 'work': 'tool', 'amount': 1.0}
    started = {'kind': 'run_start', 'time': start, 'draw': 0, 'sample': sample, 'tool': 'search', **work}
    return [started, {'kind': 'run_done', 'time': end, 'started': start, 'seconds': end - start, **work}]


def answers(*events: dict[str, Any]) -> LoggedAnswers:
    return LoggedAnswers(read_groups(cast('list[Event]', events), RUN, 1), 0, EVERY, EVERY)


def test_the_length_of_an_answer_that_was_cut_is_not_known():
    found = answers(finish(0, 5, versions=[0], lengths=[5]), finish(1, 8, 'length'), reward(0), reward(1))
    assert [found.turns(0, sample) for sample in (0, 1)] == [1, 1]
    assert found.length(0, 0) == 5
    assert found.length(0, 1) > 1 << 30
    assert (found.reward(0, 1), found.of_agents) == (1.0, False)


def test_turns_are_what_stands_between_segments_that_no_policy_generated():
    """3 + 2 tokens under two versions, 7 of a tool, 4; the second asked for a turn more than it might have."""
    found = answers(
        finish(0, 16, versions=[0, 1, -1, 1], lengths=[3, 2, 7, 4]),
        finish(1, 9, 'turns', versions=[0, -1, 0], lengths=[4, 3, 2]),
        *tool(1, 0, 1.0, 1.5), *tool(2, 1, 1.0, 1.25), *tool(3, 1, 2.0, 3.25),
        reward(0), reward(1),
    )  # fmt: skip
    assert found.of_agents
    assert [found.turns(0, sample) for sample in (0, 1)] == [2, 3]
    assert [found.length(0, 0, turn) for turn in (0, 1)] == [5, 4]
    assert [found.length(0, 1, turn) for turn in (0, 1)] == [4, 2]
    assert (found.result(0, 0, 0), found.result(0, 1, 0)) == (7, 3)
    assert (found.tool_s(0, 0, 0), found.tool_s(0, 1, 0), found.tool_s(0, 1, 1)) == (0.5, 0.75, 0.75)


def test_seconds_of_tools_are_drawn_where_the_log_has_none():
    found = answers(finish(0, 9, versions=[0, -1, 0], lengths=[4, 3, 2]), reward(0))
    assert found.tool_s(0, 0, 0) == 0.5


def test_a_log_that_does_not_say_the_prompts_of_rows_is_refused():
    with pytest.raises(ConfigError, match=r'runs/one/events.jsonl has episodes of several rows'):
        answers(finish(0, 9, versions=[0, 0], lengths=[4, 5], rows=[1, 1]), reward(0))
