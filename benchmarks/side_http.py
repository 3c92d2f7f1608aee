"""A server of any kind as a side of a comparison: started here, and asked by clients of this process.

The clients speak HTTP, or gRPC with a server behind JetStream (`clients_module`: benchmarks.grpc_clients). Only the CPU
seconds of the server's processes count. The clients' own are in `client_cpu_s`.
"""

from __future__ import annotations

import atexit
import importlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.http_clients import wait_healthy
from benchmarks.sides import Call, Start, children_cpu_seconds, serve
from benchmarks.workload import load_requests

START_S, END_S = 900.0, 20.0
WARM_UP_TOKENS = 8  # of each request, once before the first call
PORT = '{port}'  # in a command: replaced by a free one


def prepare(arguments: dict[str, Any]) -> Start:
    requests, clients = load_requests(arguments['requests']), arguments['clients']
    module = importlib.import_module(arguments.get('clients_module', 'benchmarks.http_clients'))
    options = arguments.get('client_options', {})

    def start() -> tuple[Call, Any]:
        began_s = time.monotonic()
        url = start_server(arguments['command'], arguments.get('environment', {}), module.wait_healthy)
        facts = {'start_s': time.monotonic() - began_s, 'command': arguments['command']}
        warm_up = requests.head(len(requests.prompts), WARM_UP_TOKENS)
        module.answer(url, warm_up, clients, arguments['temperature'], **options)

        def call() -> Mapping[str, float]:
            if arguments['flush']:
                module.post(url + arguments['flush'])  # the last call had the same prompts
            cpu_s, own_s, wall_s = children_cpu_seconds(), time.process_time(), time.monotonic()
            found = module.answer(url, requests, clients, arguments['temperature'], **options)
            found['part_wall_s'] = time.monotonic() - wall_s
            return found | {
                'part_cpu_s': children_cpu_seconds() - cpu_s, 'client_cpu_s': time.process_time() - own_s,
            }  # fmt: skip

        return call, lambda: facts

    return start


def start_server(
    command: Sequence[str], environment: Mapping[str, str], await_health: Callable[..., bool] = wait_healthy
) -> str:
    """Its URL when it is healthy; it ends with this process. Raises RuntimeError with its last words where it fails."""
    port = free_port()
    output = tempfile.TemporaryFile('w+')  # noqa: SIM115 as long as the process
    process = subprocess.Popen(
        [part.replace(PORT, str(port)) for part in command], env={**os.environ, **environment}, stdout=output,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    atexit.register(end, process)
    url = f'http://127.0.0.1:{port}'
    if not await_health(url, START_S, lambda: process.poll() is None):
        output.seek(0)
        raise RuntimeError(f'{" ".join(command)} did not start:\n{output.read()[-4000:]}')
    return url


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        return int(taken.getsockname()[1])


if __name__ == '__main__':
    serve(prepare)
