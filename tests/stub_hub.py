"""A local server of the Hub's protocol, as huggingface_hub speaks it: revisions, trees, files and refusals."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping

COMMIT, EARLIER = 'a' * 40, 'b' * 40
_REFUSALS = {'missing': (404, 'RepoNotFound'), 'gated': (403, 'GatedRepo'), 'broken': (500, '')}


class StubHub(http.server.ThreadingHTTPServer):
    """Repositories by path ('ORG/NAME', 'datasets/ORG/NAME') -> revision -> name of file -> bytes.

    ORG/missing is unknown, ORG/gated refuses, ORG/broken fails.
    """

    daemon_threads = True

    def __init__(self, repositories: Mapping[str, Mapping[str, Mapping[str, bytes]]]):
        super().__init__(('127.0.0.1', 0), _Handler)
        self.repositories, self.asked = repositories, []

    @property
    def address(self) -> str:
        return f'http://127.0.0.1:{self.server_address[1]}'


class _Handler(http.server.BaseHTTPRequestHandler):
    server: StubHub
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.server.asked.append(self.path)
        path = self.path.partition('?')[0].removeprefix('/')
        found = re.fullmatch(r'api/(models|datasets)/(.+?/.+?)/(revision|tree)/(\w+)', path)
        if found:
            repo = found[2] if found[1] == 'models' else f'datasets/{found[2]}'
            verb, revision, file = found[3], found[4], ''
        else:
            found = re.fullmatch(r'((?:datasets/)?[^/]+/[^/]+)/resolve/(\w+)/(.+)', path)
            if found is None:
                return self._say(404, {'error': 'no such page'})
            repo, revision, file = found.groups()
            verb = 'resolve'
        for name, (status, code) in _REFUSALS.items():
            if repo.endswith(f'/{name}'):
                return self._say(status, {'error': 'no'}, {'X-Error-Code': code, 'X-Error-Message': 'no'})
        commit = {'main': COMMIT}.get(revision, revision)
        files = self.server.repositories.get(repo, {}).get(commit)
        if files is None:
            code = 'RevisionNotFound' if repo in self.server.repositories else 'RepoNotFound'
            return self._say(404, {'error': 'no'}, {'X-Error-Code': code})
        if verb == 'revision':
            siblings = [{'rfilename': name} for name in files]
            return self._say(200, {'id': repo, 'sha': commit, 'siblings': siblings})
        if verb == 'tree':
            listed = [
                {'type': 'file', 'path': name, 'size': len(content), 'oid': hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            return self._say(200, listed)
        if file not in files:
            return self._say(404, {'error': 'no'}, {'X-Error-Code': 'EntryNotFound'})
        etag = hashlib.sha1(files[file]).hexdigest()
        return self._send(200, files[file], {'X-Repo-Commit': commit, 'ETag': f'"{etag}"'})

    def _say(self, status, value, headers=()):
        self._send(status, json.dumps(value).encode(), {'Content-Type': 'application/json', **dict(headers)})

    def _send(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, 'Content-Length': str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(content)


@contextlib.contextmanager
def serving(repositories: Mapping[str, Mapping[str, Mapping[str, bytes]]]) -> Iterator[StubHub]:
    """A stub that answers while the block runs."""
    with StubHub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
