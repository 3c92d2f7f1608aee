"""A field of a request that is accepted has an influence, or is counted and documented; any other is refused."""

from __future__ import annotations

import ast
import copy
import pathlib

import pytest

import areal_jax
from areal_jax.rollout.http.server.openapi import list_operations
from areal_jax.rollout.http.wire import chat, completions, control, messages, responses, sglang, vllm
from areal_jax.rollout.http.wire.bodies import Body, describe, read
from areal_jax.rollout.http.wire.exchange import RequestError
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.agents import gateway_rig
from tests.rollout.http.server.examples import examples_of, parser_of
from tests.rollout.http.server.rig import ToyServer
from tests.rollout.http.server.test_malformed import BODIES as ALL_BODIES
from tests.rollout.http.server.test_malformed import places, replace

PAGE = pathlib.Path(__file__).parents[4] / 'docs' / 'serving_tools.md'
IGNORED = 'Has no influence on the answer.'  # how the schema of a request marks such a field
BODIES = {
    path: {name: body[name] for name in body if name != 'rid' or len(body) < 3} for path, body in ALL_BODIES.items()
}
USER = {'role': 'user', 'content': 'abc'}


def list_ignored(schema, path=()):
    """Of every field that a schema calls without influence: the names on the way to it."""
    for name, inside in schema.get('properties', {}).items():
        if inside.get('description') == IGNORED:
            yield (*path, name)
        for form in (inside, inside.get('items', {}), *inside.get('anyOf', ())):
            yield from list_ignored(form, (*path, name))
            yield from list_ignored(form.get('items', {}), (*path, name))


def objects(value, names, path=()):
    """The places of the objects under these names, inside of lists too."""
    if isinstance(value, list):
        for index, part in enumerate(value):
            yield from objects(part, names, (*path, index))
    elif isinstance(value, dict):
        if not names:
            yield path
        elif names[0] in value:
            yield from objects(value[names[0]], names[1:], (*path, names[0]))


def put(body, path, name, value):
    found = copy.deepcopy(body)
    at = found
    for step in path:
        at = at[step]
    at[name] = value
    return found


def ask_ignored(operation):
    """(a body, the field in it that is ignored, as it is counted)."""
    schema, parse = describe(operation.body), parser_of(operation)
    for names in dict.fromkeys(list_ignored(schema)):
        for example in examples_of(operation):
            for place in objects(example, names[:-1]):
                body = put(example, place, names[-1], 1)
                try:
                    parse(body)
                except RequestError:
                    continue  # of another kind of message
                yield body, '.'.join(names)


OPERATIONS = {operation.path: operation for operation in list_operations() if operation.body is not None}
GENERATING = {
    '/generate': sglang, '/inference/v1/generate': vllm, '/v1/completions': completions,
    '/v1/chat/completions': chat, '/v1/responses': responses, '/v1/messages': messages,
}  # fmt: skip


@pytest.mark.parametrize('path', GENERATING)
def test_every_ignored_field_of_a_dialect_is_counted(path):
    asked = list(ask_ignored(OPERATIONS[path]))
    assert asked
    for body, name in asked:
        assert name in GENERATING[path].parse(body).ignored, (name, body)


IDS = [1, 2, 3]
ALONE = {  # fields that other servers use, or that need another field: (dialect, body, what is counted)
    'sglang priority': (sglang, {'input_ids': IDS, 'priority': 3}, 'priority'),
    'sglang session': (sglang, {'input_ids': IDS, 'session_id': 's'}, 'session_id'),
    'sglang start': (sglang, {'input_ids': IDS, 'logprob_start_len': 0}, 'logprob_start_len'),
    'sglang text': (sglang, {'input_ids': IDS, 'return_text_in_logprobs': True}, 'return_text_in_logprobs'),
    'sglang rows': (sglang, {'input_ids': IDS, 'routed_experts_start_len': 1}, 'routed_experts_start_len'),
    'sglang in a list': (
        sglang, {'input_ids': [IDS, IDS], 'sampling_params': [{'spaces_between_special_tokens': True}, {}]},
        'sampling_params.spaces_between_special_tokens',
    ),
    'vllm priority': (vllm, {'token_ids': IDS, 'priority': 3}, 'priority'),
    'vllm draw': (vllm, {'token_ids': IDS, 'draw': 3}, 'draw'),
    'vllm sample': (vllm, {'token_ids': IDS, 'sample': 3}, 'sample'),
    'vllm usage': (vllm, {'token_ids': IDS, 'stream_options': {'include_usage': True}}, 'stream_options.include_usage'),
    'vllm rows': (
        vllm, {'token_ids': IDS, 'sampling_params': {'routed_experts_prompt_start': 1}},
        'sampling_params.routed_experts_prompt_start',
    ),
    'completions priority': (completions, {'prompt': IDS, 'priority': 3}, 'priority'),
    'completions ids': (completions, {'prompt': IDS, 'return_tokens_as_token_ids': True}, 'return_tokens_as_token_ids'),
    'chat session': (chat, {'messages': [USER], 'session_id': 's'}, 'session_id'),
    'chat usage': (
        chat, {'messages': [USER], 'stream_options': {'include_usage': True}}, 'stream_options.include_usage',
    ),
    'chat ids': (chat, {'messages': [USER], 'input_ids': IDS}, 'messages'),
    'chat template': (chat, {'messages': [USER], 'chat_template_kwargs': {'a': 1}}, 'chat_template_kwargs'),
    'responses session': (responses, {'input': 'abc', 'session_id': 's'}, 'session_id'),
    'responses reasoning': (responses, {'input': [USER, {'type': 'reasoning', 'summary': []}]}, 'input.reasoning'),
    'messages priority': (messages, {'messages': [USER], 'max_tokens': 1, 'priority': 1}, 'priority'),
    'messages thinking': (
        messages,
        {'messages': [USER, {'role': 'assistant', 'content': [{'type': 'thinking', 'thinking': 'x'}]}, USER],
         'max_tokens': 1},
        'messages.content.thinking',
    ),
}  # fmt: skip


