"""The page of all routes: /openapi.json, generated from the models of bodies, and the same as HTML at /docs."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
import re
from collections.abc import Sequence
from types import ModuleType

import numpy as np
from aiohttp import web

from areal_jax.columns import cut, declared, find, of_models, of_tokens
from areal_jax.files import JsonObject
from areal_jax.installation import __version__
from areal_jax.rollout.http.server.replies import RULE
from areal_jax.rollout.http.server.tokenizer import DetokenizeRequest, TokenizeRequest
from areal_jax.rollout.http.wire import chat, completions, control, messages, responses, sglang, vllm
from areal_jax.rollout.http.wire.bodies import Body, ask_columns, describe
from areal_jax.rollout.http.wire.exchange import ASKED, Answer, Finish, Piece, ReplyInfo, ToolCall, name_answers
from areal_jax.types import TokenScores

_TOKEN = re.compile(r'<?\d+>?')
_INFO = ReplyInfo('model', 0, lambda token: f'<{token}>')
_FUNCTION = {'name': 'add', 'description': 'Adds.', 'parameters': {'type': 'object'}, 'strict': False}
_FINISHES = (Finish('length'), Finish('stop', 2), Finish('stop', 'end'), Finish('abort', message='Aborted'))
_TOLD = {
    'return_token_ids': True, 'return_prompt_token_ids': True, 'return_meta_info': True,
    'stop_token_ids': [2],
}  # fmt: skip
_INFO_ONLY = {'return_meta_info': True}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One route."""

    path: str
    method: str
    tag: str
    summary: str
    body: type[Body] | None = None
    example: JsonObject = dataclasses.field(default_factory=dict)  # of a body
    replies: Sequence[object] = ()
    query: tuple[tuple[str, tuple[str, ...]], ...] = ()  # parameters with their choices
    is_text: bool = False  # the reply is no JSON
    streams: bool = False  # or server-sent events


def list_operations() -> list[Operation]:
    """All routes of a server, by dialect."""
    return [*_generating(), *_conversing(), *_controlling(), *_telling()]


def _generate(
    path: str, tag: str, summary: str, dialect: ModuleType, example: JsonObject, *told: JsonObject
) -> Operation:
    """Describes a generating route; `told`: fields that replies depend on, the first with everything in a reply."""
    replies = [_reply(dialect, example | fields, i) for fields in ({}, *told) for i in range(len(_FINISHES))]
    return Operation(path, 'post', tag, summary, dialect.Request, example, replies, streams=True)


def _generating() -> list[Operation]:
    ids, limit = [1, 2, 3], {'max_new_tokens': 8}
    ask = lambda columns, field, value: dict.fromkeys(ask_columns(columns, field, value), value)
    asked = ask(declared(), ASKED, True)
    modes = ask(of_tokens(), '{}_mode', 'selected') | ask(of_models(), ASKED, True)
    scored = {'return_logprob': True, 'logprob_start_len': 0}
    return [
        _generate(
            '/generate', 'SGLang', 'Answers to a prompt, whole or as events of a stream.', sglang,
            {'text': 'Hello', 'sampling_params': limit},
            {
                'sampling_params': limit | {'n': 2}, **scored, 'top_logprobs_num': 1, 'return_text_in_logprobs': True,
                **modes,
            },
            {'text': None, 'input_ids': ids, **scored}, {'sampling_params': limit | {'n': 2}},
        ),
        _generate(
            '/inference/v1/generate', 'vLLM', 'Tokens in, tokens out.', vllm,
            {'token_ids': ids, 'sampling_params': {'max_tokens': 8, 'logprobs': 1}},
            {
                'sampling_params': {'logprobs': 2, 'prompt_logprobs': 1, 'stop_token_ids': [2]},
                'return_token_ids': True, **asked,
            },
            {'sampling_params': {'logprobs': 0}}, {'sampling_params': {}},
        ),
        _generate(
            '/v1/completions', 'OpenAI', 'Continuations of a prompt, or the log-probs of its tokens.', completions,
            {'prompt': 'Hello', 'max_tokens': 8}, {'logprobs': 1, 'prompt_logprobs': 1, **_TOLD, **asked},
            {'prompt': ids, 'echo': True, 'max_tokens': 0, 'logprobs': 1}, {'logprobs': 0}, _INFO_ONLY,
        ),
        _generate(
            '/v1/chat/completions', 'OpenAI', 'The next turn of a conversation.', chat,
            {'messages': [{'role': 'user', 'content': 'Hello'}], 'max_tokens': 8},
            {'logprobs': True, 'top_logprobs': 1, 'prompt_logprobs': 1, **_TOLD, **asked}, {'logprobs': True},
            {'tools': [{'type': 'function', 'function': _FUNCTION}]}, _INFO_ONLY,
        ),
    ]  # fmt: skip


