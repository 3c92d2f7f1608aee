"""Runs episodes in a server of verifiers, a separate process that ends with the run and restarts if it ends early.

The server keeps a record of an episode: the policy's turns, the ending and the reward. Deltas add to the traces of an
episode. One agent has one trace: a graph of messages, of which the sampled ones are the policy's turns. If a client
relays requests to an API, as ours does, the messages have no ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import pathlib
import secrets
import tempfile
from collections.abc import Callable, Sequence

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from areal_jax.agents.programs.job_process import shorten
from areal_jax.agents.programs.program_host import CommandHost, Ending, Job, Record, SaidTurn
from areal_jax.files import JsonObject

_MOST_OUTCOME_BYTES = 2**16  # an outcome is written to the event log
_LISTS = ('nodes', 'errors')  # of a trace: a delta appends to them


# errors of reading a message that has another form
_OTHER_FORM = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


class RecordError(Exception):
    """Raised for a record that is not an episode of one agent."""


class EpisodeRecord:
    """The record of one request, which grows with each delta."""

    def __init__(self) -> None:
        self._traces: dict[str, JsonObject] = {}

    def add(self, delta: JsonObject) -> None:
        """Adds a delta; raises RecordError if it cannot be read."""
        try:
            self._add(delta)
        except _OTHER_FORM as error:
            raise _other_form(error) from error

    def finish(self, reply: JsonObject) -> Ending:
        """Returns the ending of the episode, from the last reply to its request. Raises RecordError."""
        try:
            ending = self._finish(reply)
            json.dumps(ending.record and ending.record.outcome)  # raises now: the event log will write it
        except _OTHER_FORM as error:
            raise _other_form(error) from error
        return ending

    def _add(self, delta: JsonObject) -> None:
        name = delta['trace']
        if delta.get('discard'):  # an attempt that the server has abandoned
            self._traces.pop(name, None)
            return
        trace = self._traces.setdefault(name, {field: [] for field in _LISTS})
        for field in _LISTS:
            trace[field].extend(delta.get(field, ()))
        trace.update(delta.get('set') or {})

    def _finish(self, reply: JsonObject) -> Ending:
        if not reply.get('success'):
            return Ending('lost', shorten(f'the environment: {reply.get("error")}'))
        head, summaries = reply['head'], reply['traces']
        if len(summaries) != 1:
            said = _describe_errors(head.get('errors', ()))
            return Ending('lost', shorten(f'its episode has {len(summaries)} traces, and one agent is trained{said}'))
        trace = self._traces.get(summaries[0]['id'])
        if trace is None or len(trace['nodes']) != summaries[0]['nodes']:
            raise RecordError('the record of an episode lacks messages that its server counts')
        return _read_ending(trace, head)


def _other_form(error: Exception) -> RecordError:
    return RecordError(f'the server sent what is no episode: {type(error).__name__}: {error}')


def _read_ending(trace: JsonObject, head: JsonObject) -> Ending:
    said = tuple(_read_turn(node) for node in trace['nodes'] if node['sampled'])
    lost = lambda reason: Ending('lost', shorten(f'the environment{reason}'), Record(said))
    if not (trace.get('ok') and head.get('ok')):  # the trace keeps the errors of attempts that were repeated
        return lost(_describe_errors([*trace['errors'], *head.get('errors', ())]) or ' did not complete the episode')
    rewards = trace.get('rewards') or {}
    unscored = [name for name, reward in rewards.items() if reward is None]
    if unscored or not rewards:
        return lost(f' gave no reward: {", ".join(unscored)} did not score' if unscored else ' has no reward')
    parts = {name: float(part['score']) for name, part in rewards.items()}
    reward = sum(parts[name] * float(part['weight']) for name, part in rewards.items())
    if not math.isfinite(reward):
        return lost(f' gave the reward {reward}')
    outcome = {
        'reward': reward,
        'rewards': parts,
        'metrics': trace.get('metrics') or {},
        'stop': trace.get('stop_condition'),
    }
    if (size := len(json.dumps(outcome))) > _MOST_OUTCOME_BYTES:
        return lost(f' gave an outcome of {size} bytes, and {_MOST_OUTCOME_BYTES} is the most: return fewer metrics')
    return Ending('ended', record=Record(said, outcome))


def _read_turn(node: JsonObject) -> SaidTurn:
    message, ids = node['message'], node.get('token_ids')
    sampled = [token for token, is_sampled in zip(ids, node['mask'], strict=True) if is_sampled] if ids else None
    calls = tuple((call['name'], call['arguments']) for call in message.get('tool_calls') or ())
    return SaidTurn(_read_text(message.get('content')), calls, None if sampled is None else np.array(sampled, np.int32))


def _read_text(content: object) -> str:
    if isinstance(content, list):  # parts
        return ''.join(str(part.get('text', '')) for part in content)
    return str(content or '')


def _describe_errors(errors: Sequence[JsonObject]) -> str:
    return f': {errors[-1].get("type")}: {errors[-1].get("message")}' if errors else ''


_DELTA = b'delta'


class WireError(Exception):
    """Raised for a message of the server that does not follow its protocol."""


class EnvironmentClient:
    """The client of a server, for one event loop; `close` must be called on that loop."""

    def __init__(self, address: str):
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._socket.connect(address)
        self._numbers = itertools.count()
        self._waiting: dict[bytes, tuple[asyncio.Future[JsonObject], Callable[[JsonObject], None]]] = {}
        self._cancels: set[asyncio.Task[None]] = set()  # a loop keeps no task alive
        self._receiver = asyncio.get_running_loop().create_task(self._receive(), name='environment')

    async def ask(
        self, method: str, payload: JsonObject, hear: Callable[[JsonObject], None] = lambda delta: None
    ) -> JsonObject:
        """Returns the last reply to a request; `hear` gets each delta before. Cancelling this call cancels its episode.

        Raises WireError for replies that cannot be read, and what `hear` raises.
        """
        number = f'{next(self._numbers):x}'.encode()
        reply: asyncio.Future[JsonObject] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (reply, hear)
        try:
            await self._send(number, method, payload)
            return await reply
        except BaseException:  # also for a delta that cannot be read: the episode has no reader left
            cancel = self._send(f'{next(self._numbers):x}'.encode(), 'cancel', {'request_id': number.decode()})
            task = asyncio.get_running_loop().create_task(cancel)  # a new task: this one has ended
            self._cancels.add(task)
            task.add_done_callback(self._cancels.discard)
            raise
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """Closes the connection; requests under way get no reply.

        Does not wait. The socket is closed first: a context with an open socket never ends, and hangs the thread that
        garbage-collects it.
        """
        for task in (self._receiver, *self._cancels):
            task.cancel()
        self._socket.close()
        self._context.term()

    async def _send(self, number: bytes, method: str, payload: JsonObject) -> None:
        with contextlib.suppress(zmq.ZMQError):  # closed meanwhile
            await self._socket.send_multipart([number, method.encode(), msgpack.packb(payload, use_bin_type=True)])

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            reply, hear = self._waiting.get(frames[0], (None, None))
            if reply is None or hear is None or reply.done():  # cancelled, or its request could not be read
                continue
            try:
                content = _unpack(frames)
                if frames[1] == _DELTA:
                    hear(content)
                else:
                    reply.set_result(content)
            except Exception as error:  # of this request alone
                reply.set_exception(error)


def _unpack(frames: list[bytes]) -> JsonObject:
    try:
        _, _, payload = frames
        content = msgpack.unpackb(payload, raw=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # also of msgpack
        raise WireError(f'a message of {len(frames)} frames cannot be read: {error}') from error
    if not isinstance(content, dict):
        raise WireError(f'a message holds a {type(content).__name__}, and no object')
    return content


_KEY = 'AREAL_GATEWAY_API_KEY'  # variable of the server, which passes no variable with API_KEY in its name to programs
_KEY_BYTES = 32  # random
_READY_S = 300.0  # imports, data and tool servers of the environment


class EnvironmentHost:
    """Implements ProgramHost for task.name='verifiers:TASKSET'.

    The first episode starts the server; after its end, the next episode restarts it. The server runs the program of
    each episode and relays its requests to the gateway, with the server's key and the name of the episode's trace.

    Args:
      python: an interpreter that has verifiers.
      program: the path of verifiers_program.py.
      setup: the input of that program.
    """

    def __init__(self, python: str, program: pathlib.Path, setup: JsonObject):
        self._python, self._program, self._setup = python, program, setup
        self._server: _Server | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False

    async def run(self, job: Job) -> Ending:
        """Implements ProgramHost.run; Ending.record is set unless the server was lost."""
        if self._is_closed:
            return Ending('failed', 'the run has ended')
        async with self._starting:
            if self._server is None or self._server.has_ended:
                if self._server is not None:
                    await self._server.close()
                self._server = _Server(self._python, self._program, self._setup)
        return await self._server.run(job)

    async def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            await self._server.close()

    @property
    def pid(self) -> int | None:
        """The pid of the process that starts the server; None before the first episode."""
        return None if self._server is None else self._server.pid


class _Server:
    """One process of the server, with its socket in a folder that only this user can enter."""

    def __init__(self, python: str, program: pathlib.Path, setup: JsonObject):
        self._folder = tempfile.TemporaryDirectory(prefix='areal-environment-')
        address = f'ipc://{self._folder.name}/server'
        self._key = secrets.token_hex(_KEY_BYTES)
        self._commands = CommandHost([python, str(program), 'serve', address], ())
        # uv, which prepares programs of episodes, is in the interpreter's folder
        path = os.pathsep.join([str(pathlib.Path(python).parent), os.environ.get('PATH', os.defpath)])
        loop = asyncio.get_running_loop()
        self._process = loop.create_task(self._commands.run(Job({_KEY: self._key, 'PATH': path}, setup)))
        self._client = EnvironmentClient(address)
        self._ready = loop.create_task(self._client.ask('health', {}))

    @property
    def has_ended(self) -> bool:
        return self._process.done()

    @property
    def pid(self) -> int | None:
        return self._commands.pid

    async def run(self, job: Job) -> Ending:
        episode = asyncio.get_running_loop().create_task(self._run(job))
        try:
            await asyncio.wait([episode, self._process], return_when=asyncio.FIRST_COMPLETED)
            if episode.done():
                return episode.result()
        finally:
            episode.cancel()
        ended = self._process.result().detail or 'with exit code 0'
        return Ending('lost', shorten(f'the server of the environment ended: {ended}'))

    async def close(self) -> None:
        self._ready.cancel()
        self._client.close()  # first: the wait for the end of a process may be abandoned
        await self._commands.close()
        await asyncio.wait([self._process])
        self._folder.cleanup()

    async def _run(self, job: Job) -> Ending:
        record = EpisodeRecord()

        def hear(delta: JsonObject) -> None:
            if 'open' in delta:
                job.name(f'{self._key}.{delta.get("trace")}')
            record.add(delta)

        client = {'type': 'eval', 'base_url': job.environment['OPENAI_BASE_URL'], 'api_key_var': _KEY}
        request = {'task_data': job.problem, 'model': job.environment['OPENAI_MODEL'], 'client': client, 'sampling': {}}
        try:
            async with asyncio.timeout(_READY_S):
                await asyncio.shield(self._ready)
            return record.finish(await self._client.ask('run', request, hear))
        except TimeoutError:
            return Ending('lost', f'the server of the environment is not ready after {_READY_S:g} s')
        except (WireError, RecordError) as error:
            return Ending('lost', shorten(str(error)))
