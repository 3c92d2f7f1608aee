"""Whom a server obeys: no web page, by whatever route, form, name or header; programs as the pages of docs call it."""

import contextlib
import http.client
import json
import pathlib
import re
import shlex
from unittest import mock

import pytest
from aiohttp import web

from areal_jax.rollout.http.server.openapi import render_page
from areal_jax.rollout.http.server.replies import ACTING_PATHS, OPEN_PATHS, READING
from tests.rollout.http.server.rig import PROMPT, ToyServer, write_weights

DOCS = pathlib.Path(__file__).parents[4] / 'docs'
KEY = 'secret'
BEARER = [('Authorization', f'Bearer {KEY}')]
JSON = [('Content-Type', 'application/json')]
REFUSED = (401, 403, 415)
OF_OUR_CLIENTS = ('/register_client', '/renew_pause')  # who name themselves in a header
WHOLE = ('/pause', '/flush_cache', '/update_weights_from_disk')
TWICE = ('two types', 'two names')  # aiohttp refuses some of them before any of ours is asked
CHAT = {'messages': [{'role': 'user', 'content': 'abc'}], 'max_tokens': 1}
# what forms and scripts of a page can send without asking a browser's leave, to a server at its own address
FORMS = {
    'text': [('Content-Type', 'text/plain')],
    'text of a charset': [('Content-Type', 'text/plain;charset=UTF-8')],
    'text with a parameter': [('Content-Type', 'text/plain; application/json')],
    'form': [('Content-Type', 'application/x-www-form-urlencoded')],
    'parts': [('Content-Type', 'multipart/form-data; boundary=x')],
    'no type': [],
    'two types': [('Content-Type', 'text/plain'), *JSON],
    'two types in one': [('Content-Type', 'application/json, text/plain')],
}
# what a browser says of a page of another address, with the best body
PAGES = {
    **{
        f'a page of {origin!r}': [*JSON, ('Origin', origin)]
        for origin in (
            'http://evil.example', 'null', 'https://127.0.0.1.evil.example', 'http://localhost.evil.example:8000',
            'http://evil.example@127.0.0.1', 'http://127.0.0.1/evil', 'file://', 'chrome-extension://localhost', '',
        )
    },
    'two pages': [*JSON, ('Origin', 'http://127.0.0.1'), ('Origin', 'http://evil.example')],
    'another site': [*JSON, ('Sec-Fetch-Site', 'cross-site')],
    'another port': [*JSON, ('Origin', 'http://localhost:3000'), ('Sec-Fetch-Site', 'same-site')],
    'a form of another site': [('Content-Type', 'text/plain'), ('Sec-Fetch-Site', 'cross-site'), ('Origin', 'null')],
}  # fmt: skip
# names by which a page may have reached this server
NAMES = {
    f'the name {host!r}': [*JSON, ('Host', host)]
    for host in (
        'evil.example', 'evil.example:8000', '127.0.0.1.evil.example', 'localhost.evil.example', '0.0.0.0', '10.0.0.1',
        '[::2]:8000', '127.0.0.1@evil.example', '', '127.1',
    )
} | {
    'two names': [*JSON, ('Host', '127.0.0.1'), ('Host', 'evil.example')],
    'the target http://evil.example': [*JSON, ('target', 'http://evil.example')],
}  # fmt: skip


