"""The relay between the host, JetStream's threads and the loop of gRPC: steps, slots, ends and withdrawals."""

import asyncio
import threading

import numpy as np
import pytest

from areal_jax.errors import UserError
from areal_jax.rollout.http.service import Action, Delivery, Submission
from areal_jax.rollout.http.wire.answer_reader import AnswerText
from areal_jax.rollout.http.wire.exchange import Answer, Call, CallSampling, Piece
from areal_jax.rollout.jetstream.server.relay import OpenCall, Relay
from areal_jax.text.decoding import TextDecoder, TokenBytes
from areal_jax.types import GenerationRequest, SamplingParams
from tests.rollout.jetstream.test_result_columns import read

STEPS = 3
PROMPT = np.array([1], np.int32)
SAMPLING = SamplingParams(9, temperature=1.0, top_k=0, top_p=1.0, stop_tokens=())


class Inbox:
    """Of the service: keeps what was put."""

    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)

    def submitted(self):
        return [item.request.name for item in self.items if isinstance(item, Submission)]

    def withdrawn(self):
        """The submissions that were withdrawn, by their names."""
        return [name for item in self.items if isinstance(item, Action) for name in Withdrawals().of(item)]


class Withdrawals:
    """Stands for the service."""

    def of(self, action):
        asyncio.run(action.run(self))
        return self.names

    async def withdraw(self, submissions):
        self.names = [one.request.name for one in submissions]


@pytest.fixture
def inbox():
    return Inbox()


@pytest.fixture
def relay(inbox):
    return Relay(inbox, 2, STEPS)


def make_call(name):
    call = Call((PROMPT,), 'token_ids', (CallSampling(9),), (name,), stream=True)
    found = OpenCall(call, Answer(name, PROMPT), 9)
    request = GenerationRequest(0, 0, 0, PROMPT, SAMPLING, name=name)
    found.submission = Submission(request, True, lambda delivery: None)
    return found


def tokens(*ids, finish=None, error=None):
    piece = Piece(np.array(ids, np.int32), np.zeros(len(ids), np.float32), '0')
    return Delivery([piece] if ids else [], finish, version='0' if finish else '', error=error)


def deliver(relay, *pairs):
    """As one dispatch of the host does it."""

    async def dispatch():
        for call, delivery in pairs:
            relay.deliver(call, delivery)

    asyncio.run(dispatch())


def step(relay):
    data = relay.take_step()
    return [read(data, slot, STEPS) for slot in range(2)]


def begin(relay, *names):
    calls = [make_call(name) for name in names]
    for slot, call in enumerate(calls):
        relay.submit(call)
        relay.insert(call, slot)
    return calls


def test_the_rows_of_a_dispatch_are_one_step(relay, inbox):
    a, b = begin(relay, 'a', 'b')
    assert inbox.submitted() == ['a', 'b']
    deliver(relay, (a, tokens(5, 6)), (b, tokens(7)))
    assert step(relay) == [([5, 6], False), ([7], False)]
    deliver(relay, (b, tokens(8, finish='stop')))
    assert step(relay) == [([], False), ([8], True)]
    assert relay.steps_taken == 2


def test_more_than_a_step_holds_comes_with_the_next_one(relay):
    a, _ = begin(relay, 'a', 'b')
    deliver(relay, (a, tokens(1, 2, 3)))
    deliver(relay, (a, tokens(4, 5, finish='length')))
    assert step(relay) == [([1, 2, 3], False), ([], False)]
    assert step(relay) == [([4, 5], True), ([], False)]
    assert a.answer.tokens.tolist() == [1, 2, 3, 4, 5]


def test_a_step_waits_for_news(relay):
    (a,) = begin(relay, 'a')
    taken = []
    thread = threading.Thread(target=lambda: taken.append(step(relay)))
    thread.start()
    assert taken == []  # nothing has come, and nothing can
    deliver(relay, (a, tokens(5)))
    thread.join(10)
    assert taken == [[([5], False), ([], False)]]


def test_what_comes_before_the_slot_is_not_lost(relay):
    """The step that a call without a slot asks for is empty, so that JetStream looks for calls to insert."""
    a, b = begin(relay, 'a'), make_call('b')
    relay.submit(b)
    deliver(relay, (b, tokens(5)))
    assert step(relay) == [([], False), ([], False)]
    relay.insert(b, 1)
    deliver(relay, (b, tokens(6)))
    assert step(relay) == [([], False), ([5, 6], False)]
    assert not a[0].has_news


