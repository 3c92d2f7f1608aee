"""Recorded replies of real servers, read by the clients, and what the clients send."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from areal_jax.rollout.http.clients.connection import NoReplyError, Reply, StatusError
from areal_jax.rollout.http.clients.sglang import SglangDialect
from areal_jax.rollout.http.clients.vllm import VllmDialect
from areal_jax.rollout.http.wire.exchange import Call, CallSampling, ReplyError
from tests.rollout.http.clients.fake_server import find_exchange, noted, read_exchanges


class Replayed:
    """A connection that answers with recorded replies, and keeps what was sent."""

    def __init__(self, *exchanges):
        self._exchanges, self.sent = list(exchanges), []

    async def request(self, method, path, body=None):
        self.sent.append((method, path, body))
        response = self._exchanges.pop(0)['response']
        content = response.get('json')
        return Reply(response['status'], response.get('text', str(content)), content)

    async def require(self, method, path, body=None):
        reply = await self.request(method, path, body)
        if reply.status != 200:
            raise StatusError(method, path, reply)
        return reply


def call(n, prompt=(5, 6, 7, 8, 9, 10)):
    sampling = CallSampling(max_new_tokens=n, ignore_eos=True)
    return Call((np.array(prompt, np.int32),), 'prompt', (sampling,), ('a',), logprobs=True)


def generate(dialect, exchange, n=300, vocab_size=512, **fields):
    return asyncio.run(dialect.generate(Replayed(exchange), call(n, **fields), vocab_size))


@pytest.mark.parametrize(
    ('name', 'note', 'tokens', 'reason', 'spans'),
    [
        ('generate', 'greedy', 6, 'length', [('default', 0, 6)]),
        ('generate', 'sampled', 12, 'length', [('default', 0, 12)]),
        ('generate', 'a stop token', 4, 'stop', [('default', 0, 4)]),
        ('interrupted', 'cut by /abort_requests with its id', 140, 'abort', [('default', 0, 140)]),
        ('interrupted', 'cut by pause(abort)', 134, 'abort', [('default', 0, 134)]),
        ('interrupted', 'sent while paused, served after the resume', 8, 'length', [('1', 0, 8)]),
        ('interrupted', 'lived through pause(keep) and an update', 300, 'length', [('1', 0, 145), ('0', 145, 300)]),
    ],
)
def test_answers_of_vllm_are_read(name, note, tokens, reason, spans):
    exchange = noted(f'vllm/{name}', note)
    answer = generate(VllmDialect(), exchange)
    (choice,) = exchange['response']['json']['choices']
    assert answer.tokens.tolist() == choice['token_ids']
    assert answer.logprobs.tolist() == [np.float32(entry['logprob']) for entry in choice['logprobs']['content']]
    assert (answer.n_tokens, answer.finish.reason) == (tokens, reason)
    assert [(span.version, span.start, span.end) for span in answer.spans] == spans


class ReplayedStream:
    """A connection on which a recorded stream comes line by line, and breaks off after `events`."""

    def __init__(self, lines, events=None):
        self._lines, self._events = lines, events

    async def stream(self, path, body, take):
        assert (path, body['stream']) == ('/inference/v1/generate', True)
        for line in self._lines[: self._events]:
            take(line)
        if self._events is not None:
            raise NoReplyError('the stream broke off')


def stream(lines, events=None):
    """(the pieces that were delivered, how the answer ended)."""
    delivered = []
    asked = dataclasses.replace(call(5), stream=True)
    try:
        connection = ReplayedStream(lines, events)
        reason = asyncio.run(VllmDialect().stream(connection, asked, 512, delivered.extend))
    except (NoReplyError, ReplyError) as error:
        reason = type(error)
    return [(piece.tokens.tolist(), piece.version) for piece in delivered], reason


def test_a_stream_of_vllm_is_read_with_the_versions_of_its_last_event():
    lines = noted('vllm/generate', 'stream')['response']['sse']
    assert stream(lines) == ([([184, 225, 463, 284, 284], 'default')], 'length')
    spans = '[{"version":"3","start":0,"end":2},{"version":"4","start":2,"end":5}]'
    moved = [line.replace('[{"version":"default","start":0,"end":5}]', spans) for line in lines]
    assert stream(moved) == ([([184, 225], '3'), ([463, 284, 284], '4')], 'length')


def test_what_came_of_a_stream_of_vllm_outlives_it():
    lines = noted('vllm/generate', 'stream')['response']['sse']
    assert stream(lines, 3) == ([([184], ''), ([225], ''), ([463], '')], NoReplyError)
    assert stream(lines[:3]) == ([([184], ''), ([225], ''), ([463], '')], NoReplyError)  # it ends, the answer does not
    assert stream([*lines[:2], 'data: {"choi']) == ([], ReplyError)  # a server that writes this is not believed


def test_an_answer_of_sglang_comes_at_once():
    exchange, delivered = find_exchange('sglang/generate_pause_abort', path='/generate'), []
    dialect = SglangDialect()
    reason = asyncio.run(dialect.stream(Replayed(exchange), call(300), 512, delivered.extend))
    assert (reason, dialect.streams) == ('abort', False)
    assert sum(len(piece.tokens) for piece in delivered) > 0


def test_a_token_outside_the_vocabulary_is_not_used():
    with pytest.raises(ReplyError, match='no id from 0 to 99'):
        generate(VllmDialect(), noted('vllm/generate', 'greedy'), vocab_size=100)


@pytest.mark.parametrize('note', ['no prompt', 'a negative id', 'no new tokens', 'an unknown model'])
def test_refusals_of_vllm_are_named(note):
    with pytest.raises(StatusError, match=r'/inference/v1/generate answered 40[04]: .{20}'):
        generate(VllmDialect(), noted('vllm/refusals', note))


@pytest.mark.parametrize('exchange', [*read_exchanges('vllm/death')[-1:], *read_exchanges('vllm/death_by_token')])
def test_a_dead_engine_of_vllm_is_seen_in_its_answers(exchange):
    with pytest.raises(StatusError, match='answered 500: EngineCore encountered an issue'):
        generate(VllmDialect(), exchange)


def test_what_a_dead_engine_of_vllm_says_of_itself_is_no_sign_of_life():
    assert [one['response']['status'] for one in read_exchanges('vllm/death')[1:3]] == [200, 200]


def test_an_update_of_vllm_sends_what_was_recorded():
    paths = ['/collective_rpc', '/update_weight_version', '/weight_info']
    recorded = [find_exchange('vllm/control', path=path) for path in paths]
    replayed = Replayed(*recorded)
    asyncio.run(VllmDialect().update(replayed, '/models/v1', '1'))
    requests = [one['request'] for one in recorded]
    assert replayed.sent == [(one['method'], one['path'], one.get('json')) for one in requests]


def test_answers_of_sglang_are_read():
    spans = generate(SglangDialect(), find_exchange('sglang/generate_weight_spans', path='/generate'), prompt=[11, 12])
    assert [(span.version, span.start, span.end) for span in spans.spans] == [('3', 0, 2), ('4', 2, 5)]
    for exchange in read_exchanges('sglang/generate_abort_queued'):
        answer = generate(SglangDialect(), exchange)
        assert (answer.n_tokens, answer.finish.reason) == (0, 'abort')
    partial = generate(SglangDialect(), find_exchange('sglang/generate_pause_abort', path='/generate'))
    assert partial.finish.reason == 'abort'
    assert partial.n_tokens > 0
    with pytest.raises(ReplyError, match='entries for completion_tokens'):
        generate(SglangDialect(), find_exchange('sglang/generate_duplicated_logprobs', path='/generate'))


@pytest.mark.parametrize(('replies', 'version'), [(slice(0, 1), '4'), (slice(1, 3), None), (slice(1, None), '')])
def test_the_version_of_sglang_is_found_in_every_release(replies, version):
    exchanges = read_exchanges('sglang/version_discovery')
    chosen = exchanges[replies]
    if version is None:
        version = chosen[-1]['response']['json']['weight_version']
    elif version == '':
        chosen = [chosen[0], chosen[2], chosen[3]]
    assert asyncio.run(SglangDialect().ask_version(Replayed(*chosen))) == version


def test_sglang_looks_for_stop_ids_only_where_it_looks_for_eos():
    exchange = find_exchange('sglang/generate_weight_spans', path='/generate')
    found = {}
    for stop in ((), (2,)):
        replayed = Replayed(exchange)
        sampling = CallSampling(max_new_tokens=9, ignore_eos=True, stop_tokens=stop)
        asked = Call((np.array([11, 12, 13], np.int32),), 'prompt', (sampling,), ('a',), logprobs=True)
        asyncio.run(SglangDialect().generate(replayed, asked, 512))
        found[stop] = replayed.sent[0][2]['sampling_params']['ignore_eos']
    assert found == {(): True, (2,): False}
