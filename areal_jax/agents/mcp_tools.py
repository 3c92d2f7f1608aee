"""The tools of MCP servers for an agent: sessions that belong to one episode, by the client of the package `mcp`.

The first call that needs a session begins it on the I/O loop, in a separate task that also ends it: a scope of the
client must be left by the task that entered it. A resumed episode starts no server for recorded calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import anyio
import httpx2
import pydantic_core
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.client import Client
from mcp.client.stdio import get_default_environment
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    TextContent,
    Tool,
    jsonrpc_message_adapter,
)

from areal_jax.agents.dialogue import Dialogue, EpisodeEnd, ToolFailedError, Tools
from areal_jax.control.episode import TOOL_LISTING
from areal_jax.files import JsonObject
from areal_jax.text.chat_template import read_arguments
from areal_jax.workers import exec_with_parent
from areal_jax.workers.descendants import MARK, kill_processes, list_marked

MOST_MESSAGE_BYTES = 8 * 2**20  # of a message from a server
_MOST_BYTES, _MOST_LINES = 4 * MOST_MESSAGE_BYTES, 10_000  # of a server between two messages to it
_TAIL_BYTES = 2000  # end of a server's standard error that is kept, to explain why it ended
_CHUNK_BYTES = 2**16  # read at once
_GRACE_S = 0.5  # from the close of its input to SIGKILL; also for the exit code of an ended server

_Received = MemoryObjectSendStream[SessionMessage | Exception]
_ToSend = MemoryObjectReceiveStream[SessionMessage]
_Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class ServerProcess:
    """One server; `fault` is the reason why the connection ended, '' while it is open."""

    def __init__(self, command: str):
        self.fault = ''
        self._command, self._mark = shlex.split(command), secrets.token_hex(8)
        self._tail, self._tail_ends = b'', asyncio.Event()
        self._bytes = self._lines = 0  # of the server since the last message to it

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[_Streams]:
        """Starts the process; at the end it is killed with all processes that it started. Raises OSError."""
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
                    return  # its output ends too, and `_read` finds the reason

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
        """Reads the pipes of a killed process to their end: only then does asyncio close them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                for pipe in pipes:
                    while await pipe.read(_CHUNK_BYTES):
                        pass
                await self._process.wait()

    def _kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        kill_processes(list_marked(self._mark))


_Result = TypeVar('_Result')

_MOST_LISTING_BYTES = 2**20
_MOST_PAGES = 100  # of a list of tools
_LEAVE_S = 3.0  # for a connection to end by itself; then its task is cancelled
# shares of agent.tool_deadline_s: a failure before the deadline ends the episode, and is not a result for the model
_START_SHARE, _LISTING_SHARE = 0.8, 0.9


class McpTools:
    """The parameter `mcp` of an agent: `tools()` and `call()`. Made for one episode; `close` ends its servers."""

    def __init__(self, servers: Sequence[str], dialogue: Dialogue, tool_deadline_s: float):
        self._dialogue, self._deadline_s = dialogue, tool_deadline_s
        self._sessions = [_Session(server, _START_SHARE * tool_deadline_s) for server in servers]
        self._offered: list[list[JsonObject]] | None = None  # definitions by server

    async def tools(self) -> Tools:
        """Returns the tools of all servers in the form of OpenAI's chat, for `chat`.

        Raises EpisodeEnd('env_error') if a server does not list its tools in time, or if two tools have the same name.
        """
        return [definition for offered in await self._list() for definition in offered]

    async def call(self, name: str, arguments: object) -> str:
        """Returns the result of a tool as text. Deadline, byte limit, log and record: see Dialogue.call_tool.

        `arguments`: the text that the model wrote, or a dict. Arguments that are not a JSON object, an unknown tool,
        and an error of the tool give an error text, which the model reads. Raises EpisodeEnd('env_error') if the server
        cannot be started or has ended.
        """
        servers = {tool['function']['name']: n for n, offered in enumerate(await self._list()) for tool in offered}
        return await self._dialogue.call_tool(
            name, arguments, functools.partial(self._call, servers, name, read_arguments(arguments))
        )

    def close(self) -> None:
        """Ends the servers without waiting; called from the host's thread."""
        for session in self._sessions:
            session.close()

    async def _list(self) -> list[list[JsonObject]]:
        if self._offered is None:
            names = [session.server for session in self._sessions]
            text = await self._dialogue.call_tool(
                TOOL_LISTING, names, self._ask_for_tools, most_bytes=_MOST_LISTING_BYTES
            )
            try:
                self._offered = json.loads(text)
            except ValueError:  # the deadline of the call came first: the I/O loop was blocked
                raise EpisodeEnd('env_error') from ToolFailedError(f'agent.mcp_servers: list of tools: {text}')
        return self._offered

    # On the I/O loop.

    async def _ask_for_tools(self) -> str:
        try:
            async with asyncio.timeout(_LISTING_SHARE * self._deadline_s):
                found = await asyncio.gather(*(session.ask(_list_tools) for session in self._sessions))
        except TimeoutError as error:
            late = f'no list of tools within {_LISTING_SHARE * self._deadline_s:g} s; see agent.tool_deadline_s'
            raise ToolFailedError(f'agent.mcp_servers: {late}') from error
        except (MCPError, ValueError) as error:  # a reply that violates the protocol
            raise ToolFailedError(f'agent.mcp_servers: the list of tools cannot be read: {error}') from error
        text = json.dumps([[_describe_tool(tool) for tool in tools] for tools in found])
        if len(text) > _MOST_LISTING_BYTES:
            most = f'{_MOST_LISTING_BYTES >> 20} MiB'
            raise ToolFailedError(f'agent.mcp_servers: the list of tools has {len(text)} bytes, and {most} is the most')
        names = [tool.name for tools in found for tool in tools]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ToolFailedError(f'agent.mcp_servers: the tool {twice[0]!r} is offered twice; rename one of the two')
        return text

    async def _call(self, servers: dict[str, int], name: str, arguments: object) -> str:
        if name not in servers:
            return f'error: there is no tool {name!r}; tools: {", ".join(servers) or "none"}'
        if not isinstance(arguments, dict):
            return 'error: the arguments are not a JSON object'
        try:
            pydantic_core.to_json(arguments)
        except ValueError as error:  # half of a surrogate pair, or nested too deep
            return f'error: the arguments cannot be sent as JSON: {error}'
        session = self._sessions[servers[name]]
        try:
            return _to_text(await session.ask(lambda client: client.call_tool(name, arguments)))
        except MCPError as error:
            return f'error: {error}'