@pytest.mark.parametrize('case', ALONE)
def test_a_field_that_has_no_influence_as_the_request_is_is_counted(case):
    dialect, body, field = ALONE[case]
    assert field in dialect.parse(body).ignored


def test_what_has_an_influence_is_not_counted():
    assert sglang.parse({'input_ids': IDS, 'return_logprob': True, 'logprob_start_len': 0, 'priority': 0}).ignored == ()
    assert vllm.parse({'token_ids': IDS, 'draw': 3, 'sample': 1, 'sampling_params': {'seed': 1}}).ignored == ()
    usage = {'stream': True, 'stream_options': {'include_usage': True}}
    assert chat.parse({'messages': [USER], 'add_generation_prompt': True, **usage}).ignored == ()


REFUSED = {
    'no generation prompt': (None, {'messages': [USER], 'add_generation_prompt': False}, 'add_generation_prompt'),
    'values that are no object': (None, {'messages': [USER], 'chat_template_kwargs': 1}, 'chat_template_kwargs'),
    'an update that goes on alone': (
        control.UpdateFromDisk, {'model_path': '/m', 'is_async': True}, 'is_async',
    ),
    'a pause that stays': (control.UpdateFromDisk, {'model_path': '/m', 'keep_pause': True}, 'keep_pause'),
    'another format': (control.UpdateFromDisk, {'model_path': '/m', 'load_format': 'dummy'}, 'load_format'),
    'a call with arguments': (control.Rpc, {'kwargs': {'weights_path': '/m'}, 'args': [1]}, 'args'),
    'a call with another one': (control.Rpc, {'kwargs': {'weights_path': '/m', 'strict': 1}}, 'kwargs.strict'),
    'a call with a field': (control.Rpc, {'kwargs': {'weights_path': '/m'}, 'unique_reply_rank': 1}, 'unique_re'),
}  # fmt: skip


@pytest.mark.parametrize('case', REFUSED)
def test_what_would_change_something_and_is_not_served_is_refused(case):
    kind, body, field = REFUSED[case]
    with pytest.raises(RequestError) as refused:
        chat.parse(body) if kind is None else read(kind, body)
    assert refused.value.field.startswith(field)


# Over HTTP.


@pytest.fixture(scope='module')
def server():
    with ToyServer() as found:
        yield found


def count(server, field):
    _, text = server.run(lambda client: client.get('/metrics'))
    lines = [
        line for line in text.splitlines() if line.startswith(f'areal_jax_fields_ignored_total{{field="{field}"}}')
    ]
    return float(lines[0].split()[-1]) if lines else 0.0


