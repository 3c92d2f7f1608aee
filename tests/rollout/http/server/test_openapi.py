"""The page of routes: it has all of them, and its schemas are what the parsers take."""

import functools
import re

import jsonschema
import pytest

from areal_jax.errors import UserError
from areal_jax.rollout.http.server import control, generation, openapi, state, tokenizer
from areal_jax.rollout.http.server.openapi import describe_server, list_operations, render_page
from tests.rollout.http.server.examples import examples_of, parser_of
from tests.rollout.http.server.rig import ToyServer

WITH_BODY = [operation for operation in list_operations() if operation.body is not None]
# of each JSON type, and beyond bounds
VALUES = [None, True, False, -2, 0, 1, 10**12, -0.5, 0.5, 1e9, '', 'x', 'x' * 5000, [], [1], ['x'], [[1]], {}, {'x': 1}]


@pytest.fixture(scope='module')
def server():
    with ToyServer() as server:
        yield server


def schema_of(operation):
    body = describe_server()['paths'][operation.path]['post']['requestBody']
    return jsonschema.Draft202012Validator(body['content']['application/json']['schema'])


def accepts(parse, body):
    try:
        parse(body)
    except UserError:
        return False
    return True


def test_the_page_has_every_route_and_no_other(server):
    status, document = server.run(lambda client: client.get('/openapi.json'))
    assert status == 200
    listed = {(method.upper(), path) for path, one in document['paths'].items() for method in one}
    assert document == describe_server()
    served = [generation.list_routes('toy'), *(one.list_routes() for one in (control, openapi, state, tokenizer))]
    assert listed == {(one.method, one.path.replace(':.+', '')) for routes in served for one in routes}


TOLD = {'return_meta_info': True, 'return_token_ids': True, 'return_prompt_token_ids': True}
ASKED = [
    ('/generate', {'input_ids': [1, 2], 'sampling_params': {'max_new_tokens': 2, 'n': 2}}),
    ('/generate', {'input_ids': [1, 2], 'return_logprob': True, 'sampling_params': {'max_new_tokens': 2}}),
    ('/inference/v1/generate', {'token_ids': [1, 2], 'sampling_params': {'max_tokens': 2}}),
    ('/inference/v1/generate', {'token_ids': [1, 2], 'sampling_params': {'max_tokens': 2, 'logprobs': 0}}),
    *[
        (path, {name: [1, 2], 'max_tokens': 2, 'prompt_logprobs': 1} | fields)
        for path, name in (('/v1/completions', 'prompt'), ('/v1/chat/completions', 'input_ids'))
        for fields in ({}, TOLD, {'logprobs': 1 if name == 'prompt' else True})
    ],
    ('/v1/responses', {'input': 'abc', 'max_output_tokens': 2}),
    ('/v1/messages', {'messages': [{'role': 'user', 'content': 'abc'}], 'max_tokens': 2}),
    ('/v1/messages/count_tokens', {'messages': [{'role': 'user', 'content': 'abc'}]}),
]


@pytest.mark.parametrize(('path', 'body'), ASKED)
def test_replies_have_the_form_that_the_page_says(server, path, body):
    document = describe_server()['paths'][path]['post']['responses']['200']['content']['application/json']
    status, reply = server.run(lambda client: client.post(path, body))
    assert status == 200, reply
    jsonschema.validate(reply, document['schema'])


def variants(operation):
    """The examples with a value of every kind in each field, one after the other."""
    for example in examples_of(operation):
        for field in schema_of(operation).schema['properties']:
            if not (field == 'messages' and 'input_ids' in example):  # the ids are what is read
                yield from ((field, value, example | {field: value}) for value in VALUES)


@functools.cache
def compared(path):
    """(field, value, whether the schema accepts it, whether the parser does) of each variant."""
    [operation] = [one for one in WITH_BODY if one.path == path]
    schema, parse = schema_of(operation), parser_of(operation)
    return [(field, value, schema.is_valid(body), accepts(parse, body)) for field, value, body in variants(operation)]


@pytest.mark.parametrize('operation', WITH_BODY, ids=lambda operation: operation.path)
def test_a_schema_accepts_the_examples_and_all_that_the_parser_accepts(operation):
    schema = schema_of(operation)
    for example in examples_of(operation):
        assert schema.is_valid(example), schema
    for field, value, is_valid, is_accepted in compared(operation.path):
        assert is_valid or not is_accepted, (field, value)
    unknown = operation.example | {'no_such_field': 1}
    assert schema.is_valid(unknown) == accepts(parser_of(operation), unknown)


def test_the_comparison_above_has_bodies_that_both_accept_and_that_both_refuse():
    found = [outcome for operation in WITH_BODY for _, _, *outcome in compared(operation.path)]
    found = [tuple(outcome) for outcome in found]
    assert found.count((True, True)) > 300
    assert found.count((False, False)) > 1000
    assert found.count((True, False)) < 0.1 * len(found)  # rules over several fields, and what only a parser can tell


@pytest.mark.parametrize('operation', WITH_BODY, ids=lambda operation: operation.path)
def test_a_value_of_another_type_is_refused_by_schema_and_parser(operation):
    """Fields of one type: what the parser would take for another one is in no schema."""
    schema, example = schema_of(operation), operation.example
    for field, found in schema.schema['properties'].items():
        kinds = {one.get('type') for one in found.get('anyOf', [found])} - {'null'}
        for wrong in [7, 'x', {'x': 1}] if kinds == {'boolean'} else ['x', {'x': 1}] if kinds == {'integer'} else []:
            assert not schema.is_valid(example | {field: wrong}), field
            assert not accepts(parser_of(operation), example | {field: wrong}), field


def test_a_field_that_must_be_there_is_said():
    required = {operation.path: schema_of(operation).schema.get('required') for operation in WITH_BODY}
    assert required['/inference/v1/generate'] == ['token_ids']
    assert required['/update_weights_from_disk'] == ['model_path']
    assert required['/v1/completions'] == ['prompt']
    assert required['/generate'] is None  # text or input_ids


def test_the_page_to_read_loads_nothing_and_names_every_route(server):
    status, page = server.run(lambda client: client.get('/docs'))
    assert (status, page) == (200, render_page())
    assert not re.search(r'(src|href)="(https?:)?//', page)
    for path in describe_server()['paths']:
        assert path in page
