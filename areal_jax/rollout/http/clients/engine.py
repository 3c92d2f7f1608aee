"""A server of another project as an engine: answers are calls, and new weights are files that it loads in a pause.

app/ builds it around a dialect and a connection, the pool drives it. A pause returns the generated tokens: they are
delivered, the requests wait here, and continue under the weights in use after the pause. So a token is of the version
in use when its call was sent. If the dialect keeps answers, new weights are loaded while calls are under way: a token
is then of one of the versions in use during its call, and the reply tells which. Either way the version that the server
reports is checked against these.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Sequence

from areal_jax.config.generation import RolloutSection
from areal_jax.control.event_writer import EventLog
from areal_jax.control.supervisor import Supervisor
from areal_jax.lanes import ServerLanes
from areal_jax.protocols import Clock
from areal_jax.rollout.http.clients.connection import CAPABILITIES, Connection, Dialect
from areal_jax.rollout.http.clients.server import (
    Server,
    ServerLimits,
    ServerRequest,
    make_call,
    read_version,
    require_fit,
    require_plain,
)
from areal_jax.rollout.http.wire.exchange import Call, FinishWord, Piece, ReplyError
from areal_jax.rollout.servers.member import HeldWeights, OutcomeUnknownError, RemoteError, RequestFailedError
from areal_jax.rollout.servers.server_entries import ServerEntry
from areal_jax.types import NOT_GENERATED, EngineStatus, GenerationRequest, PublishedWeights, Segment


@dataclasses.dataclass(frozen=True)
class ClientParts:
    """The parts of a client of one server; `connect` of a config.kinds.ClientKind takes them.

    Args:
      lanes: of the engine; the first is also its name.
      locate: returns the directory of published weights, by the path that the server sees.
      api_key: the server's; '' = none.
      rollout: the section of the run's config.
      client: name of the run for servers that know leases.
      lease_s: rollout.pause_lease_s.
    """

    entry: ServerEntry
    lanes: ServerLanes
    clock: Clock
    log: EventLog
    locate: Callable[[PublishedWeights], str]
    limits: ServerLimits
    api_key: str
    rollout: RolloutSection
    client: str
    lease_s: float


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Tokens that a server has sent, passed from the I/O loop."""

    request: ServerRequest
    wire_id: str
    versions: Sequence[int]  # of the weights in use when the call was sent, then of weights loaded since
    pieces: Sequence[Piece]


_CLOSE_S = 5.0  # for the end of a pause, when the engine is no longer used
_STRAGGLER_S = 1.0  # a call that reaches the server after its pause is aborted after this time
_VAIN_CALLS = 3


