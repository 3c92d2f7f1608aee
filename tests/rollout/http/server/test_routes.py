"""Routes over HTTP: in every dialect, streamed and not, they are those of the engine in this process."""

from __future__ import annotations

import base64
import io

import jsonschema
import numpy as np
import pytest

from areal_jax.rollout.http.server.openapi import describe_server
from tests.rollout.http.expert_rig import FORM, NEW, PROMPT, ExpertServer, in_process
from tests.rollout.http.server.rig import ToyServer

LENGTH, ASKED = len(PROMPT), {'return_routed_experts': True}
IDS = PROMPT.tolist()
NOISE = {'ignore_eos': True, 'seed': 7}
VLLM = {'token_ids': IDS, 'sampling_params': {'max_tokens': NEW, 'logprobs': 0, **NOISE}, **ASKED}
SAMPLING = {'max_new_tokens': NEW, 'ignore_eos': True, 'sampling_seed': 7}
SGLANG = {'input_ids': IDS, 'sampling_params': SAMPLING, 'return_logprob': True, **ASKED}
OPENAI = {
    path: {prompt: IDS, 'max_tokens': NEW, 'return_token_ids': True, **NOISE, **ASKED}
    for path, prompt in (('/v1/completions', 'prompt'), ('/v1/chat/completions', 'input_ids'))
}
BODIES = {'/inference/v1/generate': VLLM, '/generate': SGLANG, **OPENAI}


@pytest.fixture(scope='module')
def server():
    with ExpertServer() as server:
        yield server


def decode_npy(text):
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def decode_raw(text):
    return np.frombuffer(base64.b64decode(text), '<i4').reshape(-1, *FORM.row)


def post(server, path, body):
    status, reply = server.run(lambda client: client.post(path, body))
    assert status == 200, reply
    return reply


def events(server, path, body):
    return server.read_stream(path, body | {'stream': True})[:-1]


def joined(found):
    """(tokens, rows) of the events of one answer, each of which has rows of its own tokens."""
    choices = [event['choices'][0] for event in found]
    assert len(choices) > 1
    parts = [decode_npy(one['routed_experts']) for one in choices if one['token_ids']]
    assert [len(part) for part in parts[1:]] == [len(one['token_ids']) for one in choices if one['token_ids']][1:]
    return [token for one in choices for token in one['token_ids']], np.concatenate(parts)


def test_rows_of_vllm_are_those_of_the_engine(server):
    tokens, rows = in_process()
    assert (rows.shape, rows.dtype) == ((LENGTH + NEW - 1, 2, 3), np.uint8)
    (choice,) = post(server, '/inference/v1/generate', VLLM)['choices']
    found = decode_npy(choice['routed_experts'])
    assert (choice['token_ids'], found.dtype) == (tokens, np.uint8)
    np.testing.assert_array_equal(found, rows)
    streamed, found = joined(events(server, '/inference/v1/generate', VLLM))
    assert streamed == tokens
    np.testing.assert_array_equal(found, rows)


def test_rows_of_sglang_are_those_of_the_engine(server):
    tokens, rows = in_process()
    reply = post(server, '/generate', SGLANG)
    assert reply['output_ids'] == tokens
    np.testing.assert_array_equal(decode_raw(reply['meta_info']['routed_experts']), rows)
    *before, last = events(server, '/generate', SGLANG)
    assert before
    assert all('routed_experts' not in event['meta_info'] for event in before)
    assert last['output_ids'] == tokens
    np.testing.assert_array_equal(decode_raw(last['meta_info']['routed_experts']), rows)