@pytest.fixture
def acting(tmp_path):
    """A body for each path by which a client may act: what it asks for is done where the request is taken."""
    path = write_weights(tmp_path / 'v1', 1)
    generating = {
        '/generate': {'input_ids': PROMPT, 'sampling_params': {'max_new_tokens': 1}},
        '/inference/v1/generate': {'token_ids': PROMPT, 'sampling_params': {'max_tokens': 1}},
        '/v1/completions': {'prompt': PROMPT, 'max_tokens': 1},
        '/v1/chat/completions': CHAT,
        '/v1/responses': {'input': 'abc', 'max_output_tokens': 1},
        '/v1/messages': CHAT,
        '/v1/messages/count_tokens': {'messages': CHAT['messages']},
        '/tokenize': {'prompt': 'abc'},
        '/detokenize': {'tokens': PROMPT},
    }
    return generating | {
        '/abort_request': {'abort_all': True},
        '/abort_requests': {'request_ids': []},
        '/pause_generation': {'mode': 'abort'},
        '/continue_generation': {},
        '/flush_cache': {},
        '/update_weights_from_disk': {'model_path': path, 'weight_version': '1'},
        '/update_weight_version': {'new_version': '7'},
        '/pause': {},
        '/resume': {},
        '/reset_prefix_cache': {},
        '/start_weight_update': {},
        '/update_weights': {'update_info': {'weights_path': path}},
        '/finish_weight_update': {'weight_version': '1'},
        '/collective_rpc': {'method': 'reload_weights', 'kwargs': {'weights_path': path}},
    }


class WatchedServer(ToyServer):
    """Notes what reaches the service behind the routes, and the routes of the application itself."""

    def __init__(self, **options):
        super().__init__(**options)
        put, self.reached = self.service.inbox.put, []
        self.service.inbox.put = lambda one: (self.note(one), put(one))

    def note(self, one):
        if getattr(one, 'name', '') not in ('look', 'end'):
            self.reached.append(one)

    def __enter__(self):
        runners = []
        make = web.AppRunner
        with mock.patch.object(web, 'AppRunner', lambda app, **more: runners.append(app) or make(app, **more)):
            super().__enter__()
        [app] = runners
        self.routes = {(route.method, route.resource.canonical) for route in app.router.routes()}
        return self

    def ask(self, method, path, headers, content=b''):
        """The status; headers as they are, with the Host of the server unless they name one."""
        host, port = self.url.removeprefix('http://').split(':')
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
            target = ''.join(value for name, value in headers if name == 'target')
            connection.putrequest(method, target + path, skip_host=True, skip_accept_encoding=True)
            if not any(name == 'Host' for name, _ in headers):
                connection.putheader('Host', f'{host}:{port}')
            for name, value in headers:
                if name != 'target':
                    connection.putheader(name, value)
            if content:
                connection.putheader('Content-Length', str(len(content)))
            connection.endheaders(content)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

    def list_acting(self):
        """Routes that may change something: all but those that read."""
        return sorted(
            (method, path) for method, path in self.routes if method not in READING or path in ACTING_PATHS
        )  # fmt: skip

    def list_reading(self):
        return sorted(self.routes - set(self.list_acting()))

    def look(self):
        """What attacks would change, some of it while they are served."""
        status = self.run(lambda client: client.get('/server_info', headers=dict(BEARER)))[1]
        return {**status, 'finished': self.finished(), 'reached': len(self.reached)}


def attack(server, acting, attacks, extra=()):
    """All attacks at the routes of WHOLE, and every fifth at each other one: none is taken, nothing changes."""
    before, taken, tried = server.look(), [], 0
    for number, (method, path) in enumerate(server.list_acting()):
        content = json.dumps(acting.get(path, {})).encode() if method == 'POST' else b''
        for name in list(attacks) if path in WHOLE else list(attacks)[number % 5 :: 5]:
            if not content and name in FORMS:
                continue  # without a body there is no type
            status, text = server.ask(method, path, [*attacks[name], *extra], content)
            tried += 1
            if status not in (*REFUSED, *([400] if name in TWICE else [])):
                taken.append((method, path, name, status))
            elif method != 'HEAD':
                json.loads(text)  # in the form of the dialect
    assert tried >= 60
    assert (taken, server.look()) == ([], before)


def test_no_web_page_acts_by_any_route_of_a_server_without_a_key(acting):
    with WatchedServer() as server:
        assert {path for _, path in server.list_acting()} == {*acting, '/health_generate', *OF_OUR_CLIENTS}
        attack(server, acting, FORMS | PAGES | NAMES)


def test_no_web_page_acts_by_any_route_of_a_server_with_a_key(acting):
    with WatchedServer(api_key=KEY) as server:
        attack(server, acting, FORMS | PAGES | NAMES)
        attack(server, acting, PAGES, BEARER)  # a page of somebody who knows the key


