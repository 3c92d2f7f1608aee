"""One client with bodies of 1 to 16 MiB next to honest ones: what it takes from them.

    python -m benchmarks.crowding --minutes=5 --seed=0 --json=benchmarks/results/crowding.json

Fronts: `server` (areal-serve with the model of configs/tiny_cpu.py and room for 1,024 tokens) and `gateway` (that of
agents, with answers that are there at once); with `--fronts=jetstream`, in an interpreter that has JetStream, that
server behind JetStream, with messages of gRPC (crowding_grpc.py). Four honest clients ask one call after the other,
alone and next to the crowding client, in turns (A B A B, at least five of each) behind a warm one of each. The server
and the honest clients have one core, the crowding client has the other for itself: it takes their time by what it makes
the front do. Its bodies are schemas, nested lists, token ids, messages, texts and prompts, made before the first turn;
it sends the next one when the last one is answered, over two connections.

Held: the rate of the honest next to it over that alone, by turn, median at least 0.6; no honest call waits more than
0.5 s, no /health (gateway: /v1/models) more than 0.3 s; every honest reply has status 200; bodies of every kind were
answered, each with a status that a front gives. Exit code 0 if all held.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import http.client
import importlib.util
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from areal_jax import files
from areal_jax.app.workdir.environment import git_commit, hardware, package_versions
from areal_jax.workers.worker_process import worker_environment

FRONTS = ('server', 'gateway')
JETSTREAM = 'jetstream'
HONEST = 4
LEAST_RATE, MOST_WAIT_S, MOST_HEALTH_S = 0.6, 0.5, 0.3
LEAST_TURNS = 5
CONTEXT = 1024
MEGABYTES = (1, 2, 4, 8, 15)  # of bodies
ANSWERS = (200, 400, 408, 413, 429, 503)  # that a crowding client may get
JETSTREAM_ANSWERS = ('OK', 'INVALID_ARGUMENT', 'RESOURCE_EXHAUSTED')
_WARM_S, _PAUSE_S, _HEALTH_EVERY_S, _START_S = 1.0, 0.3, 0.05, 180.0
_SERVER = {
    'rollout.context_tokens': CONTEXT, 'rollout.block_tokens': 64, 'rollout.slots': 16,
    'rollout.prefill_buckets': '(64,1024)',
}  # fmt: skip
Json = dict[str, Any]
Maker = Callable[[int], bytes]  # of a body of so many bytes


# Bodies.


def make_bodies(seed: int, kinds: Mapping[str, tuple[str, Maker]]) -> Iterator[tuple[str, str, bytes]]:
    """(kind, path, body) in an order of the seed, of kinds with their paths and makers."""
    found = [(kind, size << 20) for kind in kinds for size in MEGABYTES]
    random.Random(seed).shuffle(found)
    for kind, size in found:
        path, make = kinds[kind]
        yield kind, path, make(size)


def _chat(**fields: object) -> Json:
    return {'model': 'm', 'max_tokens': 4, 'messages': [{'role': 'user', 'content': 'a'}], **fields}


def _fill(body: Json, filling: str) -> bytes:
    """The body with JSON in the place of "@"."""
    return json.dumps(body).replace('"@"', filling).encode()


def _schemas(size: int) -> bytes:
    unit = '[[[]]],'
    tool = {'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object', 'enum': '@'}}}
    return _fill(_chat(tools=[tool]), f'[{unit * (size // len(unit))}0]')


def _nested(size: int) -> bytes:
    deep = '[' * 500 + ']' * 500
    return _fill(_chat(metadata='@'), f'[{",".join([deep] * (size // 1001))}]')


def _objects(size: int) -> bytes:
    unit = '"a%d":{"type":"string"},'
    many = ''.join(unit % index for index in range(size // 28))
    tool = {'type': 'function', 'function': {'name': 'f', 'parameters': {'type': 'object', 'properties': '@'}}}
    return _fill(_chat(tools=[tool]), f'{{{many}"z":{{}}}}')


def _messages(size: int) -> bytes:
    unit = '{"role":"user","content":"ab"},'
    return _fill(_chat(messages='@'), f'[{unit * (size // len(unit))}{unit[:-1]}]')


def _long_messages(size: int) -> bytes:
    return _fill(_chat(messages='@'), json.dumps([{'role': 'user', 'content': 'a, b[{' * (size // 600)}] * 100))


def _ids(size: int) -> bytes:
    return _fill({'input_ids': '@', 'sampling_params': {'max_new_tokens': 4}}, f'[{"1," * (size // 2)}1]')


def _prompts(size: int) -> bytes:
    row = f'[{"1,2,3," * 150}1]'
    return _fill({'prompt': '@', 'max_tokens': 1}, f'[{",".join([row] * (size // len(row)))}]')


def _text(size: int) -> bytes:
    return _fill({'prompt': '@', 'max_tokens': 4}, json.dumps('ab, [{' * (size // 6)))


def _digits(size: int) -> bytes:
    return _fill(_chat(seed='@'), '9' * size)


KINDS: Mapping[str, Maker] = {
    'schemas': _schemas, 'nested': _nested, 'objects': _objects, 'messages': _messages, 'long messages': _long_messages,
    'ids': _ids, 'prompts': _prompts, 'text': _text, 'digits': _digits,
}  # fmt: skip
_CHAT = '/v1/chat/completions'
_COMPLETIONS = {'ids': '/generate', 'prompts': '/v1/completions', 'text': '/v1/completions'}


def find_kinds(front: str) -> Mapping[str, tuple[str, Maker]]:
    """Kind of body: its path and maker. The gateway has conversations alone."""
    if front == JETSTREAM:
        from benchmarks.crowding_grpc import KINDS as MESSAGES

        return MESSAGES
    return {
        kind: (_COMPLETIONS.get(kind, _CHAT), make)
        for kind, make in KINDS.items()
        if front == 'server' or kind not in _COMPLETIONS
    }


# The crowding client, in a process of its own.


def crowd(front: str, seed: int) -> None:
    """Reads lines {url, key, seconds} from stdin, and writes one {kind: {status: count}, worst_s} for each."""
    bodies = list(make_bodies(seed, find_kinds(front)))
    print(json.dumps({'ready': len(bodies)}), flush=True)
    place = 0
    for line in sys.stdin:
        asked = json.loads(line)
        counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        end_s, lock = time.monotonic() + asked['seconds'], threading.Lock()

        def take() -> tuple[str, str, bytes]:
            nonlocal place
            with lock:
                place += 1
                return bodies[place % len(bodies)]

        def send(asked: Json = asked, end_s: float = end_s, counts: Any = counts) -> None:
            with open_sender(front, asked['url'], asked['key']) as send_one:
                while time.monotonic() < end_s:
                    kind, path, body = take()
                    status = send_one(path, body)
                    with lock:
                        counts[kind][status] += 1

        threads = [threading.Thread(target=send) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(counts), flush=True)


def open_sender(front: str, url: str, key: str) -> contextlib.AbstractContextManager[Callable[[str, bytes], str]]:
    """Inside, sends a body to a path, and gives the status of the reply."""
    if front == JETSTREAM:
        from benchmarks import crowding_grpc

        return crowding_grpc.open_sender(url)
    return contextlib.nullcontext(functools.partial(_send, url, key))


def _send(url: str, key: str, path: str, body: bytes) -> str:
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or '', where.port, timeout=120)
    headers = {'Content-Type': 'application/json', 'Authorization': f'Bearer {key}'}
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
            connection.request('POST', path, body, headers)
        reply = connection.getresponse()
        reply.read()
        return str(reply.status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


# Honest clients.

# the path of their calls, and that of the health
_HONEST = {
    'server': ('/generate', '/health'),
    'gateway': (_CHAT, '/v1/models'),
    JETSTREAM: ('/jetstream_proto.Orchestrator/Decode', '/jetstream_proto.Orchestrator/HealthCheck'),
}


@dataclasses.dataclass
class Turn:
    """What the honest clients saw in one turn."""

    rate: float = 0.0  # calls a second
    worst_s: float = 0.0
    worst_health_s: float = 0.0
    healths: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)


async def ask(front: str, url: str, keys: Sequence[str], seconds: float) -> Turn:
    """Calls one after the other in so many clients, and looks at the health meanwhile."""
    turn, calls = Turn(), 0
    path, health = _HONEST[front]
    end_s = time.monotonic() + seconds

    async def timed(path: str, key: str) -> float:
        began = time.monotonic()
        if fault := await call(path, key):
            turn.faults.append(f'{path} answered {fault}')
        return time.monotonic() - began

    async def follow(key: str) -> None:
        nonlocal calls
        while time.monotonic() < end_s:
            turn.worst_s = max(turn.worst_s, await timed(path, key))
            calls += 1

    async def look(key: str) -> None:
        while time.monotonic() < end_s:
            turn.worst_health_s = max(turn.worst_health_s, await timed(health, key))
            turn.healths += 1
            await asyncio.sleep(_HEALTH_EVERY_S)

    async with open_caller(front, url) as call:
        began = time.monotonic()
        await asyncio.gather(*(follow(key) for key in keys), look(keys[0]))
        turn.rate = calls / (time.monotonic() - began)
    return turn


def open_caller(front: str, url: str) -> contextlib.AbstractAsyncContextManager[Callable[[str, str], Awaitable[str]]]:
    """Inside, calls a path with a key, and gives what was wrong; '' = nothing."""
    if front == JETSTREAM:
        from benchmarks import crowding_grpc

        return crowding_grpc.open_caller(url)
    return _open_session(url)


@contextlib.asynccontextmanager
async def _open_session(url: str) -> AsyncIterator[Callable[[str, str], Awaitable[str]]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:

        async def call(path: str, key: str) -> str:
            body = {'/generate': _honest_ids, _CHAT: _chat}.get(path, dict)()
            headers = {'Authorization': f'Bearer {key}'}
            async with session.request('POST' if body else 'GET', url + path, json=body, headers=headers) as reply:
                text = await reply.text()
            return '' if reply.status == 200 else f'{reply.status}: {text[:200]}'

        yield call


def _honest_ids() -> Json:
    return {'input_ids': [1, 2, 3], 'sampling_params': {'max_new_tokens': 4, 'ignore_eos': True, 'temperature': 0}}


# Fronts.


@contextlib.contextmanager
def start(command: Sequence[str], core: int, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process on one core, killed at the end."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=worker_environment() | environment,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def serve_command(port: int, settings: Mapping[str, object] = _SERVER) -> list[str]:
    overrides = [f'--config.{name}={value}' for name, value in settings.items()]
    return [sys.executable, '-m', 'areal_jax.main_serve', '--config=configs/tiny_cpu.py', f'--port={port}', *overrides]


def read_line(process: subprocess.Popen[str], beginning: str) -> str:
    """The next line that begins so; raises RuntimeError where the process ends before."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return line.strip()
    raise RuntimeError(f'a process ended before it said {beginning!r}')


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f'{line}\n')
    process.stdin.flush()


