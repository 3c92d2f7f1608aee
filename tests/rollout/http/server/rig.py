"""A server around the toy backend (tests/toys.py), on the real clock, in threads of this process."""

import asyncio
import contextlib
import json
import os
import pathlib
import socket
import threading
import time
import urllib.parse
from unittest import mock

import aiohttp

from areal_jax.config.generation import RolloutSection
from areal_jax.control.clocks.real import RealClock
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.rollout.http.server.bridge import Texts
from areal_jax.rollout.http.server.limits import Limits
from areal_jax.rollout.http.server.replies import Callers
from areal_jax.rollout.http.server.state import Facts
from areal_jax.rollout.http.server.thread import HttpThread, ServedModel, bind, describe_url
from areal_jax.rollout.http.service import GenerationService
from areal_jax.rollout.local_engine import LocalEngine
from areal_jax.rollout.scoring import Scorer
from areal_jax.rollout.stream import IN_A_SERVER
from areal_jax.text.tokenizer import CharacterTokenizer
from tests.rollout.toy_scoring import ToyScoring
from tests.toys import ToyBackend

CONTEXT = 400
PROMPT = [1, 2, 3]


def write_weights(directory, w):
    """A directory that the toy server loads: the integer w."""
    directory.mkdir(parents=True)
    (directory / 'w').write_text(str(w))
    return str(directory)


def receive(published):
    w = int((pathlib.Path(published.handle.path) / 'w').read_text())
    published.handle.digest = f'digest of {w}'
    return w, published.version


class SlowBackend(ToyBackend):
    """A dispatch takes `step_s`."""

    step_s = 0.002

    def generate(self, *arguments):
        time.sleep(self.step_s)
        return super().generate(*arguments)


