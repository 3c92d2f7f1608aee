"""Valid bodies of every route with a body, which together have every kind of turn, item and block."""

import functools

from areal_jax.rollout.http.server.tokenizer import parse_detokenize, parse_tokenize
from areal_jax.rollout.http.wire import chat, completions, messages, responses, sglang, vllm
from areal_jax.rollout.http.wire.bodies import read

IDS = [1, 2, 3]
FUNCTION = {'name': 'add', 'description': 'Adds.', 'parameters': {'type': 'object'}, 'strict': False}
TOOLS = [{'type': 'function', 'function': FUNCTION}]
CALL = {'id': 'c', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}
TURNS = [
    {'role': 'system', 'content': [{'type': 'text', 'text': 'Be short.'}]},
    {'role': 'user', 'content': 'Hello'},
    {'role': 'assistant', 'content': 'Hm', 'tool_calls': [CALL]},
    {'role': 'tool', 'content': '1', 'tool_call_id': 'c', 'name': 'add'},
]
ITEMS = [
    {'role': 'user', 'content': [{'type': 'input_text', 'text': 'Hello'}]},
    {'type': 'reasoning'},
    {'type': 'function_call', 'call_id': 'c', 'name': 'add', 'arguments': '{}'},
    {'type': 'function_call_output', 'call_id': 'c', 'output': [{'type': 'input_text', 'text': '1'}]},
]
BLOCK_TOOL = {'name': 'add', 'description': 'Adds.', 'input_schema': {'type': 'object'}}
BLOCKS = [
    {'role': 'user', 'content': [{'type': 'text', 'text': 'Hello'}]},
    {'role': 'assistant', 'content': [{'type': 'tool_use', 'id': 'c', 'name': 'add', 'input': {'a': 1}}]},
    {'role': 'user', 'content': [
        {'type': 'tool_result', 'tool_use_id': 'c', 'content': [{'type': 'text', 'text': '1'}]},
    ]},
]  # fmt: skip
ECHO = {'prompt': IDS, 'echo': True, 'max_tokens': 0, 'logprobs': 1}
ANSWERED = {'messages': BLOCKS, 'max_tokens': 8, 'tools': [BLOCK_TOOL], 'system': [{'type': 'text', 'text': 'a'}]}
# by path: the parser, and bodies besides the one on the page
MORE = {
    '/generate': (sglang.parse, [
        {'input_ids': IDS, 'sampling_params': {'max_new_tokens': 8}, 'return_logprob': True, 'logprob_start_len': 0},
    ]),
    '/inference/v1/generate': (vllm.parse, []),
    '/v1/completions': (completions.parse, [ECHO]),
    '/v1/chat/completions': (
        chat.parse, [{'messages': TURNS, 'tools': TOOLS, 'stream_options': {}}, {'input_ids': IDS}],
    ),
    '/v1/responses': (responses.parse, [{'input': ITEMS, 'tools': [{'type': 'function'} | FUNCTION]}]),
    '/v1/messages': (messages.parse, [ANSWERED]),
    '/v1/messages/count_tokens': (messages.parse_count, [{'messages': BLOCKS, 'tools': [BLOCK_TOOL]}]),
    '/tokenize': (parse_tokenize, [{'prompt': ['Hello']}, {'messages': TURNS, 'tools': TOOLS}]),
    '/detokenize': (parse_detokenize, []),
}  # fmt: skip


def parser_of(operation):
    """The parser of a route's bodies."""
    return MORE[operation.path][0] if operation.path in MORE else functools.partial(read, operation.body)


def examples_of(operation):
    """Valid bodies of a route, that of the page first."""
    return [operation.example, *MORE.get(operation.path, (None, []))[1]]
