"""Runs the function of agent.function for several episodes at once: `python -m ...function_worker DESCRIPTOR PARENT`.

DESCRIPTOR is a socket to the process PARENT; this process ends when PARENT does. Messages are lines of JSON. From the
parent: first {function}; then {job, environment, problem} begins job number `job`, and {end} cancels that job. To the
parent: {refused} if the function cannot be used, after which this process ends; {job, error} for a job that raised,
{job, ended: true} for any other job at its end; {printed} for each of the first lines of output; and {exited, tail}
with the exit code and the end of the output in base64, if the process itself ends.

A worker is two processes: a supervisor (program_supervisor.py), and its child, the loop of the function.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias, cast

from areal_jax.agents.programs.job_process import find_secrets, hide_secrets, shorten
from areal_jax.agents.programs.program_supervisor import start_program
from areal_jax.errors import UserError
from areal_jax.plugins import load_function, source_file
from areal_jax.workers.descendants import die_with_parent

if TYPE_CHECKING:
    import openai

FIELD = 'agent.function'
CLIENT = 'client'
GIVEN = ('problem', 'base_url', 'api_key', 'model', CLIENT)
_LONGEST_LINE = 2**30  # bytes of a job
_SHOWN_LINES, _LONGEST_SHOWN = 20, 500  # of the output; characters of a line
_MODEL = 'policy'
_Message = dict  # of JSON
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

ProgramFunction: TypeAlias = Callable[..., Awaitable[object]]


def check_function(spec: str) -> ProgramFunction:
    """Returns the function 'FILE.py:FUNCTION', an `async def` whose parameters are all in GIVEN or have a default.

    Raises UserError that names agent.function, its value and the fix.
    """
    function = load_function(spec, FIELD)
    if not inspect.iscoroutinefunction(function):
        raise UserError(f'{FIELD}={spec}: it is no `async def`, and several episodes share its process; make it one')
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UserError(f'{FIELD}={spec}: its parameter {name!r} is positional only; leave out the `/`')
        if name not in GIVEN and parameter.kind not in _VARIABLE and parameter.default is parameter.empty:
            raise UserError(
                f'{FIELD}={spec}: nobody gives it its parameter {name!r}; name one of {", ".join(GIVEN)}, or give it a '
                'default'
            )
    if CLIENT in list_parameters(function) and importlib.util.find_spec('openai') is None:
        raise UserError(
            f'{FIELD}={spec}: its parameter {CLIENT!r} needs the package openai; install it, or take api_key and '
            'base_url'
        )
    return cast(ProgramFunction, function)


def list_parameters(function: Callable[..., object]) -> list[str]:
    """The names in GIVEN for which the function has a parameter."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.name in GIVEN and p.kind not in (*_VARIABLE, p.POSITIONAL_ONLY)]


def make_shared_client() -> openai.AsyncOpenAI:
    """Makes a client whose copies, one for each episode, share its connections and TLS context.

    Proxies of the environment are ignored, since the address is on this machine.
    """
    import openai

    class OpenClient(openai.AsyncOpenAI):
        async def close(self) -> None:
            """Leaves the connections open, because other episodes use them too."""

    return OpenClient(api_key='none', http_client=openai.DefaultAsyncHttpxClient(trust_env=False))


class FunctionWorker:
    """The loop: a task for each job."""

    def __init__(self, function: ProgramFunction, spec: str, send: Callable[[_Message], None]):
        self._function, self._spec, self._send = function, spec, send
        self._names = list_parameters(function)
        self._client = make_shared_client() if CLIENT in self._names else None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def take(self, message: _Message) -> None:
        if 'end' not in message:
            self._tasks[message['job']] = asyncio.create_task(self._run(message))
        elif task := self._tasks.get(message['end']):
            task.cancel()
        else:
            self._send({'job': message['end'], 'ended': True})

    async def _run(self, job: _Message) -> None:
        number, reply = job['job'], {'job': job['job'], 'ended': True}
        try:
            environment = job['environment']
            base_url, api_key = environment.get('OPENAI_BASE_URL', ''), environment.get('OPENAI_API_KEY', '')
            values = {'problem': job['problem'], 'base_url': base_url, 'api_key': api_key, 'model': _MODEL}
            if self._client is not None:
                values[CLIENT] = self._client.copy(base_url=base_url, api_key=api_key)
            await self._function(**{name: values[name] for name in self._names})
        except BaseException as error:  # SystemExit would end the loop and with it all jobs
            if not (isinstance(error, asyncio.CancelledError) and self._tasks[number].cancelling()):
                said = hide_secrets(describe_error(error, self._spec), find_secrets(job['environment']))
                reply = {'job': number, 'error': shorten(said)}
        finally:
            del self._tasks[number]
        self._send(reply)


def describe_error(error: BaseException, spec: str) -> str:
    """'ValueError: no digits (line 3 of agent.py)', the innermost line of the function's file."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(source_file(spec, FIELD))] or frames[-1:]
    place = f' (line {own[-1].lineno} of {own[-1].filename})' if own else ''
    return f'{type(error).__name__}: {error}{place}' if str(error) else f'{type(error).__name__}{place}'


async def serve(control: socket.socket) -> None:
    """Runs jobs until the parent closes the socket."""
    reader, writer = await asyncio.open_unix_connection(sock=control, limit=_LONGEST_LINE)
    spec = json.loads(await reader.readline())['function']
    try:
        worker = FunctionWorker(check_function(spec), spec, lambda message: writer.write(_write_line(message)))
    except UserError as error:
        writer.write(_write_line({'refused': str(error)}))
        await writer.drain()
        return
    except ImportError as error:  # of openai, which is there
        writer.write(_write_line({'refused': f'{FIELD}={spec}: openai cannot be imported: {error}'}))
        await writer.drain()
        return
    while line := await reader.readline():
        worker.take(json.loads(line))


class _Output:
    def __init__(self, control: int):
        self._control, self._n_lines, self._line = control, 0, b''

    def hear(self, chunk: bytes) -> None:
        if self._n_lines >= _SHOWN_LINES:
            return
        *lines, self._line = (self._line + chunk).split(b'\n')
        for line in lines[: _SHOWN_LINES - self._n_lines]:
            text = line.decode(errors='replace')  # not cut, which might leave a part of a key
            is_long = len(text) > _LONGEST_SHOWN
            send_line(
                self._control, {'printed': f'a line of more than {_LONGEST_SHOWN} characters' if is_long else text}
            )
        self._n_lines += len(lines)
        self._line = self._line[: _LONGEST_SHOWN + 1]


def send_line(control: int, message: _Message) -> None:
    """Sends a message of the supervisor. The child writes to the socket too, and its end may cut its last line."""
    with contextlib.suppress(OSError):
        os.write(control, b'\n' + _write_line(message))


def main(control: int, parent: int) -> None:
    """Supervises; in a fork, serves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until it is handled
    die_with_parent(signal.SIGTERM)
    supervisor = start_program(parent, b'', _Output(control).hear, kept=(control,))
    if supervisor is None:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        asyncio.run(serve(socket.socket(fileno=control)))
        return
    if supervisor.exit_code is not None:
        tail = base64.b64encode(supervisor.tail).decode()
        send_line(control, {'exited': supervisor.exit_code, 'tail': tail})
    os._exit(0)


def _write_line(message: _Message) -> bytes:
    return json.dumps(message).encode() + b'\n'


if __name__ == '__main__':
    main(int(sys.argv[1]), int(sys.argv[2]))
