"""A server in a thread that answers with recorded replies, around the toy model of tests/rollout/toy_engine.py.

Control routes replay what third_party/ has recorded for them; an answer is a recorded one with its tokens, log-probs,
spans and reason replaced. A checkpoint is a directory whose config.json has the toy's weight `w`.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import pathlib
import threading

import numpy as np
from aiohttp import web

RECORDED = pathlib.Path(__file__).parents[4] / 'third_party'
VOCAB_SIZE = 512


def read_exchanges(name):
    return json.loads((RECORDED / f'{name}.json').read_text())['exchanges']


def find_exchange(name, **request):
    """The first recorded exchange whose request has these fields."""
    return next(
        one for one in read_exchanges(name) if all(one['request'].get(key) == value for key, value in request.items())
    )


def noted(name, note):
    return next(exchange for exchange in read_exchanges(name) if exchange['note'] == note)


def write_checkpoint(directory, w):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / 'config.json').write_text(json.dumps({'w': w}))
    (directory / 'model.safetensors').touch()
    return str(directory)


def choose_experts(position, w):
    """[3 layers, 3 choices] of 8 experts, of the token at a position; the layer in the middle has none."""
    chosen = [[(position + w + layer + choice) % 8 for choice in range(3)] for layer in range(3)]
    return [chosen[0], [0] * 3, chosen[2]]


class Job:
    """One answer in the making."""

    def __init__(self, prompt, limit, stop):
        self.prompt, self.limit, self.stop = prompt, limit, stop
        self.tokens, self.versions, self.reason = [], [], None
        self.weights = []  # `w` of the pass that each token came from, or that computed its KV again
        self.ended, self.news = asyncio.Event(), asyncio.Event()

    def end(self, reason):
        self.reason = reason
        self.news.set()
        self.ended.set()

    def routes(self):
        """[rows, 3 layers, 3 choices]: of the prompt under the weights of the first token, and of all but the last."""
        weights = [*[self.weights[0]] * (len(self.prompt) - 1), *self.weights]
        return np.array([choose_experts(position, w) for position, w in enumerate(weights)])

    def spans(self):
        cuts = [i for i, v in enumerate(self.versions) if i == 0 or v != self.versions[i - 1]]
        ends = [*cuts, len(self.versions)][1:]
        return [{'version': self.versions[a], 'start': a, 'end': b} for a, b in zip(cuts, ends, strict=True)]


class FakeServer:
    """Decodes `slots` jobs at a time, a token of each every `token_s`.

    `faults` is a list of (path, fault), each used once: 'drop' does nothing and cuts the connection, 'cut' cuts it
    after the request was served, 'garbage' answers with half a body, 'die' cuts a stream after its first tokens, an int
    is a status. `spans` and `moves` say whether replies name versions, and whether an update changes the weights, and
    `gives_routes` whether they tell experts.
    """

    def __init__(self, slots=2, token_s=0.01):
        self.slots, self.token_s = slots, token_s
        self.faults, self.requests = [], []
        self.version, self.w, self.is_paused = 'default', 0, False
        self.spans = self.moves = True
        self.gives_routes = False
        self.jobs = {}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_):
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    def has_begun(self):
        return any(job.tokens for job in list(self.jobs.values()))

    def sent(self, path):
        """Bodies of the requests to a path."""
        return [body for found, body in self.requests if found == path]

    # On the server's thread.

    def _serve(self):
        asyncio.run(self._main())

    async def _main(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_route('*', '/{path:.*}', self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, '127.0.0.1', 0)
        await site.start()
        self.url = f'http://127.0.0.1:{runner.addresses[0][1]}'
        decoding = asyncio.create_task(self._decode())
        self._ready.set()
        await self._stop.wait()
        decoding.cancel()
        for job in self.jobs.values():
            job.end('abort')
        await runner.cleanup()

    async def _decode(self):
        while True:
            await asyncio.sleep(self.token_s)
            for name, job in list(self.jobs.items())[: 0 if self.is_paused else self.slots]:
                job.tokens.append(1 + (7 * self.w + len(job.prompt) + len(job.tokens)) % 9)
                job.versions.append(self.version)
                job.weights.append(self.w)
                job.news.set()
                if job.tokens[-1] in job.stop or len(job.tokens) == job.limit:
                    del self.jobs[name]
                    job.end('stop' if job.tokens[-1] in job.stop else 'length')

    async def _handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.path, body))
        fault = next((fault for path, fault in self.faults if path == request.path), None)
        if fault is not None:
            self.faults.remove((request.path, fault))
        if isinstance(fault, int):
            return web.json_response({'error': {'message': 'a fault', 'code': fault}}, status=fault)
        if fault not in ('drop', 'cut', 'garbage') and body and body.get('stream'):
            return await self._stream(request, body, fault)
        if fault != 'drop':
            status, content = await self.serve(request.method, request.path, request.path_qs, body)
        if fault in ('drop', 'cut'):
            request.transport.abort()
            return web.Response()
        if fault == 'garbage':
            return web.Response(text=json.dumps(content)[:40], content_type='application/json')
        if isinstance(content, str):
            return web.Response(text=content, status=status)
        return web.json_response(content, status=status)

    async def _run_job(self, name, job):
        self.jobs[name] = job
        await job.ended.wait()
        return job

    def _abort(self, names):
        for name in names:
            if (job := self.jobs.pop(name, None)) is not None:
                job.end('abort')

    def _load(self, directory):
        if self.moves:
            self.w = json.loads((pathlib.Path(directory) / 'config.json').read_text())['w']


class FakeVllm(FakeServer):
    async def serve(self, method, path, path_qs, body):
        if path == '/inference/v1/generate':
            return 200, await self._generate(body)
        if path == '/pause':
            self.is_paused = True
            self._abort(list(self.jobs))
        elif path == '/resume':
            self.is_paused = False
        elif path == '/abort_requests':
            self._abort(body['request_ids'] or list(self.jobs))
        elif path == '/collective_rpc':
            self._load(body['kwargs']['weights_path'])
        elif path == '/update_weight_version':
            self.version = body['new_version']
        elif path == '/weight_info':
            return 200, {'weight_version': self.version}
        found = find_exchange('vllm/control', method=method, path=path_qs)['response']
        return found['status'], found['json']

    def _read(self, body):
        """The name of the request, and its job."""
        sampling = body['sampling_params']
        job = Job(body['token_ids'], sampling['max_tokens'], sampling.get('stop_token_ids', []))
        return f'generate-tokens-{body.get("request_id", "none")}', job

    async def _stream(self, request, body, fault):
        """As recorded: versions, of all tokens, are in the last event alone."""
        name, job = self._read(body)
        recorded = [line.removeprefix('data: ') for line in noted('vllm/generate', 'stream')['response']['sse']]
        self.jobs[name], sent = job, 0
        response = web.StreamResponse(headers={'Content-Type': 'text/event-stream'})
        await response.prepare(request)
        while sent < len(job.tokens) or not job.ended.is_set():
            await job.news.wait()
            job.news.clear()
            is_last, tokens = job.ended.is_set(), job.tokens[sent:]
            event = json.loads(recorded[-2 if is_last else 0])
            (choice,) = event['choices']
            entry, sent = choice['logprobs']['content'][0], len(job.tokens)
            choice |= {
                'token_ids': tokens, 'finish_reason': job.reason,
                'logprobs': {'content': [entry | {'token_id': token, 'logprob': -1.0} for token in tokens]},
                'weight_versions': job.spans() if is_last and self.spans else None,
            }  # fmt: skip
            await response.write(f'data: {json.dumps(event | {"request_id": name})}\n\n'.encode())
            if is_last:
                break
            if fault == 'die':
                request.transport.abort()
                return response
        await response.write(b'data: [DONE]\n\n')
        return response

    async def _generate(self, body):
        name, job = self._read(body)
        await self._run_job(name, job)
        content = copy.deepcopy(read_exchanges('vllm/generate')[0]['response']['json'])
        (choice,) = content['choices']
        entry = choice['logprobs']['content'][0]
        content |= {'request_id': name, 'usage': content['usage'] | {'completion_tokens': len(job.tokens)}}
        logprobs = [entry | {'token_id': token, 'logprob': -1.0, 'top_logprobs': []} for token in job.tokens]
        choice |= {
            'token_ids': job.tokens, 'finish_reason': job.reason, 'logprobs': {'content': logprobs},
            'weight_versions': job.spans() if self.spans else None,
        }  # fmt: skip
        if self.gives_routes and job.tokens:
            np.save(file := io.BytesIO(), job.routes().astype(np.uint8))
            choice['routed_experts'] = base64.b64encode(file.getvalue()).decode()
        return content


class FakeSglang(FakeServer):
    async def serve(self, method, path, path_qs, body):
        if path == '/generate':
            return 200, await self._generate(body)
        if path == '/model_info':
            found = find_exchange('sglang/identity', path='/model_info')['response']['json']
            return 200, found | {'weight_version': self.version}
        if path == '/pause_generation':
            self.is_paused = True
            if body['mode'] == 'abort':
                self._abort(list(self.jobs))
        elif path == '/continue_generation':
            self.is_paused = False
        elif path == '/abort_request':
            self._abort([body['rid']] if 'rid' in body else list(self.jobs))
            return 200, ''
        elif path == '/update_weights_from_disk':
            self._load(body['model_path'])
            for job in self.jobs.values():  # retracted
                job.weights = [self.w] * len(job.tokens)
            self.version = body['weight_version']
        found = find_exchange('sglang/control', method=method, path=path)['response']
        return found['status'], found['json']

    async def _generate(self, body):
        sampling, name = body['sampling_params'], body.get('rid', 'none')
        assert body['return_logprob']
        assert body['logprob_start_len'] == len(body['input_ids']) - 1
        job = Job(body['input_ids'], sampling['max_new_tokens'], sampling.get('stop_token_ids', []))
        await self._run_job(name, job)
        if not job.tokens:
            return noted('sglang/interrupted', 'aborted before its first token')['response']['json']
        content = copy.deepcopy(noted('sglang/generate', 'sampled')['response']['json'])
        finish = {'stop': {'matched': job.tokens[-1]}, 'length': {'length': len(job.tokens)}, 'abort': {}}
        meta = content['meta_info']
        meta |= {
            'id': name, 'finish_reason': {'type': job.reason, **finish[job.reason]},
            'output_token_logprobs': [[-1.0, token, None] for token in job.tokens],
            'completion_tokens': len(job.tokens), 'output_token_logprobs_length': len(job.tokens),
            'weight_versions': job.spans(), 'weight_version': self.version,
        }  # fmt: skip
        if not self.spans:
            del meta['weight_versions']
        if self.gives_routes and body.get('return_routed_experts'):
            meta['routed_experts'] = base64.b64encode(job.routes().astype('<i4').tobytes()).decode()
        return content
