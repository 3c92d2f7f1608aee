"""Clients of a server behind JetStream: what http_clients.py is for servers over HTTP, with log-probs as well."""

from __future__ import annotations

import asyncio
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

import numpy as np

from areal_jax.rollout.http.clients.connection import NoReplyError, StatusError
from areal_jax.rollout.http.wire.exchange import Call, CallSampling
from areal_jax.rollout.jetstream.channel import JetstreamConnection
from areal_jax.rollout.jetstream.client import JetstreamDialect
from areal_jax.rollout.jetstream.control import STATUS
from benchmarks.http_clients import HEALTH_EVERY_S, Totals
from benchmarks.workload import Requests

_VOCABULARY = 2**31 - 1  # ids are not checked here


def answer(url: str, requests: Requests, clients: int, temperature: float) -> dict[str, float]:
    """All answers once; checks of a side (sides.py) without the seconds."""
    totals = asyncio.run(_ask_all(url, iter(make_calls(requests, temperature)), clients))
    return {'tokens': totals['tokens'], 'mean_logprob': totals['logprob'] / totals['tokens']}


def make_calls(requests: Requests, temperature: float) -> list[Call]:
    """Each with an id of its own, also from call to call of the benchmark."""
    began, found = time.monotonic_ns(), []
    for index, (prompt, n) in enumerate(zip(requests.prompts, requests.new_tokens, strict=True)):
        sampling = CallSampling(int(n), temperature=temperature, ignore_eos=True)
        ids = np.asarray(prompt, np.int32)
        found.append(Call((ids,), 'prompt', (sampling,), (f'{began}/{index}',), stream=True, logprobs=True))
    return found


async def _ask_all(url: str, calls: Iterator[Call], clients: int) -> Totals:
    totals: Totals = {'tokens': 0.0, 'logprob': 0.0}
    connection, dialect = JetstreamConnection(url), JetstreamDialect()

    async def follow() -> None:
        for call in calls:  # shared: each takes the next
            found, wanted = await dialect.generate(connection, call, _VOCABULARY), call.sampling[0].max_new_tokens
            if found.n_tokens != wanted:
                raise RuntimeError(f'{found.n_tokens} tokens instead of {wanted}')
            totals['tokens'] += found.n_tokens
            totals['logprob'] += float(found.logprobs.sum(dtype=np.float64))

    await asyncio.gather(*(follow() for _ in range(clients)))
    await connection.close()
    return totals


def post(url: str) -> None:
    """'http://host:port/FlushCache': a method of the second service, without fields."""
    parts = urllib.parse.urlsplit(url)
    asyncio.run(_act(f'http://{parts.netloc}', parts.path.strip('/')))


async def _act(url: str, method: str) -> None:
    connection = JetstreamConnection(url)
    await connection.act(method)
    await connection.close()


def wait_healthy(url: str, deadline_s: float, is_alive: Any) -> bool:
    """Whether the second service answered in time; `is_alive()` False ends the wait."""
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s and is_alive():
        try:
            asyncio.run(_act(url, STATUS))
        except (NoReplyError, StatusError):
            time.sleep(HEALTH_EVERY_S)
        else:
            return True
    return False