class ServerEngine:
    """An engine on a server of another project; implements servers.member.RemoteEngine.

    Its lanes are `engine/K`, as wide as `limits.slots` + 1, for calls, `publish/K` for loads of weights and
    `control/K`.

    Args:
      lanes: of the engine; the first is also its name.
      locate: returns the directory of published weights, by the path that the server sees.
      receiver: see Server.
    """

    capabilities = CAPABILITIES
    hardware = ''  # see EngineStatus

    def __init__(
        self,
        lanes: ServerLanes,
        dialect: Dialect,
        connection: Connection,
        clock: Clock,
        log: EventLog,
        *,
        locate: Callable[[PublishedWeights], str],
        limits: ServerLimits,
        receiver: Connection | None = None,
    ):
        self.name, self._clock, self._log = lanes.engine, clock, log
        self._locate, self._limits = locate, limits
        self._server = Server(
            dialect, connection, clock, limits,
            lane=self.name, control_lane=lanes.control, load_lane=lanes.publish, receiver=receiver,
        )  # fmt: skip
        self._supervisor: Supervisor | None = None
        self._version = NOT_GENERATED  # of the weights in use; NOT_GENERATED: not of this run, or not known
        self._staged: tuple[PublishedWeights, str] | None = None
        self._unsettled: tuple[PublishedWeights, str] | None = None  # whose load has an unknown outcome
        self._open: dict[str, ServerRequest] = {}  # in the order of arrival
        self._waiting: dict[str, ServerRequest] = {}  # open ones without a call under way, in that order
        self._calls = itertools.count()
        self._under_way = 0  # calls
        self._is_held = False  # no call is sent: the server is paused, or about to be, or its weights are unknown
        self._is_paused = self._is_swapping = False  # the reasons
        self._is_closed = False
        self._idle = clock.event(f'{self.name}: no call under way')
        self._arrivals = clock.inbox(f'{self.name}: streamed tokens')
        self._taker: asyncio.Task[None] | None = None
        self._tokens, self._busy_s, self._busy_from_s = 0, 0.0, 0.0

    def start(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._taker = supervisor.start(f'{self.name}: streamed tokens', self._take_arrivals())

    # What the pool calls; protocols.RolloutEngine and servers.member.RemoteEngine have the docstrings.

    def generate(self, request: GenerationRequest) -> ServerRequest:
        if request.version is not None:
            raise RuntimeError(f'{self.name} keeps the weights of one version only')
        self._require_servable(request)
        if request.request_id in self._open:
            raise RuntimeError(f'{self.name}: request {request.request_id} is open already')
        found = ServerRequest(request, self._clock, self.name)
        if not found.room_tokens:
            found.end('length')  # the prefix is the whole answer
            return found
        self._open[found.request_id] = self._waiting[found.request_id] = found
        self._log.write('arrive', self.name, request=found.request_id)
        self._send_waiting()
        return found

    def cancel(self, request_id: str) -> None:
        request = self._open.pop(request_id, None)
        if request is None:
            return
        request.end('cancelled')
        if self._waiting.pop(request_id, None) is None:
            self._start('abort', self._abort_call(request.wire_id))

    def open_requests(self) -> list[GenerationRequest]:
        """Lists the requests on the server in the order of arrival, then the waiting ones."""
        sent = [request for name, request in self._open.items() if name not in self._waiting]
        return [request.request for request in (*sent, *self._waiting.values())]

    def status(self) -> EngineStatus:
        rate = self._tokens / self._busy_s if self._busy_s else 0.0
        running = len(self._open) - len(self._waiting)
        waiting, where = len(self._waiting), (self._server.url,)
        return EngineStatus(self.name, self._version, running, waiting, rate, where, self.hardware)

    async def stage(self, published: PublishedWeights) -> None:
        """Returns when the files are available; the server loads them in `swap`."""
        self._staged = published, await self._server.prepare(published, self._locate)

    async def swap(self, version: int) -> float:
        if self._staged is None or self._staged[0].version != version:
            raise RuntimeError(f'{self.name}: version {version} is to be swapped in, and another or none is staged')
        begun_s, self._is_swapping = self._clock.now(), True
        try:
            await self._hold(f'swap of version {version}', self._server.keeps_answers)
            await self._load(self._staged)
        finally:
            self._is_swapping = False
        await self._go_on()
        pause_s = self._clock.now() - begun_s
        return pause_s

    async def pin(self, published: PublishedWeights) -> None:
        raise RuntimeError(f'{self.name} keeps the weights of one version only')

    def unpin(self, version: int) -> None:
        raise RuntimeError(f'{self.name} keeps the weights of one version only')

    async def pause(self) -> None:
        self._is_paused = True
        await self._hold('pause')

    def resume(self) -> None:
        self._is_paused = False
        self._start('resume', self._resume())

    async def ask(self) -> HeldWeights:
        if self._unsettled is not None:
            await self._hold('question after an update', self._server.keeps_answers)
            await self._load(self._unsettled)
        if self._is_held:
            await self._go_on()  # also after an action that was abandoned half-way
        name = await self._server.ask_version()
        if not self._is_held:
            name = await self._server.probe() or name
        self._version = read_version(name)
        self._send_waiting()
        return HeldWeights(self._version)

    async def fence(self) -> None:
        self._fail_open('was ended by a fence')
        self._is_paused = False
        await self._hold('fence')
        await self._go_on()

    async def close(self) -> None:
        self._is_closed = True
        if self._is_held:
            with contextlib.suppress(RemoteError):  # it is gone, or obeys another run
                await self._server.resume(_CLOSE_S)
        if self._taker is not None:
            self._taker.cancel()
        await self._server.close()

    # Calls.

    def _require_servable(self, request: GenerationRequest) -> None:
        require_fit(request, self.name, self._limits.vocab_size, self._limits.context_tokens)
        require_plain(request, self.name)

    def _send_waiting(self) -> None:
        """Sends waiting requests while places are free, in the order of arrival."""
        is_held = self._is_held or self._version == NOT_GENERATED
        while not is_held and self._waiting and self._under_way < self._limits.slots:
            request = self._waiting.pop(next(iter(self._waiting)))
            if not self._under_way:
                self._busy_from_s = self._clock.now()
            self._under_way += 1
            # new each time, as the server may know the last. No id is a prefix of another: SGLang would abort both
            request.wire_id = f'{request.request_id}/{next(self._calls)}.'
            request.versions = [self._version]
            self._start(f'request {request.request_id}', self._call(request))

    async def _call(self, request: ServerRequest) -> None:
        """Makes one call and handles its outcome; the request may have been cancelled meanwhile."""
        before = request.room_tokens
        try:
            await self._converse(request)
        except ReplyError as error:
            if self._is_open(request):
                del self._open[request.request_id]
                request.fail(RequestFailedError(f'{self.name}: request {request.request_id}: {error}'))
        finally:
            now_s, new_tokens = self._clock.now(), before - request.room_tokens
            self._tokens += new_tokens
            fields = {'request': request.request_id, 'tokens': new_tokens}
            self._log.write('receive', self.name, engine=self.name, **fields)
            self._busy_s, self._busy_from_s = self._busy_s + now_s - self._busy_from_s, now_s
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()
        self._send_waiting()

    async def _converse(self, request: ServerRequest) -> None:
        """Makes one call. `_take_arrivals` delivers its tokens, all of them before it ends. Raises ReplyError."""
        wire_id, versions, before = request.wire_id, request.versions, request.room_tokens
        put = lambda pieces: self._arrivals.put(Arrival(request, wire_id, versions, pieces))
        reason = await self._server.stream(self._make_call(request), put)
        if self._is_open(request):
            self._settle(request, reason, before - request.room_tokens)

    def _make_call(self, request: ServerRequest) -> Call:
        seeds, streams, forms = self._server.seeds, self._server.streams, self._limits.forms
        return make_call(request.request, request.tokens, request.wire_id, seeds=seeds, streams=streams, forms=forms)

    def _is_open(self, request: ServerRequest) -> bool:
        """Whether the request is open: not after a `cancel` or a `fence`, even if the same request came again."""
        return self._open.get(request.request_id) is request

    async def _take_arrivals(self) -> None:
        while True:
            arrival = await self._arrivals.take()
            request = arrival.request
            for piece in arrival.pieces:
                if not self._is_open(request) or request.wire_id != arrival.wire_id:
                    break  # it was cancelled, or continues elsewhere
                version = read_version(piece.version) if piece.version else arrival.versions[0]
                if fault := self._find_fault(piece, version, arrival):
                    del self._open[request.request_id]
                    request.fail(RequestFailedError(f'{self.name}: request {request.request_id}: {fault}'))
                    self._start('abort', self._abort_call(arrival.wire_id))
                elif len(piece.tokens):
                    # prompts of later calls contain answer tokens
                    context = {} if request.received_tokens else piece.context
                    request.take(Segment(piece.tokens, piece.logprobs, version, piece.columns, context))

    def _find_fault(self, piece: Piece, version: int, arrival: Arrival) -> str:
        """Describes the fault of a piece; '' = none."""
        if len(piece.tokens) > arrival.request.room_tokens:
            return f'the server sent {len(piece.tokens)} tokens, and {arrival.request.room_tokens} were left'
        if version not in arrival.versions:
            return f'the server answered under version {piece.version!r}, and {arrival.versions[-1]} was loaded last'
        if not piece.version and len(arrival.versions) > 1:
            return f'the server does not say which of the versions {[*arrival.versions]} generated its tokens'
        return ''

    def _settle(self, request: ServerRequest, reason: FinishWord, new_tokens: int) -> None:
        """Settles a call that ended with `new_tokens`; the rest of an aborted answer waits for the next call."""
        if reason == 'abort' and not request.room_tokens:
            reason = 'length'
        if reason != 'abort':
            del self._open[request.request_id]
            request.end(reason)
            return
        request.vain_calls = 0 if new_tokens or self._is_held else request.vain_calls + 1
        if request.vain_calls == _VAIN_CALLS:
            raise ReplyError(f'the server aborted it {_VAIN_CALLS} times before its first token')
        self._waiting[request.request_id] = request
        self._waiting = {name: one for name, one in self._open.items() if name in self._waiting}

    async def _abort_call(self, wire_id: str) -> None:
        try:
            await self._server.abort(wire_id)
        except OutcomeUnknownError:
            return  # its answer would not be delivered anyway

    # Control.

    async def _hold(self, action: str, keeps_answers: bool = False) -> None:
        """Returns when the server is paused and, unless it keeps answers, all generated tokens are delivered."""
        self._is_held = True
        await self._server.pause(action, keeps_answers)
        await self._wait_idle(action, keeps_answers)

    async def _wait_idle(self, action: str, keeps_answers: bool = False) -> None:
        """Returns when no call is under way, or at once if answers are kept; aborts calls that missed the pause."""
        while self._under_way and not keeps_answers:
            self._idle.clear()
            if not await self._clock.wait(self._idle, _STRAGGLER_S):
                await self._server.abort('', action)

    async def _go_on(self) -> None:
        """Ends the server's pause unless there is still a reason for it."""
        if self._is_paused or self._is_swapping or self._unsettled is not None:
            return
        await self._server.resume()
        if not (self._is_closed or self._is_paused or self._is_swapping):
            self._is_held = False
            self._send_waiting()

    async def _resume(self) -> None:
        try:
            await self._go_on()
        except RemoteError as error:
            self._fail_open(str(error))

    def _fail_open(self, why: str) -> None:
        """Fails every request here; each continues elsewhere with its received tokens."""
        for request in list(self._open.values()):
            request.fail(RequestFailedError(f'{self.name}: request {request.request_id}: {why}'))
        self._open, self._waiting = {}, {}

    async def _load(self, update: tuple[PublishedWeights, str]) -> None:
        """Loads weights into the paused server; no call is sent until it is known which weights it holds."""
        self._version, self._unsettled = NOT_GENERATED, update
        await self._server.load(*update)
        self._version, self._unsettled = update[0].version, None
        for name, request in self._open.items():
            if name not in self._waiting:  # the server has kept it
                request.versions.append(self._version)

    def _start(self, name: str, coroutine: Coroutine[object, object, None]) -> None:
        assert self._supervisor is not None, 'the engine was not started'
        self._supervisor.start(f'{self.name}: {name}', coroutine)


def connect(parts: ClientParts, dialect: Dialect) -> ServerEngine:
    """Makes the client of a server of another project that speaks `dialect`."""
    return ServerEngine(
        parts.lanes, dialect, Connection(parts.entry.url, parts.api_key), parts.clock, parts.log,
        locate=parts.locate, limits=parts.limits,
        receiver=Connection(parts.entry.receiver, parts.api_key) if parts.entry.receiver else None,
    )  # fmt: skip