@contextlib.contextmanager
def open_front(front: str, core: int) -> Iterator[Callable[[], tuple[str, list[str], str]]]:
    """Gives (url, keys of the honest, key of the crowding client), fresh ones for each turn."""
    if front != 'gateway':
        settings = _SERVER | ({'rollout.server': JETSTREAM} if front == JETSTREAM else {})
        with start(serve_command(0, settings), core, JAX_PLATFORMS='cpu') as process:
            url = read_line(process, 'serving').rpartition(' ')[2]
            threading.Thread(target=lambda: collections.deque(process.stdout or (), 0), daemon=True).start()
            yield lambda: (url, ['none'] * HONEST, 'none')
    else:
        with start([sys.executable, '-m', 'benchmarks.side_gateway'], core) as process:

            def ask_sessions() -> tuple[str, list[str], str]:
                tell(process, str(HONEST + 1))
                found = json.loads(read_line(process, '{'))
                return found['url'], found['keys'][:HONEST], found['keys'][HONEST]

            yield ask_sessions


def measure(front: str, flags: argparse.Namespace, cores: Sequence[int]) -> Json:
    """Turns alone and next to the crowding client."""
    crowd_command = [sys.executable, '-m', 'benchmarks.crowding', f'--crowd={front}', f'--seed={flags.seed}']
    alone, crowded, counts = [], [], collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    seconds = max(2.0, 60 * flags.minutes / len(flags.fronts) / flags.turns / 2 - 2 * _PAUSE_S)
    with open_front(front, cores[0]) as find, start(crowd_command, cores[-1]) as crowding:
        read_line(crowding, '{')
        for turn in range(-1, flags.turns):
            for is_crowded in (False, True):
                url, keys, key = find()
                if is_crowded:
                    tell(crowding, json.dumps({'url': url, 'key': key, 'seconds': seconds if turn >= 0 else _WARM_S}))
                    time.sleep(_PAUSE_S)  # the first body is on its way
                found = asyncio.run(ask(front, url, keys, seconds if turn >= 0 else _WARM_S))
                if is_crowded:
                    for kind, statuses in json.loads(read_line(crowding, '{')).items():
                        counts[kind].update(statuses)
                if turn >= 0:
                    (crowded if is_crowded else alone).append(found)
                    print(front, 'crowded' if is_crowded else 'alone', dataclasses.asdict(found), file=sys.stderr)
    return judge(front, alone, crowded, counts)


