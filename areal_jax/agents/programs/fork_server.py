"""Runs the command of each job in a fork of this process, which has imported the modules of `agent.preload` once.

    python -P fork_server.py DESCRIPTOR PARENT

DESCRIPTOR is a socket to the process PARENT; this process ends when PARENT does. Messages are lines of JSON. From the
parent: first {command, preload}; then {job, environment, problem} begins job number `job`, and {end} ends that job. To
the parent: {refused} if a module cannot be imported, after which this process ends; for each job either {job,
exit_code, tail}, with the end of its output in base64, or {job, error}, also for a job that was asked to end.

A job is two processes: a supervisor (program_supervisor.py), a child of this one, and the program, its child.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import sys
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))  # this copy of the package

from areal_jax.agents.programs import program_supervisor
from areal_jax.workers.descendants import adopt_orphans, die_with_parent, kill_processes, list_descendants

del sys.path[0]

_Message = dict  # of JSON
_CHUNK_BYTES = 2**16  # read at once
_LOOK_S = 1.0  # between two checks whether the parent lives
_END_S = 5.0  # for all supervisors to end; then they are killed
_KILL_S = 3.0  # a process that is alive this long after SIGKILL is stuck in the kernel
_NOBODY, _TRIED_CALL_S = 'http://127.0.0.1:9/v1', 1.0  # no server listens there, but a proxy of the environment might
_TOLD_TO_END = 'it was told to end'
_CANNOT_EXECUTE = 127  # the exit code of shells


class _Exit:
    """Ends a finished program, skipping the interpreter's clean-up, which would copy all of its memory.

    Registered first, and therefore called last: after the program's threads and its exit functions have ended.
    """

    code: int | None = None  # None in the fork server

    def end(self) -> None:
        if self.code is not None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(self.code)


class ForkServer:
    """The loop of this process.

    Args:
      control: descriptor of the socket to the parent.
      parent: pid of the parent.
    """

    def __init__(self, control: int, parent: int):
        self._control, self._parent = control, parent
        self._own_pid = os.getpid()
        self._received = b''
        self._supervisors: dict[int, int] = {}  # by process: the job, until its end is reported
        self._is_ending = False

    def set_up(self) -> list[str]:
        """Reads the first line, imports its modules and returns its command. Raises ImportError with a sentence."""
        while b'\n' not in self._received:
            self._receive()
            if self._is_ending:
                return []
        setup = self._take_messages(most=1)[0]
        command = setup['command']
        if words := program_supervisor.find_python_program(command):
            program_supervisor.import_as(words)
        for name in setup['preload']:
            import_module(name)
        if 'openai' in sys.modules:
            try_clients()
        with contextlib.suppress(Exception):
            sys.stdout.flush()  # else each fork would print what the imports have printed
        gc.collect()
        gc.freeze()  # the collector of a fork then copies none of these pages
        return command

    def serve(self) -> _Message | None:
        """Forks for each job until the parent ends; then returns None. In the fork of a job, returns the job."""
        adopt_orphans()
        self._wakeups = program_supervisor.watch_signals(self._end)
        self._reports, self._report_to = os.pipe()  # a line of at most PIPE_BUF bytes is written whole
        os.set_blocking(self._reports, False)
        self._reported = b''
        while not self._is_ending:
            for message in self._take_messages():
                if 'end' in message:
                    self._end_job(message['end'])
                elif self._fork(message):
                    return message
            self._wait()
        self._end_all()
        return None

    def refuse(self, reason: str) -> None:
        self._send({'refused': reason})

    def _end(self) -> None:
        self._is_ending = True

    def _wait(self) -> None:
        poller = select.poll()
        for descriptor in (self._reports, self._wakeups):
            poller.register(descriptor, select.POLLIN)
        if not self._is_ending:  # after the parent's end it stays readable
            poller.register(self._control, select.POLLIN)
        ready = dict(poller.poll(1000 * _LOOK_S))
        if self._control in ready:
            self._receive()
        if self._reports in ready:
            self._forward_reports()
        if self._wakeups in ready:
            os.read(self._wakeups, _CHUNK_BYTES)
            self._reap()
        if os.getppid() != self._parent:
            self._is_ending = True

    def _receive(self) -> None:
        try:
            chunk = os.read(self._control, _CHUNK_BYTES)
        except OSError:
            chunk = b''
        self._received += chunk
        self._is_ending = self._is_ending or not chunk

    def _take_messages(self, most: int = -1) -> list[_Message]:
        if b'\n' not in self._received:
            return []
        *lines, self._received = self._received.split(b'\n', most)
        return [json.loads(line) for line in lines]

    def _fork(self, job: _Message) -> bool:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until the fork handles it
        try:
            with warnings.catch_warnings():  # Python 3.12 dislikes forks of a process in which an import began threads
                warnings.simplefilter('ignore', DeprecationWarning)
                pid = os.fork()
        except OSError as error:
            self._send({'job': job['job'], 'error': describe_fork_error(error)})
            pid = -1
        if pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            if pid > 0:
                self._supervisors[pid] = job['job']
            return False
        return supervise(job, self._own_pid, self._report_to)

    def _forward_reports(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._reports, _CHUNK_BYTES):
                self._reported += chunk
        *lines, self._reported = self._reported.split(b'\n')
        for line in lines:
            self._send(json.loads(line))

    def _reap(self) -> None:
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                job = self._supervisors.pop(ended[0], None)
                if job is not None and ended[1] != 0:
                    self._send({'job': job, 'error': 'the process that watches it was killed'})
                    self._end_orphans()
        except ChildProcessError:
            pass

    def _end_orphans(self) -> None:
        """Kills processes of a program whose supervisor did not end them."""
        end_s = time.monotonic() + _KILL_S
        while time.monotonic() < end_s:
            below = [process for process in list_descendants(self._own_pid) if process.parent == self._own_pid]
            orphans = [process for process in below if process.is_alive and process.pid not in self._supervisors]
            if not orphans:
                return
            kill_processes([*orphans, *(process for one in orphans for process in list_descendants(one.pid))])
            time.sleep(0.005)

    def _end_job(self, job: int) -> None:
        pids = [pid for pid, of_pid in self._supervisors.items() if of_pid == job]
        if not pids:
            self._send({'job': job, 'error': _TOLD_TO_END})
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)  # its program may have stopped it

    def _end_all(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._supervisors:
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
            end_s = time.monotonic() + _END_S
            while self._supervisors and time.monotonic() < end_s:
                self._wait()
        self._end_orphans()

    def _send(self, message: _Message) -> None:
        line = memoryview(json.dumps(message).encode() + b'\n')
        with contextlib.suppress(OSError):  # the parent has ended
            while line:
                line = line[os.write(self._control, line) :]


def supervise(job: _Message, server: int, report_to: int) -> bool:
    """Runs in a fork of the server: returns True in the program; the supervisor reports its end and does not return."""
    try:
        die_with_parent(signal.SIGTERM)
        program_supervisor.close_descriptors(kept=(report_to,))
        supervisor = program_supervisor.start_program(server, json.dumps(job['problem']).encode() + b'\n')
    except OSError as error:
        report = {'job': job['job'], 'error': describe_fork_error(error)}
    else:
        if supervisor is None:
            return True
        report = {'job': job['job'], **describe_end(supervisor)}
    with contextlib.suppress(OSError):
        os.write(report_to, json.dumps(report).encode() + b'\n')
    os._exit(0)


def describe_end(supervisor: program_supervisor.Supervisor) -> _Message:
    """The report to the parent on a program that has ended."""
    if supervisor.is_asked_to_end:
        return {'error': _TOLD_TO_END}
    return {'exit_code': supervisor.exit_code, 'tail': base64.b64encode(supervisor.tail).decode()}


def import_module(name: str) -> None:
    """Imports a module; raises ImportError with a sentence if that fails."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        said = f'{type(error).__name__}: {" ".join(str(error).split())[:300]}'
        raise ImportError(
            f'agent.preload={name!r}: it cannot be imported ({said}); install its package, or leave it out'
        ) from error


