"""A server of this project as an engine: it stages new weights while it decodes, and streams its answers.

Unlike a server of another project it continues to generate while weights are exchanged, and tells the version of each
token. Streamed tokens are delivered at once, so that they are kept when the server dies.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from areal_jax.control.event_writer import EventLog
from areal_jax.lanes import ServerLanes
from areal_jax.protocols import Clock, Event
from areal_jax.rollout.http.clients.connection import Connection, NoReplyError, StatusError
from areal_jax.rollout.http.clients.engine import Arrival, ClientParts, ServerEngine
from areal_jax.rollout.http.clients.server import (
    ServerLimits,
    ServerRequest,
    make_own_call,
    read_version,
    require_fit,
    require_own,
)
from areal_jax.rollout.http.clients.vllm import OwnDialect, StagingDialect
from areal_jax.rollout.http.pauses import FENCED
from areal_jax.rollout.http.wire.exchange import Call, Piece
from areal_jax.rollout.servers.member import FencedError, HeldWeights, OutcomeUnknownError, RefusedError, RemoteError
from areal_jax.types import (
    NOT_GENERATED,
    EngineCapabilities,
    GenerationRequest,
    KvPolicy,
    PublishedWeights,
    Work,
)

Result = TypeVar('Result')
RENEWAL = 1 / 6  # of a lease, between two renewals: stalls of 5 / 6 of it are survived


class OwnEngine(ServerEngine):
    """An engine on a server of this project; implements servers.member.RemoteEngine.

    Args:
      dialect: the client's side of the server's protocol.
      kv_policy: the server's policy at a swap (rollout.kv_policy of its config).
    """

    def __init__(
        self,
        lanes: ServerLanes,
        dialect: StagingDialect,
        connection: Connection,
        clock: Clock,
        log: EventLog,
        *,
        locate: Callable[[PublishedWeights], str],
        limits: ServerLimits,
        kv_policy: KvPolicy,
    ):
        self._dialect, self._connection = dialect, connection
        super().__init__(lanes, dialect, connection, clock, log, locate=locate, limits=limits)
        self.capabilities = EngineCapabilities(
            logprobs=('behavior', 'sampling'),
            spans=True,
            abort=True,
            pause_modes=('retract',),
            staging=True,
            update=(kv_policy,),
            pinned=False,
        )
        self._control_lane, self._publish_lane = lanes.control, lanes.publish
        self._pause_over = clock.event(f'{self.name}: end of its pause')

    async def stage(self, published: PublishedWeights) -> None:
        directory = self._locate(published)
        work = Work('load', 1, {'version': published.version}, in_background=True)
        stage = lambda: self._dialect.stage(self._connection, directory)
        await self._control(self._publish_lane, f'stage of version {published.version}', stage, work)
        self._staged = published, directory

    async def swap(self, version: int) -> float:
        if self._staged is None or self._staged[0].version != version:
            raise RuntimeError(f'{self.name}: version {version} is to be swapped in, and another or none is staged')
        swap = lambda: self._dialect.swap(self._connection, str(version))
        pause_s = await self._control(self._control_lane, f'swap of version {version}', swap, Work('control'))
        self._note_interruption(version)
        self._version, self._staged = version, None
        self._send_waiting()
        return pause_s

    async def pause(self) -> None:
        self._pause_over.set()  # of an earlier pause, whose renewal has not ended
        over = self._pause_over = self._clock.event(self._pause_over.name)
        self._start('renewal of its pause', self._renew(over))
        try:
            await super().pause()
        except BaseException:
            over.set()
            raise

    def resume(self) -> None:
        self._pause_over.set()
        super().resume()

    async def fence(self) -> None:
        """Registers this client: the server ends every request, and from then on obeys this client alone."""
        self._pause_over.set()
        self._fail_open('was ended by a fence')
        self._is_held, self._is_paused = True, False
        register = lambda: self._dialect.register(self._connection)
        await self._control(self._control_lane, 'fence', register, Work('control'))
        await self._wait_idle('fence')
        self._is_held = False

    async def ask(self) -> HeldWeights:
        """Asks for the weights; weights without a digest are the server's initial ones, no version of this run."""
        ask = lambda: self._dialect.ask(self._connection)
        held = await self._control(self._control_lane, 'question what it holds', ask, Work('control'))
        if held.client != self._connection.client:
            self._version = NOT_GENERATED  # no call is sent before the next swap
            return HeldWeights(NOT_GENERATED, held.digest or None, is_fenced=True)
        if self._is_held:
            await self._go_on()  # after an action that was abandoned half-way
        self._version = read_version(held.version) if held.digest else NOT_GENERATED
        self._send_waiting()
        return HeldWeights(self._version, held.digest or None, paused=held.find_foreign_pause(self._connection.client))

    async def close(self) -> None:
        self._pause_over.set()
        await super().close()

    async def _renew(self, over: Event) -> None:
        """Renews the lease until the pause is over; if it has lapsed, fails the open requests here."""
        lease_s = self._dialect.lease_s
        renew = lambda: self._dialect.renew(self._connection)
        while not await self._clock.wait(over, lease_s * RENEWAL):
            try:
                await self._control(
                    self._control_lane, 'renewal of its pause', renew, Work('control'), lease_s * RENEWAL
                )
            except FencedError as error:
                self._fail_open(str(error))
                return
            except RemoteError:
                pass  # a later one may still come in time

    def _require_servable(self, request: GenerationRequest) -> None:
        require_fit(request, self.name, self._limits.vocab_size, self._limits.context_tokens)
        require_own(request, self.name)

    def _note_interruption(self, version: int) -> None:
        requests = [name for name in self._open if name not in self._waiting]
        if requests and self._version != NOT_GENERATED:
            versions = {'from_version': self._version, 'to_version': version}
            self._log.write('interrupt', self.name, engine=self.name, requests=requests, **versions)

    def _make_call(self, request: ServerRequest) -> Call:
        return make_own_call(request.request, request.tokens, request.wire_id, self._limits.forms)

    def _find_fault(self, piece: Piece, version: int, arrival: Arrival) -> str:
        room = arrival.request.room_tokens
        if version == NOT_GENERATED or len(piece.tokens) > room:
            return f'{len(piece.tokens)} tokens under version {piece.version!r}, {room} were left'
        return ''

    async def _control(
        self, lane: str, action: str, act: Callable[[], Awaitable[Result]], work: Work, deadline_s: float | None = None
    ) -> Result:
        """Runs an action; raises RefusedError if the server refused it, OutcomeUnknownError without a reply.

        Raises FencedError if the server no longer obeys this client.
        """
        try:
            return await self._clock.call(lane, act, work, self._limits.load_s if deadline_s is None else deadline_s)
        except StatusError as error:
            kind: type[RemoteError] = RefusedError if 400 <= error.status < 500 else OutcomeUnknownError
            kind = FencedError if error.status == FENCED else kind
            raise kind(f'{self.name}: {action}: {error}') from error
        except (NoReplyError, TimeoutError) as error:
            raise OutcomeUnknownError(f'{self.name}: {action}: {error}') from error


def connect(parts: ClientParts) -> OwnEngine:
    """Makes the client of one server of this project."""
    connection = Connection(parts.entry.url, parts.api_key, parts.entry.holder, client=parts.client)
    return connect_dialect(parts, OwnDialect(parts.lease_s), connection)


def connect_dialect(parts: ClientParts, dialect: StagingDialect, connection: Connection) -> OwnEngine:
    """Makes the client of one server of this project that speaks `dialect`."""
    return OwnEngine(
        parts.lanes, dialect, connection, parts.clock, parts.log,
        locate=parts.locate, limits=parts.limits, kv_policy=parts.rollout.kv_policy,
    )  # fmt: skip
