"""Clients that ask one server for the answers of a workload, each sending its next request when its last one ended.

As a program it asks again and again until it is killed: python -m benchmarks.http_clients URL REQUESTS CLIENTS.
The route is vLLM's /inference/v1/generate, which our server has too, so that both sides read and write the same.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import pathlib
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import aiohttp

from benchmarks.workload import Requests, load_requests

ROUTE = '/inference/v1/generate'
MODEL = 'm'  # as the server of others is told to call it; ours takes any name
HEALTH_EVERY_S = 0.2

Totals = dict[str, float]


async def ask_all(url: str, bodies: Iterator[tuple[bytes, int]], clients: int) -> Totals:
    """Sum over the answers of all bodies; raises RuntimeError for a refusal or an answer of another length."""
    totals: Totals = {'tokens': 0.0, 'logprob': 0.0, 'answers': 0.0}

    async def follow(session: aiohttp.ClientSession) -> None:
        for body, new_tokens in bodies:  # shared: each takes the next
            async with session.post(url + ROUTE, data=body, headers={'Content-Type': 'application/json'}) as reply:
                content = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f'{url}{ROUTE} answered {reply.status}: {content[:300]!r}')
            choices = read_choices(content)
            if (received := sum(len(choice['token_ids']) for choice in choices)) != new_tokens:
                raise RuntimeError(f'{received} tokens instead of {new_tokens}')
            totals['tokens'] += new_tokens
            totals['logprob'] += math.fsum(
                entry['logprob'] for choice in choices if choice['token_ids'] for entry in choice['logprobs']['content']
            )
            totals['answers'] += 1

    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await asyncio.gather(*(follow(session) for _ in range(clients)))
    return totals


def read_choices(content: bytes) -> list[dict[str, Any]]:
    """Of a reply, or of the events of a stream."""
    if not content.startswith(b'data:'):
        return json.loads(content)['choices']
    events = [line.removeprefix(b'data:').strip() for line in content.split(b'\n') if line.startswith(b'data:')]
    return [choice for event in events if event != b'[DONE]' for choice in json.loads(event)['choices']]


def make_bodies(requests: Requests, temperature: float, stream: bool = False) -> list[tuple[bytes, int]]:
    """(JSON, tokens that are asked for) of each request."""
    return [
        (json.dumps(_body(prompt.tolist(), n, temperature) | ({'stream': True} if stream else {})).encode(), n)
        for prompt, n in zip(requests.prompts, requests.new_tokens, strict=True)
    ]


def _body(prompt: list[int], new_tokens: int, temperature: float) -> dict[str, Any]:
    sampling = {'max_tokens': new_tokens, 'temperature': temperature, 'ignore_eos': True, 'logprobs': 0}
    return {'model': MODEL, 'token_ids': prompt, 'sampling_params': {**sampling, 'detokenize': False}}


def answer(url: str, requests: Requests, clients: int, temperature: float, stream: bool = False) -> dict[str, float]:
    """All answers once; checks of a side (sides.py) without the seconds."""
    totals = asyncio.run(ask_all(url, iter(make_bodies(requests, temperature, stream)), clients))
    return {'tokens': totals['tokens'], 'mean_logprob': totals['logprob'] / totals['tokens']}


def post(url: str) -> None:
    """Without a body; raises HTTPError for a refusal."""
    with urllib.request.urlopen(urllib.request.Request(url, b''), timeout=60):
        pass


def wait_healthy(url: str, deadline_s: float, is_alive: Any) -> bool:
    """Whether /health answered 200 in time; `is_alive()` False ends the wait."""

    async def look() -> bool:
        end_s = time.monotonic() + deadline_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while time.monotonic() < end_s and is_alive():
                try:
                    async with session.get(f'{url}/health') as reply:
                        if reply.status == 200:
                            return True
                except (aiohttp.ClientError, TimeoutError):
                    pass
                await asyncio.sleep(HEALTH_EVERY_S)
        return False

    return asyncio.run(look())


def main(url: str, path: str, clients: str) -> None:
    bodies = make_bodies(load_requests(pathlib.Path(path)), 1.0)
    asyncio.run(ask_all(url, itertools.cycle(bodies), int(clients)))


if __name__ == '__main__':
    main(*sys.argv[1:])
