"""JetStream's own server over the toy backend: plain clients, errors, and clients that go away at each stage."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import threading

import numpy as np
import pytest

from areal_jax.rollout.http.server.limits import Limits
from areal_jax.rollout.jetstream.control import ABORT, PAUSE, RECORD, RESUME, STAGE, STATUS, SWAP
from areal_jax.rollout.jetstream.messages import parse_decode, render_decode
from areal_jax.rollout.jetstream.record import KEPT, SETTINGS, decode_record
from areal_jax.rollout.jetstream.record import RECORD as RECORD_KEY
from areal_jax.text.decoding import TokenBytes
from tests.rollout.http.server.rig import PROMPT, write_weights
from tests.rollout.jetstream.rig import JetstreamToyServer, needs_jetstream, refusal
from tests.toys import STOP, length, token

pytestmark = [pytest.mark.slow, needs_jetstream]
CALLS = int(os.environ.get('AREAL_JAX_JETSTREAM_CALLS', '10000'))
SMALL = Limits(streams=4, requests=64, share=1.0)


def settings(name='a', draw=2, sample=1, **fields):
    body = {'request_id': name, 'draw': draw, 'sample': sample, **fields}
    body['sampling_params'] = {'seed': 5, 'logprobs': 0, 'ignore_eos': True, **fields.get('sampling_params', {})}
    return [(SETTINGS, json.dumps(body))]


def expected(new, draw=2, sample=1, w=0, prompt=PROMPT):
    return [token(w, draw, sample, position) for position in range(len(prompt), len(prompt) + new)]


@pytest.fixture
def server():
    with JetstreamToyServer(slots=2, decode_steps=3) as server:
        yield server
        assert server.death is None
        assert server.free_slots() == server.http.relay.slots


def test_a_plain_client_gets_its_tokens_and_nothing_behind_them(server):
    async def script(talk):
        call = talk.decode(new=10)
        return (
            await talk.read(call),
            dict(await call.trailing_metadata() or ()),
            await talk.stub.HealthCheck(talk.messages.HealthCheckRequest()),
        )

    (ids, text), trailing, health = server.talk(script)
    # the first draw of the server, sample 0, ends with EOS after so many tokens; no filler among them
    assert ids == [*expected(length(1, 0) - 1, draw=1, sample=0), STOP]
    assert text == ''
    assert trailing == {}
    assert health.is_live


def test_a_plain_client_of_texts_gets_ids_and_their_text(server):
    async def script(talk):
        return await talk.read(talk.decode(text='abc', new=10))

    ids, text = server.talk(script)
    assert len(ids) == length(1, 0)
    assert text == ''.join('abcdefghi'[one - 1] for one in ids[:-1])


def test_a_dispatch_of_three_tokens_is_one_step(server):
    async def script(talk):
        return [len(r.stream_content.samples[0].token_ids) async for r in talk.decode(new=10, metadata=settings())]

    before = server.http.relay.steps_taken
    assert server.talk(script) == [3, 3, 3, 1]
    assert server.http.relay.steps_taken - before <= len(server.backend.batches) + 1


def test_settings_give_the_noise_of_a_run_and_the_record_comes_behind_the_tokens(server):
    async def script(talk):
        call = talk.decode(new=10, metadata=settings(draw=7, sample=3))
        return await talk.read(call), dict(await call.trailing_metadata())

    (ids, _), trailing = server.talk(script)
    assert ids == expected(10, draw=7, sample=3)
    pieces, reason, version = decode_record(trailing[RECORD_KEY], np.array(ids, np.int32), (), 10)
    assert (reason, version) == ('length', '0')
    # the log-prob of the toy is -(1 + w % 5) - p / 100 at position p: exact in float32 on both sides
    np.testing.assert_array_equal(pieces[0].logprobs, np.array([-1 - p / 100 for p in range(3, 13)], np.float32))


def test_a_long_record_is_kept_and_fetched_once(server, monkeypatch):
    from areal_jax.rollout.jetstream.server import open_calls

    monkeypatch.setattr(open_calls, 'LARGEST_TRAILER', 100)

    async def script(talk):
        call = talk.decode(new=10, metadata=settings('long'))
        ids, _ = await talk.read(call)
        trailing = dict(await call.trailing_metadata())
        fetch = lambda: talk.channel.unary_unary('/areal_jax.EngineControl/Record')(b'{"request_id": "long"}')
        kept = (await talk.control(STATUS))['records_kept']
        return ids, trailing, kept, await fetch(), await refusal(fetch())

    ids, trailing, kept, record, second = server.talk(script)
    assert trailing == {KEPT: 'long'}
    assert kept == 1
    (piece,), reason, _ = decode_record(record, np.array(ids, np.int32), (), 10)
    assert (len(piece.logprobs), reason) == (10, 'length')
    assert second == ('NOT_FOUND', "request_id='long' has no record here: it was fetched, or is too old")


@pytest.mark.parametrize(
    ('call', 'code', 'message'),
    [
        ({'new': 0}, 'INVALID_ARGUMENT', 'max_tokens=0 must be 1 or more'),
        ({'new': 400}, 'INVALID_ARGUMENT', 'token_ids of 3 tokens and 400 new ones do not fit the context of 400'),
        ({'ids': [77]}, 'INVALID_ARGUMENT', 'token_ids has token 77'),
        ({'ids': []}, 'INVALID_ARGUMENT', 'token_ids'),
        ({'text': ''}, 'INVALID_ARGUMENT', 'text has no token: send at least one'),
        ({'metadata': [(SETTINGS, '{')]}, 'INVALID_ARGUMENT', 'body must be JSON'),
        ({'metadata': [(SETTINGS, '{"sampling_params": {"n": 2}}')]}, 'INVALID_ARGUMENT', 'asks for several answers'),
        ({'metadata': [(SETTINGS, '{"temperatur": 2}')]}, 'INVALID_ARGUMENT', 'temperatur'),
    ],
)  # fmt: skip
def test_a_call_that_is_refused_says_why_and_takes_no_slot(server, call, code, message):
    async def script(talk):
        refused = await refusal(talk.read(talk.decode(**call)))
        return refused, await talk.read(talk.decode(new=10, metadata=settings()))

    (found, details), (ids, _) = server.talk(script)
    assert found == code
    assert message in details
    assert ids == expected(10)


PADDING = bytes([15 * 8 + 2, 0x80, 0x80, 0x08]) + bytes(1 << 17)  # a field that the message does not have


def test_a_large_message_has_the_answer_of_a_small_one_and_is_bounded_by_the_context(server):
    decode = '/jetstream_proto.Orchestrator/Decode'
    small = render_decode(PROMPT, 10)
    text = bytes([5 * 8 + 2, 0x84, 0x80, 0x41, 1 * 8 + 2, 0x80, 0x80, 0x41]) + b'a' * (65 << 14)

    async def read(talk, message):
        call = talk.channel.unary_stream(decode)(message, metadata=settings())
        return [parse_decode(one).tolist() async for one in call]

    async def script(talk):
        same = [await read(talk, message) for message in (small, small + PADDING)]
        long = [render_decode([1] * 401, 10), render_decode([1] * 1_000_000, 10), small + text, PADDING + b'\xff']
        return same, [await refusal(read(talk, message)) for message in long], await read(talk, small)

    same, refused, after = server.talk(script)
    assert same[0] == same[1] == after
    assert [code for code, _ in refused] == ['INVALID_ARGUMENT'] * 4
    assert [sentence for _, sentence in refused[:3]] == [
        'token_ids of 401 tokens do not fit the context of 400 tokens: shorten it',
        'token_ids of 1000000 tokens do not fit the context of 400 tokens: shorten it',
        'text of 1064960 characters does not fit the context of 400 tokens, for which 1048576 are the most: shorten it',
    ]
    assert refused[3][1].startswith('the message is no DecodeRequest')


def test_a_message_that_no_context_has_room_for_is_not_received(server):
    most = 4 << 20  # four bytes for each of 1,048,576 characters

    async def script(talk):
        send = talk.channel.unary_stream('/jetstream_proto.Orchestrator/Decode')
        return await refusal(anext(aiter(send(bytes(most + 1))))), (await talk.read(talk.decode(new=3)))[0]

    (code, _), ids = server.talk(script)
    assert (code, len(ids)) == ('RESOURCE_EXHAUSTED', 3)


def test_a_key_and_a_holder_are_asked_for():
    with JetstreamToyServer(api_key='secret') as server:
        server.facts.holder = '3-abc'
        key, other = ('authorization', 'Bearer secret'), ('x-areal-incarnation', '2-abc')

        async def script(talk):
            return [
                await refusal(talk.read(talk.decode())),
                await refusal(talk.control(STATUS, metadata=[('authorization', 'Bearer no')])),
                await refusal(talk.read(talk.decode(metadata=[key, other]))),
                len((await talk.read(talk.decode(metadata=[key])))[0]),
            ]

        without, wrong, elsewhere, tokens = server.talk(script)
    assert without == wrong == ('UNAUTHENTICATED', 'the key is missing or wrong: send that of the server')
    assert elsewhere[0] == 'FAILED_PRECONDITION'
    assert 'the process 2-abc, and this one is 3-abc' in elsewhere[1]
    assert tokens == length(1, 0)


@pytest.mark.parametrize('kind', ['text/plain', 'application/json', 'application/grpc'])
def test_what_a_web_page_can_send_reaches_neither_service(server, kind):
    host, port = server.url.removeprefix('http://').split(':')
    for path in ('/areal_jax.EngineControl/Pause', '/jetstream_proto.Orchestrator/Decode'):
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        headers = {'Content-Type': kind, 'Origin': 'http://evil.example'}
        # what gRPC says to HTTP/1 is no HTTP/1
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request('POST', path, b'{"mode": "abort"}', headers)
            assert connection.getresponse().status >= 400
    assert server.talk(lambda talk: talk.control(STATUS))['pause'] is None


def test_an_exception_in_generate_of_jetstream_ends_the_calls_in_slots_and_is_told(server):
    take_step, failed = server.http.relay.take_step, []

    def broken():
        if not failed:
            failed.append(1)
            raise ArithmeticError('out of range')
        return take_step()

    server.http.relay.take_step = broken

    async def script(talk):
        return await refusal(talk.read(talk.decode(new=300))), await talk.read(talk.decode(new=10, metadata=settings()))

    refused, (ids, _) = server.talk(script)
    assert refused == ('INTERNAL', 'generate failed (ArithmeticError: out of range): send the request again')
    assert ids == expected(10)


def test_an_exception_in_prefill_of_jetstream_ends_its_call_alone(server):
    submit = server.http.relay.submit

    def broken(call):
        if call.answer.request_id == 'bad':
            raise ArithmeticError('out of range')
        submit(call)

    server.http.relay.submit = broken

    async def script(talk):
        found = [talk.decode(new=9, metadata=settings(name)) for name in ('good', 'bad')]
        good = asyncio.create_task(talk.read(found[0]))
        return await refusal(talk.read(found[1])), await good

    refused, (ids, _) = server.talk(script)
    assert refused == ('INTERNAL', 'prefill failed (ArithmeticError: out of range): send the request again')
    assert ids == expected(9)


@pytest.mark.parametrize('of', ['generate', 'prefill'])
def test_an_exception_of_our_backend_ends_the_answers_in_slots_and_is_told(server, of):
    dispatch, failed = getattr(server.backend, of), []

    def broken(*arguments):
        outcome = dispatch(*arguments)
        if not failed:
            failed.append(1)
            raise MemoryError('none left')
        return outcome

    setattr(server.backend, of, broken)

    async def script(talk):
        found = [asyncio.create_task(refusal(talk.read(talk.decode(new=300)))) for _ in range(1)]
        return [await one for one in found], await talk.read(talk.decode(new=10, metadata=settings()))

    ((code, details),), (ids, _) = server.talk(script)
    assert code == 'INTERNAL'
    assert 'a dispatch failed (MemoryError: none left); send the request again' in details
    assert ids == expected(10)


def test_a_log_prob_that_is_no_number_fails_its_request_alone_and_is_known_of_the_weights(server):
    generate = server.backend.generate

    def broken(weights, state, rows, steps):
        state, output = generate(weights, state, rows, steps)
        for index, row in enumerate(rows):
            if row.request.name == 'bad':
                output.logprobs[0, index] = np.nan
        return state, output

    server.backend.generate = broken

    async def script(talk):
        good = asyncio.create_task(talk.read(talk.decode(new=30, metadata=settings('good'))))
        refused = await refusal(talk.read(talk.decode(new=30, metadata=settings('bad'))))
        return refused, (await good)[0], await talk.control(STATUS)

    (code, details), ids, status = server.talk(script)
    assert code == 'INTERNAL'
    assert 'the log-prob of a generated token is nan' in details
    assert ids == expected(30)
    assert status['fault'].startswith("the weights of version '0' gave a log-prob that no policy can have")


def test_an_exception_in_the_text_of_an_answer_ends_its_call_alone(server):
    spell = server.texts.token_bytes.behind

    def broken(token):
        if token == 5:
            raise IndexError('no such piece')
        return spell(token)

    server.texts.token_bytes = TokenBytes(broken)

    async def script(talk):
        # of 300 tokens, and of 3 that come with the end of the answer
        refused = [
            await refusal(talk.read(talk.decode(text='e', new=new, metadata=settings('bad', draw=1, sample=0))))
            for new in (300, 3)
        ]
        return refused, (await talk.read(talk.decode(new=10, metadata=settings())))[0]

    # after a prompt of one: 1 + (3 + 0 + p) % 9 for p = 1, 2, 3
    assert expected(3, draw=1, sample=0, prompt=[5]) == [5, 6, 7]
    (refused, at_the_end), ids = server.talk(script)
    assert at_the_end == refused
    assert refused == ('INTERNAL', 'the text of an answer failed (IndexError: no such piece): send the request again')
    assert ids == expected(10)


def test_an_error_in_a_thread_of_jetstream_is_told_and_kills_nothing():
    """JetStream's own thread would end this process with SIGKILL."""
    told = threading.Event()
    with JetstreamToyServer(slots=2) as server:
        server.note_death = lambda error: (setattr(server, 'death', error), told.set())
        server.http.relay.fail_slots = None  # what catches the error below fails itself
        server.http.relay.take_step = None

        async def script(talk):
            call = talk.decode(new=300)
            reading = asyncio.create_task(talk.read(call))
            assert await asyncio.to_thread(told.wait, 20)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        server.talk(script)
    assert isinstance(server.death, TypeError)


