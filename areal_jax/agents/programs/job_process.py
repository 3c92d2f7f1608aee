"""The run's side of a process that runs jobs: JSON lines over a socket, on the callers' event loop; how a job ended."""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

from areal_jax.agents.programs.program_supervisor import TAIL_BYTES
from areal_jax.errors import UserError
from areal_jax.files import JsonObject, decode_json
from areal_jax.workers.worker_process import name_signal

_SECRET = re.compile(r'.*_(KEY|TOKEN)')  # names of variables
_LONGEST_LINE, _LONGEST = 300, 500  # characters


def find_secrets(environment: Mapping[str, str]) -> list[str]:
    """The values that must not be shown: of variables whose names end in _KEY or _TOKEN."""
    return [value for name, value in environment.items() if value and _SECRET.fullmatch(name)]


def hide_secrets(text: str, secrets: Collection[str]) -> str:
    """Replaces each secret in the text by '***'."""
    for secret in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(secret, '***')
    return text


def describe_exit(exit_code: int, output: bytes, secrets: Collection[str]) -> str:
    """'it ended with exit code 1; its last line: ValueError: no digits (line 3 of agent.py)'.

    Args:
      exit_code: if negative, the signal that killed the program.
      output: the end of the output, at most TAIL_BYTES.
    """
    text = output.decode(errors='replace')
    if len(output) >= TAIL_BYTES:  # it may begin within a secret
        ends = (secret[start:] for secret in secrets for start in range(1, len(secret)))
        text = text.removeprefix(max(filter(text.startswith, ends), key=len, default=''))
    lines = [line for line in hide_secrets(text, secrets).splitlines() if line.strip()]
    said = f'; its last line: {shorten(lines[-1], _LONGEST_LINE)}' if lines else ''
    places = re.findall(r'^  File "([^"\n]+)", line (\d+)', '\n'.join(lines), re.MULTILINE)
    if places and exit_code == 1:  # of a traceback
        said += f' (line {places[-1][1]} of {places[-1][0]})'
    return shorten(f'{_describe_code(exit_code)}{said}', _LONGEST)


def shorten(text: str, most: int = _LONGEST) -> str:
    """The text in one line of at most `most` characters."""
    line = ' '.join(text.split())
    return line if len(line) <= most else f'{line[: most - 3]}...'


def _describe_code(exit_code: int) -> str:
    if exit_code >= 0:
        return f'it ended with exit code {exit_code}'
    by_kernel = ', which the kernel sends where memory runs out' if exit_code == -signal.SIGKILL else ''
    return f'it was killed by {name_signal(-exit_code)}{by_kernel}'


_END_S = 5.0  # between SIGTERM and SIGKILL
_EXIT_S = 1.0  # between the end of a socket and the end of its process
_KEPT_SECRETS = 1000  # of the last jobs: a printed line does not say to which job it belongs