def _conversing() -> list[Operation]:
    turns = {'messages': [{'role': 'user', 'content': 'Hello'}]}
    return [
        _generate(
            '/v1/responses', 'OpenAI', 'The next turn of a conversation, as items.', responses,
            {'input': 'Hello', 'max_output_tokens': 8}, {'tools': [{'type': 'function'} | _FUNCTION]},
        ),
        _generate(
            '/v1/messages', 'Anthropic', 'The next turn of a conversation, as blocks.', messages,
            turns | {'max_tokens': 8}, {'tools': [{'name': 'add', 'input_schema': {'type': 'object'}}]},
        ),
        Operation(
            '/v1/messages/count_tokens', 'post', 'Anthropic', 'Tokens of a conversation.', messages.CountRequest,
            turns, [{'input_tokens': 1}],
        ),
    ]  # fmt: skip


def _reply(dialect: ModuleType, body: JsonObject, index: int) -> object:
    """Renders a server's reply with one token; some replies have scores of prompts, some have not."""
    call = name_answers(dialect.parse(body), 'request')
    prompt, token, number = np.array([1, 2, 3], np.int32), 5 + index, np.array([-0.5], np.float32)
    scores = TokenScores(number, np.array([[token]], np.int32), number[:, None])
    of_prompt = TokenScores(*(np.repeat(one, len(prompt) - 1, axis=0) for one in dataclasses.astuple(scores)))
    calls = (ToolCall('c', 'add', '{"a": 1}'),) if call.tools and index else ()
    context = {name: np.zeros((len(prompt), 1, 1), find(name).dtype) for name in call.model_columns}
    known = cut(context, slice(1))
    piece = Piece(np.array([token], np.int32), number, '0', known, text='a', calls=calls, context=context)
    answers = [
        Answer(
            name, prompt, i, [piece], _FINISHES[index], '0', prompt_scores=of_prompt if index else None,
            alternatives=scores if index else None, scored_version='0' if index else '', prompt_text='abc',
        )
        for i, name in enumerate(call.request_ids)
    ]  # fmt: skip
    return json.loads(json.dumps(dialect.render(call, answers, _INFO)))


def _controlling() -> list[Operation]:
    def post(path: str, tag: str, summary: str, body: type[Body], example: JsonObject, reply: object) -> Operation:
        return Operation(path, 'post', tag, summary, body, example, [reply])

    done = {'success': True, 'message': ''}
    return [
        post('/abort_request', 'SGLang', 'Ends a request, or all.', control.Abort, {'rid': 'request'}, None),
        post(
            '/pause_generation', 'SGLang', 'Pauses: ends, retracts or keeps what runs.', control.Pause,
            {'mode': 'abort'}, {'message': '', 'status': 'ok'},
        ),
        post(
            '/continue_generation', 'SGLang', 'Ends a pause.', control.Continue, {}, {'message': '', 'status': ''}
        ),
        *(Operation('/flush_cache', one, 'SGLang', 'Forgets all KV.', is_text=True) for one in ('get', 'post')),
        post(
            '/update_weights_from_disk', 'SGLang', 'Loads weights and decodes with them.',
            control.UpdateFromDisk, {'model_path': '/models/v1', 'weight_version': '1'},
            done | {'num_paused_requests': 0},
        ),
        post(
            '/update_weight_version', 'SGLang', 'The same weights under another version.', control.NewVersion,
            {'new_version': '1'}, done | {'new_version': '1'},
        ),
        Operation(
            '/pause', 'post', 'vLLM', 'Pauses.', control.Nothing,
            replies=[{'status': 'paused'}],
            query=(('mode', ('abort', 'wait', 'keep')), ('clear_cache', ('true', 'false'))),
        ),
        post('/resume', 'vLLM', 'Ends a pause.', control.Nothing, {}, {'status': 'resumed'}),
        post(
            '/abort_requests', 'vLLM', 'Ends these requests, or all.', control.AbortRequests,
            {'request_ids': ['request']}, {'status': 'aborted', 'aborted': 1},
        ),
        Operation('/reset_prefix_cache', 'post', 'vLLM', 'Forgets all KV.', replies=[{'success': True}]),
        post(
            '/start_weight_update', 'vLLM', 'First phase of an update.', control.Nothing, {}, {'message': ''}
        ),
        post(
            '/update_weights', 'vLLM', 'Second phase: loads, while decoding goes on.', control.Update,
            {'update_info': {'weights_path': '/models/v1'}}, {'message': ''},
        ),
        post(
            '/finish_weight_update', 'vLLM', 'Third phase: decodes with them.', control.FinishUpdate,
            {'weight_version': '1'}, {'message': '', 'weight_version': '1', 'pause_seconds': 0.0},
        ),
        post(
            '/collective_rpc', 'vLLM', 'reload_weights.', control.Rpc,
            {'method': 'reload_weights', 'kwargs': {'weights_path': '/models/v1'}}, {'results': [None]},
        ),
        post(
            '/register_client', 'Server', 'Takes the server over for the client of the header X-Areal-Client.',
            control.Nothing, {}, {'status': 'registered'},
        ),
        post(
            '/renew_pause', 'Server', 'Renews the lease of a pause, by ?lease_s=SECONDS.', control.Nothing, {},
            {'renewed': True},
        ),
    ]  # fmt: skip