def test_an_answer_that_takes_too_long_ends_at_the_limit_of_the_server():
    with JetstreamToyServer(slots=1, limits=Limits(request_s=0.3)) as server:
        server.backend.step_s = 0.02

        async def script(talk):
            late = await refusal(talk.read(talk.decode(new=390, metadata=settings('late'))))
            return late, (await talk.read(talk.decode(new=2, metadata=settings())))[0]

        late, ids = server.talk(script)
        assert server.free_slots() == server.http.relay.slots
    assert late == (
        'DEADLINE_EXCEEDED',
        'the answer was not complete after 0.3 s, the limit of this server: ask for fewer tokens',
    )
    assert ids == expected(2)


def test_settings_as_long_as_a_thousand_stop_tokens_are_taken(server):
    async def script(talk):
        ((key, value),) = settings()
        return (await talk.read(talk.decode(new=10, metadata=[(key, value + ' ' * 8000)])))[0]

    assert server.talk(script) == expected(10)


class Gate:
    """Lets dispatches of the backend through one by one."""

    def __init__(self, server, of='generate'):
        self.entered, self._open = threading.Semaphore(0), threading.Semaphore(0)
        dispatch = getattr(server.backend, of)
        self.is_open = False

        def gated(*arguments):
            if not self.is_open:
                self.entered.release()
                assert self._open.acquire(timeout=30)
            return dispatch(*arguments)

        setattr(server.backend, of, gated)

    async def await_entry(self):
        assert await asyncio.to_thread(self.entered.acquire, timeout=30)

    def pass_one(self):
        self._open.release()

    def open(self):
        self.is_open = True
        self._open.release()


