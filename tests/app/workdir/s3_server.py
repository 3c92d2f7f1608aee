"""moto's S3 server on a port of this machine, which can cut connections or refuse uploads."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator

FAULTS = {
    'cut': None,
    'full': (507, 'XMinioStorageFull', 'Storage backend has reached its minimum free drive threshold.'),
    'denied': (403, 'AccessDenied', 'Access Denied'),
}


class FaultyServer:
    """A WSGI application around moto's. While `fault` is set, every upload to the bucket ends with it."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app

        self._app = DomainDispatcherApplication(create_backend_app)
        self.fault = ''
        self.refused = 0
        self.url = ''

    def __call__(self, environ, start_response) -> Iterable[bytes]:
        if not self.fault or environ['REQUEST_METHOD'] not in ('PUT', 'POST'):
            return self._app(environ, start_response)
        self.refused += 1
        if (answer := FAULTS[self.fault]) is None:
            environ['werkzeug.socket'].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError('cut')
        status, code, message = answer
        start_response(f'{status} {code}', [('Content-Type', 'application/xml')])
        return [f'<Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()]


@contextlib.contextmanager
def serve_s3() -> Iterator[FaultyServer]:
    """A server with the bucket 'bucket'."""
    import boto3
    from werkzeug.serving import make_server

    faulty = FaultyServer()
    server = make_server('127.0.0.1', 0, faulty, threaded=True)
    faulty.url = f'http://127.0.0.1:{server.server_port}'
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        keys = {'aws_access_key_id': 'a', 'aws_secret_access_key': 'b', 'region_name': 'us-east-1'}
        urllib.request.urlopen(urllib.request.Request(f'{faulty.url}/moto-api/reset', method='POST')).close()
        boto3.client('s3', endpoint_url=faulty.url, **keys).create_bucket(Bucket='bucket')
        yield faulty
    finally:
        server.shutdown()
        thread.join()