def _telling() -> list[Operation]:
    def get(path: str, tag: str, summary: str, *replies: object, is_text: bool = False) -> Operation:
        return Operation(path, 'get', tag, summary, replies=replies, is_text=is_text)

    model = {'id': '', 'object': 'model', 'created': 0, 'owned_by': '', 'root': '', 'parent': None, 'max_model_len': 1}
    empty = [get(path, 'Server', 'Whether it is well.', is_text=True) for path in ('/health', '/ping', '/ready')]
    return [
        Operation(
            '/tokenize', 'post', 'Tokenizer', 'Ids of a text, of texts, or of a conversation.',
            TokenizeRequest, {'prompt': 'Hello'},
            [
                {'count': 1, 'max_model_len': 1, 'tokens': [1], 'token_strs': None},
                {'count': [1], 'max_model_len': 1, 'tokens': [[1]], 'token_strs': ['a']},
                {'count': [1], 'max_model_len': 1, 'tokens': [[1]], 'token_strs': [['a']]},
            ],
        ),
        Operation(
            '/detokenize', 'post', 'Tokenizer', 'The text of ids.', DetokenizeRequest, {'tokens': [1]},
            [{'prompt': '', 'text': ''}, {'prompt': [''], 'text': ['']}],
        ),
        get('/tokenizer_info', 'Tokenizer', 'Special tokens by role.', {}),
        get('/v1/models', 'OpenAI', 'The served model.', {'object': 'list', 'data': [model]}),
        get('/v1/models/{name}', 'OpenAI', 'The served model, where it has this name.', model),
        *empty,
        get('/health_generate', 'Server', 'Whether a token can be generated.', is_text=True),
        get('/metrics', 'Server', 'For Prometheus.', is_text=True),
        *(get(path, 'SGLang', 'Model and weight version.', {}) for path in ('/model_info', '/get_model_info')),
        *(get(path, 'SGLang', 'Settings and state.', {}) for path in ('/server_info', '/get_server_info')),
        get('/is_paused', 'vLLM', 'Whether it is paused.', {'is_paused': False}),
        get(
            '/weight_info', 'vLLM', 'Version of the weights, and who has paused.',
            {'weight_version': '0', 'manifest_hash': None, 'client': None, 'pauses': []},
        ),
        get('/get_world_size', 'vLLM', 'Processes of the engine.', {'world_size': 1}),
        get('/version', 'vLLM', 'Of this program.', {'version': ''}),
        get('/openapi.json', 'Server', 'This page for programs.', {}),
        get('/docs', 'Server', 'This page.', is_text=True),
    ]  # fmt: skip


@functools.cache
def describe_server() -> JsonObject:
    """Returns the OpenAPI document, version 3.1."""
    paths: dict[str, JsonObject] = {}
    for operation in list_operations():
        paths.setdefault(operation.path, {})[operation.method] = _describe(operation)
    return {
        'openapi': '3.1.0',
        'info': {'title': 'areal_jax', 'version': __version__, 'description': RULE},
        'paths': paths,
        'components': {'securitySchemes': {'key': {'type': 'http', 'scheme': 'bearer'}}},
        'security': [{}, {'key': []}],
    }


def _describe(operation: Operation) -> JsonObject:
    done: JsonObject = {'description': 'Done.'}
    if not operation.is_text and operation.replies != [None]:
        done['content'] = {'application/json': {'schema': describe_value(*operation.replies)}}
        done['content'] |= {'text/event-stream': {}} if operation.streams else {}
    error = {'description': 'Refused, with a sentence that says why.', 'content': {'application/json': {'schema': {}}}}
    found: JsonObject = {
        'tags': [operation.tag],
        'summary': operation.summary,
        'responses': {'200': done, 'default': error},
    }
    names = ['name'] if '{name}' in operation.path else []
    parameters = [{'name': name, 'in': 'path', 'required': True, 'schema': {'type': 'string'}} for name in names]
    parameters += [
        {'name': name, 'in': 'query', 'required': False, 'schema': {'type': 'string', 'enum': list(choices)}}
        for name, choices in operation.query
    ]
    if parameters:
        found['parameters'] = parameters
    if operation.body is not None:
        body = {'schema': describe(operation.body), 'example': operation.example}
        found['requestBody'] = {'required': True, 'content': {'application/json': body}}
    return found


