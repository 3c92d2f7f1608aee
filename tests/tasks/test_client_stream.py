from __future__ import annotations

import numpy as np
import pytest

from areal_jax.tasks.task import ClientStream, ShuffledStream, TaskError
from areal_jax.types import Prompt


def make_whole(seed=0, size=7):
    make = lambda draw, item: Prompt(draw, np.zeros(1, np.int32), 'test', {'number': item})
    return ShuffledStream(list(range(size)), make, seed)


def test_every_prompt_goes_to_exactly_one_client():
    whole = make_whole()
    expected = [whole.draw().problem for _ in range(21)]
    streams = [ClientStream(make_whole(), client, 3) for client in range(3)]
    drawn = [[stream.draw() for _ in range(7)] for stream in streams]
    assert [prompts[i].problem for i in range(7) for prompts in drawn] == expected
    assert all([prompt.draw for prompt in prompts] == list(range(7)) for prompts in drawn)


def test_a_restored_stream_goes_on():
    stream, other = ClientStream(make_whole(), 1, 2), ClientStream(make_whole(), 1, 2)
    for _ in range(5):
        stream.draw()
    other.restore(stream.state())
    assert [other.draw() for _ in range(4)][-1].problem == [stream.draw() for _ in range(4)][-1].problem
    assert other.state() == stream.state()


def test_the_stream_of_another_client_is_refused():
    state = ClientStream(make_whole(), 1, 2).state()
    with pytest.raises(TaskError, match=r'has distributed\.client=1, this one distributed\.client=0: its next draw'):
        ClientStream(make_whole(), 0, 2).restore(state)
    with pytest.raises(TaskError, match=r'has distributed\.clients=None, this one distributed\.clients=2'):
        ClientStream(make_whole(), 0, 2).restore(make_whole().state() | {'client': 0})