def test_the_key_proves_who_asks_whatever_the_name_and_the_type_are(acting):
    """Behind proxies, in pods and through tunnels."""
    plain = {name: headers for name, headers in (FORMS | NAMES).items() if not name.startswith('two')}
    with WatchedServer(api_key=KEY) as server:
        for name, headers in plain.items():
            status, text = server.ask('POST', '/detokenize', [*headers, *BEARER], json.dumps({'tokens': [1]}).encode())
            assert (status, json.loads(text)['text']) == (200, 'a'), name
        same = [('Host', 'pod-3:8000'), ('Origin', 'https://pod-3'), ('Sec-Fetch-Site', 'same-origin'), *BEARER]
        assert server.ask('POST', '/pause', same)[0] == 200


def test_what_only_reads_is_told_to_no_page_that_has_made_a_name_of_its_own():
    """And it changes nothing, so that a route that acts by GET is found here."""
    with WatchedServer() as server:
        before = server.look()
        for method, path in server.list_reading():
            path = path.replace('{name}', 'toy')
            named = server.ask(method, path, [('Host', 'evil.example')])[0]
            assert (path, named) == (path, 200 if path in OPEN_PATHS else 403)
            other = server.ask(method, path, PAGES['another site'])[0]  # whose browser keeps the reply from it
            assert (path, other) == (path, 200)
        assert server.look() == before


def test_a_browser_that_asks_for_leave_gets_none(acting):
    asks = [
        ('Origin', 'http://evil.example'), ('Access-Control-Request-Method', 'POST'),
        ('Access-Control-Request-Headers', 'content-type'),
    ]  # fmt: skip
    with WatchedServer() as server:
        for path in acting:
            host, port = server.url.removeprefix('http://').split(':')
            with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=20)) as connection:
                connection.request('OPTIONS', path, headers=dict(asks))
                reply = connection.getresponse()
                allowed = [name for name, _ in reply.getheaders() if name.lower().startswith('access-control')]
                assert (reply.status in (403, 405), allowed) == (True, [])


class NamedServer(WatchedServer):
    hosts = frozenset({'gpu7', '10.0.0.5'})


@pytest.mark.parametrize(('headers', 'status'), [
    ([('Host', 'gpu7:8000')], 200),
    ([('Host', 'GPU7.')], 200),
    ([('Host', '10.0.0.5')], 200),
    ([('Host', 'localhost'), ('Origin', 'http://gpu7:3000')], 200),
    ([('Host', '[::1]:8000'), ('Origin', 'http://127.8.9.1')], 200),
    ([('Origin', 'http://localhost:3000')], 200),
    ([('Sec-Fetch-Site', 'same-origin')], 200),
    ([('Sec-Fetch-Site', 'none')], 200),
    ([('Content-Type', 'Application/JSON; charset=utf-8')], 200),
    ([('Host', 'gpu8')], 403),
    ([('Origin', 'http://gpu8')], 403),
    ([('Content-Type', 'application/jsonp')], 415),
])  # fmt: skip
def test_declared_names_and_those_of_this_machine_are_its_own(headers, status):
    typed = headers if any(name == 'Content-Type' for name, _ in headers) else [*headers, *JSON]
    with NamedServer() as server:
        assert server.ask('POST', '/pause_generation', typed, b'{}')[0] == status
        assert (server.look()['internal_states'][0]['pause'] is not None) == (status == 200)