class _Session:
    def __init__(self, server: str, start_s: float):
        self.server, self._start_s = server, start_s
        self._process = None if is_url(server) else ServerProcess(server)
        self._loop: asyncio.AbstractEventLoop | None = None  # the I/O loop, once there was a call
        self._is_closed = False
        self._owner: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Ends the session, from the host's thread: the later of the two threads sees the flag of the earlier one."""
        self._is_closed = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended its tasks
                self._loop.call_soon_threadsafe(self._end)

    # On the I/O loop.

    async def ask(self, request: Callable[[Client], Awaitable[_Result]]) -> _Result:
        """Returns the result of the request. Raises ToolFailedError if there is no connection, or if it ends."""
        client = await self._connect()
        try:
            return await request(client)
        except Exception as error:
            if self._is_lost(error):
                raise ToolFailedError(self._describe(error)) from error
            raise

    async def _connect(self) -> Client:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            if self._is_closed:
                raise ToolFailedError(f'{self._name()} is not started: its episode has ended')
            self._client: asyncio.Future[Client] = self._loop.create_future()
            self._client.add_done_callback(lambda client: client.cancelled() or client.exception())  # it may be unread
            self._leave = asyncio.Event()
            self._owner = self._loop.create_task(self._own(), name=self._name())
        try:
            async with asyncio.timeout(self._start_s):
                return await asyncio.shield(self._client)
        except TimeoutError as error:
            self._end()
            raise ToolFailedError(
                f'{self._name()} has not begun within {self._start_s:g} s; see agent.tool_deadline_s'
            ) from error

    async def _own(self) -> None:
        """Enters and leaves the client; tasks that wait for the client get the error of a failed start."""
        try:
            async with (
                httpx2.AsyncClient(transport=_BoundedTransport(), timeout=None) as http,
                Client(
                    self._process.connect() if self._process else streamable_http_client(self.server, http_client=http)
                ) as client,
            ):
                self._client.set_result(client)
                await self._leave.wait()
        except Exception as error:
            if not self._client.done():
                self._client.set_exception(ToolFailedError(self._describe(error)))
        finally:
            if not self._client.done():
                self._client.set_exception(ToolFailedError(f'{self._name()} was ended before it had begun'))

    def _end(self) -> None:
        if self._loop is None or self._owner is None:  # closed before it was started
            return
        self._leave.set()
        self._loop.call_later(_LEAVE_S if self._client.done() else 0.0, self._owner.cancel)

    def _is_lost(self, error: Exception) -> bool:
        """Whether the connection has ended, as opposed to a failure of this request alone."""
        assert self._owner is not None
        if self._owner.done():
            return True
        if self._process:  # some servers answer with the code of CONNECTION_CLOSED
            return bool(self._process.fault)
        return isinstance(error, OSError | httpx2.HTTPError) or (
            isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
        )

    def _describe(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        fault = self._process.fault if self._process else ''
        if not fault and isinstance(error, MCPError) and error.code == CONNECTION_CLOSED:
            fault = 'has closed the connection'
        return f'{self._name()} {fault or f"failed with {type(error).__name__}: {error}"}'

    def _name(self) -> str:
        return f'the MCP server {self.server!r}'


def is_url(server: str) -> bool:
    """Whether an entry of agent.mcp_servers is a URL; other entries are commands."""
    return server.startswith(('http://', 'https://'))


async def _list_tools(client: Client) -> list[Tool]:
    found: list[Tool] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _describe_tool(tool: Tool) -> JsonObject:
    function = {'name': tool.name, 'description': tool.description or '', 'parameters': tool.input_schema}
    return {'type': 'function', 'function': function}


def _to_text(result: CallToolResult) -> str:
    text = '\n'.join(_describe_content(block) for block in result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content)
    return text if text or not result.is_error else 'error: the tool failed'


def _describe_content(block: ContentBlock) -> str:
    if isinstance(block, TextContent):
        return block.text
    inner = block.resource if isinstance(block, EmbeddedResource) else block
    kind = getattr(inner, 'mime_type', None) or getattr(inner, 'uri', '')
    return f'[{block.type} {kind}]'.replace(' ]', ']')


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Ends a response that is longer than MOST_MESSAGE_BYTES."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream)
        return response


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream):
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        room = MOST_MESSAGE_BYTES
        async for chunk in self._stream:
            room -= len(chunk)
            if room < 0:
                raise httpx2.ReadError(f'the server sends more than {MOST_MESSAGE_BYTES >> 20} MiB')
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