async def await_status(talk, **wanted):
    """The host answers while a dispatch is held."""
    for _ in range(2000):
        status = await talk.control(STATUS)
        if all(status[name] == value for name, value in wanted.items()):
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f'{status} never has {wanted}')


def test_a_cancelled_call_frees_its_slot_within_two_dispatches():
    """One slot here and in JetStream: the next call gets its first token two dispatches after the cancel at most."""
    with JetstreamToyServer(slots=1, decode_steps=3, limits=Limits(streams=1, requests=8, share=1.0)) as server:
        gate = Gate(server)

        async def script(talk):
            call = talk.decode(new=300)
            await gate.await_entry()
            gate.pass_one()
            await anext(aiter(call))  # three tokens
            await gate.await_entry()  # the second dispatch is under way
            call.cancel()
            await await_status(talk, running=0)
            at_cancel = len(server.backend.batches) + 1  # the toy backend counts a dispatch when the gate lets it in
            second = talk.decode(new=3, metadata=settings())
            reading = asyncio.create_task(talk.read(second))
            gate.open()
            ids, _ = await reading
            return at_cancel, ids

        at_cancel, ids = server.talk(script)
        assert ids == expected(3)
        assert len(server.backend.batches) - at_cancel <= 2
        assert server.free_slots() == 1


