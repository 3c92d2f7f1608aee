"""Runs the programs of episodes: a command in a fork of a warm interpreter, or a function in long-lived workers.

A host is for one event loop, which need not be the main thread's. The first job starts the host's processes.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np

from areal_jax.agents.programs.function_worker import FIELD, check_function
from areal_jax.agents.programs.job_process import JobProcess, describe_exit, find_secrets, hide_secrets, shorten
from areal_jax.files import JsonObject
from areal_jax.plugins import absolute_spec
from areal_jax.workers.worker_process import worker_environment

_FORK_SERVER = pathlib.Path(__file__).with_name('fork_server.py')
_COMMAND_PATIENCE_S = 15.0  # killing takes milliseconds; a fork server that does not answer is stuck
FUNCTION_PATIENCE_S = 2.0  # for a function to end once it is cancelled

Status: TypeAlias = Literal['ended', 'failed', 'lost']


@dataclasses.dataclass(frozen=True)
class Job:
    """One episode of a program.

    `environment` is added to the run's environment: OPENAI_BASE_URL, OPENAI_API_KEY. `problem` is JSON: a command reads
    it as a line of its stdin, a function gets it as an argument. `name` registers another key of the episode at the
    gateway; 'KEY.SESSION' stands for requests with KEY and the header X-Session-ID.
    """

    environment: Mapping[str, str] = dataclasses.field(repr=False)
    problem: JsonObject
    name: Callable[[str], None] = lambda key: None


@dataclasses.dataclass(frozen=True)
class SaidTurn:
    """A turn of the policy in the record of an environment."""

    text: str
    calls: tuple[tuple[str, str], ...] = ()  # of tools: name and arguments
    tokens: np.ndarray | None = None  # int32 [n], sampled; None: the record has no ids


@dataclasses.dataclass(frozen=True)
class Record:
    """An environment's record of an episode: the turns of the policy, and the result of the scorers.

    `outcome` is JSON with `reward`; None: the episode was not scored.
    """

    said: tuple[SaidTurn, ...] = ()
    outcome: JsonObject | None = None


@dataclasses.dataclass(frozen=True)
class Ending:
    """The end of a program.

    'ended': with exit code 0, or its function returned. 'failed': in any other way; `detail` gives the reason in a
    sentence without the job's secrets. 'lost': by a fault of the environment that ran it. `record` comes from an
    environment.
    """

    status: Status
    detail: str = ''
    record: Record | None = None


class ProgramHost(Protocol):
    """Runs programs."""

    async def run(self, job: Job) -> Ending:
        """Runs a program to its end. If cancelled, returns at once; the program and its processes are killed.

        Raises UserError if no job can run the program.
        """

    async def close(self) -> None:
        """Ends all programs; programs that still run have failed."""


class CommandHost:
    """Implements ProgramHost for `agent.command`.

    `python FILE.py ...` and `python -m MODULE ...` run in a fork of an interpreter that has imported the modules of
    `agent.preload`; any other command is executed. Each program has its own session and the problem on stdin. Its
    output is read without limit; only the last 2 KB are kept, for `Ending.detail`.
    """

    def __init__(self, command: Sequence[str], preload: Sequence[str]):
        self._setup: JsonObject = {'command': list(command), 'preload': list(preload)}
        self._server: JobProcess | None = None
        self._is_closed = False

    async def run(self, job: Job) -> Ending:
        """Implements ProgramHost.run. Raises UserError if a module of agent.preload cannot be imported."""
        if self._is_closed:
            return Ending('failed', 'the run has ended')
        if self._server is None or self._server.is_ending:
            try:
                self._server = self._start()
            except OSError as error:
                return Ending('failed', f'the fork server cannot be started: {error.strerror}')
        return make_ending(await self._server.run(make_message(job)), job)

    async def close(self) -> None:
        self._is_closed = True
        if self._server is not None:
            await self._server.close()

    @property
    def pid(self) -> int | None:
        """The pid of the fork server; None before the first job."""
        return None if self._server is None else self._server.pid

    def _start(self) -> JobProcess:
        command = [sys.executable, '-P', str(_FORK_SERVER)]  # -P: no module in that folder hides a library's
        return JobProcess('the fork server of agent.command', command, None, self._setup, _COMMAND_PATIENCE_S)


class FunctionHost:
    """Implements ProgramHost for `agent.function`, 'FILE.py:FUNCTION', an `async def`.

    Its parameters choose its arguments: problem, base_url, api_key, model ('policy'), and client, an openai.AsyncOpenAI
    for this episode. Each worker is a process with one event loop, which runs several episodes at once.

    Raises UserError if no worker can run the function.
    """

    def __init__(self, function: str, workers: int):
        check_function(function)
        self._function = absolute_spec(function)
        self._workers: list[JobProcess | None] = [None] * workers
        self._is_closed = False

    async def run(self, job: Job) -> Ending:
        """Implements ProgramHost.run. Raises UserError if a worker cannot load the function."""
        if self._is_closed:
            return Ending('failed', 'the run has ended')
        loads = [(False, 0) if worker is None or worker.is_ending else worker.load for worker in self._workers]
        place = loads.index(min(loads))
        worker = self._workers[place]
        if worker is None or worker.is_ending:
            try:
                worker = self._workers[place] = self._start()
            except OSError as error:
                return Ending('failed', f'a worker of {FIELD} cannot be started: {error.strerror}')
        return make_ending(await worker.run(make_message(job)), job)

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers if worker is not None))

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker is not None]

    def _start(self) -> JobProcess:
        command = [sys.executable, '-m', 'areal_jax.agents.programs.function_worker']
        return JobProcess(
            f'a worker of {FIELD}', command, worker_environment(), {'function': self._function}, FUNCTION_PATIENCE_S,
            hear=lambda line: print(f'{FIELD} printed: {line}', file=sys.stderr),
        )  # fmt: skip


def make_message(job: Job) -> JsonObject:
    return {'environment': dict(job.environment), 'problem': job.problem}


def make_ending(reply: JsonObject, job: Job) -> Ending:
    secrets = find_secrets(job.environment)
    if 'error' in reply:
        return Ending('failed', shorten(hide_secrets(reply['error'], secrets)))
    if reply.get('exit_code', 0) != 0:
        return Ending('failed', describe_exit(reply['exit_code'], base64.b64decode(reply['tail']), secrets))
    return Ending('ended')
