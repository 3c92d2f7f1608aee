"""Makes the directories of versions for one third-party server: python -m areal_jax.app.roles.receiver
--publication=DIR --template=VERSION --directory=DIR --port=PORT [...].

server_program.py starts it next to its server, on the same machine. It takes versions from the learner as deltas
(publication/weight_buffers.py); the client of the server asks for a version before it tells the server to load it. The
client sends the key of the run, which this process has in its environment variable AREAL_JAX_API_KEY:

  POST /versions {"version": 4, "manifest_hash": "..."}
      200 {"directory": ".../v000004"}, or 409 {"error": {"message": "..."}} for a version that is not available
  GET /health
      200
"""

from __future__ import annotations

import hmac
import http.server
import json
import pathlib
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence

from absl import flags

from areal_jax.app.process.ending import Wakeups, end_command
from areal_jax.app.process.setup import API_KEY, find_key
from areal_jax.errors import UserError
from areal_jax.files import JsonObject, decode_json
from areal_jax.publication.carriers.files_carrier import FilesReceiver
from areal_jax.publication.versions import PublicationError
from areal_jax.publication.weight_buffers import HfReceiver, copy_template
from areal_jax.rollout.http.wire.encoding import read_integer

_MOST_BYTES = 1 << 16  # of a request
_NO_HEADERS: Mapping[str, str] = {}
_SOCKET_S = 30.0  # for the bytes of a request


def main(argv: Sequence[str]) -> int:
    """Serves until it is told to stop; removes the versions of earlier processes from --directory."""
    values = parse_flags(argv)
    if not (api_key := find_key()):
        raise UserError(f'{API_KEY} is not set: give it the key that whoever asks for versions sends')
    directory = pathlib.Path(values.directory)
    shutil.rmtree(directory, ignore_errors=True)
    template = copy_template(pathlib.Path(values.template), directory / 'template')
    receiver = HfReceiver(FilesReceiver(values.publication, template.config, values.name), template, directory)
    with Wakeups() as wakeups, Serving(receiver, values.host, values.port, api_key):
        print(f'versions are made in {directory}', flush=True)
        while not wakeups.wait(None)[0]:
            pass
    shutil.rmtree(directory, ignore_errors=True)
    return 0


class Serving:
    """Serves requests at `url`, each on its own thread, while the block runs; versions need `api_key`."""

    def __init__(self, receiver: HfReceiver, host: str, port: int, api_key: str):
        handler = type('Handler', (_Handler,), {'receiver': receiver, 'api_key': api_key})
        self._server = http.server.ThreadingHTTPServer((host, port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f'http://{host}:{self._server.server_address[1]}'

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    receiver: HfReceiver
    api_key: str
    timeout = _SOCKET_S
    protocol_version = 'HTTP/1.1'

    def do_GET(self) -> None:
        if self.path == '/health':
            self._reply(200, {})
        else:
            self._refuse(404, f'{self.path} is not served; ask /health, or POST /versions')

    def do_POST(self) -> None:
        if not self._has_key():
            self._refuse(401, f'Authorization must be "Bearer KEY" with the key of the run: send that in {API_KEY}')
            return
        try:
            version, manifest_hash = self._read_request()
        except (ValueError, KeyError, TypeError) as error:
            self._refuse(400, f'the request is not {{"version": 4, "manifest_hash": "..."}} at /versions: {error}')
            return
        try:
            directory = self.receiver.bring(version, manifest_hash)
        except (PublicationError, UserError, OSError) as error:
            self._refuse(409, str(error))
        else:
            self._reply(200, {'directory': str(directory)})

    def _has_key(self) -> bool:
        given, wanted = self.headers.get('Authorization', ''), f'Bearer {self.api_key}'
        return hmac.compare_digest(given.encode('latin-1', 'replace'), wanted.encode('utf-8', 'surrogateescape'))

    def _read_request(self) -> tuple[int, str]:
        length = read_integer(self.headers.get('Content-Length', ''), _MOST_BYTES)
        if self.path != '/versions' or length is None:
            raise ValueError(f'{self.path} without a length of at most {_MOST_BYTES} bytes')
        asked = decode_json(self.rfile.read(length))
        version, digest = (asked['version'], asked['manifest_hash']) if isinstance(asked, dict) else (None, None)
        if type(version) is not int or not isinstance(digest, str):
            raise TypeError(f'version={version!r}, manifest_hash={digest!r}')
        return version, digest

    def _refuse(self, status: int, message: str) -> None:
        self._reply(status, {'error': {'message': message}}, {'Connection': 'close'})  # unread bytes may follow

    def _reply(self, status: int, fields: JsonObject, headers: Mapping[str, str] = _NO_HEADERS) -> None:
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing: the log of the run has the requests."""


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Parses the command line; raises UserError for invalid values."""
    values = flags.FlagValues()
    flags.DEFINE_string('publication', None, 'Where the learner writes.', required=True, flag_values=values)
    flags.DEFINE_string('template', None, 'A version there.', required=True, flag_values=values)
    flags.DEFINE_string('directory', None, 'On the disk of the server; emptied.', required=True, flag_values=values)
    flags.DEFINE_string('host', '127.0.0.1', 'Address to listen on.', flag_values=values)
    flags.DEFINE_integer('port', None, 'To listen on.', required=True, flag_values=values)
    flags.DEFINE_string('name', '', 'Of the server, for what the learner knows of it.', flag_values=values)
    try:
        values(list(argv))
    except flags.Error as error:
        raise UserError(str(error)) from error
    return values


def run() -> None:
    """Entry point of `python -m areal_jax.app.roles.receiver`."""
    sys.exit(end_command(lambda: main(sys.argv), doing='writing versions'))


if __name__ == '__main__':
    run()