@pytest.mark.parametrize('stage', ['before prefill', 'in prefill', 'decoding', 'paused', 'at the end'])
def test_a_client_that_goes_away_leaves_nothing_behind(stage):
    with JetstreamToyServer(slots=1, decode_steps=3, limits=SMALL) as server:
        gate = Gate(server, 'prefill' if stage == 'in prefill' else 'generate')

        async def script(talk):
            first = talk.decode(new=6, metadata=settings('first'))
            reading = asyncio.create_task(talk.read(first))
            gone = talk.decode(new=300, metadata=settings('gone', draw=4))
            if stage == 'before prefill':
                await gate.await_entry()
                await await_status(talk, running=1, waiting=1)  # `gone` waits for the one slot
            elif stage == 'in prefill':
                await gate.await_entry()
            elif stage == 'paused':
                gate.open()
                await reading
                await talk.control(PAUSE, {'mode': 'retract'})
            else:
                gate.open()
                await anext(aiter(gone))
            if stage == 'at the end':
                gone.cancel()
                gone = talk.decode(new=3, metadata=settings('short'))
                await anext(aiter(gone))
            gone.cancel()
            gate.open()
            await talk.control(RESUME)
            ids = (await reading)[0]
            await await_status(talk, running=0, waiting=0)
            return ids, (await talk.read(talk.decode(new=10, metadata=settings('last'))))[0]

        ids, last = server.talk(script)
        assert ids == expected(6)
        assert last == expected(10)
        assert server.free_slots() == server.http.relay.slots
        assert server.death is None


