"""Records what a real SGLang server answers, for the tests that replay it.

    python -m tests.rollout.http.clients.record_sglang --url=http://127.0.0.1:30000 --checkpoints=DIR --out=FOLDER

The server runs the model DIR/v0 of checkpoints.py (launch/test_external.sh starts it). It is dead afterwards: the last
recording is of a token id that it does not survive. Paths of models are replaced by /models, and those of the server's
sources are cut; nothing else is edited.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import aiohttp

from tests.rollout.http.clients.record_vllm import LONG, PROMPT, Recorder

RUNNING = 9  # answers that the server decodes at once
CONTEXT = 2056


def body(rid: str, max_new_tokens: int, input_ids: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
    ids = PROMPT if input_ids is None else input_ids
    params = {
        'max_new_tokens': max_new_tokens,
        'temperature': 1.0,
        'ignore_eos': True,
        'skip_special_tokens': False,
        **sampling,
    }
    return {
        'rid': rid, 'input_ids': ids, 'sampling_params': params, 'stream': False, 'return_logprob': True,
        'logprob_start_len': len(ids) - 1,
    }  # fmt: skip


class SglangRecorder(Recorder):
    """The same for SGLang's route."""

    async def generate(self, file: str, note: str, sent: Mapping[str, Any]) -> Any:
        return await self.send(file, note, 'POST', '/generate', sent)

    def cut_paths(self) -> None:
        """Where the server is installed is nobody's business."""
        self.files = json.loads(re.sub(r'[^"\\\s]*/site-packages/', '', json.dumps(self.files)))


async def record_answers(to: SglangRecorder) -> None:
    await to.generate('warm', 'warm-up', body('w', LONG))
    for path in ('/health', '/model_info', '/get_model_info', '/get_weight_version', '/v1/models', '/server_info'):
        await to.send('warm' if path == '/server_info' else 'identity', 'of itself', 'GET', path)
    await to.generate('generate', 'greedy', body('greedy', 6, temperature=0))
    await to.generate('generate', 'sampled', body('sampled', 12))
    await to.generate('generate', 'temperature 0.7', body('cool', 6, temperature=0.7))
    greedy = await to.generate('generate', 'greedy, longer', body('long', 10, temperature=0))
    stop = greedy['meta_info']['output_token_logprobs'][3][1]
    await to.generate(
        'generate', 'a stop token', body('stop', 10, temperature=0, stop_token_ids=[stop], ignore_eos=False)
    )
    await to.generate('generate', 'two answers', body('two', 4, n=2))
    await to.generate('generate', 'stream', {**body('stream', 5, temperature=0), 'stream': True})
    for note, sent in {
        'no prompt': {'sampling_params': {'max_new_tokens': 4}},
        'an empty prompt': body('a', 4, []),
        'longer than the context': body('d', 4, [5] * (CONTEXT + 1)),
        'a negative temperature': body('f', 4, temperature=-1.0),
        'an unknown sampling field': body('h', 4, no_such_field=1),
        'ids that are none': {**body('i', 4), 'input_ids': 'abc'},
    }.items():
        await to.generate('refusals', note, sent)
    await to.send('refusals', 'no JSON', 'POST', '/generate', raw='{')
    await to.send('refusals', 'an unknown path', 'POST', '/inference/v1/generate', {})


async def record_interruptions(to: SglangRecorder, checkpoints: str) -> None:
    """Each `started` runs while what follows is sent."""

    def start(note: str, name: str, n: int = LONG, file: str = 'interrupted') -> asyncio.Task[Any]:
        return asyncio.create_task(to.generate(file, note, body(name, n)))

    async def post(note: str, path: str, json_body: Any = None) -> Any:
        return await to.send('control', note, 'POST', path, json_body)

    async def pause(mode: str) -> None:
        await post(f'pause, mode {mode}', '/pause_generation', {'mode': mode})

    async def update(version: int, flush: bool = True) -> None:
        sent = {'model_path': f'{checkpoints}/v{version}', 'weight_version': str(version), 'flush_cache': flush}
        await post(f'load version {version}', '/update_weights_from_disk', sent)
        await to.send('control', 'read it back', 'GET', '/model_info')

    async def resume() -> None:
        await post('continue', '/continue_generation', {})

    started = start('cut by /abort_request with its id', 'one')
    await asyncio.sleep(0.5)
    await post('abort one', '/abort_request', {'rid': 'one'})
    await started
    started = start('cut by a pause, mode abort', 'two')
    await asyncio.sleep(0.5)
    await pause('abort')
    await started
    started = start('sent while paused, served after the continue', 'three', 8)
    await asyncio.sleep(0.2)
    await update(1)
    await resume()
    await started
    for mode, name, version in (('retract', 'four', 0), ('in_place', 'five', 1)):
        started = start(f'lived through a pause, mode {mode}, and an update', name)
        await asyncio.sleep(0.5)
        await pause(mode)
        await update(version, flush=mode == 'retract')
        await resume()
        await started
    started = start('retracted by a pause, then aborted', 'six')
    await asyncio.sleep(0.9)
    await pause('retract')
    await post('abort one that waits', '/abort_request', {'rid': 'six'})
    await started
    await resume()
    await record_queue(to, start, post)
    started = start('lived through an update whose flush was refused', 'seven')
    await asyncio.sleep(0.5)
    await pause('in_place')
    await update(0)
    await resume()
    await started
    await pause('abort')
    await post('a second pause', '/pause_generation', {'mode': 'abort'})
    await post('load what is not there', '/update_weights_from_disk', {'model_path': '/models/missing'})
    await update(0)
    await resume()
    await post('a continue that was not needed', '/continue_generation', {})
    await post('an unknown mode', '/pause_generation', {'mode': 'other'})
    await post('a pause without a body', '/pause_generation')
    await to.generate('generate', 'after all that', body('late', 4, temperature=0))


async def record_queue(to: SglangRecorder, start: Any, post: Any) -> None:
    """An answer that waits behind others is aborted before its first token."""
    running = [start('others', f'other/{i}/', file='warm') for i in range(RUNNING)]
    await asyncio.sleep(0.5)
    queued = start('aborted before its first token', 'queued')
    await asyncio.sleep(0.1)
    await post('abort one that waits', '/abort_request', {'rid': 'queued'})
    await queued
    await post('abort all', '/abort_request', {'abort_all': True})
    await asyncio.gather(*running)


async def record_death(to: SglangRecorder) -> None:
    await to.generate('death', 'a negative id', body('bad', 4, [5, -1]))
    await asyncio.sleep(2.0)
    await to.send('death', 'afterwards', 'GET', '/health')
    await to.generate('death', 'afterwards', body('late', 4))


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ('--url', '--checkpoints', '--out'):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        to = SglangRecorder(session, options.url, options.checkpoints)
        try:
            await record_answers(to)
            await record_interruptions(to, options.checkpoints)
            await record_death(to)
        finally:
            to.files.pop('warm', None)
            to.cut_paths()
            to.write(pathlib.Path(options.out), 'SGLang 0.5.23 (PyPI sglang), CPU, float32')


if __name__ == '__main__':
    asyncio.run(main())
