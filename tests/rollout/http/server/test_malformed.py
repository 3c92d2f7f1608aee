"""Malformed requests of every kind, on every route: refused in JSON by a server that lives on, never its error.

All kinds are made systematically: every value of a valid body, in turn, is replaced by every bad one, and so on. A part
of them, drawn with a seed, is put to the server here; AREAL_JAX_MALFORMED=all puts all, as the slow test does.
"""

import asyncio
import copy
import gzip
import itertools
import json
import logging
import os
import random
import zlib

import pytest

from areal_jax.rollout.http.server.limits import NAME, Limits
from tests.rollout.http.server.rig import PROMPT, ToyServer, body

KEY = 'clé'  # of the server: no ASCII
FEW = 1200  # kinds of the quick test
AT_ONCE = 16
ANSWER_S, SILENCE_S = 20.0, 1.0  # the second: some of what is sent here leaves the connection open
MESSAGES = [{'role': 'user', 'content': 'abc'}, {'role': 'assistant', 'content': [{'type': 'text', 'text': 'de'}]}]
TOOL = {'type': 'function', 'function': {'name': 'f', 'description': 'd', 'parameters': {'type': 'object'}}}
SAMPLING = {
    'temperature': 1.0, 'top_p': 0.9, 'top_k': 3, 'min_p': 0.1, 'repetition_penalty': 1.1, 'presence_penalty': 0.1,
    'frequency_penalty': 0.1, 'logit_bias': {'5': 1.5}, 'stop': ['ab'], 'stop_token_ids': [2], 'ignore_eos': True,
    'skip_special_tokens': False, 'n': 2, 'include_stop_str_in_output': True, 'min_tokens': 1, 'seed': 3,
}  # fmt: skip
OPENAI = SAMPLING | {
    'model': 'm', 'max_tokens': 2, 'stream': False, 'stream_options': {'include_usage': True}, 'request_id': '',
    'return_token_ids': True, 'return_meta_info': True, 'cache_salt': 's', 'priority': 1, 'session_id': 's',
    'user': 'u', 'return_sampling_logprobs': True,
}  # fmt: skip
SGLANG = {
    **{name: value for name, value in SAMPLING.items() if name not in ('include_stop_str_in_output', 'min_tokens',
        'seed')},
    'min_new_tokens': 1, 'sampling_seed': 3, 'no_stop_trim': True, 'max_new_tokens': 2,
}  # fmt: skip
BODIES = {
    '/generate': body(2, stream=False, priority=1, cache_salt='s', session_id='s', model='m') | {
        'sampling_params': SGLANG, 'rid': ['', ''], 'return_text_in_logprobs': True, 'input_ids': [PROMPT, PROMPT],
        'logprob_start_len': [2, 2], 'sampling_logprobs_mode': 'selected',
    },
    '/inference/v1/generate': {
        'token_ids': PROMPT, 'sampling_params': SAMPLING | {'max_tokens': 2, 'logprobs': 1}, 'stream': False,
        'model': 'm', 'request_id': '', 'cache_salt': 's', 'priority': 1, 'draw': 1, 'sample': 1,
        'output_mode': 'tokens',
        'stream_options': {'include_usage': True}, 'return_token_ids': True, 'return_sampling_logprobs': True,
    },
    '/v1/completions': {'prompt': [PROMPT, PROMPT], 'logprobs': 1, 'best_of': 2, **OPENAI},
    '/v1/chat/completions': {
        'messages': MESSAGES, 'tools': [TOOL], 'tool_choice': 'none', 'logprobs': True, 'max_completion_tokens': 2,
        'response_format': {'type': 'text'}, **OPENAI,
    },
    '/v1/responses': {
        'input': [{'role': 'user', 'content': [{'type': 'input_text', 'text': 'abc'}]}], 'max_output_tokens': 2,
        'tools': [], 'text': {'format': {'type': 'text'}}, 'reasoning': {}, 'stream': False,
    },
    '/v1/messages': {
        'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'abc'}]}], 'max_tokens': 2,
        'tools': [], 'tool_choice': {'type': 'auto'}, 'stop_sequences': ['ab'], 'system': 'def', 'stream': False,
    },
    '/v1/messages/count_tokens': {'messages': [{'role': 'user', 'content': 'abc'}]},
    '/abort_request': {'rid': 'nobody', 'abort_all': False},
    '/abort_requests': {'request_ids': ['nobody']},
    '/pause_generation': {'mode': 'abort'},
    '/continue_generation': {'torch_empty_cache': True},
    '/update_weights_from_disk': {
        'model_path': '/nowhere', 'weight_version': '1', 'flush_cache': True, 'abort_all_requests': False,
    },
    '/update_weight_version': {'new_version': '0', 'abort_all_requests': False},
    '/start_weight_update': {},
    '/update_weights': {'update_info': {'weights_path': '/nowhere'}},
    '/finish_weight_update': {'weight_version': '1'},
    '/collective_rpc': {'method': 'reload_weights', 'kwargs': {'weights_path': '/nowhere'}, 'timeout': 1},
    '/pause': {}, '/resume': {}, '/reset_prefix_cache': {}, '/flush_cache': {},
}  # fmt: skip
GETS = ('/health', '/ping', '/ready', '/health_generate', '/v1/models', '/model_info', '/server_info', '/version',
        '/metrics', '/is_paused', '/weight_info', '/flush_cache', '/get_world_size')  # fmt: skip
