"""The process of an MCP server over stdio, and its messages within limits: a transport for the client of `mcp`.

The transport of the package reads lines of any length, logs every line that is no message, and leaves the process alive
when this one is killed. mcp_tools.py uses this one instead; everything here runs on the I/O loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import sys
from collections.abc import AsyncIterator

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from areal_jax.workers import exec_with_parent
from areal_jax.workers.descendants import MARK, kill_processes, list_marked

MOST_MESSAGE_BYTES = 8 * 2**20  # of a server
_MOST_BYTES, _MOST_LINES = 4 * MOST_MESSAGE_BYTES, 10_000  # of a server between two messages to it
_TAIL_BYTES = 2000  # of what a server writes to standard error, for the sentence that says why it ended
_CHUNK_BYTES = 2**16  # read at once
_GRACE_S = 0.5  # from the end of its input to SIGKILL; also for an ended server to tell its exit code

_Received = MemoryObjectSendStream[SessionMessage | Exception]
_ToSend = MemoryObjectReceiveStream[SessionMessage]
_Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class ServerProcess:
    """One server; `fault` says why the connection has ended, '' where it has not."""

    def __init__(self, command: str):
        self.fault = ''
        self._command, self._mark = shlex.split(command), secrets.token_hex(8)
        self._tail, self._tail_ends = b'', asyncio.Event()
        self._bytes = self._lines = 0  # of the server since the last message to it

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[_Streams]:
        """Starts the process; it and all that it started are killed at the end. Raises OSError."""
        received, for_session = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        from_session, to_send = anyio.create_memory_object_stream[SessionMessage](0)
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, '-I', '-S', exec_with_parent.__file__, str(os.getpid()), *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**get_default_environment(), MARK: self._mark},
            limit=MOST_MESSAGE_BYTES,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with anyio.create_task_group() as tasks, for_session, from_session:
                tasks.start_soon(self._read, process.stdout, received)
                tasks.start_soon(self._write, process.stdin, to_send)
                tasks.start_soon(self._read_errors, process.stderr)
                yield for_session, from_session
                tasks.cancel_scope.cancel()
        finally:
            process.stdin.close()
            try:
                await self._wait_for_end()
            finally:
                self._kill()
                await self._read_rest(process.stdout, process.stderr)

    async def _read(self, stdout: asyncio.StreamReader, received: _Received) -> None:
        async with received:  # closed at the end: requests under way fail
            with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                while line := await self._read_line(stdout):
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:  # servers print other things too
                        await asyncio.sleep(0)
                        continue
                    await received.send(SessionMessage(message))
            await self._wait_for_end()
            with anyio.move_on_after(_GRACE_S):
                await self._tail_ends.wait()
            code = self._process.returncode
            last = self._tail.decode(errors='replace').strip().splitlines()[-1:]
            how = 'closed its output' if code is None else f'ended with exit code {code}'
            self._fail(': '.join([how, *last]))

    async def _read_line(self, stdout: asyncio.StreamReader) -> bytes:
        """b'' at the end, and at a limit."""
        try:
            line = await stdout.readline()
        except ValueError:
            self._fail(f'sent a message of more than {MOST_MESSAGE_BYTES >> 20} MiB')
            return b''
        self._lines += 1
        return b'' if self._is_flood(len(line)) else line

    async def _read_errors(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(_CHUNK_BYTES):
            self._tail = (self._tail + chunk)[-_TAIL_BYTES:]
            if self._is_flood(len(chunk)):
                break
        self._tail_ends.set()

    async def _write(self, stdin: asyncio.StreamWriter, to_send: _ToSend) -> None:
        async with to_send:
            async for message in to_send:
                self._bytes = self._lines = 0
                stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b'\n')
                try:
                    await stdin.drain()
                except OSError:
                    return  # its output ends too, which says why

    def _is_flood(self, size: int) -> bool:
        self._bytes += size
        if self._bytes <= _MOST_BYTES and self._lines <= _MOST_LINES:
            return False
        self._fail(f'sent more than {_MOST_BYTES >> 20} MiB or {_MOST_LINES} lines without being asked')
        return True

    def _fail(self, fault: str) -> None:
        self.fault = self.fault or fault
        self._kill()

    async def _wait_for_end(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await self._process.wait()

    async def _read_rest(self, *pipes: asyncio.StreamReader) -> None:
        """Of a killed process: asyncio closes a pipe when it has read all."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                for pipe in pipes:
                    while await pipe.read(_CHUNK_BYTES):
                        pass
                await self._process.wait()

    def _kill(self) -> None:
        """The process, and what it has started: all have the mark in their environment."""
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        kill_processes(list_marked(self._mark))