def test_a_pause_that_aborts_ends_answers_with_what_they_have(server):
    server.backend.step_s = 0.02

    async def script(talk):
        call = talk.decode(new=300, metadata=settings())
        reading = asyncio.create_task(talk.read(call))
        await await_status(talk, running=1)
        await talk.control(PAUSE, {'mode': 'abort'})
        ids, _ = await reading
        held = asyncio.create_task(talk.read(talk.decode(new=4, metadata=settings('held'))))
        await await_status(talk, pause='abort', waiting=1)
        await talk.control(RESUME)
        return ids, dict(await call.trailing_metadata()), (await held)[0]

    ids, trailing, held = server.talk(script)
    pieces, reason, _ = decode_record(trailing[RECORD_KEY], np.array(ids, np.int32), (), 10)
    assert reason == 'abort'
    assert ids == expected(300)[: len(ids)]
    assert sum(len(piece.tokens) for piece in pieces) == len(ids)
    assert held == expected(4)


def test_the_second_service_stages_swaps_and_refuses_in_sentences(server, tmp_path):
    server.backend.step_s = 0.005
    path = write_weights(tmp_path / 'w', 3)

    async def script(talk):
        call = talk.decode(new=200, metadata=settings())
        reading = asyncio.create_task(talk.read(call))
        await await_status(talk, running=1)
        refused = [
            await refusal(talk.control(SWAP, {'version': '1'})),
            await refusal(talk.control(STAGE, {'path': '/no'})),
        ]
        await talk.control(STAGE, {'path': path})
        swapped = await talk.control(SWAP, {'version': '1'})
        ids, _ = await reading
        await talk.control(ABORT, {'request_id': 'unknown'})
        wrong = await refusal(talk.control(PAUSE, {'mode': 'now'}))
        return refused, swapped, ids, dict(await call.trailing_metadata()), await talk.control(STATUS), wrong

    refused, swapped, ids, trailing, status, wrong = server.talk(script)
    assert [code for code, _ in refused] == ['INVALID_ARGUMENT'] * 2
    assert refused[0][1] == 'no weights are staged: load some first'
    assert '/no was not loaded, the old weights are in use' in refused[1][1]
    assert swapped['pause_seconds'] >= 0
    pieces, _, _ = decode_record(trailing[RECORD_KEY], np.array(ids, np.int32), (), 10)
    assert [piece.version for piece in pieces] == ['0', '1']
    before = len(pieces[0].tokens)
    assert ids == expected(200)[:before] + expected(200, w=3)[before:]
    assert (status['weight_version'], status['manifest_hash'], status['updates']) == ('1', 'digest of 3', 1)
    assert wrong[0] == 'INVALID_ARGUMENT'
    assert RECORD not in trailing