COUNTED = {
    '/generate': ('log_metrics', {'input_ids': IDS, 'sampling_params': {'max_new_tokens': 1}, 'log_metrics': True}),
    '/inference/v1/generate': (
        'sampling_params.detokenize',
        {'token_ids': IDS, 'sampling_params': {'max_tokens': 1, 'detokenize': True}},
    ),
    '/v1/completions': ('user', {'prompt': 'abc', 'max_tokens': 1, 'user': 'u'}),
    '/v1/chat/completions': ('metadata', {'messages': [USER], 'max_tokens': 1, 'metadata': {}}),
    '/v1/responses': ('truncation', {'input': 'abc', 'max_output_tokens': 1, 'truncation': 'auto'}),
    '/v1/messages': ('thinking', {'messages': [USER], 'max_tokens': 1, 'thinking': {'type': 'enabled'}}),
    '/v1/messages/count_tokens': ('betas', {'messages': [USER], 'betas': ['b']}),
    '/tokenize': ('model', {'prompt': 'abc', 'model': 'm'}),
    '/detokenize': ('model', {'tokens': IDS, 'model': 'm'}),
    '/abort_request': ('abort_message', {'rid': 'nobody', 'abort_message': 'x'}),
    '/continue_generation': ('torch_empty_cache', {'torch_empty_cache': True}),
    '/update_weights_from_disk': ('token_step', {'model_path': '/nowhere', 'token_step': 3}),
    '/collective_rpc': ('timeout', {'kwargs': {'weights_path': '/nowhere'}, 'timeout': 1}),
}


@pytest.mark.parametrize('path', COUNTED)
def test_an_ignored_field_is_counted_by_its_route(server, path):
    field, body = COUNTED[path]
    before = count(server, field)
    status, reply = server.run(lambda client: client.post(path, body))
    assert status == 200 or 'nowhere' in str(reply), reply
    assert count(server, field) == before + 1


FREE = {'parameters', 'logit_bias', 'chat_template_kwargs', 'reasoning', 'metadata'}  # objects of the client


@pytest.mark.parametrize('path', BODIES)
def test_an_unknown_field_of_any_object_is_refused_by_every_route(server, path):
    tried = 0
    for place in places(BODIES[path]):
        at = BODIES[path]
        for name in place:
            at = at[name]
        if not isinstance(at, dict) or FREE.intersection(map(str, place)):
            continue
        body = replace(BODIES[path], place, {**at, 'zz_unknown': 1})
        status, reply = server.run(lambda client, body=body: client.post(path, body))
        assert (status, 'zz_unknown' in str(reply)) == (400, True), (place, reply)
        tried += 1
    assert tried


CONTROL = [path for path in BODIES if not path.startswith(('/v1', '/inference', '/generate', '/tokenize', '/detok'))]


@pytest.mark.parametrize('path', CONTROL)
def test_an_unknown_parameter_of_a_route_that_controls_is_refused(server, path):
    status, reply = server.run(lambda client: client.post(f'{path}?mod=wait', BODIES[path]))
    assert (status, 'mod=' in str(reply)) == (400, True), reply


class Thinking(CharacterTokenizer):
    """Its chat form asks whether to think."""

    def reads(self, key):
        return key == 'enable_thinking'


@pytest.mark.parametrize(('key', 'status'), [('enable_thinking', 400), ('other', 200)])
def test_a_value_for_the_template_is_refused_where_the_template_looks_at_it(key, status, monkeypatch):
    body = {'messages': [USER], 'max_tokens': 1, 'chat_template_kwargs': {key: False}}
    with ToyServer(tokenizer=Thinking('abcdefghi')) as thinking:
        found, reply = thinking.run(lambda client: client.post('/v1/chat/completions', body))
        assert (found, 'model.chat_template' in str(reply)) == (status, status == 400)
    settings = gateway_rig.GatewaySettings
    monkeypatch.setattr(gateway_rig, 'GatewaySettings', lambda *given: settings(*given, reads=Thinking('a').reads))
    asked = []

    async def program(client):
        asked.append(await client.post({'model': 'm', **body}))

    run = gateway_rig.Run(program, [501, 3])
    assert asked[0][0] == status
    counted = {'malformed': 1} if status == 400 else {'ignored/chat_template_kwargs': 1, 'overridden/max_tokens': 1}
    assert {name: run.episode.counts.get(name) for name in counted} == counted


# The page.


def find_bodies(kind=Body):
    """All classes of bodies."""
    return [kind, *(one for inner in kind.__subclasses__() for one in find_bodies(inner))]


def find_ignored_names():
    """Fields that a class of bodies ignores, and those that have no influence without another one."""
    root = pathlib.Path(areal_jax.__file__).parent / 'rollout' / 'http'
    for kind in find_bodies():
        yield from kind.ignored if kind.__module__.startswith('areal_jax.') else ()
    for path in root.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], 'id', '') == 'without_influence':
                yield from (key.value.rpartition('.')[2] for key in node.value.keys if isinstance(key, ast.Constant))


def test_the_page_names_every_field_that_is_ignored():
    page = PAGE.read_text()
    section = page[page.index('## What clients send besides') :]
    names = set(find_ignored_names())
    assert len(names) > 50
    assert {'user', 'strict', 'priority', 'token_step', 'chat_template_kwargs'} <= names
    assert sorted(name for name in names if f'`{name}`' not in section) == []