def describe_value(*values: object) -> JsonObject:
    """Returns the common schema of these replies: a field is required if all replies have it.

    Objects whose keys are ids of tokens, 5 or <5>, may have any key.
    """
    objects = [value for value in values if isinstance(value, dict)]
    lists = [value for value in values if isinstance(value, list)]
    found: list[JsonObject] = []
    if any(objects) and all(_TOKEN.fullmatch(name) for one in objects for name in one):
        parts = [part for one in objects for part in one.values()]
        found.append({'type': 'object', 'additionalProperties': describe_value(*parts)})
    elif objects:
        names = list(dict.fromkeys(name for one in objects for name in one))
        properties = {name: describe_value(*(one[name] for one in objects if name in one)) for name in names}
        required = [name for name in names if all(name in one for one in objects)]
        found.append({'type': 'object', 'properties': properties, 'required': required})
    if lists:
        found.append({'type': 'array', 'items': describe_value(*(part for one in lists for part in one))})
    words = {bool: 'boolean', int: 'integer', float: 'number', str: 'string', type(None): 'null'}
    kinds = dict.fromkeys(words[type(value)] for value in values if type(value) in words)
    found += [{'type': kind} for kind in kinds if not (kind == 'integer' and 'number' in kinds)]
    return found[0] if len(found) == 1 else {'anyOf': found} if found else {}


# The page.

_STYLE = """:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: auto; padding: 1em }
code, pre { font: 13px/1.4 ui-monospace, monospace } pre { overflow-x: auto } summary { cursor: pointer }
table { border-collapse: collapse; display: block; overflow-x: auto }
td, th { text-align: left; padding: .2em .8em .2em 0; vertical-align: top }"""


@functools.cache
def render_page() -> str:
    """Renders the document as one HTML page that loads nothing."""
    document, parts = describe_server(), []
    operations = [(path, method, found) for path, one in document['paths'].items() for method, found in one.items()]
    for tag in dict.fromkeys(found['tags'][0] for _, _, found in operations):
        parts.append(f'<h2>{html.escape(tag)}</h2>')
        parts += [_render(path, method, found) for path, method, found in operations if found['tags'][0] == tag]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    title = f'areal_jax {html.escape(__version__)}: routes of this server'
    lead = '<p>For programs: <a href="openapi.json">openapi.json</a>. Unknown fields are refused by name.</p>'
    lead += f'<p>{html.escape(RULE)}</p>'
    return f'<!doctype html><html lang="en"><head>{head}<title>{title}</title></head><body><h1>{title}</h1>{lead}' + (
        '\n'.join(parts) + '</body></html>'
    )


def _render(path: str, method: str, operation: JsonObject) -> str:
    title = f'<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation["summary"])}'
    if 'requestBody' not in operation:
        return f'<p>{title}</p>'
    body = operation['requestBody']['content']['application/json']
    rows = ''.join(
        f'<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kind(schema))}</td><td>'
        f'{html.escape(str(schema.get("description", "")))}</td></tr>'
        for name, schema in body['schema']['properties'].items()
    )
    example = html.escape(f"curl $URL{path} -H 'content-type: application/json' -d '{json.dumps(body['example'])}'")
    table = f'<table><tr><th>field</th><th>value</th><th></th></tr>{rows}</table>' if rows else ''
    return f'<details><summary>{title}</summary><pre>{example}</pre>{table}</details>'


def _kind(schema: JsonObject) -> str:
    """Describes a schema, as in 'integer from 0 to 20, default 1'."""
    plain = next((one for one in schema.get('anyOf', ()) if one != {'type': 'null'}), schema)
    if None in plain.get('enum', ()):
        return 'absent, null, false, 0 or empty'
    kind = ' or '.join(map(str, plain['enum'])) if 'enum' in plain else str(plain.get('type', 'several forms'))
    bounds = {'minimum': 'from', 'exclusiveMinimum': 'above', 'maximum': 'to'}
    words = [f'{word} {plain[name]:g}' for name, word in bounds.items() if name in plain]
    default = [f'default {json.dumps(schema["default"])}'] if 'default' in schema else []
    return ', '.join([' '.join([kind, *words]), *default])


def list_routes() -> list[web.RouteDef]:
    return [web.get('/openapi.json', openapi), web.get('/docs', docs)]


async def openapi(request: web.Request) -> web.Response:
    return web.json_response(describe_server())


async def docs(request: web.Request) -> web.Response:
    return web.Response(text=render_page(), content_type='text/html')