def test_a_call_without_a_slot_wakes_nobody_while_there_is_none(relay):
    begin(relay, 'a', 'b')
    c, ended = make_call('c'), threading.Event()
    relay.submit(c)
    deliver(relay, (c, tokens(5)))
    thread = threading.Thread(target=lambda: (relay.take_step(), ended.set()))
    thread.start()
    assert not ended.wait(0.05)
    relay.close()
    assert ended.wait(10)


def test_a_call_that_was_withdrawn_before_it_was_submitted_never_is(relay, inbox):
    call = make_call('a')
    relay.withdraw(call)
    relay.submit(call)
    relay.insert(call, 0)
    assert inbox.submitted() == []
    assert step(relay)[0] == ([], True)


def test_a_withdrawal_comes_behind_the_submission_and_frees_the_slot_with_the_next_step(relay, inbox):
    a, _ = begin(relay, 'a', 'b')
    relay.withdraw(a)
    assert [type(item).__name__ for item in inbox.items] == ['Submission', 'Submission', 'Action']
    assert inbox.withdrawn() == ['a']
    deliver(relay, (a, tokens(finish='cancelled')))
    assert step(relay) == [([], True), ([], False)]
    c = make_call('c')
    relay.submit(c)
    relay.insert(c, 0)
    deliver(relay, (c, tokens(4)))
    assert step(relay) == [([4], False), ([], False)]


def test_a_withdrawal_of_an_answer_that_is_complete_does_nothing(relay, inbox):
    (a,) = begin(relay, 'a')
    deliver(relay, (a, tokens(5, finish='length')))
    relay.withdraw(a)
    assert inbox.withdrawn() == []
    assert step(relay)[0] == ([5], True)


def test_an_error_of_the_service_ends_its_call_alone(relay):
    a, b = begin(relay, 'a', 'b')
    deliver(relay, (a, tokens(error=UserError('no'))), (b, tokens(5)))
    assert step(relay) == [([], True), ([5], False)]
    assert (str(a.error), b.error) == ('no', None)


def test_a_call_that_is_ended_keeps_its_error_although_the_service_says_that_it_was_cancelled(relay, inbox):
    (a,) = begin(relay, 'a')
    relay.end(a, UserError('late'))
    deliver(relay, (a, tokens(finish='cancelled')))
    assert inbox.withdrawn() == ['a']
    assert str(a.error) == 'late'
    assert step(relay)[0] == ([], True)
    relay.end(a, UserError('again'))
    assert inbox.withdrawn() == ['a']


def test_an_error_behind_the_last_tokens_is_told_and_does_not_touch_the_next_call_of_the_slot(relay):
    (a,) = begin(relay, 'a')
    deliver(relay, (a, tokens(5, finish='length')))
    assert step(relay)[0] == ([5], True)
    c = make_call('c')
    relay.submit(c)
    relay.insert(c, 0)
    relay.end(a, UserError('its text'))
    deliver(relay, (c, tokens(7)))
    assert step(relay)[0] == ([7], False)
    assert (str(a.error), c.error) == ('its text', None)


def test_a_failed_step_ends_all_slots_and_what_comes_later_for_them_is_dropped(relay, inbox):
    a, b = begin(relay, 'a', 'b')
    deliver(relay, (a, tokens(5)))
    data = relay.fail_slots(UserError('broken'))
    assert [read(data, slot, STEPS) for slot in range(2)] == [([], True), ([], True)]
    assert [str(call.error) for call in (a, b)] == ['broken', 'broken']
    assert inbox.withdrawn() == ['a', 'b']
    c = make_call('c')
    relay.submit(c)
    relay.insert(c, 0)  # the slot of `a`
    deliver(relay, (a, tokens(6)), (c, tokens(7)))
    assert step(relay) == [([7], False), ([], False)]


def test_the_text_of_an_answer_grows_with_its_ids():
    call = make_call('a')
    call.text = AnswerText(TextDecoder(TokenBytes(lambda token: b'abc'[token : token + 1])))
    call.put(tokens(0, 1))
    texts = [call.extend_text([0, 1])]
    call.put(tokens(2, finish='length'))
    texts += [call.extend_text([]), call.extend_text([2])]
    assert texts == ['ab', '', 'c']
    assert make_call('b').extend_text([1]) == ''
