"""A Hugging Face Hub of a few routes, in a thread: what huggingface_hub asks when a folder is uploaded."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.server
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

TOKEN = 'hf_secretSecretSecret'


@dataclasses.dataclass
class Hub:
    """Repositories by name: {'private': bool, branch: {file: bytes}}; the messages of commits."""

    url: str = ''
    user: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {'name': 'me', 'orgs': [{'name': 'lab'}], 'auth': {'accessToken': {'role': 'write'}}}
    )
    repos: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    commits: list[tuple[str, str, str]] = dataclasses.field(default_factory=list)  # repository, branch, message
    asked: list[str] = dataclasses.field(default_factory=list)  # 'GET /api/whoami-v2'
    failing: str = ''  # of a path: such requests are refused with 403

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        self.asked.append(f'{method} {path}')
        if self.failing and self.failing in path:
            return 403, {'error': f'not allowed for {TOKEN}'}
        if path == '/api/whoami-v2':
            return 200, self.user
        if path == '/api/repos/create':
            wanted = json.loads(body)
            repo = f'{wanted.get("organization") or "me"}/{wanted["name"]}'
            if repo in self.repos:
                return 409, {'error': 'exists', 'url': f'{self.url}/{repo}'}
            private = bool(wanted.get('private')) or wanted.get('visibility') == 'private'
            self.repos[repo] = {'private': private, 'main': {}}
            return 200, {'url': f'{self.url}/{repo}'}
        if path == '/api/validate-yaml':
            return 200, {'errors': [], 'warnings': []}
        found = re.fullmatch(r'/api/models/([\w-]+/[\w-]+)(?:/(\w+)/([^/?]+).*)?', path.partition('?')[0])
        if not found or found[1] not in self.repos:
            return 404, {'error': 'Repository not found'}
        return self._of_repository(found[1], found[2], found[3], body)

    def _of_repository(self, name: str, what: str | None, branch: str, body: bytes) -> tuple[int, Any]:
        repo = self.repos[name]
        if what is None:
            return 200, {'id': name, 'private': repo['private'], 'siblings': []}
        if what == 'branch':
            repo.setdefault(branch, dict(repo['main']))
            return 200, {}
        if what in ('tree', 'revision'):
            files = [{'type': 'file', 'path': path, 'size': 1, 'oid': '0' * 40} for path in repo[branch]]
            named = [{'rfilename': file['path']} for file in files]
            return 200, files if what == 'tree' else {'id': name, 'sha': '1' * 40, 'siblings': named}
        if what == 'preupload':
            asked = json.loads(body)['files']
            return 200, {'files': [{'path': f['path'], 'uploadMode': 'regular', 'shouldIgnore': False} for f in asked]}
        lines = [json.loads(line) for line in body.splitlines()]
        for line in lines:
            value = line['value']
            if line['key'] == 'file':
                repo[branch][value['path']] = base64.b64decode(value['content'])
            elif line['key'] == 'deletedFile':
                del repo[branch][value['path']]
        self.commits.append((name, branch, lines[0]['value']['summary']))
        return 200, {'commitUrl': f'{self.url}/{name}/commit/abc', 'commitOid': 'abc', 'hookOutput': ''}


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
            status, value = hub.answer(self.command, self.path, body)
            if self.headers.get('Authorization') != f'Bearer {TOKEN}':
                status, value = 401, {'error': 'Invalid username or password'}
            content = json.dumps(value).encode()
            self.send_response(status)
            if status == 404:
                self.send_header('X-Error-Code', 'RepoNotFound')
            self.send_header('Content-Type', 'application/json')
            self.send_header('Content-Length', str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f'http://127.0.0.1:{server.server_address[1]}'
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
