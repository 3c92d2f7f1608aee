"""CPU seconds of a program from its fork to the reply to its first call, with and without `agent.preload`."""

from __future__ import annotations

import asyncio
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from areal_jax.agents.programs.program_host import CommandHost, Job

PROGRAM = pathlib.Path(__file__).with_name('first_call.py')
_REPLY = {
    'id': 'x', 'object': 'chat.completion', 'created': 0, 'model': 'policy',
    'choices': [{'index': 0, 'finish_reason': 'stop', 'message': {'role': 'assistant', 'content': 'a'}}],
}  # fmt: skip


def measure_forks(programs: int) -> dict[str, Any]:
    """By preload: the median and the largest of so many programs, one after the other."""
    return asyncio.run(_measure(programs))


async def _measure(programs: int) -> dict[str, Any]:
    app = web.Application()
    app.router.add_post('/v1/chat/completions', _answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, '127.0.0.1', 0).start()
    url = f'http://127.0.0.1:{runner.addresses[0][1]}/v1'
    try:
        return {
            'preloaded' if preload else 'not_preloaded': await _run(url, preload, programs if preload else 3)
            for preload in ((), ('openai',))
        }
    finally:
        await runner.cleanup()


async def _run(url: str, preload: Sequence[str], programs: int) -> dict[str, float]:
    host = CommandHost(['python', str(PROGRAM)], preload)
    found, walls = [], []
    with tempfile.TemporaryDirectory() as directory:
        for number in range(programs + 1):  # the first one waits for the fork server
            began = time.monotonic()
            problem = {'directory': directory, 'number': number}
            ending = await host.run(Job({'OPENAI_BASE_URL': url, 'OPENAI_API_KEY': 'sk-x'}, problem))
            if ending.status != 'ended':
                raise RuntimeError(ending.detail)
            walls.append(time.monotonic() - began)
            found.append(json.loads(pathlib.Path(directory, f'{number}.json').read_text()))
    await host.close()
    return {
        'median_cpu_s': statistics.median(found[1:]),
        'max_cpu_s': max(found[1:]),
        'median_wall_s': statistics.median(walls[1:]),
    }


async def _answer(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response(_REPLY)