class ToyServer:
    """Inside, it serves; `url` is its address."""

    on_failed_dispatch = None  # see LocalEngine
    context, vocabulary = CONTEXT, 10
    hosts = frozenset()  # names under which clients without a key may call it

    def __init__(
        self, *, slots=4, decode_steps=1, limits=None, api_key='', tokenizer=None, required='refuse',
        recorded=(),
    ):  # fmt: skip
        self.decode_steps, self.tokenizer = decode_steps, tokenizer or CharacterTokenizer('abcdefghi')
        self.log = EventLog()
        self.clock = RealClock({'engine/0': 1, 'publish/0': 1}, self.log, stall_timeout_s=30.0)
        self.receive = receive  # tests put others in its place
        self.backend, first = self.make_backend(slots, decode_steps)
        self.engine = LocalEngine(
            0, self.backend, self.clock, self.log, receive=lambda published: self.receive(published), version=0,
            params=first, rollout=RolloutSection(decode_steps=decode_steps),
            token_bytes=self.tokenizer.token_bytes,
            failure=IN_A_SERVER, on_failed_dispatch=self.on_failed_dispatch,
        )  # fmt: skip
        self.supervisor = Supervisor(self.clock)
        self.scoring = ToyScoring()
        self.scorer = Scorer(self.engine, self.scoring, self.clock)
        self.service = GenerationService(self.engine, self.clock, self.supervisor, model_path='toy', scorer=self.scorer)
        self.end = self.clock.event('end')
        texts = self.texts = Texts(self.tokenizer)
        self.facts = Facts('toy', 'toy', 'ToyModel', '0', 0)
        model = ServedModel(texts, self.context, self.vocabulary, 7, self.facts, required, self.make_parser(), recorded)
        listener = bind('127.0.0.1', 0)
        self.url = describe_url(listener)
        self.http = self.make_front(model, listener, limits or Limits(), api_key)
        self.thread = threading.Thread(target=self._execute)
        self.error = None

    def make_backend(self, slots, decode_steps):
        """(backend, first weights)."""
        return SlowBackend(slots, context_tokens=CONTEXT, largest_piece=CONTEXT), (0, 0)

    def make_parser(self):
        """Of calls in another notation than that of Hermes."""
        return None

    def make_front(self, model, listener, limits, api_key):
        return HttpThread(self.service.inbox, model, listener, limits=limits, callers=Callers(api_key, self.hosts))

    def _execute(self):
        async def program():
            self.engine.start(self.supervisor)
            self.supervisor.start('service', self.service.serve())
            await self.clock.wait(self.end)

        try:
            self.clock.execute(self.supervisor.run(program()))
        except BaseException as error:
            self.error = error

    def __enter__(self):
        self.thread.start()
        self.http.__enter__()
        return self

    def __exit__(self, *_):
        self.http.__exit__()

        async def end(service):
            self.end.set()

        from areal_jax.rollout.http.service import Action

        self.service.inbox.put(Action('end', end, lambda result, error: None))
        self.thread.join(10)
        if self.error is not None:
            raise self.error

    def cut_connections(self):
        """As at the death of the process, for those who are connected."""
        port = urllib.parse.urlsplit(self.url).port
        for name in os.listdir('/proc/self/fd'):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as own:
                if own.family == socket.AF_INET and own.getsockname()[1] == port and own.getpeername():
                    own.shutdown(socket.SHUT_RDWR)

    def finished(self):
        """The answers so far, by the reason of their end."""
        return asyncio.run(self.service.look()).finished

    def run(self, script, seconds=30, **session):
        """`script(client)` is a coroutine function on a loop of the test."""

        async def main():
            async with asyncio.timeout(seconds), aiohttp.ClientSession(**session) as session_:
                return await script(Client(session_, self.url))

        return asyncio.run(main())

    @contextlib.contextmanager
    def paced(self, seconds=30):
        """Gives a function for the reader of a stream to call at each event: the next dispatch begins after it.

        Without it an answer may come as one event: what comes while a reader is slow goes out together.
        """
        read, generate = threading.Semaphore(1), self.backend.generate

        def wait_for_reader(*arguments):
            assert read.acquire(timeout=seconds), 'nothing was read of the dispatch before'
            return generate(*arguments)

        with mock.patch.object(self.backend, 'generate', wait_for_reader):
            yield read.release

    def read_stream(self, path, body):
        """The events of a stream in that pace, [DONE] last."""
        with self.paced() as note_event:
            return self.run(lambda client: client.events(path, body, note_event))


class Client:
    """(status, JSON or text) of requests."""

    def __init__(self, session, url):
        self.session, self.url = session, url

    async def post(self, path, body=None, **options):
        headers = {'Content-Type': 'application/json', **options.pop('headers', {})}
        content = options if 'data' in options else {'json': body, **options}
        content['headers'] = headers
        async with self.session.post(self.url + path, **content) as reply:
            return await self._read(reply)

    async def get(self, path, **options):
        async with self.session.get(self.url + path, **options) as reply:
            return await self._read(reply)

    async def _read(self, reply):
        text = await reply.text()
        with contextlib.suppress(ValueError):
            return reply.status, json.loads(text)
        return reply.status, text

    async def events(self, path, body, note_event=lambda: None):
        """The events of a stream, [DONE] last."""
        found = []
        async with self.session.post(self.url + path, json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b'data: '):
                    text = line.decode().removeprefix('data: ').strip()
                    found.append(text if text == '[DONE]' else json.loads(text))
                    note_event()
        return found


def body(new=6, seed=0, **more):
    """Of /generate: an answer of `new` tokens, whose tokens depend on weights and position alone."""
    sampling = {'max_new_tokens': new, 'ignore_eos': True, 'sampling_seed': seed, 'skip_special_tokens': False}
    sampling |= more.pop('sampling', {})
    return {
        'input_ids': PROMPT, 'sampling_params': sampling, 'return_logprob': True, 'logprob_start_len': len(PROMPT) - 1,
        **more,
    }  # fmt: skip


async def until(condition, seconds=60.0):
    """Waits for `await condition()` to be true."""
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, 'the condition did not come true'
        await asyncio.sleep(0.005)
