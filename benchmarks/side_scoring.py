"""Prompts that go through our model: their scores or one token of each over HTTP, or their prefill in process."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from benchmarks.http_clients import post
from benchmarks.side_http import start_server
from benchmarks.sides import Call, Start, Stopwatch, serve
from benchmarks.workload import load_requests

ROUTE = '/v1/completions'
ASKED: Mapping[str, Mapping[str, Any]] = {
    'scores': {'echo': True, 'max_tokens': 0, 'logprobs': 1},
    'answers': {'max_tokens': 1, 'temperature': 0, 'logprobs': 0, 'ignore_eos': True},
}


def prepare(arguments: dict[str, Any]) -> Start:
    prompts = [prompt.tolist() for prompt in load_requests(arguments['requests']).prompts]

    def start() -> tuple[Call, Any]:
        if arguments['asks'] == 'prefill':
            run, facts = prefill_in_process(arguments, prompts), {}
        else:
            url = start_server(arguments['command'], {})
            run, facts = over_http(url, arguments['asks'], prompts), {'command': arguments['command']}

        def call() -> Mapping[str, float]:
            watch = Stopwatch()
            checks = run(watch)
            return {**checks, 'tokens': float(sum(map(len, prompts))), **watch.parts()}

        call()  # compiles, and fills caches of memory
        return call, lambda: facts

    return start


def over_http(url: str, asks: str, prompts: Sequence[list[int]]) -> Any:
    bodies = [json.dumps({'prompt': prompt, **ASKED[asks]}).encode() for prompt in prompts]

    async def ask_all() -> list[float]:
        async def ask(session: aiohttp.ClientSession, body: bytes) -> float:
            async with session.post(url + ROUTE, data=body, headers={'Content-Type': 'application/json'}) as reply:
                content = await reply.read()
            if reply.status != 200:
                raise RuntimeError(f'{url}{ROUTE} answered {reply.status}: {content[:300]!r}')
            [choice] = json.loads(content)['choices']
            return math.fsum(value for value in choice['logprobs']['token_logprobs'] if value is not None)

        timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return await asyncio.gather(*(ask(session, body) for body in bodies))

    def run(watch: Stopwatch) -> dict[str, float]:
        post(url + '/flush_cache')  # the last call had the same prompts
        watch.start()
        found = asyncio.run(ask_all())
        watch.stop()
        return {'mean_logprob': math.fsum(found) / len(found)}

    return run


def prefill_in_process(arguments: Mapping[str, Any], prompts: Sequence[list[int]]) -> Any:
    """Packed as the scheduler packs prompts of one length: as many as the largest bucket holds."""
    import numpy as np

    from areal_jax.formats.hf_directory import load_hf
    from areal_jax.models.decoder import Decoder
    from areal_jax.rollout.backend import PrefillPiece
    from areal_jax.rollout.decode.jax_backend import JaxDecodeBackend

    config, params = load_hf(arguments['model'])
    sizes = {**arguments['engine'], 'prefill_buckets': tuple(arguments['engine']['prefill_buckets'])}
    backend = JaxDecodeBackend(Decoder(config), **sizes, filtered=True, adjusted=True, dtype='float32')
    weights, state = backend.prepare(params), backend.initial_state()
    blocks = -(-len(prompts[0]) // backend.block_tokens)
    together = sizes['prefill_buckets'][-1] // len(prompts[0])
    packs = [
        [
            PrefillPiece(np.array(prompt, np.int32), 0, range(place * blocks, (place + 1) * blocks))
            for place, prompt in enumerate(prompts[first : first + together])
        ]
        for first in range(0, len(prompts), together)
    ]

    def run(watch: Stopwatch) -> dict[str, float]:
        nonlocal state
        watch.start()
        for pack in packs:
            state = backend.prefill(weights, state, pack)
        watch.stop()
        return {}

    return run


if __name__ == '__main__':
    serve(prepare)