@pytest.mark.parametrize('path', OPENAI)
def test_rows_of_openai_are_those_of_the_engine(server, path):
    tokens, rows = in_process()
    (choice,) = post(server, path, OPENAI[path] | {'return_meta_info': True})['choices']
    assert choice['token_ids'] == tokens
    np.testing.assert_array_equal(decode_npy(choice['routed_experts']), rows)
    np.testing.assert_array_equal(decode_raw(choice['meta_info']['routed_experts']), rows)
    streamed, found = joined(events(server, path, OPENAI[path]))
    assert streamed == tokens
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize('path', BODIES)
def test_the_page_of_routes_has_the_fields(server, path):
    body = BODIES[path]
    route = describe_server()['paths'][path]['post']
    asked = route['requestBody']['content']['application/json']['schema']
    jsonschema.validate(body, asked)
    assert 'return_routed_experts' in asked['properties']
    said = route['responses']['200']['content']['application/json']['schema']
    jsonschema.validate(post(server, path, body), said)
    assert 'routed_experts' in str(said)


def test_answers_to_one_prompt_have_rows_of_their_own(server):
    sampling = VLLM['sampling_params'] | {'n': 2}
    choices = post(server, '/inference/v1/generate', VLLM | {'sampling_params': sampling})['choices']
    for sample, choice in enumerate(choices):
        tokens, rows = in_process(sample)
        assert choice['token_ids'] == tokens
        np.testing.assert_array_equal(decode_npy(choice['routed_experts']), rows)
    assert choices[0]['token_ids'] != choices[1]['token_ids']


@pytest.mark.parametrize('start', [1, LENGTH - 1])
def test_rows_begin_where_they_are_asked_to(server, start):
    _, rows = in_process()
    body = VLLM | {'sampling_params': VLLM['sampling_params'] | {'routed_experts_prompt_start': start}}
    (choice,) = post(server, '/inference/v1/generate', body)['choices']
    np.testing.assert_array_equal(decode_npy(choice['routed_experts']), rows[start:])
    np.testing.assert_array_equal(joined(events(server, '/inference/v1/generate', body))[1], rows[start:])
    for first in (start, LENGTH):
        reply = post(server, '/generate', SGLANG | {'routed_experts_start_len': first})
        np.testing.assert_array_equal(decode_raw(reply['meta_info']['routed_experts']), rows[first:])


def test_rows_of_a_prompt_whose_kv_was_there_are_the_same(server):
    """The second request computes nothing of the prompt but its last token."""
    for _ in range(2):
        reply = post(server, '/generate', SGLANG)
        np.testing.assert_array_equal(decode_raw(reply['meta_info']['routed_experts']), in_process()[1])
    assert reply['meta_info']['cached_tokens'] > 0


def test_nothing_is_said_where_nothing_is_asked(server):
    (choice,) = post(server, '/inference/v1/generate', VLLM | {'return_routed_experts': False})['choices']
    assert choice['routed_experts'] is None
    meta = post(server, '/generate', SGLANG | {'return_routed_experts': None})['meta_info']
    assert 'routed_experts' not in meta


@pytest.mark.parametrize('path', BODIES)
def test_a_server_that_records_none_refuses_by_name(path):
    with ToyServer() as toy:
        for more in ({}, {'stream': True}):
            status, reply = toy.run(lambda client, more=more: client.post(path, BODIES[path] | more))
            assert status == 400
            message = reply['error']['message']
            assert message.startswith('return_routed_experts=True is not served: ')
            assert 'rollout.record_routes=True' in message


@pytest.mark.parametrize(
    ('path', 'body', 'field'),
    [
        ('/inference/v1/generate', VLLM | {'return_routed_experts': 1}, 'return_routed_experts'),
        (
            '/inference/v1/generate',
            VLLM | {'sampling_params': {'routed_experts_prompt_start': LENGTH}},
            'sampling_params.routed_experts_prompt_start',
        ),
        (
            '/inference/v1/generate',
            VLLM | {'sampling_params': {'max_tokens': 0, 'prompt_logprobs': 0}},
            'return_routed_experts',
        ),
        ('/generate', SGLANG | {'routed_experts_start_len': LENGTH + 1}, 'routed_experts_start_len'),
        ('/generate', SGLANG | {'routed_experts_start_len': -1}, 'routed_experts_start_len'),
    ],
)
def test_what_can_not_be_served_is_refused_by_name(server, path, body, field):
    status, reply = server.run(lambda client: client.post(path, body))
    assert status == 400
    assert reply['error']['message'].startswith(f'{field}=')