def test_thousands_of_calls_with_impatient_clients_are_all_answered_or_gone():
    """One in ten closes its call; all others get exactly their tokens, and every slot is free in the end."""
    random = np.random.default_rng(1)
    lengths = random.integers(1, 13, CALLS)
    leaves = random.random(CALLS) < 0.1
    with JetstreamToyServer(slots=16, decode_steps=4, limits=Limits(streams=32, requests=256, share=1.0)) as server:
        server.backend.step_s = 0.0

        async def script(talk):
            turn, wrong = iter(range(CALLS)), []

            async def client():
                for number in turn:
                    call = talk.decode(
                        new=int(lengths[number]), metadata=settings(f'r{number}', draw=number % 97, sample=number % 5)
                    )
                    if leaves[number]:
                        if number % 2:
                            await anext(aiter(call), None)
                        call.cancel()
                        continue
                    ids, _ = await talk.read(call)
                    if ids != expected(int(lengths[number]), draw=number % 97, sample=number % 5):
                        wrong.append((number, ids))

            await asyncio.gather(*(client() for _ in range(32)))
            await await_status(talk, running=0, waiting=0)
            return wrong, await talk.control(STATUS)

        wrong, status = server.talk(script, seconds=600)
        assert wrong == []
        assert status['records_kept'] == 0
        assert server.free_slots() == 32
        assert server.death is None
    print(f'{CALLS} calls, {int(leaves.sum())} of them closed by their clients')