@pytest.mark.parametrize(('path', 'headers', 'status', 'says'), [
    ('/generate', FORMS['form'], 415, "'application/x-www-form-urlencoded' is not application/json"),
    ('/generate', FORMS['form'], 415, "-H 'content-type: application/json'"),
    ('/v1/messages', NAMES["the name 'evil.example'"], 403, "'evil.example' is no name of this server"),
    ('/v1/messages', NAMES["the name 'evil.example'"], 403, '--config.server.hosts, or with a key in AREAL_JAX_'),
    ('/pause', PAGES["a page of 'null'"], 403, "Origin: 'null' is a web page of another address"),
    ('/v1/responses', PAGES['another site'], 403, "Sec-Fetch-Site: 'cross-site' is a web page of another address"),
    ('/pause', [*JSON, ('Origin', 'http://' + 'x' * 5000)], 403, 'http://xxx'),
])  # fmt: skip
def test_a_refusal_says_what_to_do_in_the_form_of_the_dialect(path, headers, status, says):
    with WatchedServer() as server:
        found, text = server.ask('POST', path, headers, b'{}')
        message = json.loads(text)['error']['message']
        assert found == status
        assert says in message
        assert len(message) < 400
        if path == '/v1/messages':
            assert json.loads(text)['error']['type'] == 'permission_error'


# Programs.


def find_curls(text):
    """(method, path, headers, body) of each curl line of a page, as curl would send it."""
    for line in re.findall(r'^curl (.*?)$', text.replace('\\\n', ' '), re.MULTILINE):
        start = text.replace('\\\n', ' ').index(line)
        words = shlex.split(_whole(text.replace('\\\n', ' ')[start:]))
        method, url, headers, body = 'GET', '', {}, None
        options = iter(words)
        for word in options:
            if word in ('-H', '--header'):
                name, _, value = next(options).partition(':')
                headers[name.lower()] = value.strip()
            elif word in ('-d', '--data'):
                method, body = 'POST', next(options)
            elif word in ('-X', '--request'):
                method = next(options)
            else:
                url = word
        if body is not None:
            headers.setdefault('content-type', 'application/x-www-form-urlencoded')  # as curl does
        yield method, re.sub(r'^(http://[^/]*|\$URL)', '', url), list(headers.items()), body


def _whole(text):
    """The command at the beginning of a text, whose quotes may hold several lines."""
    lines = text.splitlines()
    for count in range(1, len(lines) + 1):
        with contextlib.suppress(ValueError):
            shlex.split(command := '\n'.join(lines[:count]))
            return command
    raise AssertionError(text[:100])


def list_pages():
    pages = [path.read_text() for path in sorted(DOCS.rglob('*.md')) if 'log' not in path.parts]
    page = re.sub(r'&(#x27|quot|lt|gt|amp);', lambda found: {'#x27': "'", 'quot': '"'}.get(found[1], ''), render_page())
    return [*pages, *re.findall(r'<pre>(curl .*?)</pre>', page)]


def test_every_curl_line_of_the_pages_is_taken(acting):
    calls = [call for page in list_pages() for call in find_curls(page)]
    with WatchedServer() as server:
        for method, path, headers, body in calls:
            status, text = server.ask(method, path, headers, (body or '').encode())
            assert status not in REFUSED, (path, headers, text)
            if body is not None:
                json.loads(body)
        assert {call[:2] for call in calls} <= server.routes
    assert len(calls) >= 20


def test_programs_as_the_pages_of_sglang_and_vllm_show_them_are_taken(acting):
    requests = pytest.importorskip('requests')
    with WatchedServer() as server:
        told = [
            *(requests.post(server.url + path, json=body, timeout=20) for path, body in acting.items()),
            requests.post(f'{server.url}/pause', params={'mode': 'abort'}, timeout=20),
            requests.post(f'{server.url}/resume', timeout=20),
            requests.post(f'{server.url}/flush_cache', timeout=20),
            requests.get(f'{server.url}/flush_cache', timeout=20),
            requests.get(f'{server.url}/health_generate', timeout=20),
            requests.post(f'{server.url}/reset_prefix_cache', timeout=20),
        ]
        assert [(one.url, one.status_code) for one in told if one.status_code != 200] == []


def test_the_client_of_openai_needs_no_key_of_a_server_without_one():
    openai = pytest.importorskip('openai')
    with ToyServer() as server, openai.OpenAI(base_url=f'{server.url}/v1', api_key='any', max_retries=0) as client:
        reply = client.chat.completions.create(model='any', **CHAT)
        assert reply.usage.completion_tokens == 1