BAD = [
    None, True, -1, 0, 1.5, -0.0, 1e308, 10**30, -(2**70), 2**31, 2**63, float('nan'), float('inf'), '', 'x', '\ud800',
    'x' * 9000, '\x00', [], [[]], [None], [[1]], ['a', ''], [True], [-1], [2**31], [1] * 5000, ['a'] * 5000, {},
    {'a': 1},
    {'': None}, {'9' * 5000: 1}, {'00000000001': 1, '1': 1}, {'²': 1}, {'1': 'x'}, {str(i): 1 for i in range(2000)},
    [{}], [{'role': 'tool'}], {'type': 'text'},
]  # fmt: skip
VALID = json.dumps({'input_ids': PROMPT, 'sampling_params': {'max_new_tokens': 1}}).encode()


def places(value, path=()):
    """Of every value inside, the value itself first."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inside:
        yield from places(part, (*path, name))


def replace(value, path, new):
    if not path:
        return new
    found = copy.deepcopy(value)
    at = found
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = new
    return found


def post(path, content, headers=(), length=None):
    """A request as bytes, which closes its connection."""
    size = [] if length == '' else [b'Content-Length: %s' % (str(len(content)) if length is None else length).encode()]
    key = (
        []
        if any(line.lower().startswith(b'authorization') for line in headers)
        else [b'Authorization: Bearer cl\xc3\xa9']
    )
    lines = [b'POST %s HTTP/1.1' % path.encode(), b'Host: x', b'Connection: close', *key, *size, *headers]
    return b'\r\n'.join(lines) + b'\r\n\r\n' + content


def replaced_values():
    for path, valid in BODIES.items():
        for place, bad in itertools.product(places(valid), BAD):
            yield f'{path} {place} {str(bad)[:20]!r}', post(path, json.dumps(replace(valid, place, bad)).encode())
        for name in ('surprise', '\ud800', 'x' * 9000, '__class__', ''):
            yield f'{path} more {name[:20]!r}', post(path, json.dumps(valid | {name: 1}).encode())


def broken_json():
    for path, valid in BODIES.items():
        text = json.dumps(valid | {'model': 'é'}, ensure_ascii=False)
        whole = text.encode()
        contents = [
            whole[: len(whole) // 2], whole[1:], whole + b'}', whole + b'\x00', b'\xef\xbb\xbf' + whole,
            text.encode('utf-16'), text.encode('utf-32'), text.encode('latin-1'), b'\xff' * 9, b'\x00' * 9, b'{', b'',
            b' ', b'\n\n', b'nul', b'NaN', b'-', b'1e999', b'"' * 9, b'[' * 50_000, b'{"a":' * 50_000,
            b'[' * 500 + b']' * 500,
            b'{"n":' + b'9' * 5000 + b'}', b'{"n":1' + b'0' * 400 + b'}', b'{"n":1e' + b'9' * 400 + b'}', b"{'n': 1}",
            b'{"n": 1, "n": 2}', b'{"\\ud800": 1}', b'{"n": "\\u12"}', b'3', b'null', b'"x"', b'[1]', b'{"n":1,}',
            b'a=b&c=d',
        ]  # fmt: skip
        for number, content in enumerate(contents):
            yield f'{path} json {number}', post(path, content)


def broken_framing():
    zipped = gzip.compress(VALID)
    gz = b'Content-Encoding: gzip'
    chunked = b'Transfer-Encoding: chunked'
    for path in BODIES:
        cases = [
            (VALID, [gz]), (zipped[:-9], [gz]), (zipped[:12] + b'\xff' * 20, [gz]), (b'', [gz]), (zipped, [gz]),
            (zipped + b'x', [gz]), (VALID, [b'Content-Encoding: deflate']), (zlib.compress(VALID), [gz]),
            (VALID, [b'Content-Encoding: br']), (VALID, [b'Content-Encoding: zstd']), (VALID,
                [b'Content-Encoding: \xff']),
            (gzip.compress(b' ' * 30_000_000, 1), [gz]), (VALID, [b'Content-Encoding: gzip, gzip']),
            (VALID, [b'Content-Type: text/plain; charset=\xff']), (VALID, [b'Content-Type: multipart/form-data']),
            (VALID, [b'Expect: 100-continue']), (VALID, [b'Expect: magic']), (VALID, [b'Expect: \xff']),
            (VALID, [b'Authorization: Bearer \xff\xfe']), (VALID, [b'Authorization: \xff']), (VALID,
                [b'Authorization: ']),
            (VALID, [b'Authorization: Bearer clXX']), (VALID, [b'X-Areal-Incarnation: \xff']),
            (VALID, [b'Upgrade: websocket', b'Connection: Upgrade']), (VALID, [b'Upgrade: h2c']),
            (VALID, [b'Accept: text/html']), (VALID, [b'X: ' + b'x' * 9000]), (VALID, [b'X: x'] * 300),
            (VALID, [b'no colon']), (VALID, [b': x']), (VALID, [b'X : x']), (VALID, [b' folded']), (VALID,
                [b'X: \x00']),
            (VALID, [b'Host: y']), (VALID, [b'Range: bytes=9-1']), (VALID, [b'Cookie: \xff=;;']),
        ]  # fmt: skip
        for number, (content, headers) in enumerate(cases):
            yield f'{path} header {number}', post(path, content, headers)
        for number, length in enumerate(['-1', 'x', '9' * 40, '1e3', '+5', '0x10', '5', str(len(VALID) + 9), '']):
            yield f'{path} length {number}', post(path, VALID, length=length)
        for number, content in enumerate([
            b'0\r\n\r\n', b'x\r\n\r\n', b'-1\r\n', b'5\r\n{}', b'2\r\n{}\r\n', b'2\r\n{}xx0\r\n\r\n',
            b'f' * 40 + b'\r\n',
            b'2;a=b\r\n{}\r\n0\r\n\r\n', b'2\n{}\n0\n\n', b'2\r\n{}\r\n0\r\nX: y\r\n\r\n', b'\xff\r\n',
        ]):  # fmt: skip
            yield f'{path} chunks {number}', post(path, content, [chunked], length='')
            yield f'{path} chunks and a length {number}', post(path, content, [chunked])


def broken_requests():
    paths = [
        *BODIES,
        *GETS,
        '/',
        '/nowhere',
        '/v1',
        '//',
        '/generate/',
        '/%ff',
        '/%00',
        '/%',
        '/\xff',
        '/?%ff=%ff',
        '/' + 'x' * 9000,
    ]
    key = b'Authorization: Bearer cl\xc3\xa9\r\n'
    for method, path in itertools.product(
        ['GET', 'HEAD', 'PUT', 'DELETE', 'OPTIONS', 'PATCH', 'TRACE', 'BREW', 'post'], paths
    ):
        line = f'{method} {path} HTTP/1.1'.encode('latin-1')
        yield f'{method} {path[:20]}', line + b'\r\nHost: x\r\nConnection: close\r\n' + key + b'\r\n'
    for query in ('mode=wait', 'mode=magic', 'mode=%ff', 'mode', 'clear_cache=1', 'mode=abort&mode=keep', '=&=', '%'):
        yield f'/pause?{query}', post(f'/pause?{query}', b'')
    for number, content in enumerate([
        b'\r\n\r\n', b'GET\r\n\r\n', b'GET /\r\n\r\n', b'GET / HTTP/9.9\r\n\r\n', b'GET / HTTP/1.0\r\n\r\n',
        b'\x16\x03\x01\x02\x00\x01',
        b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', b'GET / FTP/1.1\r\n\r\n', b'GET  /  HTTP/1.1\r\n\r\n', b'\xff' * 200,
        b'\x00' * 200,
        b'CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n', b'GET http://[::1 HTTP/1.1\r\n\r\n',
        b'GET http://x:99999/ HTTP/1.1\r\n\r\n',
        b'OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n', b'GET /health HTTP/1.1\n\n', b'x' * 20_000,
        b'GET / HTTP/1.1\r\n' + b'X' * 20_000,
        b'GET /health HTTP/1.1\r\nHost: x\r\n\r\n' * 40 + b'junk\r\n\r\n', b'G',
        b'POST /generate HTTP/1.1\r\nContent-Le',
    ]):  # fmt: skip
        yield f'raw {number}', content


def all_kinds():
    return dict(itertools.chain(replaced_values(), broken_json(), broken_framing(), broken_requests()))


async def exchange(host, port, content):
    """What the server answers before it closes the connection, or is silent; fails where it does neither."""
    reader, writer = await asyncio.open_connection(host, port)
    reply = b''
    try:
        writer.write(content)
        while part := await asyncio.wait_for(reader.read(2**20), SILENCE_S if reply else ANSWER_S):
            reply += part
    except ConnectionError:
        pass
    except TimeoutError:
        return reply or b'HTTP/1.1 599 no answer\r\n\r\n'
    finally:
        writer.close()
    return reply


def find_fault(reply):
    """What is wrong with a reply; '' = nothing."""
    if not reply:
        return ''  # closed without a word, as after half of a head
    reply = reply.removeprefix(b'HTTP/1.1 100 Continue\r\n\r\n')
    head, _, content = reply.partition(b'\r\n\r\n')
    status = int(head.split()[1])
    if (status >= 500 and status not in (503, 504)) or b'Traceback' in reply:
        return f'{status}: {content[:300]!r}'
    if status < 400 or not content:
        return ''
    if b'application/json' not in head:
        return f'no JSON: {reply[:300]!r}'
    length = next(line for line in head.lower().split(b'\r\n') if line.startswith(b'content-length:'))
    error = json.loads(content[: int(length.split(b':')[1])])
    return '' if {'error', 'detail', 'success'} & set(error) else f'no error: {content[:300]!r}'


def put_to_a_server(kinds, caplog):
    """{kind: fault} of those that were not refused as they should be."""
    found = {}

    async def script(client):
        host, port = client.url.removeprefix('http://').split(':')
        waiting = iter(kinds.items())

        async def work():
            for kind, content in waiting:
                reply = await exchange(host, int(port), content)
                if fault := find_fault(reply):
                    found[kind] = fault
                if 'pause' in kind:
                    await exchange(host, int(port), post('/resume', b''))

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        await exchange(host, int(port), post('/resume', b''))
        headers = {'Authorization': f'Bearer {KEY}'.encode().decode('utf-8', 'surrogateescape')}
        health = await client.get('/health')
        return health, await client.post('/generate', body(6), headers=headers)

    limits = Limits(body_s=0.3, header_s=0.3, body_bytes=1 << 20)
    with caplog.at_level(logging.WARNING), ToyServer(limits=limits, api_key=KEY) as server:
        server.backend.step_s = 0.0
        health, (status, reply) = server.run(script, seconds=900)
        assert server.engine.open_requests() == []
    assert health[0] == 200
    assert (status, len(reply['output_ids'])) == (200, 6)
    errors = [
        record.getMessage() for record in caplog.records if record.name == NAME and record.levelno >= logging.ERROR
    ]
    return found | ({'log': errors} if errors else {})


def test_no_malformed_request_is_an_error_of_the_server(caplog):
    kinds = all_kinds()
    assert len(kinds) > 6000
    if os.environ.get('AREAL_JAX_MALFORMED') != 'all':
        names = {name for name in kinds if not name.startswith(tuple(BODIES)) or name.startswith('/generate header')}
        names |= set(random.Random(0).sample(sorted(kinds), FEW))
        kinds = {name: kinds[name] for name in sorted(names)}
    print(f'{len(kinds)} kinds of malformed requests')
    assert put_to_a_server(kinds, caplog) == {}


@pytest.mark.slow
def test_no_malformed_request_of_all_kinds_is_an_error_of_the_server(caplog):
    kinds = all_kinds()
    print(f'{len(kinds)} kinds of malformed requests')
    assert put_to_a_server(kinds, caplog) == {}