def judge(front: str, alone: Sequence[Turn], crowded: Sequence[Turn], counts: Mapping[str, Mapping[str, int]]) -> Json:
    """The row of a front, with a fault for each thing that was not held."""
    ratios = [beside.rate / before.rate for before, beside in zip(alone, crowded, strict=True)]
    quartile = statistics.quantiles(ratios, n=4)[0] if len(ratios) > 1 else ratios[0]
    row = {
        'front': front, 'rate_alone': statistics.median(turn.rate for turn in alone),
        'rate_crowded': statistics.median(turn.rate for turn in crowded),
        'ratio': statistics.median(ratios), 'quartile': quartile, 'ratios': ratios,
        'worst_wait_s': max(turn.worst_s for turn in crowded),
        'worst_wait_alone_s': max(turn.worst_s for turn in alone),
        'worst_health_s': max(turn.worst_health_s for turn in crowded),
        'worst_health_alone_s': max(turn.worst_health_s for turn in alone),
        'crowding': {kind: dict(statuses) for kind, statuses in counts.items()},
    }  # fmt: skip
    faults = [fault for turn in (*alone, *crowded) for fault in turn.faults[:3]]
    if row['ratio'] < LEAST_RATE:
        faults.append(f'{front}: the rate next to the crowding client is {row["ratio"]:.2f} of that alone')
    if row['worst_wait_s'] > MOST_WAIT_S:
        faults.append(f'{front}: an honest call waited {row["worst_wait_s"]:.2f} s')
    if row['worst_health_s'] > MOST_HEALTH_S:
        faults.append(f'{front}: a look at the health took {row["worst_health_s"]:.2f} s')
    missing = [kind for kind in find_kinds(front) if not counts.get(kind)]
    faults += [f'{front}: no body of the kind {kind} was answered' for kind in missing]
    answers = JETSTREAM_ANSWERS if front == JETSTREAM else tuple(map(str, ANSWERS))
    strange = {status for statuses in counts.values() for status in statuses} - {*answers}
    faults += [f'{front}: a crowding body got {status}' for status in sorted(strange)]
    return row | {'faults': faults}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--minutes', type=float, default=5.0, help='of all turns together')
    parser.add_argument('--seed', type=int, default=0, help='of the order of the bodies')
    parser.add_argument(
        '--turns', type=int, default=LEAST_TURNS, help=f'of each side; fewer than {LEAST_TURNS}: a trial'
    )
    parser.add_argument('--fronts', default=','.join(FRONTS), type=lambda text: text.split(','))
    parser.add_argument('--json', type=pathlib.Path, help='file for what was found')
    parser.add_argument('--crowd', choices=(*FRONTS, JETSTREAM), help=argparse.SUPPRESS)
    flags = parser.parse_args(arguments)
    if flags.crowd:
        crowd(flags.crowd, flags.seed)
        return 0
    if JETSTREAM in flags.fronts and importlib.util.find_spec('jetstream') is None:
        parser.error(f'{sys.executable} has no JetStream: run this with the interpreter of the environment that has it')
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error('two cores are needed: the crowding client has one for itself')
    os.sched_setaffinity(0, {cores[0]})
    rows = [measure(front, flags, cores) for front in flags.fronts]
    faults = [fault for row in rows for fault in row['faults']]
    if flags.turns < LEAST_TURNS:
        faults.append(f'{flags.turns} turns of each side, and {LEAST_TURNS} are the least')
    whole = {
        'rows': rows, 'faults': faults, 'command': f'python -m benchmarks.crowding {" ".join(arguments)}',
        'seed': flags.seed, 'commit': git_commit(), 'versions': package_versions(), 'machine': hardware(),
    }  # fmt: skip
    if flags.json:
        files.write_json(flags.json, whole)
    for row in rows:
        print({name: value for name, value in row.items() if name != 'ratios'})
    for fault in faults:
        print(f'FAULT  {fault}')
    print(f'{len(faults)} faults')
    return 1 if faults else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