def try_clients() -> None:
    """Makes openai clients and calls that fail at once, so that openai's late imports happen before any fork."""
    # not imported at the top: logging, which asyncio imports, must register its exit function after _Exit
    asyncio, openai = importlib.import_module('asyncio'), importlib.import_module('openai')
    options = {'api_key': 'none', 'base_url': _NOBODY, 'max_retries': 0, 'timeout': _TRIED_CALL_S}
    call = {'model': 'policy', 'messages': [{'role': 'user', 'content': ''}]}

    async def try_async() -> None:
        async with openai.AsyncOpenAI(**options) as client:
            with contextlib.suppress(openai.OpenAIError):
                await client.chat.completions.create(**call)

    with openai.OpenAI(**options) as client, contextlib.suppress(openai.OpenAIError):  # no fork shares a connection
        client.chat.completions.create(**call)
    asyncio.run(try_async())


def describe_fork_error(error: OSError) -> str:
    return f'no process could be started for it: {error.strerror}'


def run_program(command: list[str], job: _Message) -> int:
    """Runs the command in this process; returns the exit code of a Python program, becomes any other program."""
    os.environ.update(job['environment'])
    if 'numpy.random' in sys.modules:  # `random` seeds itself anew in every fork
        sys.modules['numpy.random'].seed()
    if words := program_supervisor.find_python_program(command):
        return program_supervisor.run_python(words)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    executable = sys.executable if program_supervisor.is_python(command[0]) else command[0]
    try:
        os.execvp(executable, [executable, *command[1:]])
    except OSError as error:
        print(f'{command[0]!r} cannot be started: {error.strerror}', file=sys.stderr)
        return _CANNOT_EXECUTE


def main(control: int, parent: int, ending: _Exit) -> None:
    """Serves jobs; in a fork, runs the program."""
    die_with_parent(signal.SIGTERM)  # also during an import that does not end
    server = ForkServer(control, parent)
    try:
        command = server.set_up()
    except ImportError as error:
        server.refuse(str(error))
        return
    job = server.serve()
    if job is not None:
        ending.code = run_program(command, job)


if __name__ == '__main__':
    ending = _Exit()
    atexit.register(ending.end)
    main(int(sys.argv[1]), int(sys.argv[2]), ending)
