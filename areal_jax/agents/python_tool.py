"""The tool `python` of in-process agents: runs a program that the model wrote in the sandbox, and returns its output.

Programs run in workers (tasks/code/program_worker.py). A worker starts with the first call that needs it, and is kept;
there are at most agent.tool_calls calls at once, and as many workers. Only the constructor runs off the I/O loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.agents.dialogue import ToolFailedError
from areal_jax.config.agent_fields import PYTHON
from areal_jax.files import JsonObject
from areal_jax.tasks.code import program_worker
from areal_jax.tasks.code.judge import ProgramLimits
from areal_jax.workers.descendants import MARK, kill_processes, list_marked
from areal_jax.workers.sandbox.confinement import SandboxError, wrap_command
from areal_jax.workers.worker_process import worker_environment

_ARGUMENT = 'code'
_START_SHARE = 0.8  # of agent.tool_deadline_s: a worker that starts later is a fault, and not a result for the model
_GRACE_S = 0.5  # for the server of a killed worker to end its children
_REPLY_BYTES = 8  # of a line, for each byte of output: JSON escapes have up to six
_LINE_BYTES = 2**18  # of a line in addition


class PythonTool:
    """The tool for all episodes of a run.

    Args:
      level: a level of confinement.CONFINING.
      readable: files and folders of packages that programs can import.
      deadline_s: agent.tool_deadline_s.
    """

    def __init__(self, level: str, limits: ProgramLimits, deadline_s: float, readable: Sequence[str] = ()):
        words = [sys.executable, '-P', '-m', program_worker.MODULE, level, *readable]
        self._make_worker = functools.partial(_Worker, level, words, limits, _START_SHARE * deadline_s)
        self._idle: list[_Worker] = []
        self.definition = _describe(limits)

    async def run(self, arguments: object) -> str:
        """Returns the output of a program, or 'error: LABEL: REASON' if it failed.

        `arguments`: {'code': ...}; if they are invalid, the result says so. Raises ToolFailedError if the sandbox
        failed; the next call starts another worker.
        """
        code = arguments.get(_ARGUMENT) if isinstance(arguments, Mapping) else None
        if not isinstance(code, str):
            return f'error: the arguments of {PYTHON} are a JSON object with a text {_ARGUMENT!r}'
        worker = self._idle.pop() if self._idle else self._make_worker()
        try:
            reply = await worker.run(code)
        except BaseException:  # also at the deadline: a late reply would answer the next program
            worker.kill()
            raise
        self._idle.append(worker)
        if reply['label'] != 'ok':
            return f'error: {reply["label"]}: {reply["reason"]}'
        return str(reply['output'])


class _Worker:
    """A process of program_worker.py, which starts with its first program."""

    def __init__(self, level: str, words: Sequence[str], limits: ProgramLimits, start_s: float):
        self._level, self._words, self._limits, self._start_s = level, words, limits, start_s
        self._mark = secrets.token_hex(8)
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, code: str) -> JsonObject:
        """Returns the reply to one program. Raises ToolFailedError."""
        process = self._process or await self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({'code': code, **dataclasses.asdict(self._limits)}).encode() + b'\n')
            await process.stdin.drain()
        except OSError as error:
            raise _fault('its worker has ended') from error
        return await self._read(process)

    def kill(self) -> None:
        """Kills the worker without waiting; `_own` ends the processes that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            async with asyncio.timeout(self._start_s):
                command = wrap_command(self._level, self._words)
                self._process = process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=worker_environment() | {MARK: self._mark},
                    limit=_REPLY_BYTES * self._limits.output_bytes + _LINE_BYTES,
                    start_new_session=True,
                )
                self._owner = asyncio.get_running_loop().create_task(self._own(process), name=f'worker of {PYTHON}')
                await self._read(process)
        except TimeoutError as error:
            raise _fault(f'it has not begun within {self._start_s:g} s; see agent.tool_deadline_s') from error
        except (SandboxError, OSError) as error:
            raise _fault(str(error)) from error
        return process

    async def _own(self, process: asyncio.subprocess.Process) -> None:
        """Waits until the process ends; kills it if this task is cancelled, as all tasks are at the end of the run."""
        try:
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            try:
                async with asyncio.timeout(_GRACE_S):
                    await process.wait()
                    while list_marked(self._mark):
                        await asyncio.sleep(_GRACE_S / 10)
            except TimeoutError:
                pass
            finally:
                kill_processes(list_marked(self._mark))

    async def _read(self, process: asyncio.subprocess.Process) -> JsonObject:
        assert process.stdout is not None
        try:
            reply: JsonObject = json.loads(await process.stdout.readline())
        except ValueError as error:  # an empty line at the end, or one that is too long
            raise _fault('its worker has ended') from error
        if 'fault' in reply:
            raise _fault(reply['fault'])
        return reply


def _describe(limits: ProgramLimits) -> JsonObject:
    schema: dict[str, Any] = {
        'type': 'object',
        'properties': {_ARGUMENT: {'type': 'string', 'description': 'The whole program.'}},
        'required': [_ARGUMENT],
        'additionalProperties': False,
    }
    description = (
        f'Runs a program in Python and returns what it prints. It has {limits.time_s:g} s and {limits.memory_mb} MiB, '
        'no input, no network and no files; nothing is kept from one call to the next.'
    )
    return {'type': 'function', 'function': {'name': PYTHON, 'description': description, 'parameters': schema}}


def _fault(why: str) -> ToolFailedError:
    return ToolFailedError(f'agent.tools: the sandbox of the tool {PYTHON!r} failed: {why}')