class JobProcess:
    """Started at once; jobs may be sent before it is ready. For one event loop: it ends with the loop's thread.

    Args:
      name: the name in sentences, e.g. 'the fork server of agent.command'.
      command: gets the descriptor of the socket and the id of this process as last arguments.
      environment: of the process; None = inherited from this process.
      setup: the first line that the process gets.
      patience_s: for a job that was asked to end; after that the process is ended, and all of its jobs with it.
      hear: called with each line of output that the process forwards.

    Raises OSError if no process can be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None,
        setup: JsonObject,
        patience_s: float,
        hear: Callable[[str], None] = lambda line: None,
    ):
        self.is_ending = False  # it takes no further jobs
        self._name, self._patience_s, self._hear = name, patience_s, hear
        self._reason = ''  # why it ends, for its jobs; '' = not known
        self._n_jobs = 0
        self._waiting: dict[int, asyncio.Future[JsonObject]] = {}
        self._asked_to_end: dict[int, asyncio.TimerHandle] = {}
        self._secrets: collections.deque[str] = collections.deque(maxlen=_KEPT_SECRETS)
        self._unsent = [_write_line(setup)]
        self._writer: asyncio.StreamWriter | None = None
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C does not reach it
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._loop = asyncio.get_running_loop()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._talk = self._loop.create_task(self._exchange(ours))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load(self) -> tuple[bool, int]:
        """(whether a cancelled job is still running, number of jobs): the least loaded process gets the next job."""
        return bool(self._asked_to_end), len(self._waiting)

    async def run(self, job: JsonObject) -> JsonObject:
        """Returns the reply to a job, `error` if the process ends. If cancelled, asks the job to end without waiting.

        Raises UserError if the process refuses its setup.
        """
        number, self._n_jobs = self._n_jobs, self._n_jobs + 1
        reply = self._waiting[number] = self._loop.create_future()
        self._secrets.extend(find_secrets(job['environment']))
        self._send({**job, 'job': number})
        try:
            return await reply
        except asyncio.CancelledError:
            if reply.cancelled() and not self._talk.done():
                self._asked_to_end[number] = self._loop.call_later(self._patience_s, self._lose_patience)
                self._send({'end': number})
            raise
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        """Ends the process and all processes of its jobs; each job gets a reply with `error`."""
        self._end('the run has ended it')
        try:
            await asyncio.wait({self._talk}, timeout=2 * _END_S)
        finally:
            self._talk.cancel()

    def _send(self, message: JsonObject) -> None:
        line = _write_line(message)
        if self._writer is None:
            self._unsent.append(line)
        elif not self._writer.is_closing():
            self._writer.write(line)

    async def _exchange(self, ours: socket.socket) -> None:
        try:
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._writer.writelines(self._unsent)
            self._unsent.clear()
            while line := await reader.readline():
                with contextlib.suppress(ValueError):  # cut by the end of the process
                    self._take(cast(JsonObject, decode_json(line)))
        except (OSError, ValueError) as error:
            self._reason = self._reason or f'it said what is no reply ({error})'
        finally:
            self._finish()

    def _take(self, message: JsonObject) -> None:
        if 'refused' in message:
            self.is_ending = True
            for future in self._unsettled():
                future.set_exception(UserError(message['refused']))
        elif 'printed' in message:
            self._hear(shorten(hide_secrets(message['printed'], self._secrets)))
        elif 'exited' in message:
            output = base64.b64decode(message['tail'])
            self._reason = self._reason or describe_exit(message['exited'], output, self._secrets)
        elif message['job'] in self._asked_to_end:
            self._asked_to_end.pop(message['job']).cancel()
        elif message['job'] in self._waiting and not self._waiting[message['job']].done():
            self._waiting[message['job']].set_result(message)

    def _unsettled(self) -> list[asyncio.Future[JsonObject]]:
        return [future for future in self._waiting.values() if not future.done()]

    def _lose_patience(self) -> None:
        self._end(f'another episode did not end within {self._patience_s:g} s of its cancellation')

    def _end(self, reason: str) -> None:
        self.is_ending = True
        self._reason = self._reason or reason
        if not self._talk.done() and self._kill_timer is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # a program may have stopped it
            self._kill_timer = self._loop.call_later(_END_S, self._process.kill)

    def _finish(self) -> None:
        """Ends the process, and its jobs with it, after the socket has closed; settles their replies."""
        self.is_ending = True
        self._process.terminate()  # needed if this loop ends before the process
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_S)
            self._process.kill()
        for timer in (*self._asked_to_end.values(), self._kill_timer):
            if timer is not None:
                timer.cancel()
        self._asked_to_end.clear()
        code = self._process.poll()
        reason = self._reason or ('it closed its socket' if code is None else describe_exit(code, b'', ()))
        for future in self._unsettled():
            future.set_result({'error': f'{self._name} ended: {reason}'})
        if self._writer is not None:
            self._writer.close()


def _write_line(message: JsonObject) -> bytes:
    return json.dumps(message).encode() + b'\n'
